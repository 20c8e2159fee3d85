"""The end of the agent: what is put back, and what the journal has of that."""

from __future__ import annotations

from pathlib import Path

import msgspec

from agent.journal.decisions import DecisionJournal
from agent.qrm.actuator.originals import OriginalsJournal
from agent.qrm.actuator.pending_originals import PendingOriginals
from agent.qrm.actuator.restore import restore_all
from agent.qrm.actuator.writer import KnobWriter
from api.decision import Outcome, OutcomeStatus
from api.knobs import Knob
from tests.agent.qrm.actuator.trees import Tree
from tests.builders.four_cpu_node import busy_cycle


def test_a_container_created_after_the_last_cycle_is_journalled_before_it_is_restored(tmp_path: Path) -> None:
    tree, pending, journal = Tree(tmp_path / "cgroup", "v1"), PendingOriginals(), DecisionJournal(None)
    files, originals = KnobWriter(tree.hierarchy), OriginalsJournal(tmp_path / "originals.json", "boot")
    tree.make("/batch")
    tree.file("/batch", "cpuset.cpus").write_text("1\n")
    decision = msgspec.structs.replace(tree.decision("/batch", Knob.CPUSET, "1"), pod="default/batch")
    adopted = Outcome(decision=decision, status=OutcomeStatus.APPLIED, before="0-3", after="1")
    pending.add("/batch", {Knob.CPUSET: "0-3"}, 1.0, outcomes={Knob.CPUSET: adopted})
    pending.adopt(files, originals)
    # The outcomes of the last cycle are in the journal already.
    latest = msgspec.structs.replace(busy_cycle(7, outcomes=()), runtime_outcomes=(adopted,))
    assert restore_all(originals, files, None, latest, journal, pending.outcomes()) == 0
    entries = [(entry.trigger, entry.outcome.before, entry.outcome.after) for entry in journal.entries()]
    assert entries == [("nri", "0-3", "1"), ("end", "1", "0-3")]
    assert {entry.outcome.decision.pod for entry in journal.entries()} == {"default/batch"}
    assert restore_all(originals, files, None, latest, journal) == 0
    assert len(journal.entries()) == 2

"""The end of the agent: what is put back, and what the journal has of that."""

from __future__ import annotations

from pathlib import Path

import msgspec

from agent.journal.decisions import DecisionJournal
from agent.qrm.actuator.originals import OriginalsJournal
from agent.qrm.actuator.pending_originals import PendingOriginals
from agent.qrm.actuator.shutdown import restore_all
from agent.qrm.actuator.writer import KnobWriter
from api.decision import Outcome, OutcomeStatus
from api.knobs import Knob
from tests.agent.qrm.actuator.trees import Tree
from tests.builders.four_cpu_node import busy_cycle


def test_who_was_made_after_the_latest_round_is_told_of_before_he_is_put_back(tmp_path: Path) -> None:
    tree, foretold, journal = Tree(tmp_path / "cgroup", "v1"), PendingOriginals(), DecisionJournal(None)
    files, originals = KnobWriter(tree.hierarchy), OriginalsJournal(tmp_path / "originals.json", "boot")
    tree.make("/batch")
    tree.file("/batch", "cpuset.cpus").write_text("1\n")
    decision = msgspec.structs.replace(tree.decision("/batch", Knob.CPUSET, "1"), pod="default/batch")
    made = Outcome(decision=decision, status=OutcomeStatus.APPLIED, before="0-3", after="1")
    foretold.add("/batch", {Knob.CPUSET: "0-3"}, 1.0, outcomes={Knob.CPUSET: made})
    foretold.adopt(files, originals)
    # What the latest round told is in the journal already.
    latest = msgspec.structs.replace(busy_cycle(7, outcomes=()), made=(made,))
    assert restore_all(originals, files, None, latest, journal, foretold.outcomes()) == 0
    told = [(one.trigger, one.outcome.before, one.outcome.after) for one in journal.entries()]
    assert told == [("nri", "0-3", "1"), ("end", "1", "0-3")]
    assert {one.outcome.decision.pod for one in journal.entries()} == {"default/batch"}
    assert restore_all(originals, files, None, latest, journal) == 0
    assert len(journal.entries()) == 2

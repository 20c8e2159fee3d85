"""The end of the agent: what is put back, and what the journal has of that."""

from __future__ import annotations

from pathlib import Path

import msgspec

from agent.putting_back import put_back
from agent.qrm.foretold import Foretold
from agent.qrm.knobs import KnobFiles
from agent.qrm.originals import Originals
from agent.report.journal import DecisionJournal
from api.decisions import Outcome, Status
from api.knobs import Knob
from tests.agent.qrm.trees import Tree
from tests.fakes import busy_round


def test_who_was_made_after_the_latest_round_is_told_of_before_he_is_put_back(tmp_path: Path) -> None:
    tree, foretold, journal = Tree(tmp_path / "cgroup", "v1"), Foretold(), DecisionJournal(None)
    files, originals = KnobFiles(tree.hierarchy), Originals(tmp_path / "originals.json", "boot")
    tree.make("/batch")
    tree.file("/batch", "cpuset.cpus").write_text("1\n")
    decision = msgspec.structs.replace(tree.decision("/batch", Knob.CPUSET, "1"), pod="default/batch")
    made = Outcome(decision=decision, status=Status.APPLIED, before="0-3", after="1")
    foretold.tell("/batch", {Knob.CPUSET: "0-3"}, 1.0, done={Knob.CPUSET: made})
    foretold.adopt(files, originals)
    # What the latest round told is in the journal already.
    latest = msgspec.structs.replace(busy_round(7, outcomes=()), made=(made,))
    assert put_back(originals, files, None, latest, journal, foretold.outcomes()) == 0
    told = [(one.trigger, one.outcome.before, one.outcome.after) for one in journal.entries()]
    assert told == [("nri", "0-3", "1"), ("end", "1", "0-3")]
    assert {one.outcome.decision.pod for one in journal.entries()} == {"default/batch"}
    assert put_back(originals, files, None, latest, journal) == 0
    assert len(journal.entries()) == 2

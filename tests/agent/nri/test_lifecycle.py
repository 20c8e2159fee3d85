"""Shutdown of the NRI plugin while the runtime is creating a container."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import pytest

from agent.config.config import AgentConfig
from agent.nri.lifecycle import CREATION_WAIT_S, NriLifecycle
from agent.qrm.actuator.originals import OriginalsJournal
from agent.qrm.actuator.pending_originals import PendingOriginals
from agent.qrm.actuator.writer import KnobWriter
from api.decision import ActMode, Outcome, OutcomeStatus
from api.knobs import Knob
from tests.agent.qrm.actuator.trees import Tree

LATE, NEVER = "/late", "/never"


class CreatingRuntime(PendingOriginals):
    """Creates the cgroup between the first and the second poll of the shutdown, and writes its value two polls later."""

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        self._tree, self._polls = tree, 0

    def adopt(self, files: KnobWriter, journal: OriginalsJournal) -> int:
        self._polls += 1
        if self._polls == 2:
            self._tree.make(LATE)
        elif self._polls == 4:
            self._tree.file(LATE, "cpuset.cpus").write_text("3\n")
        return super().adopt(files, journal)


def lifecycle_of(tree: Tree, state_dir: Path) -> NriLifecycle:
    return NriLifecycle(AgentConfig(), ActMode.DRY_RUN, None, cast(Any, None), tree.hierarchy, state_dir)


async def test_a_container_under_creation_is_restored_and_a_missing_one_is_not_waited_for(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "cgroup", "v1")
    files, originals = KnobWriter(tree.hierarchy), OriginalsJournal(tmp_path / "originals.json", "boot")
    lifecycle = lifecycle_of(tree, tmp_path)
    lifecycle.pending_originals.add(NEVER, {Knob.CPUSET: "0-3"}, time.monotonic() - CREATION_WAIT_S)
    lifecycle.end(files, originals)
    assert lifecycle.pending_originals.pending(0.0) == {NEVER: {Knob.CPUSET: "0-3"}}
    lifecycle.pending_originals = CreatingRuntime(tree)
    decision = tree.decision(LATE, Knob.CPUSET, "3", cgroup_id=0)
    outcome = Outcome(decision=decision, status=OutcomeStatus.APPLIED, before="0-3", after="3")
    lifecycle.pending_originals.add(LATE, {Knob.CPUSET: "0-3"}, time.monotonic(), outcomes={Knob.CPUSET: outcome})
    (adopted,) = lifecycle.end(files, originals)
    assert (adopted.status, adopted.after) == (OutcomeStatus.APPLIED, "3")
    assert [(entry.cgroup, entry.knob) for entry in originals.entries()] == [(LATE, Knob.CPUSET)]
    originals.restore(files)
    assert tree.file(LATE, "cpuset.cpus").read_text() == "0-3\n"


async def test_a_bug_in_adopting_pending_originals_does_not_prevent_the_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tree = Tree(tmp_path / "cgroup", "v1")
    lifecycle = lifecycle_of(tree, tmp_path)

    def bug(*_: object) -> int:
        raise TypeError("a bug")

    monkeypatch.setattr(lifecycle.pending_originals, "adopt", bug)
    assert lifecycle.end(KnobWriter(tree.hierarchy), OriginalsJournal(tmp_path / "originals.json", "boot")) == ()
    assert "TypeError: a bug" in caplog.text

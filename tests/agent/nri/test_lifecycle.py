"""Shutdown of the NRI plugin while the runtime is creating a container."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

from agent.config.config import AgentConfig
from agent.nri.lifecycle import CREATION_POLL_S, CREATION_WAIT_S, NriLifecycle
from agent.qrm.actuator.originals import OriginalsJournal
from agent.qrm.actuator.writer import KnobWriter
from api.decision import ActMode, Outcome, OutcomeStatus
from api.knobs import Knob
from tests.agent.qrm.actuator.trees import Tree

LATE, NEVER = "/late", "/never"


async def test_a_container_under_creation_is_restored_and_a_missing_one_is_not_waited_for(
    tmp_path: Path,
) -> None:
    tree = Tree(tmp_path / "cgroup", "v1")
    files, originals = KnobWriter(tree.hierarchy), OriginalsJournal(tmp_path / "originals.json", "boot")
    unused = cast(Any, None)
    lifecycle = NriLifecycle(AgentConfig(), ActMode.DRY_RUN, unused, unused, tree.hierarchy, tmp_path)
    lifecycle.pending_originals.add(NEVER, {Knob.CPUSET: "0-3"}, time.monotonic() - CREATION_WAIT_S)
    lifecycle.end(files, originals)
    decision = tree.decision(LATE, Knob.CPUSET, "3", cgroup_id=0)
    outcome = Outcome(decision=decision, status=OutcomeStatus.APPLIED, before="0-3", after="3")
    lifecycle.pending_originals.add(LATE, {Knob.CPUSET: "0-3"}, time.monotonic(), outcomes={Knob.CPUSET: outcome})

    def make() -> None:
        tree.make(LATE)
        time.sleep(CREATION_POLL_S * 3)  # a runtime writes some time after it created the cgroup
        tree.file(LATE, "cpuset.cpus").write_text("3\n")

    making = threading.Timer(0.2, make)
    making.start()
    lifecycle.end(files, originals)
    making.join()
    assert [(entry.cgroup, entry.knob) for entry in originals.entries()] == [(LATE, Knob.CPUSET)]
    assert lifecycle.pending_originals.pending(0.0) == {NEVER: {Knob.CPUSET: "0-3"}}
    originals.restore(files)
    assert tree.file(LATE, "cpuset.cpus").read_text() == "0-3\n"


async def test_a_bug_in_adopting_pending_originals_does_not_prevent_the_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tree = Tree(tmp_path / "cgroup", "v1")
    unused = cast(Any, None)
    lifecycle = NriLifecycle(AgentConfig(), ActMode.DRY_RUN, unused, unused, tree.hierarchy, tmp_path)

    def bug(*_: object) -> int:
        raise TypeError("a bug")

    monkeypatch.setattr(lifecycle.pending_originals, "adopt", bug)
    assert lifecycle.end(KnobWriter(tree.hierarchy), OriginalsJournal(tmp_path / "originals.json", "boot")) == ()
    assert "TypeError: a bug" in caplog.text

"""The end of acting beside a runtime that is just making a container."""

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


async def test_what_a_runtime_is_still_making_is_put_back_too_and_who_never_comes_is_not_waited_for(
    tmp_path: Path,
) -> None:
    tree = Tree(tmp_path / "cgroup", "v1")
    files, originals = KnobWriter(tree.hierarchy), OriginalsJournal(tmp_path / "originals.json", "boot")
    nobody = cast(Any, None)
    side = NriLifecycle(AgentConfig(), ActMode.DRY_RUN, nobody, nobody, tree.hierarchy, tmp_path)
    side.foretold.add(NEVER, {Knob.CPUSET: "0-3"}, time.monotonic() - CREATION_WAIT_S)
    side.end(files, originals)
    given = tree.decision(LATE, Knob.CPUSET, "3", cgroup_id=0)
    told = Outcome(decision=given, status=OutcomeStatus.APPLIED, before="0-3", after="3")
    side.foretold.add(LATE, {Knob.CPUSET: "0-3"}, time.monotonic(), outcomes={Knob.CPUSET: told})

    def make() -> None:
        tree.make(LATE)
        time.sleep(CREATION_POLL_S * 3)  # as long as a runtime takes until it writes
        tree.file(LATE, "cpuset.cpus").write_text("3\n")

    making = threading.Timer(0.2, make)
    making.start()
    side.end(files, originals)
    making.join()
    assert [(entry.cgroup, entry.knob) for entry in originals.entries()] == [(LATE, Knob.CPUSET)]
    assert side.foretold.pending(0.0) == {NEVER: {Knob.CPUSET: "0-3"}}
    originals.restore(files)
    assert tree.file(LATE, "cpuset.cpus").read_text() == "0-3\n"


async def test_whatever_is_wrong_with_what_was_foretold_the_others_are_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tree = Tree(tmp_path / "cgroup", "v1")
    nobody = cast(Any, None)
    side = NriLifecycle(AgentConfig(), ActMode.DRY_RUN, nobody, nobody, tree.hierarchy, tmp_path)

    def bug(*_: object) -> int:
        raise TypeError("a bug")

    monkeypatch.setattr(side.foretold, "adopt", bug)
    assert side.end(KnobWriter(tree.hierarchy), OriginalsJournal(tmp_path / "originals.json", "boot")) == ()
    assert "TypeError: a bug" in caplog.text

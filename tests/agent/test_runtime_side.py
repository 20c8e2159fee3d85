"""The end of acting beside a runtime that is just making a container."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, cast

from agent.config import Config
from agent.qrm.knobs import KnobFiles
from agent.qrm.originals import Originals
from agent.runtime_side import MADE_S, RuntimeSide
from api.decisions import Act
from api.knobs import Knob
from tests.agent.qrm.trees import Tree

LATE, NEVER = "/late", "/never"


async def test_what_a_runtime_is_still_making_is_put_back_too_and_who_never_comes_is_not_waited_for(
    tmp_path: Path,
) -> None:
    tree = Tree(tmp_path / "cgroup", "v1")
    files, originals = KnobFiles(tree.hierarchy), Originals(tmp_path / "originals.json", "boot")
    nobody = cast(Any, None)
    side = RuntimeSide(Config(), Act.DRY_RUN, nobody, nobody, tree.hierarchy, tmp_path)
    side.foretold.tell(NEVER, {Knob.CPUSET: "0-3"}, time.monotonic() - MADE_S)
    side.end(files, originals)
    side.foretold.tell(LATE, {Knob.CPUSET: "0-3"}, time.monotonic())

    def make() -> None:
        tree.make(LATE)
        tree.file(LATE, "cpuset.cpus").write_text("3\n")

    making = threading.Timer(0.2, make)
    making.start()
    side.end(files, originals)
    making.join()
    assert [(entry.cgroup, entry.knob) for entry in originals.entries()] == [(LATE, Knob.CPUSET)]
    assert side.foretold.pending(0.0) == {NEVER}
    originals.restore(files)
    assert tree.file(LATE, "cpuset.cpus").read_text() == "0-3\n"

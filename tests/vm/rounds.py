"""The agent's rounds in this process: its own loop over real cgroups, pods of a file, settings of a file, every hand it has."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from agent.eviction.evictor import Evictor
from agent.eviction.signals import SignalKiller
from agent.loop import Loop
from agent.qrm.actuator import Actuator
from agent.qrm.checkpoint import Checkpoint
from agent.qrm.knobs import KnobFiles
from agent.qrm.originals import boot_id, open_originals
from agent.sense.cgroups import CgroupReader
from agent.sense.indicators import Indicators
from agent.sense.node import NodeReader
from agent.sense.pods import StaticPods
from agent.sense.podspec import Door
from agent.sense.schedstat import SchedstatWaits
from agent.sense.sensor import Sensor
from agent.sense.topology import read_topology
from agent.settings import load
from api.decisions import Act, Outcome, Round, Status
from tests.kernel.support import TestCgroup, require_writable_cgroups
from tests.live.running import eventually

KEY = "katalyst.kubewharf.io"
PROC, SYS = Path("/proc"), Path("/sys")
PAUSE_S = 0.5
"""Between two rounds."""


def pod(
    group: TestCgroup, level: str, *, cpu: float | None = None, memory: int | None = None, **wants: str
) -> dict[str, Any]:
    """A pod named for the last part of its cgroup's path; `wants` are of its memory_enhancement."""
    annotations = {f"{KEY}/qos_level": level}
    if wants:
        annotations[f"{KEY}/memory_enhancement"] = msgspec.json.encode(wants).decode()
    requests = {name: str(size) for name, size in (("cpu", cpu), ("memory", memory)) if size is not None}
    container = {"name": "main", "cgroup": group.path, "resources": {"requests": requests}}
    return {"name": group.path.rpartition("/")[2], "annotations": annotations, "containers": [container]}


def write(directory: Path, settings: Mapping[str, Any], pods: list[dict[str, Any]]) -> tuple[Path, Path]:
    """A pods file and a file of settings."""
    files = directory / "pods.yaml", directory / "settings.yaml"
    for file, content in zip(files, ({"pods": pods}, settings), strict=True):
        file.write_bytes(msgspec.yaml.encode(content))
    return files


@contextmanager
def rounds(directory: Path, settings: Mapping[str, Any], pods: list[dict[str, Any]]) -> Iterator[Loop]:
    """A loop that acts; in the end everything is put back by it."""
    pods_file, settings_file = write(directory, settings, pods)
    config, hierarchy, state = load(settings_file, ()), require_writable_cgroups(), directory / "state"
    with ExitStack() as stack:
        files = stack.enter_context(closing(KnobFiles(hierarchy)))
        originals = stack.enter_context(closing(open_originals(state, boot_id())))
        sensor = Sensor(
            cgroups=stack.enter_context(closing(CgroupReader(hierarchy))),
            node=stack.enter_context(closing(NodeReader(PROC, SYS))),
            sys=SYS,
            pods=StaticPods(pods_file, Door(dialect=config.qos.dialect(), numa_nodes=read_topology(SYS).numa_nodes)),
            waits=SchedstatWaits(PROC, hierarchy),
            indicators=Indicators(),
            reclaim_root=config.memory.reclaim_root,
        )
        killer = stack.enter_context(closing(SignalKiller(hierarchy)))
        evictor = Evictor(config, killer) if config.eviction.plugins else None
        actuator = Actuator(files, originals, Act.ON)
        checkpoint = Checkpoint(state, boot_id())
        yield Loop(config=config, sensor=sensor, actuator=actuator, sinks=[], evictor=evictor, checkpoint=checkpoint)
        assert Status.REFUSED not in {outcome.status for outcome in originals.restore(files)}
        assert originals.entries() == ()


def turn(loop: Loop) -> Round:
    """One round, in which nothing failed that every machine has."""
    done = loop.turn("tick")
    assert [
        s for s in done.snapshot.sources if not s.ok and s.name in ("advisor", "actuator", "eviction", "pods")
    ] == []
    return done


def turn_until(loop: Loop, what: str, check: Callable[[Round], bool]) -> list[Round]:
    """Rounds up to the first of which that holds."""
    done: list[Round] = []

    def held() -> bool:
        done.append(turn(loop))
        if not (found := check(done[-1])):
            time.sleep(PAUSE_S)
        return found

    try:
        eventually(what, held)
    except AssertionError:
        raise AssertionError(f"{what}: after {len(done)} rounds {_told(done[-1])}") from None
    return done


def _told(done: Round) -> str:
    """What plugins and memory advice said last."""
    thresholds = done.evictions.thresholds if done.evictions is not None else ()
    verdicts = done.memory.verdicts if done.memory is not None else ()
    return " ".join((*(each.verdict.text for each in thresholds), *(verdict.text for verdict in verdicts)))


def refused(done: Round) -> list[Outcome]:
    """What the kernel did not take in that round."""
    return [outcome for outcome in done.outcomes if outcome.status in (Status.REFUSED, Status.MISMATCH)]

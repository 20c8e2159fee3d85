"""Runs the agent's loop in this process, on real cgroups, with pods and settings from files and every actuator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from agent.eviction.runner import EvictionRunner
from agent.eviction.signals import SignalEvictor
from agent.loop import Loop
from agent.qrm.actuator.actuator import Actuator
from agent.qrm.actuator.checkpoint import CpusetCheckpoint
from agent.qrm.actuator.state_dir import open_originals, read_boot_id
from agent.qrm.actuator.writer import KnobWriter
from agent.sensors.cgroup.cgroup_reader import CgroupReader
from agent.sensors.cgroup.schedstat import SchedstatRunqLatency
from agent.sensors.node.machine import read_topology
from agent.sensors.node.node_reader import NodeReader
from agent.sensors.pods.pod_indicators import PodIndicatorScraper
from agent.sensors.pods.pod_spec import PodParsingContext
from agent.sensors.pods.static_pods import StaticPods
from agent.sensors.snapshot import Sensor
from api.decision import ActMode, Cycle, Outcome, OutcomeStatus
from tests.builders.settings import load_config
from tests.builders.waiting import until
from tests.kernel.real_cgroups import TestCgroup, require_writable_cgroups

KEY = "katalyst.kubewharf.io"
PROC, SYS = Path("/proc"), Path("/sys")
PAUSE_S = 0.5
"""Seconds between two cycles."""


def pod(
    group: TestCgroup, level: str, *, cpu: float | None = None, memory: int | None = None, **wants: str
) -> dict[str, Any]:
    """Return a pod named after the last part of its cgroup's path; `wants` is its memory_enhancement."""
    annotations = {f"{KEY}/qos_level": level}
    if wants:
        annotations[f"{KEY}/memory_enhancement"] = msgspec.json.encode(wants).decode()
    requests = {name: str(size) for name, size in (("cpu", cpu), ("memory", memory)) if size is not None}
    container = {"name": "main", "cgroup": group.path, "resources": {"requests": requests}}
    return {"name": group.path.rpartition("/")[2], "annotations": annotations, "containers": [container]}


def write(directory: Path, settings: Mapping[str, Any], pods: list[dict[str, Any]]) -> tuple[Path, Path]:
    """Write a pods file and a settings file."""
    files = directory / "pods.yaml", directory / "settings.yaml"
    for file, content in zip(files, ({"pods": pods}, settings), strict=True):
        file.write_bytes(msgspec.yaml.encode(content))
    return files


@contextmanager
def acting_loop(directory: Path, settings: Mapping[str, Any], pods: list[dict[str, Any]]) -> Iterator[Loop]:
    """Yield a loop that acts; it restores everything at the end."""
    pods_file, settings_file = write(directory, settings, pods)
    config, hierarchy, state = load_config(settings_file, ()), require_writable_cgroups(), directory / "state"
    with ExitStack() as stack:
        files = stack.enter_context(closing(KnobWriter(hierarchy)))
        originals = stack.enter_context(closing(open_originals(state, read_boot_id())))
        sensor = Sensor(
            cgroups=stack.enter_context(closing(CgroupReader(hierarchy))),
            node=stack.enter_context(closing(NodeReader(PROC, SYS))),
            sys=SYS,
            pods=StaticPods(
                pods_file, PodParsingContext(dialect=config.qos.dialect(), numa_nodes=read_topology(SYS).numa_nodes)
            ),
            waits=SchedstatRunqLatency(PROC, hierarchy),
            indicators=PodIndicatorScraper(),
        )
        killer = stack.enter_context(closing(SignalEvictor(hierarchy)))
        evictor = EvictionRunner(config, killer) if config.eviction.plugins else None
        actuator = Actuator(files, originals, ActMode.ON)
        checkpoint = CpusetCheckpoint(state, read_boot_id())
        yield Loop(config=config, sensor=sensor, actuator=actuator, sinks=[], evictor=evictor, checkpoint=checkpoint)
        assert OutcomeStatus.REFUSED not in {outcome.status for outcome in originals.restore(files)}
        assert originals.entries() == ()


def run_cycle(loop: Loop) -> Cycle:
    """Run one cycle and check that no common source failed."""
    done = loop.run_cycle("tick")
    assert [
        s for s in done.snapshot.sources if not s.ok and s.name in ("advisor", "actuator", "eviction", "pods")
    ] == []
    return done


def run_cycles_until(loop: Loop, what: str, check: Callable[[Cycle], bool]) -> list[Cycle]:
    """Run cycles up to the first that satisfies the condition."""
    done: list[Cycle] = []

    def held() -> bool:
        done.append(run_cycle(loop))
        if not (result := check(done[-1])):
            time.sleep(PAUSE_S)
        return result

    try:
        until(held, what)
    except AssertionError:
        raise AssertionError(f"{what}: after {len(done)} rounds {_last_reasons(done[-1])}") from None
    return done


def _last_reasons(done: Cycle) -> str:
    """Return the latest reasons of plugins and memory advice."""
    thresholds = done.evictions.thresholds if done.evictions is not None else ()
    verdicts = done.memory.reasons if done.memory is not None else ()
    return " ".join((*(each.reason.text for each in thresholds), *(verdict.text for verdict in verdicts)))


def refused(done: Cycle) -> list[Outcome]:
    """Return the outcomes that the kernel refused in a cycle."""
    return [outcome for outcome in done.outcomes if outcome.status in (OutcomeStatus.REFUSED, OutcomeStatus.MISMATCH)]

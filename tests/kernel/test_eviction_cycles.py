"""Cycles of the agent on real cgroups: a pod that uses more than it requested is evicted, by SIGTERM or else SIGKILL.
No other pod is.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from agent.config.advisor import AdvisorConfig
from agent.config.config import AgentConfig
from agent.config.eviction import EvictionConfig, RssOveruseConfig
from agent.eviction.runner import EvictionRunner
from agent.eviction.signals import SignalEvictor
from agent.loop import Loop
from agent.sensors.cgroup.cgroup_reader import CgroupReader
from agent.sensors.cgroup.hierarchy import Hierarchy
from agent.sensors.cgroup.schedstat import SchedstatRunqLatency
from agent.sensors.node.node_reader import NodeReader
from agent.sensors.pods.pod_indicators import PodIndicatorScraper
from agent.sensors.snapshot import Sensor
from api.decision import Cycle
from api.eviction import EvictionEventReason
from api.pod import Container, Pod
from api.qos import QoSLevel
from api.units import MIB
from tests.agent.test_loop import Scripted
from tests.builders.waiting import PATIENCE_S, until
from tests.kernel.real_cgroups import TestCgroup, cgroup
from tests.kernel.test_signal_killer import IGNORING, SLEEP, run

pytestmark = pytest.mark.kernel

RSS = "rss-overuse-eviction-plugin"
EIGHT_MIB = "data = b'x' * (8 << 20)\n"


class Listed:
    """A PodSource of these pods."""

    def __init__(self, *pods: Pod) -> None:
        self._pods = pods

    def read(self) -> tuple[Pod, ...]:
        return self._pods


def pod(name: str, group: TestCgroup, request: int, qos: QoSLevel = QoSLevel.RECLAIMED) -> Pod:
    container = Container(name=name, cgroup=group.path, memory_request_bytes=request)
    return Pod(uid=f"default/{name}", namespace="default", name=name, qos=qos, containers=(container,))


class Node:
    """An online and a batch pod of 8 MiB each; the batch pod requested one, the other a hundred."""

    def __init__(self, hierarchy: Hierarchy, web: TestCgroup, batch: TestCgroup, program: str) -> None:
        self.hierarchy = hierarchy
        self.online, self.batch = run(web, EIGHT_MIB + SLEEP), run(batch, EIGHT_MIB + program)
        self.pods = Listed(pod("web", web, 100 * MIB, QoSLevel.SHARED), pod("batch", batch, MIB))

    @contextmanager
    def loop(self, **settings: Any) -> Iterator[Loop]:
        config = AgentConfig(
            advisor=AdvisorConfig(policy="none"),
            eviction=EvictionConfig(plugins=(RSS,), interval_s=0.01, **settings),
        )
        with ExitStack() as stack:
            sensor = Sensor(
                cgroups=stack.enter_context(closing(CgroupReader(self.hierarchy))),
                node=stack.enter_context(closing(NodeReader(Path("/proc"), Path("/sys")))),
                sys=Path("/sys"), pods=self.pods, indicators=PodIndicatorScraper(),
                waits=SchedstatRunqLatency(Path("/proc"), self.hierarchy),
            )  # fmt: skip
            killer = stack.enter_context(closing(SignalEvictor(self.hierarchy)))
            idle = cast(Any, Scripted(lambda _: cast(Any, None)))
            yield Loop(config=config, sensor=sensor, actuator=idle, sinks=[], evictor=EvictionRunner(config, killer))


@contextmanager
def node(hierarchy: Hierarchy, program: str) -> Iterator[Node]:
    with cgroup(hierarchy, "evict-web") as web, cgroup(hierarchy, "evict-batch") as batch:
        yield Node(hierarchy, web, batch, program)


def cycles_until(loop: Loop, done: Callable[[Cycle], object]) -> list[Cycle]:
    """Run cycles until one satisfies the condition; return all of them."""
    cycles: list[Cycle] = []

    def next_cycle() -> bool:
        cycles.append(loop.run_cycle("tick"))
        return bool(done(cycles[-1]))

    until(next_cycle)
    return cycles


def cycles_until_event(loop: Loop, reason: EvictionEventReason) -> list[Cycle]:
    """Run cycles until an event with this reason is reported."""
    return cycles_until(loop, lambda cycle: reason in {event.reason for event in cycle.kills})


def alive(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is None


def test_only_the_pod_that_uses_too_much_gets_sigterm_and_ends(hierarchy: Hierarchy) -> None:
    with node(hierarchy, SLEEP) as here, here.loop() as loop:
        done = cycles_until_event(loop, EvictionEventReason.SUCCEEDED)
        assert here.batch.wait(PATIENCE_S) == -signal.SIGTERM
        victims = [victim for each in done for victim in (each.evictions.victims if each.evictions else ())]
        assert [(victim.pod, victim.dry_run) for victim in victims] == [("default/batch", False)]
        assert "above 1.05 times the 1.0 MiB" in victims[0].reason.text
        assert 8 <= (victims[0].observed or 0) < 16, "times the request of 1 MiB: it wrote 8 MiB, and little else"
        kills = [(event.pod, event.reason) for each in done for event in each.kills]
        assert kills == [
            ("default/batch", EvictionEventReason.CREATED),
            ("default/batch", EvictionEventReason.SUCCEEDED),
        ]
        # No process is left to signal.
        more = [loop.run_cycle("tick") for _ in range(5)]
        assert all(each.evictions is not None and each.evictions.victims == () for each in more)
        assert alive(here.online)


def test_a_pod_that_ignores_sigterm_is_killed_after_its_grace_period(hierarchy: Hierarchy) -> None:
    with node(hierarchy, IGNORING) as here, here.loop(rss=RssOveruseConfig(grace_s=1.0)) as loop:
        cycles_before = cycles_until_event(loop, EvictionEventReason.CREATED)
        assert cycles_before[-1].evictions is not None
        assert (alive(here.batch), cycles_before[-1].evictions.terminating) == (True, ("default/batch",))
        done = cycles_until_event(loop, EvictionEventReason.SUCCEEDED)
        assert here.batch.wait(PATIENCE_S) == -signal.SIGKILL
        at_ns = {event.reason: event.at_ns for each in (*cycles_before, *done) for event in each.kills}
        assert at_ns[EvictionEventReason.SUCCEEDED] - at_ns[EvictionEventReason.CREATED] >= 1_000_000_000
        assert alive(here.online)


def test_a_dry_run_shows_the_victim_and_kills_no_process(hierarchy: Hierarchy) -> None:
    with node(hierarchy, SLEEP) as here, here.loop(dry_run=(RSS,)) as loop:
        observed = cycles_until(loop, lambda cycle: cycle.evictions and cycle.evictions.victims)
        assert observed[-1].evictions is not None
        assert [(victim.pod, victim.dry_run) for victim in observed[-1].evictions.victims] == [("default/batch", True)]
        after = [loop.run_cycle("tick") for _ in range(5)]
        assert [event for each in (*observed, *after) for event in each.kills] == []
        assert (alive(here.batch), alive(here.online)) == (True, True)

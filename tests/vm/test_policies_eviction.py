"""Eviction under real pressure: which pod leaves a node, or a NUMA node, that runs out of memory, and that no other does."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.eviction.signals import SignalEvictor
from api.decision import Cycle
from api.eviction import EvictionEventReason, ThresholdMet
from api.pod import Container, Pod
from api.qos import QoSLevel
from api.units import MIB
from tests.builders.waiting import until
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups
from tests.vm.agent_cycles import acting_loop, pod, run_cycle, run_cycles_until
from tests.vm.workloads import family, free_bytes, hold, numa_nodes, on_nodes, spin

pytestmark = pytest.mark.vm

SYSTEM, NUMA = "system-memory-pressure-eviction-plugin", "numa-memory-pressure-eviction-plugin"
OOMD = "oomd-pressure"


@contextmanager
def groups(*names: str) -> Iterator[list[TestCgroup]]:
    with ExitStack() as stack:
        yield [stack.enter_context(cgroup(require_writable_cgroups(), name)) for name in names]


def events(group: TestCgroup) -> str:
    return group.file("cpu", "cgroup.events").read_text()


def alive(group: TestCgroup) -> bool:
    return all(process.poll() is None for process in group.processes)


def victims(done: list[Cycle]) -> list[tuple[str, str, bool]]:
    """Return the victims with their plugins, and whether each is only a dry run."""
    results = [victim for each in done if each.evictions is not None for victim in each.evictions.victims]
    return [(re.split("[-/]", victim.pod)[-1], victim.plugin, victim.dry_run) for victim in results]


def kills(done: list[Cycle]) -> list[tuple[str, EvictionEventReason]]:
    return [(event.pod.rpartition("-")[2], event.reason) for each in done for event in each.kills]


def settings(plugin: str, *, dry: bool = False, **own: Mapping[str, Any]) -> dict[str, Any]:
    eviction = {"plugins": [plugin], "intervalS": 0.1, "dryRun": [plugin] if dry else [], **own}
    return {"advisor": {"policy": "none"}, "eviction": eviction}


def cycles_until_exit(loop: Any, between: Callable[[], None] = lambda: None) -> list[Cycle]:
    """Run cycles until a pod has exited, with `between` after each, and three more."""

    def left(each: Cycle) -> bool:
        between()
        return EvictionEventReason.SUCCEEDED in {event.reason for event in each.kills}

    done = run_cycles_until(loop, "a pod has exited", left)
    return [*done, *(run_cycle(loop) for _ in range(3))]


def test_the_largest_batch_pod_leaves_a_node_without_free_memory(tmp_path: Path) -> None:
    """The online pod is the largest of all. First the plugin runs dry, then for real."""
    with groups("web", "small", "large") as (web, small, large):
        for group, size in ((web, 192), (small, 32), (large, 64)):
            hold(group, size * MIB)
        own = {"systemMemory": {"freeMinimumBytes": free_bytes() - 48 * MIB, "graceS": 5}}
        pods = [pod(web, "shared_cores"), pod(small, "reclaimed_cores"), pod(large, "reclaimed_cores")]
        for name in ("dry", "real"):
            (tmp_path / name).mkdir()
        with acting_loop(tmp_path / "dry", settings(SYSTEM, dry=True, **own), pods) as loop:
            before = [run_cycle(loop) for _ in range(3)]
            assert (victims(before), kills(before)) == ([], []), "there is enough"
            hold(large, 96 * MIB)
            done = run_cycles_until(loop, "it is shown", lambda each: bool(each.evictions and each.evictions.victims))
            done += [run_cycle(loop) for _ in range(3)]
            assert (victims(done), kills(done)) == ([("large", SYSTEM, True)], [])
        assert all(map(alive, (web, small, large)))
        with acting_loop(tmp_path / "real", settings(SYSTEM, **own), pods) as loop:
            done = cycles_until_exit(loop)
        assert victims(done) == [("large", SYSTEM, False)]
        assert kills(done) == [("large", EvictionEventReason.CREATED), ("large", EvictionEventReason.SUCCEEDED)]
        assert {process.wait() for process in large.processes} == {-15}
        assert alive(web)
        assert alive(small)


@pytest.fixture
def saturated_numa() -> Iterator[list[TestCgroup]]:
    """The last NUMA node is nearly full with memory of no pod; of two batch pods the one on it is the smaller one."""
    first, *_, last = numa_nodes()
    with groups("filler", "web", "near", "far") as created:
        filler, web, near, far = created
        for group, node in ((filler, last), (web, last), (near, last), (far, first)):
            group.file("cpuset", "cpuset.mems").write_text(str(node))
        # First, so that it is what the kernel swaps out if it has to.
        hold(filler, free_bytes(last) - (96 + 64 + 32) * MIB)
        hold(web, 96 * MIB)
        hold(near, 64 * MIB)
        hold(far, 128 * MIB)
        yield created


def test_of_a_crowded_numa_node_the_pod_leaves_that_is_there(saturated_numa: list[TestCgroup], tmp_path: Path) -> None:
    filler, web, near, far = saturated_numa
    last = max(numa_nodes())
    assert on_nodes(near)[last] >= 32 * MIB, "most of it, even if a little had to go to swap"
    pods = [pod(web, "shared_cores"), pod(near, "reclaimed_cores"), pod(far, "reclaimed_cores")]
    with acting_loop(tmp_path, settings(NUMA), pods) as loop:
        done = cycles_until_exit(loop)
        (threshold,) = [each for each in done[0].evictions.thresholds if each.subject == f"numa{last}"]  # type: ignore[union-attr]
        assert (threshold.observed or 0) < (threshold.value or 0)
        others = [each for each in done[0].evictions.thresholds if each is not threshold]  # type: ignore[union-attr]
        assert [each.met.value for each in others] == ["not-met"] * (len(numa_nodes()) - 1)
    assert victims(done) == [("near", NUMA, False)]
    assert all(map(alive, (filler, web, far)))


def test_background_reclaim_without_a_break_makes_the_largest_batch_pod_leave(tmp_path: Path) -> None:
    """On a node that is full of what cannot be swapped out, it goes round and round in more memory than is left to it."""
    last = max(numa_nodes())
    with groups("filler", "web", "still", "busy") as (filler, web, still, busy):
        for group in (filler, still, busy):
            group.file("cpuset", "cpuset.mems").write_text(str(last))
        # Page cache of the tests before would make room for everybody.
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
        hold(filler, free_bytes(last) - 160 * MIB, locked=True)
        for group, size in ((web, 32), (still, 16), (busy, 320)):
            hold(group, size * MIB)
        own = {"systemMemory": {"kswapdPagesPerS": 100, "kswapdS": 3, "graceS": 5}}
        pods = [pod(web, "shared_cores"), pod(still, "reclaimed_cores"), pod(busy, "reclaimed_cores")]
        with acting_loop(tmp_path, settings(SYSTEM, **own), pods) as loop:
            done = cycles_until_exit(loop, between=lambda: busy.processes[0].send_signal(signal.SIGUSR1))
        met = {
            each.subject
            for item in done
            if item.evictions
            for each in item.evictions.thresholds
            if each.met is ThresholdMet.HARD
        }
        assert met == {"kswapd"}
        assert victims(done) == [("busy", SYSTEM, False)]
        assert all(map(alive, (filler, web, still)))


@pytest.mark.parametrize(
    ("plugin", "own"),
    [
        (SYSTEM, {"systemMemory": {"psiAvg10": 1, "psiPodAvg10": 0.1, "psiPodsMean": 0.1, "psiS": 1, "graceS": 5}}),
        (OOMD, {"oomd": {"fullAvg10": 0.1, "durationS": 1, "swapFreeRatio": 0, "graceS": 5}}),
    ],
)  # fmt: skip
def test_of_pods_that_stall_for_memory_the_largest_leaves(plugin: str, own: dict[str, Any], tmp_path: Path) -> None:
    """Each goes round and round in twice as much memory as it may have: by their own pressure, and by that of the node."""
    with groups("web", "burstable") as (web, above), family(above, "large", "one", "other") as pods:
        hold(web, 32 * MIB)
        for group, size in zip(pods, (96, 48, 48), strict=True):
            group.file("memory", "memory.high").write_text(str(size * MIB // 2))
            hold(group, size * MIB)

        def stir() -> None:
            for group in pods:
                group.processes[0].send_signal(signal.SIGUSR1)

        own = {
            name: {**values, "psiRoots": [above.path]} if plugin == SYSTEM else values for name, values in own.items()
        }
        listed = [pod(web, "shared_cores"), *(pod(group, "reclaimed_cores") for group in pods)]
        with acting_loop(tmp_path, settings(plugin, **own), listed) as loop:
            done = cycles_until_exit(loop, between=stir)
        (met,) = {
            each.reason.text.partition(" stalled on memory")[0]
            for item in done if item.evictions for each in item.evictions.thresholds if each.met is ThresholdMet.HARD
        }  # fmt: skip
        assert met == {SYSTEM: f"Tasks of {above.path}", OOMD: "All tasks"}[plugin], "what each looks at"
        assert victims(done)[0] == ("large", plugin, False)
        assert all(map(alive, (web, *pods[1:])))


HANDLES = """trap 'exit 0' TERM; : > "$0"; while :; do :; done"""


def test_a_frozen_pod_leaves_when_its_grace_is_over(tmp_path: Path) -> None:
    """It has something to do at SIGTERM, and cannot; cgroup.kill ends it all the same."""
    with groups("frozen", "beside") as (frozen, other):
        frozen.start(["sh", "-c", HANDLES, str(tmp_path / "ready")])
        spin(other)
        until((tmp_path / "ready").exists, "it is ready")
        frozen.file("cpu", "cgroup.freeze").write_text("1")
        until(lambda: "frozen 1" in events(frozen), "it is frozen")
        victim = Pod(
            uid="u", namespace="default", name="frozen", qos=QoSLevel.RECLAIMED,
            containers=(Container(name="main", cgroup=frozen.path),),
        )  # fmt: skip
        with closing(SignalEvictor(frozen.hierarchy)) as killer:
            killer.evict(victim, 1.0, "it has to")
            texts = [event.reason for event in killer.outcomes()]
            time.sleep(0.3)
            assert (texts, alive(frozen)) == ([EvictionEventReason.CREATED], True)
            until(lambda: bool(texts.extend(e.reason for e in killer.outcomes()) or texts[1:]), "it is gone")
        assert texts == [EvictionEventReason.CREATED, EvictionEventReason.SUCCEEDED]
        assert frozen.processes[0].wait() == -9
        assert alive(other)

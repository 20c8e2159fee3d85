"""Pods that take hours to end: they have them, and the node does not wait for as long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
import pytest

from agent.advisor.engine import PolicyState
from agent.eviction import api_evictor
from agent.eviction.api_evictor import ApiEvictor, MethodResponse, MethodResult, PodObservation
from agent.eviction.eviction_inputs import overdue_pods, terminating_since_ns
from agent.eviction.runner import EvictionRunner
from api.eviction import EvictionResult
from api.pod import Pod
from api.snapshot import Snapshot
from common.backoff import Backoff
from tests.agent.eviction.builders import GIB, S, pod, situation
from tests.agent.eviction.test_runner import Remembering, config

SYSTEM = "system-memory-pressure-eviction-plugin"
DAY_S = 86_400.0


def short_of_memory(at_s: float, *pods: Pod) -> Snapshot:
    """0.9 GiB are free where one has to be; each pod has a quarter, so that any one that goes is enough."""
    node = {
        "meminfo": {"MemFree": round(0.9 * GIB), "MemTotal": 100 * GIB},
        "sysctl": {"vm.watermark_scale_factor": 100},
    }
    samples = {each.name: {"memory_bytes": GIB // 4, "threads": 1} for each in pods}
    return situation(at_s, pods, samples=samples, node=node).snapshot


def told(name: str, grace_s: float | None) -> Pod:
    return msgspec.structs.replace(pod(name), terminating=True, grace_s=grace_s)


@pytest.mark.parametrize(
    ("grace_s", "late_s"),
    [(None, 45), (30.0, 45), (0.0, 10), (120.0, 180), (600.0, 900), (601.0, 900), (DAY_S, 900)],
)
def test_a_pod_should_be_gone_after_one_and_a_half_times_what_counts_of_its_grace(
    grace_s: float | None, late_s: int
) -> None:
    pods = [told("a", grace_s), pod("b")]
    since = terminating_since_ns(pods, {}, 100 * S)
    assert since == {"uid-a": 100 * S}
    since = terminating_since_ns(pods, since, 100 * S + late_s * S - 1)
    assert overdue_pods(pods, since, 100 * S + late_s * S - 1) == frozenset()
    assert overdue_pods(pods, since, 100 * S + late_s * S) == {"default/a"}
    assert terminating_since_ns([pod("b")], since, 101 * S) == {}, "it is gone"


@pytest.mark.parametrize(("grace_s", "late_s"), [(None, 45), (DAY_S, 900)])
@pytest.mark.parametrize("acts", [True, False])
def test_who_was_deleted_with_a_grace_of_a_day_keeps_nobody_for_so_long(
    grace_s: float | None, late_s: int, acts: bool
) -> None:
    evictor = EvictionRunner(config(SYSTEM), Remembering() if acts else None)
    pods = (told("a", grace_s), pod("b"))

    def victims(at_s: int) -> list[str]:
        result = evictor.run_cycle(short_of_memory(at_s, *pods), None, PolicyState(), at_s * S)
        return [each.pod for each in result.victims]

    assert victims(100) == []
    assert next(at for at in range(105, 1200, 5) if victims(at)) == 100 + late_s


class Slow:
    """Accepts, and the pod takes a day."""

    async def evict(self, pod: Pod, grace_s: float | None) -> MethodResponse:
        return MethodResponse(result=MethodResult.REQUESTED)

    async def observe(self, pod: Pod) -> PodObservation | None:
        return PodObservation(terminating=True, grace_s=DAY_S)

    def forget(self, pod: Pod) -> None:
        pass


async def test_who_asks_for_a_day_itself_is_not_counted_on_for_longer_than_a_quarter_of_an_hour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the eviction of the API server: `a` leaves at 100 s, and `b` in its place once 900 s have passed."""
    monkeypatch.setattr(api_evictor, "POLL_BACKOFF", Backoff(first_s=0.001, max_s=0.002))
    now = [100 * S]
    killer = ApiEvictor(lambda _pod: Slow(), clock=lambda: now[0])
    evictor = EvictionRunner(config(SYSTEM), killer)
    a, b = told("a", DAY_S), pod("b")

    def turn(at_s: float) -> EvictionResult:
        now[0] = round(at_s * S)
        here = msgspec.structs.replace(a, terminating=at_s > 100)
        return evictor.run_cycle(short_of_memory(at_s, here, b), None, PolicyState(), now[0])

    async def until(check: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not check():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.002)

    try:
        assert [each.pod for each in turn(100).victims] == ["default/a"]
        await until(lambda: killer._pending["default/a"].granted_grace_s == DAY_S)
        for at_s in (105, 145, 200, 500, 999):
            assert turn(at_s).victims == (), f"at {at_s} s it may still go"
            await asyncio.sleep(0.01)
        assert killer.stuck == frozenset()
        now[0] = 1000 * S
        await until(lambda: killer.stuck == {"default/a"})
        result = turn(1004)
        assert [each.pod for each in result.victims] == ["default/b"]
        assert killer.terminating >= {"default/a"}, "it is watched on"
    finally:
        killer.close()

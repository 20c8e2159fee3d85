"""Pods with a grace of hours keep it, and the node waits for them for a quarter of an hour at most."""

from __future__ import annotations

import asyncio

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
from api.units import GIB
from common.backoff import Backoff
from tests.agent.eviction.builders import S, pod, situation
from tests.agent.eviction.test_runner import FakePodEvictor, config
from tests.builders.waiting import until_async

SYSTEM = "system-memory-pressure-eviction-plugin"
DAY_S = 86_400.0


def short_of_memory(at_s: float, *pods: Pod) -> Snapshot:
    """0.9 GiB are free, 1 GiB is the threshold; each pod has a quarter, so one victim is enough."""
    node = {
        "meminfo": {"MemFree": round(0.9 * GIB), "MemTotal": 100 * GIB},
        "sysctl": {"vm.watermark_scale_factor": 100},
    }
    samples = {each.name: {"memory_bytes": GIB // 4, "threads": 1} for each in pods}
    return situation(at_s, pods, samples=samples, node=node).snapshot


def terminating_pod(name: str, grace_s: float | None) -> Pod:
    return msgspec.structs.replace(pod(name), terminating=True, grace_s=grace_s)


@pytest.mark.parametrize(
    ("grace_s", "late_s"),
    [(None, 45), (30.0, 45), (0.0, 10), (120.0, 180), (600.0, 900), (601.0, 900), (DAY_S, 900)],
)
def test_a_pod_should_be_gone_after_one_and_a_half_times_what_counts_of_its_grace(
    grace_s: float | None, late_s: int
) -> None:
    pods = [terminating_pod("a", grace_s), pod("b")]
    since = terminating_since_ns(pods, {}, 100 * S)
    assert since == {"uid-a": 100 * S}
    since = terminating_since_ns(pods, since, 100 * S + late_s * S - 1)
    assert overdue_pods(pods, since, 100 * S + late_s * S - 1) == frozenset()
    assert overdue_pods(pods, since, 100 * S + late_s * S) == {"default/a"}
    assert terminating_since_ns([pod("b")], since, 101 * S) == {}, "it no longer exists"


@pytest.mark.parametrize(("grace_s", "late_s"), [(None, 45), (DAY_S, 900)])
@pytest.mark.parametrize("acts", [True, False])
def test_a_deleted_pod_with_a_grace_of_a_day_is_overdue_after_a_quarter_of_an_hour(
    grace_s: float | None, late_s: int, acts: bool
) -> None:
    evictor = EvictionRunner(config(SYSTEM), FakePodEvictor() if acts else None)
    pods = (terminating_pod("a", grace_s), pod("b"))

    def victims(at_s: int) -> list[str]:
        result = evictor.run_cycle(short_of_memory(at_s, *pods), None, PolicyState(), at_s * S)
        return [each.pod for each in result.victims]

    assert victims(100) == []
    assert next(at for at in range(105, 1200, 5) if victims(at)) == 100 + late_s


class Slow:
    """Accepts the eviction; the pod terminates for a day."""

    async def evict(self, pod: Pod, grace_s: float | None) -> MethodResponse:
        return MethodResponse(result=MethodResult.REQUESTED)

    async def observe(self, pod: Pod) -> PodObservation | None:
        return PodObservation(terminating=True, grace_s=DAY_S)

    def forget(self, pod: Pod) -> None:
        pass


async def test_an_evicted_pod_with_a_grace_of_a_day_is_stuck_after_a_quarter_of_an_hour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through the API server: `a` is evicted at 100 s, and `b` in its place 900 s later."""
    monkeypatch.setattr(api_evictor, "POLL_BACKOFF", Backoff(first_s=0.001, max_s=0.002))
    now = [100 * S]
    pod_evictor = ApiEvictor(lambda _pod: Slow(), clock=lambda: now[0])
    evictor = EvictionRunner(config(SYSTEM), pod_evictor)
    a, b = terminating_pod("a", DAY_S), pod("b")

    def run_cycle(at_s: float) -> EvictionResult:
        now[0] = round(at_s * S)
        here = msgspec.structs.replace(a, terminating=at_s > 100)
        return evictor.run_cycle(short_of_memory(at_s, here, b), None, PolicyState(), now[0])

    try:
        assert [each.pod for each in run_cycle(100).victims] == ["default/a"]
        await until_async(lambda: pod_evictor._pending["default/a"].granted_grace_s == DAY_S)
        for at_s in (105, 145, 200, 500, 999):
            assert run_cycle(at_s).victims == (), f"at {at_s} s it may still go"
            await asyncio.sleep(0.01)
        assert pod_evictor.stuck == frozenset()
        now[0] = 1000 * S
        await until_async(lambda: pod_evictor.stuck == {"default/a"})
        result = run_cycle(1004)
        assert [each.pod for each in result.victims] == ["default/b"]
        assert pod_evictor.terminating >= {"default/a"}, "it is polled on"
    finally:
        pod_evictor.close()

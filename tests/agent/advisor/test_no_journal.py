"""While original values cannot be journalled, reclaimable CPU and the reported headroom do not grow, and can still shrink."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from agent.advisor.advisor_state import AdvisorState
from agent.advisor.engine import PolicyState, evaluate_policy
from agent.advisor.headroom.headroom_reporter import limit_to_requests
from agent.config.advisor import AdvisorConfig
from agent.config.config import AgentConfig
from agent.config.report import ReportConfig
from agent.eviction.eviction_inputs import fresh_headroom
from api.advice import Headroom
from api.knobs import Reason
from api.snapshot import ORIGINALS, ComponentHealth, Snapshot
from api.units import GIB
from tests.agent.advisor.cycles import advise_cycles, reported_of
from tests.agent.advisor.test_engine_headroom import TWO, build_snapshot
from tests.agent.advisor.test_latency import ADVISOR
from tests.builders.nodes import run_queue_latency as waits
from tests.builders.nodes import topology
from tests.builders.pods import reclaimed, shared
from tests.builders.snapshots import snapshot

FULL = ComponentHealth(name=ORIGINALS, ok=False, error="No space left on device", remedy="free space")
GOOD = ComponentHealth(name=ORIGINALS, ok=True)


def without_journal(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, sources=(FULL,))


def test_reclaimable_cpu_does_not_grow_and_still_shrinks() -> None:
    calm = {10: 1000}
    readings = [(calm, GOOD), (calm, GOOD), (calm, FULL), (calm, FULL), ({10: 1000, 60_000: 200}, FULL)]
    cycles = [
        snapshot(second, [shared("web")], latency={"web": waits(total)}, sources=(source,))
        for second, (total, source) in enumerate(readings)
    ]
    advices = advise_cycles(cycles, ADVISOR, AdvisorState(reclaimable_cores=0.5))
    assert [(round(each.reclaimable_cores, 2), each.action, each.reason.rule) for each in advices] == [
        (0.5, "freeze", "wait_unknown"),
        (0.7, "grow", "wait_below_target"),
        (0.7, "freeze", "journal_unavailable"),
        (0.7, "freeze", "journal_unavailable"),
        (0.1, "shrink", "wait_far_above_target"),
    ]
    assert advices[2].reason.text.endswith(
        "but original values cannot be journalled: the CPU of reclaimed pods does not grow."
    )


@pytest.mark.parametrize("policy", ["canonical", "latency"])
def test_only_what_the_present_reclaimed_pods_request_is_reported(policy: Any) -> None:
    config = AgentConfig(advisor=AdvisorConfig(policy=policy), report=ReportConfig(window_s=60.0))
    pods = (shared("web", cpu_request=4), reclaimed("batch", cpu_request=3.0))
    state, used = PolicyState(), {"web": 1.0, "batch": 2.0}
    for at in range(0, 300, 30):
        now = build_snapshot(at, pods, TWO, used)
        result, state = evaluate_policy(now, config, state, now.taken_at_ns)
    before = reported_of(result)
    assert before.cores is not None
    assert before.cores > 48
    later = build_snapshot(330, pods, TWO, used)
    result, state = evaluate_policy(without_journal(later), config, state, later.taken_at_ns)
    reported = reported_of(result)
    assert reported.cores == 3.0
    assert sum(reported.cores_by_numa.values()) == pytest.approx(3.0 if reported.cores_by_numa else 0)
    assert reported.reason.rule == "journal_unavailable"
    # No pod is evicted because of that.
    assert fresh_headroom(reported) == replace(
        reported, cores=None, cores_by_numa={}, memory_bytes=None, memory_by_numa={}
    )
    again = build_snapshot(360, pods, TWO, used)
    result, _ = evaluate_policy(again, config, state, again.taken_at_ns)
    assert reported_of(result).cores == pytest.approx(before.cores, abs=1)


@pytest.mark.parametrize(
    ("total", "parts", "requested", "expected"),
    [
        (10.0, {0: 6.0, 1: 4.0}, 5.0, (5.0, {0: 3.0, 1: 2.0})),
        (10.0, {}, 5.0, (5.0, {})),
        (10.0, {0: 10.0}, 0.0, (0.0, {0: 0.0})),
        (3.0, {0: 3.0}, 5.0, (3.0, {0: 3.0})),
        (None, {}, 5.0, (None, {})),
    ],
)
def test_the_limit_scales_the_parts_of_numa_nodes(
    total: float | None, parts: dict[int, float], requested: float, expected: tuple[float | None, dict[int, float]]
) -> None:
    pods = [reclaimed("batch", cpu_request=requested), shared("web", cpu_request=7)]
    before = Headroom(cores=total, cores_by_numa=parts, memory_bytes=8.0 * GIB, reason=Reason(rule="r", text="t"))
    limited = limit_to_requests(before, snapshot(1, pods, machine=topology(4)))
    assert (limited.cores, limited.cores_by_numa) == expected
    assert (limited.memory_bytes, limited.stale) == (0.0, ("cpu", "memory"))

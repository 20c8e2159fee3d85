"""CPU that pods which are not reclaimable keep, by level, CPU policy and headroom policy, in whole cycles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from agent.advisor.advisor_state import AdvisorState
from agent.advisor.headroom.headroom_policies import CpuAllowance, compute_headroom
from agent.advisor.headroom.koordinator_headroom import koordinator_cpu_budget, prod_spare_cores
from agent.advisor.headroom.reclaim_exclusion import max_reclaimable_cores, reclaimable_nodes, unreclaimable_idle_cores
from agent.config.advisor import AdvisorConfig
from agent.config.config import AgentConfig
from api.annotations import PROFILE_KEY, ServiceProfile, parse_service_profile
from api.cpu import Topology
from api.decision import Advice
from api.forecast import Forecast, ForecastResource, PeakForecast
from api.knobs import Reason
from api.pod import Pod
from api.qos import Enhancements
from api.rates import CgroupRates, NodeRates, Rates
from api.snapshot import Snapshot
from tests.agent.advisor.cycles import advice_of, evaluate_cycles
from tests.builders.nodes import run_queue_latency as waits
from tests.builders.nodes import topology
from tests.builders.pods import reclaimed, shared
from tests.builders.snapshots import snapshot


def web(level: str = "", request: float | None = 24.0, **fields: Any) -> Pod:
    profile = msgspec.convert({"disableReclaimLevel": level}, ServiceProfile)
    return replace(shared("web", cpu_request=request), profile=profile, **fields)


def bound(level: str) -> Pod:
    return web(level, enhancements=Enhancements(numa_binding=True), bound_numa=(1,))


def story(
    pods: Sequence[Pod], config: Mapping[str, Any], node: Topology, used: float = 0.5, every_s: int = 1
) -> list[Advice]:
    """Run sixty cycles in which pods use these cores and wait at most 0.1 ms."""
    cycles = [in_use(second, pods, node, used) for second in range(0, 60 * every_s, every_s)]
    return [advice_of(item) for item in evaluate_cycles(cycles, msgspec.convert({"advisor": config}, AgentConfig))[0]]


def in_use(second: int, pods: Sequence[Pod], node: Topology | int, used: float = 0.5) -> Snapshot:
    usage_s = {each.name: used * second for each in pods}
    latency = {each.name: waits({100: 100 * second}) for each in pods}
    return snapshot(second, pods, machine=node, usage_s=usage_s, latency=latency)


def headroom_cores(advice: Advice) -> float | None:
    assert advice.headroom is not None
    return advice.headroom.cores


@pytest.mark.parametrize(
    ("level", "cores", "reclaimable"),
    # of 48: 0.625 by estimate, or the 24 requested, and 4 for bursts; 5 % is always lent
    [("", 43.375, 48), ("Pod", 20, 24), ("NUMA", 0, 2.4), ("Socket", 0, 2.4), ("Node", 0, 2.4)],
)
def test_levels_under_latency(level: str, cores: float, reclaimable: float) -> None:
    last = story([web(level)], {}, topology(48))[-1]
    assert (headroom_cores(last), last.reclaimable_cores) == (pytest.approx(cores), pytest.approx(reclaimable))


@pytest.mark.parametrize(("level", "cores"), [("", 43), ("Pod", 20), ("NUMA", 0), ("Socket", 0), ("Node", 0)])
def test_levels_under_canonical(level: str, cores: float) -> None:
    """The share pool shrinks by 2 every half a minute, to the need or to the 24 requested, plus 4 for bursts."""
    last = story([web(level)], {"policy": "canonical"}, topology(48), every_s=31)[-1]
    assert headroom_cores(last) == cores


@pytest.mark.parametrize(
    ("level", "reclaimable", "parts"),
    [
        ("Pod", 72, (True, True)),
        ("NUMA", 48, (True, False)),
        ("Socket", 48, (True, False)),
        ("Node", 4.8, (False,) * 2),
    ],
)
def test_levels_of_a_pod_on_one_of_two_numa_nodes(level: str, reclaimable: float, parts: tuple[bool, bool]) -> None:
    last = story([bound(level), reclaimed("batch")], {}, topology(96, sockets=2))[-1]
    assert last.headroom is not None
    assert last.reclaimable_cores == pytest.approx(reclaimable)
    assert tuple(last.headroom.cores_by_numa[numa] > 0 for numa in (0, 1)) == parts
    assert (last.headroom.cores or 0) <= last.reclaimable_cores


def test_a_pod_with_an_unreadable_profile_counts_with_its_request() -> None:
    profile, problems = parse_service_profile({PROFILE_KEY: "{targets"})
    assert problems
    last = story([replace(web(), profile=profile)], {}, topology(48))[-1]
    assert (headroom_cores(last), last.reclaimable_cores) == (pytest.approx(20), 24)
    assert "default/web is not reclaimable" in (last.headroom.reason.text if last.headroom else "")
    assert "At most 24 of 48 cores are reclaimable" in last.reason.text


def test_an_unreclaimable_share_pool_counts_with_its_request() -> None:
    last = story([web()], {"provision": {"disableReclaimSharePools": ["share"]}}, topology(48))[-1]
    assert (headroom_cores(last), last.reclaimable_cores) == (pytest.approx(20), 24)


def test_a_pod_that_uses_more_than_it_requested_counts_by_its_use() -> None:
    """30 cores used, 37.5 needed: 48 - 37.5 - 4. What it requested is not lent in any case."""
    last = story([web("Pod")], {}, topology(48), used=30)[-1]
    assert (headroom_cores(last), last.reclaimable_cores) == (pytest.approx(6.5), 24)


def test_an_unreclaimable_pod_lowers_reclaimable_cpu_at_once_and_its_end_raises_it_slowly() -> None:
    api, both = shared("api", cpu_request=1.0), slice(10, 20)
    cycles = [in_use(second, [api], 48) for second in range(40)]
    cycles[both] = [in_use(second, [api, web("Pod")], 48) for second in range(10, 20)]
    reclaimable = [advice_of(result).reclaimable_cores for result in evaluate_cycles(cycles, AgentConfig())[0]]
    assert (reclaimable[9], reclaimable[10], reclaimable[19]) == (48, 24, 24)
    assert [round(cores, 2) for cores in reclaimable[20:23]] == [28.8, 33.6, 38.4]  # a tenth of the node each second


def forecast_headroom_cores(level: str, usage: float | None, peak: float) -> float | None:
    """Headroom of 48 CPUs with 4 reserved by a trusted forecast, where the pod requests 24."""
    shot = snapshot(1, [web(level)], machine=48)
    _, state = evaluate_cycles([shot], AgentConfig())
    container = state.advisor.containers["/web"]
    current = Forecast(
        resource=ForecastResource.CPU,
        used=None,
        forecast=PeakForecast(peak=peak, trusted=True, reason=Reason(rule="calibrated", text="The peak is predicted.")),
        target_miss_ratio=0.055,
    )
    advisor = AdvisorState(containers={"/web": replace(container, usage_cores=usage)}, forecasts=(current,))
    config = msgspec.convert({"headroom": {"policy": "forecast"}}, AdvisorConfig)
    return compute_headroom(shot, None, config, advisor, CpuAllowance(need_cores=1.0, reclaimable_cores=48.0)).cores


@pytest.mark.parametrize(
    ("level", "usage", "cores"),
    [("", 0.5, 34), ("Pod", 0.5, 10.5), ("Pod", None, 10), ("Pod", 30.0, 34), ("Node", 0.5, 0)],
)
def test_unreclaimable_requests_are_reserved_on_top_of_the_predicted_peak(
    level: str, usage: float | None, cores: float
) -> None:
    assert forecast_headroom_cores(level, usage, peak=10.0) == pytest.approx(cores)


def test_koordinators_sums_count_its_request_as_use() -> None:
    pods = [web("Pod"), replace(shared("api", cpu_request=4.0))]
    change = Rates(
        node=NodeRates(interval_ns=1, busy_cores=1.5),
        cgroups={f"/{name}": CgroupRates(interval_ns=1, cpu_cores=0.5) for name in ("web", "api")},
    )
    shot = snapshot(1, pods, machine=48)
    budget = koordinator_cpu_budget(shot, change, 0.0)
    assert [demand.used for demand in budget.demands] == [24, 0.5]
    assert budget.system_used == 0.5
    _, state = evaluate_cycles([shot], AgentConfig())
    needs = {path: replace(item, usage_cores=0.5, ramping=False) for path, item in state.advisor.containers.items()}
    assert prod_spare_cores(shot, change, needs, AdvisorConfig()) == pytest.approx(4 - 0.625)


def test_nothing_is_reserved_if_every_pod_is_reclaimable() -> None:
    shot, config = snapshot(1, [web(), reclaimed("batch")], machine=48), AdvisorConfig()
    assert unreclaimable_idle_cores(shot, AdvisorState(), config) == 0.0
    assert max_reclaimable_cores(shot, reclaimable_nodes(shot, AdvisorState(), config), AdvisorState(), config) is None


@pytest.mark.parametrize(("before", "most"), [(None, 24), (10.0, 10), (30.0, 24)])
def test_reclaimable_cpu_does_not_grow_while_a_pods_numa_nodes_are_unknown(before: float | None, most: float) -> None:
    shot, config, state = (
        snapshot(1, [web("NUMA")], machine=48),
        AdvisorConfig(),
        AdvisorState(reclaimable_cores=before),
    )
    where = reclaimable_nodes(shot, state, config)
    assert where.unknown == ("default/web",)
    assert max_reclaimable_cores(shot, where, state, config) == most

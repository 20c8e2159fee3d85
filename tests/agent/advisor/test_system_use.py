"""Tests the CPU use of the system: what counts, which intervals are skipped, and what the headroom leaves to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec
import pytest
from msgspec.structs import replace

from agent.advisor.advisor_state import AdvisorState, SystemUse
from agent.advisor.headroom.headroom_policies import CpuAllowance, compute_headroom
from agent.advisor.system_use import update_system_use
from agent.config.advisor import AdvisorConfig, HeadroomConfig
from agent.config.config import AgentConfig
from agent.config.qrm import CpuPlacementConfig
from agent.qrm.cpuset.topology_layout import restrict_topology
from api.forecast import Forecast, ForecastResource, PeakForecast
from api.knobs import Reason
from api.pod import Pod
from api.qos import Enhancements, QoSLevel
from api.rates import compute_rates
from api.snapshot import NodeSample, Snapshot
from tests.agent.advisor.cycles import evaluate_cycles, headroom_of, reported_of
from tests.builders.nodes import S, cgroup_sample, cpu_times, topology
from tests.builders.pods import pod, reclaimed, shared
from tests.builders.snapshots import snapshot

WEB, BATCH, AGENT = shared("web", cpu_request=1.0), reclaimed("batch"), pod("agent", QoSLevel.SYSTEM)
CONFIG = AgentConfig(advisor=AdvisorConfig(ramp_up_s=0))


def at(second: float, pods: Sequence[Pod], busy_s: float, used_s: Mapping[str, float], cpus: int = 48) -> Snapshot:
    """Return a snapshot of a node whose CPUs have been busy for `busy_s` in all, evenly."""
    built = snapshot(second, pods, machine=cpus, usage_s=used_s)
    per_cpu = dict.fromkeys(range(cpus), cpu_times(busy_s / cpus, second))
    return replace(built, node=NodeSample(per_cpu=per_cpu, cpu=cpu_times(busy_s, cpus * second)))


def steady(pods: Sequence[Pod], busy: float, used: Mapping[str, float], cpus: int = 48) -> list[Snapshot]:
    """Return three seconds in which CPUs and pods are busy with these cores."""
    return [
        at(second, pods, busy * second, {name: cores * second for name, cores in used.items()}, cpus)
        for second in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    ("pods", "busy", "used", "reserved_cpus", "cores", "text"),
    [
        # 48 less 1.25 x 4 that web needs and 4 for bursts
        ([WEB], 4, {"web": 4}, 0, 39, "outside of online and reclaimed pods use 0.00"),
        ([WEB], 10, {"web": 4}, 0, 33, "outside of online and reclaimed pods use 6.00"),
        ([WEB, BATCH], 13, {"web": 4, "batch": 3}, 0, 33, "use 6.00"),
        ([WEB, AGENT], 10, {"web": 4, "agent": 6}, 0, 33, "use 6.00"),
        ([], 6, {}, 0, 38, "use 6.00"),
        # Koordinator: the larger of the reserved CPUs and the use
        ([WEB], 10, {"web": 4}, 2, 33, "use 6.00"),
        ([WEB], 10, {"web": 4}, 8, 31, "8 are reserved for processes outside of online and reclaimed pods"),
        ([WEB], 48, {"web": 4}, 0, 0, "use 44.00"),
        # The node counts in ticks: it may show less than its pods
        ([WEB], 3.9, {"web": 4}, 0, 39, "use 0.00"),
    ],
)
def test_headroom_leaves_the_system_what_it_uses_and_at_least_its_reserve(
    pods: Sequence[Pod], busy: float, used: Mapping[str, float], reserved_cpus: int, cores: float, text: str
) -> None:
    config = replace(CONFIG, placing=CpuPlacementConfig(reserved_cpus=reserved_cpus))
    results, _ = evaluate_cycles(steady(pods, busy, used), config)
    assert headroom_of(results[0]).cores is None, "nothing is measured in the first cycle"
    assert "system is not measured yet" in headroom_of(results[0]).reason.text
    last = headroom_of(results[-1])
    assert last.cores == pytest.approx(cores)
    assert text in last.reason.text


def test_a_container_of_no_listed_pod_counts_as_the_system() -> None:
    shots = steady([WEB, shared("stray")], 10, {"web": 4, "stray": 6})
    listed = [replace(shot, pods=(WEB,)) for shot in shots]
    assert headroom_of(evaluate_cycles(listed, CONFIG)[0][-1]).cores == pytest.approx(48 - 5 - 6 - 4)


@pytest.mark.parametrize(("reserved_cpus", "cores"), [(0, 39), (8, 31)])
def test_without_system_use_only_the_reserve_counts_also_in_the_first_cycle(reserved_cpus: int, cores: float) -> None:
    advisor = AdvisorConfig(ramp_up_s=0, headroom=HeadroomConfig(system_use=False))
    config = AgentConfig(advisor=advisor, placing=CpuPlacementConfig(reserved_cpus=reserved_cpus))
    results, _ = evaluate_cycles(steady([WEB], 44, {"web": 4}), config)
    assert headroom_of(results[0]).cores is not None
    last = headroom_of(results[-1])
    assert last.cores == pytest.approx(cores)
    assert f"{reserved_cpus} are reserved for processes outside of online" in last.reason.text


def test_the_parts_by_numa_node_leave_the_system_its_share_of_each() -> None:
    """16 CPUs on two nodes, 4 of them used by the system, 6.25 needed by a pod on node 1: 6 and none are left there."""
    machine, near = topology(16, sockets=2), shared("near", cpu_request=1.0)
    near = replace(near, enhancements=Enhancements(numa_binding=True), bound_numa=(1,))
    shots = [replace(shot, topology=machine) for shot in steady([near], 9, {"near": 5}, 16)]
    last = headroom_of(evaluate_cycles(shots, CONFIG)[0][-1])
    assert last.cores == pytest.approx(16 - 6.25 - 4 - 4)
    assert last.cores_by_numa == {0: pytest.approx(1.75), 1: 0}


def test_a_burst_of_one_second_changes_no_reported_amount() -> None:
    """Two CPUs; the system uses 0.2 cores, and 1.8 in second 150, when a sample is taken."""
    config = replace(CONFIG, advisor=AdvisorConfig(ramp_up_s=0, reserved_for_allocate_cores=0))
    shots = [at(second, [], 0.2 * second + 1.6 * (second >= 150), {}, 2) for second in range(200)]
    results, _ = evaluate_cycles(shots, config)
    computed = [headroom_of(result).cores for result in results]
    assert computed[149] == pytest.approx(1.8)
    # 1.6 x (1 - exp(-1/5)), and less each second
    assert (computed[150], computed[151], computed[160]) == pytest.approx((1.51, 1.563, 1.761), abs=0.001)
    assert [reported_of(result).cores for result in results[125:]] == pytest.approx([1.8] * 75)


def use_after(shots: Sequence[Snapshot], before: SystemUse | None = None) -> list[float | None]:
    """Return the average after each snapshot but the first."""
    averages: list[float | None] = []
    for previous, current in pairwise(shots):
        before = update_system_use(previous, current, compute_rates(previous, current), before)
        averages.append(None if before is None else before.average_cores)
    return averages


def test_the_last_interval_of_a_container_is_no_burst_of_the_system() -> None:
    """The batch job uses ten cores and ends half a second after second 3: these 5 core-seconds are in no cgroup any more."""
    busy = [0, 12, 24, 36, 43, 45, 47]
    shots = [at(second, [BATCH] if second <= 3 else [], busy[second], {"batch": 10.0 * second}) for second in range(7)]
    assert use_after(shots) == pytest.approx([2] * 6)


def test_where_containers_end_all_the_time_such_intervals_count_after_half_a_minute() -> None:
    """Each second another job uses one core and ends; its CPU time is not known."""
    jobs = [reclaimed(f"job{second}") for second in range(40)]
    shots = [at(second, [jobs[second]], 3.0 * second, {f"job{second}": 0.5}) for second in range(40)]
    averages = use_after(shots, SystemUse(average_cores=2.0, measured_ns=S))
    assert averages[:29] == [2.0] * 29
    # 2 + (3 - 2) x (1 - exp(-1/5)), and then again half a minute later
    assert averages[29:] == pytest.approx([2.181] * 10, abs=0.001)


def test_what_runs_on_cpus_that_pods_may_not_have_takes_nothing_from_them() -> None:
    """CPUs 0 to 3 are fully busy, all others for a tenth; pods may have CPUs 4 to 47 and use 2 cores."""
    shots = []
    for second in (1, 2):
        shot = at(second, [WEB], 0, {"web": 2.0 * second})
        per_cpu = {cpu: cpu_times(second if cpu < 4 else second / 10, second) for cpu in range(48)}
        limited = restrict_topology(shot.topology, range(4, 48))
        shots.append(replace(shot, node=NodeSample(per_cpu=per_cpu), topology=limited))
    assert use_after(shots) == pytest.approx([2.4])


@pytest.mark.parametrize("missing", ["tree", "CPUs", "previous"])
def test_an_interval_that_is_not_measured_retains_the_average(missing: str) -> None:
    first, second = at(1, [WEB], 10, {"web": 4}), at(2, [WEB], 20, {"web": 8})
    if missing == "tree":
        second = replace(second, cgroups={})
    if missing == "CPUs":
        second = replace(second, node=NodeSample(cpu=cpu_times(20, 96)))
    previous = None if missing == "previous" else first
    change = None if previous is None else compute_rates(previous, second)
    for before in (None, SystemUse(average_cores=1.5, measured_ns=S)):
        assert update_system_use(previous, second, change, before) is before


def test_the_counter_of_a_container_counts_only_between_two_samples_of_it() -> None:
    """A container that was not sampled before may have used CPU for days."""
    first, second = at(1, [], 10, {}), at(2, [WEB], 20, {"web": 90_000})
    before = SystemUse(average_cores=6.0, measured_ns=S)
    assert update_system_use(first, second, compute_rates(first, second), before) is before
    unlisted = replace(second, cgroups={**second.cgroups, "/web": cgroup_sample("/web", id=7)})
    assert update_system_use(first, unlisted, compute_rates(first, unlisted), before) is before


@pytest.mark.parametrize(
    ("reserved", "use", "cores"),
    [(0, 6.0, 34), (2, 6.0, 34), (8, 6.0, 32), (8, None, 26)],
)
def test_a_forecast_leaves_the_system_the_idle_part_of_its_reserve(
    reserved: int, use: float | None, cores: float
) -> None:
    """48 CPUs, 4 for bursts and a predicted peak of 10, which contains what the system uses."""
    peak = PeakForecast(peak=10.0, trusted=True, reason=Reason(rule="calibrated", text="The peak is predicted."))
    current = Forecast(resource=ForecastResource.CPU, used=None, forecast=peak, target_miss_ratio=0.055)
    state = AdvisorState(
        forecasts=(current,),
        pools={"reserve": tuple(range(reserved))},
        system_use=None if use is None else SystemUse(average_cores=use, measured_ns=S),
    )
    config = msgspec.convert({"headroom": {"policy": "forecast"}}, AdvisorConfig)
    allowance = CpuAllowance(need_cores=1.0, reclaimable_cores=48.0)
    assert compute_headroom(at(1, [], 0, {}), None, config, state, allowance).cores == pytest.approx(cores)

"""Koordinator's CPU suppress, quota burst and memory QoS, and Katalyst's burst, with the numbers of their projects."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config.qrm import BurstConfig, KnobsConfig, KoordinatorBurstConfig, MemoryQosLevel, SuppressConfig
from agent.qrm.decisions.cpu_burst import CpuBurstState, koordinator_burst, static_burst
from agent.qrm.decisions.knob_requests import resolve_knob_requests
from agent.qrm.decisions.koordinator_suppress import SuppressState, select_spread_cpus, suppress_reclaimed
from agent.qrm.decisions.memory_controls import memory_qos_requests
from api.advice import KnobRequest
from api.knobs import Knob, Reason
from api.pod import Pod
from api.qos import BurstPolicy, Enhancements, QoSLevel
from api.rates import CgroupRates, NodeRates, Rates
from api.snapshot import CgroupLimits, NodeSample, Snapshot
from api.units import GIB
from tests.builders.nodes import topology
from tests.builders.pods import dedicated, reclaimed, shared
from tests.builders.snapshots import snapshot

S = 1_000_000_000
VERDICT = Reason(rule="r", text="t")
WEB, DB = shared("web", cpu_limit=2.0), dedicated("db", cpu_request=4.0, cpu_limit=4.0)
BATCH = reclaimed("batch")


def rates(busy: float | None, used: Mapping[str, float], throttled: Mapping[str, int] | None = None) -> Rates:
    return Rates(
        node=NodeRates(interval_ns=S, busy_cores=busy),
        cgroups={
            f"/{name}": CgroupRates(interval_ns=S, cpu_cores=cores, throttled_periods=(throttled or {}).get(name, 0))
            for name, cores in used.items()
        },
    )


def values(knob_requests: tuple[KnobRequest, ...]) -> dict[tuple[str, str], str]:
    return {(request.cgroup, request.knob.value): request.value for request in knob_requests}


# --- suppress


@pytest.mark.parametrize(
    ("busy", "used", "config", "cores"),
    [
        (10.0, {"web": 8.0, "batch": 1.0}, {}, 20 * 0.65 - 8 - 1),
        (10.0, {"web": 8.0, "batch": 2.0}, {"reserved_cores": 3.0}, 20 * 0.65 - 8 - 3),
        (9.0, {"web": 9.0, "batch": 0.5}, {}, 4.0),
        (20.0, {"web": 18.0, "batch": 0.5}, {"min_percent": 10}, 2.0),
        (20.0, {"web": 18.0, "batch": 0.5}, {}, 0.02),
    ],
)
def test_reclaimed_pods_get_the_unused_part_below_the_threshold(
    busy: float, used: dict[str, float], config: dict[str, float], cores: float
) -> None:
    observed = snapshot(0, [WEB, BATCH], machine=20)
    settings = msgspec.convert({"policy": "cfsQuota", **_camel(config)}, SuppressConfig)
    requests, memory = suppress_reclaimed(observed, rates(busy, used), settings, SuppressState())
    assert values(requests) == {("/batch", "cpu.max"): f"{round(cores * 100_000)} 100000"}
    assert memory.cores == pytest.approx(cores)
    assert "65 % of 20" in requests[0].reason.text


def _camel(config: Mapping[str, object]) -> dict[str, object]:
    def name(key: str) -> str:
        first, *rest = key.split("_")
        return first + "".join(map(str.title, rest))

    return {name(key): value for key, value in config.items()}


@pytest.mark.parametrize(
    ("held", "used", "count"), [(None, 1.0, 12), (4, 1.0, 6), (11, 1.0, 12), (12, 6.5, 7), (12, 19.0, 2)]
)
def test_cpus_grow_by_a_tenth_and_shrink_at_once(held: int | None, used: float, count: int) -> None:
    before = SuppressState() if held is None else SuppressState(cpus=tuple(range(held)), cores=float(held))
    observed = snapshot(0, [WEB, BATCH], machine=20)
    config = SuppressConfig(policy="cpuset")
    ((request,), memory) = suppress_reclaimed(observed, rates(used + 0.5, {"web": used, "batch": 0.5}), config, before)
    assert memory.cpus is not None
    assert len(memory.cpus) == count
    assert request.knob is Knob.CPUSET


def test_without_free_cpus_reclaimed_pods_keep_their_previous_ones() -> None:
    observed, config = snapshot(0, [WEB, BATCH], machine=8), SuppressConfig(policy="cpuset")
    now = rates(2.0, {"web": 1.0, "batch": 1.0})
    ((request,), memory) = suppress_reclaimed(observed, now, config, SuppressState(), range(6))
    assert request.value == "6-7"
    ((request,), memory) = suppress_reclaimed(observed, now, config, memory, range(8))
    assert (request.value, memory.cpus) == ("6-7", (6, 7))


def test_limited_growth_is_stated_in_the_reason() -> None:
    config, before = SuppressConfig(policy="cfsQuota"), SuppressState(cores=10.0)
    observed = snapshot(0, [WEB, BATCH], machine=20)
    for web, cores, cut in ((2.3, 10.0, False), (0.3, 12.0, True)):
        (request,), memory = suppress_reclaimed(observed, rates(web + 1, {"web": web, "batch": 0.4}), config, before)
        assert (memory.cores, "growth is limited" in request.reason.text) == (cores, cut)


def test_small_changes_and_unknown_usage_do_not_change_a_quota() -> None:
    observed, config = snapshot(0, [WEB, BATCH], machine=20), SuppressConfig(policy="cfsQuota")
    held = SuppressState(cores=5.0)
    _, memory = suppress_reclaimed(observed, rates(8.1, {"web": 7.9, "batch": 0.2}), config, held)
    assert memory.cores == 5.0, "0.1 is less than a hundredth of the node"
    _, memory = suppress_reclaimed(observed, rates(1.5, {"web": 1.0, "batch": 0.5}), config, held)
    assert memory.cores == 7.0, "12 would be right, and two more at a time are allowed"
    for missing in (None, rates(None, {"web": 1.0, "batch": 0.1}), rates(1.0, {"batch": 0.1})):
        (request,), memory = suppress_reclaimed(observed, missing, config, held)
        assert (memory.cores, request.reason.rule) == (5.0, "suppress_unknown")


def test_a_quota_is_shared_in_proportion_to_requests() -> None:
    pods = [reclaimed("a", cpu_request=1.0), reclaimed("b", cpu_request=3.0)]
    observed = snapshot(0, pods, machine=8)
    requests, _ = suppress_reclaimed(
        observed, rates(1.2, {"a": 0.0, "b": 0.0}), SuppressConfig(policy="cfsQuota"), SuppressState()
    )
    assert values(requests) == {("/a", "cpu.max"): "100000 100000", ("/b", "cpu.max"): "300000 100000"}
    assert suppress_reclaimed(observed, None, SuppressConfig(), SuppressState(cores=3.0)) == ((), SuppressState())


def test_many_small_quotas_together_are_no_more_than_the_target() -> None:
    """20 cores x 65 % - 12.4 - 0.3 leaves 0.3 CPUs, a hundredth for each of 30 pods: 0.6 with 2 ms in the usual period."""
    crowd = [reclaimed(f"batch{number}") for number in range(30)]
    observed, used = snapshot(0, [WEB, *crowd], machine=20), {f"batch{number}": 0.0 for number in range(30)}
    requests, _ = suppress_reclaimed(
        observed, rates(12.7, {"web": 12.4, **used}), SuppressConfig(policy="cfsQuota"), SuppressState()
    )
    assert set(values(requests).values()) == {"1000 100000"}
    requests, _ = suppress_reclaimed(
        observed, rates(12.9, {"web": 12.8, **used}), SuppressConfig(policy="cfsQuota"), SuppressState()
    )
    assert set(values(requests).values()) == {"1667 500000"}, "0.1 CPUs"


@given(st.integers(1, 4), st.integers(1, 2), st.integers(1, 32), st.integers(0, 40), st.data())
def test_selected_cpus_are_retained_and_never_excluded_ones(
    numa: int, threads: int, cores: int, count: int, data: st.DataObject
) -> None:
    nodes = topology(numa * threads * cores, numa=numa, threads=threads)
    excluded = data.draw(st.sets(st.sampled_from(nodes.ids)))
    held = data.draw(st.sets(st.sampled_from(nodes.ids)))
    result = select_spread_cpus(nodes, count, tuple(held), tuple(excluded))
    assert len(result) == len(set(result)) == min(count, len(set(nodes.ids) - excluded))
    assert not set(result) & excluded
    assert select_spread_cpus(nodes, count, result, tuple(excluded)) == result, "CPUs are retained"


def test_whole_cores_of_each_numa_node_in_turn() -> None:
    nodes = topology(16, numa=2, threads=2)
    assert select_spread_cpus(nodes, 4, (), ()) == (0, 4, 8, 12)
    assert select_spread_cpus(nodes, 5, (0, 4, 8, 12), ()) == (0, 1, 4, 8, 12)
    assert select_spread_cpus(nodes, 4, (), (8,)) == (1, 4, 9, 12), "a core of which one thread is left comes last"


# --- burst


def with_quota(quotas: Mapping[str, int], *pods: Pod) -> Snapshot:
    observed = snapshot(0, pods)
    cgroups = {
        path: msgspec.structs.replace(
            sample, limits=CgroupLimits(quota_us=quotas.get(path.lstrip("/")), period_us=100_000)
        )
        for path, sample in observed.cgroups.items()
    }
    return msgspec.structs.replace(observed, cgroups=cgroups)


def with_burst(original: Pod, policy: BurstPolicy, percent: float | None = None) -> Pod:
    return msgspec.structs.replace(original, enhancements=Enhancements(burst_policy=policy, burst_percent=percent))


QUOTAS = {"web": 200_000, "db": 400_000, "batch": 50_000, "api": 100_000}


@pytest.mark.parametrize(
    ("pods", "config", "expected"),
    [
        ((WEB, DB), {}, {}),
        ((BATCH,), {}, {"/batch": "0"}),
        ((with_burst(BATCH, BurstPolicy.STATIC),), {}, {"/batch": "0"}),
        ((with_burst(WEB, BurstPolicy.STATIC, 50),), {}, {"/web": "100000"}),
        ((with_burst(WEB, BurstPolicy.STATIC),), {"percent": 30}, {"/web": "60000"}),
        ((with_burst(WEB, BurstPolicy.CLOSED),), {"shared": True}, {"/web": "0"}),
        ((with_burst(WEB, BurstPolicy.DYNAMIC),), {"shared": True}, {}),
        ((WEB, DB), {"shared": True, "dedicated": True}, {"/web": "200000", "/db": "400000"}),
        ((WEB, shared("api")), {"shared": True}, {}),
        ((WEB, shared("api")), {"shared": False}, {"/web": "0", "/api": "0"}),
        ((DB,), {"dedicated": False}, {"/db": "0"}),
        ((dedicated("free"),), {"dedicated": True}, {}),
    ],
)
def test_static_burst_of_katalyst(pods: tuple[Pod, ...], config: dict[str, object], expected: dict[str, str]) -> None:
    requests = static_burst(with_quota(QUOTAS, *pods), msgspec.convert(config, BurstConfig))
    assert values(requests) == {(path, "cpu.max.burst"): value for path, value in expected.items()}


def run_burst(
    cycles: list[tuple[float, float, int]], config: KoordinatorBurstConfig | None = None
) -> list[tuple[int, str]]:
    """Return quota and load state after each cycle of a second: (load of four CPUs, CPU use of /web, throttled periods)."""
    memory, result = CpuBurstState(), []
    for second, (load, used, throttled) in enumerate(cycles):
        observed = snapshot(second, [WEB, BATCH], machine=4)
        given = rates(load * 4, {"web": used, "batch": 0.0}, {"web": throttled})
        advice, memory = koordinator_burst(observed, given, config or KoordinatorBurstConfig(), memory)
        assert advice.quota_exempt == {"/web"}
        result.append((memory.quotas_us["/web"], advice.state))
        assert values(advice.requests)["/web", "cpu.max.burst"] == "2000000"
    return result


def test_a_throttled_quota_grows_to_three_times_its_base_while_the_node_is_idle() -> None:
    result = run_burst([(0.2, 2.0, 5)] * 9)
    assert [quota for quota, _ in result] == [
        240_000, 288_000, 345_600, 414_720, 497_664, 597_197, 600_000, 600_000, 600_000,
    ]  # fmt: skip
    assert {state for _, state in result} == {"idle"}


def test_overload_lowers_the_quota_and_cooling_holds_it() -> None:
    up = [(0.2, 2.0, 5)] * 3
    averaged = run_burst([*up, *[(0.9, 2.0, 5)] * 4])
    # Of 0.2 0.2 0.2 0.9 the mean is 0.38, with another 0.9 it is 0.48, then 0.55 and 0.62 of the last five.
    assert averaged[3:] == [(414_720, "idle"), (414_720, "cooling"), (331_776, "overload"), (265_421, "overload")]
    one_second = KoordinatorBurstConfig(average_s=0.5)
    assert run_burst([*up, (0.47, 2.0, 5), (0.5, 2.0, 5), (0.3, 2.0, 0)], one_second)[2:] == [
        (345_600, "idle"),
        (345_600, "cooling"),
        (276_480, "overload"),
        (276_480, "idle"),
    ]


def test_spent_tokens_lower_the_quota_and_idle_time_refills_them() -> None:
    # 300 % for 2 s are 400 percent-seconds; at 3 times the limit 200 a second are spent.
    config = KoordinatorBurstConfig(quota_burst_period_s=2)
    result = run_burst([(0.2, 6.0, 5)] * 4 + [(0.2, 0.0, 0)] * 2 + [(0.2, 2.0, 5)], config)
    quotas = [quota for quota, _ in result]
    assert quotas[3] < max(quotas[:3])
    assert quotas[-1] > quotas[-2], "two seconds of rest are 200 percent-seconds"
    assert min(quotas) >= 200_000


def test_no_quota_grows_while_the_load_is_unknown() -> None:
    memory = CpuBurstState(quotas_us={"/web": 300_000})
    observed = snapshot(0, [WEB], machine=4)
    advice, memory = koordinator_burst(observed, None, KoordinatorBurstConfig(), memory)
    assert (advice.state, memory.quotas_us) == ("unknown", {"/web": 300_000})


# --- memory


def test_memory_qos_follows_from_requests_and_limits() -> None:
    pods = [
        shared("web", memory_request=GIB, memory_limit=3 * GIB),
        shared("free", memory_request=GIB),
        reclaimed("batch", memory_request=GIB, memory_limit=2 * GIB),
    ]
    observed = msgspec.structs.replace(snapshot(0, pods), node=NodeSample(memory_total_bytes=11 * GIB))
    levels = {
        QoSLevel.SHARED: MemoryQosLevel(min_percent=25, low_percent=50, throttling_percent=80),
        QoSLevel.RECLAIMED: MemoryQosLevel(throttling_percent=100),
    }
    assert values(memory_qos_requests(observed, levels)) == {
        ("/web", "memory.min"): str(GIB // 4),
        ("/web", "memory.low"): str(GIB // 2),
        ("/web", "memory.high"): str(int(2.6 * GIB) // 4096 * 4096),
        ("/free", "memory.min"): str(GIB // 4),
        ("/free", "memory.low"): str(GIB // 2),
        ("/free", "memory.high"): str(9 * GIB),
        ("/batch", "memory.high"): "max",
    }
    assert memory_qos_requests(observed, {}) == ()


# --- requests


def test_the_first_request_counts_and_only_for_managed_cgroups() -> None:
    observed = snapshot(0, [WEB, BATCH])

    def request(cgroup: str, value: str, knob: Knob = Knob.MEMORY_MAX) -> KnobRequest:
        return KnobRequest(cgroup=cgroup, knob=knob, value=value, reason=VERDICT)

    knobs = {"/web": [Knob.QUOTA], "/batch": [Knob.MEMORY_MAX]}
    result = resolve_knob_requests(
        [
            request("/batch", "7"), request("/batch", "8"), request("/web", "9"), request("/", "1"), request("/gone", "1"),
            request("/batch", "1", Knob.MEMORY_HIGH),
        ],
        observed, knobs,
    )  # fmt: skip
    assert [(decision.cgroup, decision.cgroup_id, decision.pod, decision.value) for decision in result] == [
        ("/batch", 101, "default/batch", "7"),
        ("/web", 100, "default/web", "9"),
    ]


def test_without_configuration_nothing_is_requested() -> None:
    config = KnobsConfig()
    observed = snapshot(0, [WEB, DB])
    assert (config.burst.policy, config.suppress.policy, config.resctrl.enabled) == ("off", "off", False)
    assert memory_qos_requests(observed, config.memory_qos) == static_burst(observed, config.burst) == ()

"""CPU provision: its inputs, the tutorial's numbers, Katalyst's own cases on 96 CPUs, and properties of any node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.advisor.advisor_state import AdvisorState, ProvisionInputs, ProvisionState, RegionState
from agent.advisor.provision.provisioner import build_provision_inputs, provision_cpus
from agent.config.advisor import AdvisorConfig, InferenceConfig, IsolationConfig, ProvisionConfig
from api.advice import ControlKnob, CpuAdvice, RegionKind
from api.cpu import Cpu, Topology
from api.pod import Pod
from api.qos import QoSLevel
from api.rates import CgroupRates, NodeRates, Rates
from tests.agent.advisor.provision.builders import cpus_of, dedicated, reclaim_pool, region, shared, situation, steady
from tests.builders import pods as pod_builders
from tests.builders.nodes import S, topology
from tests.builders.pods import reclaimed
from tests.builders.snapshots import snapshot

ADVISOR, CONFIG, FRESH = AdvisorConfig(policy="canonical"), ProvisionConfig(), ProvisionState()
OFF = AdvisorConfig(policy="canonical", enable_reclaim=False)
# Katalyst's machine: two NUMA nodes, 0-23 and 48-71, 24-47 and 72-95; one CPU of each is reserved.
BIG = Topology(cpus=tuple(Cpu(id=i, core=i, socket=i % 48 // 24, numa=i % 48 // 24) for i in range(96)))
RESERVE = {0: 1, 1: 1}


def provisioned(
    pods: Sequence[Pod],
    advisor: AdvisorConfig = ADVISOR,
    config: ProvisionConfig = CONFIG,
    state: ProvisionState = FRESH,
    **fields: Any,
) -> CpuAdvice:
    """Return the advice of one cycle; `fields` are those of `situation`."""
    return provision_cpus(situation(pods, **fields), state, advisor, config)[0]


def test_the_tutorial_on_48_cpus() -> None:
    pod = shared("nginx", 1.0, 2.0)
    advice, state = provision_cpus(situation([pod], usage={"nginx": 0.0}), FRESH, ADVISOR, CONFIG)
    assert cpus_of(advice) == {"share": 4, "reclaim": 44}
    ramping = provisioned([pod], needs={"/nginx": steady(0.0, ramping=True)})
    assert cpus_of(ramping) == {"share": 5, "reclaim": 43}
    advice, state = provision_cpus(situation([pod], usage={"nginx": 1.6}), state, ADVISOR, CONFIG)
    assert cpus_of(advice) == {"share": 6, "reclaim": 42}
    loaded = situation([pod], needs={"/nginx": steady(1.6, load1=3.9)})
    advice, state = provision_cpus(loaded, state, ADVISOR, CONFIG)
    assert cpus_of(advice) == {"share": 8, "reclaim": 40}
    assert region(advice, "share").reason.text == (
        "share: 1 container is estimated to need 3.90 cores; with a reserve of 4 that makes 8 CPUs; it gets 8."
    )
    assert region(advice, "share").controls == {ControlKnob.REQUIREMENT: 8.0}
    assert state.regions["share"].requirement == 8


@pytest.mark.parametrize(
    ("pods", "pools", "expected"),
    [
        ([], {}, {"reserve": 2, "reclaim": 94}),
        ([shared("a", 4, 4)], {"share": (1, 25)}, {"reserve": 2, "share": 8, "reclaim": 86}),
        ([shared("a", 100, 100)], {"share": tuple(range(1, 95))}, {"reserve": 2, "share": 90, "reclaim": 4}),
        (
            [shared("a", 4, 4), shared("b", 6, 6, pool="batch")],
            {"share": (1, 25), "batch": (2, 26)},
            {"reserve": 2, "share": 6, "batch": 6, "reclaim": 82},
        ),
    ],
)
def test_share_pools_of_katalysts_machine(
    pods: list[Pod], pools: Mapping[str, tuple[int, ...]], expected: Mapping[str, int]
) -> None:
    assert cpus_of(provisioned(pods, cpus=BIG, reserve=RESERVE, pools=pools)) == expected


EXCLUSIVE = dedicated("db", 36, numa=(0,), exclusive=True)
ON_NODE_0 = {"/db": (*range(1, 24), *range(48, 72))}
POOLS = {"share": tuple(range(25, 31)), "reclaim": (70, 71, 94, 95)}


@pytest.mark.parametrize(
    ("advisor", "pods", "more", "expected", "overlap"),
    [
        (ADVISOR, [EXCLUSIVE], {}, {"reclaim": 47}, 4),  # 36 + 2 is less than the 45 it had: two CPUs fewer
        (ADVISOR, [EXCLUSIVE], {"not_reclaimable": frozenset({"default/db"})}, {"reclaim": 47}, 2),
        (ADVISOR, [EXCLUSIVE, shared("a", 4, 4)], {}, {"share": 6, "reclaim": 41}, 4),
        (OFF, [EXCLUSIVE, shared("a", 4, 4)], {}, {"share": 45, "reclaim": 2}, 2),
    ],
)
def test_a_pod_with_a_numa_node_of_its_own(
    advisor: AdvisorConfig, pods: list[Pod], more: dict[str, frozenset[str]], expected: Mapping[str, int], overlap: int
) -> None:
    advice = provisioned(pods, advisor, cpus=BIG, reserve=RESERVE, assigned=ON_NODE_0, pools=POOLS, **more)
    assert cpus_of(advice) == {"reserve": 2, ("dedicated-default/db", 0): 47, ("reclaim", 0): 0, **expected}
    assert reclaim_pool(advice, 0).overlap == {"dedicated-default/db": overlap}


@pytest.mark.parametrize(
    ("requirement", "advisor", "config", "text"),
    [
        (
            20,
            ADVISOR,
            CONFIG,
            (
                "share: 1 container is estimated to need 2.50 cores; with a reserve of 4 that makes 7 CPUs; "
                "it shrinks by at most 2 at once, so 18; it gets 18."
            ),
        ),
        (
            7,
            ADVISOR,
            ProvisionConfig(overlap=True),
            (
                "share: 1 container is estimated to need 2.50 cores; with a reserve of 4 that makes 7 CPUs; "
                "it gets 48, 41 of them reclaimable."
            ),
        ),
        (
            44,
            OFF,
            CONFIG,
            (
                "share: 1 container is estimated to need 30.00 cores; with a reserve of 4 that makes 34 CPUs; "
                "it shrinks by at most 2 at once, so 42; it is not reclaimable: its pods request 30; it gets 44."
            ),
        ),
        (
            20,
            ADVISOR,
            ProvisionConfig(share_policies=("none",)),
            (
                "share: no policy applies, so it keeps the requests of its pods; it is not reclaimable: its pods request 30; "
                "it gets 30."
            ),
        ),
    ],
)
def test_reasons_explain_each_step(
    requirement: int, advisor: AdvisorConfig, config: ProvisionConfig, text: str
) -> None:
    state = ProvisionState(regions={"share": RegionState(requirement=requirement)})
    advice = provisioned([shared("a", 30)], advisor, config, state, usage={"a": 2.0})
    assert region(advice, "share").reason.text == text


def test_a_throttled_pool_has_a_reason() -> None:
    pods = [shared("a", 30), shared("b", 30, pool="batch")]
    advice = provisioned(pods, usage={"a": 30.0, "b": 20.0})
    assert cpus_of(advice) == {"share": 26, "batch": 18, "reclaim": 4}
    assert region(advice, "batch").reason.text.endswith(
        "that makes 27 CPUs; it gets 18, because all pools together request more CPUs than there are."
    )


def test_bound_pods_have_pools_of_their_own() -> None:
    pods = [shared("a", 4), shared("b", 4, numa=(1,)), shared("c", 2, numa=(1,), pool="batch")]
    advice = provisioned(pods, cpus=topology(48, sockets=2), usage={"a": 1.0, "b": 3.0, "c": 2.0})
    # On node 1 two regions share its half of the reserve, on node 0 one has the other half.
    assert cpus_of(advice) == {
        "share": 4,
        "reclaim": 20,
        ("share-NUMA1", 1): 5,
        ("batch-NUMA1", 1): 2,
        ("reclaim", 1): 17,
    }
    assert [item.region.numa_nodes for item in advice.regions] == [(0,), (1,), (1,)]
    assert region(advice, "batch-NUMA1").reason.inputs["reserved_for_allocate_cores"] == 1.0


def test_a_dedicated_pod_on_two_nodes_needs_of_each_what_it_has_there() -> None:
    pod = dedicated("d", 16, numa=(0, 1))
    cpus = {"/d": (*range(12), 24, 25, 26, 27)}
    advice = provisioned([pod], cpus=topology(48, sockets=2), usage={"d": 9.6}, assigned=cpus)
    # 12 use x 12/16 and 4/16, and half of the reserve each
    first, second = region(advice, "dedicated-default/d-NUMA0"), region(advice, "dedicated-default/d-NUMA1")
    assert (first.reason.inputs["estimate_cores"], second.reason.inputs["estimate_cores"]) == (9.0, 3.0)
    assert (first.reason.inputs["wanted_cpus"], second.reason.inputs["wanted_cpus"]) == (11, 5)
    assert (first.upper_cores, first.lower_cores) == (16.0, 4.0)
    # Each node has half of its request.
    assert (cpus_of(advice)["dedicated-default/d", 0], cpus_of(advice)["dedicated-default/d", 1]) == (8, 8)


def test_an_unreclaimable_dedicated_pod_needs_its_whole_numa_node() -> None:
    pod, keys = dedicated("d", 8, numa=(1,)), frozenset({"default/d"})
    advice = provisioned([pod], cpus=topology(48, sockets=2), not_reclaimable=keys)
    result = region(advice, "dedicated-default/d-NUMA1")
    assert result.reason.inputs["estimate_cores"] == 24
    assert result.reason.rule == "provision_not_reclaimable"
    assert cpus_of(advice)["dedicated-default/d", 1] == 8


def test_an_unreclaimable_pool_keeps_the_requests_of_its_pods() -> None:
    config = ProvisionConfig(disable_reclaim_share_pools=("batch",))
    pods = [shared("a", 4), shared("b", 16, pool="batch"), shared("c", 9, pool="batch", numa=(1,))]
    usage = {"a": 1.0, "b": 1.0, "c": 1.0}
    advice = provisioned(pods, config=config, cpus=topology(48, sockets=2), usage=usage)
    assert cpus_of(advice) == {"share": 4, "batch": 16, "reclaim": 4, ("batch-NUMA1", 1): 9, ("reclaim", 1): 15}


def test_pods_without_requests_get_more_than_one_cpu() -> None:
    config = ProvisionConfig(disable_reclaim_share_pools=("batch",))
    pods = [shared("a", 4), shared("b", 2, pool="batch"), shared("c", pool="batch")]
    advice = provisioned(pods, config=config, usage={"a": 2.0, "b": 4.0, "c": 6.0})
    assert cpus_of(advice)["batch"] == 13  # 1.25 x (4 + 6), where their requests are 2


def test_a_region_without_a_policy_keeps_its_requests() -> None:
    advice = provisioned([shared("a", 20)], config=ProvisionConfig(share_policies=("none",)), usage={"a": 0.1})
    assert cpus_of(advice) == {"share": 20, "reclaim": 28}
    assert region(advice, "share").controls == {}
    assert region(advice, "share").reason.rule == "provision_none"


def test_overlap_shares_the_same_cpus() -> None:
    config, built = ProvisionConfig(overlap=True), situation([shared("a", 10)], usage={"a": 1.6})
    learned = ProvisionState(regions={"share": RegionState(requirement=6)})
    advice, _ = provision_cpus(built, learned, ADVISOR, config)
    assert cpus_of(advice) == {"share": 48, "reclaim": 0}
    assert reclaim_pool(advice).overlap == {"share": 42}
    # A fresh start begins with the pods' requests and reclaims two more CPUs every half a minute.
    advice, state = provision_cpus(built, FRESH, ADVISOR, config)
    assert reclaim_pool(advice).overlap == {"share": 40}
    for after_s, cpus in ((0, 40), (30, 42)):
        later = replace(built, now_ns=built.now_ns + after_s * S)
        assert reclaim_pool(provision_cpus(later, state, ADVISOR, config)[0]).overlap == {"share": cpus}


def test_only_bound_nodes_have_a_quota() -> None:
    config = ProvisionConfig(overlap=True, quota=True, share_policies=("dynamic-quota",))
    pods = [shared("a", 4), shared("b", 4, numa=(1,))]
    built = situation(
        pods,
        cpus=topology(48, sockets=2),
        usage={"a": 1.0, "b": 1.0},
        reclaim_use_cores={0: 5.0, 1: 2.0},
        pools={"reclaim": tuple(range(20, 28))},
        indicators={name: {"cpu_usage_ratio": 0.4} for name in ("default/a", "default/b")},
    )
    advice, state = provision_cpus(built, FRESH, ADVISOR, config)
    assert reclaim_pool(advice).quota_cores is None
    assert reclaim_pool(advice, 1).quota_cores == pytest.approx(4 * 0.4 + 2.0)
    assert reclaim_pool(advice, 1).overlap == {"share-NUMA1": 24}
    assert region(advice, "share").policy == "canonical"
    assert "not bound to a NUMA node" in region(advice, "share").reason.text
    # Without measurements the quota stays: it does not become what the requirement would leave.
    blind = replace(built, reclaim_use_cores={})
    assert reclaim_pool(provision_cpus(blind, state, ADVISOR, config)[0], 1).quota_cores == pytest.approx(3.6)


def test_unbound_regions_get_cpus() -> None:
    pods = [shared("a", 4), shared("b", 4, numa=(0,)), shared("c", 4, numa=(1,))]
    sizes = cpus_of(provisioned(pods, cpus=topology(16, sockets=2), usage={"a": 1.0, "b": 1.0, "c": 1.0}))
    assert sizes["share"] == 4
    assert sum(sizes.values()) == 16


@pytest.mark.parametrize(
    ("advisor", "overlap", "expected"),
    [
        (ADVISOR, False, {"share": 4, "reclaim": 0, ("dedicated-default/d", 0): 8, ("reclaim", 0): 36}),
        (OFF, False, {"share": 36, "reclaim": 0, ("dedicated-default/d", 0): 8, ("reclaim", 0): 4}),
        (ADVISOR, True, {"share": 40, "reclaim": 0, ("dedicated-default/d", 0): 8, ("reclaim", 0): 0}),
    ],
)
def test_a_dedicated_pod_on_the_only_numa_node_leaves_the_rest_to_the_share_pool(
    advisor: AdvisorConfig, overlap: bool, expected: Mapping[str | tuple[str, int], int]
) -> None:
    pods, config = [shared("a", 4), dedicated("d", 8, numa=(0,))], ProvisionConfig(overlap=overlap)
    assert cpus_of(provisioned(pods, advisor, config, usage={"a": 1.0, "d": 8.0})) == expected


def apart(
    runnable: float, *, cycles: int = 3, **more: float
) -> tuple[ProvisionInputs, ProvisionState, ProvisionConfig]:
    config = ProvisionConfig(isolation=IsolationConfig(enabled=True))
    pods = [shared("pod1", 2, more.get("limit", 2)), shared("pod2", 20, 20), shared("pod3", 30, 30)]
    built = situation(
        pods,
        cpus=BIG,
        reserve=RESERVE,
        usage={"pod1": 2.0, "pod2": 6.0, "pod3": 3.0},
        runnable={"/pod1": runnable, "/pod2": 8.0, "/pod3": 4.0},
    )
    state = ProvisionState(regions={"share": RegionState(requirement=84)})
    for _ in range(cycles - 1):
        _, state = provision_cpus(built, state, ADVISOR, config)
    return built, state, config


def test_an_overloaded_pod_is_isolated_in_the_third_cycle() -> None:
    built, state, config = apart(50.0)
    assert state.isolated == ()
    advice, state = provision_cpus(built, state, ADVISOR, config)
    assert advice.isolated == state.isolated == ("default/pod1",)
    assert cpus_of(advice) == {"reserve": 2, "isolation-default/pod1": 2, "share": 82, "reclaim": 10}
    result = region(advice, "isolation-default/pod1")
    assert (result.region.kind, result.reason.rule) == (RegionKind.ISOLATION, "isolated")
    assert "50.0 runnable tasks, more than 3 for its 2 cores" in result.reason.text
    assert result.controls == {ControlKnob.ISOLATED_UPPER: 2, ControlKnob.ISOLATED_LOWER: 2}


def test_pods_that_do_not_fit_are_not_isolated() -> None:
    built, state, config = apart(50.0, limit=8.0)
    crowded = replace(state, regions={"share": RegionState(requirement=90, last_ramp_down_ns=built.now_ns - 31 * S)})
    advice, state = provision_cpus(built, crowded, ADVISOR, config)
    assert advice.isolated == state.isolated == ()
    assert cpus_of(advice) == {"reserve": 2, "share": 88, "reclaim": 6}
    assert "not isolated because there is no room" in region(advice, "share").reason.text


LEVELS = st.sampled_from([QoSLevel.SHARED, QoSLevel.SHARED, QoSLevel.DEDICATED, QoSLevel.RECLAIMED])


@st.composite
def situations(draw: st.DrawFn) -> ProvisionInputs:
    numa = draw(st.sampled_from([1, 2, 4]))
    nodes = topology(numa * draw(st.integers(4, 32)) * 2, sockets=numa, threads=draw(st.sampled_from([1, 2])))
    pods = []
    for k in range(draw(st.integers(0, 8))):
        cores = draw(st.floats(0.1, 24.0) | st.none())
        where = (draw(st.integers(0, numa - 1)),) if draw(st.booleans()) else ()
        pool = draw(st.sampled_from(["", "", "batch"]))
        qos = draw(LEVELS)
        make = dedicated if qos is QoSLevel.DEDICATED else shared
        pod = make(f"p{k}", cores, numa=where, pool=pool, exclusive=qos is QoSLevel.DEDICATED and draw(st.booleans()))
        pods.append(replace(pod, qos=qos))
    usage = {pod.name: draw(st.floats(0, 40) | st.none()) for pod in pods}
    return situation(pods, cpus=nodes, usage=usage, reserve=dict.fromkeys(range(numa), draw(st.integers(0, 1))))


@settings(deadline=None)
@given(situations(), st.booleans(), st.booleans())
def test_sums_bounds_and_rest(inputs: ProvisionInputs, enable: bool, overlap: bool) -> None:
    advisor = AdvisorConfig(policy="canonical", enable_reclaim=enable)
    config = ProvisionConfig(overlap=overlap, quota=overlap)
    advice, state = provision_cpus(inputs, FRESH, advisor, config)
    total = sum(size.cpus for size in advice.sizes)
    online = [size for size in advice.sizes if size.pool not in ("reclaim", "reserve")]
    assert all(size.cpus >= 1 for size in online)
    cpus = len(inputs.snapshot.topology.cpus)
    if len(online) * 4 <= cpus // len(inputs.snapshot.topology.numa_nodes):
        assert total <= cpus
        least = advisor.reclaim_reserve_cores(cpus, len(inputs.snapshot.topology.numa_nodes))
        reclaimed = [size for size in advice.sizes if size.pool == "reclaim"]
        assert sum(size.cpus + sum(size.overlap.values()) for size in reclaimed) >= least
    for item in advice.regions:
        if ControlKnob.REQUIREMENT in item.controls:
            assert 1 <= item.controls[ControlKnob.REQUIREMENT] <= item.upper_cores + 1
        assert item.reason.text.startswith(f"{item.region.name}: ")
        assert set(item.region.containers) == {f"/{key.partition('/')[2]}" for key in item.region.pods}
    assert sorted({key for item in advice.regions for key in item.region.pods}) == sorted(
        pod.key for pod in inputs.snapshot.pods if pod.qos.online
    )
    for _ in range(30):  # growth from the requests is ten CPUs per cycle
        advice, state = provision_cpus(inputs, state, advisor, config)
    again, after = provision_cpus(inputs, state, advisor, config)
    assert again.sizes == advice.sizes
    assert after == state
    encoded = msgspec.json.encode(state)
    assert msgspec.json.decode(encoded, type=ProvisionState) == state


def test_nothing_is_advised_of_a_node_whose_cpus_are_not_known() -> None:
    state = ProvisionState(isolated=("default/a",))
    blind = situation([shared("a", 4)], cpus=Topology(cpus=()))
    advice, after = provision_cpus(blind, state, ADVISOR, CONFIG)
    assert (advice.regions, advice.sizes) == ((), ())
    assert after == state


def test_a_removed_container_needs_nothing() -> None:
    pod = shared("a", 8)
    built = situation([pod], usage={"a": 8.0})
    built = replace(built, snapshot=replace(built.snapshot, pods=(pod, pod_builders.shared("g", cgroup="/gone/g"))))
    advice, _ = provision_cpus(built, FRESH, ADVISOR, CONFIG)
    assert region(advice, "share").reason.inputs["estimate_cores"] == 10.0


EVEN = {"reclaim": (*range(8), *range(24, 32))}
"""8 CPUs of each of two NUMA nodes."""


def batch(name: str, *numa: int) -> Pod:
    return replace(reclaimed(name), bound_numa=numa)


@pytest.mark.parametrize(
    ("pods", "use", "cpus", "expected"),
    [
        ([batch("a", 0), batch("b", 0)], {"a": 4.0, "b": 2.0}, {}, {0: 6.0, 1: 0.0}),
        ([batch("a", 0), batch("free")], {"a": 4.0, "free": 2.0}, {}, {0: 5.0, 1: 1.0}),
        # kept off the node that has bound ones: all of it is on the other
        ([batch("a", 0), batch("free")], {"a": 4.0, "free": 2.0}, {"/free": (24, 25)}, {0: 4.0, 1: 2.0}),
        ([batch("free")], {"free": 2.0}, {"/free": (0, 24, 25, 26)}, {0: 0.5, 1: 1.5}),
        # bound to several, or to one that is not there, is bound to none
        ([batch("a", 0, 1), batch("b", 7)], {"a": 4.0, "b": 2.0}, {}, {0: 3.0, 1: 3.0}),
        # what is not known is known of no node that it may be on
        ([batch("a", 0), batch("b", 1)], {"a": None, "b": 2.0}, {}, {1: 2.0}),
        ([batch("a", 0), batch("free")], {"a": 4.0, "free": None}, {}, {}),
        ([batch("a", 0), batch("free")], {"a": 4.0, "free": None}, {"/free": (24,)}, {0: 4.0}),
        ([], {}, {}, {0: 0.0, 1: 0.0}),
    ],
)
def test_use_is_where_the_pods_are(
    pods: list[Pod],
    use: Mapping[str, float | None],
    cpus: Mapping[str, tuple[int, ...]],
    expected: Mapping[int, float],
) -> None:
    current = snapshot(1, pods, machine=topology(48, sockets=2))
    change = Rates(
        node=NodeRates(interval_ns=S),
        cgroups={f"/{name}": CgroupRates(interval_ns=S, cpu_cores=cores) for name, cores in use.items()},
    )
    built = build_provision_inputs(current, change, AdvisorState(pools=EVEN, cpus=cpus), InferenceConfig(), S)
    assert built.reclaim_use_cores == expected
    assert (
        build_provision_inputs(
            current, None, AdvisorState(pools=EVEN, cpus=cpus), InferenceConfig(), S
        ).reclaim_use_cores
        == {}
    )
    assert build_provision_inputs(current, change, AdvisorState(), InferenceConfig(), S).reclaim_use_cores == {}

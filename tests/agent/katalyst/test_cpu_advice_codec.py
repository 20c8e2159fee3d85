"""Pool sizes encoded as blocks and decoded; every answer passes the checks of a stock plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config.qrm import CpuPlacementConfig
from agent.katalyst.cpu_advice_codec import CpuAdviceInputs, decode_cpu_advice, encode_cpu_advice
from agent.katalyst.cpu_plugin_state import (
    decode_plugin_state,
    encode_checkpoint,
    encode_cpu_request,
    request_from_checkpoint,
)
from agent.katalyst.messages import UnusableMessage
from agent.qrm.cpuset.allocate import allocate_cpusets
from agent.qrm.cpuset.state import CpusetState
from api.advice import Headroom, PoolSize
from api.knobs import Reason
from api.proto import cpu_advisor_pb2 as cpu
from api.qos import QoSLevel
from tests.agent.katalyst.builders import blocks, node, pod, put, put_pool, request

NODE = {0: 24, 1: 24}
WHY = Reason(rule="r", text="t")


def check_as_stock_plugin(answer: Any, message: Any, cpus_by_numa: dict[int, int]) -> None:
    """Check an answer like validator_cpu_advisor.go and GetBlocks of katalyst-core v0.5.47."""
    blocks_by_id: dict[str, tuple[int, int]] = {}
    for entry in answer.entries.values():
        for info in entry.entries.values():
            for numa, part in info.calculation_results_by_numas.items():
                for block in part.blocks:
                    assert blocks_by_id.setdefault(block.block_id, (numa, block.result)) == (numa, block.result)
    for numa, cpus in cpus_by_numa.items():
        assert sum(result for where, result in blocks_by_id.values() if where == numa) <= cpus
    assert sum(result for _numa, result in blocks_by_id.values()) <= sum(cpus_by_numa.values())
    for name in ("reserve", "interrupt"):
        assert (name in message.entries) == (name in answer.entries)
    if "reserve" in message.entries:
        lists = message.entries["reserve"].entries[""].allocation_info.topology_aware_assignments
        assert list(blocks(answer, "reserve")) == [-1]
        assert blocks(answer, "reserve")[-1] == [len(lists)]
    for uid, containers in message.entries.items():
        for name, item in containers.entries.items():
            if name and item.allocation_info.owner_pool_name == "dedicated":
                expected = {
                    numa: len(text.split(",")) for numa, text in item.allocation_info.topology_aware_assignments.items()
                }
                got = blocks(answer, uid, name)
                assert {numa: sum(sizes) for numa, sizes in got.items()} == expected
                assert answer.entries[uid].entries[name].owner_pool_name == "dedicated"
            elif name and uid in answer.entries:
                assert answer.entries[uid].entries[name].owner_pool_name in answer.entries


def test_pools_of_two_nodes_one_bound() -> None:
    """Assembler of katalyst-core: two nodes of 24, 6 for share, 8 for what is bound to node 1, 18 and 16 for reclaim."""
    web, bound, batch = pod("web"), pod("bound", bound=(1,)), pod("batch", QoSLevel.RECLAIMED)
    message = request()
    put(message, web, "share")
    put(message, bound, "share-NUMA1")
    put(message, batch, "reclaim", {0: "8,9"})
    sizes = (
        PoolSize(pool="share", cpus=6),
        PoolSize(pool="reclaim", cpus=18),
        PoolSize(pool="share-NUMA1", numa=1, cpus=8),
        PoolSize(pool="reclaim", numa=1, cpus=16, quota_cores=3.5),
    )
    headroom = Headroom(cores=20.5, cores_by_numa={1: 12.0, 0: 8.5}, reason=WHY)
    inputs = CpuAdviceInputs(sizes=sizes, pods=(web, bound, batch), cpus_by_numa=NODE, headroom=headroom)
    got = encode_cpu_advice(message, inputs)
    check_as_stock_plugin(got, message, NODE)
    assert blocks(got, "share") == {-1: [6]}
    assert blocks(got, "share-NUMA1") == {1: [8]}
    assert blocks(got, "reclaim") == {-1: [18], 1: [16]}
    owners = {uid: got.entries[uid].entries["main"].owner_pool_name for uid in ("u-web", "u-bound", "u-batch")}
    assert owners == {"u-web": "share", "u-bound": "share-NUMA1", "u-batch": "reclaim"}
    assert not got.allow_shared_cores_overlap_reclaimed_cores
    extras = [(item.cgroup_path, dict(item.calculation_result.values)) for item in got.extra_entries]
    unlimited = '{"cpu_quota":-1,"cpu_period":100000}'
    assert extras == [
        ("/kubepods/besteffort", {"cgroup_config": unlimited}),
        ("/kubepods/besteffort-1", {"cgroup_config": unlimited}),
        ("", {"cpu_numa_headroom": '{"0":8.5,"1":12.0}'}),
    ]
    gate = message.wanted_feature_gates["feature_gate_quota_ctrl_knob"]
    gate.name, gate.type = "feature_gate_quota_ctrl_knob", "CPU"
    got = encode_cpu_advice(message, inputs)
    assert got.extra_entries[1].calculation_result.values["cgroup_config"] == '{"cpu_quota":350000,"cpu_period":100000}'
    assert list(got.supported_feature_gates) == ["feature_gate_quota_ctrl_knob"]


def test_overlap_is_a_block_of_both() -> None:
    sizes = (
        PoolSize(pool="share", cpus=40),
        PoolSize(pool="reclaim", cpus=0, overlap={"share": 30}),
    )
    got = encode_cpu_advice(request(), CpuAdviceInputs(sizes=sizes, pods=(), cpus_by_numa=NODE))
    assert blocks(got, "share") == {-1: [30, 10]}
    assert blocks(got, "reclaim") == {-1: [30]}
    assert got.allow_shared_cores_overlap_reclaimed_cores
    mine = got.entries["share"].entries[""].calculation_results_by_numas[-1].blocks
    containers = got.entries["reclaim"].entries[""].calculation_results_by_numas[-1].blocks
    assert mine[0].block_id == containers[0].block_id != mine[1].block_id
    assert [target.overlap_target_pool_name for target in mine[0].overlap_targets] == ["reclaim"]
    assert [target.overlap_target_pool_name for target in containers[0].overlap_targets] == ["share"]
    assert containers[0].overlap_targets[0].overlap_type == cpu.OverlapWithPool
    assert not mine[1].overlap_targets


def test_a_reserve_without_cpus_has_one_block() -> None:
    """As Katalyst's own plugin checks: without it the whole answer is refused."""
    message = request()
    put_pool(message, "reserve", {})
    sizes = (PoolSize(pool="share", cpus=6), PoolSize(pool="reclaim", cpus=42))
    got = encode_cpu_advice(message, CpuAdviceInputs(sizes=sizes, pods=(), cpus_by_numa=NODE))
    check_as_stock_plugin(got, message, NODE)
    assert blocks(got, "reserve") == {-1: [0]}


def test_reserved_cpus_of_the_plugin_are_repeated() -> None:
    """A dedicated pod with a sidecar on all of node 0 but one reserved CPU; reclaimed pods may share 5 of its 23."""
    db = pod("db", QoSLevel.DEDICATED, 23, bound=(0,), numa_exclusive=True)
    message = request()
    cpus = ",".join(map(str, range(1, 24)))
    put(message, db, "dedicated", {0: cpus})
    put(message, db, "dedicated", {0: cpus}, container="proxy")
    put_pool(message, "reserve", {0: "0", 1: "24"})
    put_pool(message, "interrupt", {1: "25"})
    sizes = (
        PoolSize(pool="share", cpus=6),
        PoolSize(pool="reclaim", cpus=18),
        PoolSize(pool="dedicated-ns/db", numa=0, cpus=24),
        PoolSize(pool="reclaim", numa=0, cpus=0, overlap={"dedicated-ns/db": 5}),
    )
    got = encode_cpu_advice(message, CpuAdviceInputs(sizes=sizes, pods=(db,), cpus_by_numa=NODE))
    check_as_stock_plugin(got, message, NODE)
    assert blocks(got, "u-db", "main") == blocks(got, "u-db", "proxy") == {0: [5, 18]}
    assert blocks(got, "interrupt") == {}
    # Our advisor knew of 24 CPUs on node 1, of which the plugin keeps two: reclaimed pods give way.
    assert blocks(got, "share") == {-1: [6]}
    assert blocks(got, "reclaim") == {-1: [16], 0: [5]}
    assert not got.allow_shared_cores_overlap_reclaimed_cores
    shared = got.entries["reclaim"].entries[""].calculation_results_by_numas[0].blocks[0]
    targets = [(item.overlap_target_pod_uid, item.overlap_target_container_name) for item in shared.overlap_targets]
    assert targets == [("u-db", "main"), ("u-db", "proxy")]
    assert "dedicated-ns/db" not in got.entries


def test_unbound_pools_overlap_nodes_that_are_all_bound() -> None:
    """The plugin would find no CPU for them elsewhere: 12 of share go to node 1, which has 14 left, and 3 to node 0."""
    sizes = (
        PoolSize(pool="share", cpus=15),
        PoolSize(pool="reclaim", cpus=0, overlap={"share": 4}),
        PoolSize(pool="share-NUMA0", numa=0, cpus=20),
        PoolSize(pool="reclaim", numa=0, cpus=1),
        PoolSize(pool="share-NUMA1", numa=1, cpus=8),
        PoolSize(pool="reclaim", numa=1, cpus=4),
    )
    got = encode_cpu_advice(request(), CpuAdviceInputs(sizes=sizes, pods=(), cpus_by_numa=NODE))
    check_as_stock_plugin(got, request(), NODE)
    assert blocks(got, "share") == {0: [3], 1: [4, 8]}
    assert blocks(got, "reclaim") == {-1: [], 0: [1], 1: [4, 4]}


def test_an_isolated_pod_has_its_own_pool() -> None:
    web, calm = pod("web"), pod("calm")
    message = request()
    put(message, web, "share")
    put(message, calm, "", ramp_up=True)
    sizes = (
        PoolSize(pool="isolation-ns/web", cpus=4),
        PoolSize(pool="share", cpus=4),
        PoolSize(pool="reclaim", cpus=40),
    )
    got = encode_cpu_advice(message, CpuAdviceInputs(sizes=sizes, pods=(web, calm), cpus_by_numa=NODE))
    assert got.entries["u-web"].entries["main"].owner_pool_name == "isolation-ns/web"
    assert got.entries["u-calm"].entries["main"].owner_pool_name == "share"


REFUSED = {
    "too many online": (
        (PoolSize(pool="share", cpus=49),),
        {},
        r"online pools 49 CPUs outside NUMA nodes with bound pods, where .* 48",
    ),
    "not a node": ((PoolSize(pool="share-NUMA7", numa=7, cpus=1),), {}, r"NUMA node 7, the node has \[0, 1\]"),
    "a gate of memory": ((), {"x": ("Memory", False)}, r"wanted_feature_gates\[x\]\.type is 'Memory'"),
    "a gate that must be": ((), {"x": ("CPU", True)}, r"wanted_feature_gates\[x\] is not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_inconsistent_request_is_refused(name: str) -> None:
    sizes, desired, text = REFUSED[name]
    message = request()
    for gate, (kind, must) in desired.items():
        message.wanted_feature_gates[gate].type = kind
        message.wanted_feature_gates[gate].must_mutually_supported = must
    with pytest.raises(UnusableMessage, match=text):
        encode_cpu_advice(message, CpuAdviceInputs(sizes=sizes, pods=(), cpus_by_numa=NODE))


def test_an_invalid_cpu_list_names_its_field() -> None:
    message = request()
    put_pool(message, "reserve", {0: "0-"})
    with pytest.raises(UnusableMessage, match=r"entries\[reserve\]\.topology_aware_assignments: .*'0-'"):
        encode_cpu_advice(message, CpuAdviceInputs(sizes=(), pods=(), cpus_by_numa=NODE))


numbers = st.integers(0, 10)
POOLS = st.fixed_dictionaries({"share": numbers, "batch": numbers, "isolation-ns/a": numbers})


@given(POOLS, st.integers(0, 20), st.integers(1, 8), st.integers(0, 8), st.integers(0, 30))
def test_advice_survives_encoding_and_decoding(
    pools: dict[str, int], own: int, bound: int, shared: int, own1: int
) -> None:
    """Sizes that fit come back the same, whatever they are, overlap and quota included."""
    share = pools["share"]
    sizes = (
        *(PoolSize(pool=name, cpus=cpus) for name, cpus in sorted(pools.items()) if cpus),
        PoolSize(pool="share-NUMA1", numa=1, cpus=bound),
        PoolSize(pool="reclaim", cpus=own, overlap={"share": min(shared, share)} if min(shared, share) else {}),
        PoolSize(
            pool="reclaim",
            numa=1,
            cpus=own1,
            quota_cores=1.5,
            overlap={"share-NUMA1": min(shared, bound)} if shared else {},
        ),
    )
    apart = pod("a")
    message = request()
    put(message, apart, "isolation-x")
    gate = message.wanted_feature_gates["feature_gate_quota_ctrl_knob"]
    gate.type = "CPU"
    room = {0: 70, 1: 40}
    inputs = CpuAdviceInputs(sizes=sizes, pods=(apart,), cpus_by_numa=room)
    got = encode_cpu_advice(message, inputs)
    check_as_stock_plugin(got, message, room)
    back = decode_cpu_advice(got, (apart,), room, None)
    key = lambda size: (size.pool, size.numa)  # noqa: E731 - one use
    assert sorted(back.cpu.sizes, key=key) == sorted(sizes, key=key)
    assert cpu.GetAdviceResponse.FromString(got.SerializeToString()) == got


@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_decoded_or_refused(data: bytes) -> None:
    try:
        got = cpu.GetAdviceResponse.FromString(data)
    except Exception:  # noqa: BLE001 - protobuf's own, whose class its versions disagree on
        return
    try:
        decode_cpu_advice(got, (), NODE, None)
    except UnusableMessage as error:
        assert len(str(error)) < 400  # noqa: PT017 - either outcome is right


def test_a_stock_answer_is_decoded() -> None:
    """An isolated pod in a pool of katalyst's naming, a quota, headroom: our QRM places it."""
    web, apart, batch = pod("web"), pod("apart", cores=4), pod("batch", QoSLevel.RECLAIMED)
    answer = cpu.ListAndWatchResponse()
    for uid, owner in (("u-web", "share"), ("u-apart", "isolation-apart-0d1c"), ("u-batch", "reclaim")):
        answer.entries[uid].entries["main"].owner_pool_name = owner
    for name, cpus in (("share", 6), ("isolation-apart-0d1c", 8), ("reclaim", 30)):
        info = answer.entries[name].entries[""]
        info.owner_pool_name = name
        info.calculation_results_by_numas[-1].blocks.add(result=cpus, block_id=name)
    for path, key, text in (
        ("/kubepods/besteffort", "cgroup_config", '{"cpu_quota":1250000,"cpu_period":100000}'),
        ("", "cpu_numa_headroom", '{"0":10.5,"1":9}'),
    ):
        answer.extra_entries.add(cgroup_path=path).calculation_result.values[key] = text
    advice = decode_cpu_advice(answer, (web, apart, batch), NODE, 40.0)
    assert advice.policy == "katalyst"
    assert advice.action == "shrink"
    assert advice.reclaimable_cores == 12.5
    assert advice.cpu.isolated == ("ns/apart",)
    assert advice.headroom_cores == 19.5
    sizes = {(size.pool, size.numa): (size.cpus, size.quota_cores) for size in advice.cpu.sizes}
    assert sizes == {("share", -1): (6, None), ("isolation-ns/apart", -1): (8, None), ("reclaim", -1): (30, 12.5)}
    placement, _state = allocate_cpusets(
        advice.cpu.sizes, (web, apart, batch), node(), CpusetState(), CpuPlacementConfig(), 0
    )
    assert {name: len(cpus) for name, cpus in placement.cpus.items()} == {
        "/kubepods/web": 6, "/kubepods/apart": 8, "/kubepods/batch": 30
    }  # fmt: skip


def share_block(numa: int = -1, **fields: Any) -> Callable[[Any], Any]:
    """Return a change that adds a block to pool share."""
    return lambda answer: answer.entries["share"].entries[""].calculation_results_by_numas[numa].blocks.add(**fields)


def extra_value(key: str, text: str) -> Callable[[Any], Any]:
    """Return a change that adds a value for the node."""
    return lambda answer: answer.extra_entries.add().calculation_result.values.update({key: text})


INVALID = {
    "no reclaim": (lambda answer: answer.entries.pop("reclaim"), r"entries\[reclaim\] is missing"),
    "two sizes": (share_block(result=3, block_id="r"), r"block r has 3 CPUs here and 30 elsewhere"),
    "two nodes": (share_block(1, result=30, block_id="r"), r"block r is also on NUMA node -1"),
    "no id": (share_block(result=3), r"a block has no block_id"),
    "a huge block": (share_block(result=1 << 60, block_id="h"), r"are impossible"),
    "no such node": (share_block(9, result=1, block_id="n"), r"NUMA node 9, the node has \[0, 1\]"),
    "too many CPUs": (share_block(0, result=25, block_id="t"), r"25 CPUs of NUMA node 0, which has 24"),
    "a foreign name": (
        lambda answer: setattr(answer.entries["share"].entries[""], "owner_pool_name", "x"),
        r"owner_pool_name is 'x'",
    ),
    "a quota of words": (extra_value("cgroup_config", "{}}"), r"extra_entries\[0\] cgroup_config: '\{\}\}'"),
    "a quota without period": (extra_value("cgroup_config", '{"cpu_quota":5}'), r"cpu_period is 0"),
    "negative headroom": (
        extra_value("cpu_numa_headroom", '{"0":-1}'),
        r"cpu_numa_headroom: -1\.0 of NUMA node 0 is out of range",
    ),
    "headroom of words": (extra_value("cpu_numa_headroom", '{"a":1}'), r"is not a map of NUMA nodes to numbers"),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_answer_is_rejected(name: str) -> None:
    answer = cpu.GetAdviceResponse()
    for pool, cpus in (("share", 6), ("reclaim", 30)):
        info = answer.entries[pool].entries[""]
        info.owner_pool_name = pool
        info.calculation_results_by_numas[-1].blocks.add(result=cpus, block_id=pool[0])
    decode_cpu_advice(answer, (), NODE, None)
    INVALID[name][0](answer)
    with pytest.raises(UnusableMessage, match=INVALID[name][1]):
        decode_cpu_advice(answer, (), NODE, None)


def test_the_state_survives_encoding_and_decoding() -> None:
    """The server decodes the client's request to the same state; pods that are gone are left out."""
    web, bound = pod("web"), pod("bound", bound=(1,))
    db = pod("db", QoSLevel.DEDICATED, 4, bound=(0,))
    pods = (web, bound, db)
    _placement, state = allocate_cpusets(
        (), pods, node(), CpusetState(policy_name="dynamic"), CpuPlacementConfig(ramp_up_s=0), 5
    )
    message = encode_cpu_request(state, pods)
    assert message.entries["u-bound"].entries["main"].allocation_info.owner_pool_name == "share-NUMA1"
    assert message.entries["u-bound"].entries["main"].metadata.annotations["numa_hint"] == "1"
    assert not message.entries["u-web"].entries["main"].allocation_info.topology_aware_assignments, "its pool has them"
    assert dict(message.entries["u-db"].entries["main"].allocation_info.topology_aware_assignments) == {
        1: "24-25,36-37"
    }
    assert message.entries["u-web"].entries["main"].metadata.requestMilliQuantity == 2000
    read = decode_plugin_state(cpu.GetAdviceRequest.FromString(message.SerializeToString()))
    for uid, numa in (("u-web", ()), ("u-bound", (1,)), ("u-db", (1,))):
        mine, containers = state.pod_entries[uid]["main"], read.pod_entries[uid]["main"]
        assert containers.bound_numa == mine.bound_numa == numa
        assert containers.owner_pool_name == mine.owner_pool_name
        assert containers.request_quantity == mine.request_quantity
    assert read.pool("reclaim") == state.pool("reclaim")
    assert "u-db" not in encode_cpu_request(state, (web, bound)).entries
    older = encode_checkpoint(state)
    containers = {(uid, "main"): message.entries[uid].entries["main"].metadata for uid in ("u-web", "u-bound", "u-db")}
    again = request_from_checkpoint(older, containers)
    assert decode_plugin_state(again) == read

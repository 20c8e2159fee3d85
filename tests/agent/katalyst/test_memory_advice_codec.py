"""Memory advice encoded for the protocol, and decoded."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config.qrm import CpuPlacementConfig
from agent.katalyst.memory_advice_codec import decode_memory_advice, encode_memory_advice, encode_memory_request
from agent.katalyst.messages import UnusableMessage
from agent.qrm.cpuset.allocate import allocate_cpusets
from agent.qrm.cpuset.state import CpusetState
from api.advice import Headroom, KnobRequest, MemoryAdvice, MemoryCondition, MemoryPressure
from api.knobs import Knob, Reason
from api.proto import advisor_svc_pb2 as svc
from api.qos import QoSLevel
from tests.agent.katalyst.builders import node, pod

WHY = Reason(rule="r", text="t")
DYING = Reason(rule="memory_dying_reclaim", text="t")
GI = 1 << 30
WEB, BATCH = pod("web"), pod("batch", QoSLevel.RECLAIMED)


def advice(*requests: tuple[str, Knob, str], reason: Reason = WHY) -> MemoryAdvice:
    return MemoryAdvice(
        policy="canonical",
        headroom_bytes=None,
        headroom_reason=WHY,
        condition=MemoryCondition(state=MemoryPressure.NO_RISK, reason=WHY),
        knob_requests=tuple(
            KnobRequest(cgroup=path, knob=knob, value=value, reason=reason) for path, knob, value in requests
        ),
    )


def advice_request() -> svc.GetAdviceRequest:
    request = svc.GetAdviceRequest()
    for item in (WEB, BATCH):
        request.entries[item.uid].entries["main"].pod_uid = item.uid
    return request


def decode_values(got: svc.GetAdviceResponse) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]:
    pods = {
        uid: dict(entry.container_entries["main"].calculation_result.values) for uid, entry in got.pod_entries.items()
    }
    return pods, {item.cgroup_path: dict(item.calculation_result.values) for item in got.extra_entries}


KNOB_KEYS = {
    "limit of a container": ("/kubepods/web", Knob.MEMORY_MAX, str(GI), {"memory_limit_in_bytes": str(GI)}),
    "no limit": ("/kubepods/besteffort", Knob.MEMORY_MAX, "max", {"memory_limit_in_bytes": "-1"}),
    "high of a group": ("/kubepods/besteffort", Knob.MEMORY_HIGH, "4096", {"memory_high": "4096"}),
    "high of a container, which that plugin ignores": ("/kubepods/web", Knob.MEMORY_HIGH, "4096", {}),
    "cache": ("/kubepods/web", Knob.DROP_CACHE, "4096", {"drop_cache": "true"}),
    "cache of a group, which that plugin refuses": ("/kubepods/besteffort", Knob.DROP_CACHE, "4096", {}),
    "nodes": ("/kubepods/batch", Knob.MEMS, "0-1", {"cpuset_mems": "0-1"}),
    "offloading": ("/kubepods/web", Knob.MEMORY_RECLAIM, "8192", {"memory_offloading": "8192"}),
    "swap": ("/kubepods/web", Knob.SWAP_MAX, "max", {"swap_max": "true", "memory_offloading": "0"}),
    "no swap": ("/kubepods/burstable", Knob.SWAP_MAX, "0", {"swap_max": "false", "memory_offloading": "0"}),
    "a knob that has no key": ("/kubepods/web", Knob.MEMORY_LOW, "1", {}),
}


@pytest.mark.parametrize("name", KNOB_KEYS)
def test_each_knob_request_has_its_key(name: str) -> None:
    cgroup, knob, value, expected = KNOB_KEYS[name]
    pods, others = decode_values(
        encode_memory_advice(advice_request(), advice((cgroup, knob, value)), (WEB, BATCH), None)
    )
    values_by_cgroup = {**others, **{f"/kubepods/{uid.removeprefix('u-')}": values for uid, values in pods.items()}}
    assert values_by_cgroup.get(cgroup, {}) == expected


def test_memory_of_dying_cgroups_has_the_key_of_its_file() -> None:
    _pods, others = decode_values(
        encode_memory_advice(
            advice_request(), advice(("/kubepods/burstable", Knob.MEMORY_RECLAIM, "9"), reason=DYING), (), None
        )
    )
    assert others == {"/sys/fs/cgroup/kubepods/burstable": {"dying_memcg_reclaim": "true"}}


def test_headroom_belongs_to_no_cgroup() -> None:
    headroom = Headroom(memory_by_numa={1: 1.5 * GI, 0: GI}, reason=WHY)
    got = encode_memory_advice(advice_request(), advice(), (WEB, BATCH), headroom)
    (values,) = (dict(item.calculation_result.values) for item in got.extra_entries)
    assert values == {"memory_numa_headroom": '{"0":1073741824,"1":1610612736}'}


def test_a_container_that_the_plugin_does_not_name_has_no_advice() -> None:
    """The plugin finds no such container, but finds the cgroup by its path."""
    request = svc.GetAdviceRequest()
    pods, others = decode_values(
        encode_memory_advice(request, advice(("/kubepods/web", Knob.MEMORY_MAX, "4096")), (WEB,), None)
    )
    assert (pods, others) == ({}, {"/kubepods/web": {"memory_limit_in_bytes": "4096"}})


SIZES = st.integers(1, (1 << 62) - 1).map(str)
KNOB_REQUESTS = st.one_of(
    st.tuples(st.just("/kubepods/web"), st.sampled_from((Knob.MEMORY_MAX, Knob.MEMORY_RECLAIM)), SIZES),
    st.tuples(
        st.just("/kubepods/besteffort"), st.sampled_from((Knob.MEMORY_MAX, Knob.MEMORY_HIGH)), SIZES | st.just("max")
    ),
    st.tuples(st.just("/kubepods/batch"), st.just(Knob.MEMS), st.sampled_from(("0", "1", "0-1"))),
    st.tuples(st.just("/kubepods/burstable"), st.just(Knob.SWAP_MAX), st.sampled_from(("0", "max"))),
    st.tuples(st.just("/kubepods/web"), st.just(Knob.DROP_CACHE), st.just("77")),
)


@given(st.lists(KNOB_REQUESTS, unique_by=lambda request: request[:2], max_size=6))
def test_requests_survive_encoding_and_decoding(knob_requests: list[tuple[str, Knob, str]]) -> None:
    got = encode_memory_advice(advice_request(), advice(*knob_requests), (WEB, BATCH), None)
    back = decode_memory_advice(
        svc.GetAdviceResponse.FromString(got.SerializeToString()), (WEB, BATCH), {"/kubepods/web": 77}
    )
    assert {(request.cgroup, request.knob, request.value) for request in back.knob_requests} == set(knob_requests)


def test_a_stock_answer_is_decoded() -> None:
    """The guard's two limits, offloading with swap, dying members, moves to the first node that both lists have."""
    answer = svc.ListAndWatchResponse()
    values = answer.pod_entries["u-web"].container_entries["main"].calculation_result.values
    values.update({"swap_max": "false", "memory_offloading": "4096", "drop_cache": "true"})
    answer.pod_entries["u-gone"].container_entries["main"].calculation_result.values["drop_cache"] = "true"
    root = answer.extra_entries.add(cgroup_path="/kubepods/besteffort")
    root.calculation_result.values.update({"memory_limit_in_bytes": "1000", "memory_high": "-1"})
    dying = answer.extra_entries.add(cgroup_path="/sys/fs/cgroup/kubepods/burstable")
    dying.calculation_result.values["dying_memcg_reclaim"] = "true"
    balance = {
        "destNumaList": [2, 1],
        "sourceNuma": 0,
        "migrateContainers": [{"podUID": "u-web", "containerName": "main", "destNumaList": [1, 2, 3]}],
        "totalRSS": 1e9,
        "threshold": 0.5,
    }
    answer.extra_entries.add().calculation_result.values["balance_numa_memory"] = json.dumps(balance)
    answer.extra_entries.add().calculation_result.values["memory_numa_headroom"] = '{"0":5,"1":7}'
    answer.extra_entries.add().calculation_result.values["reclaimed_memory_size"] = '{"0":9}'
    got = decode_memory_advice(answer, (WEB, BATCH), {"/kubepods/web": 12, "/kubepods/burstable": 34})
    assert [(request.cgroup, request.knob, request.value) for request in got.knob_requests] == [
        ("/kubepods/web", Knob.SWAP_MAX, "0"),
        ("/kubepods/web", Knob.MEMORY_RECLAIM, "4096"),
        ("/kubepods/web", Knob.DROP_CACHE, "12"),
        ("/kubepods/besteffort", Knob.MEMORY_MAX, "1000"),
        ("/kubepods/besteffort", Knob.MEMORY_HIGH, "max"),
        ("/kubepods/burstable", Knob.MEMORY_RECLAIM, "34"),
        ("/kubepods/web", Knob.MIGRATE_PAGES, "0 2"),
    ]
    assert (got.headroom_bytes, got.headroom_by_numa) == (12, {0: 5.0, 1: 7.0})
    assert got.provision_by_numa == {0: 9.0}
    assert got.policy == "katalyst"


INVALID_ANSWERS = {
    "a limit of words": (
        "",
        {"memory_limit_in_bytes": "1Gi"},
        r"extra_entries\[0\] memory_limit_in_bytes: '1Gi' is not an integer",
    ),
    "a limit beyond numbers": ("/a", {"memory_limit_in_bytes": "9" * 19}, r"is out of range"),
    "a path that climbs": (
        "/a/../../etc",
        {"memory_high": "1"},
        r"cgroup_path: .* is not an absolute cgroup path",
    ),
    "a path from nowhere": ("a", {"memory_high": "1"}, r"cgroup_path: 'a'"),
    "no truth": ("/a", {"dying_memcg_reclaim": "maybe"}, r"dying_memcg_reclaim: 'maybe' is neither true nor false"),
    "no nodes": ("/a", {"cpuset_mems": ""}, r"cpuset_mems: names no NUMA node"),
    "a node beyond all": (
        "",
        {"balance_numa_memory": '{"sourceNuma":-1}'},
        r"balance_numa_memory: -1 is not a NUMA node",
    ),
    "moves of words": ("", {"balance_numa_memory": "[]"}, r"balance_numa_memory: '\[\]'"),
    "headroom that is no number": ("", {"memory_numa_headroom": '{"0":1e999}'}, r"memory_numa_headroom"),
}


@pytest.mark.parametrize("name", INVALID_ANSWERS)
def test_an_invalid_answer_is_rejected(name: str) -> None:
    path, values, text = INVALID_ANSWERS[name]
    answer = svc.GetAdviceResponse()
    answer.extra_entries.add(cgroup_path=path).calculation_result.values.update(values)
    with pytest.raises(UnusableMessage, match=text):
        decode_memory_advice(answer, (WEB,), {})


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_decoded_or_refused(data: bytes) -> None:
    try:
        got = svc.GetAdviceResponse.FromString(data)
    except Exception:  # noqa: BLE001 - protobuf's own, whose class its versions disagree on
        return
    try:
        decode_memory_advice(got, (WEB,), {})
    except UnusableMessage as error:
        assert len(str(error)) < 400  # noqa: PT017 - either outcome is right


def test_the_request_to_an_external_advisor() -> None:
    pods = (WEB, BATCH)
    _placement, state = allocate_cpusets(
        (), pods, node(), CpusetState(policy_name="dynamic"), CpuPlacementConfig(ramp_up_s=0), 5
    )
    request = encode_memory_request((*pods, pod("new")), state)
    assert sorted(request.entries) == ["u-batch", "u-web"]
    metadata = request.entries["u-batch"].entries["main"]
    assert (metadata.requestQuantity, metadata.useMilliQuantity, metadata.qos_level) == (GI, False, "reclaimed_cores")

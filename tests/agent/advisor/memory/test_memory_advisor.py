"""Memory advice of whole cycles: state, requests that never occur, and missing inputs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.advisor.advisor_state import AdvisorState
from agent.advisor.memory.memory_advisor import advise_memory, build_memory_inputs
from agent.advisor.memory.memory_inputs import MemoryAdvisorState, MemoryInputs, ReclaimRoot
from agent.config.config import AgentConfig
from agent.config.memory import (
    CacheReaperConfig,
    MemoryConfig,
    OffloadingConfig,
    OffloadingLayerConfig,
    ReclaimedMemoryGuardConfig,
    UtilBasedMemoryConfig,
)
from api.advice import MemoryAdvice, MemoryPressure
from api.cpu import Topology
from api.knobs import Knob
from api.pod import Pod
from api.qos import QoSLevel
from api.snapshot import CgroupSample, NodeSample, Pressure, Snapshot
from api.units import GIB
from tests.agent.advisor.memory.builders import ROOT, S, group, pod, root, situation, without
from tests.builders.pods import pod as build_pod

RECLAIMED = QoSLevel.RECLAIMED
EVERYTHING = MemoryConfig(
    reaper=CacheReaperConfig(enable=True),
    offloading=OffloadingConfig(default=OffloadingLayerConfig(enable=True), dying=True),
)


def test_without_any_input_there_are_no_requests_and_no_headroom() -> None:
    """Not even the number of CPUs is known; every reason names its missing input."""
    bare = Snapshot(
        seq=1, taken_at_ns=0, wall_time_ns=0, boot_id="b", topology=Topology(cpus=()), node=NodeSample(),
        cgroups={}, pods=(pod("web", QoSLevel.SHARED), pod("batch", RECLAIMED)),
    )  # fmt: skip
    inputs = MemoryInputs(snapshot=bare, now_ns=0, root=ReclaimRoot(path=ROOT))
    for policy in ("canonical", "numa_aware"):
        config = replace(EVERYTHING, policy=policy)
        advice, state = advise_memory(inputs, MemoryAdvisorState(headroom_bytes=5.0), config)
        assert advice.headroom_bytes is None
        assert advice.headroom_reason.rule == "memory_inputs_missing"
        assert advice.condition.state is MemoryPressure.UNKNOWN
        assert advice.knob_requests == ()
        assert state.headroom_bytes == 5.0


@pytest.mark.parametrize(
    ("batch", "limited"),
    [
        ([], set()),
        ([replace(pod("batch", RECLAIMED), containers=())], set()),
        ([build_pod("batch", RECLAIMED, cgroup="/kubepods/burstable/batch")], set()),
        ([pod("batch", RECLAIMED)], {(ROOT, Knob.MEMORY_MAX), (ROOT, Knob.MEMORY_HIGH)}),
    ],
    ids=["no pod", "no container", "in another class", "in the class"],
)
def test_the_class_of_reclaimed_pods_is_limited_only_while_one_runs_in_it(
    batch: list[Pod], limited: set[tuple[str, Knob]]
) -> None:
    snapshot = situation([pod("web", QoSLevel.SHARED), *batch], [root(on_numa={0: (1, 0)})]).snapshot
    config = AgentConfig(memory=MemoryConfig(reclaim_root=ROOT))
    inputs = build_memory_inputs(snapshot, AdvisorState(), config, snapshot.taken_at_ns)
    advice, _ = advise_memory(inputs, MemoryAdvisorState(), config.memory)
    assert {(request.cgroup, request.knob) for request in advice.knob_requests} == limited


def loaded(at_s: float = 1000, **fields: Any) -> MemoryInputs:
    """Return two NUMA nodes, the first slow and nearly full, with a batch and an online pod of 4 GiB there."""
    pods = [pod("web", QoSLevel.SHARED), pod("batch", RECLAIMED)]
    groups = [
        group(
            path, number=number, memory_bytes=8 * GIB, anon=4, file=4, mapped=0, inactive_file=3, avg60=0.0,
            on_numa={0: (4, 4), 1: (0, 0)}, read_at_ns=round(at_s * S), io_pressure=Pressure(some_us=0, some_avg10=0.0),
        )
        for path, number in (("/web", 11), (f"{ROOT}/batch", 12))
    ]  # fmt: skip
    top = root(memory_bytes=8 * GIB, on_numa={0: (4, 4), 1: (0, 0)}, read_at_ns=round(at_s * S))
    return situation(pods, [*groups, top], numa=2, at_s=at_s, **{"free": (1, 100), **fields})


def test_everything_at_once() -> None:
    advice, state = advise_memory(loaded(), MemoryAdvisorState(), EVERYTHING)
    assert advice.condition.state is MemoryPressure.NO_RISK
    assert advice.numa_conditions[0].state is MemoryPressure.DROP_CACHE
    assert {(request.cgroup, request.knob): request.value for request in advice.knob_requests} == {
        (ROOT, Knob.MEMORY_MAX): str((8 + 96) * GIB),
        (ROOT, Knob.MEMORY_HIGH): str(int((8 + 96) * GIB * 0.95) // 4096 * 4096),
        (f"{ROOT}/batch", Knob.DROP_CACHE): str(4 * GIB),  # and not by offloading too
        ("/web", Knob.MEMORY_RECLAIM): str(8 * GIB // 100),
    }
    assert msgspec.json.decode(msgspec.json.encode(state), type=MemoryAdvisorState) == state
    assert msgspec.json.decode(msgspec.json.encode(advice), type=MemoryAdvice) == advice


def test_a_cycle_on_the_same_readings_repeats_no_one_shot_request() -> None:
    _, state = advise_memory(loaded(), MemoryAdvisorState(), EVERYTHING)
    later = replace(loaded(), now_ns=1001 * S)
    again, after = advise_memory(later, state, EVERYTHING)
    assert {request.knob for request in again.knob_requests} == {Knob.MEMORY_MAX, Knob.MEMORY_HIGH}
    assert advise_memory(later, state, EVERYTHING) == (again, after)


kinds = st.sampled_from(list(QoSLevel))
sizes = st.floats(0, 20)


@settings(max_examples=150)
@given(
    pods=st.lists(st.tuples(kinds, sizes, sizes, st.booleans(), st.booleans()), max_size=6),
    levels=st.sets(kinds),
    policy=st.sampled_from(["psi", "refault", "integrated", "senpai"]),
    swap=st.booleans(),
    free=st.lists(st.floats(0, 60), min_size=2, max_size=2),
    cycles=st.lists(st.sampled_from([1.0, 6.0, 31.0]), min_size=1, max_size=4),
)
def test_requests_concern_only_reclaimed_pods_unless_offloading_is_configured_for_a_level(
    pods: list[tuple[QoSLevel, float, float, bool, bool]],
    levels: set[QoSLevel],
    policy: str,
    swap: bool,
    free: list[float],
    cycles: list[float],
) -> None:
    layer = OffloadingLayerConfig(enable=True, enable_swap=swap, policy=policy)  # type: ignore[arg-type]
    config = MemoryConfig(
        reaper=CacheReaperConfig(enable=True), offloading=OffloadingConfig(levels=dict.fromkeys(levels, layer))
    )
    named = [pod(f"p{index}", each[0], request=each[1]) for index, each in enumerate(pods)]
    touchable = {ROOT} | {p.containers[0].cgroup for p in named if p.qos is RECLAIMED}
    by_path = {p.containers[0].cgroup: p.qos for p in named}
    state, at_s = MemoryAdvisorState(), 1000.0
    for index, step in enumerate(cycles):
        at_s += step
        groups = [
            group(
                p.containers[0].cgroup, memory_bytes=round((anon + file) * GIB), anon=anon, file=file, mapped=0,
                inactive_anon=anon / 2, inactive_file=file / 2, active_file=file / 2, avg60=0.0,
                on_numa={0: (anon, file), 1: (0, 0)} if known_state else {},
                read_at_ns=round(at_s * S) if known_state else None,
                stat={"pgscan": 100 * index, "pgsteal": 90 * index, "workingset_activate": 0} if total else {},
                io_pressure=Pressure(some_us=0, some_avg10=0.0),
            )
            for p, (_, anon, file, known_state, total) in zip(named, pods, strict=True)
        ]  # fmt: skip
        inputs = situation(
            named, [*groups, root(on_numa={0: (1, 1), 1: (0, 0)})], numa=2, free=free, at_s=at_s,
            meminfo={"SwapTotal": 8, "SwapFree": 8},
        )  # fmt: skip
        advice, state = advise_memory(inputs, state, config)
        assert advice.headroom_bytes is None or advice.headroom_bytes >= 0
        for request in advice.knob_requests:
            offloading = by_path.get(request.cgroup) in levels and request.knob in (Knob.MEMORY_RECLAIM, Knob.SWAP_MAX)
            assert request.cgroup in touchable or offloading, request
            if request.knob in (Knob.MEMORY_RECLAIM, Knob.DROP_CACHE):
                assert 0 < int(request.value) <= inputs.snapshot.cgroups[request.cgroup].memory_bytes  # type: ignore[operator]


LOSSES = (
    "MemFree", "MemTotal", "Inactive(file)", "Cached", "vm.watermark_scale_factor", "zones", "numa", "total", "sysctl",
    "web memory_stat", "web memory_bytes", "web memory_pressure", "web numa_stat", "batch memory_stat", "batch numa_stat",
    "root numa_stat", "root limits",
)  # fmt: skip


def lossy(inputs: MemoryInputs, losses: set[str]) -> MemoryInputs:
    """Return the inputs without these parts."""
    inputs = without(inputs, *losses)
    node = inputs.snapshot.node
    bare: dict[str, Any] = {"zones": (), "numa": {}, "sysctl": {}}
    node = replace(node, **{name: bare[name] for name in bare.keys() & losses})
    if "total" in losses:
        node = replace(node, memory_total_bytes=None)
    cgroups = dict(inputs.snapshot.cgroups)
    blank = CgroupSample(path="", id=0)
    for loss in losses:
        pod_name, _, field = loss.partition(" ")
        path = {"web": "/web", "batch": f"{ROOT}/batch", "root": ROOT}.get(pod_name)
        if path and field:
            cgroups[path] = replace(cgroups[path], **{field: getattr(blank, field)})
    snapshot = replace(inputs.snapshot, node=node, cgroups=cgroups)
    return replace(inputs, snapshot=snapshot)


@settings(max_examples=200)
@given(
    losses=st.sets(st.sampled_from(LOSSES), min_size=1),
    policy=st.sampled_from(["canonical", "numa_aware"]),
    law=st.sampled_from(["psi", "refault", "integrated", "senpai"]),
    util=st.booleans(),
    free=st.tuples(st.floats(0, 60), st.floats(0, 60)),
)
def test_missing_inputs_never_raise_and_never_add_requests(
    losses: set[str], policy: str, law: str, util: bool, free: tuple[float, float]
) -> None:
    config = MemoryConfig(
        policy=policy,  # type: ignore[arg-type]
        util_based=UtilBasedMemoryConfig(enable=util, cache_based_ratio=0.5),
        reaper=CacheReaperConfig(enable=True),
        offloading=OffloadingConfig(default=OffloadingLayerConfig(enable=True, policy=law)),  # type: ignore[arg-type]
    )
    fields: dict[str, Any] = {"free": free, "meminfo": {"Cached": 20, "Buffers": 0, "SReclaimable": 0}}
    total, state = advise_memory(loaded(**fields), MemoryAdvisorState(), config)
    part, after = advise_memory(lossy(loaded(1040, **fields), losses), state, config)
    assert total.headroom_bytes is not None
    assert part.headroom_bytes is None or part.headroom_bytes <= total.headroom_bytes * (1 + 1e-9)
    requests = {(request.cgroup, request.knob) for request in part.knob_requests}
    if losses & {"MemFree", "MemTotal", "zones", "numa", "root numa_stat"}:
        retained = {request.value for request in part.knob_requests if request.knob is Knob.MEMORY_MAX}
        assert retained == {request.value for request in total.knob_requests if request.knob is Knob.MEMORY_MAX}
        assert after.guard_bytes == state.guard_bytes
    if losses & {"MemFree", "vm.watermark_scale_factor", "sysctl", "batch memory_stat"}:
        assert (f"{ROOT}/batch", Knob.DROP_CACHE) not in requests
    if losses & {"web memory_stat", "web memory_bytes"} or (law != "refault" and "web memory_pressure" in losses):
        assert ("/web", Knob.MEMORY_RECLAIM) not in requests


def test_settings_are_read_by_name_and_unknown_ones_rejected() -> None:
    text = b"""{"policy": "numa_aware", "guard": {"criticalWatermarkScaleFactor": 2},
        "offloading": {"levels": {"reclaimed_cores": {"enable": true, "policy": "senpai", "intervalS": 12}},
                       "cgroups": {"/batch": {"enable": true}}}}"""
    config = msgspec.json.decode(text, type=MemoryConfig)
    assert config.guard == ReclaimedMemoryGuardConfig(critical_watermark_scale_factor=2)
    assert config.offloading.levels[RECLAIMED].interval_s == 12
    with pytest.raises(msgspec.ValidationError, match=r"unknown field `enabled` - at `\$.guard`"):
        msgspec.json.decode(b'{"guard": {"enabled": true}}', type=MemoryConfig)
    with pytest.raises(msgspec.ValidationError, match=r"\$\.offloading\.levels"):
        msgspec.json.decode(b'{"offloading": {"levels": {"gold": {}}}}', type=MemoryConfig)

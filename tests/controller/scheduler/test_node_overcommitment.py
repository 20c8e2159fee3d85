"""Katalyst's cases of NodeOvercommitment (numbered as there), its bugs, and a property: pinned CPUs always have a real CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.scheduler.aligned_arrays import RATIO_ONE
from controller.scheduler.node_overcommitment import (
    CpuDemand,
    OvercommitRejection,
    OvercommittedNodes,
    explain_rejection,
    filter_overcommitted,
)
from controller.scheduler.scheduling_pod import parse_scheduling_pod
from tests.controller.scheduler.objects import pod_of

NONE, CPU, MEMORY = OvercommitRejection.NONE, OvercommitRejection.CPU, OvercommitRejection.MEMORY_MANAGER


def one_node(
    *, cpus: float = 16, ratio: float = 2, guaranteed: int = 8, requested_m: int = 24_000, static: bool = True,
    memory_ratio: float = 1, static_memory: bool = False,
) -> OvercommittedNodes:  # fmt: skip
    def ints(value: float) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array([round(value)], np.int64)

    return OvercommittedNodes(
        allocatable_m=ints(cpus * 1000), requested_m=ints(requested_m), guaranteed_m=ints(guaranteed * 1000),
        cpu_ratio_ppm=ints(ratio * RATIO_ONE), memory_ratio_ppm=ints(memory_ratio * RATIO_ONE),
        static_cpu=np.array([static]), static_memory=np.array([static_memory]),
    )  # fmt: skip


BURSTABLE_4 = CpuDemand(4000)
GUARANTEED_4 = CpuDemand(4000, 4)


@pytest.mark.parametrize(
    ("nodes", "pod", "expected"),
    [
        pytest.param(one_node(), BURSTABLE_4, CPU, id="43-(16-8)x2-(24-8)=0"),
        pytest.param(one_node(requested_m=20_000), GUARANTEED_4, CPU, id="44-guaranteed-takes-8"),
        pytest.param(one_node(requested_m=16_000), GUARANTEED_4, NONE, id="guaranteed-8<=8"),
        pytest.param(one_node(requested_m=20_000), BURSTABLE_4, NONE, id="45-4000<=4000"),
        pytest.param(one_node(requested_m=20_001), BURSTABLE_4, CPU, id="4000>3999"),
        pytest.param(one_node(static_memory=True, memory_ratio=1.5, static=False), BURSTABLE_4, MEMORY, id="46"),
        pytest.param(
            one_node(static_memory=True, memory_ratio=1, static=False), BURSTABLE_4, NONE, id="memory-ratio-1"
        ),
        pytest.param(one_node(static_memory=False, memory_ratio=1.5, static=False), BURSTABLE_4, NONE, id="no-manager"),
        pytest.param(one_node(static=False), BURSTABLE_4, NONE, id="47-stock-fit-decides"),
        pytest.param(one_node(ratio=1), BURSTABLE_4, NONE, id="ratio-1"),
        pytest.param(one_node(static_memory=True, memory_ratio=1.5), CpuDemand(0), NONE, id="no-cpu-request"),
        # Two whole CPUs are pinned (x2), the sidecar shares 500m.
        pytest.param(one_node(requested_m=19_500), CpuDemand(2500, 2), NONE, id="sidecar-4500<=4500"),
        pytest.param(one_node(requested_m=19_501), CpuDemand(2500, 2), CPU, id="sidecar-4500>4499"),
        # The agent still reports 8 pinned CPUs of a pod that has ended: 16 CPUs are free, not 24.
        pytest.param(one_node(requested_m=0), CpuDemand(16_000), NONE, id="outdated-pinned-fits"),
        pytest.param(one_node(requested_m=0), CpuDemand(16_001), CPU, id="outdated-pinned"),
        pytest.param(one_node(guaranteed=20, requested_m=20_000), CpuDemand(1), CPU, id="more-pinned-than-there-is"),
    ],
)
def test_filter(nodes: OvercommittedNodes, pod: CpuDemand, expected: OvercommitRejection) -> None:
    assert filter_overcommitted(nodes, pod).tolist() == [expected]
    assert bool(explain_rejection(nodes, pod, 0)) == (expected is not NONE)


def test_the_reason_has_the_numbers() -> None:
    assert explain_rejection(one_node(requested_m=20_001), BURSTABLE_4, 0) == (
        "insufficient overcommitted CPU: the pod takes 4000m, 3999m are free (ratio 2, 8000m pinned); reduce the request"
    )
    assert "overcommitted by 1.5 although the kubelet's memory manager pins it" in explain_rejection(
        one_node(static_memory=True, memory_ratio=1.5), BURSTABLE_4, 0
    )


def test_nodes_are_independent() -> None:
    first, second = one_node(), one_node(requested_m=20_000)
    both = OvercommittedNodes(
        **{
            field: np.concatenate([getattr(first, field), getattr(second, field)])
            for field in OvercommittedNodes.__struct_fields__
        }
    )
    assert filter_overcommitted(both, BURSTABLE_4).tolist() == [CPU, NONE]


@pytest.mark.parametrize(
    ("containers", "overhead_m", "guaranteed", "expected"),
    [
        (((2000, False), (2000, False)), 0, True, (4000, 4)),
        (((2000, False), (2000, False)), 0, False, (4000, 0)),
        (((2000, False), (500, False)), 100, True, (2600, 2)),
        (((2000, False), (5000, True), (1000, True)), 0, True, (5000, 2)),
        (((350, False),), 0, True, (350, 0)),
        ((), 0, False, (0, 0)),
    ],
)
def test_demand_of_a_pod(
    containers: tuple[tuple[int, bool], ...], overhead_m: int, guaranteed: bool, expected: tuple[int, int]
) -> None:
    spec: dict[str, Any] = {"containers": [], "initContainers": [], "overhead": {"cpu": f"{overhead_m}m"}}
    for millicpu, init in containers:
        amounts = {"cpu": f"{millicpu}m", "memory": "1Gi"}
        resources = {"requests": amounts, "limits": amounts} if guaranteed else {"requests": amounts}
        spec["initContainers" if init else "containers"].append({"resources": resources})
    pod = parse_scheduling_pod(pod_of("p", spec))
    assert (pod.native.millicpu, 0 if pod.alignment is None else pod.alignment.pinned_cpus) == expected


@given(
    st.integers(1, 64),
    st.integers(100, 400),
    st.lists(st.tuples(st.sampled_from([1, 250, 1000, 2000, 3500, 8000]), st.booleans()), max_size=40),
)
def test_pods_that_fit_one_after_another_never_share_a_pinned_cpu(
    cpus: int, percent: int, pods: list[tuple[int, bool]]
) -> None:
    """Real CPUs that are not pinned, times the ratio, always cover what the sharing pods request."""
    pinned, requested_m = 0, 0
    for request_m, guaranteed in pods:
        pod = CpuDemand(request_m, request_m // 1000 if guaranteed and request_m % 1000 == 0 else 0)
        nodes = one_node(cpus=cpus, ratio=percent / 100, guaranteed=pinned, requested_m=requested_m)
        if percent > 100 and filter_overcommitted(nodes, pod)[0] == NONE:
            pinned, requested_m = pinned + pod.guaranteed_cpus, requested_m + pod.request_m
            assert pinned <= cpus
            assert requested_m - pinned * 1000 <= (cpus - pinned) * 1000 * percent // 100

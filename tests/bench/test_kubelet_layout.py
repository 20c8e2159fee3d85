"""The cgroups that the benchmark makes as a kubelet would, with the values of a kubelet."""

from __future__ import annotations

import msgspec
import pytest

from agent.sensors.cgroup.hierarchy import Hierarchy
from agent.sensors.cgroup.pod_cgroup_paths import CgroupDriver, pod_cgroup_of
from agent.sensors.pods.static_pods import parse_pods
from api.qos import QoSLevel
from bench.colocation_layouts import KUBELET_ROOT, usual_driver
from bench.kubelet_layout import (
    KubeletLayout,
    bench_layout,
    competing_cgroup,
    millicpu_to_shares,
    weight_of_shares,
)


def layout(online: str, batch: str, driver: CgroupDriver = CgroupDriver.CGROUPFS) -> KubeletLayout:
    return bench_layout(KUBELET_ROOT, 2, driver, online=online, batch=batch)


@pytest.mark.parametrize(
    ("millicpu", "shares", "weight"),
    [(0, 2, 1), (1, 2, 1), (100, 102, 4), (500, 512, 20), (1000, 1024, 39), (2000, 2048, 79), (300_000, 262144, 10000)],
)
def test_weights_are_those_of_the_kubelet_and_of_runc(millicpu: int, shares: int, weight: int) -> None:
    """Kubernetes documents 1000m as weight 39 (pkg/kubelet/cm); nothing requested is the least that the kernel accepts."""
    assert millicpu_to_shares(millicpu) == shares
    assert weight_of_shares(shares) == weight


def test_a_class_has_the_sum_of_its_pods_and_a_pod_its_request() -> None:
    """On two CPUs: 500m online, 100m batch, 100m agent; 700m are 716 shares."""
    node = layout("Burstable", "Burstable")
    shares = {path.removeprefix("/dioptase_bench"): values.shares for path, values in node.cgroups().items()}
    assert shares.pop("/system.slice") is None
    assert shares.pop("/kubepods") == 2048
    assert shares.pop("/kubepods/burstable") == 716
    assert shares.pop("/kubepods/besteffort") == 2
    assert sorted(value or 0 for value in shares.values()) == [102, 102, 102, 102, 512, 512]
    assert node.top_files() == {"cpu.shares": "3072", "cpu.weight": "179"}, (
        "with the system's 1024, or 100 on version 2"
    )


def test_only_a_guaranteed_pod_has_limits_and_it_has_no_class() -> None:
    cgroups = layout("Guaranteed", "BestEffort").cgroups()
    limited = {path: values for path, values in cgroups.items() if values.quota_us is not None}
    assert [path.count("/") for path in limited] == [3, 4], "the pod in kubepods, and its container"
    assert {values.files()["cpu.max"] for values in limited.values()} == {"180000 100000"}
    assert {values.files()["memory.limit_in_bytes"] for values in limited.values()} == {"1073741824"}
    reclaimed = layout("Guaranteed", "BestEffort").container("batch")
    assert cgroups[reclaimed].files() == {"cpu.shares": "2", "cpu.weight": "1"}


def test_parents_come_before_their_children() -> None:
    for driver in CgroupDriver:
        node = layout("BestEffort", "BestEffort", driver)
        paths = list(node.cgroups())
        parents = [path.rpartition("/")[0] for path in paths]
        assert all(parent == node.top or parent in paths[:index] for index, parent in enumerate(parents))


def test_names_are_those_of_the_driver() -> None:
    assert usual_driver(Hierarchy(v1={}, v2=None)) is CgroupDriver.SYSTEMD
    node = layout("Burstable", "BestEffort", CgroupDriver.SYSTEMD)
    assert node.top == "/dioptase_bench.slice"
    assert node.reclaim_root == (
        "/dioptase_bench.slice/dioptase_bench-kubepods.slice/dioptase_bench-kubepods-besteffort.slice"
    )
    batch = node.container("batch")
    assert batch.startswith(f"{node.reclaim_root}/dioptase_bench-kubepods-besteffort-pod")
    assert batch.endswith(".scope")


@pytest.mark.parametrize(
    ("online", "batch", "competing"),
    [
        ("Guaranteed", "BestEffort", "/dioptase_bench/kubepods/besteffort"),
        ("Guaranteed", "Burstable", "/dioptase_bench/kubepods/burstable"),
        ("Burstable", "BestEffort", "/dioptase_bench/kubepods/besteffort"),
        ("BestEffort", "Burstable", "/dioptase_bench/kubepods/burstable"),
        ("Burstable", "Burstable", "pod"),
        ("BestEffort", "BestEffort", "pod"),
    ],
)
def test_priority_counts_where_the_competitors_are_siblings(online: str, batch: str, competing: str) -> None:
    """Between classes that is the class of the batch pod, within a class the pod; never the container."""
    node = layout(online, batch)
    pod = pod_cgroup_of(node.container("batch"))
    assert competing_cgroup(node.container("batch"), node.container("online")) == (
        pod if competing == "pod" else competing
    )


@pytest.mark.parametrize(
    ("batch", "reclaimed_cores", "cpu_request"), [("BestEffort", 2.0, None), ("Burstable", None, 0.1)]
)
def test_the_agent_learns_the_pods_as_they_are(
    batch: str, reclaimed_cores: float | None, cpu_request: float | None
) -> None:
    node = layout("Guaranteed", batch)
    pods = {pod.name: pod for pod in parse_pods(node.manifest(), "bench")}
    assert {name: pod.qos for name, pod in pods.items()} == {
        "online": QoSLevel.SHARED,
        "batch": QoSLevel.RECLAIMED,
        "dioptase-agent": QoSLevel.SYSTEM,
    }
    (online,), (job,) = pods["online"].containers, pods["batch"].containers
    assert (online.cpu_request_cores, online.cpu_limit_cores) == (1.8, 1.8)
    assert (job.reclaimed_cpu_cores, job.cpu_request_cores) == (reclaimed_cores, cpu_request)
    assert job.cgroup == node.container("batch")
    assert pod_cgroup_of(job.cgroup) is not None
    assert len({msgspec.structs.astuple(pod)[0] for pod in pods.values()}) == 3

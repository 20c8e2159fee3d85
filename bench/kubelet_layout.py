"""Computes the cgroups that a kubelet makes for pods, with their weights and limits, and the pods as the API server has them.
Pure. Sources: kubernetes pkg/kubelet/cm, helpers_linux.go (MilliCPUToShares, ResourceConfigForPod),
qos_container_manager_linux.go (setCPUCgroupConfig), node_container_manager_linux.go (getCgroupConfig); for version 2 runc's
ConvertCPUSharesToCgroupV2Value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from posixpath import dirname
from typing import Any

import msgspec

from agent.sensors.cgroup.pod_cgroup_paths import (
    BEST_EFFORT,
    BURSTABLE,
    GUARANTEED,
    CgroupDriver,
    PodCgroupIdentity,
    container_cgroup_path,
    kubepods_path,
    pod_cgroup_path,
    qos_class_path,
)
from agent.sensors.pods.pod_spec import CGROUP_PREFIX
from api.pod import RECLAIMED_CPU
from api.qos import QOS_LEVEL_KEY, QoSLevel
from api.units import MIB

MIN_SHARES, MAX_SHARES, SHARES_PER_CPU = 2, 262144, 1024
PERIOD_US = 100_000
SYSTEM_WEIGHTS = {"cpu.shares": 1024, "cpu.weight": 100}
"""Weight of the system's cgroup next to `kubepods`: systemd's default, which is also the kernel's."""
MEMORY_MIB = 1024
"""Memory request of each pod with requests, and limit of a Guaranteed pod."""
RUNTIME = "containerd"


class LayoutPod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod with one container, as a user writes it."""

    name: str
    qos: str
    """Class of Kubernetes: Guaranteed, Burstable or BestEffort."""
    level: QoSLevel
    request_millicpu: int = 0
    """CPU request; of a Guaranteed pod also the limit, and of a reclaimed BestEffort pod the reclaimed resource."""

    @property
    def uid(self) -> str:
        """Return a uid in the API server's form, always the same for a name."""
        digest = hashlib.sha256(self.name.encode()).hexdigest()
        return "-".join((digest[:8], digest[8:12], digest[12:16], digest[16:20], digest[20:32]))

    def identity(self, root: str) -> PodCgroupIdentity:
        return PodCgroupIdentity(uid=self.uid, qos=self.qos, root=root)

    @property
    def cgroup_millicpu(self) -> int:
        """Return the request that counts for weights: extended resources do not."""
        return 0 if self.qos == BEST_EFFORT else self.request_millicpu


class CgroupValues(msgspec.Struct, frozen=True, kw_only=True):
    """What the kubelet writes into a cgroup; None leaves the kernel's default."""

    shares: int | None = None
    quota_us: int | None = None
    memory_bytes: int | None = None

    def files(self) -> dict[str, str]:
        """Return the contents of the files of both cgroup versions, by name."""
        values = {}
        if self.shares is not None:
            values = {"cpu.shares": str(self.shares), "cpu.weight": str(weight_of_shares(self.shares))}
        if self.quota_us is not None:
            values |= {"cpu.cfs_quota_us": str(self.quota_us), "cpu.max": f"{self.quota_us} {PERIOD_US}"}
        if self.memory_bytes is not None:
            values |= {"memory.limit_in_bytes": str(self.memory_bytes), "memory.max": str(self.memory_bytes)}
        return values


def millicpu_to_shares(millicpu: int) -> int:
    """Return the weight on version 1 for a CPU request."""
    return min(max(millicpu * SHARES_PER_CPU // 1000, MIN_SHARES), MAX_SHARES)


def weight_of_shares(shares: int) -> int:
    """Return the weight on version 2 for a weight on version 1."""
    return 1 + (shares - MIN_SHARES) * 9999 // (MAX_SHARES - MIN_SHARES)


class KubeletLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The cgroups of a node below `root`, the kubelet's `cgroupRoot`."""

    root: str
    cpus: int
    driver: CgroupDriver
    pods: tuple[LayoutPod, ...]

    @property
    def kubepods(self) -> str:
        return kubepods_path(self.root, self.driver)

    @property
    def top(self) -> str:
        """Return the cgroup of the root, in the driver's spelling."""
        return dirname(self.kubepods)

    @property
    def system(self) -> str:
        """Return the cgroup of the system's services."""
        return f"{self.top}/system.slice"

    @property
    def reclaim_root(self) -> str:
        """Return what the agent's setting `memory.reclaimRoot` is on a kubelet."""
        return qos_class_path(self.root, BEST_EFFORT, self.driver)

    def container(self, name: str) -> str:
        """Return the cgroup of a pod's container. Raises StopIteration without such a pod."""
        pod = next(pod for pod in self.pods if pod.name == name)
        return container_cgroup_path(pod.identity(self.root), RUNTIME, container_id(pod), self.driver)

    def cgroups(self) -> dict[str, CgroupValues]:
        """Return every cgroup below the root with its values, parents first."""
        burstable = sum(pod.cgroup_millicpu for pod in self.pods if pod.qos == BURSTABLE)
        cgroups = {
            self.system: CgroupValues(),
            # The node's allocatable CPU: all of it, as nothing is reserved.
            self.kubepods: CgroupValues(shares=millicpu_to_shares(1000 * self.cpus)),
            qos_class_path(self.root, BURSTABLE, self.driver): CgroupValues(shares=millicpu_to_shares(burstable)),
            self.reclaim_root: CgroupValues(shares=MIN_SHARES),
        }
        for pod in self.pods:
            values = _pod_values(pod)
            cgroups[pod_cgroup_path(pod.identity(self.root), self.driver)] = values
            # With one container, the runtime writes the same values for the container as the kubelet for the pod.
            cgroups[self.container(pod.name)] = values
        return cgroups

    def top_files(self) -> dict[str, str]:
        """Return the contents of the root's files. On a node its children compete with nothing but kernel threads, so its
        weight is the sum of theirs."""
        kubepods = self.cgroups()[self.kubepods].files()
        return {name: str(int(kubepods[name]) + weight) for name, weight in SYSTEM_WEIGHTS.items()}

    def manifest(self) -> str:
        """Return the pods as a list of Kubernetes objects, with the cgroups as the kubelet and the runtime name them."""
        items = [_pod_object(pod, self.container(pod.name)) for pod in self.pods]
        return msgspec.yaml.encode({"apiVersion": "v1", "kind": "List", "items": items}).decode()


def container_id(pod: LayoutPod) -> str:
    """Return the id of a pod's container in the runtime."""
    return hashlib.sha256(pod.uid.encode()).hexdigest()


def _pod_values(pod: LayoutPod) -> CgroupValues:
    shares = millicpu_to_shares(pod.cgroup_millicpu)
    if pod.qos != GUARANTEED:
        return CgroupValues(shares=shares)
    return CgroupValues(shares=shares, quota_us=pod.request_millicpu * PERIOD_US // 1000, memory_bytes=MEMORY_MIB * MIB)


def _pod_object(pod: LayoutPod, cgroup: str) -> Mapping[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod.name,
            "namespace": "default",
            "uid": pod.uid,
            "annotations": {QOS_LEVEL_KEY: pod.level.value, f"{CGROUP_PREFIX}{pod.name}": cgroup},
        },
        "spec": {"containers": [{"name": pod.name, "resources": _resources(pod)}]},
    }


def _resources(pod: LayoutPod) -> Mapping[str, Mapping[str, str]]:
    if pod.qos == BEST_EFFORT:
        if pod.level is not QoSLevel.RECLAIMED:
            return {}
        # Kubernetes requires a limit that equals the request for an extended resource.
        return {part: {RECLAIMED_CPU: str(pod.request_millicpu)} for part in ("requests", "limits")}
    resources = {"cpu": f"{pod.request_millicpu}m", "memory": f"{MEMORY_MIB}Mi"}
    return {"requests": resources} | ({"limits": resources} if pod.qos == GUARANTEED else {})


ONLINE_POD, BATCH_POD, AGENT_POD = "online", "batch", "dioptase-agent"
ONLINE_SHARES = {GUARANTEED: 0.90, BURSTABLE: 0.25, BEST_EFFORT: 0.0}
BATCH_SHARES = {BURSTABLE: 0.05, BEST_EFFORT: 1.0}
"""CPU requests by class, as shares of the node. A Guaranteed pod needs a limit, which is its request, above its peaks; a
BestEffort batch pod requests the reclaimed resource, whose limit is the request, so it is the CPU that the job can use."""
AGENT_MILLICPU = 100
"""CPU request of the agent in the chart (deploy/helm/dioptase/values.yaml)."""


def bench_layout(root: str, cpus: int, driver: CgroupDriver, *, online: str, batch: str) -> KubeletLayout:
    """Return the layout of a node with an online pod, a batch pod and the agent's pod; `online` and `batch` are classes."""
    requests = {
        ONLINE_POD: (online, QoSLevel.SHARED, ONLINE_SHARES[online]),
        BATCH_POD: (batch, QoSLevel.RECLAIMED, BATCH_SHARES[batch]),
    }
    pods = [
        LayoutPod(name=name, qos=qos, level=level, request_millicpu=round(1000 * cpus * share))
        for name, (qos, level, share) in requests.items()
    ]
    pods.append(LayoutPod(name=AGENT_POD, qos=BURSTABLE, level=QoSLevel.SYSTEM, request_millicpu=AGENT_MILLICPU))
    return KubeletLayout(root=root, cpus=cpus, driver=driver, pods=tuple(pods))


def competing_cgroup(batch: str, online: str) -> str:
    """Return the cgroup of the batch job, or the one above it, that is a sibling of the service's, or of one above that: only
    there the scheduler compares the two."""
    steps, other = batch.split("/"), online.split("/")
    common = next(index for index, pair in enumerate(zip(steps, other, strict=False)) if pair[0] != pair[1])
    return "/".join(steps[: common + 1])

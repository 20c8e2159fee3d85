"""What a kubelet pins for a pod, and how it aligns it with NUMA nodes: the part of a pod that NodeResourceTopology and
NodeOvercommitment need. Pure. Most pods of a cluster have none of it, so that None is their whole cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from api.annotations import parse_enhancements
from api.qos import MEMORY_KEY, QoSLevel
from controller.scheduler.numa_topology import TopologyPod

MAX_PINNED_CPUS = 1 << 20
"""Largest number of pinned CPUs of a pod and of a node; larger numbers count as this."""
CpuAndMemory = tuple[int, int]
"""Milli-CPUs and bytes."""


class ContainerShape(NamedTuple):
    """Requests and limits of one container; a limit of 0 is none."""

    name: str
    requests: CpuAndMemory
    limits: CpuAndMemory
    init: bool = False
    sidecar: bool = False
    """An init container that runs as long as the pod (`restartPolicy: Always`)."""


class PodAlignment(NamedTuple):
    """Pod for which a static CPU manager pins CPUs, or whose level is dedicated_cores."""

    containers: tuple[CpuAndMemory, ...]
    """Requests of each container, without init containers."""
    effective: CpuAndMemory
    """Request of the pod as a whole."""
    main: int
    """Index of the main container."""
    guaranteed: bool
    whole_cpus: bool
    """Whether every container requests whole CPUs."""
    pinned_cpus: int
    """CPUs that a static CPU manager pins."""
    dedicated: bool
    binding: bool
    exclusive: bool

    def topology_pod(self) -> TopologyPod:
        """Return the same as arrays."""
        return TopologyPod(
            containers=np.array(self.containers, np.int64).reshape(-1, 2), effective=np.array(self.effective, np.int64),
            main=self.main, guaranteed=self.guaranteed, whole_cpus=self.whole_cpus, dedicated=self.dedicated,
            binding=self.binding, exclusive=self.exclusive,
        )  # fmt: skip


def parse_pod_alignment(
    level: QoSLevel,
    enhancement: str,
    main_container: str,
    containers: Sequence[ContainerShape],
    effective: CpuAndMemory,
) -> PodAlignment | None:
    """Return the alignment of a pod; None if no CPU is pinned for it and it is not dedicated_cores.

    `enhancement` is the annotation memory_enhancement. An invalid one binds to no NUMA node, as on the node.
    """
    apps = [each for each in containers if not each.init]
    guaranteed = bool(apps) and all(_is_guaranteed(each) for each in containers)
    dedicated = level is QoSLevel.DEDICATED
    if not (guaranteed or dedicated):
        return None
    pinned_cpus = min(sum(map(_pinned_cpus, containers)), MAX_PINNED_CPUS) if guaranteed else 0
    if not (pinned_cpus or dedicated):
        return None
    enhancements = parse_enhancements({MEMORY_KEY: enhancement} if enhancement else {}, level)[0] if dedicated else None
    names = [each.name for each in apps]
    return PodAlignment(
        containers=tuple(each.requests for each in apps),
        effective=effective,
        main=names.index(main_container) if main_container in names else 0,
        guaranteed=guaranteed,
        whole_cpus=all(each.requests[0] % 1000 == 0 for each in apps),
        pinned_cpus=pinned_cpus,
        dedicated=dedicated,
        binding=enhancements is not None and enhancements.numa_binding,
        exclusive=enhancements is not None and enhancements.numa_exclusive,
    )


def _pinned_cpus(container: ContainerShape) -> int:
    """CPUs that a static CPU manager pins for a container of a Guaranteed pod, if its request is a whole number
    (pkg/kubelet/cm/cpumanager/policy_static.go, guaranteedCPUs). CPUs of init containers are reused by the other containers."""
    cpus, rest = divmod(container.requests[0], 1000)
    return 0 if rest or (container.init and not container.sidecar) else cpus


def _is_guaranteed(container: ContainerShape) -> bool:
    # As ComputePodQOS (pkg/apis/core/v1/helper/qos): limits of both, and equal requests, which default to the limits.
    return all(
        limit > 0 and request in (0, limit) for request, limit in zip(container.requests, container.limits, strict=True)
    )

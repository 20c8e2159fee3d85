"""Removes from a pod's annotations what its namespace and priority class have no right to (`qos.rights`). Pure. A pod's owner
writes its annotations, so an annotation is no permission. Namespace and priority class come from the kubelet's list or from the
runtime: the API server has authorized the creation of pods in that namespace. A pod may have what it requests; effects on the
whole node, and effects beyond its request, need a right."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

import msgspec

from agent.config.qos import RightsConfig
from api.annotations import PROFILE_KEY, ServiceProfile
from api.qos import QoSLevel


class Right(StrEnum):
    """Rights by the names of their settings below `qos.rights`."""

    DEDICATED_CORES = "dedicatedCores"
    SYSTEM_CORES = "systemCores"
    NUMA_EXCLUSIVE = "numaExclusive"
    CPUSET_POOL = "cpusetPool"
    DISABLE_RECLAIM_LEVEL = "disableReclaimLevel"
    MEMORY_OFFLOADING = "memoryOffloading"
    OOM_PRIORITY = "oomPriority"


RIGHT_BY_ENHANCEMENT = {
    "numa_exclusive": Right.NUMA_EXCLUSIVE,
    # Keeps other bound pods off a NUMA node, as numa_exclusive does.
    "numa_share": Right.NUMA_EXCLUSIVE,
    "cpuset_pool": Right.CPUSET_POOL,
    "oom_priority": Right.OOM_PRIORITY,
}
_OWN_RESOURCES_LEVELS = ("", "Pod")
"""Values of disableReclaimLevel that concern the pod's own request only."""
_OFFLOADING_SWITCHES = ("enable", "enableSwap")


class PodRights(NamedTuple):
    """Rights of one pod, and the origin that they depend on."""

    namespace: str
    priority_class: str
    held: frozenset[Right]

    def missing(self, right: Right) -> str:
        """Return the part of a sentence that says why the pod lacks the right and how to grant it."""
        origin = f"namespace {self.namespace}"
        if self.priority_class:
            origin += f" or priority class {self.priority_class:.80}"
        return f"needs the right {right.value}; add {origin} to qos.rights.{right.value}"

    def withheld_enhancements(self) -> Mapping[str, str]:
        """Return the enhancements that the pod may not state, each with the problem that reports it."""
        return {
            name: f"{self.missing(right)}; until then it is ignored"
            for name, right in RIGHT_BY_ENHANCEMENT.items()
            if right not in self.held
        }


def pod_rights(config: RightsConfig, namespace: str, priority_class: str) -> PodRights:
    """Return the rights of pods of this namespace and priority class; an empty class is none."""
    held = (Right(name) for name, holders in config.by_name() if holders.include(namespace, priority_class))
    return PodRights(namespace, priority_class, frozenset(held))


def limit_level(level: QoSLevel, request_cores: float | None, rights: PodRights) -> tuple[QoSLevel, tuple[str, ...]]:
    """Return the QoS level that the pod may have, and the problem if that is another one than stated.

    `request_cores` is the CPU request of the main container. A fraction of a CPU is rounded up to an exclusive CPU, which is
    more than the pod requests. A pod without a request retains its level: the allocation gives it no CPUs of its own.
    """
    if level is QoSLevel.SYSTEM and Right.SYSTEM_CORES not in rights.held:
        problem = f"QoS level: {level.value} {rights.missing(Right.SYSTEM_CORES)}; until then it is shared_cores"
        return QoSLevel.SHARED, (problem,)
    is_fraction = request_cores is not None and request_cores % 1 > 0
    if level is QoSLevel.DEDICATED and is_fraction and Right.DEDICATED_CORES not in rights.held:
        problem = (
            f"QoS level: {level.value} with a request of {request_cores:g} CPUs {rights.missing(Right.DEDICATED_CORES)}, "
            "or request whole CPUs; until then it is shared_cores"
        )
        return QoSLevel.SHARED, (problem,)
    return level, ()


def limit_profile(profile: ServiceProfile, rights: PodRights) -> tuple[ServiceProfile, tuple[str, ...]]:
    """Return the service profile without what the pod has no right to, and problems."""
    problems = []
    level = profile.disable_reclaim_level
    if level not in _OWN_RESOURCES_LEVELS and Right.DISABLE_RECLAIM_LEVEL not in rights.held:
        profile = msgspec.structs.replace(profile, disable_reclaim_level="Pod")
        problems.append(
            f"annotation {PROFILE_KEY}: disableReclaimLevel: {level} {rights.missing(Right.DISABLE_RECLAIM_LEVEL)}; "
            "until then it is Pod"
        )
    switched_off = {
        name: value
        for name, value in profile.memory_offloading.items()
        if name in _OFFLOADING_SWITCHES and value is False
    }
    if switched_off != profile.memory_offloading and Right.MEMORY_OFFLOADING not in rights.held:
        profile = msgspec.structs.replace(profile, memory_offloading=switched_off)
        problems.append(
            f"annotation {PROFILE_KEY}: memoryOffloading: {rights.missing(Right.MEMORY_OFFLOADING)}; "
            "until then it may only set enable and enableSwap to false"
        )
    return profile, tuple(problems)

"""Settings of QRM's CPU side: which CPUs pools and containers get. Names in brackets are Katalyst's."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from agent.config.units import Cores, reclaim_reserve
from api.cpus import format_cpu_list, parse_cpu_list

Count = Annotated[int, Meta(ge=0, le=8192)]


class NativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Policy `native`: the kubelet's static CPU manager."""

    allocation: Literal["packed", "distributed"] = "packed"
    """[cpu-allocation-option] `packed`: on as few sockets as hold it. `distributed`: evenly over as few NUMA nodes as do."""
    full_physical_cores: bool = False
    """[enable-full-physical-cpus-only] Whole physical cores; requests that are no multiple of one are rejected."""


class CpuPlacementConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """From sizes of pools to CPUs."""

    policy: Literal["dynamic", "native"] = "dynamic"
    """[cpu-resource-plugin-policy] `dynamic`: pools by QoS level. `native`: what the kubelet's static policy does."""
    reserved_cpus: Count = 0
    """[cpu-resource-plugin-reserved] CPUs kept for the system and system_cores, taken from each NUMA node in turn."""
    reserved_cpu_list: str = ""
    """[reserved-cpu-list] Exactly these CPUs instead, in the kernel's list syntax."""
    interrupt_cpu_list: str = ""
    """CPUs that serve interrupts and nothing else, in the kernel's list syntax; no container ever has one."""
    min_reclaimed_cpus: Annotated[int, Meta(ge=1, le=8192)] | None = None
    """[minReclaimedResourceForAllocate] kept for reclaimed pods, one a NUMA node at least; 4, a quarter below 16 CPUs."""
    ramp_up_s: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    """A new shared container may use every pooled CPU for so long, then its pool's."""
    residual_s: Annotated[float, Meta(ge=0, le=86400)] = 300.0
    """What a pod had is kept for so long after nobody lists the pod any more."""
    numa_bound_factor: Annotated[float, Meta(ge=1, le=16)] = 2.0
    """Where nobody says how large pools are to be: a NUMA-bound one is so many times the requests of its pods."""
    numa_hint: Literal["spreading", "packing", "dynamic-packing"] = "spreading"
    """[cpu-numa-hint-prefer-policy] Bind pods to the NUMA node with the most left, or with the least that holds them;
    `dynamic-packing` packs while nodes have much left, and spreads when none has."""
    numa_hint_low_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """[cpu-numa-hint-prefer-low-threshold] Part of a node's CPUs that is much, for `dynamic-packing`."""
    enable_reclaim_numa_binding: bool = False
    """[enable-reclaim-numa-binding] Whether reclaimed pods that ask for it are bound to a NUMA node that has headroom."""
    fallback_cores: Cores = 4.0
    """Assumed request of an online container that has none."""
    native: NativeConfig = NativeConfig()

    def __post_init__(self) -> None:
        """Raise ValueError for what no single field's bounds can say."""
        reserved = _cpus("reservedCpuList", self.reserved_cpu_list)
        if both := reserved & _cpus("interruptCpuList", self.interrupt_cpu_list):
            listed = format_cpu_list(both)
            raise ValueError(f"reservedCpuList and interruptCpuList both have CPU {listed}; leave it to one of them")
        if reserved and self.reserved_cpus not in (0, len(reserved)):
            raise ValueError(
                f"reservedCpus is {self.reserved_cpus} and reservedCpuList has {len(reserved)} CPUs; set one of them"
            )

    def reclaim_reserve(self, cpus: int, numa_nodes: int) -> int:
        """CPUs that reclaimed pods always keep: at least one a NUMA node, at most all."""
        return reclaim_reserve(self.min_reclaimed_cpus, cpus, numa_nodes)


def _cpus(name: str, text: str) -> set[int]:
    try:
        return set(parse_cpu_list(text))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None

"""Defines the settings of the QRM side: cpuset allocation, and CPU burst, memory QoS, disk, network and cache controls.
Names in brackets are Katalyst's. Unless a setting says otherwise, a control is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from agent.config.units import Cores, Ratio, Seconds, reclaim_reserve_cpus
from api.cpu import format_cpu_list, parse_cpu_list
from api.qos import QoSLevel

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
        reserved = _parse_cpus("reservedCpuList", self.reserved_cpu_list)
        if both := reserved & _parse_cpus("interruptCpuList", self.interrupt_cpu_list):
            listed = format_cpu_list(both)
            raise ValueError(f"reservedCpuList and interruptCpuList both have CPU {listed}; leave it to one of them")
        if reserved and self.reserved_cpus not in (0, len(reserved)):
            raise ValueError(
                f"reservedCpus is {self.reserved_cpus} and reservedCpuList has {len(reserved)} CPUs; set one of them"
            )

    def reclaim_reserve(self, cpus: int, numa_nodes: int) -> int:
        """CPUs that reclaimed pods always keep: at least one a NUMA node, at most all."""
        return reclaim_reserve_cpus(self.min_reclaimed_cpus, cpus, numa_nodes)


def _parse_cpus(name: str, text: str) -> set[int]:
    try:
        return set(parse_cpu_list(text))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


Percent = Annotated[float, Meta(ge=0, le=100)]
Weight = Annotated[int, Meta(ge=1, le=10_000)]
_COST_QOS = ("enable", "ctrl", "rpct", "rlat", "wpct", "wlat", "min", "max")
_COST_MODEL = ("ctrl", "model", "rbps", "rseqiops", "rrandiops", "wbps", "wseqiops", "wrandiops")
"""Documentation/admin-guide/cgroup-v2.rst, io.cost.qos and io.cost.model."""
ClassId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Mbit = Annotated[int, Meta(ge=0, le=10_000_000)]


class KoordinatorBurstConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Koordinator's CPU burst: the numbers of its NodeSLO."""

    policy: Literal["none", "auto", "cpuBurstOnly", "cfsQuotaBurstOnly"] = "auto"
    """[policy] `cpuBurstOnly` lets unused quota be saved up, `cfsQuotaBurstOnly` raises quotas, `auto` does both."""
    cpu_burst_percent: Annotated[float, Meta(ge=1, le=10_000)] = 1000
    """Burst as a share of the limit's CPU time in a period; the kernel takes at most the quota."""
    quota_burst_percent: Annotated[float, Meta(ge=100, le=10_000)] = 300
    """How far above its limit a quota may be raised."""
    quota_burst_period_s: Annotated[float, Meta(ge=-1, le=86_400)] = -1
    """How long a container may use all of that; -1 is without end."""
    share_pool_threshold_percent: Percent = 50
    """From this load of the CPUs that pods share, quotas only go down."""
    average_s: Seconds = 5.0
    """The load is averaged over so long."""


class BurstConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """CPU burst: time below the quota that may be used above it later (cpu.max.burst)."""

    policy: Literal["off", "katalyst", "koordinator"] = "off"
    """Whose rules are followed: Katalyst's, by pods and the settings below, or Koordinator's."""
    dedicated: bool | None = None
    """[enableDedicatedCoresDefaultCPUBurst] unset leaves pods that say nothing alone, true is static, false is closed."""
    shared: bool | None = None
    """[enableSharedCoresDefaultCPUBurst] the same; true takes effect where it is the only shared pod of the node."""
    percent: Percent = 100
    """[defaultCPUBurstPercent] of the quota, for pods that do not say it."""
    koordinator: KoordinatorBurstConfig = KoordinatorBurstConfig()


class SuppressConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Koordinator's CPU suppress, for who wants its numbers instead of a provision policy's."""

    policy: Literal["off", "cpuset", "cfsQuota"] = "off"
    """[cpuSuppressPolicy] by which knob reclaimed pods are held back."""
    threshold_percent: Percent = 65
    """[cpuSuppressThresholdPercent] of the node that all pods together should use."""
    min_percent: Percent = 0
    """[cpuSuppressMinPercent] of the node that reclaimed pods keep; 0 is Koordinator's default: no floor but two CPUs by
    `cpuset`, and 2 ms in 100 by `cfsQuota`."""
    reserved_cores: Cores = 0
    """What the system is taken to use at least."""
    growth_ratio: Ratio = 0.1
    """Of the node that may be added in one step."""


class MemoryQosLevel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Koordinator's memory QoS of one level. 0 leaves the knob alone."""

    min_percent: Percent = 0
    """memory.min, of the request."""
    low_percent: Percent = 0
    """memory.low, of the request."""
    throttling_percent: Percent = 0
    """memory.high, of the way from the request to the limit."""


class DiskIoConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Weights and limits of disks, by level, and what is set for whole disks."""

    weights: Mapping[QoSLevel, Weight] = {}
    """[io-weight-config] io.weight by level; 100 is the kernel's default."""
    max: Mapping[QoSLevel, str] = {}
    """io.max by level, in the kernel's notation: `8:16 rbps=1048576 wbps=max`."""
    wbt_us: Mapping[Literal["HDD", "SSD", "NVME", "VIRTIO"], Annotated[int, Meta(ge=-1, le=10_000_000)]] = {}
    """[wbt-values-*] queue/wbt_lat_usec by kind of disk; -1 leaves it alone. Katalyst's: HDD and VIRTIO 75000, others 2000."""
    cost_qos: Mapping[str, str] = {}
    """[io-cost-qos-config-file] io.cost.qos of the root by disk, such as `sda`: the words after the device's number."""
    cost_model: Mapping[str, str] = {}
    """[io-cost-model-config-file] io.cost.model likewise."""

    def __post_init__(self) -> None:
        """Raise ValueError for lines that the kernel would not take."""
        for name, lines, keys in (
            ("costQos", self.cost_qos, _COST_QOS),
            ("costModel", self.cost_model, _COST_MODEL),
        ):
            for disk, line in lines.items():
                for word in line.split() or [""]:
                    key, _, value = word.partition("=")
                    if key not in keys or not value:
                        raise ValueError(
                            f"{name}: {disk[:40]}: {word[:40]!r} is none of {', '.join(keys)} with = and a value"
                        )


class NetworkQosConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Classes of packets, and bandwidth that can be promised."""

    class_ids: Mapping[QoSLevel, ClassId] = {}
    """[net-class-ids] net_cls.classid by level."""
    egress_rate: Ratio = 0.94
    """[net-egress-capacity-rate] of a card's speed that can be promised outwards."""
    ingress_rate: Ratio = 0.9
    """[net-ingress-capacity-rate] and inwards."""
    reserved_mbit: Mbit = 0
    """[network-resource-plugin-reserved-bandwidth] of each card that is never promised."""


class ResctrlLevel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Share of caches and memory bandwidth. Names in brackets are Koordinator's."""

    cat_start_percent: Percent = 0
    """[catRangeStartPercent] The part of each L3 cache begins here,"""
    cat_end_percent: Annotated[float, Meta(gt=0, le=100)] = 100
    """[catRangeEndPercent] and ends here."""
    mba_percent: Annotated[float, Meta(gt=0, le=100)] = 100
    """[mbaPercent] Of the memory bandwidth."""

    def __post_init__(self) -> None:
        """Raise ValueError for what no single field's bounds can say."""
        if self.cat_start_percent >= self.cat_end_percent:
            raise ValueError(
                f"catStartPercent {self.cat_start_percent:g} is not below catEndPercent {self.cat_end_percent:g}: no way of "
                "the caches would be left; lower it"
            )


def _default_resctrl_levels() -> dict[QoSLevel, ResctrlLevel]:
    return {
        QoSLevel.DEDICATED: ResctrlLevel(),
        QoSLevel.SHARED: ResctrlLevel(),
        QoSLevel.RECLAIMED: ResctrlLevel(cat_end_percent=30),
    }


class ResctrlConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Groups of resctrl, by level. Koordinator's: reclaimed pods have 30 % of each L3 cache, others all of it."""

    enabled: bool = False
    """Whether groups are made at all; where the machine has no resctrl, the source `resctrl-groups` says so."""
    levels: Mapping[QoSLevel, ResctrlLevel] = msgspec.field(default_factory=_default_resctrl_levels)
    """Each level has a group of its own; pods of levels that are not listed stay in the machine's."""


class KnobsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Knobs beside CPU pools. Unless a setting says otherwise nothing of this is touched on a node."""

    burst: BurstConfig = BurstConfig()
    suppress: SuppressConfig = SuppressConfig()
    memory_qos: Mapping[QoSLevel, MemoryQosLevel] = {}
    """[memoryQOS] By level; levels that are not listed are left alone."""
    io: DiskIoConfig = DiskIoConfig()
    network: NetworkQosConfig = NetworkQosConfig()
    resctrl: ResctrlConfig = ResctrlConfig()
    oom_priority: bool = False
    """[enable-oom-priority] Have the OOM killer take pods in the order of oom_priority, by oom_score_adj of their processes."""

    @property
    def of_the_node(self) -> bool:
        """Whether anything is set beyond cgroups: for whole disks, caches or processes."""
        io = self.io
        return bool(io.wbt_us or io.cost_qos or io.cost_model or self.resctrl.enabled or self.oom_priority)

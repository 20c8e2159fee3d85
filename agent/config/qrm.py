"""Defines the settings of the QRM side: cpuset allocation, CPU burst, memory QoS, disk, network and cache controls.
Names in brackets are Katalyst's. Unless a setting says otherwise, a control is left alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from agent.config.units import Cores, Fraction, Percent, Ratio, Seconds, reclaim_reserve_cpus
from api.cpu import format_cpu_list, parse_cpu_list
from api.qos import QoSLevel
from api.text import quote

Count = Annotated[int, Meta(ge=0, le=8192)]


class NativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Policy `native`: the kubelet's static CPU manager."""

    allocation: Literal["packed", "distributed"] = "packed"
    """[cpu-allocation-option] `packed`: on as few sockets as possible. `distributed`: evenly over as few NUMA nodes as
    possible."""
    full_physical_cores: bool = False
    """[enable-full-physical-cpus-only] Allocate whole physical cores; reject other requests."""


class CpuPlacementConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """How pool sizes become cpusets."""

    policy: Literal["dynamic", "native"] = "dynamic"
    """[cpu-resource-plugin-policy] `dynamic`: pools by QoS level. `native`: the kubelet's static policy."""
    reserved_cpus: Count = 0
    """[cpu-resource-plugin-reserved] CPUs reserved for the system and system_cores, from each NUMA node in turn."""
    reserved_cpu_list: str = ""
    """[reserved-cpu-list] Reserve these CPUs instead (kernel list syntax)."""
    interrupt_cpu_list: str = ""
    """CPUs without containers, for interrupts (kernel list syntax)."""
    min_reclaimed_cpus: Annotated[int, Meta(ge=1, le=8192)] | None = None
    """[minReclaimedResourceForAllocate] As `advisor.minReclaimedCores`, for cpusets."""
    ramp_up_s: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    """A new shared container may use all pooled CPUs for this time."""
    residual_s: Annotated[float, Meta(ge=0, le=86400)] = 300.0
    """An allocation outlasts its pod by this time, unless other pods request its CPUs."""
    numa_bound_factor: Annotated[float, Meta(ge=1, le=16)] = 2.0
    """Size of a NUMA-bound pool without advice / its pods' requests."""
    numa_hint: Literal["spreading", "packing", "dynamic-packing"] = "spreading"
    """[cpu-numa-hint-prefer-policy] Bind pods to the NUMA node with the most (`spreading`) or least sufficient free
    CPUs (`packing`); `dynamic-packing` packs above the threshold."""
    numa_hint_low_threshold: Fraction = 0.5
    """[cpu-numa-hint-prefer-low-threshold] Free share of a node's CPUs down to which `dynamic-packing` packs."""
    enable_reclaim_numa_binding: bool = False
    """[enable-reclaim-numa-binding] Bind reclaimed pods that request it to a NUMA node with headroom."""
    fallback_cores: Cores = 4.0
    """Request of an online container without one."""
    native: NativeConfig = NativeConfig()

    def __post_init__(self) -> None:
        reserved = _parse_cpus("reservedCpuList", self.reserved_cpu_list)
        if both := reserved & _parse_cpus("interruptCpuList", self.interrupt_cpu_list):
            listed = format_cpu_list(both)
            raise ValueError(f"reservedCpuList and interruptCpuList both have CPU {listed}; remove it from one of them")
        if reserved and self.reserved_cpus not in (0, len(reserved)):
            raise ValueError(
                f"reservedCpus is {self.reserved_cpus} and reservedCpuList has {len(reserved)} CPUs; set one of them"
            )

    def reclaim_reserve(self, cpus: int, numa_nodes: int) -> int:
        """Return the CPUs reserved for reclaimed pods: at least one per NUMA node, at most all."""
        return reclaim_reserve_cpus(self.min_reclaimed_cpus, cpus, numa_nodes)


def _parse_cpus(name: str, text: str) -> set[int]:
    try:
        return set(parse_cpu_list(text))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


Weight = Annotated[int, Meta(ge=1, le=10_000)]
_COST_QOS = ("enable", "ctrl", "rpct", "rlat", "wpct", "wlat", "min", "max")
_COST_MODEL = ("ctrl", "model", "rbps", "rseqiops", "rrandiops", "wbps", "wseqiops", "wrandiops")
"""Keys of io.cost.qos and io.cost.model (Documentation/admin-guide/cgroup-v2.rst)."""
ClassId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Mbit = Annotated[int, Meta(ge=0, le=10_000_000)]


class KoordinatorBurstConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """CPU burst as in Koordinator's NodeSLO."""

    policy: Literal["none", "auto", "cpuBurstOnly", "cfsQuotaBurstOnly"] = "auto"
    """[policy] `cpuBurstOnly` saves unused quota, `cfsQuotaBurstOnly` raises quotas, `auto` does both."""
    cpu_burst_percent: Annotated[float, Meta(ge=1, le=10_000)] = 1000
    """Burst in percent of the limit per period; the kernel allows at most the quota."""
    quota_burst_percent: Annotated[float, Meta(ge=100, le=10_000)] = 300
    """Raised quota in percent of the limit."""
    quota_burst_period_s: Annotated[float, Meta(ge=-1, le=86_400)] = -1
    """Maximum time at the raised quota; -1: unlimited."""
    share_pool_threshold_percent: Percent = 50
    """From this load of the shared CPUs on, quotas only fall."""
    average_s: Seconds = 5.0
    """Averaging time of the load."""


class BurstConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """CPU burst (cpu.max.burst): unused quota may be used later."""

    policy: Literal["off", "katalyst", "koordinator"] = "off"
    """Katalyst's or Koordinator's rules."""
    dedicated: bool | None = None
    """[enableDedicatedCoresDefaultCPUBurst] Dedicated pods without a policy: `true` is static, `false` closed, unset:
    unchanged."""
    shared: bool | None = None
    """[enableSharedCoresDefaultCPUBurst] Shared pods without a policy; `true` applies to the node's only shared pod."""
    percent: Percent = 100
    """[defaultCPUBurstPercent] Percent of the quota, unless the pod sets it."""
    koordinator: KoordinatorBurstConfig = KoordinatorBurstConfig()


class SuppressConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Koordinator's CPU suppress, in place of a provision policy."""

    policy: Literal["off", "cpuset", "cfsQuota"] = "off"
    """[cpuSuppressPolicy] Control that limits reclaimed pods."""
    threshold_percent: Percent = 65
    """[cpuSuppressThresholdPercent] Target CPU use of the node."""
    min_percent: Percent = 0
    """[cpuSuppressMinPercent] Share of the node reserved for reclaimed pods; at 0: two CPUs (`cpuset`) or 2 ms in 100
    (`cfsQuota`)."""
    reserved_cores: Cores = 0
    """Minimum assumed use of the system."""
    growth_ratio: Ratio = 0.1
    """Maximum growth per step, share of the node."""


class MemoryQosLevel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Koordinator's memory QoS of one level; 0 leaves the file alone."""

    min_percent: Percent = 0
    """`memory.min` in percent of the request."""
    low_percent: Percent = 0
    """`memory.low` in percent of the request."""
    throttling_percent: Percent = 0
    """`memory.high`: this far from the request to the limit."""


class DiskIoConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Disk weights and limits by level, and settings of whole disks."""

    weights: Mapping[QoSLevel, Weight] = {}
    """[io-weight-config] io.weight by level; the kernel's default is 100."""
    max: Mapping[QoSLevel, str] = {}
    """`io.max` by level: `8:16 rbps=1048576 wbps=max`."""
    wbt_us: Mapping[Literal["HDD", "SSD", "NVME", "VIRTIO"], Annotated[int, Meta(ge=-1, le=10_000_000)]] = {}
    """[wbt-values-*] queue/wbt_lat_usec by kind of disk; -1: unchanged. Katalyst: 75000 (HDD, VIRTIO), 2000."""
    cost_qos: Mapping[str, str] = {}
    """[io-cost-qos-config-file] io.cost.qos of the root by disk, such as `sda`, without the device number."""
    cost_model: Mapping[str, str] = {}
    """[io-cost-model-config-file] io.cost.model likewise."""

    def __post_init__(self) -> None:
        for name, lines, keys in (
            ("costQos", self.cost_qos, _COST_QOS),
            ("costModel", self.cost_model, _COST_MODEL),
        ):
            for disk, line in lines.items():
                for word in line.split() or [""]:
                    key, _, value = word.partition("=")
                    if key not in keys or not value:
                        raise ValueError(
                            f"{name}: {disk[:40]}: {quote(word, 40)} is none of {', '.join(keys)} with = and a value"
                        )


class NetworkQosConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Packet classes and allocatable bandwidth."""

    class_ids: Mapping[QoSLevel, ClassId] = {}
    """[net-class-ids] net_cls.classid by level."""
    egress_rate: Ratio = 0.94
    """[net-egress-capacity-rate] Allocatable part of a card's egress speed."""
    ingress_rate: Ratio = 0.9
    """[net-ingress-capacity-rate] Allocatable part of a card's ingress speed."""
    reserved_mbit: Mbit = 0
    """[network-resource-plugin-reserved-bandwidth] Bandwidth of each card that is never allocated."""


class ResctrlLevel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Share of caches and memory bandwidth. Names in brackets are Koordinator's."""

    cat_start_percent: Percent = 0
    """[catRangeStartPercent] Start of the part of each L3 cache."""
    cat_end_percent: Annotated[float, Meta(gt=0, le=100)] = 100
    """[catRangeEndPercent] End of the part of each L3 cache."""
    mba_percent: Annotated[float, Meta(gt=0, le=100)] = 100
    """[mbaPercent] Part of the memory bandwidth."""

    def __post_init__(self) -> None:
        if self.cat_start_percent >= self.cat_end_percent:
            raise ValueError(
                f"catStartPercent {self.cat_start_percent:g} is not below catEndPercent {self.cat_end_percent:g}: no cache way "
                "would be left; lower it"
            )


def _default_resctrl_levels() -> dict[QoSLevel, ResctrlLevel]:
    return {
        QoSLevel.DEDICATED: ResctrlLevel(),
        QoSLevel.SHARED: ResctrlLevel(),
        QoSLevel.RECLAIMED: ResctrlLevel(cat_end_percent=30),
    }


class ResctrlConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Resctrl groups by level. Default, as Koordinator's: reclaimed pods have 30 % of each L3 cache, others all."""

    enabled: bool = False
    """Create the groups; component `resctrl-groups` reports a machine without resctrl."""
    levels: Mapping[QoSLevel, ResctrlLevel] = msgspec.field(default_factory=_default_resctrl_levels)
    """A group per level; other pods stay in the default group."""


class KnobsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Controls other than CPU pools, all untouched by default."""

    burst: BurstConfig = BurstConfig()
    suppress: SuppressConfig = SuppressConfig()
    memory_qos: Mapping[QoSLevel, MemoryQosLevel] = {}
    """[memoryQOS] By level; others are unchanged."""
    io: DiskIoConfig = DiskIoConfig()
    network: NetworkQosConfig = NetworkQosConfig()
    resctrl: ResctrlConfig = ResctrlConfig()
    oom_priority: bool = False
    """[enable-oom-priority] Set oom_score_adj in the order of oom_priority."""
    short_slices: bool = False
    """Give reclaimed threads the shortest EEVDF slice where the class BestEffort is not idle (Linux 6.12). Needs CAP_SYS_NICE;
    docs/adr/0009 has measurements."""

    @property
    def of_the_node(self) -> bool:
        """Whether a control outside of cgroups is set: on whole disks, caches or processes."""
        io = self.io
        return bool(io.wbt_us or io.cost_qos or io.cost_model or self.resctrl.enabled or self.oom_priority)

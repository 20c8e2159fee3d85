"""Settings of the knobs beside CPU pools: burst, suppression, memory QoS, disks, network and caches. Katalyst's in brackets.

Unless a setting says otherwise nothing of this is touched on a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from agent.config.units import Cores, Ratio, Seconds
from api.qos import QoSLevel

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


class IoConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
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


class NetworkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
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


def _levels() -> dict[QoSLevel, ResctrlLevel]:
    return {
        QoSLevel.DEDICATED: ResctrlLevel(),
        QoSLevel.SHARED: ResctrlLevel(),
        QoSLevel.RECLAIMED: ResctrlLevel(cat_end_percent=30),
    }


class ResctrlConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Groups of resctrl, by level. Koordinator's: reclaimed pods have 30 % of each L3 cache, others all of it."""

    enabled: bool = False
    """Whether groups are made at all; where the machine has no resctrl, the source `resctrl-groups` says so."""
    levels: Mapping[QoSLevel, ResctrlLevel] = msgspec.field(default_factory=_levels)
    """Each level has a group of its own; pods of levels that are not listed stay in the machine's."""


class KnobsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Knobs beside CPU pools. Unless a setting says otherwise nothing of this is touched on a node."""

    burst: BurstConfig = BurstConfig()
    suppress: SuppressConfig = SuppressConfig()
    memory_qos: Mapping[QoSLevel, MemoryQosLevel] = {}
    """[memoryQOS] By level; levels that are not listed are left alone."""
    io: IoConfig = IoConfig()
    network: NetworkConfig = NetworkConfig()
    resctrl: ResctrlConfig = ResctrlConfig()
    oom_priority: bool = False
    """[enable-oom-priority] Have the OOM killer take pods in the order of oom_priority, by oom_score_adj of their processes."""

    @property
    def of_the_node(self) -> bool:
        """Whether anything is set beyond cgroups: for whole disks, caches or processes."""
        io = self.io
        return bool(io.wbt_us or io.cost_qos or io.cost_model or self.resctrl.enabled or self.oom_priority)

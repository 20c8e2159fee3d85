"""Defines the settings of memory advice: headroom, guard, cache reaper, offloading. Names in brackets are Katalyst's.
Sizes are bytes. Unset sizes scale down on nodes with little memory, because Katalyst's defaults suit large nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from agent.config.units import Ratio, Seconds, check_ascending
from api.qos import QoSLevel

MIB, GIB = 1 << 20, 1 << 30
Bytes = Annotated[int, Meta(ge=0, le=1 << 60)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
_RESERVE, _RESERVE_PART = 5 * GIB, 8
_CRITICAL, _CRITICAL_PART = 4 * GIB, 16
_STATIC, _STATIC_PART = 20 * GIB, 8
_FALLBACK, _FALLBACK_PART = 8 * GIB, 8


class UtilBasedMemoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """[memoryHeadroomConfig.utilBasedConfig] What is free counts, not only what is not estimated to be needed."""

    enable: bool = False
    """[enable] Policy `canonical` promises what is free, too, not only what is not estimated to be needed."""
    free_based_ratio: Fraction = 0.6
    """[freeBasedRatio] The part of free memory that counts."""
    static_based_capacity_bytes: Bytes | None = None
    """[staticBasedCapacity] added in any case; 20 GiB unless set, an eighth of nodes below 160 GiB."""
    cache_based_ratio: Fraction = 0.0
    """[cacheBasedRatio] The part of page cache that counts as good as free; 0 is none."""
    request_based_ratio: Fraction = 0.1
    """[requestBasedRatio] The part of what online pods requested that `numa_aware` keeps for them."""
    max_oversold_rate: Annotated[float, Meta(ge=0, le=100)] = 2.0
    """[maxOversoldRate] `numa_aware` promises at most so many times the reclaim root's memory limit; 0 is any number."""
    cpu_memory_ratio_low: Annotated[float, Meta(ge=0)] = 1 / 6
    """[CPUMemRatioLowerBound] CPUs per GiB above which page cache is counted,"""
    cpu_memory_ratio_high: Annotated[float, Meta(ge=0)] = 1 / 3.5
    """[CPUMemRatioUpperBound] and below which."""

    def __post_init__(self) -> None:
        """Raise ValueError for what no single field's bounds can say."""
        check_ascending(
            "cpuMemoryRatioLow", self.cpu_memory_ratio_low, "cpuMemoryRatioHigh", self.cpu_memory_ratio_high
        )


class ReclaimedMemoryGuardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """[memoryGuardConfig] A limit on all reclaimed pods together."""

    enable: bool = True
    """[enable] False takes the limit away."""
    critical_watermark_scale_factor: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    """[criticalWatermarkScaleFactor] So many times the zones' low watermark stay free on each NUMA node."""
    high_ratio: Ratio = 0.95
    """memory.high as a part of the limit: the group reclaims by itself before it meets the limit."""


class CacheReaperConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """[cache-reaper] Page cache of reclaimed pods is dropped when memory is short."""

    enable: bool = False
    """Whether it is done at all."""
    min_cache_ratio: Fraction = 0.005
    """[MinCacheUtilizationThreshold] Containers with less cache than this part of the memory are not worth it."""
    interval_s: Seconds = 30.0
    """One container is not asked again before; dropping takes time (Katalyst gives it 30 s)."""


class OffloadingLayerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """[TMOConfigDetail] One layer of settings of memory offloading: what is not set is as in the layer below."""

    enable: bool | None = None
    """[enableTMO] false at the bottom."""
    enable_swap: bool | None = None
    """[enableSwap] false at the bottom: file cache alone is given up."""
    policy: Literal["psi", "refault", "integrated", "senpai"] | None = None
    """[policyName] psi at the bottom. `integrated` is the smaller of psi and refault, `senpai` Meta's law."""
    interval_s: Seconds | None = None
    """[interval] 30 at the bottom, for `senpai` 6."""
    max_reclaim_bytes: Bytes | None = None
    """[maxReclaimSize] in one interval; unlimited at the bottom."""
    reserved_inactive_file_bytes: Bytes | None = None
    """[reservedInactiveFile] Without swap, so much inactive file cache beyond twice what is mapped is left; none below."""
    psi_max_probe: Ratio | None = None
    """[psiPolicy.maxProbe] 0.01 at the bottom: part of the use that is asked for without any pressure."""
    psi_avg60_threshold: Annotated[float, Meta(gt=0, le=100)] | None = None
    """[psiPolicy.psiAvg60Threshold] 0.1 at the bottom, in percent of time: at this pressure nothing is asked for."""
    refault_max_probe: Ratio | None = None
    """[refaultPolicy.maxProbe] 0.01 at the bottom."""
    reclaim_accuracy_target: Fraction | None = None
    """[refaultPolicy.reclaimAccuracyTarget] 0.99 at the bottom: part of the reclaimed pages that are not wanted back."""
    reclaim_scan_efficiency_target: Fraction | None = None
    """[refaultPolicy.reclaimScanEfficiencyTarget] 0.6 at the bottom: reclaimed among scanned pages."""


class OffloadingBlockConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """[blockConfig] Pods with one of these labels or annotations give up nothing."""

    labels: Mapping[str, tuple[str, ...]] = {}
    """Values by name; none at all stands for any value."""
    annotations: Mapping[str, tuple[str, ...]] = {}
    """The same of annotations."""


class OffloadingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """[TransparentMemoryOffloadingConfiguration] Memory that is not in use is written back or swapped out, bit by bit."""

    default: OffloadingLayerConfig = OffloadingLayerConfig()
    levels: Mapping[QoSLevel, OffloadingLayerConfig] = {}
    """[qosLevelConfig] over the default,"""
    pools: Mapping[str, OffloadingLayerConfig] = {}
    """[poolNameConfig] and over that."""
    cgroups: Mapping[str, OffloadingLayerConfig] = {}
    """[CgroupConfig] By path below the controllers' roots; of the default and this alone, whatever runs there."""
    block: OffloadingBlockConfig = OffloadingBlockConfig()
    max_swap_used_ratio: Fraction = 0.8
    """When more of the node's swap is used, nothing is swapped out."""
    senpai_stall_s: Annotated[float, Meta(gt=0, le=60)] = 0.01
    """Policy `senpai`: the stall on memory that is aimed at in an interval."""
    senpai_pressure: Annotated[float, Meta(gt=0, le=100)] = 0.1
    """In percent of time over 10 s: with more pressure on memory or disks nothing is asked for."""
    senpai_min_bytes: Bytes = 100 * MIB
    """Groups are not made smaller than this,"""
    senpai_max_bytes: Bytes = 10 * GIB
    """nor is a larger size ever aimed at than this or what is used."""
    senpai_max_probe: Ratio = 0.01
    """Part of a group's size that it is made smaller by in one interval at most,"""
    senpai_max_backoff: Ratio = 1.0
    """and larger by."""
    senpai_probe: Annotated[float, Meta(gt=0)] = 10.0
    """Stall so many times below the aim makes the largest probe."""
    senpai_backoff: Annotated[float, Meta(gt=0)] = 20.0
    """Stall so many times above the aim makes the largest step back."""
    senpai_swap_bytes_per_s: Bytes = MIB
    """Anonymous memory is swapped out no faster."""
    dying: bool = False
    """[dying_memcg_reclaim] What removed cgroups left behind is reclaimed. It costs the living ones below some cache."""
    dying_interval_s: Seconds = 300.0
    """Between two rounds of it."""
    dying_cgroups: tuple[str, ...] = (
        "/kubepods/burstable",
        "/kubepods/offline-besteffort-*",
        "/kubepods.slice/kubepods-burstable.slice",
    )
    """Where; `*` stands for any part of one name."""

    def __post_init__(self) -> None:
        """Raise ValueError for what no single field's bounds can say."""
        check_ascending("senpaiMinBytes", self.senpai_min_bytes, "senpaiMaxBytes", self.senpai_max_bytes)


class MemoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """What memory reclaimed pods are promised, and what is done when it is short."""

    policy: Literal["canonical", "numa_aware", "none"] = "canonical"
    """[memory-headroom-policy] `canonical`: what online pods are not estimated to need. `numa_aware`: what is free."""
    reserved_for_allocate_bytes: Bytes | None = None
    """[reservedResourceForAllocate] kept for online pods; 5 GiB unless set, an eighth of nodes below 40 GiB."""
    min_critical_watermark_bytes: Bytes | None = None
    """[MinCriticalWatermark] of each NUMA node: with less free, cache is dropped; 4 GiB unless set, a sixteenth of the
    NUMA node where that has less than 64 GiB."""
    reclaim_root: str = ""
    """[reclaim-relative-root-cgroup-path] The cgroup above all reclaimed pods, such as `/kubepods/besteffort`: the guard limits
    it, and `/kubepods/besteffort-0` for those that are bound to NUMA node 0; with policy `latency` each yields as a whole,
    unless a process is below it that is of no listed reclaimed pod. With `--kubelet` that of BestEffort pods unless set, as its
    driver spells it below `kubelet.cgroupRoot`. Empty where there is none; left alone where an online pod is below it."""
    usage_margin: Annotated[float, Meta(ge=1, le=10)] = 1.1
    """Estimated need of an online container = this x what it uses."""
    fallback_bytes: Bytes | None = None
    """Assumed need of one that is neither measured nor has a request; 8 GiB unless set, an eighth of nodes below 64 GiB."""
    stale_s: Seconds = 30.0
    """Readings of memory files that are older than this are as good as none."""
    util_based: UtilBasedMemoryConfig = UtilBasedMemoryConfig()
    guard: ReclaimedMemoryGuardConfig = ReclaimedMemoryGuardConfig()
    reaper: CacheReaperConfig = CacheReaperConfig()
    offloading: OffloadingConfig = OffloadingConfig()

    def __post_init__(self) -> None:
        """Raise ValueError for what no single field's bounds can say."""
        root = self.reclaim_root.rstrip("/") or self.reclaim_root
        if root and (root[0] != "/" or not all(part.strip(".") for part in root[1:].split("/"))):
            raise ValueError(
                f"reclaimRoot: {root[:80]!r} is not the path of a cgroup below the root, such as /kubepods/besteffort"
            )

    def reserve_bytes(self, total: int) -> int:
        """Memory kept for online pods on a node of so many bytes."""
        return min(_default_size(self.reserved_for_allocate_bytes, _RESERVE, total // _RESERVE_PART), total)

    def critical_bytes(self, numa_total: int) -> int:
        """What has to stay free at least on a NUMA node of so many bytes."""
        return min(
            _default_size(self.min_critical_watermark_bytes, _CRITICAL, numa_total // _CRITICAL_PART), numa_total
        )

    def static_bytes(self, total: int) -> int:
        """What is promised beyond all measurement, where utilBased is on."""
        return _default_size(self.util_based.static_based_capacity_bytes, _STATIC, total // _STATIC_PART)

    def unknown_need_bytes(self, total: int) -> int:
        """What a container is taken to need of which nothing is known."""
        return _default_size(self.fallback_bytes, _FALLBACK, total // _FALLBACK_PART)


def _default_size(configured: int | None, large: int, small: int) -> int:
    return min(large, small) if configured is None else configured

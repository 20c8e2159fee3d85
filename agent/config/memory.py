"""Defines the settings of memory advice: headroom, guard, cache reaper, offloading. Names in brackets are Katalyst's.
Sizes are bytes. Unset sizes scale down on nodes with little memory, because Katalyst's defaults suit large nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from agent.config.units import Fraction, Ratio, Seconds, check_ascending
from api.qos import QoSLevel
from api.text import quote
from api.units import GIB, MIB

Bytes = Annotated[int, Meta(ge=0, le=1 << 60)]
_RESERVE, _RESERVE_PART = 5 * GIB, 8
_CRITICAL, _CRITICAL_PART = 4 * GIB, 16
_STATIC, _STATIC_PART = 20 * GIB, 8
_FALLBACK, _FALLBACK_PART = 8 * GIB, 8


class UtilBasedMemoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """[memoryHeadroomConfig.utilBasedConfig] Count free memory as headroom, not only the estimated rest."""

    enable: bool = False
    """[enable] Enables this for policy `canonical`."""
    free_based_ratio: Fraction = 0.6
    """[freeBasedRatio] Share of free memory that counts."""
    static_based_capacity_bytes: Bytes | None = None
    """[staticBasedCapacity] Always added. Unset: 20 GiB, an eighth below 160 GiB."""
    cache_based_ratio: Fraction = 0.0
    """[cacheBasedRatio] Share of page cache that counts as free."""
    request_based_ratio: Fraction = 0.1
    """[requestBasedRatio] Share of online requests that `numa_aware` reserves."""
    max_oversold_rate: Annotated[float, Meta(ge=0, le=100)] = 2.0
    """[maxOversoldRate] Maximum headroom of `numa_aware` / memory limit of the reclaim root; 0: none."""
    cpu_memory_ratio_low: Annotated[float, Meta(ge=0)] = 1 / 6
    """[CPUMemRatioLowerBound] CPUs per GiB above which page cache counts."""
    cpu_memory_ratio_high: Annotated[float, Meta(ge=0)] = 1 / 3.5
    """[CPUMemRatioUpperBound] CPUs per GiB below which page cache counts."""

    def __post_init__(self) -> None:
        check_ascending(
            "cpuMemoryRatioLow", self.cpu_memory_ratio_low, "cpuMemoryRatioHigh", self.cpu_memory_ratio_high
        )


class ReclaimedMemoryGuardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """[memoryGuardConfig] Limits the memory of all reclaimed pods together."""

    enable: bool = True
    """[enable] `false` removes the limit."""
    critical_watermark_scale_factor: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    """[criticalWatermarkScaleFactor] Memory to leave free per NUMA node / low watermark of its zones."""
    high_ratio: Ratio = 0.95
    """`memory.high` / limit."""


class CacheReaperConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """[cache-reaper] Drops page cache of reclaimed pods when memory is short."""

    enable: bool = False
    """Enables this."""
    min_cache_ratio: Fraction = 0.005
    """[MinCacheUtilizationThreshold] Containers with less cache, as a share of memory, are skipped."""
    interval_s: Seconds = 30.0
    """Time between two drops in a container."""


class OffloadingLayerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """[TMOConfigDetail] One layer of memory offloading; unset fields come from the layer below."""

    enable: bool | None = None
    """[enableTMO] Lowest layer: `false`."""
    enable_swap: bool | None = None
    """[enableSwap] Lowest layer: `false`, which offloads file cache only."""
    policy: Literal["psi", "refault", "integrated", "senpai"] | None = None
    """[policyName] Lowest layer: `psi`. `integrated`: the smaller of psi and refault. `senpai`: Meta's algorithm."""
    interval_s: Seconds | None = None
    """[interval] Lowest layer: 30, with `senpai` 6."""
    max_reclaim_bytes: Bytes | None = None
    """[maxReclaimSize] Maximum reclaim per interval. Lowest layer: unlimited."""
    reserved_inactive_file_bytes: Bytes | None = None
    """[reservedInactiveFile] Without swap: inactive file cache to retain beyond twice the mapped files. Lowest layer:
    0."""
    psi_max_probe: Ratio | None = None
    """[psiPolicy.maxProbe] Share of use reclaimed without pressure. Lowest layer: 0.01."""
    psi_avg60_threshold: Annotated[float, Meta(gt=0, le=100)] | None = None
    """[psiPolicy.psiAvg60Threshold] Pressure in percent at which reclaim stops. Lowest layer: 0.1."""
    refault_max_probe: Ratio | None = None
    """[refaultPolicy.maxProbe] Maximum share of use per reclaim. Lowest layer: 0.01."""
    reclaim_accuracy_target: Fraction | None = None
    """[refaultPolicy.reclaimAccuracyTarget] Share of reclaimed pages without refault. Lowest layer: 0.99."""
    reclaim_scan_efficiency_target: Fraction | None = None
    """[refaultPolicy.reclaimScanEfficiencyTarget] Reclaimed share of scanned pages. Lowest layer: 0.6."""


class OffloadingBlockConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """[blockConfig] Pods with one of these labels or annotations are not offloaded."""

    labels: Mapping[str, tuple[str, ...]] = {}
    """Values by label; an empty list matches any value."""
    annotations: Mapping[str, tuple[str, ...]] = {}
    """Values by annotation; an empty list matches any value."""


class OffloadingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """[TransparentMemoryOffloadingConfiguration] Writes back or swaps out unused memory in small steps."""

    default: OffloadingLayerConfig = OffloadingLayerConfig()
    levels: Mapping[QoSLevel, OffloadingLayerConfig] = {}
    """[qosLevelConfig] By QoS level, over `default`."""
    pools: Mapping[str, OffloadingLayerConfig] = {}
    """[poolNameConfig] By pool, over `levels`."""
    cgroups: Mapping[str, OffloadingLayerConfig] = {}
    """[CgroupConfig] By path below the controllers' roots, over `default` only."""
    block: OffloadingBlockConfig = OffloadingBlockConfig()
    max_swap_used_ratio: Fraction = 0.8
    """Above this use of swap nothing is swapped out."""
    senpai_stall_s: Annotated[float, Meta(gt=0, le=60)] = 0.01
    """`senpai`: target stall per interval."""
    senpai_pressure: Annotated[float, Meta(gt=0, le=100)] = 0.1
    """`senpai`: memory or disk pressure, percent of 10 s, above which nothing is reclaimed."""
    senpai_min_bytes: Bytes = 100 * MIB
    """`senpai`: minimum target size of a group."""
    senpai_max_bytes: Bytes = 10 * GIB
    """`senpai`: maximum target size of a group, unless it uses more."""
    senpai_max_probe: Ratio = 0.01
    """`senpai`: maximum cut of a group's size per interval."""
    senpai_max_backoff: Ratio = 1.0
    """`senpai`: maximum growth of a group's size per interval."""
    senpai_probe: Annotated[float, Meta(gt=0)] = 10.0
    """`senpai`: a stall this many times below the target makes the maximum cut."""
    senpai_backoff: Annotated[float, Meta(gt=0)] = 20.0
    """`senpai`: a stall this many times above it makes the maximum growth."""
    senpai_swap_bytes_per_s: Bytes = MIB
    """`senpai`: maximum swap-out rate."""
    dying: bool = False
    """[dying_memcg_reclaim] Reclaim memory charged to removed cgroups, at the cost of some cache of `dyingCgroups`."""
    dying_interval_s: Seconds = 300.0
    """Time between two such reclaims."""
    dying_cgroups: tuple[str, ...] = (
        "/kubepods/burstable",
        "/kubepods/offline-besteffort-*",
        "/kubepods.slice/kubepods-burstable.slice",
    )
    """Cgroups to reclaim from; `*` matches within one name."""

    def __post_init__(self) -> None:
        check_ascending("senpaiMinBytes", self.senpai_min_bytes, "senpaiMaxBytes", self.senpai_max_bytes)


class MemoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Memory headroom for reclaimed pods, and reactions to a shortage."""

    policy: Literal["canonical", "numa_aware", "none"] = "canonical"
    """[memory-headroom-policy] `canonical`: memory beyond online pods' estimated need. `numa_aware`: free memory."""
    reserved_for_allocate_bytes: Bytes | None = None
    """[reservedResourceForAllocate] Reserved for online pods. Unset: 5 GiB, an eighth of nodes below 40 GiB."""
    min_critical_watermark_bytes: Bytes | None = None
    """[MinCriticalWatermark] Free memory of a NUMA node below which cache is dropped. Unset: 4 GiB, a sixteenth below
    64 GiB."""
    reclaim_root: str = ""
    """[reclaim-relative-root-cgroup-path] Cgroup above all reclaimed pods; the guard limits it. With
    `-0` appended, the one above pods bound to NUMA node 0. Policy `latency` gives it the lowest priority, unless it
    contains other processes. Unset: with `--kubelet` the BestEffort cgroup. Empty: none."""
    usage_margin: Annotated[float, Meta(ge=1, le=10)] = 1.1
    """Estimated need / use of an online container."""
    fallback_bytes: Bytes | None = None
    """Need of a container without measurement and request. Unset: 8 GiB, an eighth below 64 GiB."""
    stale_s: Seconds = 30.0
    """Maximum age of memory readings."""
    util_based: UtilBasedMemoryConfig = UtilBasedMemoryConfig()
    guard: ReclaimedMemoryGuardConfig = ReclaimedMemoryGuardConfig()
    reaper: CacheReaperConfig = CacheReaperConfig()
    offloading: OffloadingConfig = OffloadingConfig()

    def __post_init__(self) -> None:
        root = self.reclaim_root.rstrip("/") or self.reclaim_root
        if root and (root[0] != "/" or not all(part.strip(".") for part in root[1:].split("/"))):
            raise ValueError(
                f"reclaimRoot: {quote(root)} is not the path of a cgroup below the root, such as /kubepods/besteffort"
            )

    def reserve_bytes(self, total: int) -> int:
        """Return the memory reserved for online pods on a node with this many bytes."""
        return min(_default_size(self.reserved_for_allocate_bytes, _RESERVE, total // _RESERVE_PART), total)

    def critical_bytes(self, numa_total: int) -> int:
        """Return the memory that has to stay free on a NUMA node with this many bytes."""
        return min(
            _default_size(self.min_critical_watermark_bytes, _CRITICAL, numa_total // _CRITICAL_PART), numa_total
        )

    def static_bytes(self, total: int) -> int:
        """Return the headroom that utilBased always adds on a node with this many bytes."""
        return _default_size(self.util_based.static_based_capacity_bytes, _STATIC, total // _STATIC_PART)

    def unknown_need_bytes(self, total: int) -> int:
        """Return the assumed need of a container about which nothing is known."""
        return _default_size(self.fallback_bytes, _FALLBACK, total // _FALLBACK_PART)


def _default_size(configured: int | None, large: int, small: int) -> int:
    return min(large, small) if configured is None else configured

"""Settings of the eviction plugins that look at memory, file systems and network cards. Names in brackets are Katalyst's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from agent.config.eviction_cpu import Factor, Grace, Share
from agent.config.units import Ratio, Seconds, ascending
from api.qos import QoSLevel

Bytes = Annotated[int, Meta(ge=0, le=1 << 50)]
Rate = Annotated[float, Meta(ge=0)]
Rounds = Annotated[int, Meta(ge=0, le=10_000)]
GIB = 1 << 30


class ReclaimedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """reclaimed-resource-pressure-eviction-plugin, and the same for each NUMA node: reclaimed pods requested too much."""

    cpu_threshold: Factor = 5.0
    """[evictionThreshold reclaimed_millicpu] their requests over what is promised."""
    memory_threshold: Factor = 5.0
    """[evictionThreshold reclaimed_memory] the same of memory."""
    cpu_soft_threshold: Factor = 1.5
    """[softEvictionThreshold] from here on pods that ask for it (pod_soft_evict_notify) are told, one at a time."""
    memory_soft_threshold: Factor = 1.2
    """[softEvictionThreshold] the same of memory."""
    tolerance_s: Annotated[float, Meta(ge=0, le=86_400)] = 0.0
    """[thresholdMetToleranceDuration] of the hard threshold."""
    soft_tolerance_s: Annotated[float, Meta(ge=0, le=86_400)] = 300.0
    """Of the soft one: what is promised goes up and down with the load."""
    grace_s: Grace | None = 60.0
    """[gracePeriod] of its victims."""


class NumaMemoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """numa-memory-pressure-eviction-plugin: a NUMA node runs out of free memory."""

    reclaimed_rounds: Rounds = 6
    """[numaFreeBelowWatermarkTimesReclaimedThreshold] more rounds than this below the low mark: a reclaimed pod leaves."""
    any_rounds: Rounds = 12
    """[numaFreeBelowWatermarkTimesThreshold] so many rounds: any pod may have to."""
    fast_wait_rounds: Rounds = 1
    """[numaFreeConstraintFastEvictionWaitCycle] so many rounds below the minimum, after the first, do the same."""
    victim_ratio: Share = 0.001
    """[numaVictimMinimumUtilizationThreshold] a victim uses so much of the NUMA node at least."""
    reclaimed_grace_s: Grace | None = 1.0
    """[reclaimedGracePeriod] of reclaimed pods."""
    grace_s: Grace | None = None
    """[gracePeriod] of others; the pod's own unless set."""


class SystemMemoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """system-memory-pressure-eviction-plugin: the whole node is short of memory."""

    free_minimum_bytes: Bytes = 0
    """[systemFreeMemoryThresholdMinimum] free memory below this, or below total x watermark_scale_factor / 10000."""
    kswapd_pages_per_s: Rate = 2000.0
    """[systemKswapdRateThreshold] pages that background reclaim takes away in a second,"""
    kswapd_s: Seconds = 120.0
    """[systemKswapdRateExceedDurationThreshold] for so long."""
    psi_avg10: Rate = 15.0
    """[PSI some avg10] of the burstable pods' root, in per cent,"""
    psi_pods: Annotated[int, Meta(ge=1)] = 3
    """of so many pods at least that stall themselves,"""
    psi_pod_avg10: Rate = 1.0
    """each by more than this,"""
    psi_pods_mean: Rate = 4.0
    """and by this on average,"""
    psi_s: Seconds = 15.0
    """for so long: a reclaimed pod leaves; three times as long: any."""
    psi_roots: tuple[str, ...] = ("/kubepods/burstable", "/kubepods.slice/kubepods-burstable.slice")
    """Where the burstable pods are; the first that exists."""
    cool_down_s: Seconds = 35.0
    """[systemPressureCoolDownPeriod] between two victims."""
    grace_s: Grace | None = None
    """[gracePeriod] of its victims; the pod's own unless set."""


class RssConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """rss-overuse-eviction-plugin: a pod uses more memory than it requested."""

    ratio: Factor = 1.05
    """[rssOveruseRateThreshold] resident memory over requests; the pod's rss_overuse_threshold overrides it."""
    labels: Mapping[str, str] = {}
    """[rssOveruseEvictionFilter] only pods that have all of these labels."""
    grace_s: Grace | None = None
    """[gracePeriod] of its victims; the pod's own unless set."""


class Amount(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """So much, or such a part of the whole; the number counts where both are set, and nothing where neither is."""

    number: Annotated[int, Meta(ge=0)] | None = None
    """Bytes, or inodes."""
    ratio: Share | None = None
    """Part of the file system."""

    def of(self, capacity: int) -> float | None:
        """How much that is on a file system of this capacity; None where nothing is set."""
        if self.number is not None:
            return self.number
        return None if self.ratio is None else self.ratio * capacity


class RootfsPressureConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """rootfs-pressure-eviction-plugin: the file system of images and writable layers fills up."""

    mount: str = "/"
    """Mount point of that file system."""
    minimum_free: Amount = Amount()
    """[minimumImageFsFreeThreshold] less than this free is too little; not judged unless set."""
    minimum_free_inodes: Amount = Amount()
    """[minimumImageFsInodesFreeThreshold] the same of inodes."""
    minimum_capacity_bytes: Bytes = 10 * GIB
    """[minimumImageFsDiskCapacityThreshold] smaller file systems are not judged."""
    pod_minimum: Amount = Amount()
    """[podMinimumUsedThreshold] pods that use less stay."""
    pod_minimum_inodes: Amount = Amount()
    """[podMinimumInodesUsedThreshold] the same of inodes."""
    reclaimed_priority: Amount = Amount()
    """[reclaimedQoSPodUsedPriorityThreshold] reclaimed pods that use more leave before all others."""
    reclaimed_priority_inodes: Amount = Amount()
    """[reclaimedQoSPodInodesUsedPriorityThreshold] the same of inodes."""
    grace_s: Grace | None = None
    """[gracePeriod] of its victims; the pod's own unless set."""


class RootfsOveruseConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """rootfs-overuse-eviction-plugin: one pod writes too much into its writable layers."""

    mount: str = "/"
    """Mount point of the file system of writable layers."""
    levels: tuple[QoSLevel, ...] = (QoSLevel.SHARED,)
    """[rootfsOveruseEvictionSupportedQoSLevels] whose pods are judged."""
    shared: Amount = Amount()
    """[sharedQoSRootfsOveruseThreshold] not judged unless set; at least 20 GiB or a tenth of the file system."""
    reclaimed: Amount = Amount()
    """[reclaimedQoSRootfsOveruseThreshold] the same of reclaimed pods."""
    shared_namespaces: tuple[str, ...] = ("default",)
    """[sharedQoSNamespaceFilter] only shared pods of these."""
    count: Annotated[int, Meta(ge=1, le=100)] = 1
    """[rootfsOveruseEvictionCount] victims put forward in a round."""
    grace_s: Grace | None = None
    """[gracePeriod] of its victims; the pod's own unless set."""


class NetworkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """network-eviction-plugin: a network card has no bandwidth left to give."""

    tolerance_s: Seconds = 300.0
    """[nicUnhealthyToleranceDuration] for so long."""
    grace_s: Grace | None = None
    """[gracePeriod] of its victims; the pod's own unless set."""


class KoordinatorMemoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """koordinator-memory-evict: Koordinator's MemoryEvict. Names in brackets are its own."""

    threshold: Ratio = 0.7
    """[memoryEvictThresholdPercent] memory in use over the node's."""
    lower: Ratio | None = None
    """[memoryEvictLowerPercent] down to this; 0.02 below the threshold unless set."""
    reclaimed_only: bool = True
    """[MemoryEvict of BE pods, or of all by priority] False lets any pod leave, lowest priority first."""
    cool_down_s: Seconds = 4.0
    """[memoryEvictCoolTimeSeconds] between two rounds of victims."""
    grace_s: Grace | None = None
    """Of its victims; the pod's own unless set."""

    def __post_init__(self) -> None:
        """Raise ValueError for what no single field's bounds can say."""
        ascending("lower", self.lower, "threshold", self.threshold)


class OomdConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """oomd-pressure: reclaimed pods leave before the kernel's OOM killer has to. Names in brackets are oomd's."""

    full_avg10: Rate = 60.0
    """[pressure_above threshold] part of the last 10 s in which all tasks stalled for memory, in per cent,"""
    duration_s: Seconds = 30.0
    """[duration] for so long."""
    swap_free_ratio: Share = 0.1
    """[swap_free threshold_pct] less free swap than this."""
    cool_down_s: Seconds = 15.0
    """[post_action_delay] between two victims."""
    grace_s: Grace | None = 1.0
    """Of its victims."""

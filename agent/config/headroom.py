"""Settings of what is promised to reclaimed pods: how it is found, and how it is reported. Names in brackets are Katalyst's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from agent.config.units import Cores, Seconds

GIB = 1 << 30
MIB = 1 << 20
_SMALL_NODE_SHARE = 4
_SMALL_NODE_CPUS = 16
"""Katalyst's amounts are meant for large nodes; where nothing is configured a node below this gets shares of itself."""

Mebibytes = Annotated[int, Meta(ge=0, le=1 << 40)]
RegionPolicy = Literal["none", "canonical", "numa-dedicated", "numa-exclusive"]
Folder = Annotated[str, Meta(pattern=r"^(/[^\0]*)?$", max_length=80)]
"""Short: the path of a socket has at most 107 bytes."""
Percent = Annotated[float, Meta(ge=0, le=100)]


class UtilConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """[cpuHeadroomConfig.utilBasedConfig] promise more while reclaimed pods use little of what they have."""

    enable: bool = False
    """[enable] Whether it is done at all."""
    target: Annotated[float, Meta(ge=0, le=1)] = 0.6
    """[targetReclaimedCoreUtilization] below it more is promised than there is,"""
    maximum: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """[maxReclaimedCoreUtilization] above it less than was promised; 0 never takes back for that."""
    max_oversold_rate: Annotated[float, Meta(gt=0, le=100)] = 1.2
    """[maxOversoldRate] at most so many times what there is."""
    max_capacity_rate: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """[maxHeadroomCapacityRate] at most this share of the CPUs of the NUMA nodes."""

    def __post_init__(self) -> None:
        """Raise ValueError for what no single field's bounds can say."""
        if 0 < self.maximum < self.target:
            raise ValueError(
                f"maximum {self.maximum:g} is below target {self.target:g}: more and less would be promised at once; "
                "raise it, or set 0"
            )


class KoordinatorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Koordinator's colocation strategy; names in brackets are its own."""

    cpu_policy: Literal["usage", "maxUsageRequest"] = "usage"
    """[cpuCalculatePolicy] what online pods use is taken off the capacity, or what they requested where that is more."""
    memory_policy: Literal["usage", "request", "maxUsageRequest"] = "usage"
    """[memoryCalculatePolicy] the same of memory; `request` takes off requests alone."""
    cpu_reclaim_threshold_percent: Percent = 60.0
    """[cpuReclaimThresholdPercent] the rest of the capacity is kept as a margin."""
    memory_reclaim_threshold_percent: Percent = 65.0
    """[memoryReclaimThresholdPercent] the same of memory."""
    batch_cpu_threshold_percent: Percent | None = None
    """[batchCPUThresholdPercent] batch is at most this share of the capacity; unset is no bound."""
    batch_memory_threshold_percent: Percent | None = None
    """[batchMemoryThresholdPercent] the same of memory."""
    mid_cpu_threshold_percent: Percent = 100.0
    """[midCPUThresholdPercent] mid is at most this share of the capacity."""
    mid_memory_threshold_percent: Percent = 100.0
    """[midMemoryThresholdPercent] the same of memory."""
    mid_unallocated_percent: Percent = 0.0
    """[midUnallocatedPercent] this share of what nobody requested is mid too."""
    mid_static_cpu_percent: Percent | None = None
    """[midStaticCPUReservedPercent] mid is this share of the capacity, whatever is used; unset goes by use."""
    mid_static_memory_percent: Percent | None = None
    """[midStaticMemoryReservedPercent] the same of memory."""


class HeadroomConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """How the amount that can be promised is found."""

    policy: Literal["common", "estimate", "forecast", "koordinator-batch", "koordinator-mid"] | None = None
    """`common` is Katalyst's assembler on the reclaim pool; `estimate` is what the need of online pods leaves of the node;
    `forecast` is what the foretold peak of their use leaves, of memory too (see `forecast`), for a day never more than those;
    the others are Koordinator's sums. Unless set, `common` for the policy `canonical` and `estimate` for `latency`."""
    share_region: RegionPolicy = "canonical"
    """What a pool of shared_cores is shown to leave."""
    isolation_region: RegionPolicy = "canonical"
    """The same of pods that are kept apart,"""
    dedicated_region: RegionPolicy = "canonical"
    """and of dedicated ones."""
    whole_cores: bool | None = None
    """`common` rounds as Katalyst does: up on bound NUMA nodes, down on the others. Unless set, on nodes of 16 CPUs and
    more."""
    util: UtilConfig = UtilConfig()
    koordinator: KoordinatorConfig = KoordinatorConfig()

    def rounds(self, cpus: int) -> bool:
        """Whether a node of so many CPUs is promised in whole cores."""
        return cpus >= _SMALL_NODE_CPUS if self.whole_cores is None else self.whole_cores


class ReportConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """How what was found becomes what is advertised."""

    period_s: Seconds = 30.0
    """[headroom reporter's sync period] a sample is taken, and what is advertised may change, this often."""
    window_s: Seconds = 120.0
    """Samples of so long are averaged; they count for twice as long where some are missing."""
    reserved_cores: Cores = 0.0
    """[reservedResourceForReport.cpu] kept back of what was found."""
    reserved_memory_mib: Mebibytes = 0
    """[reservedResourceForReport.memory] the same of memory."""
    min_cores: Cores | None = None
    """[minReclaimedResourceForReport.cpu] advertised at least; 4 unless set, a quarter of nodes below 16 CPUs."""
    min_memory_mib: Mebibytes | None = None
    """[minReclaimedResourceForReport.memory] 5 GiB unless set, a quarter of nodes below 20 GiB."""
    ignored_cores: Cores = 0.1
    """[minIgnoredReclaimedResourceForReport.cpu] a NUMA node with no more than this is advertised with nothing at all."""
    ignored_memory_mib: Mebibytes = 100
    """[minIgnoredReclaimedResourceForReport.memory] the same of memory."""
    min_step_cores: Cores = 0.3
    """Smaller changes are not advertised,"""
    max_step_cores: Annotated[float, Meta(gt=0, le=8192)] = 4.0
    """and larger ones in steps of this, one a period."""
    min_step_memory_mib: Mebibytes = 300
    """The same of memory,"""
    max_step_memory_mib: Annotated[int, Meta(gt=0, le=1 << 40)] = 5120
    """and of its steps."""
    fresh_s: Annotated[float, Meta(ge=0, le=86400)] = 180.0
    """While nothing new is known, what was advertised stands for so long,"""
    expired_s: Annotated[float, Meta(gt=0, le=86400)] = 900.0
    """and then goes down to the minimum, step by step, until so long after the last that was known."""
    extended_resources: bool = False
    """With `--node`: what is advertised is written into the Node's capacity too, so that a stock scheduler places reclaimed
    pods."""
    node_metrics: bool = False
    """[node-metrics-reporter] With `--node`: CustomNodeResource says what the node and its pods use, too, once a minute."""
    cpu_flags: bool = False
    """[enable-report-cpu-flags] With `--node`: it lists every flag of the CPU, which are some kilobytes."""
    reporter_plugins: Folder = ""
    """[plugin-registration-dirs] With `--node`: where reporter plugins are looked for, as `/var/lib/katalyst/plugin-socks`;
    what they say is merged into the CustomNodeResource. gRPC, which this needs, is 12 MiB; so for the next two."""
    offered_in: Folder = ""
    """With `--node`, beside a Katalyst agent: where that one looks for plugins. It is given what this agent lends, and writes
    the CustomNodeResource itself."""
    pod_resources: Folder | None = None
    """[pod-resources-server-endpoints] The socket where devices, huge pages and CPUs of single containers are learnt for the
    CustomNodeResource; unless set, with `--kubelet`, the kubelet's if it is there. Empty for none."""
    device_zones: Mapping[str, str] = {}
    """[resource-name-to-zone-type-map] Resources whose devices are each a topology zone, with the type of that, such as
    `nvidia.com/gpu: GPU`; others are counted with their NUMA node."""

    def __post_init__(self) -> None:
        """Raise ValueError for what no single field's bounds can say."""
        if self.window_s < self.period_s:
            raise ValueError(
                f"windowS {self.window_s:g} is shorter than periodS {self.period_s:g}: no sample would be left; raise it"
            )
        if self.reporter_plugins and self.offered_in:
            raise ValueError(
                "reporterPlugins and offeredIn: who writes the object merges the plugins; leave one of them out"
            )
        if self.expired_s <= self.fresh_s:
            raise ValueError(f"expiredS {self.expired_s:g} must be longer than freshS {self.fresh_s:g}")
        for unit, smallest, largest in (
            ("Cores", self.min_step_cores, self.max_step_cores),
            ("MemoryMib", self.min_step_memory_mib, self.max_step_memory_mib),
        ):
            if largest < smallest:
                raise ValueError(
                    f"maxStep{unit} {largest:g} is below minStep{unit} {smallest:g}: no change would ever be advertised; "
                    "raise it"
                )

    def minimum_cores(self, cpus: float) -> float:
        """What is advertised at least on a node of so many CPUs."""
        if self.min_cores is not None:
            return min(self.min_cores, cpus)
        return min(4.0, cpus / _SMALL_NODE_SHARE)

    def minimum_memory_bytes(self, total: float) -> float:
        """The same of memory on a node that has so much."""
        if self.min_memory_mib is not None:
            return min(float(self.min_memory_mib * MIB), total)
        return min(5.0 * GIB, total / _SMALL_NODE_SHARE)

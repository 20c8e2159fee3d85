"""AdminQoSConfiguration, but for its evictionConfig: which of its fields is which setting, in which unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent.dynamic.rules import Put, Rule, Unused, to
from agent.dynamic.values import cores, mebibytes, ratio, size, whole_cores

_RECLAIM = "reclaimedResourceConfig"
_CPU, _MEMORY = f"{_RECLAIM}.cpuHeadroomConfig", f"{_RECLAIM}.memoryHeadroomConfig"
_ADVISOR = "advisorConfig.cpuAdvisorConfig"
_GUARD = "advisorConfig.memoryAdvisorConfig.memoryGuardConfig"
_BURST = "fineGrainedResourceConfig.cpuBurstConfig"
_API_ONLY = "Katalyst's own agent does not use it either"


def _indicators(regions: Sequence[Mapping[str, Any]]) -> Put:
    for region in regions:
        kind = region["regionType"]
        section = next((name for name in ("share", "dedicated") if kind == name or kind.startswith(f"{name}-")), None)
        if section is None:
            raise ValueError(
                f"regionType {kind!r:.60} is neither share nor dedicated, which are those with targets of their own"
            )
        for target in region["targets"]:
            yield ("advisor", "provision", "targets", section, target["name"]), target["target"]


def _burst(field: str, setting: str) -> Rule:
    def put(value: Any) -> Put:
        yield ("knobs", "burst", setting), value
        # Who says how it is by default wants Katalyst's rules; without them nothing would be done.
        yield ("knobs", "burst", "policy"), "katalyst"

    return Rule(f"{_BURST}.{field}", (f"knobs.burst.{setting}", "knobs.burst.policy"), put)


RULES: tuple[Rule, ...] = (
    to(f"{_RECLAIM}.enableReclaim", "advisor.enableReclaim"),
    to(f"{_RECLAIM}.disableReclaimSharePools", "advisor.provision.disableReclaimSharePools"),
    to(f"{_RECLAIM}.reservedResourceForReport.cpu", "report.reservedCores", unit=cores),
    to(f"{_RECLAIM}.reservedResourceForReport.memory", "report.reservedMemoryMib", unit=mebibytes),
    to(f"{_RECLAIM}.minReclaimedResourceForReport.cpu", "report.minCores", unit=cores),
    to(f"{_RECLAIM}.minReclaimedResourceForReport.memory", "report.minMemoryMib", unit=mebibytes),
    to(f"{_RECLAIM}.minIgnoredReclaimedResourceForReport.cpu", "report.ignoredCores", unit=cores),
    to(f"{_RECLAIM}.minIgnoredReclaimedResourceForReport.memory", "report.ignoredMemoryMib", unit=mebibytes),
    to(f"{_RECLAIM}.reservedResourceForAllocate.cpu", "advisor.reservedForAllocateCores", unit=cores),
    to(f"{_RECLAIM}.reservedResourceForAllocate.memory", "memory.reservedForAllocateBytes", unit=size),
    to(
        f"{_RECLAIM}.minReclaimedResourceForAllocate.cpu",
        "advisor.minReclaimedCores",
        "placing.minReclaimedCpus",
        unit=lambda value: max(whole_cores(value), 1),
    ),
    to(
        f"{_RECLAIM}.numaMinReclaimedResourceRatioForAllocate.cpu",
        "advisor.provision.numaMinReclaimedRatio",
        unit=ratio,
    ),
    to(
        f"{_RECLAIM}.numaMinReclaimedResourceForAllocate.cpu",
        "advisor.provision.numaMinReclaimedCores",
        unit=whole_cores,
    ),
    to(f"{_CPU}.utilBasedConfig.enable", "advisor.headroom.util.enable"),
    to(f"{_CPU}.utilBasedConfig.targetReclaimedCoreUtilization", "advisor.headroom.util.target"),
    to(f"{_CPU}.utilBasedConfig.maxReclaimedCoreUtilization", "advisor.headroom.util.maximum"),
    to(f"{_CPU}.utilBasedConfig.maxOversoldRate", "advisor.headroom.util.maxOversoldRate"),
    to(f"{_CPU}.utilBasedConfig.maxHeadroomCapacityRate", "advisor.headroom.util.maxCapacityRate"),
    to(f"{_MEMORY}.utilBasedConfig.enable", "memory.utilBased.enable"),
    to(f"{_MEMORY}.utilBasedConfig.freeBasedRatio", "memory.utilBased.freeBasedRatio"),
    to(f"{_MEMORY}.utilBasedConfig.staticBasedCapacity", "memory.utilBased.staticBasedCapacityBytes", unit=size),
    to(f"{_MEMORY}.utilBasedConfig.cacheBasedRatio", "memory.utilBased.cacheBasedRatio"),
    to(f"{_MEMORY}.utilBasedConfig.requestBasedRatio", "memory.utilBased.requestBasedRatio"),
    to(f"{_MEMORY}.utilBasedConfig.maxOversoldRate", "memory.utilBased.maxOversoldRate"),
    to(f"{_ADVISOR}.allowSharedCoresOverlapReclaimedCores", "advisor.provision.overlap"),
    Rule(
        f"{_ADVISOR}.cpuProvisionConfig.regionIndicators",
        ("advisor.provision.targets.share", "advisor.provision.targets.dedicated"),
        _indicators,
    ),
    to(f"{_GUARD}.enable", "memory.guard.enable"),
    to(f"{_GUARD}.criticalWatermarkScaleFactor", "memory.guard.criticalWatermarkScaleFactor"),
    _burst("enableDedicatedCoresDefaultCPUBurst", "dedicated"),
    _burst("enableSharedCoresDefaultCPUBurst", "shared"),
    to(f"{_BURST}.defaultCPUBurstPercent", "knobs.burst.percent"),
)

UNUSED: tuple[Unused, ...] = (
    Unused(
        f"{_RECLAIM}.minReclaimedResourceForAllocate.memory",
        "memory is not kept for reclaimed pods: it is what online pods leave",
    ),
    Unused(f"{_RECLAIM}.numaMinReclaimedResourceRatioForAllocate.memory", "the same of a NUMA node"),
    Unused(f"{_RECLAIM}.numaMinReclaimedResourceForAllocate.memory", "the same of a NUMA node"),
    Unused(f"{_CPU}.utilBasedConfig.nonReclaimUtilizationHigh", _API_ONLY),
    Unused(f"{_CPU}.utilBasedConfig.nonReclaimUtilizationLow", _API_ONLY),
    Unused(f"{_MEMORY}.podRequestLimitAwareConfig", _API_ONLY),
    Unused(
        "qrmPluginConfig.cpuPluginConfig.preferUseExistNUMAHintResult",
        "a pod keeps the NUMA node that its annotation says, always",
    ),
    Unused(
        "qrmPluginConfig.cpuPluginConfig",
        f"{_API_ONLY}; pools of system_cores are as large as their pods ask",
    ),
    Unused(f"{_ADVISOR}.cpuProvisionConfig.constraints", "rama and dynamic-quota keep to the bounds of their regions"),
    Unused("fineGrainedResourceConfig.cpuWeightConfig", f"{_API_ONLY}; weights follow requests"),
)

"""Katalyst's fields as settings: every kind, every unit, and hostile objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config.config import AgentConfig
from agent.dynamic_config.effective import setting_leaves
from agent.dynamic_config.mappings.field_mapping import setting_path
from agent.dynamic_config.merge import ConfigObject, resolve_config
from agent.dynamic_config.translate import CONFIG_KINDS, ConfigKind, DynamicConfigRefused, translate_object

ADMIN = CONFIG_KINDS["adminqosconfigurations"]
OFFLOADING = CONFIG_KINDS["transparentmemoryoffloadingconfigurations"]
STRATEGIES = CONFIG_KINDS["strategygroups"]
CPU = "evictionConfig.cpuPressureEvictionConfig"
MEMORY = "evictionConfig.memoryPressureEvictionConfig"
ROOTFS = "evictionConfig.rootfsPressureEvictionConfig"
RECLAIM = "reclaimedResourceConfig"


SLOTS = '[{"net": 0.9, "offset": 0.05}, {"net": 1.1, "offset": -0.1}]'


def nested(field: str, value: Any) -> Any:
    for name in reversed(field.split(".")):
        value = {name: value}
    return value


def translated(grammar: ConfigKind, config: Any) -> Mapping[str, Any]:
    body = nested(".".join(grammar.root), config)
    result = {".".join(setting): value for setting, (value, _) in translate_object(grammar, body).settings.items()}
    as_json: Mapping[str, Any] = msgspec.json.decode(msgspec.json.encode(result))
    return as_json


@pytest.mark.parametrize(
    ("field", "value", "settings"),
    [
        (f"{RECLAIM}.enableReclaim", False, {"advisor.enableReclaim": False}),
        (f"{RECLAIM}.disableReclaimSharePools", ["batch"], {"advisor.provision.disableReclaimSharePools": ["batch"]}),
        (
            f"{RECLAIM}.reservedResourceForReport",
            {"cpu": "2500m", "memory": "5Gi"},
            {"report.reservedCores": 2.5, "report.reservedMemoryMib": 5120},
        ),
        # 1 GB is 953.67 MiB: what is reserved is rounded up.
        (
            f"{RECLAIM}.minReclaimedResourceForReport",
            {"cpu": 4, "memory": "1G"},
            {"report.minCores": 4.0, "report.minMemoryMib": 954},
        ),
        (
            f"{RECLAIM}.minIgnoredReclaimedResourceForReport",
            {"cpu": "100m", "memory": "100Mi"},
            {"report.ignoredCores": 0.1, "report.ignoredMemoryMib": 100},
        ),
        (
            f"{RECLAIM}.reservedResourceForAllocate",
            {"cpu": "4", "memory": "5Gi"},
            {"advisor.reservedForAllocateCores": 4.0, "memory.reservedForAllocateBytes": 5 << 30},
        ),
        (
            f"{RECLAIM}.minReclaimedResourceForAllocate.cpu",
            "3500m",
            {"advisor.minReclaimedCores": 4, "placing.minReclaimedCpus": 4},
        ),
        (
            f"{RECLAIM}.minReclaimedResourceForAllocate.cpu",
            "0",
            {"advisor.minReclaimedCores": 1, "placing.minReclaimedCpus": 1},
        ),
        (
            f"{RECLAIM}.numaMinReclaimedResourceRatioForAllocate.cpu",
            "250m",
            {"advisor.provision.numaMinReclaimedRatio": 0.25},
        ),
        (f"{RECLAIM}.numaMinReclaimedResourceForAllocate.cpu", "1500m", {"advisor.provision.numaMinReclaimedCores": 2}),
        (
            f"{RECLAIM}.cpuHeadroomConfig.utilBasedConfig",
            {
                "enable": True,
                "targetReclaimedCoreUtilization": 0.7,
                "maxReclaimedCoreUtilization": 0.9,
                "maxOversoldRate": 1.5,
                "maxHeadroomCapacityRate": 0.8,
            },
            {
                "advisor.headroom.util.enable": True,
                "advisor.headroom.util.target": 0.7,
                "advisor.headroom.util.maximum": 0.9,
                "advisor.headroom.util.maxOversoldRate": 1.5,
                "advisor.headroom.util.maxCapacityRate": 0.8,
            },
        ),
        (
            f"{RECLAIM}.memoryHeadroomConfig.utilBasedConfig",
            {
                "enable": True,
                "freeBasedRatio": 0.5,
                "staticBasedCapacity": 2e10,
                "cacheBasedRatio": 0.1,
                "maxOversoldRate": 1,
                "requestBasedRatio": 0.2,
            },
            {
                "memory.utilBased.enable": True,
                "memory.utilBased.freeBasedRatio": 0.5,
                "memory.utilBased.staticBasedCapacityBytes": 20_000_000_000,
                "memory.utilBased.cacheBasedRatio": 0.1,
                "memory.utilBased.maxOversoldRate": 1.0,
                "memory.utilBased.requestBasedRatio": 0.2,
            },
        ),
        (
            "advisorConfig.cpuAdvisorConfig",
            {
                "allowSharedCoresOverlapReclaimedCores": True,
                "cpuProvisionConfig": {
                    "regionIndicators": [
                        {"regionType": "share", "targets": [{"name": "cpu_sched_wait", "target": 300}]},
                        {"regionType": "dedicated-numa-exclusive", "targets": [{"name": "cpi", "target": 1.2}]},
                    ]
                },
            },
            {
                "advisor.provision.overlap": True,
                "advisor.provision.targets.share.cpu_sched_wait": 300.0,
                "advisor.provision.targets.dedicated.cpi": 1.2,
            },
        ),
        (
            "advisorConfig.memoryAdvisorConfig.memoryGuardConfig",
            {"enable": False, "criticalWatermarkScaleFactor": 1.5},
            {"memory.guard.enable": False, "memory.guard.criticalWatermarkScaleFactor": 1.5},
        ),
        (
            "fineGrainedResourceConfig.cpuBurstConfig",
            {"enableSharedCoresDefaultCPUBurst": False, "defaultCPUBurstPercent": 50},
            {"knobs.burst.shared": False, "knobs.burst.policy": "katalyst", "knobs.burst.percent": 50},
        ),
        ("fineGrainedResourceConfig.cpuBurstConfig", {"defaultCPUBurstPercent": 50}, {"knobs.burst.percent": 50}),
        (
            "evictionConfig.dryRun",
            ["*", "rss-overuse-eviction-plugin", "somebody-else"],
            {"eviction.dryRun": ["*", "rss-overuse-eviction-plugin", "somebody-else"]},
        ),
        (
            CPU,
            {
                "enableLoadEviction": True,
                "loadUpperBoundRatio": 1.6,
                "loadEvictionCoolDownTime": "5m30s",
                "gracePeriod": 0,
            },
            {
                "eviction.plugins.cpu-pressure-load-plugin": True,
                "eviction.load.upperBoundRatio": 1.6,
                "eviction.load.coolDownS": 330.0,
                "eviction.load.graceS": 0.0,
                "eviction.suppression.graceS": 0.0,
            },
        ),
        (
            CPU,
            {
                "enableSuppressionEviction": False,
                "maxSuppressionToleranceRate": 3,
                "minSuppressionToleranceDuration": "90s",
            },
            {
                "eviction.plugins.cpu-pressure-suppression-plugin": False,
                "eviction.suppression.maxToleranceRate": 3.0,
                "eviction.suppression.minToleranceS": 90.0,
            },
        ),
        (
            f"{CPU}.numaSysCPUPressureEvictionConfig",
            {
                "gracePeriod": -1,
                "syncPeriod": 20,
                "numaCPUUsageHardThreshold": 0.6,
                "numaSysOverTotalUsageEvictionThreshold": 0.2,
            },
            {
                "eviction.numaSys.graceS": None,
                "eviction.numaSys.sampleS": 20,
                "eviction.numaSys.usageHard": 0.6,
                "eviction.numaSys.victimSystem": 0.2,
            },
        ),
        (
            MEMORY,
            {
                "enableNumaLevelEviction": False,
                "numaFreeBelowWatermarkTimesThreshold": 20,
                "numaFreeBelowWatermarkTimesReclaimedThreshold": 10,
                "systemFreeMemoryThresholdMinimum": "8Gi",
                "systemKswapdRateThreshold": 3000,
                "systemKswapdRateExceedDurationThreshold": 60,
                "reclaimedGracePeriod": 5,
            },
            {
                "eviction.plugins.numa-memory-pressure-eviction-plugin": False,
                "eviction.numaMemory.anyRounds": 20,
                "eviction.numaMemory.reclaimedRounds": 10,
                "eviction.systemMemory.freeMinimumBytes": 8 << 30,
                "eviction.systemMemory.kswapdPagesPerS": 3000,
                "eviction.systemMemory.kswapdS": 60,
                "eviction.numaMemory.reclaimedGraceS": 5.0,
            },
        ),
        (
            ROOTFS,
            {
                "minimumImageFsFreeThreshold": "10%",
                "podMinimumUsedThreshold": "20Gi",
                "minimumImageFsInodesFreeThreshold": "1000",
                "minimumImageFsDiskCapacityThreshold": "10Gi",
            },
            {
                "eviction.rootfsPressure.minimumFree": {"ratio": 0.1},
                "eviction.rootfsPressure.podMinimum": {"number": 20 << 30},
                "eviction.rootfsPressure.minimumFreeInodes": {"number": 1000},
                "eviction.rootfsPressure.minimumCapacityBytes": 10 << 30,
            },
        ),
        (f"{ROOTFS}.sharedQoSRootfsOveruseThreshold", "", {"eviction.rootfsOveruse.shared": {}}),
        (
            "evictionConfig.reclaimedResourcesEvictionConfig",
            {
                "evictionThreshold": {"resource.katalyst.kubewharf.io/reclaimed_millicpu": 4, "memory": 3, "gpu": 1},
                "thresholdMetToleranceDuration": 30,
            },
            {
                "eviction.reclaimed.cpuThreshold": 4.0,
                "eviction.reclaimed.memoryThreshold": 3.0,
                "eviction.reclaimed.toleranceS": 30,
            },
        ),
        (
            "evictionConfig.networkEvictionConfig",
            {"enableNICNetworkEviction": True, "nicUnhealthyToleranceDuration": "10m"},
            {"eviction.plugins.network-eviction-plugin": True, "eviction.network.toleranceS": 600.0},
        ),
    ],
)  # fmt: skip
def test_admin_qos(field: str, value: Any, settings: Mapping[str, Any]) -> None:
    assert translated(ADMIN, nested(field, value)) == settings


def test_offloading_has_a_layer_for_each_that_it_names() -> None:
    detail = {
        "enableTMO": True,
        "enableSwap": True,
        "interval": "1m",
        "policyName": "Refault",
        "maxReclaimSize": "128Mi",
        "reservedInactiveFile": 4096,
        "psiPolicy": {"maxProbe": 0.02, "psiAvg60Threshold": 0.5},
        "refaultPolicy": {"maxProbe": 0.03, "reclaimAccuracyTarget": 0.9, "reclaimScanEfficiencyTarget": 0.5},
    }
    result = translated(
        OFFLOADING,
        {
            "qosLevelConfig": [{"qosLevel": "shared_cores", "configDetail": detail}],
            "poolNameConfig": [{"poolName": "batch", "configDetail": {"enableTMO": False}}],
            "CgroupConfig": [
                {"cgroupPath": "/sys/fs/cgroup/memory/hdfs.slice/", "configDetail": {"policyName": "PSI"}}
            ],
            "blockConfig": {
                "labels": [{"key": "app", "operator": "In", "values": ["db"]}],
                "annotations": [{"key": "x/y", "operator": "Exists"}],
            },
        },
    )
    level = "memory.offloading.levels.shared_cores"
    assert result == {
        f"{level}.enable": True,
        f"{level}.enableSwap": True,
        f"{level}.intervalS": 60.0,
        f"{level}.policy": "refault",
        f"{level}.maxReclaimBytes": 128 << 20,
        f"{level}.reservedInactiveFileBytes": 4096,
        f"{level}.psiMaxProbe": 0.02,
        f"{level}.psiAvg60Threshold": 0.5,
        f"{level}.refaultMaxProbe": 0.03,
        f"{level}.reclaimAccuracyTarget": 0.9,
        f"{level}.reclaimScanEfficiencyTarget": 0.5,
        "memory.offloading.pools.batch.enable": False,
        "memory.offloading.cgroups./hdfs.slice.policy": "psi",
        "memory.offloading.block.labels.app": ["db"],
        "memory.offloading.block.annotations.x/y": [],
    }


def test_strategies_are_in_the_status() -> None:
    enabled = [
        {"name": "borwein_v2", "parameters": {"strategy_slots": SLOTS}},
        {"name": "numa_cpu_pressure_eviction"},
        {"name": "metric_threshold"},
        {"name": "balance_sched_v1"},
    ]
    body = {"spec": {"paused": False}, "status": {"currentHash": "abc", "enabledStrategies": enabled}}
    result = translate_object(STRATEGIES, body)
    assert {".".join(name): value for name, (value, _) in result.settings.items()} == {
        "inference.strategy": "borwein_v2",
        "inference.slots": [{"below": 0.9, "offset": 0.05}, {"below": 1.1, "offset": -0.1}],
        "eviction.plugins.numa-cpu-pressure-plugin": True,
        "advisor.provision.targets.getter": "metric-threshold",
    }
    assert [line.partition(": is not one of")[0] for line in result.unused] == ["enabledStrategies: balance_sched_v1"]


@pytest.mark.parametrize(
    ("resource", "config", "settings", "unused"),
    [
        ("powermanagementconfigurations", {"disablePowerAdvisor": True}, {"power.enable": False}, 0),
        ("powermanagementconfigurations", {"disablePowerCapping": True}, {"power.capping": False}, 0),
        ("powermanagementconfigurations", {"disablePowerAdvisor": False, "powerReductionRatio": 10}, {}, 1),
        ("authconfigurations", {"basicAuthConfig": {"userPasswordPairs": [{"username": "a", "password": "b"}]}}, {}, 1),
        ("irqtuningconfigurations", {"enableTuner": True}, {}, 1),
        ("memorybandwidthconfigurations", {"ccdMinMB": 4000}, {}, 1),
        ("irqtuningconfigurations", {}, {}, 1),
    ],
)
def test_kinds_with_little_or_no_effect_are_reported(
    resource: str, config: Any, settings: Mapping[str, Any], unused: int
) -> None:
    assert translated(CONFIG_KINDS[resource], config) == settings
    result = translate_object(CONFIG_KINDS[resource], {"spec": {"config": config}}).unused
    assert len(result) == unused
    assert not any(word == "b" for line in result for word in line.split()), "a password must not be shown"


@pytest.mark.parametrize(
    ("grammar", "config", "message"),
    [
        (ADMIN, {RECLAIM: {"enableReclaim": "yes"}}, f"spec.config.{RECLAIM}.enableReclaim: Expected `bool"),
        (ADMIN, [], "spec.config: Expected `object`, got `array`"),
        (
            ADMIN,
            nested(f"{CPU}.loadUpperBoundRatio", 0.5),
            f"spec.config.{CPU}.loadUpperBoundRatio: Expected `float` >= 1.0",
        ),
        (
            ADMIN,
            nested(f"{CPU}.loadEvictionCoolDownTime", "soon"),
            f"spec.config.{CPU}.loadEvictionCoolDownTime: 'soon' is no duration such as 90s",
        ),
        (
            ADMIN,
            nested(f"{RECLAIM}.reservedResourceForReport.cpu", "-1"),
            f"spec.config.{RECLAIM}.reservedResourceForReport.cpu: '-1' is not a quantity",
        ),
        (
            ADMIN,
            nested(
                "advisorConfig.cpuAdvisorConfig.cpuProvisionConfig.regionIndicators",
                [{"regionType": "isolation", "targets": []}],
            ),
            "regionIndicators: regionType 'isolation' is neither share nor dedicated",
        ),
        (
            OFFLOADING,
            {"blockConfig": {"labels": [{"key": "a", "operator": "NotIn", "values": ["b"]}]}},
            "spec.config.blockConfig.labels: 'a' with operator 'NotIn' and 1 values",
        ),
        (
            OFFLOADING,
            {
                "CgroupConfig": [
                    {"cgroupPath": "/sys/fs/cgroup", "configDetail": {}},
                    {"cgroupPath": "x", "configDetail": {"enableTMO": True}},
                ]
            },
            "spec.config.CgroupConfig: 'x' is not a cgroup path",
        ),
        (
            OFFLOADING,
            {"poolNameConfig": [{"poolName": "a", "configDetail": {"policyName": "Senpai"}}]},
            "spec.config.poolNameConfig: policyName 'Senpai' is none of PSI, Refault and Integrated",
        ),
        (
            STRATEGIES,
            {"enabledStrategies": [{"name": "borwein_v3", "parameters": {"strategy_slots": "[1]"}}]},
            "status.enabledStrategies: strategy_slots is not a JSON list of objects with net, offset",
        ),
        (
            ADMIN,
            nested(f"{RECLAIM}.disableReclaimSharePools", ["a", "x" * 4097]),
            f"spec.config.{RECLAIM}.disableReclaimSharePools[1]: has 4097 characters, more than 4096",
        ),
        (
            OFFLOADING,
            {
                "poolNameConfig": [
                    {"poolName": "a", "configDetail": {}},
                    {"poolName": "b", "configDetail": {"psiPolicy": "1"}},
                ]
            },
            "spec.config.poolNameConfig[1].configDetail.psiPolicy: Expected `object | null`, got `str`",
        ),
        (ADMIN, {"unknown": {"of": [0] * 4097}}, "spec.config.unknown.of: has 4097 entries"),
        (ADMIN, {str(number): 0 for number in range(4097)}, "spec.config: has 4097 entries"),
        (
            ADMIN,
            {"unknown": [{str(number): 0 for number in range(99)}] * 83},
            "spec.config: has more than 8192 entries in its lists and maps",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(grammar: ConfigKind, config: Any, message: str) -> None:
    with pytest.raises(DynamicConfigRefused) as caught:
        translated(grammar, config)
    assert message in str(caught.value)


def fields_of(kind: Any, above: str = "") -> Iterator[str]:
    """Every field that is no object of its own."""
    for field in msgspec.structs.fields(kind):
        below = f"{above}.{field.encode_name}".lstrip(".")
        struct = next(
            (part for part in (field.type, *get_args(field.type)) if hasattr(part, "__struct_fields__")), None
        )
        if struct is None:
            yield below
        else:
            yield from fields_of(struct, below)


@pytest.mark.parametrize("grammar", CONFIG_KINDS.values(), ids=lambda each: each.kind)
def test_every_field_is_a_setting_or_has_a_reason(grammar: ConfigKind) -> None:
    if grammar.all_unused or grammar is STRATEGIES:
        return
    previous = {rule.field for rule in grammar.rules} | {each.field for each in grammar.unused}
    below = {name.rpartition(".")[0] for name in previous if name.rpartition(".")[2] in ("cpu", "memory")}
    for field in fields_of(grammar.type):
        covered = field in previous | below or any(field.startswith(f"{name}.") for name in previous)
        assert covered, f"{grammar.kind}: {field} is neither in the rules nor among the unused"


def test_every_rule_is_about_a_setting_that_there_is() -> None:
    settings = {".".join(name) for name, _ in setting_leaves(AgentConfig())}
    for grammar in CONFIG_KINDS.values():
        for rule in grammar.rules:
            for name in rule.settings:
                below = any(
                    each == name or each.startswith(f"{name}.") or name.startswith(f"{each}.") for each in settings
                )
                assert below, f"{rule.field} sets {name}, which is no setting"


def test_a_misspelled_field_is_reported_and_the_rest_applied() -> None:
    result = translate_object(
        ADMIN, {"spec": {"config": {RECLAIM: {"enableReclaim": True, "enableReclame": False}, "extra": 1}}}
    )
    assert len(result.settings) == 1
    assert result.unused == (
        f"{RECLAIM}.enableReclame: is not a known field",
        "extra: is not a known field",
    )


def test_nothing_said_is_nothing_set() -> None:
    for grammar in CONFIG_KINDS.values():
        assert translate_object(grammar, {}).settings == {}
        assert translated(grammar, None) == {}


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["10%", "1Gi", "9E", "1e99", "-1", "5m"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@given(st.data())
def test_a_hostile_object_is_rejected_or_applied_and_raises_nothing_else(data: st.DataObject) -> None:
    resource = data.draw(st.sampled_from(sorted(CONFIG_KINDS)))
    grammar = CONFIG_KINDS[resource]
    field = data.draw(st.sampled_from(sorted({*fields_of(grammar.type), *(rule.field for rule in grammar.rules)})))
    body = nested(".".join((*grammar.root, field)), data.draw(ANYTHING))
    expected = ConfigObject(resource=resource, key="a/b", hash="h", since_wall_ns=1, body=body)
    result = resolve_config(AgentConfig(), {}, {resource: expected}, lambda _: "")
    assert (resource in result.applied) != (resource in result.problems)
    if resource in result.problems:
        assert result.config == AgentConfig()
        assert ".".join(grammar.root) in result.problems[resource] or "with the settings" in result.problems[resource]
        assert len(result.problems[resource]) < 1500
    for setting in result.origins:
        assert setting_path(".".join(setting))

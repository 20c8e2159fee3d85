"""The definitions in deploy/crds: fresh, of Katalyst's names, and such as an API server serves."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from api.katalyst.crd_schema import crd_manifest
from api.katalyst.kinds import CONFIG_COLUMNS, KATALYST_KINDS, KatalystKind
from deploy import build
from tests.api.katalyst.structural import INT_OR_STRING, OPEN, Node, faults, nodes, problems

DOCS = build.collect_field_docs()
CRDS = {kind.kind: crd_manifest(kind, DOCS) for kind in KATALYST_KINDS}
SCHEMAS: dict[tuple[str, str], Node] = {
    (name, version["name"]): version["schema"]["openAPIV3Schema"]
    for name, crd in CRDS.items()
    for version in crd["spec"]["versions"]
}
K = "katalyst.kubewharf.io"


def by_kind(kind: KatalystKind) -> str:
    return kind.kind


@pytest.mark.parametrize("kind", build.DEFINED_KINDS, ids=by_kind)
def test_the_committed_definition_is_the_one_that_the_types_make(kind: KatalystKind) -> None:
    assert build.crd_path(kind).read_text() == build.crd_text(kind, DOCS), "run: python -m deploy.build"


def test_there_is_a_file_for_every_kind_and_no_other() -> None:
    assert sorted((build.DEPLOY_DIR / "crds").iterdir()) == sorted(build.crd_path(kind) for kind in build.DEFINED_KINDS)


@pytest.mark.parametrize("kind", KATALYST_KINDS, ids=by_kind)
def test_yaml_reads_as_what_was_written(kind: KatalystKind) -> None:
    """Words that YAML takes for something else, such as Off, are still words."""
    assert msgspec.yaml.decode(build.crd_path(kind).read_text()) == CRDS[kind.kind]


@pytest.mark.parametrize(
    ("kind", "name", "short", "scope", "versions"),
    [
        ("CustomNodeResource", f"customnoderesources.node.{K}", "kcnr", "Cluster", ["v1alpha1"]),
        ("NodeProfileDescriptor", f"nodeprofiledescriptors.node.{K}", "npd", "Cluster", ["v1alpha1"]),
        ("KatalystCustomConfig", f"katalystcustomconfigs.config.{K}", "kcc", "Namespaced", ["v1alpha1"]),
        ("CustomNodeConfig", f"customnodeconfigs.config.{K}", "cnc", "Cluster", ["v1alpha1"]),
        ("AdminQoSConfiguration", f"adminqosconfigurations.config.{K}", "aqc", "Namespaced", ["v1alpha1"]),
        ("AuthConfiguration", f"authconfigurations.config.{K}", "ac", "Namespaced", ["v1alpha1"]),
        ("IRQTuningConfiguration", f"irqtuningconfigurations.config.{K}", "irqtc", "Namespaced", ["v1alpha1"]),
        (
            "TransparentMemoryOffloadingConfiguration",
            f"transparentmemoryoffloadingconfigurations.config.{K}",
            "tmo",
            "Namespaced",
            ["v1alpha1"],
        ),
        (
            "MemoryBandwidthConfiguration",
            f"memorybandwidthconfigurations.config.{K}",
            "mbc",
            "Namespaced",
            ["v1alpha1"],
        ),
        (
            "PowerManagementConfiguration",
            f"powermanagementconfigurations.config.{K}",
            "pmc",
            "Namespaced",
            ["v1alpha1"],
        ),
        ("StrategyGroup", f"strategygroups.config.{K}", "sg", "Cluster", ["v1alpha1"]),
        ("StrategyGroupConfiguration", f"strategygroupconfigurations.config.{K}", "sgc", "Cluster", ["v1alpha1"]),
        ("ServiceProfileDescriptor", f"serviceprofiledescriptors.workload.{K}", "spd", "Namespaced", ["v1alpha1"]),
        (
            "KatalystVerticalPodAutoscaler",
            f"katalystverticalpodautoscalers.autoscaling.{K}",
            "kvpa",
            "Namespaced",
            ["v1alpha1", "v1alpha2"],
        ),
        (
            "VerticalPodAutoscalerRecommendation",
            f"verticalpodautoscalerrecommendations.autoscaling.{K}",
            "vparec",
            "Namespaced",
            ["v1alpha1"],
        ),
        (
            "IntelligentHorizontalPodAutoscaler",
            f"intelligenthorizontalpodautoscalers.autoscaling.{K}",
            "ihpa",
            "Namespaced",
            ["v1alpha2"],
        ),
        ("VirtualWorkload", f"virtualworkloads.autoscaling.{K}", "", "Namespaced", ["v1alpha2"]),
        ("ResourceRecommend", f"resourcerecommends.recommendation.{K}", "rec", "Namespaced", ["v1alpha1"]),
        ("NodeOvercommitConfig", f"nodeovercommitconfigs.overcommit.{K}", "noc", "Cluster", ["v1alpha1"]),
        ("TideNodePool", f"tidenodepools.tide.{K}", "tnp", "Cluster", ["v1alpha1"]),
    ],
)
def test_names_are_katalysts(kind: str, name: str, short: str, scope: str, versions: list[str]) -> None:
    crd = CRDS[kind]
    assert crd["metadata"]["name"] == name
    assert crd["spec"]["group"] == name.partition(".")[2]
    assert crd["spec"]["scope"] == scope
    names = crd["spec"]["names"]
    assert names["kind"] == kind
    assert names["listKind"] == f"{kind}List"
    assert names["plural"] == name.partition(".")[0]
    assert names["singular"] == kind.lower()
    assert names.get("shortNames", [""]) == [short]
    assert [version["name"] for version in crd["spec"]["versions"]] == versions
    assert [version["storage"] for version in crd["spec"]["versions"]] == [*[False] * (len(versions) - 1), True]
    assert all(version["served"] for version in crd["spec"]["versions"])


def test_there_are_twenty_kinds_whose_names_do_not_collide() -> None:
    assert len(KATALYST_KINDS) == len(CRDS) == 20
    shorts = [kind.short_name for kind in KATALYST_KINDS if kind.short_name]
    assert len(shorts) == len(set(shorts)) == 19


@pytest.mark.parametrize("kind", KATALYST_KINDS, ids=by_kind)
def test_every_version_has_a_status_and_columns_of_what_it_has(kind: KatalystKind) -> None:
    handed_out = kind.group == f"config.{K}" and kind.kind not in ("KatalystCustomConfig", "CustomNodeConfig")
    for version in CRDS[kind.kind]["spec"]["versions"]:
        assert version["subresources"]["status"] == {}
        columns = version.get("additionalPrinterColumns", [])
        assert (len(columns) == len(CONFIG_COLUMNS) == 13) == handed_out
        for column in columns:
            assert column["type"] in ("integer", "number", "string", "boolean", "date")
            path = re.split(r"(?<!\\)\.", column["jsonPath"].partition("[")[0])[1:]
            schema = version["schema"]["openAPIV3Schema"]
            # A key of a map is named in the path, and not in the schema.
            key_of_map = (_at(schema, path[:-1]) or {}).get("additionalProperties")
            assert path[0] == "metadata" or _at(schema, path) or key_of_map, column


def test_a_custom_node_resource_shows_capacity_and_reclaimable_resources() -> None:
    (version,) = CRDS["CustomNodeResource"]["spec"]["versions"]
    columns = {column["name"]: column["jsonPath"] for column in version["additionalPrinterColumns"]}
    assert list(columns) == ["CPU", "MEMORY", "RECLAIMED-MILLICPU", "RECLAIMED-MEMORY", "AGE"]
    assert columns["RECLAIMED-MILLICPU"] == (
        r".status.resources.allocatable.resource\.katalyst\.kubewharf\.io/reclaimed_millicpu"
    )


def test_virtual_workloads_alone_can_be_scaled() -> None:
    scaled = {
        name: version["subresources"].pop("scale")
        for name, crd in CRDS.items()
        for version in crd["spec"]["versions"]
        if "scale" in version["subresources"]
    }
    assert scaled == {
        "VirtualWorkload": {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        }
    }


@pytest.mark.parametrize("version", SCHEMAS, ids="-".join)
def test_schemas_are_structural(version: tuple[str, str]) -> None:
    assert faults(SCHEMAS[version]) == []


def test_what_is_not_structural_is_found() -> None:
    """The rules themselves: one bad node after another, in an otherwise good schema."""
    bad: dict[str, Node] = {
        "no type": {"properties": {"a": {"type": "string"}}},
        "an empty object": {"type": "object"},
        "a union": {"anyOf": [{"type": "string"}, {"type": "boolean"}]},
        "nullable": {"type": "string", "nullable": True},
        "a reference": {"$ref": "#/definitions/a"},
        "untyped elements": {"type": "array"},
        "a key that may be absent": {
            "type": "array",
            "items": {"type": "object", "properties": {"a": {"type": "string"}}},
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["a"],
        },
        "a default out of bounds": {"type": "integer", "minimum": 1, "default": 0},
        "a default that is pruned": {"type": "object", "properties": {"a": {"type": "string"}}, "default": {"b": ""}},
        "a required stranger": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["b"]},
        "both kinds of fields": {"type": "object", "properties": {}, "additionalProperties": {"type": "string"}},
        "an enum of another type": {"type": "integer", "enum": ["1"]},
    }
    for name, node in bad.items():
        schema = {"type": "object", "properties": {"metadata": {"type": "object"}, "spec": node}}
        assert faults(schema), name
    good = {"type": "object", "properties": {"metadata": {"type": "object"}, "spec": {"type": "string"}}}
    assert faults(good) == []


def _at(schema: Node, path: list[str]) -> Node | None:
    for word in path:
        schema = schema.get("items", schema).get("properties", {}).get(word, {})
    return schema or None


def at(kind: str, path: str, version: str = "") -> Node:
    stored = CRDS[kind]["spec"]["versions"][-1]["name"]
    node = _at(SCHEMAS[kind, version or stored], path.split("."))
    assert node is not None, path
    return node


@pytest.mark.parametrize(
    ("kind", "path", "default"),
    [
        ("AdminQoSConfiguration", "spec.revisionHistoryLimit", 3),
        ("StrategyGroup", "spec.revisionHistoryLimit", 3),
        ("KatalystCustomConfig", "spec.disableRevisionHistory", True),
        ("CustomNodeResource", "status.topologyPolicy", "none"),
        ("IRQTuningConfiguration", "spec.config.tuningPolicy", "balance"),
        ("IRQTuningConfiguration", "spec.config.tuningInterval", 5),
        ("KatalystVerticalPodAutoscaler", "spec.updatePolicy.podUpdatingStrategy", "Off"),
        ("KatalystVerticalPodAutoscaler", "spec.updatePolicy.podMatchingStrategy", "All"),
        ("KatalystVerticalPodAutoscaler", "spec.updatePolicy.podApplyStrategy", "Group"),
        ("KatalystVerticalPodAutoscaler", "spec.resourcePolicy.algorithmPolicy.recommender", "default"),
        ("ResourceRecommend", "spec.resourcePolicy.algorithmPolicy.algorithm", "percentile"),
        ("IntelligentHorizontalPodAutoscaler", "spec.scaleStrategy", "Preview"),
    ],
)
def test_defaults_are_katalysts(kind: str, path: str, default: Any) -> None:
    assert at(kind, path)["default"] == default


def test_the_older_autoscaler_has_defaults_of_its_own() -> None:
    policy = at("KatalystVerticalPodAutoscaler", "spec.resourcePolicy", "v1alpha1")["properties"]
    assert policy["algorithmPolicy"]["properties"]["granularity"]["default"] == "Default"
    containers = policy["containerPolicies"]["items"]["properties"]
    assert containers["controlledResources"]["default"] == ["cpu"]
    assert containers["controlledValues"]["default"] == "RequestsAndLimits"
    assert containers["resourceResizePolicy"]["default"] == "None"


EVICTION = "spec.config.evictionConfig"


@pytest.mark.parametrize(
    ("kind", "path", "allowed", "refused"),
    [
        ("AdminQoSConfiguration", f"{EVICTION}.cpuPressureEvictionConfig.loadUpperBoundRatio", [1, 1.8], [0.99]),
        (
            "AdminQoSConfiguration",
            f"{EVICTION}.cpuPressureEvictionConfig.loadThresholdMetPercentage",
            [0, 1],
            [1.01, -0.1],
        ),
        ("AdminQoSConfiguration", f"{EVICTION}.cpuPressureEvictionConfig.gracePeriod", [0, 60], [-1]),
        ("AdminQoSConfiguration", f"{EVICTION}.cpuSystemPressureEvictionConfig.gracePeriod", [-1, 60], [0.5]),
        (
            "AdminQoSConfiguration",
            f"{EVICTION}.memoryPressureEvictionConfig.systemEvictionRankingMetrics",
            [["qos.pod", "native.qos.pod"]],
            [[], ["mem.total.numa.container"]],
        ),
        (
            "AdminQoSConfiguration",
            f"{EVICTION}.rootfsPressureEvictionConfig.minimumImageFsFreeThreshold",
            ["0", "10", "10%", "2.5%", "10Gi", "3k"],
            ["", "-1", "010", "1.5Gi", "%", "10GB"],
        ),
        (
            "AdminQoSConfiguration",
            f"{EVICTION}.rootfsPressureEvictionConfig.podMinimumInodesUsedThreshold",
            ["0", "007", "5%", "1.5"],
            ["", "1k", "01%"],
        ),
        (
            "AdminQoSConfiguration",
            f"{EVICTION}.memoryPressureEvictionConfig.systemFreeMemoryThresholdMinimum",
            [0, "0", "10Gi", "1e3", ".5", "-1", "1.M"],
            ["", "Gi", "1gi", "1 Gi", 0.5, "--1"],
        ),
        (
            "AdminQoSConfiguration",
            "spec.updateStrategy.rollingUpdate.canary",
            [3, "0%", "20%", "100%"],
            ["20", "101%", "05%"],
        ),
        ("AdminQoSConfiguration", "spec.updateStrategy.type", ["RollingUpdate"], ["OnDelete"]),
        (
            "AdminQoSConfiguration",
            "spec.config.fineGrainedResourceConfig.cpuBurstConfig.defaultCPUBurstPercent",
            [0, 100],
            [101],
        ),
        ("AdminQoSConfiguration", "spec.config.qrmPluginConfig.cpuPluginConfig.systemExclusivePoolShrinkMin", [1], [0]),
        ("IRQTuningConfiguration", "spec.config.loadBalance.irqTunedNumMaxEachTime", [1, 2], [0, 3]),
        ("IRQTuningConfiguration", "spec.config.coresAdjust.percentMax", [0, 100], [101]),
        ("IRQTuningConfiguration", "spec.config.coresAdjust.incConf.successiveIncInterval", [1], [0]),
        ("PowerManagementConfiguration", "spec.config.powerReductionRatio", [0, 100], [-1, 101]),
        ("MemoryBandwidthConfiguration", "spec.config.capLimitPercent", [0, 100], [101]),
        ("ServiceProfileDescriptor", "spec.baselinePercent", [0, 100], [101, -1]),
        ("ServiceProfileDescriptor", "status.aggMetrics.aggregator", ["avg", "max", "sum"], ["min"]),
        ("CustomNodeResource", "spec.taints.qosLevel", ["reclaimed_cores", "system_cores"], ["batch", ""]),
        ("CustomNodeResource", "status.nodeMetricStatus.groupMetric.QoSLevel", ["shared_cores"], ["shared"]),
        ("KatalystVerticalPodAutoscaler", "spec.updatePolicy.podMatchingStrategy", ["All"], ["ForFreshPod"]),
        ("TideNodePool", "spec.nodeConfigs.reserve.online", [1, "20%", "whatever"], [1.5, True]),
    ],
)
def test_values_are_bounded_as_katalysts(kind: str, path: str, allowed: list[Any], refused: list[Any]) -> None:
    node = at(kind, path)
    for value in allowed:
        assert list(problems(node, value)) == [], value
    for value in refused:
        assert list(problems(node, value)), value


@pytest.mark.parametrize(
    ("kind", "path", "required"),
    [
        ("CustomNodeResource", "spec.taints", {"key", "effect", "qosLevel"}),
        ("CustomNodeResource", "status.topologyZone", {"type", "name"}),
        ("CustomNodeResource", "status.nodeMetricStatus", {"updateTime"}),
        (
            "CustomNodeConfig",
            "status.katalystCustomConfigList",
            {"configType", "configName", "configNamespace", "hash"},
        ),
        ("KatalystCustomConfig", "spec", {"targetType"}),
        ("AdminQoSConfiguration", "spec", {"config"}),
        ("AuthConfiguration", "spec", set()),
        ("StrategyGroup", "spec", set()),
        ("ServiceProfileDescriptor", "spec", {"targetRef"}),
        ("ServiceProfileDescriptor", "spec.extendedIndicator", {"name"}),
        ("ResourceRecommend", "spec", {"targetRef", "resourcePolicy"}),
        ("IntelligentHorizontalPodAutoscaler", "spec.autoscaler", {"scaleTargetRef", "maxReplicas"}),
        (
            "IntelligentHorizontalPodAutoscaler",
            "spec.algorithmConfig.timeWindow",
            {"input", "historySteps", "aggregator", "output", "predictionSteps"},
        ),
        ("TideNodePool", "spec.evictStrategy.watermark.evictOnlinePodTaint", {"key", "value"}),
    ],
)
def test_what_has_to_be_said_is_katalysts(kind: str, path: str, required: set[str]) -> None:
    node = at(kind, path)
    assert set(node.get("items", node).get("required", [])) == required


def test_only_a_recommendation_cannot_be_without_its_spec() -> None:
    required = {name: schema["required"] for (name, _), schema in SCHEMAS.items() if "required" in schema}
    assert required == {"ResourceRecommend": ["spec"]}


def test_lists_are_merged_by_katalysts_keys() -> None:
    keyed = {
        f"{name}{path}": node["x-kubernetes-list-map-keys"]
        for (name, _), schema in SCHEMAS.items()
        for path, node in nodes(schema)
        if "x-kubernetes-list-map-keys" in node
    }
    config = "TransparentMemoryOffloadingConfiguration.spec.config"
    resources = "CustomNodeResource.status.resources", "CustomNodeResource.status.topologyZone[].resources"
    assert keyed == {
        f"{config}.qosLevelConfig": ["qosLevel"],
        f"{config}.poolNameConfig": ["poolName"],
        f"{config}.CgroupConfig": ["cgroupPath"],
        "ServiceProfileDescriptor.spec.businessIndicator": ["name"],
        "ServiceProfileDescriptor.spec.systemIndicator": ["name"],
        "ServiceProfileDescriptor.spec.extendedIndicator": ["name"],
        **{f"{path}.resourcePackages": ["packageName"] for path in resources},
        **{f"{path}.resourcePools": ["poolName"] for path in resources},
    }


def test_what_others_define_is_kept_as_it_is() -> None:
    assert {
        (name, path) for (name, _), schema in SCHEMAS.items() for path, node in nodes(schema) if node.get(OPEN)
    } == {
        ("CustomNodeResource", ".status.topologyZone[].children"),
        ("ServiceProfileDescriptor", ".spec.extendedIndicator[].indicators"),
        ("KatalystVerticalPodAutoscaler", ".spec.resourcePolicy.algorithmPolicy.extensions"),
        ("ResourceRecommend", ".spec.resourcePolicy.algorithmPolicy.extensions"),
    }


def test_quantities_have_the_pattern_of_quantities() -> None:
    patterns = {
        node.get("pattern") for schema in SCHEMAS.values() for _, node in nodes(schema) if node.get(INT_OR_STRING)
    }
    assert len(patterns) == 3  # quantities, canaries, and the unchecked reserves of TideNodePool


def test_fields_are_explained_where_their_names_do_not() -> None:
    """`kubectl explain` has the docstrings, those of the type and of the field."""
    children = at("CustomNodeResource", "status.topologyZone.children")["description"]
    assert children.startswith("Zones within this zone")
    selector = at("AuthConfiguration", "spec.nodeLabelSelector")["description"]
    assert selector.startswith("Label selector in kubectl's notation")
    assert at("CustomNodeResource", "status.resources")["description"] == (
        "Capacity and allocatable resources. Includes the resources for reclaimed pods, which the scheduler uses."
    )

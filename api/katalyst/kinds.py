"""Table of Katalyst's kinds: group, versions, plural and short names, scope and printer columns.
Names of kinds are the names of their structs.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from api.katalyst.admin_qos import AdminQoSConfiguration
from api.katalyst.cnr import CustomNodeResource, NodeProfileDescriptor
from api.katalyst.ihpa import IntelligentHorizontalPodAutoscaler, VirtualWorkload
from api.katalyst.irq_tuning import IRQTuningConfiguration
from api.katalyst.kcc import CustomNodeConfig, KatalystCustomConfig
from api.katalyst.meta import CustomResource
from api.katalyst.node_configs import (
    AuthConfiguration,
    MemoryBandwidthConfiguration,
    PowerManagementConfiguration,
    StrategyGroup,
    StrategyGroupConfiguration,
    TransparentMemoryOffloadingConfiguration,
)
from api.katalyst.node_pools import NodeOvercommitConfig, TideNodePool
from api.katalyst.spd import ServiceProfileDescriptor
from api.katalyst.vpa import (
    KatalystVerticalPodAutoscaler,
    KatalystVerticalPodAutoscalerV1Alpha2,
    ResourceRecommend,
    VerticalPodAutoscalerRecommendation,
)
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY

KATALYST_DOMAIN = "katalyst.kubewharf.io"
KindScope = Literal["Cluster", "Namespaced"]


class PrinterColumn(NamedTuple):
    """Column of `kubectl get`."""

    name: str
    type: Literal["date", "boolean", "string", "integer"]
    path: str


class ScaleSubresource(NamedTuple):
    """Field paths of the scale subresource."""

    spec_replicas: str = ".spec.replicas"
    status_replicas: str = ".status.replicas"
    selector: str = ".status.selector"


class KindVersion(NamedTuple):
    """One version of a kind."""

    name: str
    type: type[CustomResource]
    columns: tuple[PrinterColumn, ...] = ()
    scale: ScaleSubresource | None = None


class KatalystKind(NamedTuple):
    """A kind with its versions: all are served, the last one is stored."""

    group: str
    kind: str
    plural: str
    short_name: str
    scope: KindScope
    versions: tuple[KindVersion, ...]

    @property
    def name(self) -> str:
        """Name of the CustomResourceDefinition."""
        return f"{self.plural}.{self.group}"

    @property
    def api_version(self) -> str:
        """API version of the stored version's objects."""
        return f"{self.group}/{self.versions[-1].name}"


def _valid_condition_path(word: str) -> str:
    return f'.status.conditions[?(@.type=="Valid")].{word}'


_VALID_COLUMNS = (
    PrinterColumn("VALID", "string", _valid_condition_path("status")),
    PrinterColumn("REASON", "string", _valid_condition_path("reason")),
    PrinterColumn("MESSAGE", "string", _valid_condition_path("message")),
)
CONFIG_COLUMNS = (
    PrinterColumn("AGE", "date", ".metadata.creationTimestamp"),
    PrinterColumn("PAUSED", "boolean", ".spec.paused"),
    PrinterColumn("SELECTOR", "string", ".spec.nodeLabelSelector"),
    PrinterColumn("PRIORITY", "string", ".spec.priority"),
    PrinterColumn("NODES", "string", ".spec.ephemeralSelector.nodeNames"),
    PrinterColumn("DURATION", "string", ".spec.ephemeralSelector.lastDuration"),
    PrinterColumn("TARGET", "integer", ".status.targetNodes"),
    PrinterColumn("CANARY", "integer", ".status.canaryNodes"),
    PrinterColumn("UPDATED-TARGET", "integer", ".status.updatedTargetNodes"),
    PrinterColumn("HASH", "string", ".status.currentHash"),
    *_VALID_COLUMNS,
)
KCC_COLUMNS = (
    PrinterColumn("GROUP", "string", ".spec.targetType.group"),
    PrinterColumn("RESOURCE", "string", ".spec.targetType.resource"),
    PrinterColumn("VERSION", "string", ".spec.targetType.version"),
    PrinterColumn("GENERATION", "integer", ".metadata.generation"),
    PrinterColumn("OBSERVED", "integer", ".status.observedGeneration"),
    PrinterColumn("INVALID", "string", ".status.invalidTargetConfigList"),
    *_VALID_COLUMNS,
)


def _property_path(name: str) -> str:
    return f'.spec.nodeResourceProperties[?(@.propertyName=="{name}")].propertyQuantity'


def _allocatable_path(resource: str) -> str:
    escaped = resource.replace(".", "\\.")
    return f".status.resources.allocatable.{escaped}"


CNR_COLUMNS = (
    PrinterColumn("CPU", "string", _property_path("cpu")),
    PrinterColumn("MEMORY", "string", _property_path("memory")),
    PrinterColumn("RECLAIMED-MILLICPU", "string", _allocatable_path(RECLAIMED_CPU)),
    PrinterColumn("RECLAIMED-MEMORY", "string", _allocatable_path(RECLAIMED_MEMORY)),
    PrinterColumn("AGE", "date", ".metadata.creationTimestamp"),
)
OVERCOMMIT_COLUMNS = (
    PrinterColumn("OVERCOMMITRATIO", "string", ".spec.resourceOvercommitRatio"),
    PrinterColumn("SELECTOR", "string", ".spec.nodeOvercommitSelectorVal"),
)


def _config_kind(resource: type[CustomResource], short_name: str, scope: KindScope = "Namespaced") -> KatalystKind:
    """Kind that a KatalystCustomConfig can distribute."""
    version = KindVersion("v1alpha1", resource, CONFIG_COLUMNS)
    return KatalystKind(
        f"config.{KATALYST_DOMAIN}", resource.__name__, f"{resource.__name__.lower()}s", short_name, scope, (version,)
    )


def _katalyst_kind(group: str, short_name: str, scope: KindScope, *versions: KindVersion) -> KatalystKind:
    name = versions[0].type.__name__
    return KatalystKind(f"{group}.{KATALYST_DOMAIN}", name, f"{name.lower()}s", short_name, scope, versions)


KATALYST_KINDS = (
    _katalyst_kind("node", "kcnr", "Cluster", KindVersion("v1alpha1", CustomNodeResource, CNR_COLUMNS)),
    _katalyst_kind("node", "npd", "Cluster", KindVersion("v1alpha1", NodeProfileDescriptor)),
    _katalyst_kind("config", "kcc", "Namespaced", KindVersion("v1alpha1", KatalystCustomConfig, KCC_COLUMNS)),
    _katalyst_kind("config", "cnc", "Cluster", KindVersion("v1alpha1", CustomNodeConfig)),
    _config_kind(AdminQoSConfiguration, "aqc"),
    _config_kind(AuthConfiguration, "ac"),
    _config_kind(IRQTuningConfiguration, "irqtc"),
    _config_kind(TransparentMemoryOffloadingConfiguration, "tmo"),
    _config_kind(MemoryBandwidthConfiguration, "mbc"),
    _config_kind(PowerManagementConfiguration, "pmc"),
    _config_kind(StrategyGroup, "sg", "Cluster"),
    _config_kind(StrategyGroupConfiguration, "sgc", "Cluster"),
    _katalyst_kind("workload", "spd", "Namespaced", KindVersion("v1alpha1", ServiceProfileDescriptor)),
    _katalyst_kind(
        "autoscaling",
        "kvpa",
        "Namespaced",
        KindVersion("v1alpha1", KatalystVerticalPodAutoscaler),
        KindVersion("v1alpha2", KatalystVerticalPodAutoscalerV1Alpha2),
    ),
    _katalyst_kind("autoscaling", "vparec", "Namespaced", KindVersion("v1alpha1", VerticalPodAutoscalerRecommendation)),
    _katalyst_kind("autoscaling", "ihpa", "Namespaced", KindVersion("v1alpha2", IntelligentHorizontalPodAutoscaler)),
    _katalyst_kind("autoscaling", "", "Namespaced", KindVersion("v1alpha2", VirtualWorkload, scale=ScaleSubresource())),
    _katalyst_kind("recommendation", "rec", "Namespaced", KindVersion("v1alpha1", ResourceRecommend)),
    _katalyst_kind("overcommit", "noc", "Cluster", KindVersion("v1alpha1", NodeOvercommitConfig, OVERCOMMIT_COLUMNS)),
    _katalyst_kind("tide", "tnp", "Cluster", KindVersion("v1alpha1", TideNodePool)),
)

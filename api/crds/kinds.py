"""Every kind of Katalyst's: one table with the group, versions, names and columns of each."""

from __future__ import annotations

from typing import Literal, NamedTuple

from api.crds.adminqos import AdminQoSConfiguration
from api.crds.configs import (
    AuthConfiguration,
    MemoryBandwidthConfiguration,
    PowerManagementConfiguration,
    StrategyGroup,
    StrategyGroupConfiguration,
)
from api.crds.generic import CustomNodeConfig, KatalystCustomConfig
from api.crds.ihpa import IntelligentHorizontalPodAutoscaler, VirtualWorkload
from api.crds.irqtuning import IRQTuningConfiguration
from api.crds.meta import Resource
from api.crds.node import CustomNodeResource, NodeProfileDescriptor
from api.crds.offloading import TransparentMemoryOffloadingConfiguration
from api.crds.pools import NodeOvercommitConfig, TideNodePool
from api.crds.recommendation import ResourceRecommend
from api.crds.vpa import (
    KatalystVerticalPodAutoscaler,
    KatalystVerticalPodAutoscalerV1Alpha2,
    VerticalPodAutoscalerRecommendation,
)
from api.crds.workload import ServiceProfileDescriptor

DOMAIN = "katalyst.kubewharf.io"
Scope = Literal["Cluster", "Namespaced"]


class Column(NamedTuple):
    """What `kubectl get` shows of an object."""

    name: str
    type: Literal["date", "boolean", "string", "integer"]
    path: str


class Scale(NamedTuple):
    """Where an object that autoscalers can scale says what they ask."""

    spec_replicas: str = ".spec.replicas"
    status_replicas: str = ".status.replicas"
    selector: str = ".status.selector"


class Version(NamedTuple):
    """One version of a kind."""

    name: str
    type: type[Resource]
    columns: tuple[Column, ...] = ()
    scale: Scale | None = None


class Kind(NamedTuple):
    """A kind; of its versions, all of which are served, the last is the one that is stored."""

    group: str
    kind: str
    plural: str
    short_name: str
    scope: Scope
    versions: tuple[Version, ...]

    @property
    def name(self) -> str:
        """Of its CustomResourceDefinition."""
        return f"{self.plural}.{self.group}"

    @property
    def api_version(self) -> str:
        """What an object of the stored version says."""
        return f"{self.group}/{self.versions[-1].name}"


def _valid(word: str) -> str:
    return f'.status.conditions[?(@.type=="Valid")].{word}'


_VALID = (
    Column("VALID", "string", _valid("status")),
    Column("REASON", "string", _valid("reason")),
    Column("MESSAGE", "string", _valid("message")),
)
CONFIG_COLUMNS = (
    Column("AGE", "date", ".metadata.creationTimestamp"),
    Column("PAUSED", "boolean", ".spec.paused"),
    Column("SELECTOR", "string", ".spec.nodeLabelSelector"),
    Column("PRIORITY", "string", ".spec.priority"),
    Column("NODES", "string", ".spec.ephemeralSelector.nodeNames"),
    Column("DURATION", "string", ".spec.ephemeralSelector.lastDuration"),
    Column("TARGET", "integer", ".status.targetNodes"),
    Column("CANARY", "integer", ".status.canaryNodes"),
    Column("UPDATED-TARGET", "integer", ".status.updatedTargetNodes"),
    Column("HASH", "string", ".status.currentHash"),
    *_VALID,
)
KCC_COLUMNS = (
    Column("GROUP", "string", ".spec.targetType.group"),
    Column("RESOURCE", "string", ".spec.targetType.resource"),
    Column("VERSION", "string", ".spec.targetType.version"),
    Column("GENERATION", "integer", ".metadata.generation"),
    Column("OBSERVED", "integer", ".status.observedGeneration"),
    Column("INVALID", "string", ".status.invalidTargetConfigList"),
    *_VALID,
)
OVERCOMMIT_COLUMNS = (
    Column("OVERCOMMITRATIO", "string", ".spec.resourceOvercommitRatio"),
    Column("SELECTOR", "string", ".spec.nodeOvercommitSelectorVal"),
)


def _config(resource: type[Resource], short_name: str, scope: Scope = "Namespaced") -> Kind:
    """A kind that a KatalystCustomConfig can hand out."""
    version = Version("v1alpha1", resource, CONFIG_COLUMNS)
    return Kind(f"config.{DOMAIN}", resource.__name__, f"{resource.__name__.lower()}s", short_name, scope, (version,))


def _kind(group: str, short_name: str, scope: Scope, *versions: Version) -> Kind:
    name = versions[0].type.__name__
    return Kind(f"{group}.{DOMAIN}", name, f"{name.lower()}s", short_name, scope, versions)


KINDS = (
    _kind("node", "kcnr", "Cluster", Version("v1alpha1", CustomNodeResource)),
    _kind("node", "npd", "Cluster", Version("v1alpha1", NodeProfileDescriptor)),
    _kind("config", "kcc", "Namespaced", Version("v1alpha1", KatalystCustomConfig, KCC_COLUMNS)),
    _kind("config", "cnc", "Cluster", Version("v1alpha1", CustomNodeConfig)),
    _config(AdminQoSConfiguration, "aqc"),
    _config(AuthConfiguration, "ac"),
    _config(IRQTuningConfiguration, "irqtc"),
    _config(TransparentMemoryOffloadingConfiguration, "tmo"),
    _config(MemoryBandwidthConfiguration, "mbc"),
    _config(PowerManagementConfiguration, "pmc"),
    _config(StrategyGroup, "sg", "Cluster"),
    _config(StrategyGroupConfiguration, "sgc", "Cluster"),
    _kind("workload", "spd", "Namespaced", Version("v1alpha1", ServiceProfileDescriptor)),
    _kind(
        "autoscaling",
        "kvpa",
        "Namespaced",
        Version("v1alpha1", KatalystVerticalPodAutoscaler),
        Version("v1alpha2", KatalystVerticalPodAutoscalerV1Alpha2),
    ),
    _kind("autoscaling", "vparec", "Namespaced", Version("v1alpha1", VerticalPodAutoscalerRecommendation)),
    _kind("autoscaling", "ihpa", "Namespaced", Version("v1alpha2", IntelligentHorizontalPodAutoscaler)),
    _kind("autoscaling", "", "Namespaced", Version("v1alpha2", VirtualWorkload, scale=Scale())),
    _kind("recommendation", "rec", "Namespaced", Version("v1alpha1", ResourceRecommend)),
    _kind("overcommit", "noc", "Cluster", Version("v1alpha1", NodeOvercommitConfig, OVERCOMMIT_COLUMNS)),
    _kind("tide", "tnp", "Cluster", Version("v1alpha1", TideNodePool)),
)

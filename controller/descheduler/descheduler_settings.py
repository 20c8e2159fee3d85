"""Settings of the descheduler. `lowNodeLoad` has the names and meanings of Koordinator's LowNodeLoadArgs, so that such
arguments can be used without changes. Names in brackets are those of the descheduler of kubernetes-sigs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from api.katalyst.harm import HARM_LIMITS, MEMORY_PRESSURE, RECLAIMED_INTERFERENCE, RUNQ_LATENCY_P99
from api.katalyst.ihpa import LabelSelector
from api.quantity import parse_duration_s
from api.text import quote
from common.validation import describe_validation_error
from controller.webhooks.colocation_profiles import parse_label_selector

Resource = Literal["cpu", "memory"]
RESOURCES: tuple[Resource, ...] = ("cpu", "memory")
Percentage = Annotated[float, Meta(ge=0, le=100)]
Weight = Annotated[int, Meta(ge=0, le=1000)]
Seconds = Annotated[float, Meta(ge=1, le=86_400)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=1000)]


class _DeschedulerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    pass


def _check_duration(field: str, text: str | None) -> None:
    if text is None:
        return
    try:
        parse_duration_s(text)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None
    if parse_duration_s(text) <= 0:
        raise ValueError(f"{field}: {quote(text)} is not above 0; write a duration such as 5m0s")


class EvictableNamespaces(_DeschedulerSettings, frozen=True, kw_only=True):
    """Namespaces whose pods may be moved; at most one of the two lists."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.include and self.exclude:
            raise ValueError("include and exclude are both set; remove one")

    def allows(self, namespace: str) -> bool:
        return namespace in self.include if self.include else namespace not in self.exclude


class NamedPodSelector(_DeschedulerSettings, frozen=True, kw_only=True):
    """Pods that may be moved."""

    name: str = ""
    selector: LabelSelector | None = None


class AnomalyCondition(_DeschedulerSettings, frozen=True, kw_only=True):
    """How many reports of a node have to be above a threshold before it is relieved."""

    consecutive_abnormalities: Count = 5
    """Number of consecutive hot reports after which a node is relieved."""
    consecutive_normalities: Annotated[int, Meta(ge=0, le=1000)] = 3
    """Number of consecutive normal reports after which the count of hot reports begins again at zero."""
    timeout: str | None = None
    """Time after which the count of a node that is still hot begins again at zero. Without it the node stays abnormal."""

    def __post_init__(self) -> None:
        _check_duration("timeout", self.timeout)


class LowNodeLoadArgs(_DeschedulerSettings, frozen=True, kw_only=True):
    """Koordinator's LowNodeLoadArgs (pkg/descheduler/apis/config/v1alpha2/types_loadaware.go)."""

    api_version: str = ""
    kind: Literal["", "LowNodeLoadArgs"] = ""
    paused: bool = False
    """True evaluates nothing and moves nothing."""
    dry_run: bool = False
    """True evaluates and explains, and moves nothing."""
    number_of_nodes: Annotated[int, Meta(ge=0)] = 0
    """Pods are moved only while more nodes than this are below all low thresholds."""
    node_metric_expiration_seconds: Annotated[int, Meta(ge=1, le=86_400)] = 180
    """Age in seconds from which a report is ignored: its node is neither relieved nor a target."""
    evictable_namespaces: EvictableNamespaces = EvictableNamespaces(exclude=("kube-system",))
    node_selector: LabelSelector | None = None
    """Nodes that are relieved or may be targets; without it all nodes."""
    pod_selectors: tuple[NamedPodSelector, ...] = ()
    """Pods that may be moved: those that match one of the selectors; without selectors all pods."""
    node_fit: bool = True
    """False does not check whether the pod fits on its target, only that the target's usage stays below the high thresholds."""
    use_deviation_thresholds: bool = False
    """True uses the thresholds as deviations from the mean usage of all nodes: mean - low, mean + high."""
    high_thresholds: Mapping[Resource, Percentage] = {}
    """Usage in percent of the allocatable amount above which a node is hot. None by default: batch work is meant to use the CPU
    that online pods leave."""
    low_thresholds: Mapping[Resource, Percentage] = {}
    """Usage in percent up to which a node is a target, for every listed resource."""
    resource_weights: Mapping[Resource, Weight] = {}
    """Weights of the resources in the order of nodes and pods; 1 for a resource that is not listed."""
    anomaly_condition: AnomalyCondition = AnomalyCondition()
    detector_cache_timeout: str = "5m0s"
    """Time without a fresh report after which the count of a node begins again at zero."""

    def __post_init__(self) -> None:
        if missing := self.high_thresholds.keys() ^ self.low_thresholds.keys():
            name = sorted(missing)[0]
            lacking = "lowThresholds" if name in self.high_thresholds else "highThresholds"
            raise ValueError(
                f"{lacking} has no {name}; a resource needs both thresholds, so add it or remove the other one"
            )
        for name, low in self.low_thresholds.items():
            high = self.high_thresholds[name]
            if low > high and not self.use_deviation_thresholds:
                raise ValueError(
                    f"lowThresholds.{name} is {low:g} and highThresholds.{name} {high:g}: lower the first one"
                )
        _check_duration("detectorCacheTimeout", self.detector_cache_timeout)
        parse_label_selector("nodeSelector", self.node_selector)
        for number, named in enumerate(self.pod_selectors):
            parse_label_selector(f"podSelectors[{number}].selector", named.selector)


class HarmLimits(_DeschedulerSettings, frozen=True, kw_only=True):
    """Reported harm above which a node is hot; 0 is no limit."""

    runq_latency_ms: Annotated[float, Meta(ge=0, le=10_000)] = 1000 * HARM_LIMITS[RUNQ_LATENCY_P99]
    """Run-queue latency p99 of online pods; the default is the target of the agents' policy `latency`."""
    cpu_pressure: Share = 0.0
    """Share of time in which some task waited for a CPU. Off by default: it counts tasks of batch pods, which are meant to
    wait."""
    memory_pressure: Share = HARM_LIMITS[MEMORY_PRESSURE]
    """Share of time in which some task waited for memory."""
    interference: Annotated[float, Meta(ge=0, le=1000)] = HARM_LIMITS[RECLAIMED_INTERFERENCE]
    """Seconds per second for which tasks of online pods waited for reclaimed pods."""


class DeschedulerSettings(_DeschedulerSettings, frozen=True, kw_only=True):
    """Settings of the controller `descheduler`."""

    low_node_load: LowNodeLoadArgs = LowNodeLoadArgs()
    harm: HarmLimits = HarmLimits()
    eviction_pressure: bool = True
    """True makes a node hot if it has the taint of an agent's eviction condition about CPU or memory."""
    interval_s: Seconds = 30.0
    """[deschedulingInterval] Time between two evaluations: half of the minute between two reports of an agent, so that none is
    missed."""
    move_online: bool = True
    """False moves reclaimed pods only."""
    evict_local_storage_pods: bool = False
    """[evictLocalStoragePods] Move pods with emptyDir or hostPath volumes too; the data of emptyDir volumes are lost."""
    max_no_of_pods_to_evict_per_node: Count = 2
    """[maxNoOfPodsToEvictPerNode] Pods of one node in one evaluation."""
    max_no_of_pods_to_evict_per_namespace: Count = 5
    """[maxNoOfPodsToEvictPerNamespace] Pods of one namespace in one evaluation."""
    max_no_of_pods_to_evict_per_workload: Count = 1
    """Pods of one workload in one evaluation."""
    max_no_of_pods_to_evict_total: Count = 10
    """[maxNoOfPodsToEvictTotal] Pods in one evaluation."""
    node_cooldown_s: Annotated[float, Meta(ge=0, le=86_400)] = 300.0
    """Time after a move in which its node is neither relieved again nor a target, and its target is not relieved."""
    workload_cooldown_s: Annotated[float, Meta(ge=0, le=86_400)] = 900.0
    """Time after a move in which no other pod of the workload is moved."""
    lease: str = "dioptase-descheduler"
    """Name of the Lease, in the namespace of the controller, whose annotation has the latest moves."""
    scheduler: Mapping[str, Any] = {}
    """Settings of the scheduler extender that will place the pods; the chart passes `scheduler.settings`."""

    def __post_init__(self) -> None:
        if self.scheduler:
            # Its plugins need numpy, 15 MiB that a controller without a descheduler does not spend.
            from controller.scheduler.scheduler_settings import SchedulerConfig  # noqa: PLC0415

            try:
                msgspec.convert(self.scheduler, SchedulerConfig)
            except msgspec.ValidationError as error:
                text = f"scheduler.{describe_validation_error(error, self.scheduler, SchedulerConfig)}"
                raise ValueError(f"{text.replace('.top level: ', ': ', 1)}; see docs/scheduler.md") from None

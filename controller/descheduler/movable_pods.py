"""Decides which pods may be moved, and in which order, and computes how much a move relieves. Pure.
The rules and annotations are those of the descheduler of kubernetes-sigs (pkg/framework/plugins/defaultevictor), the order
that of Koordinator's (pkg/descheduler/utils/sorter/pod.go)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from api.qos import QoSLevel
from controller.descheduler.descheduler_kinds import MovablePod, PodDisruptionBudget
from controller.descheduler.descheduler_settings import DeschedulerSettings
from controller.descheduler.node_load import CPU_COLUMN, MEMORY_COLUMN, Pair
from controller.label_selectors import LabelSelectorSet
from controller.scheduler.scheduling_pod import DEFAULT_MEMORY_BYTES, DEFAULT_MILLICPU, Amounts, SchedulingPod
from controller.webhooks.colocation_profiles import parse_label_selector
from kube.objects import KubeOwnerReference, parse_timestamp

EVICT_KEY = "descheduler.alpha.kubernetes.io/evict"
"""Annotation of a pod that may be moved although it has no owner, has local storage, or has a critical priority. The
descheduler of kubernetes-sigs ignores the value; here a pod with the value `false` is never moved."""
PREFER_NO_EVICTION_KEY = "descheduler.alpha.kubernetes.io/prefer-no-eviction"
"""Annotation of a pod that is moved after all others of its kind."""
DELETION_COST_KEY = "controller.kubernetes.io/pod-deletion-cost"
MIRROR_KEY, SOURCE_KEY = "kubernetes.io/config.mirror", "kubernetes.io/config.source"
CRITICAL_PRIORITY = 2_000_000_000
"""Lowest priority of the critical system classes (pkg/apis/scheduling/types.go, SystemCriticalPriority)."""
MIN_RUN_S = 60.0
"""Minimum time since the start of a pod that is moved: no report contains the usage of a younger pod."""
AGE_SCALE_S, RESTART_SCALE = 86_400.0, 10
"""Age in seconds at which a move costs twice as much as at the start of the pod, and number of restarts at which it costs half
as much as without a restart."""
EVALUATED_RESOURCES = frozenset(("cpu", "memory", "ephemeral-storage", RECLAIMED_CPU, RECLAIMED_MEMORY))
_HASH_LABEL = "pod-template-hash"
_TERMINATING, _STARTED = "it is terminating", f"it started less than {MIN_RUN_S:.0f} s ago"
PASSING_OBSTACLES = frozenset((_TERMINATING, _STARTED))
"""Obstacles that end by themselves: what the pod uses is free soon, or the pod may be moved soon."""


class MoveCandidate(NamedTuple):
    """A pod that may be moved."""

    pod: MovablePod
    parsed: SchedulingPod
    workload: str
    """NAMESPACE/KIND/NAME of its controller; the pod itself without one."""
    usage: Pair
    """Estimated usage of CPU in thousandths and of memory in bytes."""


class MoveRules:
    """The settings that decide about a pod, with parsed selectors."""

    def __init__(self, settings: DeschedulerSettings) -> None:
        self._settings, args = settings, settings.low_node_load
        self._namespaces = args.evictable_namespaces
        self._selectors: list[LabelSelectorSet] = [
            parse_label_selector("podSelectors", each.selector)
            for each in args.pod_selectors
            if each.selector is not None
        ]

    def obstacle(self, pod: MovablePod, level: QoSLevel, now_s: float) -> str:
        """Return why a pod may not be moved; empty if it may."""
        return (
            self._permanent_obstacle(pod, level)
            or self._protection(pod)
            or (placement_obstacle(pod) if self._settings.low_node_load.node_fit else "")
            or _start_obstacle(pod, now_s)
        )

    def _permanent_obstacle(self, pod: MovablePod, level: QoSLevel) -> str:
        metadata, annotations = pod.metadata, pod.metadata.annotations
        owner = controlling_owner(pod)
        if metadata.deletion_timestamp is not None:
            return _TERMINATING
        if pod.status.phase != "Running":
            return f"its phase is {pod.status.phase or 'not known'}"
        if MIRROR_KEY in annotations or annotations.get(SOURCE_KEY, "api") != "api":
            return "it is a static pod"
        if owner is not None and owner.kind in ("DaemonSet", "Node"):
            return f"its {owner.kind} binds it to this node"
        if level is QoSLevel.SYSTEM:
            return "its QoS level is system_cores"
        if annotations.get(EVICT_KEY, "").lower() == "false":
            return f"its annotation {EVICT_KEY} is false"
        if not self._namespaces.allows(metadata.namespace):
            return "evictableNamespaces excludes its namespace"
        if self._selectors and not any(selector.matches(metadata.labels) for selector in self._selectors):
            return "no podSelector matches its labels"
        if level is not QoSLevel.RECLAIMED and not self._settings.move_online:
            return "it is an online pod, and moveOnline is false"
        return ""

    def _protection(self, pod: MovablePod) -> str:
        if EVICT_KEY in pod.metadata.annotations:
            return ""
        if pod.spec.priority >= CRITICAL_PRIORITY or pod.spec.priority_class_name.startswith("system-"):
            return "its priority is critical"
        if controlling_owner(pod) is None:
            return "no controller would create it again"
        volumes = pod.spec.volumes or ()
        is_local = any(each.empty_dir is not None or each.host_path is not None for each in volumes)
        return "it has local storage" if is_local and not self._settings.evict_local_storage_pods else ""


def placement_obstacle(pod: MovablePod) -> str:
    """Return a rule of the pod's placement that the descheduler does not evaluate, so that it cannot choose a target; empty if
    there is none."""
    spec = pod.spec
    if any(each.persistent_volume_claim is not None or each.ephemeral is not None for each in spec.volumes or ()):
        return "it has persistent volumes, and where these can be attached is not evaluated"
    affinity = spec.affinity
    if affinity is not None and any(
        rules is not None and rules.required for rules in (affinity.pod_affinity, affinity.pod_anti_affinity)
    ):
        return "it requires affinity to other pods, which is not evaluated"
    if any(each.when_unsatisfiable == "DoNotSchedule" for each in spec.topology_spread_constraints or ()):
        return "it requires a topology spread, which is not evaluated"
    containers = (*spec.containers, *(spec.init_containers or ()))
    if spec.host_network or any(port.host_port for each in containers for port in each.ports or ()):
        return "it uses ports of its node, which are not evaluated"
    if spec.resource_claims or any(each.resources.claims for each in containers):
        return "it has resource claims, which are not evaluated"
    for container in containers:
        if others := (container.resources.requests or {}).keys() - EVALUATED_RESOURCES:
            return f"it requests {min(others)[:80]}, which is not evaluated"
    return ""


def controlling_owner(pod: MovablePod) -> KubeOwnerReference | None:
    """Return the controller of a pod, the first owner if none is marked; None without owners."""
    owners = pod.metadata.owner_references
    return next((owner for owner in owners if owner.controller), owners[0] if owners else None)


def workload_of(pod: MovablePod) -> str:
    """Return NAMESPACE/KIND/NAME of a pod's workload: the Deployment of a ReplicaSet, so that a rollout does not end a
    cool-down."""
    owner, namespace = controlling_owner(pod), pod.metadata.namespace
    if owner is None:
        return f"{namespace}/Pod/{pod.metadata.name}"
    suffix = f"-{pod.metadata.labels.get(_HASH_LABEL, '')}"
    if owner.kind == "ReplicaSet" and len(suffix) > 1 and owner.name.endswith(suffix):
        return f"{namespace}/Deployment/{owner.name.removesuffix(suffix)}"
    return f"{namespace}/{owner.kind}/{owner.name}"


def estimate_usage(
    pods: Sequence[SchedulingPod], groups: Mapping[QoSLevel, Pair], node_usage: Pair, factors: Pair
) -> dict[str, Pair]:
    """Return the estimated usage of each pod of a node by its uid.

    Reports contain the usage of each QoS level, which is divided in proportion to the pods' requests. For a level that is not
    reported, the usage is the share of the requests that LoadAware assumes, at most what the node uses beyond the reported
    levels.
    """
    result: dict[str, list[float]] = {pod.uid: [0.0, 0.0] for pod in pods}
    for column in (CPU_COLUMN, MEMORY_COLUMN):
        measured = {level: usage[column] for level, usage in groups.items() if not math.isnan(usage[column])}
        for level in {pod.level for pod in pods}:
            members = [pod for pod in pods if pod.level is level]
            weights = [_weight(pod.load_basis, column) for pod in members]
            total = measured.get(level)
            if total is None:
                rest = max(node_usage[column] - sum(measured.values()), 0.0)
                total = min(sum(pod.load_basis[column] for pod in members) * factors[column], rest)
            for pod, weight in zip(members, weights, strict=True):
                result[pod.uid][column] = total * weight / sum(weights)
    return {uid: (amounts[CPU_COLUMN], amounts[MEMORY_COLUMN]) for uid, amounts in result.items()}


def relief(usage: Pair, capacity: Pair, columns: Iterable[int], weights: Pair) -> float:
    """Return the relief by a move: the share of the node's capacity that the pod uses, as the weighted mean over the resources
    that make the node hot."""
    pairs = [(weights[column], usage[column] / capacity[column]) for column in columns if capacity[column] > 0]
    total = sum(weight for weight, _ in pairs)
    return sum(weight * share for weight, share in pairs) / total if total else 0.0


def move_order(candidate: MoveCandidate, gain: float, now_s: float) -> tuple[bool, bool, int, int, float, str]:
    """Return the key by which candidates are sorted: reclaimed pods first, then by the values that their owners set
    (prefer-no-eviction, priority, deletion cost), then by relief divided by the cost of the move. The cost is the work that is
    lost; it grows with the time since the last start."""
    pod = candidate.pod
    age_s = 0.0 if pod.status.start_time is None else max(now_s - parse_timestamp(pod.status.start_time), 0.0)
    restarts = sum(each.restart_count for each in pod.status.container_statuses or ())
    cost = (1 + min(age_s / AGE_SCALE_S, 1.0)) / (1 + min(restarts / RESTART_SCALE, 1.0))
    return (
        not candidate.parsed.is_reclaimed,
        PREFER_NO_EVICTION_KEY in pod.metadata.annotations,
        pod.spec.priority,
        _deletion_cost(pod),
        -gain / cost,
        pod.key,
    )


class DisruptionAllowances:
    """Evictions that PodDisruptionBudgets still allow, minus the evictions of the plan."""

    def __init__(self, budgets: Iterable[PodDisruptionBudget]) -> None:
        self._budgets: dict[str, list[tuple[LabelSelectorSet, PodDisruptionBudget]]] = {}
        self._planned: dict[str, int] = {}
        for budget in budgets:
            # Without a selector, unlike with an empty one, a budget of policy/v1 selects no pod.
            if budget.spec.selector is not None:
                selector = parse_label_selector("spec.selector", budget.spec.selector)
                self._budgets.setdefault(budget.metadata.namespace, []).append((selector, budget))

    def blocking(self, pod: MovablePod) -> str:
        """Return why the Eviction API would refuse a pod; empty if it would not."""
        budgets = self._of(pod)
        if len(budgets) > 1:
            return "it has more than one PodDisruptionBudget, which the Eviction API does not support"
        for budget in budgets:
            if budget.status.disruptions_allowed - self._planned.get(budget.metadata.uid, 0) < 1:
                return f"PodDisruptionBudget {budget.metadata.name} allows no disruption now"
        return ""

    def may_allow_later(self, pod: MovablePod) -> bool:
        """Return whether the budget of a pod allows an eviction while all its pods are healthy: it waits for a new pod in place
        of one that was evicted or failed."""
        budgets = self._of(pod)
        return len(budgets) == 1 and (
            budgets[0].status.disruptions_allowed > 0
            or budgets[0].status.expected_pods > budgets[0].status.desired_healthy
        )

    def take(self, pod: MovablePod) -> None:
        """Count the eviction of a pod."""
        for budget in self._of(pod):
            self._planned[budget.metadata.uid] = self._planned.get(budget.metadata.uid, 0) + 1

    def _of(self, pod: MovablePod) -> list[PodDisruptionBudget]:
        listed = self._budgets.get(pod.metadata.namespace, ())
        return [budget for selector, budget in listed if selector.matches(pod.metadata.labels)]


def _start_obstacle(pod: MovablePod, now_s: float) -> str:
    if pod.status.start_time is None or now_s - parse_timestamp(pod.status.start_time) < MIN_RUN_S:
        return _STARTED
    return ""


def _deletion_cost(pod: MovablePod) -> int:
    try:
        return int(pod.metadata.annotations.get(DELETION_COST_KEY, "0"))
    except ValueError:
        return 0  # as the ReplicaSet controller counts it


def _weight(basis: Amounts, column: int) -> float:
    return basis[column] or (DEFAULT_MILLICPU, DEFAULT_MEMORY_BYTES)[column]

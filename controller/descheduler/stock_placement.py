"""Rules of a placement that kube-scheduler's own plugins check, not the extender: requests of CPU and memory, number of pods,
taints, node selectors and node affinity. Pure, and with the meaning of kube-scheduler's plugins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from controller.descheduler.descheduler_kinds import MovablePod, NodeSelectorRequirement, NodeSelectorTerm
from controller.scheduler.qos_taints import HARD_EFFECTS
from controller.scheduler.scheduling_pod import Amounts

UNSCHEDULABLE_TAINT = "node.kubernetes.io/unschedulable"


class TargetNode(NamedTuple):
    """A node that may receive pods. `free` is CPU and memory that neither its pods nor pods planned on it request."""

    name: str
    labels: Mapping[str, str]
    taints: Sequence[Mapping[str, Any]]
    free: Amounts
    free_pods: int


def stock_obstacle(pod: MovablePod, native: Amounts, node: TargetNode) -> str:
    """Return why kube-scheduler would not place a pod on a node; empty if it would. `native` are its requests."""
    if node.free_pods < 1:
        return "it has its maximum number of pods"
    for name, requested, free in zip(("cpu", "memory"), native, node.free, strict=True):
        if requested and requested > free:
            return f"insufficient {name}"
    for taint in node.taints:
        key, value, effect = (str(taint.get(name) or "") for name in ("key", "value", "effect"))
        if effect in HARD_EFFECTS and not any(each.matches(key, value, effect) for each in pod.spec.tolerations or ()):
            return f"taint {key} is not tolerated"
    if not (pod.spec.node_selector or {}).items() <= node.labels.items():
        return "its labels do not match the nodeSelector"
    affinity = pod.spec.affinity
    if affinity is not None and affinity.node_affinity is not None and affinity.node_affinity.required is not None:
        terms = affinity.node_affinity.required.node_selector_terms or ()
        if not any(_matches_term(term, node) for term in terms):
            return "its labels do not match the node affinity"
    return ""


def is_unschedulable(taints: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether a node is cordoned. The node lifecycle controller of Kubernetes adds this taint with
    spec.unschedulable."""
    return any(taint.get("key") == UNSCHEDULABLE_TAINT for taint in taints)


def _matches_term(term: NodeSelectorTerm, node: TargetNode) -> bool:
    """Return whether all requirements of a term are met; a term without requirements matches no node (nodeaffinity.go)."""
    expressions, fields = term.match_expressions or (), term.match_fields or ()
    return bool(expressions or fields) and (
        all(_meets(each, node.labels) for each in expressions)
        and all(_meets(each, {"metadata.name": node.name}) for each in fields)
    )


def _meets(requirement: NodeSelectorRequirement, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(requirement.key), requirement.values or ()
    match requirement.operator:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt":
            if value is None or len(values) != 1:
                return False
            try:
                difference = int(value) - int(values[0])
            except ValueError:
                return False
            return difference > 0 if requirement.operator == "Gt" else difference < 0
    return False

"""What the API server has about reclaimed pods of each node: what the node offers, what is requested, used and harmed. Pure.
A CustomNodeResource has what the agent reported, usage at most a minute old; requests are those of the pods themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal

import msgspec

from agent.sensors.pods.koordinator_labels import BATCH_RESOURCES
from agent.sensors.pods.resource_quantities import MEMORY
from api.katalyst.harm import HARM_LIMITS, REPORT_EXPIRATION_S, worst_indicator
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from cli.fleet.reclaimed_pods import ClusterObjects, OfferingCnr, PlacedPod, parse_amount, parse_time_s

MILLI = 1000


class ReclaimedNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Reclaimed resources of one node; None stands for unknown. Units: cores, bytes, seconds, ratios."""

    allocatable_cores: float | None = None
    """CPU that reclaimed pods may request in total."""
    allocatable_bytes: int | None = None
    requested_cores: float | None = None
    requested_bytes: int | None = None
    used_cores: float | None = None
    """CPU that reclaimed pods used at the time of the report; None if the report is too old."""
    used_bytes: int | None = None
    pods: int | None = None
    """Reclaimed pods that have this node and have not ended."""
    harm: dict[str, float] = {}
    """Indicators of harm to online pods, by their names in the CustomNodeResource."""
    harm_share: float | None = None
    """Largest indicator divided by its limit, at which the scheduler by default scores 0; above 1 the limit is exceeded."""
    worst_indicator: str = ""
    report_age_s: float | None = None
    """Age of usage and indicators."""


def reclaimed_nodes(objects: ClusterObjects, now_s: float) -> dict[str, ReclaimedNode]:
    """Return the reclaimed resources of each node that has a CustomNodeResource, a Node or a pod; `now_s` is in seconds since
    the epoch."""
    cnrs = {cnr.metadata.name: cnr for cnr in objects.cnrs or ()}
    pods_by_node: dict[str, list[PlacedPod]] = {}
    for pod in objects.pods or ():
        if pod.spec.node_name and pod.is_reclaimed:
            pods_by_node.setdefault(pod.spec.node_name, []).append(pod)
    names = {*cnrs, *pods_by_node, *(node.metadata.name for node in objects.nodes or ())}
    return {
        name: _reclaimed_node(cnrs.get(name), None if objects.pods is None else pods_by_node.get(name, ()), now_s)
        for name in names
    }


def _reclaimed_node(cnr: OfferingCnr | None, pods: Iterable[PlacedPod] | None, now_s: float) -> ReclaimedNode:
    members = None if pods is None else tuple(pods)
    requested = None if members is None else _requested(members)
    offered: Mapping[str, object] = {} if cnr is None else cnr.allocatable
    age_s, usage, harm = _report(cnr, now_s)
    worst = worst_indicator(harm)
    return ReclaimedNode(
        allocatable_cores=float(parse_amount(offered[RECLAIMED_CPU]) / MILLI) if RECLAIMED_CPU in offered else None,
        allocatable_bytes=int(parse_amount(offered[RECLAIMED_MEMORY])) if RECLAIMED_MEMORY in offered else None,
        requested_cores=None if requested is None else float(requested[0] / MILLI),
        requested_bytes=None if requested is None else int(requested[1]),
        used_cores=float(parse_amount(usage["cpu"])) if "cpu" in usage else None,
        used_bytes=int(parse_amount(usage["memory"])) if "memory" in usage else None,
        pods=None if members is None else len(members),
        harm=harm,
        harm_share=None if worst is None else worst[1],
        worst_indicator="" if worst is None else worst[0],
        report_age_s=age_s,
    )


def _report(cnr: OfferingCnr | None, now_s: float) -> tuple[float | None, Mapping[str, object], dict[str, float]]:
    """Return the age of the report, the usage of reclaimed pods, and the indicators; without the latter two if it is too
    old."""
    if cnr is None or (reported_s := parse_time_s(cnr.metrics.update_time)) is None:
        return None, {}, {}
    age_s = max(now_s - reported_s, 0.0)
    if age_s > REPORT_EXPIRATION_S:
        return age_s, {}, {}
    node = cnr.metrics.node_metric
    generic = (None if node is None else node.generic_usage) or {}
    harm = {name: float(parse_amount(generic[name])) for name in HARM_LIMITS if name in generic}
    return age_s, cnr.reclaimed_usage, harm


def _requested(pods: Iterable[PlacedPod]) -> tuple[Decimal, Decimal]:
    """Return the requested thousandths of a CPU and bytes, of Katalyst's and of Koordinator's resources."""
    cpu = memory = Decimal(0)
    for pod in pods:
        for name, amount in pod.reclaimed_requests().items():
            if name == RECLAIMED_MEMORY or BATCH_RESOURCES.get(name) == MEMORY:
                memory += amount
            else:
                cpu += amount
    return cpu, memory

"""Summarizes what is wrong in a cluster: one row per problem with its nodes and the remedy. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from rich.table import Table

from api.diagnostics import DoctorReport
from api.interfaces import Unavailable
from api.quantity import format_count
from api.text import printable
from cli.fleet.agent_endpoints import FleetPod, pod_problem
from cli.fleet.api_server import AgentReply
from cli.fleet.pending_pods import PendingReason
from cli.tables import check_table, format_node_names
from exporters.page.health import HealthStatus

MAX_REASONS = 10
"""Reasons for pending pods that are printed; a queue of jobs can have one for each pod."""


class FleetFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One result of a check, and the nodes that have it."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    nodes: tuple[str, ...] = ()
    """Empty if the finding is not about nodes."""


def fleet_findings(
    health: Sequence[AgentReply[HealthStatus]],
    reports: Sequence[AgentReply[DoctorReport]],
    controllers: Sequence[FleetPod],
    kinds: str,
) -> list[FleetFinding]:
    """Return all findings: first the cluster's, then the nodes' with the most frequent problems first. `kinds` is why
    Katalyst's kinds are not served, or ""."""
    return [
        _controller_finding(controllers),
        _crd_finding(kinds),
        *_version_findings(reports),
        *_node_findings(health, reports),
    ]


def _controller_finding(pods: Sequence[FleetPod]) -> FleetFinding:
    ready = sum(pod.ready for pod in pods)
    detail = f"{ready} of {len(pods)} ready" if pods else "none runs"
    remedy = (
        "kubectl logs of a pod that is not ready shows why" if pods else "without it no configuration is rolled out"
    )
    for pod in pods:
        problem, command = pod_problem(pod)
        if problem:
            detail, remedy = f"{detail}; {pod.metadata.name}: {problem}", command
            break
    return FleetFinding(
        name="controller", ok=ready > 0, detail=detail, remedy="" if ready and ready == len(pods) else remedy
    )


def _crd_finding(reason: str) -> FleetFinding:
    return FleetFinding(
        name="custom resources", ok=not reason, detail=reason or "CustomNodeResource is served",
        remedy="apply deploy/crds" if reason else "",
    )  # fmt: skip


def _version_findings(reports: Sequence[AgentReply[DoctorReport]]) -> list[FleetFinding]:
    by_version: dict[str, list[str]] = {}
    for reply in reports:
        if reply.answer is not None:
            by_version.setdefault(reply.answer.version, []).append(reply.member.node)
    remedy = "an upgrade is in progress, or was not completed" if len(by_version) > 1 else ""
    return [
        FleetFinding(name="version", ok=True, detail=version, remedy=remedy, nodes=tuple(nodes))
        for version, nodes in sorted(by_version.items(), key=lambda item: -len(item[1]))
    ]


def _node_findings(
    health: Sequence[AgentReply[HealthStatus]], reports: Sequence[AgentReply[DoctorReport]]
) -> list[FleetFinding]:
    nodes_by_finding: dict[tuple[str, bool, str, str], list[str]] = {}

    def add(node: str, name: str, problem: str, remedy: str, *, ok: bool = False) -> None:
        nodes = nodes_by_finding.setdefault((name, ok, problem, remedy), [])
        if node not in nodes:
            nodes.append(node)

    for reply in health:
        node = reply.member.node
        if reply.answer is None:
            add(node, "agent", reply.problem, reply.remedy)
            continue
        add(node, "agent", "answers", "", ok=True)
        for failed in reply.answer.failed:
            add(node, f"source {failed.source}", failed.error, failed.remedy)
        if reply.member.restarts:
            add(node, "restarts", "the agent's pod was restarted", "kubectl logs --previous shows why", ok=True)
    answered = {reply.member.node for reply in health if reply.answer is not None}
    for report in reports:
        if report.answer is None and report.member.node in answered:
            add(report.member.node, "node", f"not checked: {report.problem}", report.remedy)
        for check in report.answer.checks if report.answer is not None else ():
            # Results that are the same on every node are of interest only if they have a remedy.
            if not check.ok or check.remedy:
                add(report.member.node, check.name, check.detail, check.remedy, ok=check.ok)
    rows = [
        FleetFinding(name=name, ok=ok, detail=detail, remedy=remedy, nodes=tuple(nodes))
        for (name, ok, detail, remedy), nodes in nodes_by_finding.items()
    ]
    return sorted(rows, key=lambda row: (row.ok, -len(row.nodes), row.name))


def pending_findings(pending: Sequence[PendingReason] | Unavailable) -> list[FleetFinding]:
    """Return a finding for each reason why reclaimed pods are Pending, or one finding that this could not be checked."""
    name = "pending pods"
    if isinstance(pending, Unavailable):
        detail = f"not checked: {pending.reason}"
        return [FleetFinding(name=name, ok=True, detail=detail, remedy=pending.remedy)]
    return [FleetFinding(name=name, ok=ok, detail=text, remedy=remedy) for ok, text, remedy in pending_texts(pending)]


def pending_texts(reasons: Sequence[PendingReason]) -> list[tuple[bool, str, str]]:
    """Return for each reason: whether waiting may help, the pods with the reason, and the remedy. After MAX_REASONS, one entry
    has the number of the others."""
    texts = [(reason.ok, _pending_text(reason), reason.remedy) for reason in reasons[:MAX_REASONS]]
    if others := reasons[MAX_REASONS:]:
        count = sum(len(reason.pods) for reason in others)
        text = f"and {len(others)} more, of {format_count(count, 'pod')}"
        remedy = "kubectl get pods -A --field-selector=status.phase=Pending lists them"
        texts.append((all(reason.ok for reason in others), text, remedy))
    return texts


def _pending_text(reason: PendingReason) -> str:
    """Return the pods and their reason as one sentence."""
    more = f" and {len(reason.pods) - 1} more" if len(reason.pods) > 1 else ""
    return f"{reason.pods[0]}{more}: {reason.detail}"


def findings_table(rows: Sequence[FleetFinding], nodes: int) -> Table:
    """Return the findings as a table."""
    cells = [(row.ok, (row.name, format_node_names(row.nodes, nodes), row.detail, row.remedy)) for row in rows]
    return check_table(
        ("what", "nodes", "found", "remedy"), [(ok, [printable(text) for text in texts]) for ok, texts in cells]
    )


def findings_summary(rows: Sequence[FleetFinding], nodes: int) -> str:
    """Return how many nodes lack something required."""
    affected = _nodes_of(row for row in rows if not row.ok)
    cluster = sum(not row.ok and not row.nodes for row in rows)
    text = (
        f"{len(affected)} of {nodes} nodes lack something that is needed"
        if affected
        else f"nodes: {nodes}; nothing that is needed is missing"
    )
    return f"{text}; {cluster} of the cluster's own parts" if cluster else text


def _nodes_of(rows: Iterable[FleetFinding]) -> set[str]:
    return {node for row in rows for node in row.nodes}

"""Summarizes what is wrong in a cluster: one row per problem with its nodes and the remedy. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from rich.table import Table
from rich.text import Text

from api.diagnostics import DoctorReport
from cli import formats
from cli.fleet.agent_endpoints import FleetPod, pod_problem
from cli.fleet.api_server import AgentReply
from cli.tables import format_node_names
from exporters.page.health import HealthStatus


class FleetFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing, good or not, and where it is so."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    nodes: tuple[str, ...] = ()
    """Empty of what is not about nodes."""


def fleet_findings(
    health: Sequence[AgentReply[HealthStatus]],
    reports: Sequence[AgentReply[DoctorReport]],
    controllers: Sequence[FleetPod],
    kinds: str,
) -> list[FleetFinding]:
    """Everything, the cluster's first, then what is wrong on most nodes. `kinds` is why Katalyst's kinds are not there."""
    return [
        _controller_finding(controllers),
        _crd_finding(kinds),
        *_version_findings(reports),
        *_node_findings(health, reports),
    ]


def _controller_finding(pods: Sequence[FleetPod]) -> FleetFinding:
    ready = sum(pod.ready for pod in pods)
    said = f"{ready} of {len(pods)} ready" if pods else "none runs"
    remedy = "kubectl logs of a pod that is not ready says why" if pods else "without it no configuration is rolled out"
    for pod in pods:
        problem, look = pod_problem(pod)
        if problem:
            said, remedy = f"{said}; {pod.metadata.name}: {problem}", look
            break
    return FleetFinding(
        name="controller", ok=ready > 0, detail=said, remedy="" if ready and ready == len(pods) else remedy
    )


def _crd_finding(why: str) -> FleetFinding:
    return FleetFinding(
        name="custom resources", ok=not why, detail=why or "CustomNodeResource is served",
        remedy="apply deploy/crds" if why else "",
    )  # fmt: skip


def _version_findings(found: Sequence[AgentReply[DoctorReport]]) -> list[FleetFinding]:
    by_version: dict[str, list[str]] = {}
    for told in found:
        if told.answer is not None:
            by_version.setdefault(told.answer.version, []).append(told.member.node)
    remedy = "an upgrade is under way, or was left half done" if len(by_version) > 1 else ""
    return [
        FleetFinding(name="version", ok=True, detail=version, remedy=remedy, nodes=tuple(nodes))
        for version, nodes in sorted(by_version.items(), key=lambda one: -len(one[1]))
    ]


def _node_findings(
    health: Sequence[AgentReply[HealthStatus]], found: Sequence[AgentReply[DoctorReport]]
) -> list[FleetFinding]:
    having: dict[tuple[str, bool, str, str], list[str]] = {}

    def add(node: str, name: str, problem: str, remedy: str, *, ok: bool = False) -> None:
        nodes = having.setdefault((name, ok, problem, remedy), [])
        if node not in nodes:
            nodes.append(node)

    for told in health:
        node = told.member.node
        if told.answer is None:
            add(node, "agent", told.problem, told.remedy)
            continue
        add(node, "agent", "answers", "", ok=True)
        for failed in told.answer.failed:
            add(node, f"source {failed.source}", failed.error, failed.remedy)
        if told.member.restarts:
            add(node, "restarts", "the agent's pod was restarted", "kubectl logs --previous says why", ok=True)
    answered = {told.member.node for told in health if told.answer is not None}
    for each in found:
        if each.answer is None and each.member.node in answered:
            add(each.member.node, "node", f"not looked at: {each.problem}", each.remedy)
        for check in each.answer.checks if each.answer is not None else ():
            # What every node has is no news, and what makes it better is told where it is missing.
            if not check.ok or check.remedy:
                add(each.member.node, check.name, check.detail, check.remedy, ok=check.ok)
    rows = [
        FleetFinding(name=name, ok=ok, detail=detail, remedy=remedy, nodes=tuple(nodes))
        for (name, ok, detail, remedy), nodes in having.items()
    ]
    return sorted(rows, key=lambda row: (row.ok, -len(row.nodes), row.name))


def findings_table(rows: Sequence[FleetFinding], nodes: int) -> Table:
    """For people; the sentence with the sum is `summary`."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "what", "nodes", "found", "remedy"):
        table.add_column(column, overflow="fold")
    for row in rows:
        mark = Text("no", "bold red") if not row.ok else Text("-", "dim") if row.remedy else Text("ok", "green")
        where = format_node_names([formats.printable(node) for node in row.nodes], nodes)
        told = (row.name, where, row.detail, row.remedy)
        table.add_row(mark, *(Text(formats.printable(cell)) for cell in told))
    return table


def findings_summary(rows: Sequence[FleetFinding], nodes: int) -> str:
    """How many nodes have nothing wrong."""
    unwell = _nodes_of(row for row in rows if not row.ok)
    cluster = sum(not row.ok and not row.nodes for row in rows)
    said = (
        f"{len(unwell)} of {nodes} nodes lack something that is needed"
        if unwell
        else f"nodes: {nodes}; nothing that is needed is missing"
    )
    return f"{said}; {cluster} of the cluster's own parts" if cluster else said


def _nodes_of(rows: Iterable[FleetFinding]) -> set[str]:
    return {node for row in rows for node in row.nodes}

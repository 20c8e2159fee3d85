"""The `kubectl dioptase` plugin: top, value, explain, config, doctor and page for the nodes of a cluster.
It must import no Linux-only module and no server library: it runs on a workstation (see the import-linter contract).
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from typing import TypeVar

import click
import msgspec

from api.decision import JournalEntry
from api.diagnostics import DoctorReport, EffectiveConfiguration
from api.eviction import EvictionEntry
from api.interfaces import Unavailable
from api.snapshot import Snapshot
from api.text import printable, quote, to_json
from cli.colocation_report import NodeTotals, fleet_report
from cli.explain.command import ExplainInputs, has_data, print_explanation
from cli.fleet import findings, node_table, placements, settings
from cli.fleet.agent_endpoints import AgentEndpoint
from cli.fleet.api_server import (
    AgentProxy,
    AgentReply,
    ApiServerOptions,
    api_server_options,
    find_fleet,
    list_controller_pods,
    print_lines,
)
from cli.fleet.pending_pods import PendingReason, list_pending_reasons, pending_reason_of
from cli.fleet.placements import latest_placements, pending_table, placement_table
from cli.fleet.reclaimed_nodes import reclaimed_nodes
from cli.fleet.reclaimed_pods import ClusterObjects, list_cluster_objects
from cli.main import OutputGuardGroup
from cli.tables import print_table, terminal_width
from exporters.page.health import HealthStatus
from exporters.view.cycle_view import View
from kube.client import KubeClient
from kube.errors import ApiUnreachable

CNR_API_PATH = "/apis/node.katalyst.kubewharf.io/v1alpha1"
"""API path of CustomNodeResources; every authenticated user may read it (system:discovery)."""
MAX_ENTRIES = 2000
T = TypeVar("T")


@click.group(cls=OutputGuardGroup, context_settings={"help_option_names": ["-h", "--help"]})
@api_server_options
def kubectl(server: ApiServerOptions) -> None:
    """Show all nodes of a cluster at once: reclaimable CPU, interference, settings of the agents and what they lack.

    Requires the rights to list pods and nodes, and to `get` pods/proxy in the agents' namespace. Options may stand before or
    after the command.
    """


def main() -> None:
    """Run the plugin as kubectl does."""
    kubectl.main(prog_name="kubectl dioptase")


@kubectl.command()
@click.argument("what", type=click.Choice(["nodes", "node", "pods", "pod", "pending", "placements"]), default="nodes")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@api_server_options
@click.option(
    "--sort-by",
    type=click.Choice(["name", "cpu", "lent", "memory", "wait", "harm"]),
    default="name",
    show_default=True,
    help="Show the largest first; lent sorts nodes only, memory pods only.",
)
@click.option("--wide", is_flag=True, help="Show all columns of nodes, also those that do not fit into the terminal.")
def top(what: str, names: tuple[str, ...], server: ApiServerOptions, sort_by: str, *, wide: bool) -> None:
    """Show reclaimable and used CPU, harm to online pods and state of the agent for every node, then reclaimed pods that wait
    for a node, and those that got one last.

    With pods: every managed pod. With pending or placements: all of the sections below the table of nodes. The NAME of a
    pod may be prefixed with its namespace and a slash.

    HEADROOM is the CPU that reclaimed pods may request, REQ what they request; MEMORY and MEM-REQ are the same for memory.
    PODS counts reclaimed pods. HARM% is the largest indicator of harm as a share of the limit at which the scheduler avoids the
    node. HARM is the time that online tasks wait for a CPU held by reclaimed pods, in milliseconds a second, and WAIT the
    run-queue latency p99 of the worst online container, both since the agent's previous cycle. CORE-HOURS is the CPU time that
    reclaimed pods used since the first agent ran on the node (see kubectl dioptase value).
    """
    if what in ("pending", "placements"):
        sys.exit(_top_section(what, names, server))
    of_nodes = what.startswith("node")
    if sort_by not in (node_table.NODE_SORTS if of_nodes else node_table.POD_SORTS):
        raise click.UsageError(f"--sort-by {sort_by} does not apply to {what}")
    if of_nodes:
        sys.exit(_top_nodes(names, server, sort_by, wide=wide))

    async def question(_client: KubeClient, proxy: AgentProxy, members: list[AgentEndpoint]) -> list[AgentReply[View]]:
        return await proxy.request_all(members, "/api/v1/view", View)

    replies = server.ask("top", question)
    pods = sorted(
        (row for reply in replies for row in node_table.pod_rows(reply, names)), key=node_table.POD_SORTS[sort_by]
    )
    print_lines([to_json(pods).decode()] if server.as_json else node_table.pod_table(pods))
    for reply in replies:
        if reply.answer is None:
            click.echo(printable(f"✕ {reply.member.node}: {reply.problem}"), err=True)
    sys.exit(0 if any(reply.answer is not None for reply in replies) else 1)


def _top_nodes(names: tuple[str, ...], server: ApiServerOptions, sort_by: str, *, wide: bool) -> int:
    """Print the nodes, and below them pending pods and placements; return the exit status."""

    server = _select_nodes(server, names) if names else server
    is_selected = bool(server.chosen.labels or server.chosen.nodes)

    async def question(
        client: KubeClient, proxy: AgentProxy, members: list[AgentEndpoint]
    ) -> tuple[list[AgentReply[View]], ClusterObjects]:
        nodes = [member.node for member in members] if is_selected else None
        return await asyncio.gather(
            proxy.request_all(members, "/api/v1/view", View), list_cluster_objects(client, nodes)
        )

    replies, objects = server.ask("top", question)
    now_s = time.time()
    reclaimed = reclaimed_nodes(objects, now_s)
    rows = sorted((node_table.node_row(reply, reclaimed) for reply in replies), key=node_table.NODE_SORTS[sort_by])
    status = 0 if any(reply.answer is not None for reply in replies) else 1
    if server.as_json:
        print_lines([to_json(rows).decode()])
        return status
    width = terminal_width()
    print_lines(node_table.node_table(rows, None if wide else width))
    nodes = {reply.member.node for reply in replies} if is_selected else None
    # A pending pod belongs to no node, so a selection of nodes excludes it.
    print_lines(placements.overview_lines(objects, nodes, now_s, width, with_pending=not is_selected))
    return status


def _top_section(what: str, names: tuple[str, ...], server: ApiServerOptions) -> int:
    """Print all pending pods, or the latest placements; return the exit status. `names` are nodes of placements."""
    if what == "pending" and names:
        raise click.UsageError("pending pods have no node: leave out the names")

    async def question(client: KubeClient, _proxy: AgentProxy, _members: list[AgentEndpoint]) -> ClusterObjects:
        objects = await list_cluster_objects(client)
        if objects.pods is None:
            raise Unavailable(objects.problem, objects.remedy)
        return objects

    objects, now_s = server.ask("top", question), time.time()
    if what == "pending":
        reasons = placements.pending_of(objects, now_s)
        lines = [to_json(reasons).decode()] if server.as_json else pending_table(reasons, now_s, terminal_width())
    else:
        latest = latest_placements(objects.pods or (), set(names) or None)[:MAX_ENTRIES]
        lines = [to_json(latest).decode()] if server.as_json else placement_table(latest, now_s)
    print_lines(lines)
    return 0


@kubectl.command()
@click.argument("names", nargs=-1, metavar="[NODE]...")
@api_server_options
def value(names: tuple[str, ...], server: ApiServerOptions) -> None:
    """Show gain and cost of colocation for each node and for all nodes together: core-hours lent to reclaimed pods and used by
    them, run-queue latency of online pods with and without batch work, CPU reductions and evictions of reclaimed pods."""

    async def question(_client: KubeClient, proxy: AgentProxy, members: list[AgentEndpoint]) -> list[AgentReply[View]]:
        return await proxy.request_all(members, "/api/v1/view", View)

    replies = (_select_nodes(server, names) if names else server).ask("value", question)
    nodes = [
        NodeTotals(node=reply.member.node, problem=reply.problem)
        if reply.answer is None
        else NodeTotals(node=reply.member.node, act=reply.answer.act, totals=reply.answer.totals)
        for reply in replies
    ]
    print_lines([to_json(nodes).decode()] if server.as_json else fleet_report(nodes))
    sys.exit(0 if any(reply.answer is not None for reply in replies) else 1)


@kubectl.command()
@click.argument("node")
@click.argument("target", required=False, metavar="[POD|CGROUP|KNOB|POOL|REGION|PLUGIN|memory|#EVENT]")
@api_server_options
def explain(node: str, target: str | None, server: ApiServerOptions) -> None:
    """Explain a knob, pod, pool or memory of NODE, as `dioptase explain` does on that node.

    A reclaimed pod that is Pending is on no node. The command then explains why the pod is Pending; NODE may be any node.
    """

    async def question(
        client: KubeClient, proxy: AgentProxy, members: list[AgentEndpoint]
    ) -> ExplainInputs | PendingReason:
        inputs = await _fetch_agent_data(proxy, members[0])
        if target is None or has_data(target, inputs):
            return inputs
        return pending_reason_of(target, await _pending_reasons(client)) or inputs

    answer = _select_nodes(server, (node,)).ask("explain", question)
    if not isinstance(answer, PendingReason):
        sys.exit(print_explanation(target, answer, as_json=server.as_json))
    text = f"{target} is Pending: {answer.detail.rstrip('.')}.", f"  remedy: {answer.remedy}"
    print_lines([to_json(answer).decode()] if server.as_json else [printable(line) for line in text])


async def _fetch_agent_data(proxy: AgentProxy, member: AgentEndpoint) -> ExplainInputs:
    async def fetch(path: str, kind: type[T]) -> T:
        reply = await proxy.request_one(member, f"/api/v1/{path}", kind)
        if reply.answer is None:
            raise Unavailable(
                f"{member.node}: {reply.problem}", reply.remedy or "kubectl dioptase doctor lists the causes"
            )
        return reply.answer

    # One after the other, because cycles continue meanwhile: decisions must not be older than the data that they came from.
    view, snapshot = await fetch("view", View), await fetch("snapshot", Snapshot)
    entries = await fetch(f"decisions?limit={MAX_ENTRIES}", list[JournalEntry])
    evicted = [] if view.evictions is None else await fetch(f"evictions?limit={MAX_ENTRIES}", list[EvictionEntry])
    return view, snapshot, entries, evicted


@kubectl.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@api_server_options
@click.option("--differing", is_flag=True, help="Show only settings that differ between nodes.")
def config(names: tuple[str, ...], server: ApiServerOptions, *, differing: bool) -> None:
    """Show every setting, its value and its source; if nodes differ, each value with its nodes.

    A NAME is a setting or a group of settings, such as advisor.headroom.
    """

    async def question(
        _client: KubeClient, proxy: AgentProxy, members: list[AgentEndpoint]
    ) -> list[AgentReply[EffectiveConfiguration]]:
        return await proxy.request_all(members, "/api/v1/config", EffectiveConfiguration)

    replies = server.ask("config", question)
    fleet = settings.compare_settings(replies, names, differing=differing)
    if names and fleet.nodes and not settings.compare_settings(replies, names).settings:
        raise click.UsageError(f"there is no setting {quote(names[0])}; without a name all are listed")
    print_lines(
        [to_json(fleet).decode()]
        if server.as_json
        else list(settings.settings_lines(fleet, time.time_ns(), differing=differing))
    )
    sys.exit(0 if fleet.nodes else 1)


@kubectl.command()
@api_server_options
def doctor(server: ApiServerOptions) -> None:
    """List what is wrong, with the nodes and the remedy. Exit status 1 if something required is missing on any node."""

    async def question(
        client: KubeClient, proxy: AgentProxy, members: list[AgentEndpoint]
    ) -> tuple[int, list[findings.FleetFinding]]:
        # The controllers run in the namespace of the agents.
        place = next((member.namespace for member in members if member.namespace), server.chosen.namespace)
        # Fetch the reports first: they show which agents require a token. Without one, /healthz of these has no details.
        reports = await proxy.request_all(members, "/api/v1/doctor", DoctorReport)
        health = await proxy.request_all(members, "/healthz", HealthStatus)
        pods, kinds = await asyncio.gather(list_controller_pods(client, place), _missing_crds_reason(client))
        rows = findings.fleet_findings(health, reports, pods, kinds)
        if not server.chosen.labels and not server.chosen.nodes:
            # A pending pod belongs to no node, so a selection of nodes excludes it.
            rows += findings.pending_findings(await _pending_reasons(client))
        return len(members), rows

    nodes, rows = server.ask("doctor", question)
    if server.as_json:
        print_lines([to_json(rows).decode()])
    else:
        print_table(findings.findings_table(rows, nodes))
        print_lines(["", findings.findings_summary(rows, nodes)])
    sys.exit(0 if all(row.ok for row in rows) else 1)


@kubectl.command()
@click.argument("node")
@api_server_options
def page(node: str, server: ApiServerOptions) -> None:
    """Serve the page of NODE's agent on this machine until Ctrl-C, to local users only; prints the URL."""

    only = _select_nodes(server, (node,))

    async def question(client: KubeClient, proxy: AgentProxy, members: list[AgentEndpoint]) -> None:
        # No other command needs an HTTP server.
        from cli.fleet.page_proxy import PageProxy, serve_page  # noqa: PLC0415

        async def find() -> AgentEndpoint:
            return (await find_fleet(client, only.chosen))[0]

        await serve_page(
            PageProxy(proxy, members[0], find),
            lambda url: click.echo(f"{url} shows {printable(node)}; Ctrl-C ends it"),
        )

    with suppress(KeyboardInterrupt):
        only.ask("page", question)


async def _pending_reasons(client: KubeClient) -> tuple[PendingReason, ...] | Unavailable:
    """Return why reclaimed pods are Pending, or why this could not be checked."""
    try:
        return await list_pending_reasons(client, time.time())
    except Unavailable as error:
        return error


async def _missing_crds_reason(client: KubeClient) -> str:
    """Return why Katalyst's kinds are not served; "" if they are, or if the user has no right to see it."""
    try:
        raw = await client.raw(CNR_API_PATH, "apis")
    except ApiUnreachable as error:
        return str(error)
    return "the API server has no CustomNodeResource" if raw.status == 404 else ""


def _select_nodes(server: ApiServerOptions, nodes: tuple[str, ...]) -> ApiServerOptions:
    return msgspec.structs.replace(server, chosen=msgspec.structs.replace(server.chosen, nodes=nodes))


if __name__ == "__main__":
    main()

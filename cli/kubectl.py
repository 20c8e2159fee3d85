"""The `kubectl dioptase` plugin: top, explain, config, doctor and page for the nodes of a cluster.
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
from api.text import to_json
from cli import formats
from cli.explain.command import ExplainInputs, print_explanation
from cli.fleet import findings, node_table, settings
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
from cli.main import OutputGuardGroup
from cli.tables import print_table
from exporters.page.health import HealthStatus
from exporters.view.cycle_view import View
from kube.client import KubeClient
from kube.errors import ApiUnreachable

CNR_API_PATH = "/apis/node.katalyst.kubewharf.io/v1alpha1"
"""Where CustomNodeResources are, which whoever is logged in may look at."""
MAX_ENTRIES = 2000
T = TypeVar("T")


@click.group(cls=OutputGuardGroup, context_settings={"help_option_names": ["-h", "--help"]})
@api_server_options
def kubectl(door: ApiServerOptions) -> None:
    """Look at all nodes of a cluster at once: what is lent, what it costs whom, how agents are set and what they lack.

    To list pods and nodes, and to `get` pods/proxy in the agents' namespace, is what it takes. Options may stand before or
    after the command.
    """


def main() -> None:
    """What kubectl runs."""
    kubectl.main(prog_name="kubectl dioptase")


@kubectl.command()
@click.argument("what", type=click.Choice(["nodes", "node", "pods", "pod"]), default="nodes")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@api_server_options
@click.option(
    "--sort-by",
    type=click.Choice(["name", "cpu", "lent", "memory", "wait", "harm"]),
    default="name",
    show_default=True,
    help="The largest first; lent is of nodes, memory of pods.",
)
def top(what: str, names: tuple[str, ...], door: ApiServerOptions, sort_by: str) -> None:
    """What every node lends and who uses it, what online pods wait for it, and what the agents do; or the same of pods.

    HARM is for how many milliseconds of every second online tasks wait for a CPU that reclaimed pods have. A NAME of a pod
    may have its namespace and a slash before it.
    """
    of_nodes = what.startswith("node")
    if sort_by not in (node_table.NODE_SORTS if of_nodes else node_table.POD_SORTS):
        raise click.UsageError(f"--sort-by {sort_by} is not known of {what}")
    if of_nodes and names:
        door = _select_nodes(door, names)

    async def question(_client: KubeClient, asker: AgentProxy, members: list[AgentEndpoint]) -> list[AgentReply[View]]:
        return await asker.all(members, "/api/v1/view", View)

    told = door.ask("top", question)
    if of_nodes:
        found = sorted((node_table.node_row(one) for one in told), key=node_table.NODE_SORTS[sort_by])
        print_lines([to_json(found).decode()] if door.as_json else node_table.node_table(found))
    else:
        pods = sorted(
            (row for one in told for row in node_table.pod_rows(one, names)), key=node_table.POD_SORTS[sort_by]
        )
        print_lines([to_json(pods).decode()] if door.as_json else node_table.pod_table(pods))
        for one in told:
            if one.answer is None:
                click.echo(formats.printable(f"✕ {one.member.node}: {one.problem}"), err=True)
    sys.exit(0 if any(one.answer is not None for one in told) else 1)


@kubectl.command()
@click.argument("node")
@click.argument("target", required=False, metavar="[POD|CGROUP|KNOB|POOL|REGION|PLUGIN|memory|#EVENT]")
@api_server_options
def explain(node: str, target: str | None, door: ApiServerOptions) -> None:
    """Say why a knob, pod, pool or memory of NODE is what it is, as `dioptase explain` does there."""

    async def question(_client: KubeClient, asker: AgentProxy, members: list[AgentEndpoint]) -> ExplainInputs:
        return await _fetch_agent_data(asker, members[0])

    sys.exit(print_explanation(target, _select_nodes(door, (node,)).ask("explain", question), as_json=door.as_json))


async def _fetch_agent_data(asker: AgentProxy, member: AgentEndpoint) -> ExplainInputs:
    async def asked(path: str, kind: type[T]) -> T:
        told = await asker.one(member, f"/api/v1/{path}", kind)
        if told.answer is None:
            raise Unavailable(f"{member.node}: {told.problem}", told.remedy or "kubectl dioptase doctor tells more")
        return told.answer

    # One after the other, as the round goes on meanwhile: what was decided is as new as what it was decided from.
    view, snapshot = await asked("view", View), await asked("snapshot", Snapshot)
    entries = await asked(f"decisions?limit={MAX_ENTRIES}", list[JournalEntry])
    evicted = [] if view.evictions is None else await asked(f"evictions?limit={MAX_ENTRIES}", list[EvictionEntry])
    return view, snapshot, entries, evicted


@kubectl.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@api_server_options
@click.option("--differing", is_flag=True, help="Only settings that are not the same on all nodes.")
def config(names: tuple[str, ...], door: ApiServerOptions, *, differing: bool) -> None:
    """Every setting, its value and where that came from; where nodes differ, each value with its nodes.

    A NAME is a setting or a part of them, such as advisor.headroom.
    """

    async def question(
        _client: KubeClient, asker: AgentProxy, members: list[AgentEndpoint]
    ) -> list[AgentReply[EffectiveConfiguration]]:
        return await asker.all(members, "/api/v1/config", EffectiveConfiguration)

    told = door.ask("config", question)
    fleet = settings.compare_settings(told, names, differing=differing)
    if names and fleet.nodes and not settings.compare_settings(told, names).settings:
        raise click.UsageError(f"there is no setting {names[0]!r:.80}; without a name all are listed")
    print_lines(
        [to_json(fleet).decode()]
        if door.as_json
        else list(settings.settings_lines(fleet, time.time_ns(), differing=differing))
    )
    sys.exit(0 if fleet.nodes else 1)


@kubectl.command()
@api_server_options
def doctor(door: ApiServerOptions) -> None:
    """What is wrong, each with its nodes and the remedy. Exit status 1 if something that is needed is missing anywhere."""

    async def question(
        client: KubeClient, asker: AgentProxy, members: list[AgentEndpoint]
    ) -> tuple[int, list[findings.FleetFinding]]:
        # The controllers are where the agents are.
        place = next((member.namespace for member in members if member.namespace), door.chosen.namespace)
        # This one first: it shows which agents want a token, of whom health alone would tell others too little.
        found = await asker.all(members, "/api/v1/doctor", DoctorReport)
        health = await asker.all(members, "/healthz", HealthStatus)
        pods, kinds = await asyncio.gather(list_controller_pods(client, place), _missing_crds_reason(client))
        return len(members), findings.fleet_findings(health, found, pods, kinds)

    nodes, found = door.ask("doctor", question)
    if door.as_json:
        print_lines([to_json(found).decode()])
    else:
        print_table(findings.findings_table(found, nodes))
        print_lines(["", findings.findings_summary(found, nodes)])
    sys.exit(0 if all(one.ok for one in found) else 1)


@kubectl.command()
@click.argument("node")
@api_server_options
def page(node: str, door: ApiServerOptions) -> None:
    """Serve the page of NODE's agent on this machine until Ctrl-C, to whoever is logged in here; prints where."""

    only = _select_nodes(door, (node,))

    async def question(client: KubeClient, asker: AgentProxy, members: list[AgentEndpoint]) -> None:
        # Nobody else needs an HTTP server.
        from cli.fleet.page_proxy import PageProxy, serve_page  # noqa: PLC0415

        async def find() -> AgentEndpoint:
            return (await find_fleet(client, only.chosen))[0]

        await serve_page(
            PageProxy(asker, members[0], find),
            lambda url: click.echo(f"{url} shows {formats.printable(node)}; Ctrl-C ends it"),
        )

    with suppress(KeyboardInterrupt):
        only.ask("page", question)


async def _missing_crds_reason(client: KubeClient) -> str:
    """Why Katalyst's kinds are not served; empty where they are, and where this person may not know."""
    try:
        raw = await client.raw(CNR_API_PATH, "apis")
    except ApiUnreachable as error:
        return str(error)
    return "the API server has no CustomNodeResource" if raw.status == 404 else ""


def _select_nodes(door: ApiServerOptions, nodes: tuple[str, ...]) -> ApiServerOptions:
    return msgspec.structs.replace(door, chosen=msgspec.structs.replace(door.chosen, nodes=nodes))


if __name__ == "__main__":
    main()

"""`kubectl dioptase`: top, explain, config and doctor for all nodes of a cluster, and the page of one, through its API server.

kubectl runs the program `kubectl-dioptase` that it finds on PATH; `dioptase kubectl` is the same. The agents are asked
what `dioptase top` and its siblings ask of one, all at once; one that cannot be reached is a row with the reason.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from typing import TypeVar

import click
import msgspec

from api.checks import Findings
from api.configuration import Configuration
from api.decisions import JournalEntry
from api.evictions import EvictionEntry
from api.ports import Unavailable
from api.samples import Snapshot
from api.text import to_json
from cli import explain as one_node
from cli import words
from cli.fleet import findings, rows, settings
from cli.fleet.asking import Asker, Told, controllers, fleet_of
from cli.fleet.door import Door, options, show
from cli.fleet.members import Member
from cli.main import Careful
from cli.tables import print_table
from exporters.health import Health
from exporters.view import View
from kube.client import Client
from kube.errors import Unreachable

REPORTS = "/apis/node.katalyst.kubewharf.io/v1alpha1"
"""Where CustomNodeResources are, which whoever is logged in may look at."""
MOST_ENTRIES = 2000
T = TypeVar("T")


@click.group(cls=Careful, context_settings={"help_option_names": ["-h", "--help"]})
@options
def kubectl(door: Door) -> None:
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
@options
@click.option(
    "--sort-by",
    type=click.Choice(["name", "cpu", "lent", "memory", "wait", "harm"]),
    default="name",
    show_default=True,
    help="The largest first; lent is of nodes, memory of pods.",
)
def top(what: str, names: tuple[str, ...], door: Door, sort_by: str) -> None:
    """What every node lends and who uses it, what online pods wait for it, and what the agents do; or the same of pods.

    HARM is for how many milliseconds of every second online tasks wait for a CPU that reclaimed pods have. A NAME of a pod
    may have its namespace and a slash before it.
    """
    of_nodes = what.startswith("node")
    if sort_by not in (rows.NODE_SORTS if of_nodes else rows.POD_SORTS):
        raise click.UsageError(f"--sort-by {sort_by} is not known of {what}")
    if of_nodes and names:
        door = _only(door, names)

    async def question(_client: Client, asker: Asker, members: list[Member]) -> list[Told[View]]:
        return await asker.all(members, "/api/v1/view", View)

    told = door.ask("top", question)
    if of_nodes:
        found = sorted((rows.node_row(one) for one in told), key=rows.NODE_SORTS[sort_by])
        show([to_json(found).decode()] if door.as_json else rows.nodes_text(found))
    else:
        pods = sorted((row for one in told for row in rows.pod_rows(one, names)), key=rows.POD_SORTS[sort_by])
        show([to_json(pods).decode()] if door.as_json else rows.pods_text(pods))
        for one in told:
            if one.answer is None:
                click.echo(words.clean(f"✕ {one.member.node}: {one.problem}"), err=True)
    sys.exit(0 if any(one.answer is not None for one in told) else 1)


@kubectl.command()
@click.argument("node")
@click.argument("target", required=False, metavar="[POD|CGROUP|KNOB|POOL|REGION|PLUGIN|memory|#EVENT]")
@options
def explain(node: str, target: str | None, door: Door) -> None:
    """Say why a knob, pod, pool or memory of NODE is what it is, as `dioptase explain` does there."""

    async def question(_client: Client, asker: Asker, members: list[Member]) -> one_node.Told:
        return await _all_of(asker, members[0])

    sys.exit(one_node.tell(target, _only(door, (node,)).ask("explain", question), as_json=door.as_json))


async def _all_of(asker: Asker, member: Member) -> one_node.Told:
    async def asked(path: str, kind: type[T]) -> T:
        told = await asker.one(member, f"/api/v1/{path}", kind)
        if told.answer is None:
            raise Unavailable(f"{member.node}: {told.problem}", told.remedy or "kubectl dioptase doctor tells more")
        return told.answer

    # One after the other, as the round goes on meanwhile: what was decided is as new as what it was decided from.
    view, snapshot = await asked("view", View), await asked("snapshot", Snapshot)
    entries = await asked(f"decisions?limit={MOST_ENTRIES}", list[JournalEntry])
    evicted = [] if view.evictions is None else await asked(f"evictions?limit={MOST_ENTRIES}", list[EvictionEntry])
    return view, snapshot, entries, evicted


@kubectl.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@options
@click.option("--differing", is_flag=True, help="Only settings that are not the same on all nodes.")
def config(names: tuple[str, ...], door: Door, *, differing: bool) -> None:
    """Every setting, its value and where that came from; where nodes differ, each value with its nodes.

    A NAME is a setting or a part of them, such as advisor.headroom.
    """

    async def question(_client: Client, asker: Asker, members: list[Member]) -> list[Told[Configuration]]:
        return await asker.all(members, "/api/v1/config", Configuration)

    told = door.ask("config", question)
    fleet = settings.compare(told, names, differing=differing)
    if names and fleet.nodes and not settings.compare(told, names).settings:
        raise click.UsageError(f"there is no setting {names[0]!r:.80}; without a name all are listed")
    show([to_json(fleet).decode()] if door.as_json else list(settings.text(fleet, time.time_ns(), differing=differing)))
    sys.exit(0 if fleet.nodes else 1)


@kubectl.command()
@options
def doctor(door: Door) -> None:
    """What is wrong, each with its nodes and the remedy. Exit status 1 if something that is needed is missing anywhere."""

    async def question(client: Client, asker: Asker, members: list[Member]) -> tuple[int, list[findings.Finding]]:
        # The controllers are where the agents are.
        place = next((member.namespace for member in members if member.namespace), door.chosen.namespace)
        # This one first: it shows which agents want a token, of whom health alone would tell others too little.
        found = await asker.all(members, "/api/v1/doctor", Findings)
        health = await asker.all(members, "/healthz", Health)
        pods, kinds = await asyncio.gather(controllers(client, place), _kinds(client))
        return len(members), findings.findings(health, found, pods, kinds)

    nodes, found = door.ask("doctor", question)
    if door.as_json:
        show([to_json(found).decode()])
    else:
        print_table(findings.text(found, nodes))
        show(["", findings.summary(found, nodes)])
    sys.exit(0 if all(one.ok for one in found) else 1)


@kubectl.command()
@click.argument("node")
@options
def page(node: str, door: Door) -> None:
    """Serve the page of NODE's agent on this machine until Ctrl-C, to whoever is logged in here; prints where."""

    only = _only(door, (node,))

    async def question(client: Client, asker: Asker, members: list[Member]) -> None:
        # Nobody else needs an HTTP server.
        from cli.fleet.page import Page, serve  # noqa: PLC0415

        async def find() -> Member:
            return (await fleet_of(client, only.chosen))[0]

        await serve(
            Page(asker, members[0], find), lambda url: click.echo(f"{url} shows {words.clean(node)}; Ctrl-C ends it")
        )

    with suppress(KeyboardInterrupt):
        only.ask("page", question)


async def _kinds(client: Client) -> str:
    """Why Katalyst's kinds are not served; empty where they are, and where this person may not know."""
    try:
        raw = await client.raw(REPORTS, "apis")
    except Unreachable as error:
        return str(error)
    return "the API server has no CustomNodeResource" if raw.status == 404 else ""


def _only(door: Door, nodes: tuple[str, ...]) -> Door:
    return msgspec.structs.replace(door, chosen=msgspec.structs.replace(door.chosen, nodes=nodes))


if __name__ == "__main__":
    main()

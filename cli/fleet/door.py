"""The options that kubectl's users expect, and the API server that they mean."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from agent.sense.documents import check
from api import VERSION
from api.ports import Unavailable
from cli import words
from cli.fleet.asking import ACCOUNT, Asker, Chosen, fleet_of
from cli.fleet.members import Member
from cli.options import Seconds
from kube.client import Client
from kube.config import find, kubeconfig, usual
from kube.credentials import Access

TIMEOUT_S = 10.0
T = TypeVar("T")


class Door(msgspec.Struct, frozen=True, kw_only=True):
    """Which cluster, whom in it, and how to say what they said."""

    kubeconfig: Path | None = None
    context: str = ""
    chosen: Chosen = Chosen()
    account: str = ACCOUNT
    timeout_s: float = TIMEOUT_S
    as_json: bool = False

    def access(self) -> Access:
        """As kubectl finds it: the option, KUBECONFIG, ~/.kube/config, a pod's own account. Raises Unavailable."""
        listed = os.environ.get("KUBECONFIG", "")
        home = usual(os.environ)
        if self.kubeconfig is not None:
            paths = [self.kubeconfig]
        elif listed:
            paths = [Path(part) for part in listed.split(os.pathsep) if part]
        elif home.exists() or self.context:
            paths = [home]
        else:
            return find(os.environ, check)
        return kubeconfig(paths, check, self.context, logins=True)

    def ask(self, command: str, question: Callable[[Client, Asker, list[Member]], Awaitable[T]]) -> T:
        """What comes of it; whatever goes wrong with the cluster as a whole ends the program with a remedy and status 1."""

        async def asked() -> T:
            async with Client(self.access(), f"kubectl-dioptase/{VERSION}", self.timeout_s) as client:
                return await question(client, Asker(client, self.account), await fleet_of(client, self.chosen))

        try:
            return asyncio.run(asked())
        except Unavailable as error:
            # Agents' own words among them.
            said = (f"dioptase kubectl {command}: {error.reason}", f"  remedy: {error.remedy}")
            click.echo("\n".join(words.clean(line) for line in said), err=True)
            sys.exit(1)


_OPTIONS = (
    click.option("-n", "--namespace", help="Of the agents; all are looked in unless one is named."),
    click.option("--context", help="Of the kubeconfig."),
    click.option("--kubeconfig", type=click.Path(path_type=Path), help="Instead of KUBECONFIG and ~/.kube/config."),
    click.option("-l", "--selector", help="Only nodes with these labels, in kubectl's syntax."),
    click.option("--node", "nodes", multiple=True, help="Only this node; may be given several times."),
    click.option("--account", help=f"Whose token agents are shown that want one; {ACCOUNT} unless set."),
    click.option(
        "--request-timeout", "timeout_s", type=Seconds(min=0.1), help=f"Seconds for each agent; {TIMEOUT_S:g} unless set."
    ),
    click.option("-o", "--output", type=click.Choice(["table", "json"]), help="table unless set."),
)  # fmt: skip


def options(command: Callable[..., None]) -> Callable[..., None]:
    """All of them on a command, or on the group before it: what is nearer to the end counts. The command gets a `door`."""

    @functools.wraps(command)
    def opened(*words: Any, **given: Any) -> None:
        context = click.get_current_context()
        before: dict[str, Any] = context.obj or {}
        said = {name: given.pop(name) for name in NAMES}
        said = {name: said[name] or before.get(name) for name in NAMES}
        context.obj = said
        command(*words, door=_door(said), **given)

    for option in reversed(_OPTIONS):
        opened = option(opened)
    return opened


NAMES = ("namespace", "context", "kubeconfig", "selector", "nodes", "account", "timeout_s", "output")


def _door(said: dict[str, Any]) -> Door:
    return Door(
        kubeconfig=said["kubeconfig"],
        context=said["context"] or "",
        chosen=Chosen(
            namespace=said["namespace"] or "", labels=said["selector"] or "", nodes=tuple(said["nodes"] or ())
        ),
        account=said["account"] or ACCOUNT,
        timeout_s=said["timeout_s"] or TIMEOUT_S,
        as_json=said["output"] == "json",
    )


def show(lines: Sequence[str]) -> None:
    """On standard output."""
    for line in lines:
        click.echo(line)

"""`dioptase withdraw`: before agents and controller are uninstalled, or after: nothing of theirs stays at the API server."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence

import click

from api import VERSION
from api.ports import Unavailable
from cli.fleet.door import Door
from cli.options import Seconds
from controller.withdraw import Workload, workload
from controller.withdraw import stop as end
from controller.withdraw import withdraw as take_back
from kube.client import Client

TIMEOUT_S = 240.0


@click.command()
@click.option(
    "--stop", multiple=True, metavar="KIND/NAMESPACE/NAME",
    help="Delete this daemonset or deployment first, and wait for its pods: who runs writes again. May be given several times.",
)  # fmt: skip
@click.option("--timeout", default=TIMEOUT_S, show_default=True, type=Seconds(), help="How long to wait for them.")
def withdraw(stop: tuple[str, ...], timeout: float) -> None:
    """Take back what agents and controller wrote to the API server: finalizers, taints, and what nodes promise to lend.

    Objects stay, but for those of --stop. It may be run again, and needs nothing that was installed. The API server is found as
    kubectl finds it.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    try:
        workloads = [workload(text) for text in stop]
    except ValueError as error:
        raise click.UsageError(f"--stop: {error}") from error
    try:
        left = asyncio.run(_run(workloads, timeout))
    except Unavailable as error:
        click.echo(f"dioptase withdraw: {error.reason}\n  remedy: {error.remedy}", err=True)
        sys.exit(1)
    for each in left:
        click.echo(f"dioptase withdraw: {each}", err=True)
    if left:
        click.echo("  remedy: see to what is named, then run this once more; nothing is lost by that", err=True)
        sys.exit(1)


async def _run(workloads: Sequence[Workload], timeout_s: float) -> list[str]:
    async with Client(Door().access(), f"dioptase-withdraw/{VERSION}") as client:
        return [*await end(client, workloads, timeout_s), *await take_back(client)]

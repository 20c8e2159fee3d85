"""The `dioptase controller` and `withdraw` commands: run the cluster controllers, or remove what they wrote.
`withdraw` deletes finalizers, taints and reported resources from the API server before or after an uninstall.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from api import VERSION
from api.interfaces import Unavailable
from cli.fleet.api_server import ApiServerOptions
from cli.options import Seconds, parse_listen
from controller.__main__ import ControllerOptions, main
from controller.cleanup import Workload, parse_workload
from controller.cleanup import delete_workloads as end
from controller.cleanup import remove_written_fields as take_back
from kube.client import KubeClient

DEFAULT_CONTROLLER_LISTEN = "127.0.0.1:9316"


@click.command()
@click.option("--config", type=click.Path(path_type=Path), help="Settings (YAML), see docs/controller.md.")
@click.option(
    "--listen",
    default=DEFAULT_CONTROLLER_LISTEN,
    show_default=True,
    help="Where /metrics, /healthz and /readyz are served.",
)
@click.option(
    "--web-config", type=click.Path(path_type=Path),
    help="TLS of that server (YAML), as Prometheus' exporters have it.",
)  # fmt: skip
def controller(config: Path | None, listen: str, web_config: Path | None) -> None:
    """Run the cluster's controllers until a signal ends them. The API server is found as kubectl finds it."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    host, port = parse_listen(listen)
    try:
        main(ControllerOptions(host=host, port=port, config=config, web_config=web_config))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except Unavailable as error:
        click.echo(f"dioptase controller: {error.reason}\n  remedy: {error.remedy}", err=True)
        sys.exit(1)


WITHDRAW_TIMEOUT_S = 240.0


@click.command()
@click.option(
    "--stop", multiple=True, metavar="KIND/NAMESPACE/NAME",
    help="Delete this daemonset or deployment first, and wait for its pods: who runs writes again. May be given several times.",
)  # fmt: skip
@click.option(
    "--timeout", default=WITHDRAW_TIMEOUT_S, show_default=True, type=Seconds(), help="How long to wait for them."
)
def withdraw(stop: tuple[str, ...], timeout: float) -> None:
    """Take back what agents and controller wrote to the API server: finalizers, taints, and what nodes promise to lend.

    Objects stay, but for those of --stop. It may be run again, and needs nothing that was installed. The API server is found as
    kubectl finds it.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    try:
        workloads = [parse_workload(text) for text in stop]
    except ValueError as error:
        raise click.UsageError(f"--stop: {error}") from error
    try:
        left = asyncio.run(_withdraw(workloads, timeout))
    except Unavailable as error:
        click.echo(f"dioptase withdraw: {error.reason}\n  remedy: {error.remedy}", err=True)
        sys.exit(1)
    for each in left:
        click.echo(f"dioptase withdraw: {each}", err=True)
    if left:
        click.echo("  remedy: see to what is named, then run this once more; nothing is lost by that", err=True)
        sys.exit(1)


async def _withdraw(workloads: Sequence[Workload], timeout_s: float) -> list[str]:
    async with KubeClient(ApiServerOptions().access(), f"dioptase-withdraw/{VERSION}") as client:
        return [*await end(client, workloads, timeout_s), *await take_back(client)]

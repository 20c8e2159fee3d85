"""The `dioptase controller` and `withdraw` commands: run the cluster controllers, or remove what they wrote.
`withdraw` deletes finalizers, taints and reported resources from the API server before or after an uninstall.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from api import VERSION
from api.interfaces import Unavailable
from cli.fleet.api_server import ApiServerOptions
from cli.options import Seconds, exit_unavailable, parse_listen_hosts
from common.log_lines import write_printable_lines
from controller.__main__ import main
from controller.cleanup import Workload, delete_workloads, parse_workload, remove_written_fields
from controller.serving import ProgramOptions
from kube.client import KubeClient

DEFAULT_CONTROLLER_LISTEN = "127.0.0.1:9316"


@click.command()
@click.option("--config", type=click.Path(path_type=Path), help="Settings (YAML), see docs/controller.md.")
@click.option(
    "--listen",
    default=DEFAULT_CONTROLLER_LISTEN,
    show_default=True,
    metavar="HOST[,HOST...]:PORT",
    help="Addresses of /metrics, /healthz and /readyz.",
)
@click.option(
    "--web-config", type=click.Path(path_type=Path),
    help="TLS of the HTTP server (YAML), in the format of Prometheus' exporters.",
)  # fmt: skip
def controller(config: Path | None, listen: str, web_config: Path | None) -> None:
    """Run the cluster's controllers until a signal ends them.

    The API server is that of KUBECONFIG, of the service account, or of ~/.kube/config.
    """
    write_printable_lines("%(asctime)s %(levelname)s %(message)s")
    hosts, port = parse_listen_hosts(listen)
    try:
        main(ProgramOptions(hosts=hosts, port=port, config=config, web_config=web_config))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except Unavailable as error:
        exit_unavailable("controller", error)


WITHDRAW_TIMEOUT_S = 240.0


@click.command()
@click.option(
    "--stop", multiple=True, metavar="KIND/NAMESPACE/NAME",
    help="First delete this daemonset or deployment and wait for its pods, because they would write again. Repeatable.",
)  # fmt: skip
@click.option(
    "--timeout", default=WITHDRAW_TIMEOUT_S, show_default=True, type=Seconds(), help="Seconds to wait for these pods."
)
def withdraw(stop: tuple[str, ...], timeout: float) -> None:
    """Remove what agents and controller wrote to the API server: finalizers, taints and reported resources of nodes.

    Deletes no objects but those of --stop. May be run again, and needs nothing that was installed. The API server is found as
    kubectl finds it.
    """
    write_printable_lines("%(asctime)s %(levelname)s %(message)s")
    try:
        workloads = [parse_workload(text) for text in stop]
    except ValueError as error:
        raise click.UsageError(f"--stop: {error}") from error
    try:
        remaining = asyncio.run(_withdraw(workloads, timeout))
    except Unavailable as error:
        exit_unavailable("withdraw", error)
    for problem in remaining:
        click.echo(f"dioptase withdraw: {problem}", err=True)
    if remaining:
        click.echo("  remedy: correct these problems and run the command again; it can be repeated", err=True)
        sys.exit(1)


async def _withdraw(workloads: Sequence[Workload], timeout_s: float) -> list[str]:
    async with KubeClient(ApiServerOptions().access(), f"dioptase-withdraw/{VERSION}") as client:
        return [*await delete_workloads(client, workloads, timeout_s), *await remove_written_fields(client)]

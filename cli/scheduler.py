"""The `dioptase scheduler` command: run the extender of a stock kube-scheduler."""

from __future__ import annotations

from pathlib import Path

import click

from api.interfaces import Unavailable
from cli.options import exit_unavailable, parse_listen_hosts
from common.log_lines import write_printable_lines
from controller.scheduler.scheduler_process import run_scheduler
from controller.serving import ProgramOptions

DEFAULT_SCHEDULER_LISTEN = "127.0.0.1:9317"


@click.command()
@click.option("--config", type=click.Path(path_type=Path), help="Settings (YAML), see docs/scheduler.md.")
@click.option(
    "--listen",
    default=DEFAULT_SCHEDULER_LISTEN,
    show_default=True,
    metavar="HOST[,HOST...]:PORT",
    help="Addresses of the extender's verbs, /explain, /metrics, /healthz and /readyz.",
)
@click.option(
    "--web-config", type=click.Path(path_type=Path),
    help="TLS (YAML), in the format of Prometheus' exporters. Verbs from another host need a certificate.",
)  # fmt: skip
def scheduler(config: Path | None, listen: str, web_config: Path | None) -> None:
    """Run the scheduler extender until a signal ends it.

    The API server is that of KUBECONFIG, of the service account, or of ~/.kube/config.
    """
    write_printable_lines("%(asctime)s %(levelname)s %(message)s")
    hosts, port = parse_listen_hosts(listen)
    try:
        run_scheduler(ProgramOptions(hosts=hosts, port=port, config=config, web_config=web_config))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except Unavailable as error:
        exit_unavailable("scheduler", error)

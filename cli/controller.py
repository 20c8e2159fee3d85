"""`dioptase controller`: options, checked here, for controller/__main__.py."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click

from api.ports import Unavailable
from cli.options import parse_listen
from controller.__main__ import Options, main

LISTEN = "127.0.0.1:9316"


@click.command()
@click.option("--config", type=click.Path(path_type=Path), help="Settings (YAML), see docs/controller.md.")
@click.option("--listen", default=LISTEN, show_default=True, help="Where /metrics, /healthz and /readyz are served.")
@click.option(
    "--web-config", type=click.Path(path_type=Path),
    help="TLS of that server (YAML), as Prometheus' exporters have it.",
)  # fmt: skip
def controller(config: Path | None, listen: str, web_config: Path | None) -> None:
    """Run the cluster's controllers until a signal ends them. The API server is found as kubectl finds it."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    host, port = parse_listen(listen)
    try:
        main(Options(host=host, port=port, config=config, web_config=web_config))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except Unavailable as error:
        click.echo(f"dioptase controller: {error.reason}\n  remedy: {error.remedy}", err=True)
        sys.exit(1)

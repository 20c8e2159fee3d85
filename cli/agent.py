"""`dioptase agent`: options, checked here, for agent/__main__.py."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click

from agent.__main__ import Options, main
from agent.qrm.originals import default_state_dir
from agent.sense.pods import PodsError
from agent.settings import ConfigError
from api.decisions import Act
from api.ports import Unavailable
from cli.options import DEFAULT_LISTEN, Seconds, parse_listen


@click.command()
@click.option("--pods", type=click.Path(path_type=Path), required=True, help="The pods of this node (YAML).")
@click.option(
    "--act", type=click.Choice([act.value for act in Act]), default=Act.DRY_RUN.value, show_default=True,
    help="off: watch. dry-run: decide and write nothing. on: write.",
)  # fmt: skip
@click.option("--listen", default=DEFAULT_LISTEN, show_default=True, help="Where page, API and metrics are served.")
@click.option(
    "--state-dir", type=click.Path(path_type=Path), default=default_state_dir, show_default="/var/lib/dioptase as root",
    help="Where originals of changed values and the decision journal are kept.",
)  # fmt: skip
@click.option("--config", type=click.Path(path_type=Path), help="Settings (YAML), see docs/operations.md.")
@click.option(
    "--malachite", metavar="HOST:PORT",
    help="Serve Malachite's documents there too; Katalyst's agent asks 127.0.0.1:9002.",
)  # fmt: skip
@click.option("--duration", type=Seconds(min=0, min_open=True), help="End after so many seconds.")
def agent(  # noqa: PLR0913, PLR0917 - click passes every option
    pods: Path,
    act: str,
    listen: str,
    state_dir: Path,
    config: Path | None,
    malachite: str | None,
    duration: float | None,
) -> None:
    """Run the node agent until a signal ends it; then every changed value is put back."""
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO, stream=sys.stderr)
    host, port = parse_listen(listen)
    options = Options(
        pods=pods, act=Act(act), host=host, port=port, state_dir=state_dir, config=config, duration_s=duration,
        malachite=None if malachite is None else parse_listen(malachite),
    )  # fmt: skip
    try:
        status = main(options)
    except (ConfigError, PodsError) as error:
        raise click.UsageError(str(error)) from error
    except Unavailable as error:
        click.echo(f"dioptase agent: {error.reason}\n  remedy: {error.remedy}", err=True)
        sys.exit(1)
    sys.exit(status)

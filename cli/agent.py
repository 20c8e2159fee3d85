"""The `dioptase agent` command: checks options and runs the node agent."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import click

from agent.__main__ import AgentOptions, main
from agent.config.loader import ConfigError
from agent.journal.stderr import StderrLog
from agent.qrm.actuator.state_dir import default_state_dir
from agent.sensors.pods.static_pods import PodsError
from api.decision import ActMode
from api.interfaces import Unavailable
from cli.options import DEFAULT_LISTEN, Seconds, parse_listen
from exporters import DEFAULT_RECORDING_MIB, MIN_RECORDING_MIB


@click.command()
@click.option(
    "--pods",
    type=click.Path(path_type=Path),
    help="The pods of this node (YAML); without it and --kubelet every cgroup is watched and nothing is decided.",
)
@click.option("--kubelet", is_flag=True, help="The pods are those that the kubelet and the container runtime list.")
@click.option(
    "--act", type=click.Choice([act.value for act in ActMode]), show_default="dry-run with pods, off without",
    help="off: watch. dry-run: decide and write nothing. on: write.",
)  # fmt: skip
@click.option(
    "--node", default="", metavar="NAME",
    help="This node's name in the cluster: report to its API server, and obey what is configured there.",
)  # fmt: skip
@click.option("--listen", default=DEFAULT_LISTEN, show_default=True, help="Where page, API and metrics are served.")
@click.option(
    "--state-dir", type=click.Path(path_type=Path), default=default_state_dir, show_default="/var/lib/dioptase as root",
    help="Where originals of changed values and the decision journal are kept.",
)  # fmt: skip
@click.option("--config", type=click.Path(path_type=Path), help="Settings (YAML), see docs/settings.md.")
@click.option(
    "--web-config", type=click.Path(path_type=Path),
    help="TLS and passwords of the server (YAML), as Prometheus' exporters have it.",
)  # fmt: skip
@click.option("--record", type=click.Path(path_type=Path), help="Record every round into this directory.")
@click.option(
    "--record-max-mib", type=click.IntRange(min=MIN_RECORDING_MIB), default=DEFAULT_RECORDING_MIB, show_default=True,
    help="The oldest rounds go when the recording is larger.",
)  # fmt: skip
@click.option(
    "--malachite", metavar="HOST:PORT",
    help="Serve Malachite's documents there too; Katalyst's agent asks 127.0.0.1:9002.",
)  # fmt: skip
@click.option("--duration", "duration_s", type=Seconds(min=0, min_open=True), help="End after so many seconds.")
def agent(act: str | None, pods: Path | None, kubelet: bool, listen: str, malachite: str | None, **others: Any) -> None:
    """Run the node agent until a signal ends it; then every changed value is put back."""
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO, handlers=[StderrLog()])
    host, port = parse_listen(listen)
    also = None if malachite is None else parse_listen(malachite, "--malachite")
    if kubelet and pods is not None:
        raise click.UsageError("--kubelet and --pods both say which pods there are; choose one")
    listed = kubelet or pods is not None
    options = AgentOptions(
        act=_resolve_act(act, listed=listed), pods=pods, kubelet=kubelet, host=host, port=port, malachite=also, **others
    )
    try:
        status = main(options)
    except (ConfigError, PodsError) as error:
        raise click.UsageError(str(error)) from error
    except Unavailable as error:
        click.echo(f"dioptase agent: {error.reason}\n  remedy: {error.remedy}", err=True)
        sys.exit(1)
    sys.exit(status)


def _resolve_act(asked: str | None, *, listed: bool) -> ActMode:
    """What the agent may do: without a list of pods there is nobody to decide for."""
    if not listed and asked not in (None, ActMode.OFF.value):
        raise click.UsageError(
            f"--act {asked} needs --pods or --kubelet: without a list of pods there is nobody to decide for"
        )
    if asked is None:
        return ActMode.DRY_RUN if listed else ActMode.OFF
    return ActMode(asked)

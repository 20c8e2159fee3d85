"""The `dioptase doctor` command: lists what this node supports and lacks, with a remedy for each item."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from rich.table import Table
from rich.text import Text

from agent.components import load_node_settings
from agent.config.loader import ConfigError
from agent.doctor import host_checks as node
from agent.qrm.actuator.state_dir import default_state_dir
from agent.sensors.pods.static_pods import PodsError, StaticPods
from api.diagnostics import DoctorCheck
from cli.tables import print_table
from probes import doctor as kernel
from probes.registry import PROBE_NAMES


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON list instead of a table.")
@click.option(
    "--state-dir", type=click.Path(path_type=Path), default=default_state_dir, help="The agent's state directory."
)
@click.option("--kubelet", is_flag=True, help="Ask the kubelet and the container runtime as well, as the agent would.")
@click.option("--config", type=click.Path(path_type=Path), help="The agent's settings, which say where those are.")
@click.option(
    "--pods", "file", type=click.Path(path_type=Path), help="The pods of this node, whose cgroups are asked for knobs."
)
def doctor(*, as_json: bool, state_dir: Path, kubelet: bool, config: Path | None, file: Path | None) -> None:
    """Say what this node can and cannot do, each with the remedy. Exit status 1 if something is missing.

    Which knobs there are is asked of the cgroups of --pods or --kubelet, or of one that Kubernetes, systemd or a container
    engine made.
    """
    try:
        pods = () if file is None else StaticPods(file).read()
    except PodsError as error:
        raise click.UsageError(str(error)) from error
    asking: tuple[DoctorCheck, ...] = ()
    if kubelet:
        from agent.doctor.kubelet_checks import check_kubelet  # noqa: PLC0415 - gRPC, which nobody else needs here

        try:
            asking, pods = msgspec.structs.astuple(check_kubelet(load_node_settings(config, PROBE_NAMES, None)[1]))
        except ConfigError as error:
            raise click.UsageError(str(error)) from error
    asked = [container.cgroup for pod in pods for container in pod.containers]
    checks = (*node.check_host(state_dir, pods=asked), *asking, *kernel.probe_checks())
    if as_json:
        click.echo(msgspec.json.encode(checks))
    else:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("", "what", "found", "remedy"):
            table.add_column(column, overflow="fold")
        for check in checks:
            mark = Text("no", "bold red") if not check.ok else Text("-", "dim") if check.remedy else Text("ok", "green")
            table.add_row(mark, check.name, Text(check.detail), Text(check.remedy))
        print_table(table)
        click.echo(f"\n{doctor_summary(checks)}")
    sys.exit(0 if all(check.ok for check in checks) else 1)


def is_missing_optional(check: DoctorCheck) -> bool:
    """Whether it is something that not every node needs, and this one has not."""
    return check.ok and check.conclusive and bool(check.remedy)


def doctor_summary(checks: Sequence[DoctorCheck]) -> str:
    """How many are missing, how many optional ones this machine lacks, and how many could not be asked about."""
    missing, optional = sum(not check.ok for check in checks), sum(map(is_missing_optional, checks))
    unknown = sum(not check.conclusive for check in checks)
    said = [
        f"{missing} of {len(checks)} missing"
        if missing
        else f"{len(checks) - unknown} checked, nothing that is needed is missing"
    ]
    said += [f"of what is optional this machine lacks {optional}, marked -"] if optional else []
    said += [f"{unknown} not checked, marked -"] if unknown else []
    return "; ".join(said)

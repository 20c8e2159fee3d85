"""The `dioptase doctor` command: lists what this node supports and lacks, with a remedy for each item."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import msgspec

from agent.components import load_node_settings
from agent.config.loader import ConfigError
from agent.doctor import host_checks as node
from agent.qrm.actuator.state_dir import default_state_dir
from agent.sensors.pods.static_pods import PodsError, StaticPods
from api.diagnostics import DoctorCheck
from api.interfaces import Unavailable
from cli.tables import check_table, print_table
from probes import doctor as kernel
from probes.registry import PROBE_NAMES


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of a table.")
@click.option(
    "--state-dir", type=click.Path(path_type=Path), default=default_state_dir, help="The agent's state directory."
)
@click.option("--kubelet", is_flag=True, help="Also check the connections to the kubelet and the container runtime.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="The agent's settings (YAML), such as the addresses for --kubelet.",
)
@click.option(
    "--pods",
    "file",
    type=click.Path(path_type=Path),
    help="The pods of this node (YAML); their cgroups are checked for knobs.",
)
def doctor(*, as_json: bool, state_dir: Path, kubelet: bool, config: Path | None, file: Path | None) -> None:
    """List what this node supports and lacks, each with the remedy. Exit status 1 if something required is missing.

    Knobs are looked up in the cgroups of --pods or --kubelet, or in one that Kubernetes, systemd or a container engine created.
    """
    try:
        pods = () if file is None else StaticPods(file).read()
    except PodsError as error:
        raise click.UsageError(str(error)) from error
    kubelet_checks: tuple[DoctorCheck, ...] = ()
    if kubelet:
        from agent.doctor.kubelet_checks import check_kubelet  # noqa: PLC0415 - loads gRPC, which no other check needs

        try:
            kubelet_checks, pods = msgspec.structs.astuple(
                check_kubelet(load_node_settings(config, PROBE_NAMES, None)[1])
            )
        except ConfigError as error:
            raise click.UsageError(str(error)) from error
        kubelet_checks += check_pending_pods(os.environ)
    cgroups = [container.cgroup for pod in pods for container in pod.containers]
    checks = (*node.check_host(state_dir, pods=cgroups), *kubelet_checks, *kernel.probe_checks())
    if as_json:
        click.echo(msgspec.json.encode(checks))
    else:
        rows = ((check.ok, (check.name, check.detail, check.remedy)) for check in checks)
        print_table(check_table(("what", "found", "remedy"), rows))
        click.echo(f"\n{doctor_summary(checks)}")
    sys.exit(0 if all(check.ok for check in checks) else 1)


def check_pending_pods(environ: Mapping[str, str]) -> tuple[DoctorCheck, ...]:
    """Return why reclaimed pods of the cluster are Pending, read with the credentials that kubectl would use here."""
    # Other checks need no client of the API server.
    from cli.fleet.api_server import ApiServerOptions  # noqa: PLC0415
    from cli.fleet.findings import pending_texts  # noqa: PLC0415
    from cli.fleet.pending_pods import ask_pending_reasons  # noqa: PLC0415

    name = "pending pods"
    try:
        reasons = ask_pending_reasons(ApiServerOptions().access(environ), time.time())
    except Unavailable as error:
        remedy = "run `kubectl dioptase doctor` where kubectl works"
        return (
            DoctorCheck(name=name, ok=True, conclusive=False, detail=f"not checked: {error.reason}", remedy=remedy),
        )
    if not reasons:
        return (DoctorCheck(name=name, ok=True, detail="no reclaimed pod of the cluster waits for a node"),)
    return tuple(
        DoctorCheck(name=name, ok=ok, detail=text, remedy=remedy) for ok, text, remedy in pending_texts(reasons)
    )


def is_missing_optional(check: DoctorCheck) -> bool:
    """Whether a check reports an optional feature that this node lacks."""
    return check.ok and check.conclusive and bool(check.remedy)


def doctor_summary(checks: Sequence[DoctorCheck]) -> str:
    """Summarize the checks: how many are missing, how many optional features are missing, how many were not checked."""
    missing, optional = sum(not check.ok for check in checks), sum(map(is_missing_optional, checks))
    unknown = sum(not check.conclusive for check in checks)
    parts = [
        f"{missing} of {len(checks)} missing"
        if missing
        else f"{len(checks) - unknown} checked, nothing that is needed is missing"
    ]
    parts += [f"of what is optional this machine lacks {optional}, marked -"] if optional else []
    parts += [f"{unknown} not checked, marked -"] if unknown else []
    return "; ".join(parts)

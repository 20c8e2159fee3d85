"""The `dioptase agent` command: checks options and runs the node agent."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from agent.__main__ import AgentOptions, main
from agent.config.loader import ConfigError
from agent.config.profiles import OBSERVE, PROFILES
from agent.handover import OwnDaemonSet
from agent.journal.stderr import StderrLog
from agent.qrm.actuator.state_dir import default_state_dir
from agent.sensors.pods.static_pods import PodsError
from api.decision import ActMode
from api.interfaces import Unavailable
from api.text import quote
from cli.options import DEFAULT_LISTEN, Seconds, exit_unavailable, parse_listen, parse_listen_hosts
from common.log_lines import write_printable_lines
from exporters import DEFAULT_RECORDING_MIB, MIN_RECORDING_MIB


@click.command()
@click.option(
    "--pods",
    type=click.Path(path_type=Path),
    help="The pods of this node (YAML). Without --pods and --kubelet the agent measures every cgroup and decides nothing.",
)
@click.option("--kubelet", is_flag=True, help="Read the pods from the kubelet and the container runtime.")
@click.option(
    "--profile", type=click.Choice(tuple(PROFILES)), default=OBSERVE, show_default=True,
    help="Settings for a purpose, which those of --config override; docs/settings.md lists them.",
)  # fmt: skip
@click.option(
    "--act", type=click.Choice([act.value for act in ActMode]),
    show_default=f"that of the profile with pods; off with profile {OBSERVE} and no pods",
    help="off: only measure. dry-run: decide, but write nothing. on: write to cgroups.",
)  # fmt: skip
@click.option(
    "--node", default="", metavar="NAME",
        help="Name of this node in the cluster. The agent reports to the API server and applies the node's configuration.",
)  # fmt: skip
@click.option(
    "--listen", default=DEFAULT_LISTEN, show_default=True, metavar="HOST[,HOST...]:PORT",
    help="Addresses of page, API and metrics.",
)  # fmt: skip
@click.option(
    "--state-dir", type=click.Path(path_type=Path), default=default_state_dir, show_default="/var/lib/dioptase as root",
        help="Directory of the decision journal and of the original values.",
)  # fmt: skip
@click.option("--config", type=click.Path(path_type=Path), help="Settings (YAML), see docs/settings.md.")
@click.option(
    "--web-config", type=click.Path(path_type=Path),
    help="TLS and passwords of the HTTP server (YAML), in the format of Prometheus' exporters.",
)  # fmt: skip
@click.option("--record", type=click.Path(path_type=Path), help="Record every cycle into this directory.")
@click.option(
    "--record-max-mib", type=click.IntRange(min=MIN_RECORDING_MIB), default=DEFAULT_RECORDING_MIB, show_default=True,
        help="Delete the oldest cycles when the recording is larger.",
)  # fmt: skip
@click.option(
    "--malachite", metavar="HOST:PORT",
        help="Also serve Malachite's documents at this address; Katalyst's agent expects 127.0.0.1:9002.",
)  # fmt: skip
@click.option(
    "--handover", metavar="NAMESPACE/NAME",
        help="DaemonSet that this agent belongs to. If the DaemonSet will start another agent on this node, this agent leaves "
        "changed values in force when it ends, instead of restoring them; see docs/install.md.",
)  # fmt: skip
@click.option(
    "--handover-state-dir", metavar="PATH",
        help="Path on the node that the DaemonSet mounts as --state-dir. Default: the same path as --state-dir.",
)  # fmt: skip
@click.option("--duration", "duration_s", type=Seconds(min=0, min_open=True), help="End after this many seconds.")
def agent(
    act: str | None, profile: str, pods: Path | None, kubelet: bool, listen: str, malachite: str | None, **others: Any
) -> None:
    """Run the node agent until a signal ends it; then restore every changed value, or hand it over with --handover."""
    write_printable_lines("%(levelname)s %(message)s", StderrLog())
    hosts, port = parse_listen_hosts(listen)
    malachite_address = None if malachite is None else parse_listen(malachite, "--malachite")
    if kubelet and pods is not None:
        raise click.UsageError("--kubelet and --pods exclude each other: choose one source of pods")
    listed = kubelet or pods is not None
    options = AgentOptions(
        act=_resolve_act(act, profile, listed=listed), profile=profile, pods=pods, kubelet=kubelet, hosts=hosts, port=port,
        malachite=malachite_address, daemon_set=_own_daemon_set(others), **others,
    )  # fmt: skip
    try:
        status = main(options)
    except (ConfigError, PodsError) as error:
        raise click.UsageError(str(error)) from error
    except Unavailable as error:
        exit_unavailable("agent", error)
    sys.exit(status)


def _own_daemon_set(options: dict[str, Any]) -> OwnDaemonSet | None:
    """Remove --handover and its directory from the options, and return the DaemonSet that they describe."""
    key, state_dir = options.pop("handover"), options.pop("handover_state_dir")
    if key is None:
        if state_dir is not None:
            raise click.UsageError("--handover-state-dir needs --handover, which names the DaemonSet")
        return None
    if not options["node"]:
        raise click.UsageError("--handover needs --node: the DaemonSet has to select this node")
    if len(key.split("/")) != 2 or not all(key.split("/")):
        raise click.BadParameter(
            f"{quote(key)} is not NAMESPACE/NAME, for example dioptase/dioptase-agent", param_hint="--handover"
        )
    return OwnDaemonSet(key=key, node_state_dir=state_dir or str(options["state_dir"]))


def _resolve_act(requested: str | None, profile: str, *, listed: bool) -> ActMode:
    """Return what the agent may do: without a list of pods it only watches."""
    if not listed and requested is None and profile != OBSERVE:
        raise click.UsageError(
            f"--profile {profile} needs --pods or --kubelet: without a list of pods the agent decides nothing"
        )
    if not listed and requested not in (None, ActMode.OFF.value):
        raise click.UsageError(
            f"--act {requested} needs --pods or --kubelet: without a list of pods the agent decides nothing"
        )
    if requested is None:
        return PROFILES[profile].act if listed else ActMode.OFF
    return ActMode(requested)

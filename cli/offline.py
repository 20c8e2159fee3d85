"""The `dioptase replay` and `simulate` commands: evaluate policies on a recording or on a simulated node."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import click
import msgspec
from rich.console import Console

from agent.config.config import AgentConfig
from agent.config.loader import ConfigError, build_config, load_documents
from agent.config.node_check import check_against_node
from agent.config.profiles import OBSERVE, PROFILES, with_defaults
from agent.offline.replay import replay_cycles
from agent.offline.simulation import workloads
from agent.offline.simulation.simulator import run_simulation
from agent.offline.simulation.workloads import LOAD_KINDS
from api.cpu import Topology
from api.decision import Cycle
from cli import policy_scores
from cli.options import Seconds
from cli.policy_scores import PolicyTimeline
from exporters.recording.segments import NotARecording, read_recording
from probes import registry

POLICIES = ("latency", "canonical", "none")
FORECASTS = {
    "forecast": "calibrated",
    "forecast-koordinator": "koordinator",
    "forecast-n-sigma": "n-sigma",
    "forecast-rc-like": "rc-like",
    "forecast-max": "max",
}
"""Policy `latency` with headroom from a forecast peak, by forecasting method."""
HORIZON_S = 600.0
_profile_option = click.option(
    "--profile", type=click.Choice(tuple(PROFILES)), default=OBSERVE, show_default=True,
    help="Profile of the agent. Settings of a --policy override it; a --policy that is a profile replaces it.",
)  # fmt: skip


@click.command()
@click.argument("recording", type=click.Path(path_type=Path, exists=True))
@click.option("--policy", "policies", multiple=True, metavar="NAME|FILE", help=
    f"A policy by name, a profile ({', '.join(PROFILES)}), or a settings file; repeatable. "
    f"Default: {', '.join(POLICIES)}.")  # fmt: skip
@_profile_option
@click.option("--horizon", type=Seconds(min=1), default=HORIZON_S, show_default=True,
    help="Compare the reported headroom with the CPU that online pods used in this many seconds afterwards.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print scores and lines as one JSON object.")
def replay(recording: Path, policies: tuple[str, ...], profile: str, horizon: float, *, as_json: bool) -> None:
    """Evaluate the cycles of RECORDING (a directory that `dioptase agent --record` wrote, or one of its files) again.

    Throttled batch work is assumed to use all CPU that a policy makes reclaimable, and the run-queue latency that it causes to
    grow with its use. Policies are latency, canonical, none, and latency with headroom from a forecast peak: forecast, or
    forecast-koordinator, -n-sigma, -rc-like or -max for other systems' peaks. Headroom is compared with what online pods used
    afterwards, as far as the recording is longer than --horizon. Run-queue latency is reported once, as recorded: under another
    policy, only the part caused by batch work is estimated.
    """
    configs = {name: load_policy_config(name, profile) for name in policies or POLICIES}
    tracks = {name: PolicyTimeline(horizon) for name in configs}
    console, cpus, damaged = Console(stderr=True), 0, 0

    def count_damaged(_path: Path, _what: str) -> None:
        nonlocal damaged
        damaged += 1

    try:
        with console.status("reading") as status:
            for number, (fact, marks) in enumerate(
                replay_cycles(_check_recording_fits(read_recording(recording, count_damaged), configs), configs)
            ):
                cpus = fact.node_cpus
                for name, mark in marks.items():
                    tracks[name].add(fact, mark)
                if number % 500 == 0:
                    status.update(f"{number} cycles, {fact.at_s:,.0f} s")
    except (NotARecording, OSError) as error:
        raise click.ClickException(str(error)) from error
    if not cpus:
        raise click.ClickException(f"{recording}: fewer than two cycles can be read; record for longer")
    if damaged:
        click.echo(f"{damaged} damaged records were skipped", err=True)
    print_scores(tracks, cpus, horizon, as_json=as_json, recorded=True)


def load_policy_config(policy: str, profile: str) -> AgentConfig:
    """Return the settings of the profile, overridden by the policy of that name or by the settings of a file.

    If `policy` names a profile, return the settings of that profile. Settings are merged as the agent merges them.
    """
    base = PROFILES[profile].settings
    try:
        if policy in PROFILES:
            return build_config(PROFILES[policy].settings, policy)
        if policy in POLICIES:
            return build_config(with_defaults({"advisor": {"policy": policy}}, base), f"profile {profile}")
        if policy in FORECASTS:
            chosen = {"advisor": {"headroom": {"policy": "forecast"}}, "forecast": {"method": FORECASTS[policy]}}
            return build_config(with_defaults(chosen, base), f"profile {profile}")
        if not Path(policy).exists():
            names = ", ".join((*POLICIES, *FORECASTS, *PROFILES))
            raise click.UsageError(f"--policy {policy}: neither one of {names} nor a file")
        return load_documents(Path(policy), registry.PROBE_NAMES, profile)[1]
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


def check_config_fits(policy: str, config: AgentConfig, topology: Topology, memory_bytes: int | None) -> None:
    """Raise UsageError if the machine lacks what the settings reserve; the agent would reject them there too."""
    if problem := check_against_node(config, topology, memory_bytes, {}):
        raise click.UsageError(f"--policy {policy}: {problem}")


def _check_recording_fits(cycles: Iterable[Cycle], configs: Mapping[str, AgentConfig]) -> Iterator[Cycle]:
    """Yield the cycles unchanged, after checking all settings against the first one that knows the machine's CPUs."""
    checked = False
    for cycle in cycles:
        snapshot = cycle.snapshot
        if not checked and snapshot.topology.cpus:
            checked = True
            for policy, config in configs.items():
                check_config_fits(policy, config, snapshot.topology, snapshot.node.meminfo.get("MemTotal"))
        yield cycle


def print_scores(
    tracks: dict[str, PolicyTimeline], cpus: int, horizon_s: float, *, as_json: bool, recorded: bool = False
) -> None:
    """Print table and timelines, or JSON. `recorded`: run-queue latencies come from the recording, not from the policies."""
    scores = {name: track.counters.score() for name, track in tracks.items()}
    if as_json:
        report = {name: {"score": scores[name], **track.lines()} for name, track in tracks.items()}
        click.echo(msgspec.json.format(msgspec.json.encode({"node_cpus": cpus, "policies": report})))
        return
    console = Console()
    console.print(policy_scores.score_table(scores, from_recording=recorded))
    covered_s = max((track.covered_s for track in tracks.values()), default=0.0)
    for note in policy_scores.score_notes(scores, horizon_s, covered_s, from_recording=recorded):
        console.print(note, style="dim", highlight=False)
    console.print()
    for line in policy_scores.timeline_lines(tracks, cpus):
        console.print(line, soft_wrap=True)


PROGRESS_TTY_S, PROGRESS_LOG_S = 0.5, 10.0
"""Intervals of progress: in a terminal, and in a file or a pipe, where each message is a line."""


@click.command()
@click.option("--policy", "policies", multiple=True, metavar="NAME|FILE", default=("latency", "canonical"), show_default=True,
    help=f"A policy by name, a profile ({', '.join(PROFILES)}), or a settings file; repeatable.")  # fmt: skip
@_profile_option
@click.option("--cpus", type=click.IntRange(1, workloads.MAX_CPUS), default=48, show_default=True)
@click.option(
    "--numa", type=click.IntRange(1, workloads.MAX_NUMA_NODES), default=1, show_default=True, help="NUMA nodes."
)
@click.option("--load", "kinds", type=click.Choice(sorted(LOAD_KINDS)), multiple=True, default=("diurnal",), show_default=True,
    help="Load of the online services over time; several values alternate.")  # fmt: skip
@click.option("--services", type=click.IntRange(1, 1000), default=4, show_default=True, help="Online services.")
@click.option("--hours", type=click.FloatRange(0.01, 24 * 31), default=24.0, show_default=True, help="Simulated time.")
@click.option("--interval", type=Seconds(min=0.2), default=5.0, show_default=True, help="Seconds between two cycles.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--horizon", type=Seconds(min=1), default=HORIZON_S, show_default=True,
    help="Compare the reported headroom with the CPU that online pods used in this many seconds afterwards.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print scores and lines as one JSON object.")
def simulate(
    policies: tuple[str, ...], kinds: tuple[str, ...], *, profile: str, horizon: float, as_json: bool, **how: float
) -> None:
    """Run policies on a generated node: each by itself, on the same load; decisions take effect in the next cycle.

    The model is coarse: CPU is divisible, queues are M/M/c, a waking task waits a moment for idle batch work and a time slice
    for any other. It compares policies; it does not predict a machine.
    """
    try:
        plan = workloads.build_node(
            int(how["cpus"]), int(how["numa"]), kinds, online=int(how["services"]), seed=int(how["seed"])
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    seconds, tracks, began = how["hours"] * 3600, {}, time.monotonic()
    configs = {name: load_policy_config(name, profile) for name in policies}
    for name, config in configs.items():
        check_config_fits(name, config, plan.topology, plan.memory_bytes)
    names = tuple(configs)
    console, reported_at = Console(stderr=True), began
    click.echo(f"simulating {how['hours']:g} hours (--hours), {len(names)} times: {', '.join(names)}", err=True)
    with console.status("simulating") as status:
        for name in names:
            tracks[name] = PolicyTimeline(horizon)
            cycles = run_simulation(plan, configs[name], seconds=seconds, interval_s=how["interval"])
            for _, fact, mark in cycles:
                tracks[name].add(fact, mark)
                if time.monotonic() - reported_at < (PROGRESS_TTY_S if console.is_terminal else PROGRESS_LOG_S):
                    continue
                reported_at, progress = time.monotonic(), f"{name}: {fact.at_s / seconds:.0%}"
                status.update(progress)
                if not console.is_terminal:
                    click.echo(progress, err=True)
    took_s = time.monotonic() - began
    faster = len(tracks) * seconds / took_s
    click.echo(
        f"{how['hours']:g} hours, {len(tracks)} times, took {took_s:.0f} s: {faster:,.0f} times faster", err=True
    )
    print_scores(tracks, len(plan.topology.cpus), horizon, as_json=as_json)

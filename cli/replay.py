"""`dioptase replay`: a recording judged again, by other policies, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import click
import msgspec
from rich.console import Console

from agent.config import Config
from agent.fitting import misfit
from agent.replay import play
from agent.settings import ConfigError, load
from api.cpus import Topology
from api.decisions import Round
from cli import scores
from cli.options import Seconds
from cli.scores import Track
from exporters.recording import NotARecording, read
from probes import registry

POLICIES = ("latency", "canonical", "none")
FORECASTS = {
    "forecast": "calibrated",
    "forecast-koordinator": "koordinator",
    "forecast-n-sigma": "n-sigma",
    "forecast-rc-like": "rc-like",
    "forecast-max": "max",
}
"""Policy `latency` with headroom by a foretold peak, by method."""
HORIZON_S = 600.0


@click.command()
@click.argument("recording", type=click.Path(path_type=Path, exists=True))
@click.option("--policy", "policies", multiple=True, metavar="NAME|FILE", help=
    "A policy by name, or a settings file; once for each. Default: all by name.")  # fmt: skip
@click.option("--horizon", type=Seconds(min=1), default=HORIZON_S, show_default=True,
    help="Seconds within which a promise of CPU is held against what online pods used.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="The scores and lines as one JSON object.")
def replay(recording: Path, policies: tuple[str, ...], horizon: float, *, as_json: bool) -> None:
    """Judge the rounds of RECORDING (a directory that `dioptase agent --record` wrote, or one of its files) again.

    Batch work that was held back is taken to use all that it would have been lent, and what online pods waited for it to
    grow with what it uses. Policies are latency, canonical, none, and latency that promises by a foretold peak: forecast, or
    forecast-koordinator, -n-sigma, -rc-like or -max for the peaks of others. Promises are held against what online pods really
    used afterwards, as far as the recording is longer than --horizon. Online waits are told once, as they were recorded: of
    another policy's, only those for batch work are estimated.
    """
    configs = {name: config_of(name) for name in policies or POLICIES}
    tracks = {name: Track(horizon) for name in configs}
    console, cpus, damaged = Console(stderr=True), 0, 0

    def damage(_path: Path, _what: str) -> None:
        nonlocal damaged
        damaged += 1

    try:
        with console.status("reading") as status:
            for number, (fact, marks) in enumerate(play(_held(read(recording, damage), configs), configs)):
                cpus = fact.node_cpus
                for name, mark in marks.items():
                    tracks[name].add(fact, mark)
                if number % 500 == 0:
                    status.update(f"{number} rounds, {fact.at_s:,.0f} s")
    except (NotARecording, OSError) as error:
        raise click.ClickException(str(error)) from error
    if not cpus:
        raise click.ClickException(f"{recording}: fewer than two rounds can be read; record for longer")
    if damaged:
        click.echo(f"{damaged} damaged places were passed over", err=True)
    show(tracks, cpus, horizon, as_json=as_json, recorded=True)


def config_of(policy: str) -> Config:
    """The policy of that name with its defaults, or the settings of a file."""
    if policy in POLICIES:
        return msgspec.convert({"advisor": {"policy": policy}}, Config)
    if policy in FORECASTS:
        chosen = {"advisor": {"headroom": {"policy": "forecast"}}, "forecast": {"method": FORECASTS[policy]}}
        return msgspec.convert(chosen, Config)
    if not Path(policy).exists():
        raise click.UsageError(f"--policy {policy}: neither one of {', '.join((*POLICIES, *FORECASTS))} nor a file")
    try:
        return load(Path(policy), registry.NAMES)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


def refuse_misfit(policy: str, config: Config, topology: Topology, memory_bytes: int | None) -> None:
    """Raise UsageError where that machine lacks what the settings keep back, as the agent would refuse them there."""
    if found := misfit(config, topology, memory_bytes, {}):
        raise click.UsageError(f"--policy {policy}: {found}")


def _held(rounds: Iterable[Round], configs: Mapping[str, Config]) -> Iterator[Round]:
    """The same rounds, once one of them has shown that the machine of the recording can hold all settings."""
    held = False
    for finished in rounds:
        snapshot = finished.snapshot
        if not held and snapshot.topology.cpus:
            held = True
            for policy, config in configs.items():
                refuse_misfit(policy, config, snapshot.topology, snapshot.node.meminfo.get("MemTotal"))
        yield finished


def show(tracks: dict[str, Track], cpus: int, horizon_s: float, *, as_json: bool, recorded: bool = False) -> None:
    """Table and lines, or JSON. `recorded` waits are not the policies'."""
    found = {name: track.tally.score() for name, track in tracks.items()}
    if as_json:
        whole = {name: {"score": found[name], **track.lines()} for name, track in tracks.items()}
        click.echo(msgspec.json.format(msgspec.json.encode({"node_cpus": cpus, "policies": whole})))
        return
    console = Console()
    console.print(scores.table(found, recorded=recorded))
    covered_s = max((track.covered_s for track in tracks.values()), default=0.0)
    for note in scores.notes(found, horizon_s, covered_s, recorded=recorded):
        console.print(note, style="dim", highlight=False)
    console.print()
    for line in scores.lines(tracks, cpus):
        console.print(line, soft_wrap=True)

"""`dioptase simulate`: policies on a node that is only computed, under loads that are generated."""

from __future__ import annotations

import time

import click
from rich.console import Console

from agent.simulation import machine
from agent.simulation.loads import KINDS
from agent.simulation.run import run
from cli.options import Seconds
from cli.replay import HORIZON_S, config_of, refuse_misfit, show
from cli.scores import Track

SHOWN_S, SAID_S = 0.5, 10.0
"""How often it is shown how far it is: in a terminal, and in a file or a pipe, where each time is a line."""


@click.command()
@click.option("--policy", "policies", multiple=True, metavar="NAME|FILE", default=("latency", "canonical"), show_default=True,
    help="A policy by name, or a settings file; once for each.")  # fmt: skip
@click.option("--cpus", type=click.IntRange(1, machine.MOST_CPUS), default=48, show_default=True)
@click.option("--numa", type=click.IntRange(1, machine.MOST_NUMA), default=1, show_default=True, help="NUMA nodes.")
@click.option("--load", "kinds", type=click.Choice(sorted(KINDS)), multiple=True, default=("diurnal",), show_default=True,
    help="What online services ask for over time; of several, each in turn.")  # fmt: skip
@click.option("--services", type=click.IntRange(1, 1000), default=4, show_default=True, help="Online services.")
@click.option("--hours", type=click.FloatRange(0.01, 24 * 31), default=24.0, show_default=True, help="Simulated time.")
@click.option("--interval", type=Seconds(min=0.2), default=5.0, show_default=True, help="Seconds between two rounds.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--horizon", type=Seconds(min=1), default=HORIZON_S, show_default=True,
    help="Seconds within which a promise of CPU is held against what online pods used.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="The scores and lines as one JSON object.")
def simulate(policies: tuple[str, ...], kinds: tuple[str, ...], *, horizon: float, as_json: bool, **how: float) -> None:
    """Run policies on a generated node: each by itself, on the same loads, its decisions felt in the next round.

    The model is coarse: CPU is divisible, queues are those of M/M/c, a waking task waits a moment for idle batch work and a
    time slice for any other. It compares policies; it does not predict a machine.
    """
    try:
        plan = machine.node(
            int(how["cpus"]), int(how["numa"]), kinds, online=int(how["services"]), seed=int(how["seed"])
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    seconds, tracks, began = how["hours"] * 3600, {}, time.monotonic()
    configs = {name: config_of(name) for name in policies}
    for name, config in configs.items():
        refuse_misfit(name, config, plan.topology, plan.memory_bytes)
    names = tuple(configs)
    console, said = Console(stderr=True), began
    click.echo(f"simulating {how['hours']:g} hours (--hours), {len(names)} times: {', '.join(names)}", err=True)
    with console.status("simulating") as status:
        for name in names:
            tracks[name] = Track(horizon)
            rounds = run(plan, configs[name], seconds=seconds, interval_s=how["interval"])
            for _, fact, mark in rounds:
                tracks[name].add(fact, mark)
                if time.monotonic() - said < (SHOWN_S if console.is_terminal else SAID_S):
                    continue
                said, far = time.monotonic(), f"{name}: {fact.at_s / seconds:.0%}"
                status.update(far)
                if not console.is_terminal:
                    click.echo(far, err=True)
    took_s = time.monotonic() - began
    faster = len(tracks) * seconds / took_s
    click.echo(
        f"{how['hours']:g} hours, {len(tracks)} times, took {took_s:.0f} s: {faster:,.0f} times faster", err=True
    )
    show(tracks, len(plan.topology.cpus), horizon, as_json=as_json)

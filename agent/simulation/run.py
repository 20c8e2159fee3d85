"""A policy on a node that is only computed: what it decides in one round is felt in the next."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from agent.config import Config
from agent.replay import Fact, Mark, Player, fact_of, mark
from agent.simulation.machine import Plan
from agent.simulation.model import Simulation
from api.decisions import Act, Round
from api.rates import rates


def run(plan: Plan, config: Config, *, seconds: float, interval_s: float) -> Iterator[tuple[Round, Fact, Mark]]:
    """Every round from the second on, with what happened in it. Nothing in it is an assumption about another policy."""
    simulation, player = Simulation(plan), Player(config)
    before: Round | None = None
    for _ in range(max(round(seconds / interval_s), 2)):
        snapshot = simulation.step(interval_s)
        advice, changes = player.judge(snapshot)
        finished = Round(
            snapshot=snapshot,
            previous=None if before is None else before.snapshot,
            act=Act.ON,
            trigger="tick",
            advice=advice,
        )
        change = None if before is None else rates(before.snapshot, snapshot)
        if before is not None and change is not None:
            fact = fact_of(before, finished, change, 0)
            made = mark(fact, advice, changes, player.victims)
            felt = msgspec.structs.replace(
                made,
                batch_cores=fact.batch_cores,
                harm_cores=fact.harm_cores,
                short_cores=simulation.shortage_s / interval_s,
            )
            yield finished, fact, felt
        simulation.apply(player.decisions)
        before = finished

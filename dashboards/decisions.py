"""What the agent did and why: decisions by knob, rule and outcome, rounds by what started them, and what could not be done."""

from __future__ import annotations

from grafana_foundation_sdk.models import units

from dashboards.health import sources
from dashboards.panels import NODE, RATE, Board, Panel, Query, lines, number, ranking, rate_by

DECISIONS = "dioptase_decisions_total"
FAILED = 'outcome=~"refused|mismatch"'


def board() -> Board:
    return Board(
        "decisions",
        "Dioptase decisions",
        "What was decided, by which rule, and what came of it. `dioptase explain` tells each with its numbers.",
        (),
        (("At a glance", _glance()), ("By knob and rule", _by()), ("Rounds", _rounds())),
    )


def _increase(selector: str, by: str) -> str:
    return f"sum by ({by}) (increase({DECISIONS}{{{selector}}}{RATE}))"


def _glance() -> list[Panel]:
    changed = f'{NODE},outcome!="unchanged"'
    return [
        number(
            "Values written",
            units.Short,
            f'sum(increase({DECISIONS}{{{NODE},outcome="applied"}}[1h])) or vector(0)',
            "In the last hour, on all nodes that are shown.",
        ),
        number(
            "Would have been written",
            units.Short,
            f'sum(increase({DECISIONS}{{{NODE},outcome="dry-run"}}[1h])) or vector(0)',
            "In the last hour, by agents that run dry.",
        ),
        number(
            "Refused or found otherwise",
            units.Short,
            f"sum(increase({DECISIONS}{{{NODE},{FAILED}}}[1h])) or vector(0)",
            "In the last hour: the kernel said no, or another program writes the same values. The journal has the reason.",
            (1, 100),
        ),
        number(
            "Rounds between ticks",
            "rounds/s",
            f'sum(rate(dioptase_rounds_total{{{NODE},trigger!="tick"}}{RATE})) or vector(0)',
            "Rounds that began at once because online pods waited, or a pressure trigger fired.",
        ),
        number(
            "Rules that fired",
            units.Short,
            f"count(count by (job, instance, rule) (increase({DECISIONS}{{{changed}}}{RATE}) > 0)) or vector(0)",
            "How many different reasons there were for what changed lately, on all nodes.",
        ),
        number(
            "Nodes that act",
            units.Short,
            f'sum(dioptase_act_mode{{{NODE},mode="on"}})',
            "The others decide nothing, or only say what they would do.",
        ),
    ]


def _by() -> list[Panel]:
    changed = f'{NODE},outcome!="unchanged"'
    return [
        lines(
            "Decisions by rule",
            units.Short,
            "Why something changed: each bar is what the rule did within one step.",
            Query(_increase(changed, "job, instance, rule"), "{{rule}} on {{instance}}"),
            bars=True,
        ),
        lines(
            "Decisions by knob",
            units.Short,
            "What was changed.",
            Query(_increase(changed, "job, instance, knob"), "{{knob}} on {{instance}}"),
            bars=True,
        ),
        lines(
            "Outcomes",
            units.Short,
            "unchanged: the kernel had it already. vanished: the cgroup is gone. refused, mismatch: look at the journal.",
            Query(_increase(NODE, "job, instance, outcome"), "{{outcome}} on {{instance}}"),
            stacked=True,
        ),
        lines(
            "Repairs by knob",
            units.Short,
            "Knobs that were as decided and then were not: another program wrote them, and the agent wrote them again.",
            Query(
                f"sum by (job, instance, knob) (increase(dioptase_knob_repairs_total{{{NODE}}}{RATE}))",
                "{{knob}} on {{instance}}",
            ),
            bars=True,
        ),
        ranking(
            "Rules of the last hour",
            units.Short,
            "The commonest reasons first.",
            Query(
                f"sum by (job, instance, rule, knob) (increase({DECISIONS}{{{changed}}}[1h]))",
                "{{rule}}: {{knob}} on {{instance}}",
            ),
        ),
    ]


def rounds_by_trigger() -> Panel:
    """What started rounds, and what was advised in them."""
    return lines(
        "Rounds by trigger and action",
        "rounds/s",
        "`tick` is the clock; `wait` and `psi` mean that online pods suffered in between.",
        Query(
            rate_by("dioptase_rounds_total", NODE, "job, instance, trigger, action"),
            "{{trigger}}: {{action}} on {{instance}}",
        ),
        stacked=True,
    )


def _rounds() -> list[Panel]:
    return [
        rounds_by_trigger(),
        lines(
            "What the policy wanted",
            "cores",
            "Steps down are takings back: the rule that fired then is above.",
            Query(f"dioptase_reclaim_lent_cores{{{NODE}}}", "lent on {{instance}}"),
        ),
        sources(),
        lines(
            "Round, duration",
            units.Seconds,
            "A decision is late by no more than this and the time since the tick.",
            Query(f"dioptase_round_duration_seconds{{{NODE}}}", "{{instance}}"),
        ),
    ]

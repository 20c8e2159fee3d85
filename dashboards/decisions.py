"""What the agent did and why: decisions by knob, rule and outcome, who had to leave, and rounds by what started them."""

from __future__ import annotations

from grafana_foundation_sdk.models import units

from dashboards.health import sources
from dashboards.panels import MET, NODE, RATE, Board, Panel, Query, lines, number, ranking, rate_by, states

DECISIONS = "dioptase_decisions_total"
FAILED = 'outcome=~"refused|mismatch"'


def board() -> Board:
    return Board(
        "decisions",
        "Dioptase decisions",
        "What was decided, by which rule, and what came of it. `dioptase explain` tells each with its numbers.",
        (),
        (
            ("At a glance", _glance()),
            ("By knob and rule", _by()),
            ("Evictions", [*_evicted(), *_thresholds()]),
            ("Rounds", _rounds()),
        ),
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


VICTIMS, KILLS = "dioptase_eviction_victims_total", "dioptase_eviction_kills_total"
WHICH = "{{plugin}} {{subject}} {{scope}} on {{instance}}"


def _evicted() -> list[Panel]:
    late = 'reason=~"EvictFailed|EvictExceededGracePeriod"'
    return [
        number(
            "Pods that had to leave",
            units.Short,
            f'sum(increase({VICTIMS}{{{NODE},dry_run="false"}}[1h])) or vector(0)',
            "In the last hour, on all nodes that are shown. 0 as well where no eviction plugin is configured.",
        ),
        number(
            "Pods that would have had to leave",
            units.Short,
            f'sum(increase({VICTIMS}{{{NODE},dry_run="true"}}[1h])) or vector(0)',
            "In the last hour, by plugins that run dry.",
        ),
        number(
            "Pods on their way out",
            units.Short,
            f"(sum(dioptase_eviction_leaving_pods{{{NODE}}}) + sum(dioptase_eviction_held_pods{{{NODE}}})) or vector(0)",
            "They were asked to leave and are still here, or a disruption budget or the API server does not allow it yet.",
        ),
        number(
            "Evictions that failed or are late",
            units.Short,
            f"sum(increase({KILLS}{{{NODE},{late}}}[1h])) or vector(0)",
            "In the last hour: a budget or the API server refused, or processes outlived their grace by half. "
            "`dioptase explain POD` says why.",
            (1, 10),
        ),
        number(
            "Conditions in force",
            units.Short,
            f"sum(dioptase_eviction_condition{{{NODE}}}) or vector(0)",
            "The scheduler keeps away from these nodes: five minutes longer than the threshold is met.",
            (1, 100),
        ),
        number(
            "Thresholds that could not be judged",
            units.Short,
            f"sum(dioptase_eviction_not_judged{{{NODE}}}) or vector(0)",
            "An input is missing, so nobody leaves because of them. The card on the agent's page says which.",
        ),
    ]


def _thresholds() -> list[Panel]:
    return [
        states(
            "Thresholds met",
            "soft: at most one pod of the node leaves in a round. hard: the plugin's first candidate does.",
            Query(f"dioptase_eviction_met{{{NODE}}}", WHICH),
            MET,
        ),
        ranking(
            "Observed over threshold",
            units.PercentUnit,
            "Above 100 % an upper bound is crossed; of free memory and room, which are lower bounds, below.",
            Query(
                f"dioptase_eviction_observed{{{NODE}}} / (dioptase_eviction_threshold{{{NODE}}} != 0)",
                WHICH,
            ),
        ),
        lines(
            "Victims by plugin",
            units.Short,
            "Which trouble made pods leave; those of a dry run are still there.",
            Query(
                f"sum by (job, instance, plugin, dry_run) (increase({VICTIMS}{{{NODE}}}{RATE}))",
                "{{plugin}}, dry run {{dry_run}}, on {{instance}}",
            ),
            bars=True,
        ),
        lines(
            "What became of evictions",
            units.Short,
            "EvictCreated and EvictSucceeded go together; EvictExceededGracePeriod means that processes would not end.",
            Query(f"sum by (job, instance, reason) (increase({KILLS}{{{NODE}}}{RATE}))", "{{reason}} on {{instance}}"),
            bars=True,
        ),
    ]


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

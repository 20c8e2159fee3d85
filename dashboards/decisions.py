"""The decisions dashboard: decisions by knob, rule and outcome, evictions, and cycles by trigger."""

from __future__ import annotations

from grafana_foundation_sdk.models import units

from dashboards.agent import source_states
from dashboards.panels import (
    NODE_SELECTOR,
    RATE_INTERVAL,
    THRESHOLD_STATES,
    Board,
    Panel,
    Query,
    bar_gauge_panel,
    line_panel,
    rate_by,
    stat_panel,
    state_panel,
)

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
            ("By knob and rule", _by_label()),
            ("Evictions", [*_evicted(), *_thresholds()]),
            ("Rounds", _cycles()),
        ),
    )


def _increase(selector: str, by: str) -> str:
    return f"sum by ({by}) (increase({DECISIONS}{{{selector}}}{RATE_INTERVAL}))"


def _glance() -> list[Panel]:
    changed = f'{NODE_SELECTOR},outcome!="unchanged"'
    return [
        stat_panel(
            "Values written",
            units.Short,
            f'sum(increase({DECISIONS}{{{NODE_SELECTOR},outcome="applied"}}[1h])) or vector(0)',
            "In the last hour, on all nodes that are shown.",
        ),
        stat_panel(
            "Would have been written",
            units.Short,
            f'sum(increase({DECISIONS}{{{NODE_SELECTOR},outcome="dry-run"}}[1h])) or vector(0)',
            "In the last hour, by agents that run dry.",
        ),
        stat_panel(
            "Refused or found otherwise",
            units.Short,
            f"sum(increase({DECISIONS}{{{NODE_SELECTOR},{FAILED}}}[1h])) or vector(0)",
            "In the last hour: the kernel said no, or another program writes the same values. The journal has the reason.",
            (1, 100),
        ),
        stat_panel(
            "Rounds between ticks",
            "rounds/s",
            f'sum(rate(dioptase_rounds_total{{{NODE_SELECTOR},trigger!="tick"}}{RATE_INTERVAL})) or vector(0)',
            "Rounds that began at once because online pods waited, or a pressure trigger fired.",
        ),
        stat_panel(
            "Rules that fired",
            units.Short,
            f"count(count by (job, instance, rule) (increase({DECISIONS}{{{changed}}}{RATE_INTERVAL}) > 0)) or vector(0)",
            "How many different reasons there were for what changed lately, on all nodes.",
        ),
        stat_panel(
            "Nodes that act",
            units.Short,
            f'sum(dioptase_act_mode{{{NODE_SELECTOR},mode="on"}})',
            "The others decide nothing, or only say what they would do.",
        ),
    ]


def _by_label() -> list[Panel]:
    changed = f'{NODE_SELECTOR},outcome!="unchanged"'
    return [
        line_panel(
            "Decisions by rule",
            units.Short,
            "Why something changed: each bar is what the rule did within one step.",
            Query(_increase(changed, "job, instance, rule"), "{{rule}} on {{instance}}"),
            bars=True,
        ),
        line_panel(
            "Decisions by knob",
            units.Short,
            "What was changed.",
            Query(_increase(changed, "job, instance, knob"), "{{knob}} on {{instance}}"),
            bars=True,
        ),
        line_panel(
            "Outcomes",
            units.Short,
            "unchanged: the kernel had it already. vanished: the cgroup is gone. refused, mismatch: look at the journal.",
            Query(_increase(NODE_SELECTOR, "job, instance, outcome"), "{{outcome}} on {{instance}}"),
            stacked=True,
        ),
        line_panel(
            "Repairs by knob",
            units.Short,
            "Knobs that were as decided and then were not: another program wrote them, and the agent wrote them again.",
            Query(
                f"sum by (job, instance, knob) (increase(dioptase_knob_repairs_total{{{NODE_SELECTOR}}}{RATE_INTERVAL}))",
                "{{knob}} on {{instance}}",
            ),
            bars=True,
        ),
        bar_gauge_panel(
            "Rules of the last hour",
            units.Short,
            "The commonest reasons first.",
            Query(
                f"sum by (job, instance, rule, knob) (increase({DECISIONS}{{{changed}}}[1h]))",
                "{{rule}}: {{knob}} on {{instance}}",
            ),
        ),
    ]


def cycles_by_trigger() -> Panel:
    """What started rounds, and what was advised in them."""
    return line_panel(
        "Rounds by trigger and action",
        "rounds/s",
        "`tick` is the clock; `wait` and `psi` mean that online pods suffered in between.",
        Query(
            rate_by("dioptase_rounds_total", NODE_SELECTOR, "job, instance, trigger, action"),
            "{{trigger}}: {{action}} on {{instance}}",
        ),
        stacked=True,
    )


VICTIMS, KILLS = "dioptase_eviction_victims_total", "dioptase_eviction_kills_total"
THRESHOLD_LEGEND = "{{plugin}} {{subject}} {{scope}} on {{instance}}"


def _evicted() -> list[Panel]:
    late = 'reason=~"EvictFailed|EvictExceededGracePeriod"'
    return [
        stat_panel(
            "Pods that had to leave",
            units.Short,
            f'sum(increase({VICTIMS}{{{NODE_SELECTOR},dry_run="false"}}[1h])) or vector(0)',
            "In the last hour, on all nodes that are shown. 0 as well where no eviction plugin is configured.",
        ),
        stat_panel(
            "Pods that would have had to leave",
            units.Short,
            f'sum(increase({VICTIMS}{{{NODE_SELECTOR},dry_run="true"}}[1h])) or vector(0)',
            "In the last hour, by plugins that run dry.",
        ),
        stat_panel(
            "Pods on their way out",
            units.Short,
            f"(sum(dioptase_eviction_leaving_pods{{{NODE_SELECTOR}}}) + "
            f"sum(dioptase_eviction_held_pods{{{NODE_SELECTOR}}})) or vector(0)",
            "Evicted pods that still run, or whose eviction a disruption budget or the API server does not allow yet.",
        ),
        stat_panel(
            "Evictions that failed or are late",
            units.Short,
            f"sum(increase({KILLS}{{{NODE_SELECTOR},{late}}}[1h])) or vector(0)",
            "In the last hour: a budget or the API server refused, or processes outlived their grace by half. "
            "`dioptase explain POD` says why.",
            (1, 10),
        ),
        stat_panel(
            "Conditions in force",
            units.Short,
            f"sum(dioptase_eviction_condition{{{NODE_SELECTOR}}}) or vector(0)",
            "The scheduler keeps away from these nodes: five minutes longer than the threshold is met.",
            (1, 100),
        ),
        stat_panel(
            "Thresholds that could not be judged",
            units.Short,
            f"sum(dioptase_eviction_not_judged{{{NODE_SELECTOR}}}) or vector(0)",
            "An input is missing, so these plugins evict no pods. The card on the agent's page says which input.",
        ),
    ]


def _thresholds() -> list[Panel]:
    return [
        state_panel(
            "Thresholds met",
            "soft: at most one pod of the node leaves in a round. hard: the plugin's first candidate does.",
            Query(f"dioptase_eviction_met{{{NODE_SELECTOR}}}", THRESHOLD_LEGEND),
            THRESHOLD_STATES,
        ),
        bar_gauge_panel(
            "Observed over threshold",
            units.PercentUnit,
            "Above 100 % an upper bound is crossed; of free memory and room, which are lower bounds, below.",
            Query(
                f"dioptase_eviction_observed{{{NODE_SELECTOR}}} / (dioptase_eviction_threshold{{{NODE_SELECTOR}}} != 0)",
                THRESHOLD_LEGEND,
            ),
        ),
        line_panel(
            "Victims by plugin",
            units.Short,
            "Which trouble made pods leave; those of a dry run are still there.",
            Query(
                f"sum by (job, instance, plugin, dry_run) (increase({VICTIMS}{{{NODE_SELECTOR}}}{RATE_INTERVAL}))",
                "{{plugin}}, dry run {{dry_run}}, on {{instance}}",
            ),
            bars=True,
        ),
        line_panel(
            "What became of evictions",
            units.Short,
            "EvictCreated and EvictSucceeded go together; EvictExceededGracePeriod means that processes would not end.",
            Query(
                f"sum by (job, instance, reason) (increase({KILLS}{{{NODE_SELECTOR}}}{RATE_INTERVAL}))",
                "{{reason}} on {{instance}}",
            ),
            bars=True,
        ),
    ]


def _cycles() -> list[Panel]:
    return [
        cycles_by_trigger(),
        line_panel(
            "What the policy wanted",
            "cores",
            "Steps down are takings back: the rule that fired then is above.",
            Query(f"dioptase_reclaim_lent_cores{{{NODE_SELECTOR}}}", "lent on {{instance}}"),
        ),
        source_states(),
        line_panel(
            "Round, duration",
            units.Seconds,
            "A decision is late by no more than this and the time since the tick.",
            Query(f"dioptase_round_duration_seconds{{{NODE_SELECTOR}}}", "{{instance}}"),
        ),
    ]

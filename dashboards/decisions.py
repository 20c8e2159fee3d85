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
        "Decisions, their rules and their outcomes. `dioptase explain` shows each with its numbers.",
        (),
        (
            ("Summary", _glance()),
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
            "In the last hour, on all selected nodes.",
        ),
        stat_panel(
            "Values of dry runs",
            units.Short,
            f'sum(increase({DECISIONS}{{{NODE_SELECTOR},outcome="dry-run"}}[1h])) or vector(0)',
            "In the last hour, by agents with --act dry-run.",
        ),
        stat_panel(
            "Writes that failed",
            units.Short,
            f"sum(increase({DECISIONS}{{{NODE_SELECTOR},{FAILED}}}[1h])) or vector(0)",
            (
                "In the last hour: the kernel refused the value, or another program writes the same file. The journal has the "
                "reason."
            ),
            (1, 100),
        ),
        stat_panel(
            "Cycles started by a trigger",
            "rounds/s",
            f'sum(rate(dioptase_rounds_total{{{NODE_SELECTOR},trigger!="tick"}}{RATE_INTERVAL})) or vector(0)',
            "Cycles that started early: online pods waited, a pressure trigger fired, or originals are on disk.",
        ),
        stat_panel(
            "Rules in use",
            units.Short,
            f"count(count by (job, instance, rule) (increase({DECISIONS}{{{changed}}}{RATE_INTERVAL}) > 0)) or vector(0)",
            "Number of different rules behind recent changes, on all nodes.",
        ),
        stat_panel(
            "Agents with --act on",
            units.Short,
            f'sum(dioptase_act_mode{{{NODE_SELECTOR},mode="on"}})',
            "The others measure only, or run dry.",
        ),
    ]


def _by_label() -> list[Panel]:
    changed = f'{NODE_SELECTOR},outcome!="unchanged"'
    return [
        line_panel(
            "Decisions by rule",
            units.Short,
            "Each bar counts the decisions of a rule within one step.",
            Query(_increase(changed, "job, instance, rule"), "{{rule}} on {{instance}}"),
            bars=True,
        ),
        line_panel(
            "Decisions by knob",
            units.Short,
            "Decisions by the knob that they changed.",
            Query(_increase(changed, "job, instance, knob"), "{{knob}} on {{instance}}"),
            bars=True,
        ),
        line_panel(
            "Outcomes",
            units.Short,
            (
                "unchanged: the kernel already had the value. vanished: the cgroup was removed. refused, mismatch: see the "
                "journal."
            ),
            Query(_increase(NODE_SELECTOR, "job, instance, outcome"), "{{outcome}} on {{instance}}"),
            stacked=True,
        ),
        line_panel(
            "Repairs by knob",
            units.Short,
            "Values that another program changed after the agent wrote them, and that the agent wrote again.",
            Query(
                f"sum by (job, instance, knob) (increase(dioptase_knob_repairs_total{{{NODE_SELECTOR}}}{RATE_INTERVAL}))",
                "{{knob}} on {{instance}}",
            ),
            bars=True,
        ),
        bar_gauge_panel(
            "Rules of the last hour",
            units.Short,
            "Most frequent rules first.",
            Query(
                f"sum by (job, instance, rule, knob) (increase({DECISIONS}{{{changed}}}[1h]))",
                "{{rule}}: {{knob}} on {{instance}}",
            ),
        ),
    ]


def cycles_by_trigger() -> Panel:
    """What started rounds, and what was advised in them."""
    return line_panel(
        "Cycles by trigger and action",
        "rounds/s",
        (
            "`tick`: the regular interval. `wait` and `psi`: started early, because online pods waited for CPU or a "
            "pressure trigger fired. `journalled`: original values of new controls are on disk."
        ),
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
            "Evicted pods",
            units.Short,
            f'sum(increase({VICTIMS}{{{NODE_SELECTOR},dry_run="false"}}[1h])) or vector(0)',
            "In the last hour, on all selected nodes. Also 0 if no eviction plugin is configured.",
        ),
        stat_panel(
            "Pods a dry run would evict",
            units.Short,
            f'sum(increase({VICTIMS}{{{NODE_SELECTOR},dry_run="true"}}[1h])) or vector(0)',
            "In the last hour, by plugins in dry run.",
        ),
        stat_panel(
            "Pending evictions",
            units.Short,
            f"(sum(dioptase_eviction_leaving_pods{{{NODE_SELECTOR}}}) + "
            f"sum(dioptase_eviction_held_pods{{{NODE_SELECTOR}}})) or vector(0)",
            "Evicted pods that still run, or whose eviction a disruption budget or the API server has refused so far.",
        ),
        stat_panel(
            "Evictions that failed or are overdue",
            units.Short,
            f"sum(increase({KILLS}{{{NODE_SELECTOR},{late}}}[1h])) or vector(0)",
            (
                "In the last hour: a disruption budget or the API server refused, or processes exceeded their grace period by "
                "half. `dioptase explain POD` shows the reason."
            ),
            (1, 10),
        ),
        stat_panel(
            "Conditions in force",
            units.Short,
            f"sum(dioptase_eviction_condition{{{NODE_SELECTOR}}}) or vector(0)",
            "Nodes with such a condition are tainted, until five minutes after the threshold is no longer met.",
            (1, 100),
        ),
        stat_panel(
            "Thresholds without data",
            units.Short,
            f"sum(dioptase_eviction_not_judged{{{NODE_SELECTOR}}}) or vector(0)",
            "An input is missing, so these plugins evict no pods. The agent's page names the input.",
        ),
    ]


def _thresholds() -> list[Panel]:
    return [
        state_panel(
            "Thresholds met",
            "soft: at most one pod of the node is evicted per cycle. hard: the first candidate of each plugin.",
            Query(f"dioptase_eviction_met{{{NODE_SELECTOR}}}", THRESHOLD_LEGEND),
            THRESHOLD_STATES,
        ),
        bar_gauge_panel(
            "Observed value relative to the threshold",
            units.PercentUnit,
            (
                "Above 100 % an upper bound is exceeded. Free memory and free space have lower bounds, which are met below "
                "100 %."
            ),
            Query(
                f"dioptase_eviction_observed{{{NODE_SELECTOR}}} / (dioptase_eviction_threshold{{{NODE_SELECTOR}}} != 0)",
                THRESHOLD_LEGEND,
            ),
        ),
        line_panel(
            "Victims by plugin",
            units.Short,
            "Evicted pods by plugin. Pods of a dry run keep running.",
            Query(
                f"sum by (job, instance, plugin, dry_run) (increase({VICTIMS}{{{NODE_SELECTOR}}}{RATE_INTERVAL}))",
                "{{plugin}}, dry run {{dry_run}}, on {{instance}}",
            ),
            bars=True,
        ),
        line_panel(
            "Eviction events",
            units.Short,
            (
                "Each EvictCreated should be followed by EvictSucceeded. EvictExceededGracePeriod: processes did not end in "
                "time."
            ),
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
            "Requirement and reclaimable CPU",
            "cores",
            "A step down of the reclaimable CPU returns CPU to online pods; the panel above shows its rule.",
            Query(f"dioptase_reclaim_lent_cores{{{NODE_SELECTOR}}}", "lent on {{instance}}"),
        ),
        source_states(),
        line_panel(
            "Cycle, duration",
            units.Seconds,
            "A decision is delayed by at most this duration and the time since the last cycle.",
            Query(f"dioptase_round_duration_seconds{{{NODE_SELECTOR}}}", "{{instance}}"),
        ),
    ]

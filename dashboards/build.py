"""overview.json, made from typed code: `python dashboards/build.py` writes it, a test keeps it fresh.

It answers, top to bottom, what somebody on call asks: who is slow, who causes it, what did the system do, is it healthy.
Every panel says in its description what to conclude from it. Needs the development dependencies (grafana-foundation-sdk).
"""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import NamedTuple

from grafana_foundation_sdk.builders import common as common_builder
from grafana_foundation_sdk.builders import dashboard as dashboard_builder
from grafana_foundation_sdk.builders import heatmap, stat, statetimeline, timeseries
from grafana_foundation_sdk.builders import prometheus as prometheus_builder
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard, units
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

OVERVIEW = Path(__file__).with_name("overview.json")
SOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
NODE = 'instance=~"$node"'
POD = f'{NODE},namespace=~"$namespace",pod=~"$pod"'
ONLINE = f'{POD},qos=~"shared_cores|dedicated_cores"'
RECLAIMED = f'{NODE},qos="reclaimed_cores"'
RATE = "[$__rate_interval]"
BY_POD = "instance, namespace, pod"
POD_NAME = "{{namespace}}/{{pod}} on {{instance}}"
TARGET = f"dioptase_latency_target_seconds{{{NODE}}}"
"""What the policy holds p99 against, and so does the alert DioptaseOnlineWaitHigh. A setting: no number of it stands here."""


class Query(NamedTuple):
    """One PromQL expression and how its series are called."""

    expr: str
    legend: str


def quantile(q: float, metric: str, selector: str, by: str = BY_POD) -> str:
    return f"histogram_quantile({q}, sum by ({by}, le) (rate({metric}_bucket{{{selector}}}{RATE})))"


def rate_by(metric: str, selector: str, by: str = BY_POD) -> str:
    return f"sum by ({by}) (rate({metric}{{{selector}}}{RATE}))"


def overview() -> str:
    """The whole dashboard as Grafana imports it."""
    board = (
        dashboard_builder.Dashboard("Dioptase overview")
        .uid("dioptase-overview")
        .description("Who waits for CPU, what is lent to batch work, what was decided and why.")
        .tags(["dioptase", "colocation"])
        .time("now-15m", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .readonly()
    )
    for variable in _variables():
        board = board.with_variable(variable)
    numbers = count(1)
    for title, panels in _rows():
        board = board.with_row(dashboard_builder.Row(title).id(next(numbers)))
        for panel in panels:
            board = board.with_panel(panel.id(next(numbers)))
    return json.dumps(board.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _variables() -> list[Builder[dashboard.VariableModel]]:
    def of(name: str, label: str, query: str) -> Builder[dashboard.VariableModel]:
        return (
            dashboard_builder.QueryVariable(name)
            .label(label)
            .datasource(SOURCE)
            .query(query)
            .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
            .multi(multi=True)
            .include_all(include_all=True)
            .all_value(".+")
            .current(dashboard.VariableOption(text="All", value="$__all"))
        )

    return [
        dashboard_builder.DatasourceVariable("datasource").label("Prometheus").type("prometheus"),
        of("node", "Node", "label_values(dioptase_build_info, instance)"),
        of("namespace", "Namespace", f"label_values(dioptase_cgroup_threads{{{NODE}}}, namespace)"),
        of("pod", "Pod", f'label_values(dioptase_cgroup_threads{{{NODE},namespace=~"$namespace"}}, pod)'),
    ]


Panel = heatmap.Panel | stat.Panel | statetimeline.Panel | timeseries.Panel


def _rows() -> list[tuple[str, list[Panel]]]:
    return [
        ("At a glance", _glance()),
        ("Who waits", _waits()),
        ("Who uses the CPU", _use()),
        ("What is lent", _lent()),
        ("What was decided", _decided()),
        ("Is the agent healthy", _health()),
    ]


def _glance() -> list[Panel]:
    wait = "dioptase_cgroup_runq_wait_seconds"
    busy = f'sum(rate(dioptase_node_cpu_seconds_total{{{NODE},mode!~"idle|iowait|steal"}}{RATE}))'
    return [
        _number("Worst online wait, p99", units.PercentUnit,
                f"max({quantile(0.99, wait, ONLINE)} / on (instance) group_left () {TARGET})",
                "Run-queue wait of the slowest online pod, as a share of its node's target. From half of the target on nothing "
                "more is lent; above it CPU is taken back.", (0.5, 1)),
        _number("Node use", units.PercentUnit, f"{busy} / sum(dioptase_node_cpus{{{NODE}}})",
                "Share of all CPUs that run something. Lending is there to raise it."),
        _number("Lent", "cores", f"sum(dioptase_reclaim_lent_cores{{{NODE}}})", "What reclaimed pods may use now."),
        _number("Used by reclaimed pods", "cores",
                f"sum(rate(dioptase_cgroup_cpu_usage_seconds_total{{{RECLAIMED}}}{RATE}))",
                "What they do use. Well below what is lent: they have no more to do."),
        _number("Nodes that act", units.Short, f'sum(dioptase_act_mode{{{NODE},mode="on"}})',
                "Nodes whose agent writes. The others decide nothing, or only say what they would do."),
        _number("Most overdue round", units.Seconds,
                f"max(time() - dioptase_snapshot_timestamp_seconds{{{NODE}}} - on (instance) dioptase_round_interval_seconds)",
                "Seconds since an agent last looked at its node, less the interval at which it is set to look.", (5, 15)),
    ]  # fmt: skip


def _waits() -> list[Panel]:
    wait = "dioptase_cgroup_runq_wait_seconds"
    latency = "dioptase_indicator_latency_seconds"
    return [
        _heat("Waits of online pods", ONLINE, "Each column is a moment, each cell how many waits of that length ended."),
        _heat("Waits of reclaimed pods", f'{POD},qos="reclaimed_cores"', "They are meant to wait: they run on what is left."),
        _lines("Run-queue wait, p99", units.Seconds,
               "99 of 100 waits were no longer. An online pod above its node's target is what the alert is about.",
               Query(quantile(0.99, wait, POD), POD_NAME), Query(TARGET, "target on {{instance}}"), log=True),
        _lines("Run-queue wait, median", units.Seconds, "Half of the waits were no longer.",
               Query(quantile(0.5, wait, POD), POD_NAME), log=True),
        _lines("Tasks waiting", units.Short,
               "Mean number of tasks that could run and did not: what a pod lacks in CPUs, whatever it uses.",
               Query(rate_by(f"{wait}_sum", POD), POD_NAME)),
        _lines("Request latency that pods report, p99", units.Seconds,
               "The pods' own word, where they publish it: it should stay put while work is lent.",
               Query(quantile(0.99, latency, POD), POD_NAME)),
    ]  # fmt: skip


def _use() -> list[Panel]:
    throttled = rate_by("dioptase_cgroup_cpu_throttled_periods_total", POD)
    periods = rate_by("dioptase_cgroup_cpu_periods_total", POD)
    return [
        _lines("CPU use by pod", "cores", "Cores in use, stacked.",
               Query(rate_by("dioptase_cgroup_cpu_usage_seconds_total", POD), POD_NAME), stacked=True),
        _lines("CPU use of the node by mode", "cores", "Steal is time that the hypervisor gave to somebody else.",
               Query(rate_by("dioptase_node_cpu_seconds_total", f'{NODE},mode!="idle"', "instance, mode"),
                     "{{mode}} on {{instance}}"), stacked=True),
        _lines("Periods throttled", units.PercentUnit,
               "Share of CFS periods in which a pod's own quota ran out. Lending does not cause this; a low limit does.",
               Query(f"{throttled} / {periods}", POD_NAME)),
        _lines("Stalled on CPU (PSI)", units.PercentUnit, "Share of time in which some task of the pod waited for a CPU.",
               Query(rate_by("dioptase_cgroup_pressure_seconds_total", f'{POD},resource="cpu",kind="some"'), POD_NAME)),
    ]  # fmt: skip


def _lent() -> list[Panel]:
    used = rate_by("dioptase_cgroup_cpu_usage_seconds_total", RECLAIMED, "instance")
    return [
        _lines("Lent, used, left", "cores",
               "What reclaimed pods may use, what they use, what could be promised on top, and what online pods need.",
               Query(f"dioptase_reclaim_lent_cores{{{NODE}}}", "lent on {{instance}}"),
               Query(used, "used by reclaimed pods on {{instance}}"),
               Query(f"dioptase_reclaim_headroom_cores{{{NODE}}}", "headroom on {{instance}}"),
               Query(f"dioptase_share_requirement_cores{{{NODE}}}", "needed by online pods on {{instance}}")),
        _lines("CPUs of the pools", units.Short, "Pools overlap where priority, not partition, separates them.",
               Query(f"dioptase_pool_cpus{{{NODE}}}", "{{pool}} on {{instance}}")),
    ]  # fmt: skip


def _decided() -> list[Panel]:
    changes = f'increase(dioptase_decisions_total{{{NODE},outcome!="unchanged"}}{RATE})'
    return [
        _lines("Decisions that did something, or failed to", units.Short,
               "By the rule that fired and what came of it; `dioptase explain` tells each with its numbers.",
               Query(f"sum by (instance, rule, outcome) ({changes})", "{{rule}}: {{outcome}} on {{instance}}"), bars=True),
        _lines("Rounds by trigger and action", "rounds/s",
               "`tick` is the clock; `wait` and `psi` mean that online pods suffered in between.",
               Query(rate_by("dioptase_rounds_total", NODE, "instance, trigger, action"),
                     "{{trigger}}: {{action}} on {{instance}}"), stacked=True),
    ]  # fmt: skip


def _health() -> list[Panel]:
    return [
        _states("Sources", "What an agent reads, green while it answers; `dioptase doctor` on the node has the remedy.",
                Query(f"min by (instance, source) (dioptase_source_up{{{NODE}}})", "{{source}} on {{instance}}")),
        _lines("Round and sources, duration", units.Seconds, "A round should stay far below its second.",
               Query(f"dioptase_round_duration_seconds{{{NODE}}}", "round on {{instance}}"),
               Query(f"dioptase_source_duration_seconds{{{NODE}}}", "{{source}} on {{instance}}")),
        _lines("Snapshot age", units.Seconds, "Grows when an agent hangs; above the limit the alert DioptaseAgentSilent fires.",
               Query(f"time() - dioptase_snapshot_timestamp_seconds{{{NODE}}}", "{{instance}}"),
               Query(f"15 + 3 * dioptase_round_interval_seconds{{{NODE}}}", "limit on {{instance}}")),
        _lines("What the agent costs", "cores", "CPU of the agent's own process.",
               Query(f"rate(process_cpu_seconds_total{{{NODE}}}{RATE}) and on (instance) dioptase_build_info", "{{instance}}")),
        _lines("Memory of the agent", units.BytesIEC, "Resident memory of the agent's own process.",
               Query(f"process_resident_memory_bytes{{{NODE}}} and on (instance) dioptase_build_info", "{{instance}}")),
        _lines("Limitations", units.Short, "Things that a node lacks; the banner of its page names each with the remedy.",
               Query(f"dioptase_limitations{{{NODE}}}", "{{instance}}")),
        _lines("Reports lost", units.Short,
               "1 where decisions do not reach the disk of the node, and exports that no OpenTelemetry collector took.",
               Query(f"1 - dioptase_journal_writable{{{NODE}}}", "journal on {{instance}}"),
               Query(f"increase(dioptase_otel_failures_total{{{NODE}}}{RATE})", "exports of {{instance}}"),
               Query(f"increase(dioptase_otel_dropped_spans_total{{{NODE}}}{RATE})", "spans of {{instance}}")),
    ]  # fmt: skip


def _target(
    query: Query, ref: str = "A", form: PromQueryFormat = PromQueryFormat.TIME_SERIES
) -> prometheus_builder.Dataquery:
    return (
        prometheus_builder.Dataquery()
        .datasource(SOURCE)
        .ref_id(ref)
        .expr(query.expr)
        .legend_format(query.legend)
        .format(form)
        .range()
    )


def _thresholds(marks: tuple[float, ...]) -> dashboard_builder.ThresholdsConfig:
    colors = ("green", "orange", "red")
    steps = [dashboard.Threshold(color=color, value=at) for color, at in zip(colors, (None, *marks), strict=False)]
    return dashboard_builder.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps)


def _number(title: str, unit: str, expr: str, why: str, marks: tuple[float, ...] = ()) -> stat.Panel:
    return (
        stat.Panel()
        .title(title)
        .description(why)
        .datasource(SOURCE)
        .unit(unit)
        .decimals(2 if unit == "cores" else 0 if unit == units.Short else 1)
        .thresholds(_thresholds(marks))
        .color_mode(common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.AREA)
        .reduce_options(common_builder.ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(_target(Query(expr, "")))
        .height(4)
        .span(4)
    )


def _lines(
    title: str, unit: str, why: str, *queries: Query,
    stacked: bool = False, bars: bool = False, log: bool = False,
) -> timeseries.Panel:  # fmt: skip
    panel = (
        timeseries.Panel()
        .title(title)
        .description(why)
        .datasource(SOURCE)
        .unit(unit)
        .fill_opacity(60 if bars else 20 if stacked else 0)
        .draw_style(common.GraphDrawStyle.BARS if bars else common.GraphDrawStyle.LINE)
        .show_points(common.VisibilityMode.NEVER)
        .legend(
            common_builder.VizLegendOptions().show_legend(show_legend=True).placement(common.LegendPlacement.BOTTOM)
        )
        .tooltip(common_builder.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
        .height(8)
        .span(12)
    )
    if stacked or bars:
        panel = panel.stacking(common_builder.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    if not log:
        panel = panel.min(0)
    else:
        scale = common_builder.ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(2)
        panel = panel.scale_distribution(scale)
    for ref, query in zip("ABCDEFGH", queries, strict=False):
        panel = panel.with_target(_target(query, ref))
    return panel


def _heat(title: str, selector: str, why: str) -> heatmap.Panel:
    expr = f"sum by (le) (increase(dioptase_cgroup_runq_wait_seconds_bucket{{{selector}}}{RATE}))"
    return (
        heatmap.Panel()
        .title(title)
        .description(why)
        .datasource(SOURCE)
        .calculate(calculate=False)
        .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Turbo").exponent(0.5).steps(64))
        .y_axis(heatmap.YAxisConfig().unit(units.Seconds))
        .cell_gap(0)
        .with_target(_target(Query(expr, "{{le}}"), form=PromQueryFormat.HEATMAP))
        .height(8)
        .span(12)
    )


def _states(title: str, why: str, query: Query) -> statetimeline.Panel:
    states = dashboard.ValueMap(
        options={
            "0": dashboard.ValueMappingResult(text="down", color="red"),
            "1": dashboard.ValueMappingResult(text="up", color="green"),
        }
    )
    return (
        statetimeline.Panel()
        .title(title)
        .description(why)
        .datasource(SOURCE)
        .mappings([states])
        .show_value(common.VisibilityMode.NEVER)
        .with_target(_target(query))
        .height(8)
        .span(12)
    )


if __name__ == "__main__":
    OVERVIEW.write_text(overview())

"""Queries, panels and the board around them: the building blocks of every dashboard.
Every panel's description says what to conclude from it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from grafana_foundation_sdk.builders import bargauge, heatmap, stat, statetimeline, timeseries
from grafana_foundation_sdk.builders import common as common_builder
from grafana_foundation_sdk.builders import dashboard as dashboard_builder
from grafana_foundation_sdk.builders import prometheus as prometheus_builder
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard, units
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
NODE_SELECTOR = 'instance=~"$node"'
POD_SELECTOR = f'{NODE_SELECTOR},namespace=~"$namespace",pod=~"$pod"'
CGROUP_SELECTOR = f'{NODE_SELECTOR},cgroup=~"$cgroup"'
"""Cgroups by path, whether a listed pod owns them or not."""
ONLINE_SELECTOR = f'{POD_SELECTOR},qos=~"shared_cores|dedicated_cores"'
RECLAIMED_SELECTOR = f'{NODE_SELECTOR},qos="reclaimed_cores"'
RATE_INTERVAL = "[$__rate_interval]"
BY_POD = "job, instance, namespace, pod"
BY_CGROUP = "job, instance, cgroup"
POD_LEGEND = "{{namespace}}/{{pod}} on {{instance}}"
CGROUP_LEGEND = "{{cgroup}} on {{instance}}"
LATENCY_TARGET = f"dioptase_latency_target_seconds{{{NODE_SELECTOR}}}"
"""What the policy holds p99 against, and so does the alert DioptaseOnlineWaitHigh. A setting: no number of it stands here."""
MAX_SERIES = 12
"""Maximum number of lines in a panel; more cannot be distinguished."""


class Query(NamedTuple):
    """One PromQL expression and how its series are called."""

    expr: str
    legend: str


Panel = bargauge.Panel | heatmap.Panel | stat.Panel | statetimeline.Panel | timeseries.Panel


class Board(NamedTuple):
    """One dashboard: file name, purpose, variables besides `datasource` and `node`, and rows."""

    name: str
    title: str
    answers: str
    variables: tuple[str, ...]
    rows: tuple[tuple[str, list[Panel]], ...]
    span: str = "15m"
    """Time that is shown at first."""

    def json(self) -> str:
        """The whole dashboard as Grafana imports it."""
        board = (
            dashboard_builder.Dashboard(self.title)
            .uid(f"dioptase-{self.name}")
            .description(self.answers)
            .tags(["dioptase"])
            .time(f"now-{self.span}", "now")
            .refresh("10s")
            .timezone("browser")
            .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
            .link(_links())
            .readonly()
        )
        for variable in _variables(self.variables):
            board = board.with_variable(variable)
        numbers = count(1)
        for title, panels in self.rows:
            board = board.with_row(dashboard_builder.Row(title).id(next(numbers)))
            for panel in panels:
                board = board.with_panel(panel.id(next(numbers)))
        return json.dumps(board.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def quantile_by(q: float, metric: str, selector: str, by: str = BY_POD) -> str:
    """The q-quantile of a histogram, of each group of series."""
    return f"histogram_quantile({q}, sum by ({by}, le) (rate({metric}_bucket{{{selector}}}{RATE_INTERVAL})))"


def rate_by(metric: str, selector: str, by: str = BY_POD) -> str:
    """Growth a second of a counter, summed within each group of series."""
    return f"sum by ({by}) (rate({metric}{{{selector}}}{RATE_INTERVAL}))"


def top_series(expr: str, limit: int = MAX_SERIES) -> str:
    """Only the largest series."""
    return f"topk({limit}, {expr})"


def _links() -> Builder[dashboard.DashboardLink]:
    return (
        dashboard_builder.DashboardLink("Dioptase")
        .type(dashboard.DashboardLinkType.DASHBOARDS)
        .tags(["dioptase"])
        .as_dropdown(as_dropdown=True)
        .keep_time(keep_time=True)
        .include_vars(include_vars=True)
    )


def _variables(names: Sequence[str]) -> list[Builder[dashboard.VariableModel]]:
    def of(name: str, label: str, query: str) -> Builder[dashboard.VariableModel]:
        return (
            dashboard_builder.QueryVariable(name)
            .label(label)
            .datasource(DATASOURCE)
            .query(query)
            .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
            .multi(multi=True)
            .include_all(include_all=True)
            .all_value(".+")
            .current(dashboard.VariableOption(text="All", value="$__all"))
        )

    values = {
        "namespace": of(
            "namespace", "Namespace", f"label_values(dioptase_cgroup_threads{{{NODE_SELECTOR}}}, namespace)"
        ),
        "pod": of(
            "pod", "Pod", f'label_values(dioptase_cgroup_threads{{{NODE_SELECTOR},namespace=~"$namespace"}}, pod)'
        ),
        "cgroup": of("cgroup", "Cgroup", f"label_values(dioptase_cgroup_threads{{{NODE_SELECTOR}}}, cgroup)"),
    }
    return [
        dashboard_builder.DatasourceVariable("datasource").label("Prometheus").type("prometheus"),
        of("node", "Node", "label_values(dioptase_build_info, instance)"),
        *(values[name] for name in names),
    ]


def _target(
    query: Query, ref: str = "A", form: PromQueryFormat = PromQueryFormat.TIME_SERIES, *, now: bool = False
) -> prometheus_builder.Dataquery:
    target = (
        prometheus_builder.Dataquery()
        .datasource(DATASOURCE)
        .ref_id(ref)
        .expr(query.expr)
        .legend_format(query.legend)
        .format(form)
    )
    return target.instant() if now else target.range()


def _thresholds(marks: tuple[float, ...]) -> dashboard_builder.ThresholdsConfig:
    colors = ("green", "orange", "red")
    steps = [dashboard.Threshold(color=color, value=at) for color, at in zip(colors, (None, *marks), strict=False)]
    return dashboard_builder.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps)


def stat_panel(title: str, unit: str, expr: str, why: str, marks: tuple[float, ...] = ()) -> stat.Panel:
    """One number, large."""
    return (
        stat.Panel()
        .title(title)
        .description(why)
        .datasource(DATASOURCE)
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


def line_panel(
    title: str, unit: str, why: str, *queries: Query,
    stacked: bool = False, bars: bool = False, log: bool = False,
) -> timeseries.Panel:  # fmt: skip
    """Lines over time."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(why)
        .datasource(DATASOURCE)
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


def heatmap_panel(title: str, metric: str, selector: str, why: str) -> heatmap.Panel:
    """A histogram over time: each column is a moment, each cell how often something took so long."""
    expr = f"sum by (le) (increase({metric}_bucket{{{selector}}}{RATE_INTERVAL}))"
    return (
        heatmap.Panel()
        .title(title)
        .description(why)
        .datasource(DATASOURCE)
        .calculate(calculate=False)
        .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Inferno").exponent(0.5).steps(64))
        .y_axis(heatmap.YAxisConfig().unit(units.Seconds))
        .cell_gap(0)
        .with_target(_target(Query(expr, "{{le}}"), form=PromQueryFormat.HEATMAP))
        .height(8)
        .span(12)
    )


UP_STATES = (("down", "red"), ("up", "green"), ("absent", "text"))
THRESHOLD_STATES = (("not met", "green"), ("soft", "orange"), ("hard", "red"))


def state_panel(
    title: str, why: str, query: Query, kinds: Sequence[tuple[str, str]] = UP_STATES
) -> statetimeline.Panel:
    """What something is over time; `kinds` are text and colour of 0, 1, 2."""
    states = dashboard.ValueMap(
        options={str(i): dashboard.ValueMappingResult(text=text, color=color) for i, (text, color) in enumerate(kinds)}
    )
    return (
        statetimeline.Panel()
        .title(title)
        .description(why)
        .datasource(DATASOURCE)
        .mappings([states])
        .show_value(common.VisibilityMode.NEVER)
        .with_target(_target(query))
        .height(8)
        .span(12)
    )


def bar_gauge_panel(title: str, unit: str, why: str, query: Query, marks: tuple[float, ...] = ()) -> bargauge.Panel:
    """A bar for each series as it is now, the longest first."""
    return (
        bargauge.Panel()
        .title(title)
        .description(why)
        .datasource(DATASOURCE)
        .unit(unit)
        .min(0)
        .thresholds(_thresholds(marks))
        .orientation(common.VizOrientation.HORIZONTAL)
        .display_mode(common.BarGaugeDisplayMode.BASIC)
        .value_mode(common.BarGaugeValueMode.TEXT)
        .reduce_options(common_builder.ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(_target(Query(f"sort_desc({query.expr})", query.legend), now=True))
        .height(8)
        .span(12)
    )

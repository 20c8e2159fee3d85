"""The dashboard of gain and cost: core-hours of reclaimed pods, latency of online pods with and without them."""

from __future__ import annotations

from grafana_foundation_sdk.models import units

from dashboards.panels import NODE_SELECTOR, RATE_INTERVAL, Board, Panel, Query, line_panel, stat_panel

RECLAIMABLE = f"dioptase_reclaimable_cpu_seconds_total{{{NODE_SELECTOR}}}"
USED = f"dioptase_reclaimed_cpu_seconds_total{{{NODE_SELECTOR}}}"
WAITED = f"dioptase_reclaimed_interference_seconds_total{{{NODE_SELECTOR}}}"
DAY, HOUR = "[1d]", "[1h]"
WITH, WITHOUT = "busy", "idle"


def board() -> Board:
    return Board(
        "worth",
        "Dioptase: gain and cost of colocation",
        (
            "CPU that reclaimed pods gained, run-queue latency that colocation cost online pods, and CPU that was taken back "
            "from reclaimed pods."
        ),
        (),
        (
            ("The last day", _last_day()),
            ("CPU gained", _gain()),
            ("Latency of online pods", _latency()),
            ("Taken back from reclaimed pods", _taken_back()),
        ),
        span="24h",
    )


def core_hours(counter: str) -> str:
    """Growth of a counter of CPU seconds over a day, in hours of one CPU."""
    return f"sum(increase({counter}{DAY})) / 3600"


def quantile(q: float, reclaimed_pods: str, window: str) -> str:
    """Quantile of the run-queue latency of online pods over a window, while reclaimed pods were busy or idle."""
    buckets = f'dioptase_online_runq_wait_seconds_bucket{{{NODE_SELECTOR},reclaimed_pods="{reclaimed_pods}"}}'
    return f"histogram_quantile({q}, sum by (le) (increase({buckets}{window})))"


def _last_day() -> list[Panel]:
    return [
        stat_panel(
            "Core-hours lent", units.Short, core_hours(RECLAIMABLE),
            "CPU time that reclaimed pods could use: it was within their limit, and no other task used it.",
        ),
        stat_panel(
            "Core-hours used", units.Short, core_hours(USED),
            "CPU time that reclaimed pods used. This work needed no nodes of its own.",
        ),
        stat_panel(
            "Used share of lent CPU", units.PercentUnit, f"{core_hours(USED)} / ({core_hours(RECLAIMABLE)})",
            "A low share means that there is too little batch work for the idle CPU.",
        ),
        stat_panel(
            "Online p99 with batch work", units.Seconds, quantile(0.99, WITH, DAY),
            "Run-queue latency p99 of all online pods while reclaimed pods used at least 0.05 cores of the node.",
        ),
        stat_panel(
            "Online p99 without batch work", units.Seconds, quantile(0.99, WITHOUT, DAY),
            "Run-queue latency p99 of all online pods while reclaimed pods used less than 0.05 cores of the node. Without a "
            "value, reclaimed pods were busy all day: suspend the batch jobs for ten minutes to compare.",
        ),
        stat_panel(
            "Harm to online pods", "s/s", f"sum(rate({WAITED}{DAY}))",
            "Seconds per second that online tasks waited while reclaimed pods used the CPU, summed over the nodes.",
        ),
    ]  # fmt: skip


def _gain() -> list[Panel]:
    return [
        line_panel(
            "CPU lent and used", "cores",
            "If reclaimed pods use far less CPU than they are lent, they have no more work. If they use nearly all of it, they "
            "could use more.",
            Query(f"sum(rate({RECLAIMABLE}{RATE_INTERVAL}))", "lent"),
            Query(f"sum(rate({USED}{RATE_INTERVAL}))", "used"),
        ),
        line_panel(
            "CPU used by namespace", "cores", "CPU of reclaimed pods, summed over the nodes.",
            Query(f"sum by (namespace) (rate({USED}{RATE_INTERVAL}))", "{{namespace}}"), stacked=True,
        ),
    ]  # fmt: skip


def _latency() -> list[Panel]:
    online = [f"dioptase_online_{what}_seconds_total{{{NODE_SELECTOR}}}" for what in ("cpu", "measured")]
    return [
        line_panel(
            "Online run-queue latency with and without batch work, p99", units.Seconds,
            "Values of the last hour. If the lines are equal, batch work costs online pods no latency. First compare the CPU "
            "of online pods: latency is comparable only at similar load.",
            Query(quantile(0.99, WITH, HOUR), "with batch work"),
            Query(quantile(0.99, WITHOUT, HOUR), "without batch work"), log=True,
        ),
        line_panel(
            "Online run-queue latency with and without batch work, p50", units.Seconds,
            "Values of the last hour. The p50 is the usual wait; the p99 is the rare long wait.",
            Query(quantile(0.5, WITH, HOUR), "with batch work"),
            Query(quantile(0.5, WITHOUT, HOUR), "without batch work"), log=True,
        ),
        line_panel(
            "CPU of online pods with and without batch work", "cores",
            "Mean per node in the last hour. If the lines differ by more than half, latency with and without batch work is not "
            "comparable, because the load of online pods differs.",
            Query(
                " / ".join(f"sum by (reclaimed_pods) (increase({metric}{HOUR}))" for metric in online),
                "reclaimed pods {{reclaimed_pods}}",
            ),
        ),
        line_panel(
            "Harm to online pods by node", "s/s",
            "Seconds per second that online tasks waited while reclaimed pods used the CPU. If one node is high, open the "
            "dashboard \"Dioptase: run-queue interference\" for it.",
            Query(f"topk(12, sum by (job, instance) (rate({WAITED}{RATE_INTERVAL})))", "{{instance}}"),
        ),
    ]  # fmt: skip


def _taken_back() -> list[Panel]:
    counters = [f"dioptase_reclaimed_{what}_total{{{NODE_SELECTOR}}}" for what in ("reductions", "evictions")]
    return [
        line_panel(
            "CPU reductions by rule", units.Short,
            "Cycles in the last hour that reduced the CPU quota or the CPUs of reclaimed pods.",
            Query(f"sum by (rule) (increase({counters[0]}{HOUR}))", "{{rule}}"), stacked=True,
        ),
        line_panel(
            "Evictions of reclaimed pods by rule", units.Short,
            "Evictions in the last hour. `dioptase explain POD` has the reason of each.",
            Query(f"sum by (rule) (increase({counters[1]}{HOUR}))", "{{rule}}"), stacked=True,
        ),
    ]  # fmt: skip

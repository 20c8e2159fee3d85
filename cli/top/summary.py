"""Summary lines of `dioptase top`: advice, CPU use, notices and sources, and one cycle as one line. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from api.advice import MemoryPressure
from api.forecast import ForecastResource
from api.text import printable
from cli import formats
from cli.top.charts import bar, is_online, truncate_line, wrap_text
from exporters.view.cycle_view import View

MEMORY_SHORTAGE_STATES = (MemoryPressure.TUNE_MEMCG, MemoryPressure.DROP_CACHE)


def notice_lines(view: View) -> Iterator[Text]:
    """Yield a line of any length per problem, and for the verdict on the CPU quota; none if there is neither."""
    yield from _eviction_notices(view)
    yield from _rejection_notice(view)
    yield from _memory_notice(view)
    if view.quota_trial:
        yield Text(printable(view.quota_trial), style="dim")


def _eviction_notices(view: View) -> Iterator[Text]:
    """Yield a line while a threshold of an eviction plugin is met, a condition holds or an evicted pod still runs."""
    evictions = view.evictions
    if evictions is None:
        return
    met = [threshold for threshold in evictions.thresholds if threshold.met != "not-met"]
    parts = [f"terminating: {', '.join(map(printable, evictions.terminating))}"] if evictions.terminating else []
    parts += [f"{printable(pod)} is to be evicted, blocked ({printable(why)})" for pod, why in evictions.held.items()]
    if met:
        more = f" (and {len(met) - 1} more)" if len(met) > 1 else ""
        parts.append(f"{printable(met[0].met)} {printable(met[0].plugin)}: {printable(met[0].text)}{more}")
    parts += [f"condition {printable(condition.name)}" for condition in evictions.conditions]
    if parts:
        yield Text(f"✕ evictions: {formats.join(parts)}", style="bold red")


def _rejection_notice(view: View) -> Iterator[Text]:
    for pod, reason in sorted(view.rejected.items())[:1]:
        more = f" (and {len(view.rejected) - 1} more)" if len(view.rejected) > 1 else ""
        yield Text(f"! rejected {printable(pod)}: {printable(reason.text)}{more}", style="yellow")


def _memory_notice(view: View) -> Iterator[Text]:
    if view.memory is not None and view.memory.condition.state in MEMORY_SHORTAGE_STATES:
        condition = view.memory.condition
        yield Text(f"! memory {condition.state.value}: {printable(condition.reason.text)}", style="yellow")


ACT_LABELS = {
    "on": ("● on: writes to cgroups", "bold green"),
    "dry-run": ("◌ dry-run: writes nothing", "bold yellow"),
    "off": ("○ off: decides nothing", "bold"),
}
ACTION_LABELS = {
    "grow": ("▲ grow", "green"),
    "hold": ("= hold", ""),
    "shrink": ("▼ shrink", "yellow"),
    "freeze": ("‖ freeze", "magenta"),
}
WATCH_ONLY_NOTICE = "No pods are listed: the agent watches every cgroup and decides nothing."


def header_line(view: View, width: int) -> Text:
    text, style = ACT_LABELS.get(view.act, (printable(view.act), ""))
    line = Text.assemble(
        ("dioptase", "bold"), "  ", (text, style), "  policy ", (printable(view.policy) or "none", "bold")
    )
    when = f"cycle {view.seq:,} · {formats.clock(view.wall_time_ms)}"
    line.append(when.rjust(max(width - line.cell_len, len(when) + 2)), "dim")
    return truncate_line(line, width)


def advice_lines(view: View, width: int, max_lines: int) -> list[Text]:
    """Render the advice of the latest cycle with its reason."""
    text, style = ACTION_LABELS.get(view.action, (printable(view.action) or "no advice", ""))
    default_reason = (
        WATCH_ONLY_NOTICE
        if not view.containers
        else "The agent decides nothing (--act off)."
        if view.act == "off"
        else ""
    )
    reason = view.reason or default_reason
    lines = wrap_text(f"{text}  {printable(reason)}", width, max_lines)
    lines[0].stylize(f"bold {style}".strip(), 0, len(text))
    return lines


def cpu_bars(view: View, width: int) -> list[Text]:
    """Render the CPU use of the node, and the reclaimable part of it."""
    online = sum(c.cpu_cores or 0.0 for c in view.containers if is_online(c))
    batch = view.reclaimed_cores or 0.0
    cpus, reclaimable = view.node_cpus, view.reclaimable_cores
    rest = None if view.busy_cores is None else max(view.busy_cores - online - batch, 0.0)
    bar_width = max(width // (4 if width < 100 else 3), 8)
    node = bar(bar_width, cpus, ((online, "█", "cyan"), (batch, "▓", "yellow"), (rest or 0.0, "▒", "dim")))
    reclaimed_bar = bar(
        bar_width,
        cpus,
        ((min(batch, reclaimable or 0.0), "▓", "yellow"), (max((reclaimable or 0.0) - batch, 0.0), "░", "yellow")),
    )
    parts = [
        f"{formats.cores(view.busy_cores)} of {cpus} busy",
        f"online {formats.cores(online)}",
        f"other {formats.cores(rest)}",
    ]
    if view.steal_cores:
        parts.append(f"steal {formats.cores(view.steal_cores)}")
    first = truncate_line(Text.assemble("node ", node, " ", " · ".join(parts)), width)
    if not view.containers and view.reclaimable_cores is None:
        return [first, _stall_line(view, bar_width, width)]
    amounts = [f"{formats.cores(reclaimable)} of {cpus} lent", f"{formats.cores(view.reclaimed_cores)} used"]
    amounts.append(f"need {formats.cores(view.requirement_cores)}")
    if view.headroom is not None and view.headroom.cores is not None:
        amounts.append(f"headroom {formats.cores(view.headroom.cores)}")
    if view.reported_headroom is not None and view.reported_headroom.cores is not None:
        reported = f"reported {formats.cores(view.reported_headroom.cores)}"
        # "lent ", the bar and a space precede the amounts; a cut amount would be misleading.
        amounts += [reported] if len(" · ".join([*amounts, reported])) <= width - bar_width - 6 else []
    return [
        first,
        truncate_line(Text.assemble("lent ", reclaimed_bar, " ", " · ".join(amounts)), width),
    ]


def _stall_line(view: View, bar_width: int, width: int) -> Text:
    """Without listed pods: render the pressure of the node, and the number of waiting tasks."""
    pressure = view.node.pressure
    cpu = pressure.get("cpu")
    waited = bar(bar_width, 1.0, ((cpu.some, "▒", "magenta"),) if cpu else ())
    parts = [
        f"stalled on {name} {formats.percent(pressure[name].some)}"
        for name in ("cpu", "memory", "io")
        if name in pressure
    ]
    wait = view.node.wait
    if wait is not None and view.interval_ms:
        tasks = (wait.mean_us or 0.0) * wait.count / 1000 / view.interval_ms
        parts.append(f"{formats.cores(tasks)} tasks wait")
    return truncate_line(Text.assemble("wait ", waited, " ", formats.join(parts) or formats.ABSENT), width)


def source_line(view: View, width: int) -> Text:
    """Render the sources; failed ones come first, with their remedy."""
    failed = [f"✕ {printable(s.name)}: {printable(s.error)} ({printable(s.remedy)})" for s in view.sources if not s.ok]
    healthy = [f"✓ {printable(s.name)}" + (f" {printable(s.detail)}" if s.detail else "") for s in view.sources if s.ok]
    line = Text.assemble((formats.join(failed), "red"))
    line.append(formats.join(["" if not failed else " ", *healthy], " · " if failed else "  "), "dim")
    return truncate_line(line, width)


def cycle_line(view: View) -> str:
    """Summarize a cycle on one line."""
    parts = [
        f"{formats.clock(view.wall_time_ms)}  {view.act} {view.action or 'no advice'}",
        f"lent {formats.cores(view.reclaimable_cores)} of {view.node_cpus} cores",
        f"used {formats.cores(view.reclaimed_cores)}",
        f"need {formats.cores(view.requirement_cores)}",
        f"busy {formats.cores(view.busy_cores)}",
    ]
    if view.shadow is not None:
        parts.append(
            f"shadow {printable(view.shadow.policy)} would lend {formats.cores(view.shadow.reclaimable_cores)} cores"
        )
    if view.quota_trial:
        parts.append(printable(view.quota_trial))
    parts += [f"{advice.topic}: {printable(advice.text)}" for advice in view.answers]
    parts += [
        f"forecast {formats.forecast_amount(forecast, forecast.forecast.peak)} at most"
        for forecast in view.forecasts
        if forecast.resource is ForecastResource.CPU and forecast.forecast.peak is not None
    ]
    for container in view.containers:
        wait, latency = container.wait, container.latency
        if container.qos == "reclaimed_cores" or (wait is None and latency is None):
            continue
        latencies = [f"wait p99 {formats.duration(wait.p99_us)}"] if wait and wait.p99_us is not None else []
        latencies += [f"wait mean {formats.duration(wait.mean_us)}"] if wait and wait.p99_us is None else []
        latencies += [f"latency p99 {formats.milliseconds(latency.p99_ms)}"] if latency else []
        parts.append(f"{printable(container.pod)}: {', '.join(latencies)}")
    return formats.join(parts)

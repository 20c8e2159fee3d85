"""Renders one frame of `dioptase top` from a View, its history and the decisions, for any terminal size. Pure.
Colour only supports the meaning: online CPU is a full block, batch a dark shade, others a medium shade.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from api.decision import JournalEntry, OutcomeStatus
from api.text import printable
from cli import formats
from cli.top.charts import runq_latency_charts, section_rule, truncate_line, wrap_text
from cli.top.container_table import container_table
from cli.top.screens import HELP_LINES, OVERVIEW, SCREENS, ScreenSelection, screen_lines_of
from cli.top.summary import advice_lines, cpu_bars, header_line, notice_lines, source_line
from exporters.view.cycle_view import View

STATUS_STYLES = {
    OutcomeStatus.APPLIED: "green",
    OutcomeStatus.DRY_RUN: "yellow",
    OutcomeStatus.REFUSED: "bold red",
    OutcomeStatus.MISMATCH: "bold red",
}
WIDE_COLUMNS = 124
"""Minimum width for full titles."""
TALL_ROWS = 32
"""Minimum height for taller charts and longer sentences."""


def render(
    view: View | None,
    history: Sequence[View],
    entries: Sequence[JournalEntry],
    size: tuple[int, int],
    choice: ScreenSelection,
    notice: str = "",
) -> RenderableType:
    """Render the selected screen, exactly as wide and at most as high as `size`; the last line names the keys."""
    width, height = size
    if choice.help or choice.screen != OVERVIEW.key:
        lines = screen_lines(view, history, size, choice, notice)
    else:
        lines = overview_lines(view, history, entries, width, height - 1, notice=notice)
    padding = [Text()] * (height - 1 - len(lines))
    return Group(*lines[: height - 1], *padding, key_line(choice, max(width, 20)))


def overview_lines(
    view: View | None,
    history: Sequence[View],
    entries: Sequence[JournalEntry],
    width: int,
    height: int,
    *,
    notice: str = "",
) -> list[Text]:
    """Render the overview from the top. `notice` explains outdated or missing numbers."""
    width = max(width, 20)
    warning = wrap_text(notice, width, 3, "bold red") if notice else []
    if view is None:
        return [Text("dioptase", style="bold"), *warning][:height]
    top = [
        *warning,
        header_line(view, width),
        *advice_lines(view, width, 2 if height >= 20 else 1),
        *cpu_bars(view, width),
    ]
    for sentence in view.startup_warnings[: 3 if height >= TALL_ROWS else 2]:
        top += wrap_text(f"! {printable(sentence)}", width, 2 if height >= TALL_ROWS else 1, "yellow")
    top += [truncate_line(line, width) for line in notice_lines(view)]
    bottom = [source_line(view, width)]
    free = height - len(top) - len(bottom)
    has_decisions = bool(view.containers or entries)
    max_rows = free // 2 - 6 if has_decisions else free - 9
    rows = [section_rule("workloads", width), *container_table(view, history, width, max(max_rows, 4))]
    charts: list[Text] = []
    if free - len(rows) >= 8:
        charts = [
            section_rule("run-queue waits of the last 30 s", width),
            *runq_latency_charts(view, history, width, 4 if height < TALL_ROWS else 6),
        ]
    free -= len(rows) + len(charts)
    decisions: list[Text] = []
    if free >= 2 and has_decisions:
        decisions = [section_rule("decisions, newest first", width), *decision_lines(entries, width, free - 1)]
    frame = [*top, *rows, *charts, *decisions]
    padding = [Text()] * max(height - len(frame) - len(bottom), 0)
    return [*frame, *padding, *bottom][:height]


def screen_lines(
    view: View | None, history: Sequence[View], size: tuple[int, int], choice: ScreenSelection, notice: str = ""
) -> list[Text]:
    """Render one of the other screens, or the help, from the top."""
    width, height = max(size[0], 20), size[1]
    top = wrap_text(notice, width, 3, "bold red") if notice else []
    if view is not None:
        top.append(header_line(view, width))
    if choice.help:
        return [*top, section_rule("keys", width), *(truncate_line(Text(line), width) for line in HELP_LINES)]
    if view is None:
        return top
    screen = SCREENS[choice.screen]
    shown = screen_lines_of(view, history, screen, choice.sort, (width, height - len(top) - 2))
    return [*top, section_rule(screen.title, width), *(truncate_line(line, width) for line in shown)]


def key_line(choice: ScreenSelection, width: int) -> Text:
    """Render the screens with their keys; the selected one is marked."""
    line = Text()
    for screen in SCREENS.values():
        chosen = screen.key == choice.screen and not choice.help
        line.append(
            f" {screen.key} {screen.title if width >= WIDE_COLUMNS else screen.short} ", "reverse" if chosen else "dim"
        )
    line.append(" s sort  ? help  q quit", "dim")
    return truncate_line(line, width)


def decision_lines(entries: Sequence[JournalEntry], width: int, max_lines: int) -> list[Text]:
    """Render the newest decisions that fit; long reasons are wrapped if there is room."""
    if not entries:
        return [truncate_line(Text("No cgroup has been changed yet.", style="dim"), width)]
    lines: list[Text] = []
    lines_per_entry = 2 if max_lines >= 8 else 1
    for index, entry in enumerate(reversed(entries)):
        if len(lines) >= max_lines:
            break
        lines += wrap_decision(entry, width, min(2 if index == 0 else lines_per_entry, max_lines - len(lines)))
    return lines


def wrap_decision(entry: JournalEntry, width: int, max_lines: int) -> list[Text]:
    outcome = entry.outcome
    when = formats.clock(entry.wall_time_ns / 1e6)
    status = "" if outcome.status is OutcomeStatus.APPLIED else f" {outcome.status.value}"
    head = f"{formats.STATUS_SIGNS[outcome.status]}{status}"
    name = formats.decision_target(outcome.decision)
    change = f"{outcome.decision.knob.value} {formats.knob_change(outcome)}"
    error = f"{printable(outcome.error)}; " if outcome.error else ""
    lines = wrap_text(
        f"{when} {head} {name} {change}  {error}{printable(outcome.decision.reason.text)}",
        width,
        max_lines,
        indent=9,
    )
    lines[0].stylize("dim", 0, len(when))
    start = len(when) + 1
    lines[0].stylize(STATUS_STYLES.get(outcome.status, "dim"), start, start + len(head))
    start += len(head) + len(name) + 2
    lines[0].stylize("bold", start, start + len(change))
    return lines

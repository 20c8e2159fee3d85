"""One frame of `dioptase top`: a View, its history and the decisions, as lines of text for a terminal of any size. Pure.

Colour helps and never tells alone: online CPU is a full block, batch a dark shade, others a medium one.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from api.decisions import JournalEntry, Status
from cli import words
from cli.charts import bar, waits
from cli.keys import Choice
from cli.notices import notices
from cli.screens import HELP, OVERVIEW, SCREENS, body
from cli.table import containers
from exporters.view import View

ACTS = {
    "on": ("● on: writes to cgroups", "bold green"),
    "dry-run": ("◌ dry-run: writes nothing", "bold yellow"),
    "off": ("○ off: decides nothing", "bold"),
}
ACTIONS = {
    "grow": ("▲ grow", "green"),
    "hold": ("= hold", ""),
    "shrink": ("▼ shrink", "yellow"),
    "freeze": ("‖ freeze", "magenta"),
}
STATUS_STYLES = {
    Status.APPLIED: "green",
    Status.DRY_RUN: "yellow",
    Status.REFUSED: "bold red",
    Status.MISMATCH: "bold red",
}
WATCHING = "No pods are listed: every cgroup is watched, and nothing is decided."
WIDE = 124
"""From this width on there is room for whole titles."""
TALL = 32
"""From this height on there is room for taller charts and longer sentences."""


def render(
    view: View | None,
    history: Sequence[View],
    entries: Sequence[JournalEntry],
    size: tuple[int, int],
    choice: Choice,
    notice: str = "",
) -> RenderableType:
    """What the keys have chosen, exactly as wide and at most as high as asked; the last line names the keys."""
    width, height = size
    if choice.help or choice.screen != OVERVIEW.key:
        made = screen_lines(view, history, size, choice, notice)
    else:
        made = lines(view, history, entries, width, height - 1, notice=notice)
    padding = [Text()] * (height - 1 - len(made))
    return Group(*made[: height - 1], *padding, keys(choice, max(width, 20)))


def lines(
    view: View | None,
    history: Sequence[View],
    entries: Sequence[JournalEntry],
    width: int,
    height: int,
    *,
    notice: str = "",
) -> list[Text]:
    """The overview's lines, from the top. `notice` says that the numbers are old, or why there are none."""
    width = max(width, 20)
    warning = wrapped(notice, width, 3, "bold red") if notice else []
    if view is None:
        return [Text("dioptase", style="bold"), *warning][:height]
    top = [*warning, header(view, width), *verdict(view, width, 2 if height >= 20 else 1), *bars(view, width)]
    for sentence in view.banner[: 3 if height >= TALL else 2]:
        top += wrapped(f"! {words.clean(sentence)}", width, 2 if height >= TALL else 1, "yellow")
    top += [fit(line, width) for line in notices(view)]
    bottom = [sources(view, width)]
    left = height - len(top) - len(bottom)
    decided = bool(view.containers or entries)
    most = left // 2 - 6 if decided else left - 9
    rows = [rule("workloads", width), *containers(view, history, width, max(most, 4))]
    charts: list[Text] = []
    if left - len(rows) >= 8:
        charts = [
            rule("run-queue waits of the last 30 s", width),
            *waits(view, history, width, 4 if height < TALL else 6),
        ]
    left -= len(rows) + len(charts)
    told: list[Text] = []
    if left >= 2 and decided:
        told = [rule("decisions, newest first", width), *decisions(entries, width, left - 1)]
    frame = [*top, *rows, *charts, *told]
    padding = [Text()] * max(height - len(frame) - len(bottom), 0)
    return [*frame, *padding, *bottom][:height]


def screen_lines(
    view: View | None, history: Sequence[View], size: tuple[int, int], choice: Choice, notice: str = ""
) -> list[Text]:
    """A further screen's lines, or the help's, from the top."""
    width, height = max(size[0], 20), size[1]
    top = wrapped(notice, width, 3, "bold red") if notice else []
    if view is not None:
        top.append(header(view, width))
    if choice.help:
        return [*top, rule("keys", width), *(fit(Text(line), width) for line in HELP)]
    if view is None:
        return top
    screen = SCREENS[choice.screen]
    shown = body(view, history, screen, choice.sort, (width, height - len(top) - 2))
    return [*top, rule(screen.title, width), *(fit(line, width) for line in shown)]


def keys(choice: Choice, width: int) -> Text:
    """The screens by their keys, the chosen one marked."""
    line = Text()
    for screen in SCREENS.values():
        chosen = screen.key == choice.screen and not choice.help
        line.append(f" {screen.key} {screen.title if width >= WIDE else screen.short} ", "reverse" if chosen else "dim")
    line.append(" s sort  ? help  q quit", "dim")
    return fit(line, width)


def header(view: View, width: int) -> Text:
    text, style = ACTS.get(view.act, (words.clean(view.act), ""))
    line = Text.assemble(
        ("dioptase", "bold"), "  ", (text, style), "  policy ", (words.clean(view.policy) or "none", "bold")
    )
    when = f"round {view.seq:,} · {words.clock(view.wall_time_ms)}"
    line.append(when.rjust(max(width - line.cell_len, len(when) + 2)), "dim")
    return fit(line, width)


def verdict(view: View, width: int, most: int) -> list[Text]:
    """What the latest round advised, and why."""
    text, style = ACTIONS.get(view.action, (words.clean(view.action) or "no advice", ""))
    silent = (
        WATCHING
        if not view.containers
        else "The agent was told to decide nothing (--act off)."
        if view.act == "off"
        else ""
    )
    reason = view.reason or silent
    made = wrapped(f"{text}  {words.clean(reason)}", width, most)
    made[0].stylize(f"bold {style}".strip(), 0, len(text))
    return made


def bars(view: View, width: int) -> list[Text]:
    """The node as it is used, and the part of it that is lent."""
    online = sum(c.cpu_cores or 0.0 for c in view.containers if c.qos in ("shared_cores", "dedicated_cores"))
    batch = view.reclaimed_cores or 0.0
    cpus, lent = view.node_cpus, view.lent_cores
    rest = None if view.busy_cores is None else max(view.busy_cores - online - batch, 0.0)
    size = max(width // (4 if width < 100 else 3), 8)
    node = bar(size, cpus, ((online, "█", "cyan"), (batch, "▓", "yellow"), (rest or 0.0, "▒", "dim")))
    debt = bar(size, cpus, ((min(batch, lent or 0.0), "▓", "yellow"), (max((lent or 0.0) - batch, 0.0), "░", "yellow")))
    parts = [
        f"{words.cores(view.busy_cores)} of {cpus} busy",
        f"online {words.cores(online)}",
        f"other {words.cores(rest)}",
    ]
    if view.steal_cores:
        parts.append(f"steal {words.cores(view.steal_cores)}")
    first = fit(Text.assemble("node ", node, " ", " · ".join(parts)), width)
    if not view.containers and view.lent_cores is None:
        return [first, _stalled(view, size, width)]
    loan = [f"{words.cores(lent)} of {cpus} lent", f"{words.cores(view.reclaimed_cores)} used"]
    loan.append(f"need {words.cores(view.requirement_cores)}")
    if view.headroom is not None and view.headroom.cores is not None:
        loan.append(f"headroom {words.cores(view.headroom.cores)}")
    if view.advertised is not None and view.advertised.cores is not None:
        told = f"advertised {words.cores(view.advertised.cores)}"
        # "lent ", the bar and a space go before; what does not fit as a whole would only be a riddle.
        loan += [told] if len(" · ".join([*loan, told])) <= width - size - 6 else []
    return [
        first,
        fit(Text.assemble("lent ", debt, " ", " · ".join(loan)), width),
    ]


def _stalled(view: View, size: int, width: int) -> Text:
    """Where nothing is lent: how much of the time somebody waited, and for what."""
    pressure = view.node.pressure
    cpu = pressure.get("cpu")
    waited = bar(size, 1.0, ((cpu.some, "▒", "magenta"),) if cpu else ())
    parts = [
        f"stalled on {name} {words.percent(pressure[name].some)}"
        for name in ("cpu", "memory", "io")
        if name in pressure
    ]
    wait = view.node.wait
    if wait is not None and view.interval_ms:
        tasks = (wait.mean_us or 0.0) * wait.count / 1000 / view.interval_ms
        parts.append(f"{words.cores(tasks)} tasks wait")
    return fit(Text.assemble("wait ", waited, " ", words.join(parts) or words.NONE), width)


def decisions(entries: Sequence[JournalEntry], width: int, most: int) -> list[Text]:
    """The newest decisions that fit; long reasons run on where there is room for all."""
    if not entries:
        return [fit(Text("No cgroup was changed yet.", style="dim"), width)]
    found: list[Text] = []
    each = 2 if most >= 8 else 1
    for index, entry in enumerate(reversed(entries)):
        if len(found) >= most:
            break
        found += decision(entry, width, min(2 if index == 0 else each, most - len(found)))
    return found


def decision(entry: JournalEntry, width: int, most: int) -> list[Text]:
    outcome = entry.outcome
    when = words.clock(entry.wall_time_ns / 1e6)
    status = "" if outcome.status is Status.APPLIED else f" {outcome.status.value}"
    head = f"{words.SIGNS[outcome.status]}{status}"
    name = words.owner(outcome.decision)
    what = f"{outcome.decision.knob.value} {words.change(outcome)}"
    error = f"{words.clean(outcome.error)}; " if outcome.error else ""
    made = wrapped(
        f"{when} {head} {name} {what}  {error}{words.clean(outcome.decision.verdict.text)}", width, most, indent=9
    )
    made[0].stylize("dim", 0, len(when))
    start = len(when) + 1
    made[0].stylize(STATUS_STYLES.get(outcome.status, "dim"), start, start + len(head))
    start += len(head) + len(name) + 2
    made[0].stylize("bold", start, start + len(what))
    return made


def sources(view: View, width: int) -> Text:
    """Where the numbers come from; what failed comes first, with its remedy."""
    failed = [
        f"✕ {words.clean(s.name)}: {words.clean(s.error)} ({words.clean(s.remedy)})" for s in view.sources if not s.ok
    ]
    good = [
        f"✓ {words.clean(s.name)}" + (f" {words.clean(s.detail)}" if s.detail else "") for s in view.sources if s.ok
    ]
    line = Text.assemble((words.join(failed), "red"))
    line.append(words.join(["" if not failed else " ", *good], " · " if failed else "  "), "dim")
    return fit(line, width)


def rule(title: str, width: int) -> Text:
    return Text(f"── {title} ".ljust(width, "─")[:width], style="dim")


def fit(line: Text, width: int) -> Text:
    """Cut at the terminal's edge, with an ellipsis."""
    line.truncate(width, overflow="ellipsis")
    line.no_wrap = True
    return line


def wrapped(text: str, width: int, most: int, style: str = "", *, indent: int = 2) -> list[Text]:
    """The text over at most so many lines; what does not fit ends in an ellipsis."""
    rest = text
    found: list[Text] = []
    while rest and len(found) < most:
        room = width if not found else width - indent
        cut = Text(rest)
        if len(found) == most - 1 or cut.cell_len <= room:
            piece, rest = rest, ""
        else:
            cut.truncate(room)
            space = cut.plain.rfind(" ")
            end = space if space > room // 2 else len(cut.plain)
            piece, rest = rest[:end], rest[end:].lstrip()
        found.append(fit(Text((" " * indent if found else "") + piece, style=style), width))
    return found or [Text()]

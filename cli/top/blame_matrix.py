"""Matrix of run-queue latency by aggressor: victims in rows, aggressors in columns. Unit: ms per second. Pure.
Own quota, real-time tasks and unattributed time have columns of their own on the right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from textwrap import wrap

from rich.text import Text

from api.text import printable
from cli import formats
from cli.top.container_table import cgroup_labels, fit_label
from exporters.view.cycle_view import View

BLAME_SPAN_MS = 30_000
CELL_WIDTH = 6
OTHER_CAUSES = ("quota", "rt", "other")
OTHER_CAUSES_TEXT = ("its own quota", "real-time tasks", "other causes")
"""The same causes in sentences."""
MIN_SHOWN_MS = 0.05
BOLD_MS, DIM_MS = 100.0, 10.0


class BlameRow:
    """Waits of one cgroup, averaged over several cycles, in milliseconds a second."""

    def __init__(self, cgroup: str) -> None:
        self.cgroup = cgroup
        self.by_cgroup: dict[str, float] = {}
        self.rest = 0.0
        self.other_causes = [0.0, 0.0, 0.0]

    @property
    def total(self) -> float:
        return sum(self.by_cgroup.values()) + self.rest + sum(self.other_causes)


def average_blame(views: Sequence[View]) -> list[BlameRow]:
    """Return the blame averaged over the time of these cycles, longest waits first."""
    seconds = sum((view.interval_ms or 0.0) / 1000 for view in views)
    victims: dict[str, BlameRow] = {}
    for view in views:
        share = (view.interval_ms or 0.0) / 1000 / seconds if seconds else 0.0
        for c in (*view.containers, *view.others):
            if c.blame is None:
                continue
            victim = victims.setdefault(c.cgroup, BlameRow(c.cgroup))
            for aggressor, ms in c.blame.culprits:
                victim.by_cgroup[aggressor] = victim.by_cgroup.get(aggressor, 0.0) + ms * share
            victim.rest += c.blame.rest_ms * share
            ms_by_cause = (c.blame.throttled_ms, c.blame.higher_class_ms, c.blame.other_ms)
            victim.other_causes = [
                total + ms * share for total, ms in zip(victim.other_causes, ms_by_cause, strict=True)
            ]
    return sorted(victims.values(), key=lambda victim: -victim.total)


def blame_matrix(view: View, history: Sequence[View], width: int, height: int) -> list[Text]:
    """Return a summary sentence, and at most `height` lines of a table including its heading."""
    recent = [cycle for cycle in history if view.taken_at_ms - cycle.taken_at_ms < BLAME_SPAN_MS] or [view]
    names = cgroup_labels(c for cycle in recent for c in (*cycle.containers, *cycle.others))
    rows = average_blame(recent)
    victims = [victim for victim in rows if victim.total >= MIN_SHOWN_MS]
    if not victims:
        text = "No cgroup waits long enough to be listed." if rows else (
            "The aggressors are unknown: the blame probe is not running."
        )  # fmt: skip
        return [Text(text, style="dim")]
    summary = [Text(line, style="bold") for line in wrap(blame_summary(victims, names), width)]
    name_width = max(width // 4, 14)
    max_columns = max((width - name_width) // CELL_WIDTH - 2 - len(OTHER_CAUSES), 1)
    max_aggressors = max(height // 3, 1)
    victims = victims[: max(height - 1 - max_aggressors, 1)]
    aggressors = _worst_aggressors(victims)[: min(max_columns, max_aggressors, len(ascii_uppercase))]
    titles = ["all", *ascii_uppercase[: len(aggressors)], "rest", *OTHER_CAUSES]
    lines = [
        Text(
            "ms of wait a second".ljust(name_width)[:name_width] + "".join(title.rjust(CELL_WIDTH) for title in titles),
            style="dim",
        )
    ]
    for victim in victims:
        cells = [victim.total, *(victim.by_cgroup.get(aggressor, 0.0) for aggressor in aggressors)]
        rest = victim.rest + sum(ms for aggressor, ms in victim.by_cgroup.items() if aggressor not in aggressors)
        line = Text(fit_label(names.get(victim.cgroup, printable(victim.cgroup)), name_width))
        for ms in (*cells, rest):
            line.append(_format_cell(ms).rjust(CELL_WIDTH), _cell_style(ms))
        for ms in victim.other_causes:
            line.append(_format_cell(ms).rjust(CELL_WIDTH), "dim")
        lines.append(line)
    for letter, aggressor in zip(ascii_uppercase, aggressors, strict=False):
        lines.append(Text.assemble((f"{letter} ", "bold"), _aggressor_label(aggressor, names, width - 2)))
    return [*summary, *lines[:height]]


def blame_summary(victims: Sequence[BlameRow], names: Mapping[str, str]) -> str:
    """Describe the worst pair, after any larger cause of the victim itself; the page shows the same sentence."""
    pairs = [
        (ms, v, aggressor)
        for v in victims
        for aggressor, ms in v.by_cgroup.items()
        if aggressor != v.cgroup and ms >= MIN_SHOWN_MS
    ]
    if not pairs:
        return "No cgroup waits for another cgroup. The columns on the right have the other causes."
    ms, victim, aggressor = max(pairs, key=lambda amount: amount[0])
    own = victim.by_cgroup.get(victim.cgroup, 0.0)
    cause_ms, cause = max(
        ((own, "its own tasks"), *zip(victim.other_causes, OTHER_CAUSES_TEXT, strict=True)),
        key=lambda amount: amount[0],
    )
    victim_name, aggressor_name = (names.get(path, printable(path)) for path in (victim.cgroup, aggressor))
    amount = f"{_format_cell(ms)} ms a second, {formats.percent(ms / victim.total)}"
    if cause_ms <= ms:
        return f"{victim_name} waits most for {aggressor_name}: {amount} of its waits."
    share = formats.percent(cause_ms / victim.total)
    most = f"{victim_name} waits most for {cause}, {share} of its waits"
    return f"{most}; among other cgroups most for {aggressor_name}: {amount}."


def _worst_aggressors(victims: Sequence[BlameRow]) -> list[str]:
    caused: dict[str, float] = {}
    for victim in victims:
        for aggressor, ms in victim.by_cgroup.items():
            caused[aggressor] = caused.get(aggressor, 0.0) + ms
    return sorted((path for path in caused if caused[path] >= MIN_SHOWN_MS), key=lambda aggressor: -caused[aggressor])


def _aggressor_label(aggressor: str, names: Mapping[str, str], width: int) -> str:
    return fit_label(names.get(aggressor, printable(aggressor)), width).rstrip()


def _format_cell(ms: float) -> str:
    if ms < MIN_SHOWN_MS:
        return "·"
    return formats.fixed(ms, 1) if ms < 9.95 else formats.integer(ms)


def _cell_style(ms: float) -> str:
    return "bold" if ms >= BOLD_MS else "" if ms >= DIM_MS else "dim"

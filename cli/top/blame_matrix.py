"""Matrix of run-queue latency by aggressor: victims in rows, aggressors in columns. Unit: ms per second. Pure.
Own quota, real-time tasks and unattributed time have columns of their own on the right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from textwrap import wrap

from rich.text import Text

from cli import formats
from cli.top.container_table import cgroup_labels, fit_label
from exporters.view.cycle_view import View

BLAME_SPAN_MS = 30_000
CELL_WIDTH = 6
OTHER_CAUSES = ("quota", "rt", "other")
OTHER_CAUSES_TEXT = ("its own quota", "real-time tasks", "other causes")
"""The same in a sentence."""
MIN_SHOWN_MS = 0.05
BOLD_MS, DIM_MS = 100.0, 10.0


class BlameRow:
    """Waits of one cgroup, averaged over several rounds, in milliseconds a second."""

    def __init__(self, cgroup: str) -> None:
        self.cgroup = cgroup
        self.by: dict[str, float] = {}
        self.rest = 0.0
        self.apart = [0.0, 0.0, 0.0]

    @property
    def total(self) -> float:
        return sum(self.by.values()) + self.rest + sum(self.apart)


def average_blame(views: Sequence[View]) -> list[BlameRow]:
    """Blame over the time of these rounds, the longest waits first."""
    seconds = sum((view.interval_ms or 0.0) / 1000 for view in views)
    victims: dict[str, BlameRow] = {}
    for view in views:
        share = (view.interval_ms or 0.0) / 1000 / seconds if seconds else 0.0
        for c in (*view.containers, *view.others):
            if c.blame is None:
                continue
            victim = victims.setdefault(c.cgroup, BlameRow(c.cgroup))
            for culprit, ms in c.blame.culprits:
                victim.by[culprit] = victim.by.get(culprit, 0.0) + ms * share
            victim.rest += c.blame.rest_ms * share
            found = (c.blame.throttled_ms, c.blame.higher_class_ms, c.blame.other_ms)
            victim.apart = [known + ms * share for known, ms in zip(victim.apart, found, strict=True)]
    return sorted(victims.values(), key=lambda victim: -victim.total)


def blame_matrix(view: View, history: Sequence[View], width: int, height: int) -> list[Text]:
    """A sentence, and at most so many lines of a table, the names of its columns included."""
    recent = [seen for seen in history if view.taken_at_ms - seen.taken_at_ms < BLAME_SPAN_MS] or [view]
    names = cgroup_labels(c for seen in recent for c in (*seen.containers, *seen.others))
    known = average_blame(recent)
    victims = [victim for victim in known if victim.total >= MIN_SHOWN_MS]
    if not victims:
        told = "Nobody waits long enough for a line here." if known else (
            "Who had the CPU meanwhile is not known: the probe that tells is not running."
        )  # fmt: skip
        return [Text(told, style="dim")]
    said = [Text(line, style="bold") for line in wrap(blame_summary(victims, names), width)]
    name = max(width // 4, 14)
    room = max((width - name) // CELL_WIDTH - 2 - len(OTHER_CAUSES), 1)
    named = max(height // 3, 1)
    victims = victims[: max(height - 1 - named, 1)]
    culprits = _worst_aggressors(victims)[: min(room, named, len(ascii_uppercase))]
    titles = ["all", *ascii_uppercase[: len(culprits)], "rest", *OTHER_CAUSES]
    made = [
        Text(
            "ms of wait a second".ljust(name)[:name] + "".join(title.rjust(CELL_WIDTH) for title in titles), style="dim"
        )
    ]
    for victim in victims:
        cells = [victim.total, *(victim.by.get(culprit, 0.0) for culprit in culprits)]
        rest = victim.rest + sum(ms for culprit, ms in victim.by.items() if culprit not in culprits)
        line = Text(fit_label(names.get(victim.cgroup, formats.printable(victim.cgroup)), name))
        for ms in (*cells, rest):
            line.append(_format_cell(ms).rjust(CELL_WIDTH), _cell_style(ms))
        for ms in victim.apart:
            line.append(_format_cell(ms).rjust(CELL_WIDTH), "dim")
        made.append(line)
    for letter, culprit in zip(ascii_uppercase, culprits, strict=False):
        made.append(Text.assemble((f"{letter} ", "bold"), _aggressor_label(culprit, names, width - 2)))
    return [*said, *made[:height]]


def blame_summary(victims: Sequence[BlameRow], names: Mapping[str, str]) -> str:
    """The worst pair, and first what its victim waits for more than for any neighbour; the page says the same."""
    pairs = [(ms, v, by) for v in victims for by, ms in v.by.items() if by != v.cgroup and ms >= MIN_SHOWN_MS]
    if not pairs:
        return "No cgroup waits for another one; they wait for themselves, or for what stands apart."
    ms, victim, culprit = max(pairs, key=lambda pair: pair[0])
    own = victim.by.get(victim.cgroup, 0.0)
    most, cause = max(
        ((own, "its own tasks"), *zip(victim.apart, OTHER_CAUSES_TEXT, strict=True)), key=lambda pair: pair[0]
    )
    who, whom = (names.get(path, formats.printable(path)) for path in (victim.cgroup, culprit))
    pair = f"{_format_cell(ms)} ms a second, {formats.percent(ms / victim.total)}"
    if most <= ms:
        return f"{who} waits most for {whom}: {pair} of its waits."
    share = formats.percent(most / victim.total)
    return f"{who} waits most for {cause}, {share} of its waits; of its neighbours most for {whom}: {pair}."


def _worst_aggressors(victims: Sequence[BlameRow]) -> list[str]:
    caused: dict[str, float] = {}
    for victim in victims:
        for culprit, ms in victim.by.items():
            caused[culprit] = caused.get(culprit, 0.0) + ms
    return sorted((c for c in caused if caused[c] >= MIN_SHOWN_MS), key=lambda culprit: -caused[culprit])


def _aggressor_label(culprit: str, names: Mapping[str, str], width: int) -> str:
    return fit_label(names.get(culprit, formats.printable(culprit)), width).rstrip()


def _format_cell(ms: float) -> str:
    if ms < MIN_SHOWN_MS:
        return "·"
    return formats.fixed(ms, 1) if ms < 9.95 else formats.integer(ms)


def _cell_style(ms: float) -> str:
    return "bold" if ms >= BOLD_MS else "" if ms >= DIM_MS else "dim"

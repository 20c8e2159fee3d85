"""Compares policies side by side: a table of scores and a timeline per policy. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from agent.offline.replay import CycleFacts, PolicyOutcome, PolicyScore, ScoreCounters
from cli.top.charts import BLOCKS

TIMELINE_COLUMNS = 60


class PolicyTimeline:
    """Score and timeline of one policy, collected cycle by cycle."""

    def __init__(self, horizon_s: float) -> None:
        self.counters = ScoreCounters(horizon_s)
        self._reclaimable: list[tuple[float, float]] = []
        self._online: list[tuple[float, float]] = []
        self._step = 1
        self._cycles = 0
        self.covered_s = 0.0
        """Duration of all cycles."""

    def add(self, fact: CycleFacts, mark: PolicyOutcome) -> None:
        self.counters.add(fact, mark)
        self.covered_s += fact.interval_s
        self._cycles += 1
        if self._cycles % self._step:
            return
        self._reclaimable.append((fact.at_s, mark.reclaimable_cores))
        self._online.append((fact.at_s, fact.online_cores))
        # Bounds the memory of a run of any length: half as many points, twice as far apart.
        if len(self._reclaimable) >= 16 * TIMELINE_COLUMNS:
            self._reclaimable, self._online, self._step = self._reclaimable[::2], self._online[::2], 2 * self._step

    def lines(self) -> dict[str, list[float]]:
        """Return the means over equal parts of the time: reclaimable cores and online cores."""
        return {"lent": _mean_per_column(self._reclaimable), "online": _mean_per_column(self._online)}


def _mean_per_column(points: Sequence[tuple[float, float]]) -> list[float]:
    if not points:
        return []
    first, last = points[0][0], points[-1][0]
    span = (last - first) or 1.0
    sums, counts = [0.0] * TIMELINE_COLUMNS, [0] * TIMELINE_COLUMNS
    for at_s, value in points:
        column = min(int((at_s - first) / span * TIMELINE_COLUMNS), TIMELINE_COLUMNS - 1)
        sums[column] += value
        counts[column] += 1
    means: list[float] = []
    for total, count in zip(sums, counts, strict=True):
        means.append(total / count if count else means[-1] if means else 0.0)
    return means


RUNQ_LATENCY_ROWS: tuple[tuple[str, Callable[[PolicyScore], str]], ...] = (
    ("online wait p50", lambda s: _format_ms(s.wait_p50_ms)),
    ("online wait p99", lambda s: _format_ms(s.wait_p99_ms)),
)
"""In a simulation each policy has its own latencies; a recording has one set, whatever policy is evaluated."""
SCORE_ROWS: tuple[tuple[str, Callable[[PolicyScore], str]], ...] = (
    ("reclaimable, cores", lambda s: f"{s.reclaimable_cores:.2f}"),
    ("used by batch work, cores", lambda s: f"{s.batch_cores:.2f}"),
    *RUNQ_LATENCY_ROWS,
    ("online wait caused by batch", lambda s: f"{s.harm_ms_per_s:.1f} ms/s"),
    ("online demand above its pool", lambda s: f"{s.short_ms_per_s:.1f} ms/s"),
    ("headroom, cores", lambda s: "-" if s.headroom_cores is None else f"{s.headroom_cores:.2f}"),
    ("headroom exceeded", lambda s: "-" if s.missed_ratio is None else f"{s.missed_ratio:.1%}"),
    ("exceeded by, cores", lambda s: "-" if s.missed_cores is None else f"{s.missed_cores:.2f}"),
    ("reductions", lambda s: f"{s.shrinks}"),
    ("values written", lambda s: f"{s.changes}"),
    ("pods that would be evicted", lambda s: "-" if s.victims is None else f"{s.victims}"),
)


def score_table(scores: Mapping[str, PolicyScore], *, from_recording: bool = False) -> Table:
    """One column per policy. Latencies `from_recording` are left out: `score_notes` reports them once."""
    shown = Table(box=None, header_style="bold", pad_edge=False)
    rounds = max((score.rounds for score in scores.values()), default=0)
    shown.add_column(f"{rounds:,} cycles, means over time", header_style="dim")
    for name in scores:
        shown.add_column(name, justify="right")
    for title, cell in SCORE_ROWS:
        if not (from_recording and (title, cell) in RUNQ_LATENCY_ROWS):
            shown.add_row(title, *map(cell, scores.values()))
    return shown


def score_notes(
    scores: Mapping[str, PolicyScore], horizon_s: float, covered_s: float, *, from_recording: bool
) -> list[str]:
    """Notes below the table; `covered_s` is the duration of all cycles."""
    all_scores = list(scores.values())
    notes = []
    if from_recording and all_scores:
        waits = ", ".join(f"{title.rpartition(' ')[2]} {cell(all_scores[0])}" for title, cell in RUNQ_LATENCY_ROWS)
        notes.append(f"online waits as recorded: {waits}; they would differ under other policies")
    notes.append(
        "demand above its pool: CPU that online pods needed beyond their own pool, where batch work has separate CPUs"
    )
    missed = (
        f"exceeded: the peak use of online pods in the following {horizon_s:g} s did not leave the reported headroom"
    )
    if covered_s <= horizon_s and any(score.headroom_cores is not None for score in all_scores):
        missed += f"; these cycles last {covered_s:.0f} s, too short to compare any headroom: try a shorter --horizon"
    return [*notes, missed]


def timeline_lines(tracks: Mapping[str, PolicyTimeline], node_cpus: int) -> list[Text]:
    """The use of online pods, and what each policy makes reclaimable, from left to right; full height is the whole node."""
    width = max((len(name) for name in tracks), default=0) + len("reclaimable ") + 2
    texts = []
    for number, (name, track) in enumerate(tracks.items()):
        lines = track.lines()
        if number == 0:
            texts.append(
                Text.assemble(("online".ljust(width), "cyan"), (_timeline_line(lines["online"], node_cpus), "cyan"))
            )
        texts.append(
            Text.assemble(
                (f"reclaimable {name}".ljust(width), "bold"), (_timeline_line(lines["lent"], node_cpus), "yellow")
            )
        )
    return texts


def _timeline_line(values: Sequence[float], full_height: float) -> str:
    steps = len(BLOCKS) - 1
    return "".join(BLOCKS[round(min(max(value / full_height, 0.0), 1.0) * steps)] for value in values)


def _format_ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms" if value < 10 else f"{value:.0f} ms"

"""Compares policies side by side: a table of scores and a timeline per policy. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from agent.offline.replay import CycleFacts, PolicyOutcome, PolicyScore, ScoreCounters
from cli.top.charts import BLOCKS

TIMELINE_COLUMNS = 60


class PolicyTimeline:
    """What is kept of one policy while rounds go by: the score, and a line of what was lent and used."""

    def __init__(self, horizon_s: float) -> None:
        self.tally = ScoreCounters(horizon_s)
        self._lent: list[tuple[float, float]] = []
        self._online: list[tuple[float, float]] = []
        self._every = 1
        self._seen = 0
        self.covered_s = 0.0
        """How long the rounds took."""

    def add(self, fact: CycleFacts, mark: PolicyOutcome) -> None:
        self.tally.add(fact, mark)
        self.covered_s += fact.interval_s
        self._seen += 1
        if self._seen % self._every:
            return
        self._lent.append((fact.at_s, mark.reclaimable_cores))
        self._online.append((fact.at_s, fact.online_cores))
        # However long it takes: half as many points, twice as far apart.
        if len(self._lent) >= 16 * TIMELINE_COLUMNS:
            self._lent, self._online, self._every = self._lent[::2], self._online[::2], 2 * self._every

    def lines(self) -> dict[str, list[float]]:
        """Means over equal parts of the time."""
        return {"lent": _mean_per_column(self._lent), "online": _mean_per_column(self._online)}


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
    found: list[float] = []
    for total, count in zip(sums, counts, strict=True):
        found.append(total / count if count else found[-1] if found else 0.0)
    return found


RUNQ_LATENCY_ROWS: tuple[tuple[str, Callable[[PolicyScore], str]], ...] = (
    ("online wait p50", lambda s: _format_ms(s.wait_p50_ms)),
    ("online wait p99", lambda s: _format_ms(s.wait_p99_ms)),
)
"""Each policy's own in a simulation. A recording has those that were, whatever policy is asked."""
SCORE_ROWS: tuple[tuple[str, Callable[[PolicyScore], str]], ...] = (
    ("lent to batch work, cores", lambda s: f"{s.reclaimable_cores:.2f}"),
    ("used by it, cores", lambda s: f"{s.batch_cores:.2f}"),
    *RUNQ_LATENCY_ROWS,
    ("online waits for batch work", lambda s: f"{s.harm_ms_per_s:.1f} ms/s"),
    ("online short of its own CPUs", lambda s: f"{s.short_ms_per_s:.1f} ms/s"),
    ("promised, cores", lambda s: "-" if s.headroom_cores is None else f"{s.headroom_cores:.2f}"),
    ("promises missed", lambda s: "-" if s.missed_ratio is None else f"{s.missed_ratio:.1%}"),
    ("by, cores", lambda s: "-" if s.missed_cores is None else f"{s.missed_cores:.2f}"),
    ("times taken back", lambda s: f"{s.shrinks}"),
    ("values written", lambda s: f"{s.changes}"),
    ("pods that would have to leave", lambda s: "-" if s.victims is None else f"{s.victims}"),
)


def score_table(scores: Mapping[str, PolicyScore], *, from_recording: bool = False) -> Table:
    """One column for each policy; without waits where those are `recorded`, which are told once by `notes`."""
    shown = Table(box=None, header_style="bold", pad_edge=False)
    rounds = max((score.rounds for score in scores.values()), default=0)
    shown.add_column(f"{rounds:,} rounds, means over time", header_style="dim")
    for name in scores:
        shown.add_column(name, justify="right")
    for title, cell in SCORE_ROWS:
        if not (from_recording and (title, cell) in RUNQ_LATENCY_ROWS):
            shown.add_row(title, *map(cell, scores.values()))
    return shown


def score_notes(
    scores: Mapping[str, PolicyScore], horizon_s: float, covered_s: float, *, from_recording: bool
) -> list[str]:
    """What the table cannot say by itself; `covered_s` is how long the rounds took."""
    some = list(scores.values())
    said = []
    if from_recording and some:
        waits = ", ".join(f"{title.rpartition(' ')[2]} {cell(some[0])}" for title, cell in RUNQ_LATENCY_ROWS)
        said.append(f"online waits as recorded: {waits}; under other policies they would have been others")
    said.append("short of its own CPUs: what online pods wanted beyond their own pool, where batch work has CPUs apart")
    missed = f"missed: the most that online pods used in the {horizon_s:g} s after did not leave what was promised"
    if covered_s <= horizon_s and any(score.headroom_cores is not None for score in some):
        missed += f"; these rounds last {covered_s:.0f} s, so no promise could be judged: try a shorter --horizon"
    return [*said, missed]


def timeline_lines(tracks: Mapping[str, PolicyTimeline], node_cpus: int) -> list[Text]:
    """What online pods used, and what each policy lent, from left to right; the height of a line is the node."""
    width = max((len(name) for name in tracks), default=0) + len("lent ") + 2
    made = []
    for number, (name, track) in enumerate(tracks.items()):
        found = track.lines()
        if number == 0:
            made.append(
                Text.assemble(("online".ljust(width), "cyan"), (_timeline_line(found["online"], node_cpus), "cyan"))
            )
        made.append(
            Text.assemble((f"lent {name}".ljust(width), "bold"), (_timeline_line(found["lent"], node_cpus), "yellow"))
        )
    return made


def _timeline_line(values: Sequence[float], whole: float) -> str:
    steps = len(BLOCKS) - 1
    return "".join(BLOCKS[round(min(max(value / whole, 0.0), 1.0) * steps)] for value in values)


def _format_ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms" if value < 10 else f"{value:.0f} ms"

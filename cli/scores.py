"""Policies side by side: a table of what each lent, missed and harmed, and a line over time for each. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from agent.replay import Fact, Mark, Score, Tally
from cli.charts import BLOCKS

COLUMNS = 60


class Track:
    """What is kept of one policy while rounds go by: the score, and a line of what was lent and used."""

    def __init__(self, horizon_s: float) -> None:
        self.tally = Tally(horizon_s)
        self._lent: list[tuple[float, float]] = []
        self._online: list[tuple[float, float]] = []
        self._every = 1
        self._seen = 0
        self.covered_s = 0.0
        """How long the rounds took."""

    def add(self, fact: Fact, mark: Mark) -> None:
        self.tally.add(fact, mark)
        self.covered_s += fact.interval_s
        self._seen += 1
        if self._seen % self._every:
            return
        self._lent.append((fact.at_s, mark.lent_cores))
        self._online.append((fact.at_s, fact.online_cores))
        # However long it takes: half as many points, twice as far apart.
        if len(self._lent) >= 16 * COLUMNS:
            self._lent, self._online, self._every = self._lent[::2], self._online[::2], 2 * self._every

    def lines(self) -> dict[str, list[float]]:
        """Means over equal parts of the time."""
        return {"lent": _means(self._lent), "online": _means(self._online)}


def _means(points: Sequence[tuple[float, float]]) -> list[float]:
    if not points:
        return []
    first, last = points[0][0], points[-1][0]
    span = (last - first) or 1.0
    sums, counts = [0.0] * COLUMNS, [0] * COLUMNS
    for at_s, value in points:
        column = min(int((at_s - first) / span * COLUMNS), COLUMNS - 1)
        sums[column] += value
        counts[column] += 1
    found: list[float] = []
    for total, count in zip(sums, counts, strict=True):
        found.append(total / count if count else found[-1] if found else 0.0)
    return found


WAITS: tuple[tuple[str, Callable[[Score], str]], ...] = (
    ("online wait p50", lambda s: _ms(s.wait_p50_ms)),
    ("online wait p99", lambda s: _ms(s.wait_p99_ms)),
)
"""Each policy's own in a simulation. A recording has those that were, whatever policy is asked."""
ROWS: tuple[tuple[str, Callable[[Score], str]], ...] = (
    ("lent to batch work, cores", lambda s: f"{s.lent_cores:.2f}"),
    ("used by it, cores", lambda s: f"{s.batch_cores:.2f}"),
    *WAITS,
    ("online waits for batch work", lambda s: f"{s.harm_ms_per_s:.1f} ms/s"),
    ("online short of its own CPUs", lambda s: f"{s.short_ms_per_s:.1f} ms/s"),
    ("promised, cores", lambda s: "-" if s.promised_cores is None else f"{s.promised_cores:.2f}"),
    ("promises missed", lambda s: "-" if s.missed_ratio is None else f"{s.missed_ratio:.1%}"),
    ("by, cores", lambda s: "-" if s.missed_cores is None else f"{s.missed_cores:.2f}"),
    ("times taken back", lambda s: f"{s.shrinks}"),
    ("values written", lambda s: f"{s.changes}"),
    ("pods that would have to leave", lambda s: "-" if s.victims is None else f"{s.victims}"),
)


def table(scores: Mapping[str, Score], *, recorded: bool = False) -> Table:
    """One column for each policy; without waits where those are `recorded`, which are told once by `notes`."""
    shown = Table(box=None, header_style="bold", pad_edge=False)
    rounds = max((score.rounds for score in scores.values()), default=0)
    shown.add_column(f"{rounds:,} rounds, means over time", header_style="dim")
    for name in scores:
        shown.add_column(name, justify="right")
    for title, cell in ROWS:
        if not (recorded and (title, cell) in WAITS):
            shown.add_row(title, *map(cell, scores.values()))
    return shown


def notes(scores: Mapping[str, Score], horizon_s: float, covered_s: float, *, recorded: bool) -> list[str]:
    """What the table cannot say by itself; `covered_s` is how long the rounds took."""
    some = list(scores.values())
    said = []
    if recorded and some:
        waits = ", ".join(f"{title.rpartition(' ')[2]} {cell(some[0])}" for title, cell in WAITS)
        said.append(f"online waits as recorded: {waits}; under other policies they would have been others")
    said.append("short of its own CPUs: what online pods wanted beyond their own pool, where batch work has CPUs apart")
    missed = f"missed: the most that online pods used in the {horizon_s:g} s after did not leave what was promised"
    if covered_s <= horizon_s and any(score.promised_cores is not None for score in some):
        missed += f"; these rounds last {covered_s:.0f} s, so no promise could be judged: try a shorter --horizon"
    return [*said, missed]


def lines(tracks: Mapping[str, Track], node_cpus: int) -> list[Text]:
    """What online pods used, and what each policy lent, from left to right; the height of a line is the node."""
    width = max((len(name) for name in tracks), default=0) + len("lent ") + 2
    made = []
    for number, (name, track) in enumerate(tracks.items()):
        found = track.lines()
        if number == 0:
            made.append(Text.assemble(("online".ljust(width), "cyan"), (_line(found["online"], node_cpus), "cyan")))
        made.append(Text.assemble((f"lent {name}".ljust(width), "bold"), (_line(found["lent"], node_cpus), "yellow")))
    return made


def _line(values: Sequence[float], whole: float) -> str:
    steps = len(BLOCKS) - 1
    return "".join(BLOCKS[round(min(max(value / whole, 0.0), 1.0) * steps)] for value in values)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms" if value < 10 else f"{value:.0f} ms"

"""The `dioptase probe blame` view: a matrix of which cgroup makes which other one wait for a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, product
from string import ascii_lowercase

import msgspec
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group
from rich.text import Text

from api.text import printable
from cli.formats import figures
from cli.probe.commands import probe_command
from cli.probe.interval import DisplayedInterval, ProbeInterval, head_lines, path_tail
from probes.registry import BY_NAME

CELL_WIDTH, MIN_NAME_WIDTH, MAX_NAME_WIDTH = 8, 20, 60
"""Cells of a column of numbers, and limits for the column of paths."""
CAUSE_TITLES = ("waited", "quota", "rt", "other", "rest")


class CgroupBlame(msgspec.Struct, frozen=True, kw_only=True):
    """Waits of one cgroup that ended within an interval, by what held the CPU meanwhile."""

    cgroup: str
    by_cgroup: Mapping[str, int]
    throttled_ns: int
    higher_class_ns: int
    other_ns: int

    @property
    def waited_ns(self) -> int:
        return sum(self.by_cgroup.values()) + self.throttled_ns + self.higher_class_ns + self.other_ns


def render_blame(shown: DisplayedInterval, height: int | None) -> Group:
    """Render a line per cgroup that waited or made others wait, and a column per main aggressor."""
    return render_blame_matrix(shown.interval, Console().width, height)


def blame_rows(interval: ProbeInterval) -> list[CgroupBlame]:
    """Return the cgroups that waited, longest first. A cgroup that was recreated is left out of one interval."""
    rows = []
    for group in interval.cgroups:
        blame = group.values["blame"]
        by_cgroup = {path: ns for path, ns in blame["by_cgroup"].items() if ns}
        rest = {name: blame[name] or 0 for name in ("throttled_ns", "higher_class_ns", "other_ns")}
        rows.append(CgroupBlame(cgroup=group.cgroup, by_cgroup=by_cgroup, **rest))
    return sorted((victim for victim in rows if victim.waited_ns), key=lambda victim: -victim.waited_ns)


def render_blame_matrix(interval: ProbeInterval, width: int, height: int | None) -> Group:
    """Pure: `rest` sums the aggressors without a column; an aggressor that did not wait has a line without numbers."""
    lines = head_lines(interval, "milliseconds a second of wait for a CPU, by its holder")
    rows = blame_rows(interval)
    aggressors = _aggressors(rows)
    by_name = {victim.cgroup: victim for victim in rows}
    paths = [*by_name, *(path for path in aggressors if path not in by_name)]
    row_count = len(paths) if height is None else max(1, min(len(paths), height - len(lines) - 2))
    letters = dict(zip(paths[:row_count], _column_letters(), strict=False))
    longest = max((cell_len(printable(name)) for name in letters), default=0) + 4
    name_width = max(MIN_NAME_WIDTH, min(longest, MAX_NAME_WIDTH, width - (len(CAUSE_TITLES) + 3) * CELL_WIDTH))
    columns = [path for path in aggressors if path in letters][
        : max(0, (width - name_width) // CELL_WIDTH - len(CAUSE_TITLES))
    ]
    titles = (*CAUSE_TITLES, *(letters[path] for path in columns))
    lines.append(Text(" " * name_width + "".join(title.rjust(CELL_WIDTH) for title in titles), style="dim"))
    for name, letter in letters.items():
        label = set_cell_size(f"{letter:<2} {path_tail(printable(name), name_width - 4)}", name_width)
        cells = _blame_cells(by_name.get(name), columns, interval.interval_s)
        lines.append(Text.assemble((label, "cyan"), "".join(cell.rjust(CELL_WIDTH) for cell in cells)))
    if row_count < len(paths):
        lines.append(Text(f"and {len(paths) - row_count} more cgroups; choose with --cgroup", style="dim"))
    return Group(*lines)


def _aggressors(rows: Sequence[CgroupBlame]) -> list[str]:
    """Return the paths of the cgroups that made others wait, the worst first."""
    total: dict[str, int] = {}
    for victim in rows:
        for path, ns in victim.by_cgroup.items():
            total[path] = total.get(path, 0) + ns
    return sorted(total, key=lambda path: -total[path])


def _blame_cells(victim: CgroupBlame | None, columns: Sequence[str], interval_s: float) -> list[str]:
    if victim is None:
        return ["·"] * (len(CAUSE_TITLES) + len(columns))
    rest = sum(ns for path, ns in victim.by_cgroup.items() if path not in columns)
    parts = (victim.waited_ns, victim.throttled_ns, victim.higher_class_ns, victim.other_ns, rest)
    durations = [*parts, *(victim.by_cgroup.get(path, 0) for path in columns)]
    return [figures(ns / 1e6 / interval_s) if ns else "·" for ns in durations]


def _column_letters() -> Iterator[str]:
    """Yield a to z, then aa, ab and so on."""
    for length in count(1):
        yield from ("".join(letters) for letters in product(ascii_lowercase, repeat=length))


blame = probe_command(BY_NAME["blame"], render_blame)

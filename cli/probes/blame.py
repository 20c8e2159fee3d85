"""`dioptase probe blame`: who makes whom wait for a CPU, live, without an agent."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import count, islice, product
from string import ascii_lowercase

import click
import msgspec
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group
from rich.text import Text

from api.facts import Blame
from api.ports import Unavailable
from cli.options import Seconds
from cli.probes.screen import Screen, cgroup_paths, name_of
from cli.words import clean, figures
from probes.blame import FORMS, beside
from probes.runqlat import RunqLat, open_waits

CELL, LEAST_NAME, MOST_NAME = 8, 20, 60
"""Width of a column of numbers, and of the paths on the left."""
NOTHING = Blame(by_cgroup={}, throttled_ns=0, higher_class_ns=0, other_ns=0)


class Victim(msgspec.Struct, frozen=True, kw_only=True):
    """Waits of one cgroup that ended within an interval, and who had the CPU meanwhile."""

    cgroup: str
    """Path, or `id N` for a cgroup that is outside this mount."""
    id: int
    waited_ns: int
    by_cgroup: Mapping[str, int]
    throttled_ns: int
    higher_class_ns: int
    other_ns: int


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints, one line each; the cgroup that waited most comes first."""

    probe: str
    form: str
    wall_time_ns: int
    interval_s: float
    problem: str
    """What could not be counted; empty when all is well."""
    cgroups: tuple[Victim, ...]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per interval.")
@click.option("--interval", type=Seconds(min=0.05), default=1.0, show_default=True, help="Seconds per table.")
@click.option("--duration", "duration_s", type=Seconds(min=0), help="End after this many seconds; default: at Ctrl-C.")
@click.option(
    "--form",
    type=click.Choice(["auto", *FORMS]),
    default="auto",
    show_default=True,
    help="How to measure; auto takes the cheapest that the kernel allows.",
)
@click.option(
    "--cgroup", "prefix", default="/", show_default=True, help="Only waiting cgroups whose path begins with this."
)
def blame(*, as_json: bool, interval: float, duration_s: float | None, form: str, prefix: str) -> None:
    """Who makes whom wait: the time each cgroup waited for a CPU, by who had that CPU meanwhile.

    The cgroup's own quota, and real-time tasks, are kept apart from its neighbours.
    """
    with ExitStack() as stack:
        try:
            source = open_waits(forms=FORMS if form == "auto" else (form,))
            stack.callback(source.close)
            beside(source)
        except Unavailable as error:
            raise click.ClickException(f"{error.reason}\nWhat to do: {error.remedy}") from error
        for refusal in source.refused:
            click.echo(f"form refused: {refusal}", err=True)
        show = _print_json if as_json else stack.enter_context(Screen(_render))
        try:
            for finished in _intervals(source, interval, duration_s, prefix):
                show(finished)
        except KeyboardInterrupt:
            return


def _intervals(source: RunqLat, interval: float, duration_s: float | None, prefix: str) -> Iterator[Interval]:
    started = previous_at = time.monotonic()
    end = None if duration_s is None else started + duration_s
    previous = source.blames(cgroup_paths())
    while end is None or previous_at < end:
        wake = previous_at + interval if end is None else min(previous_at + interval, end)
        time.sleep(max(0.0, wake - time.monotonic()))
        paths = cgroup_paths()
        blames, now = source.blames(paths), time.monotonic()
        problem = source.blame_problem()
        yield Interval(
            probe="blame",
            form=source.form,
            wall_time_ns=time.time_ns(),
            interval_s=round(now - previous_at, 6),
            problem=problem.reason if problem else "",
            cgroups=victims(previous, blames, paths, prefix),
        )
        previous, previous_at = blames, now


def victims(
    before: Mapping[int, Blame], after: Mapping[int, Blame], paths: dict[int, str], prefix: str
) -> tuple[Victim, ...]:
    """Pure: what came about between two reads, of the cgroups below a prefix, most time waited first."""
    found = []
    for number, now in after.items():
        name = name_of(number, paths)
        if not name.startswith(prefix):
            continue
        was = before.get(number, NOTHING)
        # A culprit that has less than before was made again under the same path: all that it has is new.
        grown = {path: _grown(was.by_cgroup.get(path, 0), ns) for path, ns in now.by_cgroup.items()}
        rest = [
            _grown(old, new)
            for old, new in (
                (was.throttled_ns, now.throttled_ns),
                (was.higher_class_ns, now.higher_class_ns),
                (was.other_ns, now.other_ns),
            )
        ]
        by_cgroup = dict(sorted(((path, ns) for path, ns in grown.items() if ns), key=lambda item: -item[1]))
        waited = sum(by_cgroup.values()) + sum(rest)
        if waited:
            throttled, higher, other = rest
            found.append(
                Victim(
                    cgroup=name,
                    id=number,
                    waited_ns=waited,
                    by_cgroup=by_cgroup,
                    throttled_ns=throttled,
                    higher_class_ns=higher,
                    other_ns=other,
                )
            )
    return tuple(sorted(found, key=lambda victim: -victim.waited_ns))


def _grown(before: int, after: int) -> int:
    return after - before if after >= before else after


def _print_json(finished: Interval) -> None:
    sys.stdout.write(msgspec.json.encode(finished).decode() + "\n")
    sys.stdout.flush()


def _render(finished: Interval, height: int | None) -> Group:
    return render(finished, Console().width, height)


def render(finished: Interval, width: int, height: int | None) -> Group:
    """A matrix: one line for each cgroup that waited or made others wait, one column for those that did so most."""
    head = f"who waits for whom, form {finished.form}, {finished.interval_s:.1f} s, milliseconds of waiting a second"
    lines = [Text(head, style="bold")]
    if finished.problem:
        lines.append(Text(clean(finished.problem), style="yellow"))
    made = _made_wait(finished.cgroups)
    by_name = {victim.cgroup: victim for victim in finished.cgroups}
    names = [*by_name, *(path for path in made if path not in by_name)]
    room = len(names) if height is None else max(1, min(len(names), height - len(lines) - 2))
    letters = dict(zip(names[:room], _letters(), strict=False))
    most = max((cell_len(clean(name)) for name in letters), default=0) + 4
    name_width = max(LEAST_NAME, min(most, MOST_NAME, width - 8 * CELL))
    columns = [path for path in made if path in letters][: max(0, (width - name_width) // CELL - 5)]
    titles = ["waited", "quota", "rt", "other", "rest", *(letters[path] for path in columns)]
    lines.append(Text(" " * name_width + "".join(title.rjust(CELL) for title in titles), style="dim"))
    for name, letter in letters.items():
        shown = set_cell_size(f"{letter:<2} {_tail(clean(name), name_width - 4)}", name_width)
        cells = _cells(by_name.get(name), columns, finished.interval_s)
        lines.append(Text.assemble((shown, "cyan"), "".join(cell.rjust(CELL) for cell in cells)))
    if room < len(names):
        lines.append(Text(f"and {len(names) - room} more cgroups; choose with --cgroup", style="dim"))
    return Group(*lines)


def _made_wait(found: Sequence[Victim]) -> list[str]:
    """Paths of those that made anybody wait, the worst first."""
    total: dict[str, int] = {}
    for victim in found:
        for path, ns in victim.by_cgroup.items():
            total[path] = total.get(path, 0) + ns
    return sorted(total, key=lambda path: -total[path])


def _cells(victim: Victim | None, columns: Sequence[str], interval_s: float) -> list[str]:
    if victim is None:
        return ["·"] * (5 + len(columns))
    rest = sum(ns for path, ns in victim.by_cgroup.items() if path not in columns)
    parts = (victim.waited_ns, victim.throttled_ns, victim.higher_class_ns, victim.other_ns, rest)
    each = [*parts, *(victim.by_cgroup.get(path, 0) for path in columns)]
    return [figures(ns / 1e6 / interval_s) if ns else "·" for ns in each]


def _letters() -> Iterator[str]:
    """a to z, then aa, ab and so on."""
    for length in count(1):
        yield from ("".join(letters) for letters in product(ascii_lowercase, repeat=length))


def _tail(name: str, width: int) -> str:
    """The end of a path tells more than its beginning."""
    if cell_len(name) <= width:
        return name
    return "…" + "".join(islice(name, max(0, len(name) - width + 1), None))

"""The `dioptase probe wakeups` view: which cgroup wakes which, wakeup latency, and the strongest chains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group
from rich.text import Text

from api.histogram import quantile_ns
from api.measurements import Durations
from cli.formats import duration, figures, printable
from cli.probe.commands import probe_command
from cli.probe.interval import DisplayedInterval, ProbeInterval
from probes.registry import BY_NAME

EXTERNAL_WAKERS = {"interrupt": "interrupt", "kernel_thread": "kernel threads"}
"""Wakers that are no cgroups, by field of `api.measurements.Wakeups`: where chains begin."""
OTHER = "other"
COLUMNS = ("wakeups/s", "wait/s", "mean", "p50", "p99")
CELL_WIDTH, MIN_NAME_WIDTH, MAX_NAME_WIDTH = 11, 16, 60
"""Width of a column of numbers, and of each of the two names on the left."""
MIN_CHAIN_RATIO = 0.5
"""Part of a cgroup's strongest hop that another hop to it must have to take its place in a chain: there and back are about
as strong as each other, and a chain should begin where the work comes in."""
ARROW = "→"


class WakeupHop(NamedTuple):
    """Wakeups of one cgroup by another one, or by somebody outside, within an interval."""

    waker: str
    woken: str
    times: Durations


class ChainLink(NamedTuple):
    """A line of a chain; without a hop it is where a chain begins."""

    depth: int
    name: str
    hop: WakeupHop | None


def hops(interval: ProbeInterval) -> list[WakeupHop]:
    """Those that took longest in all first. What went backwards was made again, and is left out once."""
    found = []
    for group in interval.cgroups:
        wakeups = group.values["wakeups"]
        wakers: dict[str, Durations | None] = {**wakeups["by_cgroup"], OTHER: wakeups["other"]}
        wakers.update((name, wakeups[field]) for field, name in EXTERNAL_WAKERS.items())
        found += [
            WakeupHop(waker, group.cgroup, times)
            for waker, times in wakers.items()
            if times is not None and times.count
        ]
    return sorted(found, key=lambda hop: (-hop.times.sum_ns, hop.waker, hop.woken))


def chains(found: Sequence[WakeupHop]) -> list[ChainLink]:
    """Pure: each cgroup below the one that wakes it, every cgroup once, so that cycles are cut where they close.

    They grow from outside, always by the strongest hop that leads on, and then from whoever wakes others and has no place yet.
    """
    into: dict[str, list[WakeupHop]] = {}
    for hop in found:
        if hop.waker not in (hop.woken, OTHER):
            into.setdefault(hop.woken, []).append(hop)
    strong: dict[str, list[WakeupHop]] = {}
    for ways in into.values():
        least = MIN_CHAIN_RATIO * max(hop.times.count for hop in ways)
        for hop in ways:
            if hop.times.count >= least:
                strong.setdefault(hop.waker, []).append(hop)
    placed: set[str] = set()
    below: dict[str, list[WakeupHop]] = {}
    roots = [name for name in EXTERNAL_WAKERS.values() if name in strong]
    roots += [name for name in _by_strength(strong) if name not in into and name not in roots]
    _grow(roots, strong, placed, below)
    for name in _by_strength(strong):
        # Who leads only to what has its place waits for whoever wakes him.
        if name not in placed and any(hop.woken not in placed for hop in strong[name]):
            roots.append(name)
            _grow([name], strong, placed, below)
    return [link for root in roots if root in below for link in _chain_links(root, None, 0, below)]


def _by_strength(strong: Mapping[str, Sequence[WakeupHop]]) -> list[str]:
    """Wakers, the one that wakes others most often first."""
    return sorted(strong, key=lambda name: (-sum(hop.times.count for hop in strong[name]), name))


def _grow(
    roots: Sequence[str], strong: Mapping[str, Sequence[WakeupHop]], placed: set[str], below: dict[str, list[WakeupHop]]
) -> None:
    placed.update(roots)
    edge = [hop for root in roots for hop in strong.get(root, ())]
    while edge := [hop for hop in edge if hop.woken not in placed]:
        best = max(edge, key=lambda hop: (hop.times.count, hop.woken))
        placed.add(best.woken)
        below.setdefault(best.waker, []).append(best)
        edge += strong.get(best.woken, ())


def _chain_links(
    name: str, hop: WakeupHop | None, depth: int, below: Mapping[str, Sequence[WakeupHop]]
) -> Iterator[ChainLink]:
    yield ChainLink(depth, name, hop)
    for further in below.get(name, ()):
        yield from _chain_links(further.woken, further, depth + 1, below)


def render_wakeups(shown: DisplayedInterval, height: int | None) -> Group:
    """The table, and below it the chains."""
    return render_wakeup_chains(shown.interval, Console().width, height)


def render_wakeup_chains(interval: ProbeInterval, width: int, height: int | None) -> Group:
    """Pure: half of the lines at most are the chains'."""
    head = f"{interval.probe}, form {interval.form}, {interval.interval_s:.1f} s: who wakes whom, and how long until it runs"
    lines = [Text(head, style="bold")]
    if interval.problem:
        lines.append(Text(printable(interval.problem), style="yellow"))
    found = hops(interval)
    if not found:
        return Group(*lines, Text("nobody was woken", style="dim"))
    links = chains(found)
    room = None if height is None else max(2, height - len(lines) - 4)
    kept = len(links) if room is None else min(len(links), max(room // 2, room - len(found)))
    listed = len(found) if room is None else max(1, room - kept)
    lines += _hop_table(found, interval.interval_s, width, listed)
    lines += [Text(), Text("chains: each below the one that wakes it most", style="bold")] if kept else []
    lines += [_chain_line(link, interval.interval_s) for link in links[:kept]]
    if kept < len(links):
        lines.append(Text(f"and {len(links) - kept} more in chains", style="dim"))
    return Group(*lines)


def _hop_table(found: Sequence[WakeupHop], seconds: float, width: int, room: int) -> list[Text]:
    names = [printable(name) for hop in found[:room] for name in (hop.waker, hop.woken)]
    longest = max(cell_len(name) for name in names) + 2
    each = max(MIN_NAME_WIDTH, min(longest, MAX_NAME_WIDTH, (width - len(COLUMNS) * CELL_WIDTH) // 2))
    titles = "waker".ljust(each) + "woken".ljust(each) + "".join(title.rjust(CELL_WIDTH) for title in COLUMNS)
    lines = [Text(titles, style="dim")]
    for hop in found[:room]:
        label = "".join(set_cell_size(_path_tail(printable(name), each - 2), each) for name in (hop.waker, hop.woken))
        cells = (
            f"{figures(hop.times.count / seconds)}",
            duration(hop.times.sum_ns / seconds / 1000),
            *_latency_cells(hop),
        )
        lines.append(Text.assemble((label, "cyan"), "".join(cell.rjust(CELL_WIDTH) for cell in cells)))
    if room < len(found):
        lines.append(Text(f"and {len(found) - room} more pairs; choose with --cgroup", style="dim"))
    return lines


def _latency_cells(hop: WakeupHop) -> tuple[str, str, str]:
    """Mean, median and 99th percentile."""
    slots = hop.times.slots or ()
    p50, p99 = (duration((quantile_ns(slots, q) or 0.0) / 1000) for q in (0.5, 0.99))
    return duration(hop.times.sum_ns / hop.times.count / 1000), p50, p99


def _chain_line(link: ChainLink, seconds: float) -> Text:
    if link.hop is None:
        return Text(printable(link.name), style="cyan")
    mean, _, p99 = _latency_cells(link.hop)
    told = f"  {figures(link.hop.times.count / seconds)}/s, mean {mean}, p99 {p99}"
    return Text.assemble("  " * link.depth + f"{ARROW} ", (printable(link.name), "cyan"), told)


def _path_tail(name: str, width: int) -> str:
    """The end of a path tells more than its beginning."""
    return name if cell_len(name) <= width else f"…{name[len(name) - width + 1 :]}"


wakeups = probe_command(BY_NAME["wakeups"], render_wakeups)

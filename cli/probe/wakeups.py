"""The `dioptase probe wakeups` view: which cgroup wakes which, wakeup latency, and the strongest chains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group
from rich.text import Text

from api.snapshot import Durations
from api.text import printable
from cli.formats import duration, figures
from cli.probe.commands import probe_command
from cli.probe.interval import DisplayedInterval, ProbeInterval, duration_texts, head_lines, path_tail
from probes.registry import BY_NAME

EXTERNAL_WAKERS = {"interrupt": "interrupt", "kernel_thread": "kernel threads"}
"""Wakers that are not cgroups, by field of `api.snapshot.Wakeups`; chains begin with them."""
OTHER = "other"
COLUMNS = ("wakeups/s", "wait/s", "mean", "p50", "p99")
CELL_WIDTH, MIN_NAME_WIDTH, MAX_NAME_WIDTH = 11, 16, 60
"""Cells of a column of numbers, and limits for each of the two columns of names."""
MIN_CHAIN_RATIO = 0.5
"""Minimum strength of a hop in a chain, relative to the strongest hop to the same cgroup. Request and reply are about
equally strong; the threshold makes chains begin where the work enters."""
ARROW = "→"


class WakeupHop(NamedTuple):
    """Wakeups of one cgroup by another cgroup or by an external waker, within an interval."""

    waker: str
    woken: str
    times: Durations


class ChainLink(NamedTuple):
    """A line of a chain; a link without a hop begins a chain."""

    depth: int
    name: str
    hop: WakeupHop | None


def hops(interval: ProbeInterval) -> list[WakeupHop]:
    """Return the pairs, longest total latency first. A cgroup that was recreated is left out of one interval."""
    rows = []
    for group in interval.cgroups:
        wakeups = group.values["wakeups"]
        wakers: dict[str, Durations | None] = {**wakeups["by_cgroup"], OTHER: wakeups["other"]}
        wakers.update((name, wakeups[field]) for field, name in EXTERNAL_WAKERS.items())
        rows += [
            WakeupHop(waker, group.cgroup, times)
            for waker, times in wakers.items()
            if times is not None and times.count
        ]
    return sorted(rows, key=lambda hop: (-hop.times.sum_ns, hop.waker, hop.woken))


def chains(pairs: Sequence[WakeupHop]) -> list[ChainLink]:
    """Pure: arrange each cgroup below the one that wakes it, every cgroup once, so that cycles are cut where they close.

    Chains grow from the external wakers, always by the strongest hop, then from the wakers that are in no chain yet.
    """
    into: dict[str, list[WakeupHop]] = {}
    for hop in pairs:
        if hop.waker not in (hop.woken, OTHER):
            into.setdefault(hop.woken, []).append(hop)
    strong: dict[str, list[WakeupHop]] = {}
    for hops_to_cgroup in into.values():
        min_count = MIN_CHAIN_RATIO * max(hop.times.count for hop in hops_to_cgroup)
        for hop in hops_to_cgroup:
            if hop.times.count >= min_count:
                strong.setdefault(hop.waker, []).append(hop)
    linked: set[str] = set()
    below: dict[str, list[WakeupHop]] = {}
    roots = [name for name in EXTERNAL_WAKERS.values() if name in strong]
    roots += [name for name in _by_strength(strong) if name not in into and name not in roots]
    _grow(roots, strong, linked, below)
    for name in _by_strength(strong):
        # A waker whose hops all lead to linked cgroups is linked below its own waker instead.
        if name not in linked and any(hop.woken not in linked for hop in strong[name]):
            roots.append(name)
            _grow([name], strong, linked, below)
    return [link for root in roots if root in below for link in _chain_links(root, None, 0, below)]


def _by_strength(strong: Mapping[str, Sequence[WakeupHop]]) -> list[str]:
    """Return the wakers, most wakeups first."""
    return sorted(strong, key=lambda name: (-sum(hop.times.count for hop in strong[name]), name))


def _grow(
    roots: Sequence[str], strong: Mapping[str, Sequence[WakeupHop]], linked: set[str], below: dict[str, list[WakeupHop]]
) -> None:
    linked.update(roots)
    candidates = [hop for root in roots for hop in strong.get(root, ())]
    while candidates := [hop for hop in candidates if hop.woken not in linked]:
        best = max(candidates, key=lambda hop: (hop.times.count, hop.woken))
        linked.add(best.woken)
        below.setdefault(best.waker, []).append(best)
        candidates += strong.get(best.woken, ())


def _chain_links(
    name: str, hop: WakeupHop | None, depth: int, below: Mapping[str, Sequence[WakeupHop]]
) -> Iterator[ChainLink]:
    yield ChainLink(depth, name, hop)
    for next_hop in below.get(name, ()):
        yield from _chain_links(next_hop.woken, next_hop, depth + 1, below)


def render_wakeups(shown: DisplayedInterval, height: int | None) -> Group:
    """Render the table of pairs, and the chains below it."""
    return render_wakeup_chains(shown.interval, Console().width, height)


def render_wakeup_chains(interval: ProbeInterval, width: int, height: int | None) -> Group:
    """Pure: chains take at most half of the lines."""
    lines = head_lines(interval, "wakeups and latency, by waker")
    pairs = hops(interval)
    if not pairs:
        return Group(*lines, Text("no wakeups", style="dim"))
    links = chains(pairs)
    room = None if height is None else max(2, height - len(lines) - 4)
    link_count = len(links) if room is None else min(len(links), max(room // 2, room - len(pairs)))
    pair_count = len(pairs) if room is None else max(1, room - link_count)
    lines += _hop_table(pairs, interval.interval_s, width, pair_count)
    lines += [Text(), Text("chains: each cgroup below its strongest waker", style="bold")] if link_count else []
    lines += [_chain_line(link, interval.interval_s) for link in links[:link_count]]
    if link_count < len(links):
        lines.append(Text(f"and {len(links) - link_count} more in chains", style="dim"))
    return Group(*lines)


def _hop_table(pairs: Sequence[WakeupHop], seconds: float, width: int, room: int) -> list[Text]:
    names = [printable(name) for hop in pairs[:room] for name in (hop.waker, hop.woken)]
    longest = max(cell_len(name) for name in names) + 2
    name_width = max(MIN_NAME_WIDTH, min(longest, MAX_NAME_WIDTH, (width - len(COLUMNS) * CELL_WIDTH) // 2))
    titles = (
        "waker".ljust(name_width) + "woken".ljust(name_width) + "".join(title.rjust(CELL_WIDTH) for title in COLUMNS)
    )
    lines = [Text(titles, style="dim")]
    for hop in pairs[:room]:
        label = "".join(
            set_cell_size(path_tail(printable(name), name_width - 2), name_width) for name in (hop.waker, hop.woken)
        )
        cells = (
            f"{figures(hop.times.count / seconds)}",
            duration(hop.times.sum_ns / seconds / 1000),
            *duration_texts(hop.times),
        )
        lines.append(Text.assemble((label, "cyan"), "".join(cell.rjust(CELL_WIDTH) for cell in cells)))
    if room < len(pairs):
        lines.append(Text(f"and {len(pairs) - room} more pairs; choose with --cgroup", style="dim"))
    return lines


def _chain_line(link: ChainLink, seconds: float) -> Text:
    if link.hop is None:
        return Text(printable(link.name), style="cyan")
    mean, _, p99 = duration_texts(link.hop.times)
    numbers = f"  {figures(link.hop.times.count / seconds)}/s, mean {mean}, p99 {p99}"
    return Text.assemble("  " * link.depth + f"{ARROW} ", (printable(link.name), "cyan"), numbers)


wakeups = probe_command(BY_NAME["wakeups"], render_wakeups)

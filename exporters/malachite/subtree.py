"""Sums over a cgroup and all below it, for what our probes count for each cgroup's own tasks alone.

CPU time, memory and block I/O of a cgroup include its descendants, and a pod or a QoS class has no tasks of its own: so
the documents show threads, load averages and network traffic in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from api.facts import Load, Net, ThreadStates
from api.samples import Snapshot
from exporters.malachite.past import History

Summed = TypeVar("Summed", ThreadStates, Load, Net)


class Subtree:
    """Sums by path of the cgroup at the top, made once for a snapshot; a path without any is absent."""

    def __init__(self, now: Snapshot, history: History) -> None:
        samples = now.cgroups
        self.threads = sums(ThreadStates, {p: s.threads_by_state for p, s in samples.items() if s.threads_by_state})
        # Each average decays by the same factor in every step, so the average of a sum is the sum of the averages.
        self.load = sums(Load, {path: sample.load for path, sample in samples.items() if sample.load})
        net = {path: sample.net for path, sample in samples.items() if sample.net}
        self.net = sums(Net, net)
        self.old_net = sums(Net, {path: _before(now, history, path, after) for path, after in net.items()})


def sums(kind: Callable[..., Summed], values: Mapping[str, Summed]) -> dict[str, Summed]:
    """Add each value to those of all cgroups above it."""
    fields: tuple[str, ...] = kind.__struct_fields__  # type: ignore[attr-defined]
    totals: dict[str, list[Any]] = {}
    for path, value in values.items():
        amounts = [getattr(value, field) for field in fields]
        for ancestor in _upwards(path):
            known = totals.get(ancestor)
            totals[ancestor] = amounts if known is None else [a + b for a, b in zip(known, amounts, strict=True)]
    return {path: kind(**dict(zip(fields, total, strict=True))) for path, total in totals.items()}


def _upwards(path: str) -> Iterator[str]:
    yield path
    while path != "/":
        path = path.rpartition("/")[0] or "/"
        yield path


def _before(now: Snapshot, history: History, path: str, after: Net) -> Net:
    """The same cgroup's traffic earlier, so that new minus old of any sum is what the cgroups there now have moved since.

    One that is new since then began at zero; of one whose traffic was not counted yet, only what comes next is known.
    """
    found = history.cgroup(now.cgroups[path])
    past = history.past
    if found is None or past is None:
        return after
    frame, before = found
    if frame is not past:
        return NOTHING
    if before.net is None or any(getattr(before.net, f) > getattr(after, f) for f in Net.__struct_fields__):
        return after
    return before.net


NOTHING = Net(**dict.fromkeys(Net.__struct_fields__, 0))

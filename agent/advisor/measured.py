"""What was measured of pods between two rounds: whom online containers waited for, and what reclaimed ones used. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from agent.advisor.culprits import Blamed, blamed
from agent.advisor.estimation import online_containers
from agent.advisor.waits import contention
from api.facts import Wait
from api.qos import QoSLevel
from api.rates import Rates, members, total
from api.samples import CgroupSample, Snapshot

_LEAST_STARVED = 0.5
"""Threads: one that ran all the time did not use quite a whole core by the kernel's books."""


def online_waits(snapshot: Snapshot, change: Rates | None, previous: Snapshot | None) -> dict[str, Wait | None]:
    """Waits of every online container since the previous round, by cgroup; None where they are not known.

    A container's tasks are those of its cgroup and of all below. One that is not there has nobody to protect, but where the
    whole tree could not be read nothing is known of any.
    """
    containers = [container.cgroup for container in online_containers(snapshot)]
    inside = members(snapshot.cgroups, containers)
    readable = "/" in snapshot.cgroups
    return {
        container: _contention(inside[container], snapshot, change, previous) if container in inside else None
        for container in containers
        if container in inside or not readable
    }


def _contention(
    paths: Sequence[str], snapshot: Snapshot, change: Rates | None, previous: Snapshot | None
) -> Wait | None:
    """Waits of these cgroups together, the container's own first, without what its own quota caused."""
    waits, throttled_ns, periods = [], 0, 0
    for path in paths:
        sample = snapshot.cgroups[path]
        if path != paths[0] and sample.periods is None:
            continue  # without a cpu controller its tasks are counted as those of the one above
        waits.append(_waited(sample, change, previous))
        if change is not None and (rate := change.cgroups.get(path)) is not None:
            throttled_ns += rate.throttled_ns or 0
            periods += rate.throttled_periods or 0
    known = [wait for wait in waits if wait is not None]
    if len(known) < len(waits):
        return None
    threads = snapshot.cgroups[paths[0]].threads or 1
    return contention(total(known), throttled_ns, periods, threads, len(snapshot.topology.cpus))


def _waited(sample: CgroupSample, change: Rates | None, previous: Snapshot | None) -> Wait | None:
    """Waits of one cgroup since the previous round; one that was made since then has waited all that it ever waited."""
    before = previous.cgroups.get(sample.path) if previous else None
    if change is not None and before is not None and before.id == sample.id:
        rate = change.cgroups.get(sample.path)
        return rate.wait if rate else None
    made_since = change is not None and previous is not None and "/" in previous.cgroups
    return sample.wait if made_since else None


class Starved(NamedTuple):
    """An online container that is runnable, and none of whose waits ended: how long they are is not known yet."""

    runnable: int
    """Threads, as the round saw them."""
    cores: float
    """What they used since the previous round."""


def starved_of(
    waits: Mapping[str, Wait | None], snapshot: Snapshot, change: Rates | None, previous: Snapshot | None
) -> dict[str, Starved]:
    """The containers that have more runnable threads than they used CPU, while no wait of theirs ended since the previous
    round, by cgroup. Not those that their own quota held back; none where threads are not counted."""
    quiet = [cgroup for cgroup, wait in waits.items() if wait is not None and not wait.count]
    if change is None or not quiet:
        return {}
    runnable = {
        path: sample.threads_by_state.runnable
        for path, sample in snapshot.cgroups.items()
        if sample.threads_by_state is not None and sample.threads_by_state.runnable
    }
    found = {}
    for cgroup, paths in members({*quiet, *runnable}, quiet).items():
        threads = sum(runnable.get(path, 0) for path in paths)
        rates_of = [rate for path in paths if (rate := change.cgroups.get(path)) is not None]
        ended = [_waited(snapshot.cgroups[path], change, previous) for path in paths if path in snapshot.cgroups]
        if any(wait is not None and wait.count for wait in ended) or any(rate.throttled_periods for rate in rates_of):
            continue
        own = change.cgroups.get(cgroup)
        cores = (own.cpu_cores if own is not None else None) or 0.0
        if threads - cores >= _LEAST_STARVED:
            found[cgroup] = Starved(threads, cores)
    return found


def reclaimed_use_cores(snapshot: Snapshot, change: Rates | None) -> float | None:
    """CPU that reclaimed pods use; None unless it is known of all of them."""
    if change is None:
        return None
    total = 0.0
    for pod in snapshot.pods:
        if pod.qos is not QoSLevel.RECLAIMED:
            continue
        for container in pod.containers:
            rate = change.cgroups.get(container.cgroup)
            if rate is None or rate.cpu_cores is None:
                if container.cgroup in snapshot.cgroups:
                    return None
                continue
            total += rate.cpu_cores
    return total


def blames_of(
    containers: Iterable[str], reclaimed: Collection[str], snapshot: Snapshot, previous: Snapshot | None
) -> dict[str, Blamed | None]:
    """Who had the CPU while these online containers waited, since the previous round; None where nobody knows."""
    found = dict.fromkeys(containers)
    if not found or previous is None:
        return dict(found)
    inside = members(snapshot.cgroups, [c.cgroup for c in online_containers(snapshot)])
    return {c: blamed(inside[c], reclaimed, previous, snapshot) if c in inside else None for c in found}

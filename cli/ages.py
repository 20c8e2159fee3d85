"""How old readings are that are not taken in every round: a snapshot has them beside those of its own instant. Pure."""

from __future__ import annotations

import msgspec

from api.samples import Snapshot


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a source that is older than the rest of it."""

    source: str
    """Its name in the snapshot."""
    what: str
    read_at_ns: int
    """CLOCK_REALTIME; of several, when the oldest of them was read."""


def readings(snapshot: Snapshot) -> tuple[Reading, ...]:
    """Of the node's rare files, of those of listed pods' cgroups, and of what pods say of themselves, where there are any."""
    paths = [container.cgroup for pod in snapshot.pods for container in pod.containers]
    samples = [sample for path in paths if (sample := snapshot.cgroups.get(path)) is not None]
    node_ns = snapshot.node.files_read_at_ns
    # Pods are asked on the clock that nobody sets.
    set_ns = snapshot.wall_time_ns - snapshot.taken_at_ns
    found = (
        ("node", "zones, vmstat, NUMA nodes, disks and file systems", [] if node_ns is None else [node_ns]),
        (
            "cgroups",
            "memory.stat, numa_stat and io.stat of pods",
            [sample.files_read_at_ns for sample in samples if sample.files_read_at_ns is not None],
        ),
        ("indicators", "the oldest", [each.sampled_at_ns + set_ns for each in snapshot.indicators.values()]),
    )
    return tuple(Reading(source=source, what=what, read_at_ns=min(at)) for source, what, at in found if at)

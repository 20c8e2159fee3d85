"""Plugin rootfs-pressure-eviction-plugin: the file system of images and writable layers fills up.
It is pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from agent.config.eviction import FilesystemThreshold, RootfsPressureConfig
from agent.eviction.eviction_inputs import EvictionInputs, RootfsUse
from agent.eviction.finding import (
    EvictionCandidate,
    EvictionFinding,
    make_threshold,
    missing_input_finding,
    not_met_finding,
    rank_candidates,
)
from api.eviction import ThresholdMet
from api.qos import QoSLevel
from api.quantity import format_bytes
from api.snapshot import Filesystem

NAME = "rootfs-pressure-eviction-plugin"
SCOPE = CONDITION = "SystemRootfs"


class _RootfsResource(NamedTuple):
    """Free and total bytes or inodes of the file system, and the use of pods."""

    what: str
    free: int
    capacity: int
    least: FilesystemThreshold
    pod_least: FilesystemThreshold
    first: FilesystemThreshold
    use: Callable[[RootfsUse], int]


def evaluate_rootfs_pressure(inputs: EvictionInputs, config: RootfsPressureConfig) -> tuple[EvictionFinding, ...]:
    """Return one finding for bytes and one for inodes."""
    room = fresh_filesystem(inputs, config.mount)
    if room is None:
        return (missing_input_finding(NAME, f"room on {config.mount}", SCOPE),)
    if room.size_bytes < config.minimum_capacity_bytes:
        minimum = format_bytes(config.minimum_capacity_bytes)
        text = f"{config.mount} has {format_bytes(room.size_bytes)}; file systems below {minimum} evict no pod."
        return (not_met_finding(NAME, "file_system_small", text, SCOPE),)
    kinds = (
        _RootfsResource(
            "bytes", room.available_bytes, room.size_bytes, config.minimum_free, config.pod_minimum,
            config.reclaimed_priority, lambda use: use.used_bytes,
        ),
        _RootfsResource(
            "inodes", room.free_inodes, room.inodes, config.minimum_free_inodes, config.pod_minimum_inodes,
            config.reclaimed_priority_inodes, lambda use: use.inodes,
        ),
    )  # fmt: skip
    return tuple(_evaluate_pressure(inputs, kind, config) for kind in kinds)


def fresh_filesystem(inputs: EvictionInputs, mount: str) -> Filesystem | None:
    """Return the file system at a mount point; None if it is unknown or its reading is too old."""
    return inputs.snapshot.node.filesystems.get(mount) if inputs.node_files_fresh else None


def _evaluate_pressure(inputs: EvictionInputs, kind: _RootfsResource, config: RootfsPressureConfig) -> EvictionFinding:
    least = kind.least.of(kind.capacity)
    if least is None:
        return not_met_finding(NAME, "not_configured", f"No minimum of free {kind.what} is set.", SCOPE, kind.what)
    if not 0 < kind.capacity >= kind.free:
        return missing_input_finding(NAME, f"free {kind.what} of {config.mount}", SCOPE, kind.what)
    going = sum(kind.use(inputs.rootfs[pod.key]) for pod in inputs.terminating_pods if pod.key in inputs.rootfs)
    free = kind.free + going
    met = ThresholdMet.HARD if free < least else ThresholdMet.NOT_MET
    text = (
        f"{config.mount} has {free} of {kind.capacity} {kind.what} free, including those of terminating pods; the "
        f"threshold is {least:.0f}."
    )
    threshold = make_threshold(
        NAME, met, SCOPE, subject=kind.what, value=least, observed=free, below=True, condition=CONDITION, text=text,
        inputs={"mount": config.mount, "kind": kind.what, "free": kind.free, "capacity": kind.capacity},
    )  # fmt: skip
    return EvictionFinding(
        threshold=threshold, candidates=_rank_users(inputs, kind, config) if met is ThresholdMet.HARD else ()
    )


def _rank_users(
    inputs: EvictionInputs, kind: _RootfsResource, config: RootfsPressureConfig
) -> tuple[EvictionCandidate, ...]:
    """Return reclaimed pods above the minimum first, then the pods with the highest use, without pods below it."""
    least, first = kind.pod_least.of(kind.capacity), kind.first.of(kind.capacity)
    order: dict[str, tuple[bool, int]] = {}
    for pod in inputs.running_pods:
        amount = kind.use(inputs.rootfs[pod.key]) if pod.key in inputs.rootfs else 0
        priority = first is not None and pod.qos is QoSLevel.RECLAIMED and amount > first
        if amount and (priority or least is None or amount >= least):
            order[pod.key] = not priority, -amount
    users = (pod for pod in inputs.running_pods if pod.key in order)
    return rank_candidates(users, lambda pod: order[pod.key], config.grace_s)

"""Plugins rootfs-pressure and rootfs-overuse: the file system of images and writable layers fills up.
It is pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from agent.config.eviction import FilesystemThreshold, RootfsOveruseConfig, RootfsPressureConfig
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
from api.measurements import Filesystem
from api.qos import QoSLevel
from api.quantity import format_bytes

PRESSURE_NAME = "rootfs-pressure-eviction-plugin"
OVERUSE_NAME = "rootfs-overuse-eviction-plugin"
SCOPE = CONDITION = "SystemRootfs"
OVERUSE_SCOPE = "rootfs"
MIN_OVERUSE_BYTES = 20 * (1 << 30)
"""Minimum of the configured bound in bytes: pods may always use this much."""
MIN_OVERUSE_RATIO = 0.1
"""The same as a fraction of the file system."""


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
    """Returns one finding for bytes and one for inodes."""
    room = _filesystem(inputs, config.mount)
    if room is None:
        return (missing_input_finding(PRESSURE_NAME, f"room on {config.mount}", SCOPE),)
    if room.size_bytes < config.minimum_capacity_bytes:
        minimum = format_bytes(config.minimum_capacity_bytes)
        text = f"{config.mount} has {format_bytes(room.size_bytes)}: below {minimum} it is left alone."
        return (not_met_finding(PRESSURE_NAME, "file_system_small", text, SCOPE),)
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


def _filesystem(inputs: EvictionInputs, mount: str) -> Filesystem | None:
    return inputs.snapshot.node.filesystems.get(mount) if inputs.node_files_fresh else None


def _evaluate_pressure(inputs: EvictionInputs, kind: _RootfsResource, config: RootfsPressureConfig) -> EvictionFinding:
    least = kind.least.of(kind.capacity)
    if least is None:
        return not_met_finding(
            PRESSURE_NAME, "not_configured", f"No minimum of free {kind.what} is set.", SCOPE, kind.what
        )
    if not 0 < kind.capacity >= kind.free:
        return missing_input_finding(PRESSURE_NAME, f"free {kind.what} of {config.mount}", SCOPE, kind.what)
    going = sum(kind.use(inputs.rootfs[pod.key]) for pod in inputs.terminating_pods if pod.key in inputs.rootfs)
    free = kind.free + going
    met = ThresholdMet.HARD if free < least else ThresholdMet.NOT_MET
    text = (
        f"{config.mount} has {free} {kind.what} free or about to be, of {kind.capacity}; the threshold is {least:.0f}."
    )
    threshold = make_threshold(
        PRESSURE_NAME, met, SCOPE, subject=kind.what, value=least, observed=free, below=True, condition=CONDITION, text=text,
        inputs={"mount": config.mount, "kind": kind.what, "free": kind.free, "capacity": kind.capacity},
    )  # fmt: skip
    return EvictionFinding(
        threshold=threshold, candidates=_rank_users(inputs, kind, config) if met is ThresholdMet.HARD else ()
    )


def _rank_users(
    inputs: EvictionInputs, kind: _RootfsResource, config: RootfsPressureConfig
) -> tuple[EvictionCandidate, ...]:
    """Returns reclaimed pods above the minimum first, then the pods with the highest use, without pods below it."""
    least, first = kind.pod_least.of(kind.capacity), kind.first.of(kind.capacity)
    order: dict[str, tuple[bool, int]] = {}
    for pod in inputs.running_pods:
        amount = kind.use(inputs.rootfs[pod.key]) if pod.key in inputs.rootfs else 0
        priority = first is not None and pod.qos is QoSLevel.RECLAIMED and amount > first
        if amount and (priority or least is None or amount >= least):
            order[pod.key] = not priority, -amount
    users = (pod for pod in inputs.running_pods if pod.key in order)
    return rank_candidates(users, lambda pod: order[pod.key], config.grace_s)


def evaluate_rootfs_overuse(inputs: EvictionInputs, config: RootfsOveruseConfig) -> tuple[EvictionFinding, ...]:
    """Returns the pods with the highest use among those that exceed the bound of their QoS level."""
    room = _filesystem(inputs, config.mount)
    if room is None or room.size_bytes < 1:
        return (missing_input_finding(OVERUSE_NAME, f"room on {config.mount}", OVERUSE_SCOPE),)
    bounds = {
        QoSLevel.SHARED: _overuse_bound(config.shared, room.size_bytes),
        QoSLevel.RECLAIMED: _overuse_bound(config.reclaimed, room.size_bytes),
    }
    over = []
    for pod in inputs.running_pods:
        bound, use = bounds.get(pod.qos), inputs.rootfs.get(pod.key)
        if pod.qos not in config.levels or bound is None or use is None:
            continue
        if pod.qos is QoSLevel.SHARED and pod.namespace not in config.shared_namespaces:
            continue
        if use.used_bytes > bound:
            held = format_bytes(use.used_bytes)
            text = f"rootfs overuse threshold met: writable layers hold {held}, above {format_bytes(bound)}."
            candidate = EvictionCandidate(pod=pod, text=text, grace_s=config.grace_s)
            over.append((-use.used_bytes, pod.key, bound, candidate))
    if not over:
        return (
            not_met_finding(OVERUSE_NAME, "no_over_user", "No pod exceeds the bound of its QoS level.", OVERUSE_SCOPE),
        )
    over.sort(key=lambda each: each[:2])
    threshold = make_threshold(
        OVERUSE_NAME, ThresholdMet.SOFT, OVERUSE_SCOPE, value=over[0][2], observed=-over[0][0], text=over[0][3].text,
        inputs={"pods": len(over)},
    )  # fmt: skip
    return (
        EvictionFinding(threshold=threshold, candidates=tuple(each[3] for each in over[: config.count]), direct=True),
    )


def _overuse_bound(amount: FilesystemThreshold, capacity: int) -> float | None:
    if amount.number is not None:
        return max(amount.number, MIN_OVERUSE_BYTES)
    return None if not amount.ratio else max(amount.ratio, MIN_OVERUSE_RATIO) * capacity

"""rootfs-pressure- and rootfs-overuse-eviction-plugin: the file system of images and writable layers fills up. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from agent.config.eviction_memory import Amount, RootfsOveruseConfig, RootfsPressureConfig
from agent.eviction.judgement import Candidate, Finding, judged, missing, not_met
from agent.eviction.situation import RootfsUse, Situation
from api.evictions import Met, size
from api.facts import Filesystem
from api.qos import QoSLevel

PRESSURE_NAME = "rootfs-pressure-eviction-plugin"
OVERUSE_NAME = "rootfs-overuse-eviction-plugin"
SCOPE = CONDITION = "SystemRootfs"
OVERUSE_SCOPE = "rootfs"
LEAST_BYTES = 20 * (1 << 30)
"""Whatever is configured, a pod may write so much,"""
LEAST_RATIO = 0.1
"""or this part of the file system."""


class _Kind(NamedTuple):
    """Bytes or inodes: what is left, out of what, and what pods use."""

    what: str
    free: int
    capacity: int
    least: Amount
    pod_least: Amount
    first: Amount
    use: Callable[[RootfsUse], int]


def judge_pressure(situation: Situation, config: RootfsPressureConfig) -> tuple[Finding, ...]:
    """One finding for bytes and one for inodes."""
    room = _room(situation, config.mount)
    if room is None:
        return (missing(PRESSURE_NAME, f"room on {config.mount}", SCOPE),)
    if room.size_bytes < config.minimum_capacity_bytes:
        text = (
            f"{config.mount} has {size(room.size_bytes)}: below {size(config.minimum_capacity_bytes)} it is left alone."
        )
        return (not_met(PRESSURE_NAME, "file_system_small", text, SCOPE),)
    kinds = (
        _Kind(
            "bytes", room.available_bytes, room.size_bytes, config.minimum_free, config.pod_minimum,
            config.reclaimed_priority, lambda use: use.used_bytes,
        ),
        _Kind(
            "inodes", room.free_inodes, room.inodes, config.minimum_free_inodes, config.pod_minimum_inodes,
            config.reclaimed_priority_inodes, lambda use: use.inodes,
        ),
    )  # fmt: skip
    return tuple(_pressure(situation, kind, config) for kind in kinds)


def _room(situation: Situation, mount: str) -> Filesystem | None:
    return situation.snapshot.node.filesystems.get(mount) if situation.node_files_fresh else None


def _pressure(situation: Situation, kind: _Kind, config: RootfsPressureConfig) -> Finding:
    least = kind.least.of(kind.capacity)
    if least is None:
        return not_met(PRESSURE_NAME, "not_configured", f"No minimum of free {kind.what} is set.", SCOPE, kind.what)
    if not 0 < kind.capacity >= kind.free:
        return missing(PRESSURE_NAME, f"free {kind.what} of {config.mount}", SCOPE, kind.what)
    going = sum(kind.use(situation.rootfs[pod.key]) for pod in situation.going if pod.key in situation.rootfs)
    free = kind.free + going
    met = Met.HARD if free < least else Met.NOT_MET
    text = (
        f"{config.mount} has {free} {kind.what} free or about to be, of {kind.capacity}; the threshold is {least:.0f}."
    )
    threshold = judged(
        PRESSURE_NAME, met, SCOPE, subject=kind.what, value=least, observed=free, below=True, condition=CONDITION, text=text,
        inputs={"mount": config.mount, "kind": kind.what, "free": kind.free, "capacity": kind.capacity},
    )  # fmt: skip
    return Finding(threshold=threshold, candidates=_users(situation, kind, config) if met is Met.HARD else ())


def _users(situation: Situation, kind: _Kind, config: RootfsPressureConfig) -> tuple[Candidate, ...]:
    """Reclaimed pods that use a lot first, then who uses most; who uses little stays."""
    least, first = kind.pod_least.of(kind.capacity), kind.first.of(kind.capacity)
    ranked = []
    for pod in situation.staying:
        use = situation.rootfs.get(pod.key)
        if use is None:
            continue
        amount = kind.use(use)
        priority = first is not None and pod.qos is QoSLevel.RECLAIMED and amount > first
        if amount and (priority or least is None or amount >= least):
            ranked.append((not priority, -amount, pod.key, pod))
    return tuple(Candidate(pod=each[3], grace_s=config.grace_s) for each in sorted(ranked, key=lambda each: each[:3]))


def judge_overuse(situation: Situation, config: RootfsOveruseConfig) -> tuple[Finding, ...]:
    """The pods that write most, of those that write more than their level may."""
    room = _room(situation, config.mount)
    if room is None or room.size_bytes < 1:
        return (missing(OVERUSE_NAME, f"room on {config.mount}", OVERUSE_SCOPE),)
    bounds = {
        QoSLevel.SHARED: _bound(config.shared, room.size_bytes),
        QoSLevel.RECLAIMED: _bound(config.reclaimed, room.size_bytes),
    }
    over = []
    for pod in situation.staying:
        bound, use = bounds.get(pod.qos), situation.rootfs.get(pod.key)
        if pod.qos not in config.levels or bound is None or use is None:
            continue
        if pod.qos is QoSLevel.SHARED and pod.namespace not in config.shared_namespaces:
            continue
        if use.used_bytes > bound:
            text = f"rootfs overuse threshold met: writable layers hold {size(use.used_bytes)}, above {size(bound)}."
            candidate = Candidate(pod=pod, text=text, grace_s=config.grace_s)
            over.append((-use.used_bytes, pod.key, bound, candidate))
    if not over:
        return (
            not_met(OVERUSE_NAME, "no_over_user", "No pod writes more than it may, as far as is known.", OVERUSE_SCOPE),
        )
    over.sort(key=lambda each: each[:2])
    threshold = judged(
        OVERUSE_NAME, Met.SOFT, OVERUSE_SCOPE, value=over[0][2], observed=-over[0][0], text=over[0][3].text,
        inputs={"pods": len(over)},
    )  # fmt: skip
    return (Finding(threshold=threshold, candidates=tuple(each[3] for each in over[: config.count]), direct=True),)


def _bound(amount: Amount, capacity: int) -> float | None:
    if amount.number is not None:
        return max(amount.number, LEAST_BYTES)
    return None if not amount.ratio else max(amount.ratio, LEAST_RATIO) * capacity

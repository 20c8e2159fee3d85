"""Plugin rootfs-overuse-eviction-plugin: one pod writes too much into its writable layers.
It is pure.
"""

from __future__ import annotations

from agent.config.eviction import FilesystemThreshold, RootfsOveruseConfig
from agent.eviction.eviction_inputs import EvictionInputs
from agent.eviction.finding import (
    EvictionCandidate,
    EvictionFinding,
    make_threshold,
    missing_input_finding,
    not_met_finding,
)
from agent.eviction.plugins.rootfs_pressure import fresh_filesystem
from api.eviction import ThresholdMet
from api.qos import QoSLevel
from api.quantity import format_bytes

NAME = "rootfs-overuse-eviction-plugin"
SCOPE = "rootfs"
MIN_OVERUSE_BYTES = 20 * (1 << 30)
"""Minimum of the configured bound in bytes: pods may always use this much."""
MIN_OVERUSE_RATIO = 0.1
"""The same as a fraction of the file system."""


def evaluate_rootfs_overuse(inputs: EvictionInputs, config: RootfsOveruseConfig) -> tuple[EvictionFinding, ...]:
    """Return the pods with the highest use among those that exceed the bound of their QoS level."""
    room = fresh_filesystem(inputs, config.mount)
    if room is None or room.size_bytes < 1:
        return (missing_input_finding(NAME, f"room on {config.mount}", SCOPE),)
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
        return (not_met_finding(NAME, "no_over_user", "No pod exceeds the bound of its QoS level.", SCOPE),)
    over.sort(key=lambda each: each[:2])
    threshold = make_threshold(
        NAME, ThresholdMet.SOFT, SCOPE, value=over[0][2], observed=-over[0][0], text=over[0][3].text,
        inputs={"pods": len(over)},
    )  # fmt: skip
    return (
        EvictionFinding(threshold=threshold, candidates=tuple(each[3] for each in over[: config.count]), direct=True),
    )


def _overuse_bound(amount: FilesystemThreshold, capacity: int) -> float | None:
    if amount.number is not None:
        return max(amount.number, MIN_OVERUSE_BYTES)
    return None if not amount.ratio else max(amount.ratio, MIN_OVERUSE_RATIO) * capacity

"""In which order pods leave for memory: reclaimed ones first, then the lowest priority, then the largest. Pure.

[qos.pod, priority.pod, mem.usage.container or mem.total.numa.container]. A pod of which the size is not known does not leave:
Katalyst takes it first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from agent.eviction.judgement import Candidate
from api.pods import Pod
from api.qos import QoSLevel


def by_memory(
    pods: Iterable[Pod],
    size: Callable[[Pod], float | None],
    grace_s: Callable[[Pod], float | None],
    *,
    any_level: bool,
    least: float = 0.0,
) -> tuple[Candidate, ...]:
    """Reclaimed pods, or pods of any level, that use `least` bytes at least and more than none."""
    sizes = {
        pod.key: (pod, bytes_used)
        for pod in pods
        if (any_level or pod.qos is QoSLevel.RECLAIMED)
        and (bytes_used := size(pod)) is not None
        and bytes_used >= least
        and bytes_used > 0
    }
    ranked = sorted(
        sizes.values(),
        key=lambda each: (each[0].qos is not QoSLevel.RECLAIMED, each[0].priority, -each[1], each[0].key),
    )
    return tuple(Candidate(pod=pod, grace_s=grace_s(pod)) for pod, _ in ranked)

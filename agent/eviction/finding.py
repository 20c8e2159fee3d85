"""Result of an eviction plugin: a threshold with its inputs, and the pods that are candidates for eviction.
It is pure. Candidates for memory are ordered as Katalyst orders them: reclaimed pods first, then lowest priority,
then largest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from api.eviction import EvictionCondition, EvictionThreshold, ThresholdMet
from api.knobs import Reason
from api.pod import Pod
from api.qos import QoSLevel

ThresholdInput = float | int | str | None
INPUT_MISSING, PLUGIN_FAILED = "input_missing", "plugin_failed"
"""Rules of a plugin that cannot evaluate its threshold."""


class EvictionCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that may be evicted."""

    pod: Pod
    text: str = ""
    """The reason for this pod; empty if the threshold's reason is enough."""
    grace_s: float | None = None


class EvictionFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One threshold of one plugin in one cycle, and the pods that may be evicted because of it."""

    threshold: EvictionThreshold
    candidates: tuple[EvictionCandidate, ...] = ()
    """The first is evicted first. Empty if no eviction would help."""
    direct: bool = False
    """Whether each candidate is proposed for a reason of its own (Katalyst's GetEvictPods), not the first for the threshold."""
    forced: bool = False
    """Whether all candidates of a direct finding are evicted (Katalyst's ForceEvict), not one per node and cycle."""
    kind: str = ""
    """`memory`, `cpu` or empty: after level and priority, pods evicted for CPU come first, as in Katalyst (EvictionScope)."""
    cool_down_s: float = 0.0
    """Minimum time between two victims of this plugin."""
    awaits_termination: bool = False
    """Whether the plugin proposes no pod while its earlier victims terminate, because the observation still includes them."""


def not_met_finding(plugin: str, rule: str, text: str, scope: str = "", subject: str = "") -> EvictionFinding:
    """Return a finding that is not met, with the reason."""
    reason = Reason(rule=rule, text=text)
    return EvictionFinding(
        threshold=EvictionThreshold(
            plugin=plugin, met=ThresholdMet.NOT_MET, scope=scope, subject=subject, reason=reason
        )
    )


def missing_input_finding(plugin: str, what: str, scope: str = "", subject: str = "") -> EvictionFinding:
    """Return a finding that is not met because an input is missing or too old."""
    text = f"{what} is not known or too old; no pod is evicted for that."
    return not_met_finding(plugin, INPUT_MISSING, text, scope, subject)


def make_threshold(  # noqa: PLR0913 - the fields of a threshold
    plugin: str,
    met: ThresholdMet,
    scope: str,
    *,
    subject: str = "",
    value: float,
    observed: float,
    below: bool = False,
    condition: str = "",
    tolerance_s: float = 0.0,
    text: str,
    inputs: Mapping[str, ThresholdInput] | None = None,
) -> EvictionThreshold:
    """Return a threshold with its value, observation and reason."""
    rules = {
        ThresholdMet.NOT_MET: "threshold_not_met",
        ThresholdMet.SOFT: "soft_threshold_met",
        ThresholdMet.HARD: "hard_threshold_met",
    }
    shown = EvictionCondition(name=condition) if condition and met is not ThresholdMet.NOT_MET else None
    return EvictionThreshold(
        plugin=plugin,
        met=met,
        scope=scope,
        subject=subject,
        value=value,
        observed=observed,
        operator="<" if below else ">",
        condition=shown,
        tolerance_s=tolerance_s,
        reason=Reason(rule=rules[met], text=text, threshold=value, inputs=dict(inputs or {})),
    )


def mean(values: Sequence[float]) -> float:
    """Return 0 for an empty sequence."""
    return sum(values) / len(values) if values else 0.0


def rank_candidates(
    pods: Iterable[Pod], order: Callable[[Pod], Any], grace_s: float | None
) -> tuple[EvictionCandidate, ...]:
    """Return the pods as candidates, ascending by `order` and then by key."""
    ranked = sorted(pods, key=lambda pod: (order(pod), pod.key))
    return tuple(EvictionCandidate(pod=pod, grace_s=grace_s) for pod in ranked)


def candidates_until_released(
    release: float, ranked: Sequence[Pod], amount: Callable[[Pod], float | None], grace_s: float | None
) -> tuple[EvictionCandidate, ...]:
    """Return the first pods that together release the amount; a pod without a known amount releases nothing."""
    chosen = []
    for pod in ranked:
        if release <= 0:
            break
        freed = amount(pod)
        if freed:
            chosen.append(EvictionCandidate(pod=pod, grace_s=grace_s))
            release -= freed
    return tuple(chosen)


def rank_by_memory(
    pods: Iterable[Pod],
    size: Callable[[Pod], float | None],
    grace_s: Callable[[Pod], float | None],
    *,
    any_level: bool,
    min_bytes: float = 0.0,
) -> tuple[EvictionCandidate, ...]:
    """Return reclaimed pods, or all pods with `any_level`, that use at least `min_bytes`, in eviction order."""
    sizes = {
        pod.key: (pod, bytes_used)
        for pod in pods
        if (any_level or pod.qos is QoSLevel.RECLAIMED)
        and (bytes_used := size(pod)) is not None
        and bytes_used >= min_bytes
        and bytes_used > 0
    }
    ranked = sorted(
        sizes.values(),
        key=lambda each: (each[0].qos is not QoSLevel.RECLAIMED, each[0].priority, -each[1], each[0].key),
    )
    return tuple(EvictionCandidate(pod=pod, grace_s=grace_s(pod)) for pod, _ in ranked)

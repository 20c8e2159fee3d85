"""Result of an eviction plugin: a threshold with its inputs, and the pods that are candidates for eviction.
It is pure. Candidates for memory are ordered as Katalyst orders them: reclaimed pods first, then lowest priority,
then largest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from api.eviction import EvictionCondition, EvictionThreshold, ThresholdMet
from api.knobs import Reason
from api.pod import Pod
from api.qos import QoSLevel

ThresholdInput = float | int | str | None
INPUT_MISSING, PLUGIN_FAILED = "input_missing", "plugin_failed"
"""Rules of a plugin that cannot judge."""


class EvictionCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that could leave, and why this one."""

    pod: Pod
    text: str = ""
    """Of its own; else the threshold says why."""
    grace_s: float | None = None


class EvictionFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One threshold of one plugin in one round, and who could leave because of it."""

    threshold: EvictionThreshold
    candidates: tuple[EvictionCandidate, ...] = ()
    """Who leaves first is first. Empty where nobody would help."""
    direct: bool = False
    """Each of them is put forward for itself [GetEvictPods]; else the first one because of the threshold."""
    forced: bool = False
    """Of a direct one: all of them leave, not one of the whole node in a round [ForceEvict]."""
    kind: str = ""
    """`memory` or `cpu`: of one level and priority, who leaves for CPU leaves first, as in Katalyst [EvictionScope]."""
    cool_down_s: float = 0.0
    """After a victim of this plugin, the next one has to wait so long."""
    waits: bool = False
    """What is observed does not tell without its victims that are still going: the next one waits until they are gone."""


def not_met_finding(plugin: str, rule: str, text: str, scope: str = "", subject: str = "") -> EvictionFinding:
    """Nothing to do, and why; also where an input is missing."""
    verdict = Reason(rule=rule, text=text)
    return EvictionFinding(
        threshold=EvictionThreshold(
            plugin=plugin, met=ThresholdMet.NOT_MET, scope=scope, subject=subject, reason=verdict
        )
    )


def missing_input_finding(plugin: str, what: str, scope: str = "", subject: str = "") -> EvictionFinding:
    """An input is not known or too old: nobody leaves."""
    text = f"{what} is not known or too old; nobody is evicted for that."
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
    """A threshold with everything that it was judged by."""
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
    """0 of none."""
    return sum(values) / len(values) if values else 0.0


def rank_by_memory(
    pods: Iterable[Pod],
    size: Callable[[Pod], float | None],
    grace_s: Callable[[Pod], float | None],
    *,
    any_level: bool,
    least: float = 0.0,
) -> tuple[EvictionCandidate, ...]:
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
    return tuple(EvictionCandidate(pod=pod, grace_s=grace_s(pod)) for pod, _ in ranked)

"""What a plugin answers, the words that all of them use. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from api.evictions import Condition, Met, Threshold
from api.knobs import Verdict
from api.pods import Pod

Input = float | int | str | None
INPUT_MISSING, PLUGIN_FAILED = "input_missing", "plugin_failed"
"""Rules of a plugin that cannot judge."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that could leave, and why this one."""

    pod: Pod
    text: str = ""
    """Of its own; else the threshold says why."""
    grace_s: float | None = None


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One threshold of one plugin in one round, and who could leave because of it."""

    threshold: Threshold
    candidates: tuple[Candidate, ...] = ()
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


def not_met(plugin: str, rule: str, text: str, scope: str = "", subject: str = "") -> Finding:
    """Nothing to do, and why; also where an input is missing."""
    verdict = Verdict(rule=rule, text=text)
    return Finding(threshold=Threshold(plugin=plugin, met=Met.NOT_MET, scope=scope, subject=subject, verdict=verdict))


def missing(plugin: str, what: str, scope: str = "", subject: str = "") -> Finding:
    """An input is not known or too old: nobody leaves."""
    text = f"{what} is not known or too old; nobody is evicted for that."
    return not_met(plugin, INPUT_MISSING, text, scope, subject)


def judged(  # noqa: PLR0913 - the fields of a threshold
    plugin: str,
    met: Met,
    scope: str,
    *,
    subject: str = "",
    value: float,
    observed: float,
    below: bool = False,
    condition: str = "",
    tolerance_s: float = 0.0,
    text: str,
    inputs: Mapping[str, Input] | None = None,
) -> Threshold:
    """A threshold with everything that it was judged by."""
    rules = {Met.NOT_MET: "threshold_not_met", Met.SOFT: "soft_threshold_met", Met.HARD: "hard_threshold_met"}
    shown = Condition(name=condition) if condition and met is not Met.NOT_MET else None
    return Threshold(
        plugin=plugin,
        met=met,
        scope=scope,
        subject=subject,
        value=value,
        observed=observed,
        operator="<" if below else ">",
        condition=shown,
        tolerance_s=tolerance_s,
        verdict=Verdict(rule=rules[met], text=text, threshold=value, inputs=dict(inputs or {})),
    )


def mean(values: Sequence[float]) -> float:
    """0 of none."""
    return sum(values) / len(values) if values else 0.0

"""Targets that follow predictions: Katalyst's borwein latency regression, as a pure function of what a model said.

The mean prediction of a region's containers falls into a slot; version 2 adds the slot's offset to the target of
cpu_usage_ratio, version 3 puts it in the target's place. Predictions that are missing or stale leave the target alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

import msgspec

from agent.config.inference import InferenceConfig
from api.advice import Signal
from api.knobs import Verdict

CPU_USAGE_RATIO = "cpu_usage_ratio"
_NS_PER_S = 1_000_000_000
_MINUTES = 24 * 60


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What the model said of one container (its generic output: predict_value, ignore)."""

    value: float
    ignore: bool = False


class Predictions(msgspec.Struct, frozen=True, kw_only=True):
    """What the model said in one answer, by pod and container."""

    at_ns: int
    """CLOCK_MONOTONIC."""
    by_pod: Mapping[str, Mapping[str, Prediction]]


def retarget(
    signals: Sequence[Signal],
    pods: Sequence[str],
    predictions: Predictions | None,
    config: InferenceConfig,
    now_ns: int,
    minute_of_day: int,
) -> tuple[tuple[Signal, ...], Verdict]:
    """A region's indicators with the target of cpu_usage_ratio moved. `pods` are the region's, by the predictions' keys."""
    same = tuple(signals)
    if config.strategy == "none":
        return same, Verdict(rule="inference_off", text="No strategy follows predictions.")
    if predictions is None or not 0 <= now_ns - predictions.at_ns <= config.stale_s * _NS_PER_S:
        text = f"There is no prediction of the last {config.stale_s:g} s: targets are what they are without."
        return same, Verdict(rule="inference_stale", text=text, threshold=config.stale_s)
    values = [
        prediction.value
        for pod in pods
        for prediction in predictions.by_pod.get(pod, {}).values()
        if not prediction.ignore and isfinite(prediction.value)
    ]
    if not values:
        return same, Verdict(
            rule="inference_nothing", text="The model says nothing of these pods: targets are unchanged."
        )
    mean = sum(values) / len(values)
    offset, why = _offset(mean, config, minute_of_day % _MINUTES)
    moved = tuple(
        msgspec.structs.replace(signal, target=_target(signal.target, offset, config))
        if signal.name == CPU_USAGE_RATIO
        else signal
        for signal in same
    )
    before = next((signal.target for signal in same if signal.name == CPU_USAGE_RATIO), None)
    after = next((signal.target for signal in moved if signal.name == CPU_USAGE_RATIO), None)
    text = f"Predictions of {len(values)} containers have a mean of {mean:g}: {why}, so the target is {after}, not {before}."
    return moved, Verdict(
        rule=config.strategy,
        text=text,
        threshold=after,
        inputs={"prediction": mean, "containers": len(values), "offset": offset, "target_before": before},
    )


def _offset(mean: float, config: InferenceConfig, minute: int) -> tuple[float, str]:
    """The offset that applies, and the words for it; a special time counts more than any slot."""
    for special in config.special_times:
        if special.covers(minute):
            return special.offset, f"it is between {special.start} and {special.end}, with {special.offset:+g}"
    slot = next((slot for slot in config.slots if mean < slot.below), config.slots[-1])
    return slot.offset, f"the slot below {slot.below:g} has {slot.offset:+g}"


def _target(target: float, offset: float, config: InferenceConfig) -> float:
    if config.strategy == "borwein_v2":
        target += min(max(offset, config.offset_min), config.offset_max)
    else:
        target = offset
    return round(min(max(target, config.target_min), config.target_max), 6)

"""What one region leaves to reclaimed pods: Katalyst's headroom policies none, canonical and numa-dedicated."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from api.knobs import Verdict


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """How well a service fares by its profile (SPD): at `least` nothing of its pod may be lent, at `most` all that is left."""

    value: float
    least: float = 0.0
    most: float = 100.0


class RegionNeed(msgspec.Struct, frozen=True, kw_only=True):
    """What a headroom policy looks at; all in cores."""

    name: str
    upper_cores: float
    """What the region may grow to."""
    estimate_cores: float | None
    """What its containers need; None where that is not known."""
    reserved_for_allocate_cores: float = 0.0
    reserved_for_reclaim_cores: float = 0.0
    reclaimable: bool = True
    """Whether what this region leaves may be lent; False while reclaim is off on the node or for its pod."""
    score: Score | None = None


def region_cores(upper: float, estimate: float, reserved_for_allocate: float, reserved_for_reclaim: float) -> float:
    """Region policy `canonical`: what the online pods of a region leave of its upper bound."""
    return max(upper - estimate - reserved_for_allocate + reserved_for_reclaim, 0.0)


def region_headroom(need: RegionNeed, policy: str) -> tuple[float | None, Verdict]:
    """Cores that one region leaves by the policy of this name; None where an input is missing. KeyError for an unknown name."""
    return _POLICIES[policy](need)


def _none(need: RegionNeed) -> tuple[float | None, Verdict]:
    return 0.0, Verdict(rule="region_none", text=f"Policy none: region {need.name} lends nothing.")


def _canonical(need: RegionNeed) -> tuple[float | None, Verdict]:
    inputs = _inputs(need)
    if need.estimate_cores is None:
        text = f"What region {need.name} needs is not known, so what it leaves is not either."
        return None, Verdict(rule="region_unknown", text=text, inputs=inputs)
    cores = region_cores(
        need.upper_cores, need.estimate_cores, need.reserved_for_allocate_cores, need.reserved_for_reclaim_cores
    )
    text = (
        f"Region {need.name} leaves {cores:.2f} cores: {need.upper_cores:.2f} at most, less {need.estimate_cores:.2f} needed"
        f" and {need.reserved_for_allocate_cores:.2f} reserved,"
        f" plus {need.reserved_for_reclaim_cores:.2f} that reclaimed pods keep."
    )
    return cores, Verdict(rule="region_canonical", text=text, threshold=need.upper_cores, inputs=inputs)


def _numa_dedicated(need: RegionNeed) -> tuple[float | None, Verdict]:
    """The canonical value, in proportion to how well the pod fares."""
    if not need.reclaimable:
        text = f"Reclaim is off for the pod of region {need.name}: it lends nothing."
        return 0.0, Verdict(rule="region_reclaim_off", text=text, inputs=_inputs(need))
    cores, verdict = _canonical(need)
    if cores is None:
        return None, verdict
    score = need.score
    if score is None or score.most <= score.least:
        text = f"How well the pod of region {need.name} fares is not known, so nothing can be said of what it leaves."
        return None, Verdict(rule="region_score_unknown", text=text, inputs=_inputs(need))
    share = min(max((score.value - score.least) / (score.most - score.least), 0.0), 1.0)
    by = f"By its score of {score.value:g}, of {score.least:g} to {score.most:g},"
    text = f"{verdict.text} {by} {cores * share:.2f} cores are lent."
    inputs = {**_inputs(need), "score": score.value, "canonical_cores": round(cores, 3)}
    return cores * share, Verdict(rule="region_numa_dedicated", text=text, threshold=score.least, inputs=inputs)


_POLICIES: Mapping[str, Callable[[RegionNeed], tuple[float | None, Verdict]]] = {
    "none": _none,
    "canonical": _canonical,
    "numa-dedicated": _numa_dedicated,
    "numa-exclusive": _numa_dedicated,  # Katalyst's older name of it
}


def _inputs(need: RegionNeed) -> dict[str, float | int | str | None]:
    return {
        "upper_cores": need.upper_cores,
        "estimate_cores": None if need.estimate_cores is None else round(need.estimate_cores, 3),
        "reserved_for_allocate_cores": need.reserved_for_allocate_cores,
        "reserved_for_reclaim_cores": need.reserved_for_reclaim_cores,
    }

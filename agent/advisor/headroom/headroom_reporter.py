"""Turns computed headroom into reported headroom: Katalyst's window, bounded steps, reserve and minimum.
A sample is taken every period; the mean of a full window is reported and split over NUMA nodes. Without new
inputs the value is held for `freshS`, then decays to the minimum until `expiredS`, and regrows in steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import isfinite

import msgspec
from msgspec.structs import replace

from agent.config.report import ReportConfig
from api.advice import Headroom
from api.knobs import Reason, ReasonInputs
from api.qos import QoSLevel
from api.quantity import format_bytes, format_cores
from api.snapshot import Snapshot
from api.units import GIB, MIB, NS_PER_S


class HeadroomSample(msgspec.Struct, frozen=True, kw_only=True):
    """An amount at one time of CLOCK_MONOTONIC."""

    at_ns: int
    value: float


class SampleTrack(msgspec.Struct, frozen=True, kw_only=True):
    """The latest samples of one amount, oldest first, and the level that follows from them."""

    samples: tuple[HeadroomSample, ...] = ()
    level: float | None = None
    """None until the window is full for the first time."""


class AveragingWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Number of averaged samples, their lifetime, and the bounds of one step of the level."""

    size: int
    ttl_ns: int
    min_step: float
    max_step: float


class HeadroomSeries(msgspec.Struct, frozen=True, kw_only=True):
    """One resource: total, parts by NUMA node, and the time of the latest value."""

    total: SampleTrack = SampleTrack()
    by_numa: Mapping[int, SampleTrack] = {}
    known_ns: int | None = None
    regaining: bool = False
    """Whether the level is still below the value that it had before inputs were missing."""


def add_sample(track: SampleTrack, value: float, window: AveragingWindow, now_ns: int) -> SampleTrack:
    """Return the track with one more sample. The level follows the mean of a full window in steps."""
    samples = (*track.samples, HeadroomSample(at_ns=now_ns, value=value))[-window.size :]
    valid = [sample.value for sample in samples if now_ns - sample.at_ns < window.ttl_ns]
    if len(valid) < window.size:
        return SampleTrack(samples=samples, level=track.level)
    return SampleTrack(samples=samples, level=next_level(track.level, sum(valid) / len(valid), window))


def next_level(level: float | None, mean: float, window: AveragingWindow) -> float:
    """Return the next level towards the mean: unchanged for less than a min step, and at most a max step away."""
    if level is None:
        return mean
    if abs(mean - level) < window.min_step:
        return level
    return min(max(mean, level - window.max_step), level + window.max_step)


def freshness_ratio(age_s: float, fresh_s: float, expired_s: float) -> float:
    """Return 1 until `fresh_s` after the latest value, then linearly down to 0 at `expired_s`."""
    return min(max((expired_s - age_s) / (expired_s - fresh_s), 0.0), 1.0)


def decay_level(level: float, floor: float, fresh: float) -> float:
    """Return the rest of a level above the floor; a level below it stays."""
    low = min(level, floor)
    return low + (level - low) * fresh


_DIGITS = 6
"""Decimals of the parts, so that their sum equals the total after rounding to thousandths."""


class NodeCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity of the node, which no reported amount exceeds."""

    cores_by_numa: Mapping[int, float]
    memory_bytes: float | None = None
    """None if it is not known: then no memory is reported."""
    memory_by_numa: Mapping[int, float] = {}


class ReporterState(msgspec.Struct, frozen=True, kw_only=True):
    """State of the reporter."""

    tick_ns: int | None = None
    cores: HeadroomSeries = HeadroomSeries()
    memory: HeadroomSeries = HeadroomSeries()
    reported_headroom: Headroom | None = None
    """The latest result; utilisation uses its cores_by_numa (`ReclaimPoolInputs.last_cores`)."""


class _ResourceInputs(msgspec.Struct, frozen=True, kw_only=True):
    """One resource in this cycle: computed headroom and limits."""

    name: str
    show: Callable[[float], str]
    """Formats an amount as text."""
    computed: float | None
    computed_by_numa: Mapping[int, float]
    capacity: float
    reserved: float
    minimum: float
    window: AveragingWindow
    before: float | None
    """The reported value of the previous period."""
    before_by_numa: Mapping[int, float]


class _ReportedAmount(msgspec.Struct, frozen=True, kw_only=True):
    """Reported amount of one resource."""

    total: float | None
    by_numa: Mapping[int, float]
    rule: str
    text: str
    inputs: ReasonInputs = {}
    stale: bool = False
    """Whether it depends on missing inputs rather than on the node."""


def report_headroom(
    headroom: Headroom,
    capacity: NodeCapacity,
    state: ReporterState,
    config: ReportConfig,
    now_ns: int,
    *,
    enable_reclaim: bool = True,
) -> tuple[Headroom, ReporterState]:
    """Return the reported headroom and the next state; the value changes once per period however often it is called.

    Amounts are None until a window is full for the first time. A clock that went backwards (a reboot) resets the state.
    """
    if state.tick_ns is not None and now_ns < state.tick_ns:
        state = ReporterState()
    if not enable_reclaim:
        zero = _zero_headroom(capacity)
        return zero, ReporterState(reported_headroom=zero)
    before = state.reported_headroom
    if before is not None and state.tick_ns is not None and now_ns - state.tick_ns < config.period_s * NS_PER_S:
        return _limit_to_capacity(before, capacity), state
    cpu, memory = _build_resources(headroom, capacity, config, before)
    cores, cpu_series = _update_series(cpu, state.cores, config, now_ns)
    size, memory_series = _update_series(memory, state.memory, config, now_ns)
    reported = _limit_to_capacity(_drop_negligible_nodes(cores, size, config), capacity)
    return reported, ReporterState(tick_ns=now_ns, cores=cpu_series, memory=memory_series, reported_headroom=reported)


def _build_resources(
    headroom: Headroom, capacity: NodeCapacity, config: ReportConfig, before: Headroom | None
) -> tuple[_ResourceInputs, _ResourceInputs]:
    size = max(int(config.window_s // config.period_s), 1)
    ttl_ns = round(2 * config.window_s * NS_PER_S)
    cpus = sum(capacity.cores_by_numa.values())
    total = capacity.memory_bytes
    cpu = _ResourceInputs(
        name="CPU",
        show=format_cores,
        computed=_finite_amount(headroom.cores, headroom.cores_by_numa),
        computed_by_numa=headroom.cores_by_numa,
        capacity=cpus,
        reserved=config.reserved_cores,
        minimum=config.minimum_cores(cpus),
        window=AveragingWindow(
            size=size, ttl_ns=ttl_ns, min_step=config.min_step_cores, max_step=config.max_step_cores
        ),
        before=None if before is None else before.cores,
        before_by_numa={} if before is None else before.cores_by_numa,
    )
    memory = _ResourceInputs(
        name="Memory",
        show=format_bytes,
        computed=None if total is None else _finite_amount(headroom.memory_bytes, headroom.memory_by_numa),
        computed_by_numa=headroom.memory_by_numa,
        capacity=total or 0.0,
        reserved=float(config.reserved_memory_mib * MIB),
        minimum=config.minimum_memory_bytes(total or 0.0),
        window=AveragingWindow(
            size=size,
            ttl_ns=ttl_ns,
            min_step=float(config.min_step_memory_mib * MIB),
            max_step=float(config.max_step_memory_mib * MIB),
        ),
        before=None if before is None else before.memory_bytes,
        before_by_numa={} if before is None else before.memory_by_numa,
    )
    return cpu, memory


def _finite_amount(total: float | None, parts: Mapping[int, float]) -> float | None:
    """The amount, at least 0; None if it or a part of it is not a finite number."""
    if total is None or not isfinite(total) or not all(map(isfinite, parts.values())):
        return None
    return max(total, 0.0)


def _update_series(
    resource: _ResourceInputs, series: HeadroomSeries, config: ReportConfig, now_ns: int
) -> tuple[_ReportedAmount, HeadroomSeries]:
    """Advance one resource by a period: add a sample to the window, or let the value go stale."""
    age_s = 0.0 if series.known_ns is None else (now_ns - series.known_ns) / NS_PER_S
    fresh = freshness_ratio(age_s, config.fresh_s, config.expired_s)
    left = series.total.level
    if left is not None:
        left = decay_level(left, resource.minimum + resource.reserved, fresh)
    if resource.computed is not None:
        # A level that decayed while inputs were missing grows back in steps.
        total = add_sample(replace(series.total, level=left), resource.computed, resource.window, now_ns)
        below = total.level is not None and total.level + resource.window.min_step < resource.computed
        lost = fresh < 1 and left is not None and series.total.level is not None and left < series.total.level
        series = HeadroomSeries(
            total=total,
            by_numa=_update_numa_tracks(resource, series, now_ns),
            known_ns=now_ns,
            regaining=below and (series.regaining or lost),
        )
        left = total.level
    inputs: ReasonInputs = {
        "found": resource.computed,
        "level": None if left is None else round(left, 3),
        "samples": len(series.total.samples),
        "age_s": round(age_s, 3),
        "reserved": resource.reserved,
        "minimum": round(resource.minimum, 3),
    }
    answer = (
        _report_fresh(resource, series, left)
        if resource.computed is not None
        else _report_stale(resource, left, fresh, age_s)
    )
    stale = resource.computed is None or series.regaining
    return replace(answer, inputs=inputs, stale=stale), series


def _update_numa_tracks(resource: _ResourceInputs, series: HeadroomSeries, now_ns: int) -> dict[int, SampleTrack]:
    """The NUMA nodes' windows with one more sample; without parts, existing windows stay until their samples expire."""
    if not resource.computed_by_numa:
        ttl_ns = resource.window.ttl_ns
        return {numa: track for numa, track in series.by_numa.items() if now_ns - track.samples[-1].at_ns < ttl_ns}
    return {
        numa: add_sample(series.by_numa.get(numa, SampleTrack()), max(value, 0.0), resource.window, now_ns)
        for numa, value in sorted(resource.computed_by_numa.items())
    }


def _report_fresh(resource: _ResourceInputs, series: HeadroomSeries, level: float | None) -> _ReportedAmount:
    """Report a measured level; at most the previous value until every window is full."""
    weights = {numa: track.level for numa, track in series.by_numa.items()}
    amount = None if level is None else min(max(level - resource.reserved, resource.minimum), resource.capacity)
    if level is None or amount is None or None in weights.values():
        text = f"{resource.name}: fewer than {resource.window.size} samples: the reported value does not grow."
        return _scale_reported(resource, amount, rule="window_filling", text=text)
    text = f"{resource.name}: {resource.show(amount)} reported, from a level of {resource.show(level)}"
    if amount > level - resource.reserved:
        text += f" raised to the minimum of {resource.show(resource.minimum)}"
    elif resource.reserved:
        text += f" less {resource.show(resource.reserved)} reserved"
    by_numa = _split_by_weight(amount, {numa: weight or 0.0 for numa, weight in weights.items()})
    return _ReportedAmount(total=amount, by_numa=by_numa, rule="advertised", text=f"{text}.")


def _report_stale(resource: _ResourceInputs, level: float | None, fresh: float, age_s: float) -> _ReportedAmount:
    """Report the rest of the previous value: never more in total, nor on any NUMA node."""
    before = resource.before
    if level is None or before is None:
        text = f"{resource.name}: not computed yet, so it is not reported."
        return _ReportedAmount(total=None, by_numa={}, rule="never_known", text=text)
    amount = min(max(level - resource.reserved, resource.minimum), before)
    text = f"{resource.name}: {resource.show(amount)} reported; inputs have been missing for {age_s:.0f} s."
    return _scale_reported(resource, amount, rule="stale_held" if fresh == 1.0 else "stale_decayed", text=text)


def _scale_reported(resource: _ResourceInputs, amount: float | None, *, rule: str, text: str) -> _ReportedAmount:
    """The previous value scaled down to `amount`; unchanged if that is larger or None."""
    before, parts = resource.before, resource.before_by_numa
    if before is None or amount is None or amount >= before:
        return _ReportedAmount(total=before, by_numa=parts, rule=rule, text=text)
    share = amount / before
    return _ReportedAmount(
        total=amount, by_numa={numa: value * share for numa, value in parts.items()}, rule=rule, text=text
    )


def _split_by_weight(amount: float, weights: Mapping[int, float]) -> dict[int, float]:
    total = sum(weights.values())
    if total <= 0:
        return dict.fromkeys(weights, 0.0)
    return {numa: round(weight * amount / total, _DIGITS) for numa, weight in weights.items()}


def _drop_negligible_nodes(cores: _ReportedAmount, memory: _ReportedAmount, config: ReportConfig) -> Headroom:
    """Merge both resources; a NUMA node where one of them is negligible reports neither."""
    limits = (config.ignored_cores, float(config.ignored_memory_mib * MIB))
    answers = (cores, memory)
    nodes = [
        {n for n, v in answer.by_numa.items() if v <= limit} for answer, limit in zip(answers, limits, strict=True)
    ]
    negligible = nodes[0] | nodes[1]
    texts = [answer.text for answer in answers]
    if negligible:
        listed = ", ".join(str(numa) for numa in sorted(negligible))
        texts.append(f"NUMA node {listed}: one resource is negligible, so none is reported there.")
    cpu_left, memory_left = (_clear_nodes(answer, negligible) for answer in answers)
    is_negligible = [
        a.total is not None and a.total <= limit for a, limit in zip((cpu_left, memory_left), limits, strict=True)
    ]
    if any(is_negligible):
        cpu_left, memory_left = (_clear_nodes(answer, None) for answer in answers)
    # A value reduced because of the other resource is as stale as that one.
    is_reduced = [
        bool(nodes[1] - nodes[0]) or is_negligible[1] > is_negligible[0],
        bool(nodes[0] - nodes[1]) or is_negligible[0] > is_negligible[1],
    ]
    is_stale = (cores.stale or (memory.stale and is_reduced[0]), memory.stale or (cores.stale and is_reduced[1]))
    return Headroom(
        cores=cpu_left.total,
        cores_by_numa=cpu_left.by_numa,
        memory_bytes=memory_left.total,
        memory_by_numa=memory_left.by_numa,
        stale=tuple(name for name, flag in zip(("cpu", "memory"), is_stale, strict=True) if flag),
        reason=Reason(
            rule=cores.rule,
            text=" ".join(texts),
            inputs={
                **{f"cpu_{name}": value for name, value in cores.inputs.items()},
                **{f"memory_{name}": value for name, value in memory.inputs.items()},
            },
        ),
    )


def _clear_nodes(answer: _ReportedAmount, nodes: Collection[int] | None) -> _ReportedAmount:
    """The amount without these NUMA nodes, or without any (None)."""
    if answer.total is None:
        return answer
    by_numa = {n: 0.0 if nodes is None or n in nodes else value for n, value in answer.by_numa.items()}
    total = sum(by_numa.values()) if by_numa else 0.0 if nodes is None else answer.total
    return replace(answer, total=round(total, _DIGITS), by_numa=by_numa)


def _limit_to_capacity(reported: Headroom, capacity: NodeCapacity) -> Headroom:
    """The reported headroom within the node's current capacity, which may have shrunk between two periods."""
    cpus = capacity.cores_by_numa
    cores, cores_by_numa = _limit_amounts(reported.cores, reported.cores_by_numa, sum(cpus.values()), cpus)
    memory, memory_by_numa = reported.memory_bytes, reported.memory_by_numa
    if capacity.memory_bytes is not None:
        memory, memory_by_numa = _limit_amounts(memory, memory_by_numa, capacity.memory_bytes, capacity.memory_by_numa)
    notes = [
        f" Limited to {show(amount)}, the capacity of the NUMA nodes."
        for amount, before, unit, show in (
            (cores, reported.cores, 1.0, format_cores), (memory, reported.memory_bytes, float(GIB), format_bytes)
        )
        if amount is not None and before is not None and amount < before - unit / 100
    ]  # fmt: skip
    reason = reported.reason
    return replace(
        reported,
        cores=cores,
        cores_by_numa=cores_by_numa,
        memory_bytes=memory,
        memory_by_numa=memory_by_numa,
        reason=replace(reason, text="".join((reason.text, *notes))) if notes else reason,
    )


def _limit_amounts(
    total: float | None, by_numa: Mapping[int, float], maximum: float, maximum_by_numa: Mapping[int, float]
) -> tuple[float | None, Mapping[int, float]]:
    if total is None:
        return None, {}
    if not by_numa:
        return min(total, maximum), {}
    parts = dict(by_numa)
    if maximum_by_numa:  # a removed NUMA node has no capacity
        parts = {numa: min(value, maximum_by_numa.get(numa, 0.0)) for numa, value in by_numa.items()}
    if (before := sum(parts.values())) > maximum:
        parts = {numa: value * maximum / before for numa, value in parts.items()}
    return round(sum(parts.values()), _DIGITS), parts


def limit_to_requests(reported: Headroom, snapshot: Snapshot) -> Headroom:
    """Return the reported headroom, limited to what the reclaimed pods of the node request: no further pod fits. Both resources
    are marked as stale, so that no pod is evicted."""
    containers = [container for pod in snapshot.pods if pod.qos is QoSLevel.RECLAIMED for container in pod.containers]
    requested_cores = sum(c.reclaimed_cpu_cores or c.cpu_request_cores or 0.0 for c in containers)
    requested_bytes = float(sum(c.reclaimed_memory_bytes or c.memory_request_bytes or 0 for c in containers))
    cores, cores_by_numa = _limit_amounts(reported.cores, reported.cores_by_numa, requested_cores, {})
    memory, memory_by_numa = _limit_amounts(reported.memory_bytes, reported.memory_by_numa, requested_bytes, {})
    text = "Original values cannot be journalled, so only what the present reclaimed pods request is reported."
    return replace(
        reported,
        cores=cores,
        cores_by_numa=cores_by_numa,
        memory_bytes=memory,
        memory_by_numa=memory_by_numa,
        stale=("cpu", "memory"),
        reason=replace(reported.reason, rule="journal_unavailable", text=f"{reported.reason.text} {text}"),
    )


def _zero_headroom(capacity: NodeCapacity) -> Headroom:
    return Headroom(
        cores=0.0,
        cores_by_numa=dict.fromkeys(capacity.cores_by_numa, 0.0),
        memory_bytes=0.0,
        memory_by_numa=dict.fromkeys(capacity.memory_by_numa, 0.0),
        reason=Reason(rule="reclaim_off", text="Reclaim is disabled: the reported headroom is 0."),
    )


def node_capacity(snapshot: Snapshot) -> NodeCapacity:
    """Return the capacity of the node; memory by NUMA node is omitted unless all nodes have it."""
    node, nodes = snapshot.node, snapshot.topology.numa_nodes
    cores = dict.fromkeys(nodes, 0.0)
    for cpu in snapshot.topology.cpus:
        cores[cpu.numa] += 1
    sizes = {numa: part.meminfo["MemTotal"] for numa, part in node.numa.items() if "MemTotal" in part.meminfo}
    return NodeCapacity(
        cores_by_numa=cores,
        memory_bytes=node.memory_total_bytes,
        memory_by_numa={numa: float(sizes[numa]) for numa in sorted(sizes)} if set(nodes) <= set(sizes) else {},
    )

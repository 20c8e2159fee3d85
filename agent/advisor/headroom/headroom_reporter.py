"""Turns computed headroom into reported headroom: Katalyst's window, bounded steps, reserve and minimum.
A sample is taken every period; the mean of a full window is reported and split over NUMA nodes. Without new
inputs the value is held for `freshS`, then decays to the minimum until `expiredS`, and regrows in steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import isfinite

import msgspec

from agent.config.report import ReportConfig
from agent.config.units import GIB, MIB
from api.advice import Headroom
from api.knobs import Reason
from api.snapshot import Snapshot

NS_PER_S = 1_000_000_000


class HeadroomSample(msgspec.Struct, frozen=True, kw_only=True):
    """An amount at one moment of CLOCK_MONOTONIC."""

    at_ns: int
    value: float


class SampleTrack(msgspec.Struct, frozen=True, kw_only=True):
    """The latest samples of one amount, oldest first, and the level that they have led to so far."""

    samples: tuple[HeadroomSample, ...] = ()
    level: float | None = None
    """None until the window was full once."""


class AveragingWindow(msgspec.Struct, frozen=True, kw_only=True):
    """How many samples are averaged, how long one counts, and how far the level moves at once."""

    size: int
    ttl_ns: int
    min_step: float
    max_step: float


class HeadroomSeries(msgspec.Struct, frozen=True, kw_only=True):
    """One resource: its total, its parts by NUMA node, and when it was known last."""

    total: SampleTrack = SampleTrack()
    by_numa: Mapping[int, SampleTrack] = {}
    known_ns: int | None = None
    regaining: bool = False
    """Whether the level is still on its way back from what it lost while nothing was known."""


def add_sample(track: SampleTrack, value: float, window: AveragingWindow, now_ns: int) -> SampleTrack:
    """The track with one more sample. The level follows the mean of a full window, step by step."""
    samples = (*track.samples, HeadroomSample(at_ns=now_ns, value=value))[-window.size :]
    valid = [sample.value for sample in samples if now_ns - sample.at_ns < window.ttl_ns]
    if len(valid) < window.size:
        return SampleTrack(samples=samples, level=track.level)
    return SampleTrack(samples=samples, level=next_level(track.level, sum(valid) / len(valid), window))


def next_level(level: float | None, mean: float, window: AveragingWindow) -> float:
    """The next level on the way to the mean: unchanged for less than a min step, at most a max step away."""
    if level is None:
        return mean
    if abs(mean - level) < window.min_step:
        return level
    return min(max(mean, level - window.max_step), level + window.max_step)


def freshness_ratio(age_s: float, fresh_s: float, expired_s: float) -> float:
    """1 until `fresh_s` after the last that was known, then linear to 0 at `expired_s`."""
    return min(max((expired_s - age_s) / (expired_s - fresh_s), 0.0), 1.0)


def decay_level(level: float, floor: float, fresh: float) -> float:
    """What is left of a level above the floor; one below it stays."""
    low = min(level, floor)
    return low + (level - low) * fresh


Inputs = dict[str, float | int | str | None]
_DIGITS = 6
"""Parts are rounded to so many digits, so that their sum is the whole to anybody who rounds to thousandths."""


class NodeCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """What the node has; nothing beyond it is advertised, whatever was found."""

    cores_by_numa: Mapping[int, float]
    memory_bytes: float | None = None
    """None where it is not known: then no memory is advertised."""
    memory_by_numa: Mapping[int, float] = {}


class ReporterState(msgspec.Struct, frozen=True, kw_only=True):
    """What the reporter knows of the past."""

    tick_ns: int | None = None
    cores: HeadroomSeries = HeadroomSeries()
    memory: HeadroomSeries = HeadroomSeries()
    reported_headroom: Headroom | None = None
    """The latest answer; by its cores_by_numa utilisation is judged (PoolSituation.last_cores)."""


class _ResourceInputs(msgspec.Struct, frozen=True, kw_only=True):
    """One resource in this round: what was found of it and what it is held to."""

    name: str
    unit: str
    per_unit: float
    """What one unit is in the resource's own: 1 for cores, a GiB for bytes."""
    found: float | None
    found_by_numa: Mapping[int, float]
    capacity: float
    reserved: float
    minimum: float
    window: AveragingWindow
    before: float | None
    """What is advertised of it until now."""
    before_by_numa: Mapping[int, float]

    def show(self, amount: float) -> str:
        return f"{amount / self.per_unit:.2f} {self.unit}"


class _ReportedAmount(msgspec.Struct, frozen=True, kw_only=True):
    """What is advertised of one resource."""

    total: float | None
    by_numa: Mapping[int, float]
    rule: str
    text: str
    inputs: Inputs = {}
    stale: bool = False
    """Whether it says more of how long nothing was known than of the node."""


def report_headroom(
    found: Headroom,
    capacity: NodeCapacity,
    memory: ReporterState,
    config: ReportConfig,
    now_ns: int,
    *,
    enable_reclaim: bool = True,
) -> tuple[Headroom, ReporterState]:
    """What to advertise now, and the memory for the next call. May be called as often as one likes: it changes every period.

    Amounts are None until a window is full for the first time. A clock that went backwards is another boot's: a fresh start.
    """
    if memory.tick_ns is not None and now_ns < memory.tick_ns:
        memory = ReporterState()
    if not enable_reclaim:
        nothing = _zero_headroom(capacity)
        return nothing, ReporterState(reported_headroom=nothing)
    before = memory.reported_headroom
    if before is not None and memory.tick_ns is not None and now_ns - memory.tick_ns < config.period_s * NS_PER_S:
        return _limit_to_capacity(before, capacity), memory
    cpu, space = _build_resources(found, capacity, config, before)
    cores, cpu_series = _update_series(cpu, memory.cores, config, now_ns)
    amount, space_series = _update_series(space, memory.memory, config, now_ns)
    advertised = _limit_to_capacity(_drop_negligible_nodes(cores, amount, config), capacity)
    return advertised, ReporterState(
        tick_ns=now_ns, cores=cpu_series, memory=space_series, reported_headroom=advertised
    )


def _build_resources(
    found: Headroom, capacity: NodeCapacity, config: ReportConfig, before: Headroom | None
) -> tuple[_ResourceInputs, _ResourceInputs]:
    size = max(int(config.window_s // config.period_s), 1)
    ttl_ns = round(2 * config.window_s * NS_PER_S)
    cpus = sum(capacity.cores_by_numa.values())
    total = capacity.memory_bytes
    cpu = _ResourceInputs(
        name="CPU",
        unit="cores",
        per_unit=1.0,
        found=_finite_amount(found.cores, found.cores_by_numa),
        found_by_numa=found.cores_by_numa,
        capacity=cpus,
        reserved=config.reserved_cores,
        minimum=config.minimum_cores(cpus),
        window=AveragingWindow(
            size=size, ttl_ns=ttl_ns, min_step=config.min_step_cores, max_step=config.max_step_cores
        ),
        before=None if before is None else before.cores,
        before_by_numa={} if before is None else before.cores_by_numa,
    )
    space = _ResourceInputs(
        name="Memory",
        unit="GiB",
        per_unit=float(GIB),
        found=None if total is None else _finite_amount(found.memory_bytes, found.memory_by_numa),
        found_by_numa=found.memory_by_numa,
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
    return cpu, space


def _finite_amount(total: float | None, parts: Mapping[int, float]) -> float | None:
    """An amount that may be counted on; None where it, or a part of it, is no number."""
    if total is None or not isfinite(total) or not all(map(isfinite, parts.values())):
        return None
    return max(total, 0.0)


def _update_series(
    resource: _ResourceInputs, series: HeadroomSeries, config: ReportConfig, now_ns: int
) -> tuple[_ReportedAmount, HeadroomSeries]:
    """One resource, one period on: a sample joins the window, or what is there goes stale."""
    age_s = 0.0 if series.known_ns is None else (now_ns - series.known_ns) / NS_PER_S
    fresh = freshness_ratio(age_s, config.fresh_s, config.expired_s)
    left = series.total.level
    if left is not None:
        left = decay_level(left, resource.minimum + resource.reserved, fresh)
    if resource.found is not None:
        # What was given up while stale is not given back at once: growth starts from what was left.
        total = add_sample(msgspec.structs.replace(series.total, level=left), resource.found, resource.window, now_ns)
        below = total.level is not None and total.level + resource.window.min_step < resource.found
        lost = fresh < 1 and left is not None and series.total.level is not None and left < series.total.level
        series = HeadroomSeries(
            total=total,
            by_numa=_update_numa_tracks(resource, series, now_ns),
            known_ns=now_ns,
            regaining=below and (series.regaining or lost),
        )
        left = total.level
    inputs: Inputs = {
        "found": resource.found,
        "level": None if left is None else round(left, 3),
        "samples": len(series.total.samples),
        "age_s": round(age_s, 3),
        "reserved": resource.reserved,
        "minimum": round(resource.minimum, 3),
    }
    answer = (
        _report_fresh(resource, series, left)
        if resource.found is not None
        else _report_stale(resource, left, fresh, age_s)
    )
    stale = resource.found is None or series.regaining
    return msgspec.structs.replace(answer, inputs=inputs, stale=stale), series


def _update_numa_tracks(resource: _ResourceInputs, series: HeadroomSeries, now_ns: int) -> dict[int, SampleTrack]:
    """The windows of the NUMA nodes, one sample on. Where only the total was found, they stand while their samples count."""
    if not resource.found_by_numa:
        ttl_ns = resource.window.ttl_ns
        return {numa: one for numa, one in series.by_numa.items() if now_ns - one.samples[-1].at_ns < ttl_ns}
    return {
        numa: add_sample(series.by_numa.get(numa, SampleTrack()), max(value, 0.0), resource.window, now_ns)
        for numa, value in sorted(resource.found_by_numa.items())
    }


def _report_fresh(resource: _ResourceInputs, series: HeadroomSeries, level: float | None) -> _ReportedAmount:
    """What is advertised of a level that was just measured; no more than before, until every window is full."""
    weights = {numa: track.level for numa, track in series.by_numa.items()}
    amount = None if level is None else min(max(level - resource.reserved, resource.minimum), resource.capacity)
    if level is None or amount is None or None in weights.values():
        text = f"{resource.name}: fewer than {resource.window.size} samples; no more than before, if anything, is advertised."
        return _scale_reported(resource, amount, rule="window_filling", text=text)
    text = f"{resource.name}: {resource.show(amount)} advertised, of a level of {resource.show(level)}"
    if amount > level - resource.reserved:
        text += f" raised to the minimum of {resource.show(resource.minimum)}"
    elif resource.reserved:
        text += f" less {resource.show(resource.reserved)} reserved"
    by_numa = _split_by_weight(amount, {numa: weight or 0.0 for numa, weight in weights.items()})
    return _ReportedAmount(total=amount, by_numa=by_numa, rule="advertised", text=f"{text}.")


def _report_stale(resource: _ResourceInputs, level: float | None, fresh: float, age_s: float) -> _ReportedAmount:
    """What is left of what was advertised: never more of it in all, nor on any NUMA node."""
    before = resource.before
    if level is None or before is None:
        text = f"{resource.name}: nothing is known of it yet, so nothing is advertised."
        return _ReportedAmount(total=None, by_numa={}, rule="never_known", text=text)
    amount = min(max(level - resource.reserved, resource.minimum), before)
    text = f"{resource.name}: {resource.show(amount)} advertised; nothing new was known for {age_s:.0f} s."
    return _scale_reported(resource, amount, rule="stale_held" if fresh == 1.0 else "stale_decayed", text=text)


def _scale_reported(resource: _ResourceInputs, amount: float | None, *, rule: str, text: str) -> _ReportedAmount:
    """So much in the proportions of before, and no more than before; just that where the amount is not known."""
    before, parts = resource.before, resource.before_by_numa
    if before is None or amount is None or amount >= before:
        return _ReportedAmount(total=before, by_numa=parts, rule=rule, text=text)
    share = amount / before
    return _ReportedAmount(
        total=amount, by_numa={numa: value * share for numa, value in parts.items()}, rule=rule, text=text
    )


def _split_by_weight(amount: float, weights: Mapping[int, float]) -> dict[int, float]:
    """An amount on NUMA nodes in proportion to their own windows."""
    total = sum(weights.values())
    if total <= 0:
        return dict.fromkeys(weights, 0.0)
    return {numa: round(weight * amount / total, _DIGITS) for numa, weight in weights.items()}


def _drop_negligible_nodes(cores: _ReportedAmount, memory: _ReportedAmount, config: ReportConfig) -> Headroom:
    """Both resources together: a NUMA node where one of them is next to nothing is advertised with neither."""
    limits = (config.ignored_cores, float(config.ignored_memory_mib * MIB))
    answers = (cores, memory)
    own = [{n for n, v in answer.by_numa.items() if v <= limit} for answer, limit in zip(answers, limits, strict=True)]
    scraps = own[0] | own[1]
    texts = [answer.text for answer in answers]
    if scraps:
        nodes = ", ".join(str(numa) for numa in sorted(scraps))
        texts.append(f"NUMA node {nodes}: next to nothing of one resource, so nothing of any is advertised there.")
    cpu, space = (_clear_nodes(answer, scraps) for answer in answers)
    little = [a.total is not None and a.total <= limit for a, limit in zip((cpu, space), limits, strict=True)]
    if any(little):
        cpu, space = (_clear_nodes(answer, None) for answer in answers)
    # What the one resource took from the other is no newer than itself.
    taken = [bool(own[1] - own[0]) or little[1] > little[0], bool(own[0] - own[1]) or little[0] > little[1]]
    old = (cores.stale or (memory.stale and taken[0]), memory.stale or (cores.stale and taken[1]))
    return Headroom(
        cores=cpu.total,
        cores_by_numa=cpu.by_numa,
        memory_bytes=space.total,
        memory_by_numa=space.by_numa,
        stale=tuple(name for name, is_old in zip(("cpu", "memory"), old, strict=True) if is_old),
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
    """The same without these NUMA nodes, or without any (None); the total is what is left."""
    if answer.total is None:
        return answer
    by_numa = {n: 0.0 if nodes is None or n in nodes else value for n, value in answer.by_numa.items()}
    total = sum(by_numa.values()) if by_numa else 0.0 if nodes is None else answer.total
    return msgspec.structs.replace(answer, total=round(total, _DIGITS), by_numa=by_numa)


def _limit_to_capacity(reported_headroom: Headroom, capacity: NodeCapacity) -> Headroom:
    """The same, within what the node has now; a node that shrank between two periods included."""
    cores, cores_by_numa = _limit_amounts(
        reported_headroom.cores,
        reported_headroom.cores_by_numa,
        sum(capacity.cores_by_numa.values()),
        capacity.cores_by_numa,
    )
    if capacity.memory_bytes is None:
        memory, memory_by_numa = reported_headroom.memory_bytes, reported_headroom.memory_by_numa
    else:
        memory, memory_by_numa = _limit_amounts(
            reported_headroom.memory_bytes,
            reported_headroom.memory_by_numa,
            capacity.memory_bytes,
            capacity.memory_by_numa,
        )
    cut = [
        f" Cut to {amount / unit:.2f} {name}: the NUMA nodes have no more."
        for amount, before, unit, name in (
            (cores, reported_headroom.cores, 1.0, "cores"), (memory, reported_headroom.memory_bytes, float(GIB), "GiB")
        )
        if amount is not None and before is not None and amount < before - unit / 100
    ]  # fmt: skip
    verdict = reported_headroom.reason
    return msgspec.structs.replace(
        reported_headroom,
        cores=cores,
        cores_by_numa=cores_by_numa,
        memory_bytes=memory,
        memory_by_numa=memory_by_numa,
        reason=msgspec.structs.replace(verdict, text="".join((verdict.text, *cut))) if cut else verdict,
    )


def _limit_amounts(
    total: float | None, by_numa: Mapping[int, float], most: float, most_by_numa: Mapping[int, float]
) -> tuple[float | None, Mapping[int, float]]:
    """An amount and its parts within bounds; the amount is the sum of its parts where it has any."""
    if total is None:
        return None, {}
    if not by_numa:
        return min(total, most), {}
    parts = dict(by_numa)
    if most_by_numa:  # a NUMA node that is gone has nothing
        parts = {numa: min(value, most_by_numa.get(numa, 0.0)) for numa, value in by_numa.items()}
    over = sum(parts.values()) / most if most > 0 else 0.0
    if over > 1:
        parts = {numa: value / over for numa, value in parts.items()}
    return round(sum(parts.values()), _DIGITS), parts


def _zero_headroom(capacity: NodeCapacity) -> Headroom:
    return Headroom(
        cores=0.0,
        cores_by_numa=dict.fromkeys(capacity.cores_by_numa, 0.0),
        memory_bytes=0.0,
        memory_by_numa=dict.fromkeys(capacity.memory_by_numa, 0.0),
        reason=Reason(rule="reclaim_off", text="Reclaim is off: nothing is advertised."),
    )


def node_capacity(snapshot: Snapshot) -> NodeCapacity:
    """What the node has. Memory by NUMA node is left out where it is not known of all of them."""
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

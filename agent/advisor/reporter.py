"""From what was found to what is advertised: Katalyst's headroom reporter, and what becomes of it while inputs are stale.

Every 30 s a sample is taken; the mean of two minutes, in bounded steps, less a reserve and never less than a minimum, is
what the node advertises, and its NUMA nodes in proportion. Katalyst keeps the last value for ever when nothing new can be
found, Koordinator drops it at once after 15 minutes; here it stands for 3 minutes, then goes down to the minimum until
15 minutes have passed, and grows again no faster than ever.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import isfinite

import msgspec

from agent.advisor.windows import NS_PER_S, Series, Track, Window, decayed, freshness, push
from agent.config.headroom import GIB, MIB, ReportConfig
from api.advice import Headroom
from api.knobs import Verdict

Inputs = dict[str, float | int | str | None]
_DIGITS = 6
"""Parts are rounded to so many digits, so that their sum is the whole to anybody who rounds to thousandths."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What the node has; nothing beyond it is advertised, whatever was found."""

    cores_by_numa: Mapping[int, float]
    memory_bytes: float | None = None
    """None where it is not known: then no memory is advertised."""
    memory_by_numa: Mapping[int, float] = {}


class ReporterMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What the reporter knows of the past."""

    tick_ns: int | None = None
    cores: Series = Series()
    memory: Series = Series()
    advertised: Headroom | None = None
    """The latest answer; by its cores_by_numa utilisation is judged (PoolSituation.last_cores)."""


class _Resource(msgspec.Struct, frozen=True, kw_only=True):
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
    window: Window
    before: float | None
    """What is advertised of it until now."""
    before_by_numa: Mapping[int, float]

    def show(self, amount: float) -> str:
        return f"{amount / self.per_unit:.2f} {self.unit}"


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What is advertised of one resource."""

    total: float | None
    by_numa: Mapping[int, float]
    rule: str
    text: str
    inputs: Inputs = {}
    stale: bool = False
    """Whether it says more of how long nothing was known than of the node."""


def report(
    found: Headroom,
    capacity: Capacity,
    memory: ReporterMemory,
    config: ReportConfig,
    now_ns: int,
    *,
    enable_reclaim: bool = True,
) -> tuple[Headroom, ReporterMemory]:
    """What to advertise now, and the memory for the next call. May be called as often as one likes: it changes every period.

    Amounts are None until a window is full for the first time. A clock that went backwards is another boot's: a fresh start.
    """
    if memory.tick_ns is not None and now_ns < memory.tick_ns:
        memory = ReporterMemory()
    if not enable_reclaim:
        nothing = _nothing(capacity)
        return nothing, ReporterMemory(advertised=nothing)
    before = memory.advertised
    if before is not None and memory.tick_ns is not None and now_ns - memory.tick_ns < config.period_s * NS_PER_S:
        return _within(before, capacity), memory
    cpu, space = _resources(found, capacity, config, before)
    cores, cpu_series = _advance(cpu, memory.cores, config, now_ns)
    amount, space_series = _advance(space, memory.memory, config, now_ns)
    advertised = _within(_without_scraps(cores, amount, config), capacity)
    return advertised, ReporterMemory(tick_ns=now_ns, cores=cpu_series, memory=space_series, advertised=advertised)


def _resources(
    found: Headroom, capacity: Capacity, config: ReportConfig, before: Headroom | None
) -> tuple[_Resource, _Resource]:
    size = max(int(config.window_s // config.period_s), 1)
    ttl_ns = round(2 * config.window_s * NS_PER_S)
    cpus = sum(capacity.cores_by_numa.values())
    total = capacity.memory_bytes
    cpu = _Resource(
        name="CPU",
        unit="cores",
        per_unit=1.0,
        found=_sound(found.cores, found.cores_by_numa),
        found_by_numa=found.cores_by_numa,
        capacity=cpus,
        reserved=config.reserved_cores,
        minimum=config.minimum_cores(cpus),
        window=Window(size=size, ttl_ns=ttl_ns, min_step=config.min_step_cores, max_step=config.max_step_cores),
        before=None if before is None else before.cores,
        before_by_numa={} if before is None else before.cores_by_numa,
    )
    space = _Resource(
        name="Memory",
        unit="GiB",
        per_unit=float(GIB),
        found=None if total is None else _sound(found.memory_bytes, found.memory_by_numa),
        found_by_numa=found.memory_by_numa,
        capacity=total or 0.0,
        reserved=float(config.reserved_memory_mib * MIB),
        minimum=config.minimum_memory_bytes(total or 0.0),
        window=Window(
            size=size,
            ttl_ns=ttl_ns,
            min_step=float(config.min_step_memory_mib * MIB),
            max_step=float(config.max_step_memory_mib * MIB),
        ),
        before=None if before is None else before.memory_bytes,
        before_by_numa={} if before is None else before.memory_by_numa,
    )
    return cpu, space


def _sound(total: float | None, parts: Mapping[int, float]) -> float | None:
    """An amount that may be counted on; None where it, or a part of it, is no number."""
    if total is None or not isfinite(total) or not all(map(isfinite, parts.values())):
        return None
    return max(total, 0.0)


def _advance(resource: _Resource, series: Series, config: ReportConfig, now_ns: int) -> tuple[_Answer, Series]:
    """One resource, one period on: a sample joins the window, or what is there goes stale."""
    age_s = 0.0 if series.known_ns is None else (now_ns - series.known_ns) / NS_PER_S
    fresh = freshness(age_s, config.fresh_s, config.expired_s)
    left = series.total.level
    if left is not None:
        left = decayed(left, resource.minimum + resource.reserved, fresh)
    if resource.found is not None:
        # What was given up while stale is not given back at once: growth starts from what was left.
        total = push(msgspec.structs.replace(series.total, level=left), resource.found, resource.window, now_ns)
        below = total.level is not None and total.level + resource.window.min_step < resource.found
        lost = fresh < 1 and left is not None and series.total.level is not None and left < series.total.level
        series = Series(
            total=total,
            by_numa=_parts(resource, series, now_ns),
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
    answer = _fresh(resource, series, left) if resource.found is not None else _stale(resource, left, fresh, age_s)
    stale = resource.found is None or series.regaining
    return msgspec.structs.replace(answer, inputs=inputs, stale=stale), series


def _parts(resource: _Resource, series: Series, now_ns: int) -> dict[int, Track]:
    """The windows of the NUMA nodes, one sample on. Where only the total was found, they stand while their samples count."""
    if not resource.found_by_numa:
        ttl_ns = resource.window.ttl_ns
        return {numa: one for numa, one in series.by_numa.items() if now_ns - one.samples[-1].at_ns < ttl_ns}
    return {
        numa: push(series.by_numa.get(numa, Track()), max(value, 0.0), resource.window, now_ns)
        for numa, value in sorted(resource.found_by_numa.items())
    }


def _fresh(resource: _Resource, series: Series, level: float | None) -> _Answer:
    """What is advertised of a level that was just measured; no more than before, until every window is full."""
    weights = {numa: track.level for numa, track in series.by_numa.items()}
    amount = None if level is None else min(max(level - resource.reserved, resource.minimum), resource.capacity)
    if level is None or amount is None or None in weights.values():
        text = f"{resource.name}: fewer than {resource.window.size} samples; no more than before, if anything, is advertised."
        return _scaled(resource, amount, rule="window_filling", text=text)
    text = f"{resource.name}: {resource.show(amount)} advertised, of a level of {resource.show(level)}"
    if amount > level - resource.reserved:
        text += f" raised to the minimum of {resource.show(resource.minimum)}"
    elif resource.reserved:
        text += f" less {resource.show(resource.reserved)} reserved"
    by_numa = _laid_out(amount, {numa: weight or 0.0 for numa, weight in weights.items()})
    return _Answer(total=amount, by_numa=by_numa, rule="advertised", text=f"{text}.")


def _stale(resource: _Resource, level: float | None, fresh: float, age_s: float) -> _Answer:
    """What is left of what was advertised: never more of it in all, nor on any NUMA node."""
    before = resource.before
    if level is None or before is None:
        text = f"{resource.name}: nothing is known of it yet, so nothing is advertised."
        return _Answer(total=None, by_numa={}, rule="never_known", text=text)
    amount = min(max(level - resource.reserved, resource.minimum), before)
    text = f"{resource.name}: {resource.show(amount)} advertised; nothing new was known for {age_s:.0f} s."
    return _scaled(resource, amount, rule="stale_held" if fresh == 1.0 else "stale_decayed", text=text)


def _scaled(resource: _Resource, amount: float | None, *, rule: str, text: str) -> _Answer:
    """So much in the proportions of before, and no more than before; just that where the amount is not known."""
    before, parts = resource.before, resource.before_by_numa
    if before is None or amount is None or amount >= before:
        return _Answer(total=before, by_numa=parts, rule=rule, text=text)
    share = amount / before
    return _Answer(total=amount, by_numa={numa: value * share for numa, value in parts.items()}, rule=rule, text=text)


def _laid_out(amount: float, weights: Mapping[int, float]) -> dict[int, float]:
    """An amount on NUMA nodes in proportion to their own windows."""
    total = sum(weights.values())
    if total <= 0:
        return dict.fromkeys(weights, 0.0)
    return {numa: round(weight * amount / total, _DIGITS) for numa, weight in weights.items()}


def _without_scraps(cores: _Answer, memory: _Answer, config: ReportConfig) -> Headroom:
    """Both resources together: a NUMA node where one of them is next to nothing is advertised with neither."""
    limits = (config.ignored_cores, float(config.ignored_memory_mib * MIB))
    answers = (cores, memory)
    own = [{n for n, v in answer.by_numa.items() if v <= limit} for answer, limit in zip(answers, limits, strict=True)]
    scraps = own[0] | own[1]
    texts = [answer.text for answer in answers]
    if scraps:
        nodes = ", ".join(str(numa) for numa in sorted(scraps))
        texts.append(f"NUMA node {nodes}: next to nothing of one resource, so nothing of any is advertised there.")
    cpu, space = (_emptied(answer, scraps) for answer in answers)
    little = [a.total is not None and a.total <= limit for a, limit in zip((cpu, space), limits, strict=True)]
    if any(little):
        cpu, space = (_emptied(answer, None) for answer in answers)
    # What the one resource took from the other is no newer than itself.
    taken = [bool(own[1] - own[0]) or little[1] > little[0], bool(own[0] - own[1]) or little[0] > little[1]]
    old = (cores.stale or (memory.stale and taken[0]), memory.stale or (cores.stale and taken[1]))
    return Headroom(
        cores=cpu.total,
        cores_by_numa=cpu.by_numa,
        memory_bytes=space.total,
        memory_by_numa=space.by_numa,
        stale=tuple(name for name, is_old in zip(("cpu", "memory"), old, strict=True) if is_old),
        verdict=Verdict(
            rule=cores.rule,
            text=" ".join(texts),
            inputs={
                **{f"cpu_{name}": value for name, value in cores.inputs.items()},
                **{f"memory_{name}": value for name, value in memory.inputs.items()},
            },
        ),
    )


def _emptied(answer: _Answer, nodes: Collection[int] | None) -> _Answer:
    """The same without these NUMA nodes, or without any (None); the total is what is left."""
    if answer.total is None:
        return answer
    by_numa = {n: 0.0 if nodes is None or n in nodes else value for n, value in answer.by_numa.items()}
    total = sum(by_numa.values()) if by_numa else 0.0 if nodes is None else answer.total
    return msgspec.structs.replace(answer, total=round(total, _DIGITS), by_numa=by_numa)


def _within(advertised: Headroom, capacity: Capacity) -> Headroom:
    """The same, within what the node has now; a node that shrank between two periods included."""
    cores, cores_by_numa = _bounded(
        advertised.cores, advertised.cores_by_numa, sum(capacity.cores_by_numa.values()), capacity.cores_by_numa
    )
    if capacity.memory_bytes is None:
        memory, memory_by_numa = advertised.memory_bytes, advertised.memory_by_numa
    else:
        memory, memory_by_numa = _bounded(
            advertised.memory_bytes, advertised.memory_by_numa, capacity.memory_bytes, capacity.memory_by_numa
        )
    cut = [
        f" Cut to {amount / unit:.2f} {name}: the NUMA nodes have no more."
        for amount, before, unit, name in (
            (cores, advertised.cores, 1.0, "cores"), (memory, advertised.memory_bytes, float(GIB), "GiB")
        )
        if amount is not None and before is not None and amount < before - unit / 100
    ]  # fmt: skip
    verdict = advertised.verdict
    return msgspec.structs.replace(
        advertised,
        cores=cores,
        cores_by_numa=cores_by_numa,
        memory_bytes=memory,
        memory_by_numa=memory_by_numa,
        verdict=msgspec.structs.replace(verdict, text="".join((verdict.text, *cut))) if cut else verdict,
    )


def _bounded(
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


def _nothing(capacity: Capacity) -> Headroom:
    return Headroom(
        cores=0.0,
        cores_by_numa=dict.fromkeys(capacity.cores_by_numa, 0.0),
        memory_bytes=0.0,
        memory_by_numa=dict.fromkeys(capacity.memory_by_numa, 0.0),
        verdict=Verdict(rule="reclaim_off", text="Reclaim is off: nothing is advertised."),
    )

"""Pods, pools and memory in words, as the latest round has them: label and text of each part. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from api.advice import NO_BANDWIDTH, NO_CARD, SPEED_UNKNOWN, UNBOUND, PoolSize, RegionAdvice
from api.memory_advice import MemoryAdvice
from cli import words
from cli.advised import Lending, PodStory, PoolStory
from cli.promised import promised_text
from cli.verdicts import verdict_text

Parts = Iterator[tuple[str, str]]
_NO_CPUS = "it does not have the CPUs that it asks for, and runs on those of others"
_NO_BANDWIDTH = "it is not promised the network bandwidth that it asks for, and takes what there is"
_REJECTED = dict.fromkeys((NO_BANDWIDTH, NO_CARD, SPEED_UNKNOWN), _NO_BANDWIDTH)


def pod_text(story: PodStory) -> Parts:
    """How one pod stands beside what was decided of it."""
    name = words.clean(story.pod)
    if story.untouched:
        yield "", f"No change of a knob of {name} is in the journal"
    else:
        yield "", f"Pod {name} as it stands"
    yield "level", story.qos
    if story.past is not None:
        before = "there are decisions on an earlier pod or container of this name, whose cgroup is gone"
        yield "before", f"{before}; the newest is #{story.past} (explain '#{story.past}')"
    for problem in story.problems:
        yield "problem", words.clean(problem)
    if story.rejected is not None:
        yield "rejected", _REJECTED.get(story.rejected.rule, _NO_CPUS)
        yield from verdict_text(story.rejected)
    for card in story.cards:
        whole = f"of {card.capacity} that can be promised both ways {card.promised} are"
        yield "network", f"{card.pods[story.pod]} Mbit/s of {words.clean(card.name)} are promised to it; {whole}"
    if story.lending is not None:
        yield from _lending_text(story.lending)
    for one in story.regions:
        yield from _region_text(one)


def pool_text(pool: PoolStory) -> Parts:
    """One pool of CPUs."""
    yield "", f"Pool {words.clean(pool.name)} has CPUs {words.clean(pool.cpus) or 'none'}"
    for i, size in enumerate(pool.sizes):
        yield "" if i else "size", _size(size)
    if pool.lending is not None:
        yield from _lending_text(pool.lending)
    for one in pool.regions:
        yield from _region_text(one)


def _lending_text(lending: Lending) -> Parts:
    yield "lent", f"{words.cores(lending.lent_cores)} cores may be used by reclaimed pods"
    yield "need", f"{words.cores(lending.requirement_cores)} cores is what online pods are estimated to need"
    yield from promised_text(lending.headroom, lending.advertised)


def _size(size: PoolSize) -> str:
    parts = [f"{size.cpus} CPUs" + ("" if size.numa == UNBOUND else f" of NUMA node {size.numa}")]
    parts += [f"{cpus} more that it shares with {words.clean(name)}" for name, cpus in size.overlap.items() if cpus]
    if size.quota_cores is not None:
        parts.append(f"together at most {words.cores(size.quota_cores)} cores")
    return ", ".join(parts)


def _region_text(one: RegionAdvice) -> Parts:
    region = one.region
    bound = f", bound to NUMA {'nodes' if len(region.numa_nodes) > 1 else 'node'} {_listed(region.numa_nodes)}"
    count = f"{len(region.pods)} {'pod' if len(region.pods) == 1 else 'pods'} of kind {region.kind.value}"
    yield (
        "region",
        f"{words.clean(region.name)}: {count} on pool {words.clean(region.pool)}{bound if region.bound else ''}",
    )
    yield (
        "policy",
        f"{words.clean(one.policy)}, from {words.cores(one.lower_cores)} to {words.cores(one.upper_cores)} cores",
    )
    for i, (control, value) in enumerate(one.controls.items()):
        yield "" if i else "controls", f"{control.value} {words.cores(value)} cores"
    for i, signal in enumerate(one.signals):
        yield (
            "" if i else "signals",
            f"{words.clean(signal.name)} {signal.current:g}, where {signal.target:g} is wanted",
        )
    yield from verdict_text(one.verdict)
    if one.headroom_verdict is not None:
        yield "leaves", words.clean(one.headroom_verdict.text)


def memory_text(advice: MemoryAdvice) -> Parts:
    """What can be promised of memory, how short it is, and what the parts that are switched on make of it."""
    yield "", f"Memory can be promised to reclaimed pods: {_bytes(advice.headroom_bytes)}; policy {advice.policy}"
    yield from _by_numa("promised", advice.headroom_by_numa)
    yield from verdict_text(advice.headroom_verdict)
    yield from _by_numa("provision", advice.provision_by_numa, "; as Katalyst reckons, set nowhere")
    for where, condition in (("", advice.condition), *((f"NUMA {n}: ", c) for n, c in advice.numa_conditions.items())):
        missing = f", {_bytes(condition.target_bytes)} short" if condition.target_bytes else ""
        yield "condition", f"{where}{condition.state.value}{missing}: {words.clean(condition.verdict.text)}"
    for i, verdict in enumerate(advice.verdicts):
        yield "" if i else "parts", f"{words.clean(verdict.rule)}: {words.clean(verdict.text)}"


def _by_numa(label: str, sizes: Mapping[int, float], note: str = "") -> Parts:
    if sizes:
        yield label, ", ".join(f"NUMA node {numa} {_bytes(size)}" for numa, size in sorted(sizes.items())) + note


def _bytes(value: float | None) -> str:
    return "not known" if value is None else words.size(round(value))


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))

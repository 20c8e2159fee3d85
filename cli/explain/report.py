"""Turns an explanation into labelled text: knobs, pods, pools, memory, evictions, the latest cycle. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from api.advice import (
    NETWORK_SPEED_UNKNOWN,
    NO_BANDWIDTH,
    NO_NETWORK_CARD,
    NOT_NUMA_BOUND,
    Headroom,
    MemoryAdvice,
    PoolSize,
    RegionAdvice,
)
from api.decision import ActMode, JournalEntry, OutcomeStatus
from api.eviction import EvictionEntry, EvictionVictim, format_observation
from api.knobs import Reason
from api.snapshot import CADENCE_PERIOD_NS, Cadence
from cli import formats
from cli.explain.answer import (
    EvictionHistory,
    Explanation,
    KnobHistory,
    LatestCycle,
    PodExplanation,
    PoolExplanation,
    ReclaimableCpu,
)
from exporters.view.decision_view import ThresholdView

_SLOW, _RARE = (
    f", up to {CADENCE_PERIOD_NS[cadence] // 1_000_000_000} s old" for cadence in (Cadence.SLOW, Cadence.RARE)
)
_INPUTS_BY_SOURCE = {
    "waits": ("wait_ms", "own_wait_ms", "waits", "cgroup"),
    "blame": ("blame_ratio", "other_culprit"),
    "cgroups": (
        "reclaimed_use_cores", "requirement_cores", "estimate_cores", "use_cores", "reclaim_use_cores", "other_pods_cores",
        "usage_bytes", "group_bytes", "members_bytes", "throttled", "cgroups", "avg10", "mean", "psi_some_avg60",
        "leaving_bytes",
    ),
    f"files of cgroups{_SLOW}": ("need_bytes", "largest_bytes"),
    f"limits{_RARE}": ("cap_bytes",),
    "node": ("cache_buffer_bytes", "busy_cores", "node_used", "watts"),
    # Of the whole node some of them are as new as the round; of a NUMA node they are not.
    f"files of the node{_SLOW}": (
        "free_bytes", "total_bytes", "low_bytes", "min_bytes", "scale_factor", "watermark_bytes", "reclaimable_bytes",
        "pages_per_s", "free",
    ),
    "pods": (
        "request_cores", "request_cpus", "request_bytes", "limit_bytes", "pods", "containers",
        "reclaimed_requests_bytes", "online_requests_kept_bytes", "requested",
    ),
    "threads": ("runnable",),
    "topology": ("cpu_list", "capacity_cores", "reclaim_cpus", "supply_cores"),
    "the settings": (
        "quantile", "reserved_for_allocate_cores", "reserved_for_reclaim_cores", "min_critical_bytes", "reserve_bytes",
        "min_cache_ratio", "percent", "factor", "budget_watts",
    ),
    "the rounds before": (
        "lent_before_cores", "before_cpus", "last_cores", "last_bytes", "asked_before_bytes", "before_us", "rounds", "for_s",
        "samples", "soft_part", "hard_part", "use", "system_ratio", "lowered_percent",
    ),
    "what is advertised": ("promised",),
}  # fmt: skip
INPUT_SOURCES = {name: source for source, names in _INPUTS_BY_SOURCE.items() for name in names}
"""Where an input of a verdict comes from: a source of the snapshot, and how old it was at the most if not every round reads it;
the settings, or memory of the policy. What is in no row is worked out from the others."""


def reason_text(reason: Reason) -> Iterator[tuple[str, str]]:
    """Label and text of each part."""
    yield "because", formats.printable(reason.text)
    limit = "" if reason.threshold is None else f", threshold {format_number(reason.threshold)}"
    yield "rule", f"{formats.printable(reason.rule)}{limit}"
    for i, (name, value) in enumerate(reason.inputs.items()):
        source = INPUT_SOURCES.get(name, "")
        known = (
            "not known"
            if value is None
            else formats.printable(format_number(value) if not isinstance(value, str) else value)
        )
        yield "" if i else "inputs", f"{formats.printable(name)} {known}" + (f" (from {source})" if source else "")


def format_number(value: float) -> str:
    """Six figures at most, and whole numbers with all of theirs."""
    return f"{int(value):,}" if float(value).is_integer() and abs(value) >= 1e6 else f"{value:g}"


def headroom_text(headroom: Headroom | None, reported_headroom: Headroom | None) -> Iterator[tuple[str, str]]:
    """Amounts with their reasons."""
    cores = formats.cores(None if headroom is None else headroom.cores)
    yield "headroom", f"{cores} cores can be promised to reclaimed pods in all, what they use now included"
    if headroom is not None:
        yield from _headroom_by_numa(headroom)
        yield from reason_text(headroom.reason)
    if reported_headroom is not None:
        yield (
            "advertised",
            f"{_headroom_amounts(reported_headroom.cores, reported_headroom.memory_bytes)} by the node, to whoever schedules",
        )
        yield from _headroom_by_numa(reported_headroom)
        yield from reason_text(reported_headroom.reason)


def _headroom_by_numa(amounts: Headroom) -> Iterator[tuple[str, str]]:
    cores, memory = amounts.cores_by_numa, amounts.memory_by_numa
    if len(cores) > 1:
        parts = (f"NUMA node {numa} {_headroom_amounts(cores[numa], memory.get(numa))}" for numa in sorted(cores))
        yield "", "; ".join(parts)


def _headroom_amounts(cores: float | None, memory: float | None) -> str:
    return f"{formats.cores(cores)} cores and {'memory not known' if memory is None else formats.size(round(memory))}"


LabelledParts = Iterator[tuple[str, str]]
_NO_CPUS = "it does not have the CPUs that it asks for, and runs on those of others"
_NO_BANDWIDTH = "it is not promised the network bandwidth that it asks for, and takes what there is"
_REJECTION_TEXT = dict.fromkeys((NO_BANDWIDTH, NO_NETWORK_CARD, NETWORK_SPEED_UNKNOWN), _NO_BANDWIDTH)


def pod_text(story: PodExplanation) -> LabelledParts:
    """How one pod stands beside what was decided of it."""
    name = formats.printable(story.pod)
    if story.untouched:
        yield "", f"No change of a knob of {name} is in the journal"
    else:
        yield "", f"Pod {name} as it stands"
    yield "level", story.qos
    if story.past is not None:
        before = "there are decisions on an earlier pod or container of this name, whose cgroup is gone"
        yield "before", f"{before}; the newest is #{story.past} (explain '#{story.past}')"
    for problem in story.problems:
        yield "problem", formats.printable(problem)
    if story.rejected is not None:
        yield "rejected", _REJECTION_TEXT.get(story.rejected.rule, _NO_CPUS)
        yield from reason_text(story.rejected)
    for card in story.cards:
        whole = f"of {card.capacity} that can be promised both ways {card.allocated_mbit} are"
        yield "network", f"{card.pods[story.pod]} Mbit/s of {formats.printable(card.name)} are promised to it; {whole}"
    if story.lending is not None:
        yield from _reclaimable_text(story.lending)
    for one in story.regions:
        yield from _region_text(one)


def pool_text(pool: PoolExplanation) -> LabelledParts:
    """One pool of CPUs."""
    yield "", f"Pool {formats.printable(pool.name)} has CPUs {formats.printable(pool.cpus) or 'none'}"
    for i, size in enumerate(pool.sizes):
        yield "" if i else "size", _pool_size_text(size)
    if pool.lending is not None:
        yield from _reclaimable_text(pool.lending)
    for one in pool.regions:
        yield from _region_text(one)


def _reclaimable_text(lending: ReclaimableCpu) -> LabelledParts:
    yield "lent", f"{formats.cores(lending.reclaimable_cores)} cores may be used by reclaimed pods"
    yield "need", f"{formats.cores(lending.requirement_cores)} cores is what online pods are estimated to need"
    yield from headroom_text(lending.headroom, lending.reported_headroom)


def _pool_size_text(size: PoolSize) -> str:
    parts = [f"{size.cpus} CPUs" + ("" if size.numa == NOT_NUMA_BOUND else f" of NUMA node {size.numa}")]
    parts += [
        f"{cpus} more that it shares with {formats.printable(name)}" for name, cpus in size.overlap.items() if cpus
    ]
    if size.quota_cores is not None:
        parts.append(f"together at most {formats.cores(size.quota_cores)} cores")
    return ", ".join(parts)


def _region_text(one: RegionAdvice) -> LabelledParts:
    region = one.region
    bound = f", bound to NUMA {'nodes' if len(region.numa_nodes) > 1 else 'node'} {_join_numbers(region.numa_nodes)}"
    count = f"{len(region.pods)} {'pod' if len(region.pods) == 1 else 'pods'} of kind {region.kind.value}"
    yield (
        "region",
        f"{formats.printable(region.name)}: {count} on pool {formats.printable(region.pool)}{bound if region.bound else ''}",
    )
    yield (
        "policy",
        f"{formats.printable(one.policy)}, from {formats.cores(one.lower_cores)} to {formats.cores(one.upper_cores)} cores",
    )
    for i, (control, value) in enumerate(one.controls.items()):
        yield "" if i else "controls", f"{control.value} {formats.cores(value)} cores"
    for i, signal in enumerate(one.signals):
        yield (
            "" if i else "signals",
            f"{formats.printable(signal.name)} {signal.current:g}, where {signal.target:g} is wanted",
        )
    yield from reason_text(one.reason)
    if one.headroom_reason is not None:
        yield "leaves", formats.printable(one.headroom_reason.text)


def memory_text(advice: MemoryAdvice) -> LabelledParts:
    """What can be promised of memory, how short it is, and what the parts that are switched on make of it."""
    yield "", f"Memory can be promised to reclaimed pods: {_bytes_text(advice.headroom_bytes)}; policy {advice.policy}"
    yield from _memory_by_numa("promised", advice.headroom_by_numa)
    yield from reason_text(advice.headroom_reason)
    yield from _memory_by_numa("provision", advice.provision_by_numa, "; as Katalyst reckons, set nowhere")
    for where, condition in (("", advice.condition), *((f"NUMA {n}: ", c) for n, c in advice.numa_conditions.items())):
        missing = f", {_bytes_text(condition.target_bytes)} short" if condition.target_bytes else ""
        yield "condition", f"{where}{condition.state.value}{missing}: {formats.printable(condition.reason.text)}"
    for i, verdict in enumerate(advice.reasons):
        yield "" if i else "parts", f"{formats.printable(verdict.rule)}: {formats.printable(verdict.text)}"


def _memory_by_numa(label: str, sizes: Mapping[int, float], note: str = "") -> LabelledParts:
    if sizes:
        yield label, ", ".join(f"NUMA node {numa} {_bytes_text(size)}" for numa, size in sorted(sizes.items())) + note


def _bytes_text(value: float | None) -> str:
    return "not known" if value is None else formats.size(round(value))


def _join_numbers(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def eviction_text(story: EvictionHistory, now_ns: int) -> Iterator[tuple[str, str]]:
    """What became of one pod, newest first; the reason with its numbers once."""
    yield (
        "",
        f"Evictions of {formats.printable(story.pod)}{': it was asked to leave, and is still here' if story.terminating else ''}",
    )
    newest = next((entry.victim for entry in story.entries if entry.victim is not None), None)
    why = newest.reason.text if newest is not None else ""
    for i, entry in enumerate(story.entries):
        age = formats.age((now_ns - entry.wall_time_ns) / 1e9)
        yield (
            "" if i else "evictions",
            f"#{entry.seq}, {formats.clock(entry.wall_time_ns / 1e6)}, {age} ago: {_eviction_outcome(entry, why)}",
        )
    if newest is not None:
        yield from reason_text(newest.reason)


def _eviction_outcome(entry: EvictionEntry, why: str) -> str:
    """`why` is told by itself."""
    if entry.victim is None:
        if entry.kill is None:
            return ""
        message = entry.kill.message
        if why:
            message = message.replace(f"; reason: {why}", "").replace(why, "see below")
        return formats.printable(f"{entry.kill.reason.value}: {message}")
    return f"{_victim_text(entry.victim)}, says {formats.printable(entry.victim.plugin)}"


def _victim_text(victim: EvictionVictim) -> str:
    if victim.dry_run:
        return "it would have to leave, but the plugin runs dry"
    if victim.notify:
        return "it is told to leave, as it asked for, and stays"
    grace = "the pod's own grace" if victim.grace_s is None else f"{victim.grace_s:g} s of grace"
    return f"it has to leave, with {grace}"


def threshold_text(threshold: ThresholdView) -> Iterator[tuple[str, str]]:
    """One threshold of an eviction plugin, as the latest round judged it."""
    which = formats.join([formats.printable(threshold.scope), formats.printable(threshold.subject)], " ")
    state = formats.printable(threshold.met) if threshold.evaluated else "not judged"
    yield "", f"{formats.printable(threshold.plugin)}: {state}"
    if which:
        yield "scope", which
    if threshold.observed is not None and threshold.value is not None:
        observed, value = (
            format_observation(n, threshold.scope, threshold.subject) for n in (threshold.observed, threshold.value)
        )
        yield "observed", f"{observed}, met when {threshold.operator} {value}"
    if threshold.met_s is not None:
        yield "met for", f"{formats.age(threshold.met_s)}; it acts after {threshold.tolerance_s:g} s"
    verdict = Reason(rule=threshold.rule, text=threshold.text, threshold=threshold.value, inputs=threshold.inputs)
    yield from reason_text(verdict)


LABEL_WIDTH = 11
TRIGGER_TEXT = {
    "tick": "at its time",
    "wait": "between ticks, because online pods waited too long",
    "nri": "before it, by the container runtime, which asks the agent whenever it makes or changes a container",
    "psi": "between ticks, because a pressure trigger fired",
}
STATUS_TEXT = {
    OutcomeStatus.APPLIED: "written, and read back as written",
    OutcomeStatus.UNCHANGED: "the kernel had it already",
    OutcomeStatus.DRY_RUN: "not written: the agent runs dry (--act dry-run)",
    OutcomeStatus.REFUSED: "refused",
    OutcomeStatus.VANISHED: "not written: the cgroup is gone",
    OutcomeStatus.MISMATCH: "written, but the kernel shows something else",
}


def knob_history_text(story: KnobHistory, now: LatestCycle, now_ns: int) -> Iterator[tuple[str, str]]:
    """Label and text of each part; the first is the heading."""
    # An agent that does not act has put back whatever an earlier one wrote, without a word in the journal.
    holds = now.act == ActMode.ON.value and story.later is None and not story.gone
    verb = "is" if holds else f"was, at {formats.clock(story.newest.wall_time_ns / 1e6)},"
    yield (
        "",
        f"{story.knob} of {formats.printable(story.pod or story.cgroup)} {verb} {_knob_value_text(story.knob, story.value)}",
    )
    yield "cgroup", formats.printable(story.cgroup) + (", which is gone" if story.gone else "")
    yield from _entry_text("decided", story.newest, now_ns)
    if story.in_force is not None:
        yield from _entry_text("in force", story.in_force, now_ns)
    if story.later is not None:
        yield "since then", _entry_line(story.later)
    for i, entry in enumerate(story.earlier):
        yield "" if i else "earlier", _entry_line(entry)


def _entry_line(entry: JournalEntry) -> str:
    rule = formats.printable(entry.outcome.decision.reason.rule)
    when = formats.clock(entry.wall_time_ns / 1e6)
    return f"#{entry.seq}, {when} {formats.knob_change(entry.outcome)} ({entry.outcome.status.value}, {rule})"


def _entry_text(label: str, entry: JournalEntry, now_ns: int) -> Iterator[tuple[str, str]]:
    outcome, verdict = entry.outcome, entry.outcome.decision.reason
    knob = outcome.decision.knob.value
    when = f"{formats.clock(entry.wall_time_ns / 1e6)}, {formats.age((now_ns - entry.wall_time_ns) / 1e9)} ago"
    status = formats.join([STATUS_TEXT[outcome.status], formats.printable(outcome.error)], ": ")
    yield (
        label,
        f"#{entry.seq}, {when}: {_knob_value_text(knob, outcome.before)} → {_knob_value_text(knob, outcome.decision.value)}; {status}",
    )
    if outcome.repaired:
        yield "", "it had been so before, and somebody else or the kernel had changed it: repaired"
    if outcome.clamped_from is not None:
        yield "", f"the policy asked for {_knob_value_text(knob, outcome.clamped_from)}, which is out of bounds"
    yield (
        "round",
        f"{entry.cycle_seq:,}, {TRIGGER_TEXT.get(entry.trigger, entry.trigger)}; policy {formats.printable(entry.policy) or 'none'}",
    )
    yield from reason_text(verdict)


def _knob_value_text(knob: str, value: str | None) -> str:
    """Meaning and the kernel's own notation."""
    if value is None:
        return "not known"
    meaning = formats.knob_value(knob, value)
    return meaning if meaning == value else f"{meaning} ({formats.printable(value) or 'empty'})"


def latest_cycle_text(now: LatestCycle) -> Iterator[tuple[str, str]]:
    """What the latest round says, and what it says it from."""
    yield "", f"Now: round {now.seq:,}, {formats.age(now.age_s)} ago, --act {now.act}"
    yield (
        "verdict",
        f"{now.action or 'no advice'}: {formats.printable(now.text) or 'no policy; what the settings ask besides is done'}",
    )
    if now.rule:
        limit = "" if now.threshold is None else f", threshold {now.threshold:g}"
        yield "rule", f"{formats.printable(now.rule)}{limit}; policy {formats.printable(now.policy)}"
    if now.shadow is not None:
        lent = formats.cores(now.shadow.reclaimable_cores)
        text = f"{formats.printable(now.shadow.policy)} would lend {lent} cores: {formats.printable(now.shadow.reason)}"
        yield "shadow", text
    for said in now.answers:
        yield said.topic, f"{formats.printable(said.text)} (rule {formats.printable(said.rule)})"
    for i, outlook in enumerate(now.forecasts):
        yield "" if i else "foretold", formats.forecast_text(outlook)
    older = {each.source: each for each in now.readings}
    for i, source in enumerate(now.sources):
        fate = f"{formats.age(now.age_s)} old, took {formats.duration(source.duration_ns / 1000)}"
        if (reading := older.get(source.name)) is not None:
            age_s = now.age_s + (now.wall_time_ns - reading.read_at_ns) / 1e9
            fate += f"; {reading.what}: {formats.age(age_s)} old"
        if not source.ok:
            fate = f"failed: {formats.printable(source.error)}; {formats.printable(source.remedy)}"
        sign, name = (
            "✓" if source.ok else "✕",
            formats.join([formats.printable(source.name), formats.printable(source.detail)], " "),
        )
        yield "" if i else "sources", f"{sign} {name}: {fate}"


def explanation_text(explanation: Explanation, now_ns: int, width: int) -> Iterator[str]:
    """The whole answer, a section per knob and pool."""
    for story in explanation.knobs:
        yield from wrap_section(knob_history_text(story, explanation.now, now_ns), width)
    for pod in explanation.pods:
        yield from wrap_section(pod_text(pod), width)
    for pool in explanation.pools:
        yield from wrap_section(pool_text(pool), width)
    if explanation.memory is not None:
        yield from wrap_section(memory_text(explanation.memory), width)
    for evicted in explanation.evictions:
        yield from wrap_section(eviction_text(evicted, now_ns), width)
    for threshold in explanation.thresholds:
        yield from wrap_section(threshold_text(threshold), width)
    yield from wrap_section(latest_cycle_text(explanation.now), width)


def wrap_section(parts: Iterator[tuple[str, str]], width: int) -> Iterator[str]:
    """A heading and its labelled parts, wrapped, with an empty line after them."""
    yield next(parts)[1]
    for label, content in parts:
        first, rest = f"  {label:<{LABEL_WIDTH}}", " " * (LABEL_WIDTH + 2)
        yield textwrap.fill(
            content, max(width, 40), initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
        )
    yield ""


def unknown_target_text(target: str, kinds: dict[str, list[str]]) -> Iterator[str]:
    """What could have been asked."""
    yield f"Nothing is known about '{formats.printable(target)}'. You can ask about"
    for kind, names in kinds.items():
        yield f"  {kind:<9}{', '.join(formats.printable(name) for name in names) or 'none'}"

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
from api.eviction import TAINT_PREFIX, EvictionEntry, EvictionVictim, format_observation
from api.knobs import Reason
from api.snapshot import CADENCE_PERIOD_NS, Cadence
from api.text import printable
from api.units import NS_PER_MS, NS_PER_S
from cli import formats
from cli.explain.answer import (
    RECLAIM_POOL,
    Explanation,
    KnobHistory,
    LatestCycle,
    PodEvictions,
    PodExplanation,
    PoolExplanation,
    ReclaimableCpu,
)
from exporters.view.decision_view import ConditionView, ThresholdView

_SLOW, _RARE = (f", up to {CADENCE_PERIOD_NS[cadence] // NS_PER_S} s old" for cadence in (Cadence.SLOW, Cadence.RARE))
_INPUTS_BY_SOURCE = {
    "waits since the previous cycle": ("wait_ms", "waits", "cgroup"),
    "blame": ("blame_ratio", "other_culprit"),
    "cgroups": (
        "reclaimed_use_cores", "requirement_cores", "estimate_cores", "use_cores", "reclaim_use_cores", "other_pods_cores",
        "usage_bytes", "group_bytes", "members_bytes", "throttled", "cgroups", "avg10", "mean", "psi_some_avg60",
        "leaving_bytes",
    ),
    f"files of cgroups{_SLOW}": ("need_bytes", "largest_bytes"),
    f"limits{_RARE}": ("cap_bytes",),
    # Free memory of the whole node is as new as the cycle; that of a NUMA node is not.
    f"files of the node{_SLOW}": (
        "free_bytes", "total_bytes", "low_bytes", "min_bytes", "scale_factor", "watermark_bytes", "reclaimable_bytes",
        "pages_per_s", "free",
    ),
    "pods": (
        "request_cores", "request_cpus", "request_bytes", "limit_bytes", "pods", "containers",
        "reclaimed_requests_bytes", "online_requests_kept_bytes", "requested", "workloads",
    ),
    "threads": ("runnable",),
    "topology": ("cpu_list", "capacity_cores", "reclaim_cpus", "supply_cores"),
    "the settings": (
        "quantile", "reserved_for_allocate_cores", "reserved_for_reclaim_cores", "min_critical_bytes", "reserve_bytes",
        "min_cache_ratio", "percent", "factor", "budget_watts",
    ),
    "earlier cycles": (
        "own_wait_ms", "lent_before_cores", "before_cpus", "last_cores", "last_bytes", "asked_before_bytes", "before_us",
        "rounds", "for_s", "samples", "soft_part", "hard_part", "use", "system_ratio", "lowered_percent", "without_quota_ms",
        "with_quota_ms", "without_quota_s", "with_quota_s",
    ),
    "the reported headroom": ("promised",),
}  # fmt: skip
INPUT_SOURCES = {name: source for source, names in _INPUTS_BY_SOURCE.items() for name in names}
"""Source of each input of a reason: a source of the snapshot, with its maximum age if it is not read in every cycle; the
settings, or earlier cycles. Inputs that are missing here are computed from the others."""


def reason_text(reason: Reason) -> Iterator[tuple[str, str]]:
    """Yield label and text of each part of a reason; all inputs are one part, so that the next reason stays on the screen."""
    yield "because", printable(reason.text)
    limit = "" if reason.threshold is None else f", threshold {format_number(reason.threshold)}"
    yield "rule", f"{printable(reason.rule)}{limit}"
    if reason.inputs:
        yield "inputs", ", ".join(_input_text(name, value) for name, value in reason.inputs.items())


def _input_text(name: str, value: float | str | None) -> str:
    source = INPUT_SOURCES.get(name, "")
    shown = "not known" if value is None else printable(value if isinstance(value, str) else format_number(value))
    return f"{printable(name)} {shown}" + (f" (from {source})" if source else "")


def format_number(value: float) -> str:
    """Format with at most six significant digits; whole numbers with all digits."""
    return f"{int(value):,}" if float(value).is_integer() and abs(value) >= 1e6 else f"{value:g}"


def headroom_text(headroom: Headroom | None, reported_headroom: Headroom | None) -> Iterator[tuple[str, str]]:
    """Yield the headroom and the reported headroom with their reasons."""
    cores = formats.cores(None if headroom is None else headroom.cores)
    yield "headroom", f"{cores} cores for all reclaimed pods together, their current use included"
    if headroom is not None:
        yield from _headroom_by_numa(headroom)
        yield from reason_text(headroom.reason)
    if reported_headroom is not None:
        yield (
            "reported",
            f"{_headroom_amounts(reported_headroom.cores, reported_headroom.memory_bytes)} to the scheduler",
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
_NO_CPUS = "it does not get the CPUs that it requests, and shares those of other pods"
_NO_BANDWIDTH = "it gets no guarantee of the network bandwidth that it requests, and uses what is free"
_NOT_COVERED = "it has the CPUs that it requests, and not what its annotations add to them"
_REJECTION_TEXT = {
    **dict.fromkeys((NO_BANDWIDTH, NO_NETWORK_CARD, NETWORK_SPEED_UNKNOWN), _NO_BANDWIDTH),
    **dict.fromkeys(("numa_exclusive_not_requested", "full_cores_not_requested"), _NOT_COVERED),
}


def pod_text(pod: PodExplanation, now: LatestCycle) -> LabelledParts:
    """Describe the current state of one pod."""
    name = printable(pod.pod)
    if pod.untouched:
        yield "", f"The journal has no change of a knob of {name}"
    else:
        yield "", f"Current state of pod {name}"
    yield "level", pod.qos
    if pod.past is not None:
        note = "there are decisions on an earlier pod or container of this name, whose cgroup was removed"
        yield "before", f"{note}; the newest is #{pod.past} (explain '#{pod.past}')"
    for problem in pod.problems:
        yield "problem", printable(problem)
    if pod.rejected is not None:
        yield "rejected", _REJECTION_TEXT.get(pod.rejected.rule, _NO_CPUS)
        yield from reason_text(pod.rejected)
    for card in pod.cards:
        totals = f"{card.allocated_mbit} of {card.capacity} Mbit/s of it are guaranteed"
        yield (
            "network",
            f"{card.pods[pod.pod]} Mbit/s of {printable(card.name)} in each direction are guaranteed; {totals}",
        )
    if pod.lending is not None:
        yield from _reclaimable_text(pod.lending, now)
    for advice in pod.regions:
        yield from _region_text(advice)


def pool_text(pool: PoolExplanation, now: LatestCycle) -> LabelledParts:
    """Describe one pool of CPUs; of the reclaim pool first how much reclaimed pods may use, and why."""
    yield "", f"Pool {printable(pool.name)} has CPUs {printable(pool.cpus) or 'none'}"
    if pool.lending is not None:
        yield from _reclaimable_text(pool.lending, now)
    for i, size in enumerate(pool.sizes):
        yield "" if i else "size", _pool_size_text(size)
    for advice in pool.regions:
        yield from _region_text(advice)


def _reclaimable_text(lending: ReclaimableCpu, now: LatestCycle) -> LabelledParts:
    yield "reclaimable", f"{formats.cores(lending.reclaimable_cores)} cores may be used by reclaimed pods"
    if now.text:
        yield "because", printable(now.text)
    yield "need", f"{formats.cores(lending.requirement_cores)} cores are the estimated need of online pods"
    yield from headroom_text(lending.headroom, lending.reported_headroom)


def _pool_size_text(size: PoolSize) -> str:
    parts = [f"{size.cpus} CPUs" + ("" if size.numa == NOT_NUMA_BOUND else f" of NUMA node {size.numa}")]
    parts += [f"{cpus} more that it shares with {printable(name)}" for name, cpus in size.overlap.items() if cpus]
    if size.quota_cores is not None:
        parts.append(f"together at most {formats.cores(size.quota_cores)} cores")
    return ", ".join(parts)


def _region_text(advice: RegionAdvice) -> LabelledParts:
    region = advice.region
    bound = f", bound to NUMA {'nodes' if len(region.numa_nodes) > 1 else 'node'} {_join_numbers(region.numa_nodes)}"
    count = f"{len(region.pods)} {'pod' if len(region.pods) == 1 else 'pods'} of kind {region.kind.value}"
    yield (
        "region",
        f"{printable(region.name)}: {count} on pool {printable(region.pool)}{bound if region.bound else ''}",
    )
    yield (
        "policy",
        (
            f"{printable(advice.policy)}, "
            f"from {formats.cores(advice.lower_cores)} to {formats.cores(advice.upper_cores)} cores"
        ),
    )
    for i, (control, value) in enumerate(advice.controls.items()):
        yield "" if i else "controls", f"{control.value} {formats.cores(value)} cores"
    for i, signal in enumerate(advice.signals):
        yield (
            "" if i else "signals",
            f"{printable(signal.name)} {signal.current:g}, target {signal.target:g}",
        )
    yield from reason_text(advice.reason)
    if advice.headroom_reason is not None:
        yield "leaves", printable(advice.headroom_reason.text)


def memory_text(advice: MemoryAdvice, *, brief: bool = False) -> LabelledParts:
    """Describe the memory advice: headroom, shortage, and the decisions of the enabled parts; `brief`: the headroom only."""
    yield "", f"Memory headroom for reclaimed pods: {_bytes_text(advice.headroom_bytes)}; policy {advice.policy}"
    if brief:
        yield "because", printable(advice.headroom_reason.text)
        yield "more", "explain memory"
        return
    yield from _memory_by_numa("headroom", advice.headroom_by_numa)
    yield from reason_text(advice.headroom_reason)
    yield from _memory_by_numa("provision", advice.provision_by_numa, "; computed as in Katalyst, not written")
    for where, condition in (("", advice.condition), *((f"NUMA {n}: ", c) for n, c in advice.numa_conditions.items())):
        missing = f", {_bytes_text(condition.target_bytes)} short" if condition.target_bytes else ""
        yield "condition", f"{where}{condition.state.value}{missing}: {printable(condition.reason.text)}"
    for i, verdict in enumerate(advice.reasons):
        yield "" if i else "parts", f"{printable(verdict.rule)}: {printable(verdict.text)}"


def _memory_by_numa(label: str, sizes: Mapping[int, float], note: str = "") -> LabelledParts:
    if sizes:
        yield label, ", ".join(f"NUMA node {numa} {_bytes_text(size)}" for numa, size in sorted(sizes.items())) + note


def _bytes_text(value: float | None) -> str:
    return "not known" if value is None else formats.size(round(value))


def _join_numbers(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def eviction_text(history: PodEvictions, now_ns: int) -> Iterator[tuple[str, str]]:
    """Describe the evictions of one pod, newest first; the reason with its numbers once."""
    yield (
        "",
        f"Evictions of {printable(history.pod)}{': it was evicted and still runs' if history.terminating else ''}",
    )
    newest = next((entry.victim for entry in history.entries if entry.victim is not None), None)
    reason = newest.reason.text if newest is not None else ""
    for i, entry in enumerate(history.entries):
        age = formats.age((now_ns - entry.wall_time_ns) / NS_PER_S)
        yield (
            "" if i else "evictions",
            f"#{entry.seq}, {formats.clock(entry.wall_time_ns / NS_PER_MS)}, {age} ago: {_eviction_outcome(entry, reason)}",
        )
    if newest is not None:
        yield from reason_text(newest.reason)


def _eviction_outcome(entry: EvictionEntry, reason: str) -> str:
    """Describe one eviction event; `reason` is printed separately and therefore left out."""
    if entry.victim is None:
        if entry.kill is None:
            return ""
        message = entry.kill.message
        if reason:
            message = message.replace(f"; reason: {reason}", "").replace(reason, "see below")
        return printable(f"{entry.kill.reason.value}: {message}")
    return f"{_victim_text(entry.victim)}, by {printable(entry.victim.plugin)}"


def _victim_text(victim: EvictionVictim) -> str:
    if victim.dry_run:
        return "it would be evicted, but the plugin is in dry-run mode"
    if victim.notify:
        return "it is notified, as its annotation requests, and stays"
    grace = "the pod's own grace period" if victim.grace_s is None else f"{victim.grace_s:g} s of grace period"
    return f"it is evicted, with {grace}"


def threshold_text(threshold: ThresholdView) -> Iterator[tuple[str, str]]:
    """Describe one threshold of an eviction plugin, as evaluated in the latest cycle."""
    which = formats.join([printable(threshold.scope), printable(threshold.subject)], " ")
    state = printable(threshold.met) if threshold.evaluated else "not evaluated"
    yield "", f"{printable(threshold.plugin)}: {state}"
    if which:
        yield "scope", which
    if threshold.observed is not None and threshold.value is not None:
        observed, value = (
            format_observation(n, threshold.scope, threshold.subject) for n in (threshold.observed, threshold.value)
        )
        yield "observed", f"{observed}, met when {threshold.operator} {value}"
    if threshold.met_s is not None:
        yield "met for", f"{formats.age(threshold.met_s)}; evicts after {threshold.tolerance_s:g} s"
    verdict = Reason(rule=threshold.rule, text=threshold.text, threshold=threshold.value, inputs=threshold.inputs)
    yield from reason_text(verdict)


LABEL_WIDTH = 12
TRIGGER_TEXT = {
    "tick": "periodic",
    "wait": "between ticks: run-queue latency of online pods exceeded its limit",
    "nri": "by the container runtime, which calls the agent when it creates or updates a container",
    "psi": "between ticks: a pressure trigger fired",
    "journalled": "between ticks: the original values of new knobs are on disk",
}
STATUS_TEXT = {
    OutcomeStatus.APPLIED: "written and verified",
    OutcomeStatus.UNCHANGED: "the kernel has this value already",
    OutcomeStatus.DRY_RUN: "not written: dry run (--act dry-run)",
    OutcomeStatus.REFUSED: "refused",
    OutcomeStatus.VANISHED: "not written: the cgroup was removed",
    OutcomeStatus.MISMATCH: "written, but the kernel shows another value",
}


def knob_history_text(history: KnobHistory, now: LatestCycle, now_ns: int) -> Iterator[tuple[str, str]]:
    """Yield label and text of each part of a knob's history; the first is the heading."""
    # An agent that does not act has restored what an earlier agent wrote, without an entry in the journal.
    holds = now.act == ActMode.ON.value and history.later is None and not history.removed
    verb = "is" if holds else f"was, at {formats.clock(history.newest.wall_time_ns / 1e6)},"
    yield (
        "",
        (
            f"{history.knob} of {printable(history.pod or history.cgroup)} {verb} "
            f"{_knob_value_text(history.knob, history.value)}"
        ),
    )
    yield "cgroup", printable(history.cgroup) + (", removed" if history.removed else "")
    yield from _entry_text("decided", history.newest, now_ns)
    if history.in_force is not None:
        yield from _entry_text("in force", history.in_force, now_ns)
    if history.later is not None:
        yield "since then", _entry_line(history.later)
    for i, entry in enumerate(history.earlier):
        yield "" if i else "earlier", _entry_line(entry)


def _entry_line(entry: JournalEntry) -> str:
    rule = printable(entry.outcome.decision.reason.rule)
    when = formats.clock(entry.wall_time_ns / NS_PER_MS)
    return f"#{entry.seq}, {when} {formats.knob_change(entry.outcome)} ({entry.outcome.status.value}, {rule})"


def _entry_text(label: str, entry: JournalEntry, now_ns: int) -> Iterator[tuple[str, str]]:
    outcome, verdict = entry.outcome, entry.outcome.decision.reason
    knob = outcome.decision.knob.value
    when = (
        f"{formats.clock(entry.wall_time_ns / NS_PER_MS)}, {formats.age((now_ns - entry.wall_time_ns) / NS_PER_S)} ago"
    )
    status = formats.join([STATUS_TEXT[outcome.status], printable(outcome.error)], ": ")
    yield (
        label,
        (
            f"#{entry.seq}, {when}: {_knob_value_text(knob, outcome.before)} → "
            f"{_knob_value_text(knob, outcome.decision.value)}; {status}"
        ),
    )
    if outcome.repaired:
        yield "", "it had this value before; another process or the kernel changed it: repaired"
    if outcome.clamped_from is not None:
        yield "", f"the policy decided {_knob_value_text(knob, outcome.clamped_from)}, out of bounds"
    yield (
        "cycle",
        (
            f"{entry.cycle_seq:,}, {TRIGGER_TEXT.get(entry.trigger, entry.trigger)}; "
            f"policy {printable(entry.policy) or 'none'}"
        ),
    )
    yield from reason_text(verdict)


def _knob_value_text(knob: str, value: str | None) -> str:
    """Return the meaning, and the kernel's notation if it differs."""
    if value is None:
        return "not known"
    meaning = formats.knob_value(knob, value)
    return meaning if meaning == value else f"{meaning} ({printable(value) or 'empty'})"


def latest_cycle_text(now: LatestCycle) -> Iterator[tuple[str, str]]:
    """Describe the latest cycle: advice, reason, forecasts and sources."""
    yield "", f"Now: cycle {now.seq:,}, {formats.age(now.age_s)} ago, --act {now.act}"
    yield (
        "advice",
        (
            f"{now.action or 'no advice'}: "
            f"{printable(now.text) or 'no policy; only the knobs requested in the settings are applied'}"
        ),
    )
    if now.rule:
        limit = "" if now.threshold is None else f", threshold {now.threshold:g}"
        yield "rule", f"{printable(now.rule)}{limit}; policy {printable(now.policy)}"
    if now.shadow is not None:
        cores = formats.cores(now.shadow.reclaimable_cores)
        policy, reason = printable(now.shadow.policy), printable(now.shadow.reason)
        yield "shadow", f"{policy} would make {cores} cores reclaimable: {reason}"
    for advice in now.answers:
        yield advice.topic, f"{printable(advice.text)} (rule {printable(advice.rule)})"
    for i, forecast in enumerate(now.forecasts):
        yield "" if i else "forecast", formats.forecast_text(forecast)
    if now.wait is not None:
        wait = now.wait
        yield (
            "wait",
            (
                f"run-queue latency p99 of {printable(wait.pod)} is {formats.duration(wait.p99_us)}, the longest of online "
                f"containers, in the {wait.interval_s:.1f} s before; WAIT in kubectl dioptase top is the same number"
            ),
        )
    for i, text in enumerate(_source_texts(now)):
        yield "" if i else "sources", text


def _source_texts(now: LatestCycle) -> Iterator[str]:
    """Yield failed sources first, then those with older parts, then all others as one text, because they are alike."""
    older, age = {each.source: each for each in now.readings}, f"{formats.age(now.age_s)} old"
    names = [formats.join([printable(source.name), printable(source.detail)], " ") for source in now.sources]
    named = list(zip(now.sources, names, strict=True))
    for source, name in named:
        if not source.ok:
            yield f"✕ {name}: failed: {printable(source.error)}; {printable(source.remedy)}"
    for source, name in named:
        if source.ok and (reading := older.get(source.name)) is not None:
            age_s = now.age_s + (now.wall_time_ns - reading.read_at_ns) / NS_PER_S
            yield f"✓ {name}: {age}; {reading.what}: {formats.age(age_s)} old"
    if rest := [name for source, name in named if source.ok and source.name not in older]:
        yield f"✓ {age}: {', '.join(rest)}"


def condition_text(condition: ConditionView) -> Iterator[tuple[str, str]]:
    """Yield the section of an eviction condition: its taint, its cause and when it ends."""
    kind = "Node" if condition.kind == "node" else "CustomNodeResource"
    taints = ", ".join(f"{TAINT_PREFIX}{condition.name}:{effect}" for effect in condition.effects)
    yield "", printable(f"condition {condition.name}: taint {taints} of the {kind}")
    yield "cause", f"{printable(condition.plugin)}; its threshold was last met {condition.last_met_s:.0f} s ago"
    yield (
        "ends",
        (
            f"in {condition.ends_in_s:.0f} s unless the threshold is met again. The taint outlives its cause, so that the "
            "scheduler does not place pods on a node that would evict them again"
        ),
    )


def explanation_text(explanation: Explanation, now_ns: int, width: int) -> Iterator[str]:
    """Yield all lines of the explanation, a section per knob, pod and pool."""
    for history in explanation.knobs:
        yield from wrap_section(knob_history_text(history, explanation.now, now_ns), width)
    for pod in explanation.pods:
        yield from wrap_section(pod_text(pod, explanation.now), width)
    for pool in explanation.pools:
        yield from wrap_section(pool_text(pool, explanation.now), width)
    if explanation.memory is not None:
        is_of_pool = [pool.name for pool in explanation.pools] == [RECLAIM_POOL]
        yield from wrap_section(memory_text(explanation.memory, brief=is_of_pool), width)
    for evicted in explanation.evictions:
        yield from wrap_section(eviction_text(evicted, now_ns), width)
    for threshold in explanation.thresholds:
        yield from wrap_section(threshold_text(threshold), width)
    for condition in explanation.conditions:
        yield from wrap_section(condition_text(condition), width)
    yield from wrap_section(latest_cycle_text(explanation.now), width)


def wrap_section(parts: Iterator[tuple[str, str]], width: int) -> Iterator[str]:
    """Yield a heading and its labelled parts, wrapped, with an empty line after them."""
    yield next(parts)[1]
    for label, content in parts:
        first, rest = f"  {label:<{LABEL_WIDTH}}", " " * (LABEL_WIDTH + 2)
        yield textwrap.fill(
            content, max(width, 40), initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
        )
    yield ""


def unknown_target_text(target: str, kinds: dict[str, list[str]]) -> Iterator[str]:
    """Yield the lines for an unknown target, with the valid ones by kind."""
    yield f"There is no data on '{printable(target)}'. If it is a Pending pod, run `kubectl dioptase doctor` for the"
    yield "reason. Valid targets:"
    for kind, names in kinds.items():
        yield f"  {kind:<9}{', '.join(printable(name) for name in names) or 'none'}"

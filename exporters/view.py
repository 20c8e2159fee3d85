"""What a person sees of one round: the page and `dioptase top` draw this same object, and nothing else.

Pure: rounds in, a View out. Units are a person's: cores, microseconds, ratios.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from api.cpus import format_cpu_list
from api.decisions import Outcome, Round, Status
from api.histograms import BOUNDS_NS, quantile_ns
from api.pods import Container, Pod
from api.rates import CgroupRates, Rates, rates
from api.samples import CgroupSample, Indicator, Snapshot, SourceStatus

NS_PER_US = 1000
BOUNDS_US: tuple[int, ...] = tuple(bound // NS_PER_US for bound in BOUNDS_NS)


class WaitView(msgspec.Struct, frozen=True, kw_only=True):
    """Run-queue waits that ended since the previous round; quantiles are None where the source knows sums only."""

    count: int
    mean_us: float | None
    p50_us: float | None
    p99_us: float | None
    slots: tuple[int, ...] | None
    """Log2 histogram; the upper bounds are View.bounds_us and then +Inf."""


class LatencyView(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that the pod itself reported since the previous round."""

    per_second: float
    p50_ms: float | None
    p99_ms: float | None


class ContainerView(msgspec.Struct, frozen=True, kw_only=True):
    """One managed container and its cgroup."""

    pod: str
    container: str
    qos: str
    cgroup: str
    cpu_cores: float | None
    throttled_ratio: float | None
    """Share of CFS periods in which the container's own quota ran out."""
    throttled_ms: float | None
    threads: int | None
    memory_bytes: int | None
    cpu_pressure_ratio: float | None
    wait: WaitView | None
    latency: LatencyView | None


class ChangeView(msgspec.Struct, frozen=True, kw_only=True):
    """One decision that did something, or would have, or failed to."""

    pod: str
    cgroup: str
    knob: str
    before: str | None
    value: str
    status: str
    rule: str
    text: str
    error: str


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One round for the eye."""

    seq: int
    wall_time_ms: int
    act: str
    trigger: str
    interval_ms: float | None
    round_ms: float
    policy: str
    action: str
    rule: str
    reason: str
    threshold: float | None = None
    """What the rule compared with, in the unit that `reason` names (rules `wait_*`: milliseconds)."""
    node_cpus: int
    busy_cores: float | None
    steal_cores: float | None
    cpu_pressure_ratio: float | None
    lent_cores: float | None
    """What reclaimed pods may use now."""
    reclaimed_cores: float | None
    """What they used since the previous round."""
    requirement_cores: float | None
    headroom_cores: float | None
    pools: Mapping[str, str]
    """CPU list of each pool."""
    containers: tuple[ContainerView, ...]
    changes: tuple[ChangeView, ...]
    sources: tuple[SourceStatus, ...]
    banner: tuple[str, ...]
    bounds_us: tuple[int, ...] = BOUNDS_US


def build(finished: Round) -> View:
    """The view of a round; rates are absent in the first one."""
    snapshot, advice = finished.snapshot, finished.advice
    change = rates(finished.previous, snapshot) if finished.previous else None
    containers = tuple(
        _container(pod, container, finished, change) for pod in snapshot.pods for container in pod.containers
    )
    reclaimed = [c.cpu_cores for c in containers if c.qos == "reclaimed_cores" and c.cpu_cores is not None]
    return View(
        seq=snapshot.seq,
        wall_time_ms=snapshot.wall_time_ns // 1_000_000,
        act=finished.act.value,
        trigger=finished.trigger,
        interval_ms=change.node.interval_ns / 1e6 if change else None,
        round_ms=finished.duration_ns / 1e6,
        policy=advice.policy if advice else "",
        action=advice.action if advice else "",
        rule=advice.verdict.rule if advice else "",
        reason=advice.verdict.text if advice else "",
        threshold=advice.verdict.threshold if advice else None,
        node_cpus=len(snapshot.topology.cpus),
        busy_cores=change.node.busy_cores if change else None,
        steal_cores=change.node.steal_cores if change else None,
        cpu_pressure_ratio=change.node.cpu_pressure_ratio if change else None,
        lent_cores=advice.lent_cores if advice else None,
        reclaimed_cores=sum(reclaimed) if reclaimed else None,
        requirement_cores=advice.requirement_cores if advice else None,
        headroom_cores=advice.headroom_cores if advice else None,
        pools={pool.name: format_cpu_list(pool.cpus) for pool in advice.pools} if advice else {},
        containers=containers,
        changes=tuple(change_view(o) for o in finished.outcomes if o.status is not Status.UNCHANGED),
        sources=snapshot.sources,
        banner=finished.banner,
    )


def change_view(outcome: Outcome) -> ChangeView:
    """A decision and what came of it, flattened for a table."""
    decision = outcome.decision
    return ChangeView(
        pod=decision.pod,
        cgroup=decision.cgroup,
        knob=decision.knob.value,
        before=outcome.before,
        value=decision.value,
        status=outcome.status.value,
        rule=decision.verdict.rule,
        text=decision.verdict.text,
        error=outcome.error,
    )


def _container(pod: Pod, container: Container, finished: Round, change: Rates | None) -> ContainerView:
    sample: CgroupSample | None = finished.snapshot.cgroups.get(container.cgroup)
    rate: CgroupRates | None = change.cgroups.get(container.cgroup) if change else None
    throttled_ns = rate.throttled_ns if rate else None
    return ContainerView(
        pod=pod.key,
        container=container.name,
        qos=pod.qos.value,
        cgroup=container.cgroup,
        cpu_cores=rate.cpu_cores if rate else None,
        throttled_ratio=rate.throttled_periods_ratio if rate else None,
        throttled_ms=None if throttled_ns is None else throttled_ns / 1e6,
        threads=sample.threads if sample else None,
        memory_bytes=sample.memory_bytes if sample else None,
        cpu_pressure_ratio=rate.cpu_pressure_ratio if rate else None,
        wait=_wait(rate),
        latency=_latency(pod.key, finished.snapshot, finished.previous),
    )


def _wait(rate: CgroupRates | None) -> WaitView | None:
    if rate is None or rate.wait is None:
        return None
    wait = rate.wait

    def microseconds(q: float) -> float | None:
        value = quantile_ns(wait.slots, q) if wait.slots is not None else None
        return None if value is None else value / NS_PER_US

    return WaitView(
        count=wait.count,
        mean_us=wait.sum_ns / wait.count / NS_PER_US if wait.count else None,
        p50_us=microseconds(0.5),
        p99_us=microseconds(0.99),
        slots=wait.slots,
    )


def _latency(key: str, snapshot: Snapshot, previous: Snapshot | None) -> LatencyView | None:
    after = snapshot.indicators.get(key)
    before = previous.indicators.get(key) if previous else None
    if after is None or before is None or before.bounds_s != after.bounds_s:
        return None
    elapsed_ns = after.sampled_at_ns - before.sampled_at_ns
    counts = tuple(b - a for a, b in zip(before.buckets, after.buckets, strict=True))
    if elapsed_ns <= 0 or min(counts) < 0:
        return None
    return LatencyView(
        per_second=counts[-1] * 1e9 / elapsed_ns,
        p50_ms=_bucket_quantile_ms(after, counts, 0.5),
        p99_ms=_bucket_quantile_ms(after, counts, 0.99),
    )


def _bucket_quantile_ms(indicator: Indicator, counts: tuple[int, ...], q: float) -> float | None:
    """Prometheus' histogram_quantile over cumulative counts; the last bound answers for everything beyond it."""
    total = counts[-1]
    if total == 0:
        return None
    rank, below, low = q * total, 0, 0.0
    for bound, count in zip(indicator.bounds_s, counts, strict=False):
        if count >= rank:
            return 1000 * (low + (bound - low) * (rank - below) / max(count - below, 1))
        below, low = count, bound
    return 1000 * indicator.bounds_s[-1]

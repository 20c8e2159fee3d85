"""What a person sees of one cgroup in one round: what it used, what it waited for, and who made it wait.

Pure. Units are a person's: cores, microseconds, ratios; what is counted is per second of wall time. None is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from api.catalogue import NS_PER_S
from api.facts import UNLIMITED, Blame, BlockIo, Durations, IoStat, Net, Reclaim, ThreadStates
from api.histograms import quantile_ns
from api.pods import Container, Pod
from api.rates import CgroupRates, delta, wait_delta
from api.samples import CgroupSample, Indicator, NodeSample, Snapshot
from exporters.whole import whole

NS_PER_US = 1000
NS_PER_MS = 1_000_000
MOST_CULPRITS = 6
"""So many of those who make a cgroup wait are named, the worst ones; the rest is one number."""


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


class BlameView(msgspec.Struct, frozen=True, kw_only=True):
    """Who had the CPU while this cgroup's tasks waited: milliseconds of their waits, per second."""

    culprits: tuple[tuple[str, float], ...]
    """Path and share of the worst ones, the worst first; the cgroup itself is among them, its own tasks queue too."""
    rest_ms: float
    """All culprits that are not named."""
    throttled_ms: float
    """Held back by a quota of its own or above it: no neighbour's doing."""
    higher_class_ms: float
    """Real-time, deadline and stop tasks."""
    other_ms: float
    """CPUs on their way out of idleness, and cgroups that are gone."""


class ReclaimView(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that the cgroup's tasks had to free themselves, per second."""

    direct_ms: float
    """Stood still because the node was short of memory."""
    limit_ms: float
    """Stood still because of the cgroup's own limit."""
    pages: float
    kswapd_wakeups: float


class TrafficView(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per second, and what delays them."""

    disk_read: float | None = None
    disk_write: float | None = None
    disk_p99_us: float | None = None
    """Issue to completion."""
    sent: float | None = None
    received: float | None = None
    retransmits: float | None = None
    """TCP segments sent again, per second."""


class ContainerView(msgspec.Struct, frozen=True, kw_only=True):
    """One managed container and its cgroup; or, where pod, container and qos are empty, a cgroup that no listed pod owns."""

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
    latency: LatencyView | None = None
    wait_cores: float | None = None
    """Mean number of tasks that waited for a CPU."""
    throttle_p99_us: float | None = None
    """Length of single throttles."""
    blame: BlameView | None = None
    threads_by_state: ThreadStates | None = None
    load: tuple[float, float, float] | None = None
    """Over 1, 5 and 15 minutes."""
    memory_limit_bytes: int | None = None
    """None where nothing limits it, or that is not known."""
    memory_pressure_ratio: float | None = None
    io_pressure_ratio: float | None = None
    refaults: float | None = None
    """Pages per second that had to be read again soon after they were reclaimed; None between two reads of the file."""
    reclaim: ReclaimView | None = None
    oom_kills: int | None = None
    """Since the probe was loaded, or, where the kernel's file says it, since the cgroup was made."""
    traffic: TrafficView | None = None


def managed(
    pod: Pod,
    container: Container,
    now: Snapshot,
    before: Snapshot | None,
    rate: CgroupRates | None,
    members: Sequence[str] = (),
) -> ContainerView:
    """One container of a listed pod; `members` are its cgroup and those below it, where it is there."""
    sample = now.cgroups.get(container.cgroup) or CgroupSample(path=container.cgroup, id=0)
    earlier = before.cgroups.get(container.cgroup) if before else None
    if len(members) > 1 and before is not None and rate is not None:
        sample, earlier = whole(members, now.cgroups, before.cgroups)
        wait = wait_delta(earlier.wait, sample.wait) if earlier else None
        waiting = None if wait is None else wait.sum_ns / rate.interval_ns
        rate = msgspec.structs.replace(rate, wait=wait, wait_cores=waiting)
    return _cgroup(
        sample,
        earlier,
        rate,
        who=(pod.key, container.name, pod.qos.value),
        latency=_latency(pod.key, now, before),
    )


def unmanaged(
    sample: CgroupSample, before: CgroupSample | None, rate: CgroupRates | None, own_cores: float | None
) -> ContainerView:
    """A cgroup that no listed pod owns. `own_cores` is what it uses without the groups below it."""
    seen = _cgroup(sample, before, rate, who=("", "", ""), latency=None)
    return msgspec.structs.replace(seen, cpu_cores=own_cores)


def past_of(c: ContainerView) -> ContainerView:
    """The same without what only the present is shown of."""
    return msgspec.structs.replace(
        c, traffic=None, reclaim=None, threads_by_state=None, load=None, throttle_p99_us=None,
        memory_pressure_ratio=None, io_pressure_ratio=None,
    )  # fmt: skip


def _cgroup(
    now: CgroupSample, before: CgroupSample | None, rate: CgroupRates | None, *,
    who: tuple[str, str, str], latency: LatencyView | None,
) -> ContainerView:  # fmt: skip
    pod, container, qos = who
    limit = now.limits.memory_max_bytes
    throttled_ns = rate.throttled_ns if rate else None
    earlier = before if rate else None  # the same cgroup, of the same boot
    return ContainerView(
        pod=pod,
        container=container,
        qos=qos,
        cgroup=now.path,
        cpu_cores=rate.cpu_cores if rate else None,
        throttled_ratio=rate.throttled_periods_ratio if rate else None,
        throttled_ms=None if throttled_ns is None else throttled_ns / NS_PER_MS,
        threads=now.threads,
        memory_bytes=now.memory_bytes,
        cpu_pressure_ratio=rate.cpu_pressure_ratio if rate else None,
        wait=wait_view(rate.wait) if rate else None,
        latency=latency,
        wait_cores=rate.wait_cores if rate else None,
        throttle_p99_us=_p99_us(wait_delta(earlier.throttles, now.throttles)) if earlier else None,
        blame=_blame(earlier.blame, now.blame, rate.interval_ns) if earlier and rate else None,
        threads_by_state=now.threads_by_state,
        load=(now.load.one, now.load.five, now.load.fifteen) if now.load else None,
        memory_limit_bytes=None if limit == UNLIMITED else limit,
        memory_pressure_ratio=rate.memory_pressure_ratio if rate else None,
        io_pressure_ratio=rate.io_pressure_ratio if rate else None,
        refaults=refaults(earlier, now) if earlier else None,
        reclaim=reclaim_view(earlier.reclaim, now.reclaim, rate.interval_ns) if earlier and rate else None,
        oom_kills=now.oom_kills if now.oom_kills is not None else now.memory_events.get("oom_kill"),
        traffic=_traffic(earlier, now, rate.interval_ns) if earlier and rate else None,
    )


def wait_view(wait: Durations | None) -> WaitView | None:
    """Waits of an interval in a person's units."""
    if wait is None:
        return None

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


def _p99_us(found: Durations | None) -> float | None:
    if found is None or found.slots is None:
        return None
    value = quantile_ns(found.slots, 0.99)
    return None if value is None else value / NS_PER_US


def _blame(before: Blame | None, now: Blame | None, interval_ns: int) -> BlameView | None:
    if before is None or now is None:
        return None
    per_s = NS_PER_S / NS_PER_MS / interval_ns  # nanoseconds of the interval to milliseconds a second
    grown = {path: delta(before.by_cgroup.get(path, 0), ns) for path, ns in now.by_cgroup.items()}
    other = delta(before.other_ns, now.other_ns)
    throttled = delta(before.throttled_ns, now.throttled_ns)
    higher = delta(before.higher_class_ns, now.higher_class_ns)
    if other is None or throttled is None or higher is None or None in grown.values():
        return None
    ranked = sorted(((path, (ns or 0) * per_s) for path, ns in grown.items() if ns), key=lambda pair: -pair[1])
    return BlameView(
        culprits=tuple((path, round(ms, 4)) for path, ms in ranked[:MOST_CULPRITS]),
        rest_ms=round(sum(ms for _, ms in ranked[MOST_CULPRITS:]), 4),
        throttled_ms=round(throttled * per_s, 4),
        higher_class_ms=round(higher * per_s, 4),
        other_ms=round(other * per_s, 4),
    )


def reclaim_view(before: Reclaim | None, now: Reclaim | None, interval_ns: int) -> ReclaimView | None:
    """What was reclaimed in an interval; None where either end is unknown or the counters began anew."""
    if before is None or now is None:
        return None
    seconds = interval_ns / NS_PER_S
    direct = delta(before.direct.sum_ns, now.direct.sum_ns)
    limit = delta(before.limit.sum_ns, now.limit.sum_ns)
    pages = delta(before.reclaimed_pages, now.reclaimed_pages)
    wakeups = delta(before.kswapd_wakeups, now.kswapd_wakeups)
    if direct is None or limit is None or pages is None or wakeups is None:
        return None
    return ReclaimView(
        direct_ms=direct / NS_PER_MS / seconds,
        limit_ms=limit / NS_PER_MS / seconds,
        pages=pages / seconds,
        kswapd_wakeups=wakeups / seconds,
    )


def refaults(before: CgroupSample | NodeSample, now: CgroupSample | NodeSample) -> float | None:
    """Pages a second that were read again soon after they had been reclaimed."""
    seconds = _apart_s(before, now)
    return None if seconds is None else _rate(_refaulted(before), _refaulted(now), seconds)


def _refaulted(sample: CgroupSample | NodeSample) -> int | None:
    """Anonymous and file pages together, one name on old kernels."""
    counters = sample.memory_stat if isinstance(sample, CgroupSample) else sample.vmstat
    found = [count for name, count in counters.items() if name.startswith("workingset_refault")]
    return sum(found) if found else None


def _apart_s(before: CgroupSample | NodeSample, now: CgroupSample | NodeSample) -> float | None:
    """Between two reads of the files that are read every few rounds only; None where there was no second one."""
    if before.files_read_at_ns is None or now.files_read_at_ns is None:
        return None
    elapsed_ns = now.files_read_at_ns - before.files_read_at_ns
    return elapsed_ns / NS_PER_S if elapsed_ns > 0 else None


def _traffic(before: CgroupSample, now: CgroupSample, interval_ns: int) -> TrafficView | None:
    seconds = interval_ns / NS_PER_S
    read, write, p99_us = _disk(before, now)
    apart_s = _apart_s(before, now)
    if read is None and apart_s is not None:
        read, write = (
            _rate(_summed(before.io, field), _summed(now.io, field), apart_s) for field in ("read_bytes", "write_bytes")
        )
    else:
        read, write = _per(read, seconds), _per(write, seconds)
    sent = _rate(_net(before.net, "sent"), _net(now.net, "sent"), seconds)
    received = _rate(_net(before.net, "received"), _net(now.net, "received"), seconds)
    again = _rate(
        before.net.tcp_retransmits if before.net else None, now.net.tcp_retransmits if now.net else None, seconds
    )
    if all(value is None for value in (read, write, sent, received)):
        return None
    return TrafficView(
        disk_read=read, disk_write=write, disk_p99_us=p99_us, sent=sent, received=received, retransmits=again
    )


def _per(value: float | None, seconds: float) -> float | None:
    return None if value is None else value / seconds


def _rate(before: int | None, now: int | None, seconds: float) -> float | None:
    return _per(delta(before, now), seconds)


def _net(net: Net | None, way: str) -> int | None:
    return None if net is None else int(getattr(net, f"tcp_{way}_bytes")) + int(getattr(net, f"udp_{way}_bytes"))


def _summed(io: Mapping[str, IoStat], field: str) -> int | None:
    return sum(getattr(stat, field) for stat in io.values()) if io else None


def _disk(before: CgroupSample, now: CgroupSample) -> tuple[float | None, float | None, float | None]:
    """Bytes read and written in the interval, and p99 of both kinds of request, as the block layer saw them."""
    read = write = 0
    slots: list[int] | None = None
    for device, after in now.block_io.items():
        first = before.block_io.get(device) or _NO_IO
        grown = delta(first.read_bytes, after.read_bytes), delta(first.write_bytes, after.write_bytes)
        if grown[0] is None or grown[1] is None:
            return None, None, None
        read, write = read + grown[0], write + grown[1]
        for kind in ("reads", "writes"):
            was: Durations = getattr(first, kind)
            done: Durations = getattr(after, kind)
            if done.slots is None:
                continue
            old = was.slots or (0,) * len(done.slots)
            slots = [a + b - c for a, b, c in zip(slots or [0] * len(old), done.slots, old, strict=True)]
    if not now.block_io:
        return None, None, None
    p99 = quantile_ns(slots, 0.99) if slots and min(slots) >= 0 else None
    return read, write, None if p99 is None else p99 / NS_PER_US


_NO_IO = BlockIo(
    reads=Durations(sum_ns=0, count=0), writes=Durations(sum_ns=0, count=0), read_bytes=0, write_bytes=0
)  # fmt: skip


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
        per_second=counts[-1] * NS_PER_S / elapsed_ns,
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

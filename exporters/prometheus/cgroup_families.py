"""Turns the facts of every cgroup into metric families.
Pure. Series are bounded: a number of cgroups (those of pods first), and of each a number of aggressors and devices;
`count_dropped` counts the rest. A counter that comes back into view continues where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from heapq import nlargest
from itertools import islice
from mmap import PAGESIZE
from typing import NamedTuple

from api.cpu import parse_cpu_list
from api.decision import Cycle
from api.histogram import quantile_ns
from api.metric_profiles import MAX_AGGRESSORS_PER_CGROUP, PROFILE_LIMITS
from api.metrics import AGENT_METRICS_BY_NAME, RUNQ_LATENCY_BOUNDS_S
from api.snapshot import UNLIMITED, Blame, CgroupLimits, CgroupSample, Durations, RunqLatency, Snapshot, SocketTraffic
from api.text import encodable
from api.units import NS_PER_S
from exporters.prometheus.late_series import LateSeries
from exporters.prometheus.metric_family import (
    BucketLayout,
    Exemplar,
    Labels,
    MetricDistribution,
    MetricFamily,
    MetricNumber,
    MetricPoint,
    ns_to_seconds,
    slot_distribution,
)
from exporters.prometheus.node_families import stalled_seconds
from exporters.prometheus.profile_filter import (
    COARSE_LAYOUTS,
    LATENCY_LAYOUTS,
    CgroupSeries,
    ProfileFilter,
    SeriesScope,
    profile_cgroups,
    select_cgroups,
)

OwnSamples = Iterable[tuple[Labels, MetricNumber | None]]
MAX_DEVICES_PER_CGROUP = 16
EVALUATED_PERCENTILES = (("p50", 0.5), ("p99", 0.99))
"""Values of the label `percentile`: `quantile` is reserved for summaries."""
LOAD_PERIODS = ("1m", "5m", "15m")
MEMORY_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("anon", ("anon", "total_rss", "rss")),
    ("file", ("file", "total_cache", "cache")),
    ("shmem", ("total_shmem", "shmem")),
    ("file_mapped", ("file_mapped", "total_mapped_file", "mapped_file")),
    ("file_dirty", ("file_dirty", "total_dirty", "dirty")),
    ("file_writeback", ("file_writeback", "total_writeback", "writeback")),
    ("active_anon", ("total_active_anon", "active_anon")),
    ("inactive_anon", ("total_inactive_anon", "inactive_anon")),
    ("active_file", ("total_active_file", "active_file")),
    ("inactive_file", ("total_inactive_file", "inactive_file")),
    ("unevictable", ("total_unevictable", "unevictable")),
    ("anon_thp", ("anon_thp", "total_rss_huge", "rss_huge")),
    ("slab_reclaimable", ("slab_reclaimable",)),
    ("slab_unreclaimable", ("slab_unreclaimable",)),
    ("kernel_stack", ("kernel_stack",)),
    ("pagetables", ("pagetables",)),
    ("sock", ("sock",)),
)
"""Kinds by their names in memory.stat: of version 2, then of version 1 with descendants (total_) and without."""
WORKINGSET = tuple(
    ((event, kind), tuple(f"{total}workingset_{event}{part}" for part in parts for total in ("total_", "")))
    for event in ("refault", "activate", "restore")
    for kind, parts in (("anon", ("_anon",)), ("file", ("_file", "")))
)
"""Kernels before 5.9 count only files, under names without a suffix (commit 170b04b7ae49)."""
MEMORY_EVENTS = ("low", "high", "max", "oom", "oom_kill", "oom_group_kill")


def cgroup_families(
    snapshot: Snapshot,
    finished: Cycle,
    trace: tuple[tuple[str, str], ...],
    scope: SeriesScope,
    late: LateSeries | None = None,
) -> Iterator[MetricFamily]:
    """Yield every cgroup family of a snapshot of this cycle; those without a number are empty.

    `trace` has the labels of the cycle's exemplars; `late` the series that have started.
    """
    shown = select_cgroups(snapshot, scope)
    selection = ProfileFilter(scope.profile, shown, snapshot.taken_at_ns, late)
    for family in _every_cgroup_family(snapshot, finished, trace, shown, selection):
        if selection.has(family.metric.name):
            yield selection.select(family)


def _every_cgroup_family(
    snapshot: Snapshot,
    finished: Cycle,
    trace: tuple[tuple[str, str], ...],
    shown: list[CgroupSeries],
    selection: ProfileFilter,
) -> Iterator[MetricFamily]:
    previous, profile = finished.previous, selection.profile
    for name, scalar in CGROUP_SCALARS:
        if selection.has(name):
            points = (MetricPoint(owner, (), value) for owner, sample in shown if (value := scalar(sample)) is not None)
            yield MetricFamily(AGENT_METRICS_BY_NAME[name], points=tuple(points))
    for name, split in CGROUP_SPLITS:
        if selection.has(name):
            points = (
                MetricPoint(owner, own, value)
                for owner, sample in shown
                for own, value in split(sample)
                if value is not None
            )
            yield MetricFamily(AGENT_METRICS_BY_NAME[name], points=tuple(points))
    yield _runq_latency(shown, previous, _CycleExemplar(trace, snapshot.wall_time_ns), LATENCY_LAYOUTS[profile])
    yield _evaluated_latency(finished.evaluated_latency, shown)
    yield _blame(snapshot, previous, shown, PROFILE_LIMITS[profile].aggressors)
    layout = COARSE_LAYOUTS[profile]
    yield _distribution_family("dioptase_cgroup_throttle_seconds", shown, _throttles, layout)
    yield _distribution_family("dioptase_cgroup_reclaim_seconds", shown, _reclaim, layout)
    yield from _devices(snapshot, shown, layout)


def count_dropped(snapshot: Snapshot, scope: SeriesScope) -> Mapping[str, int]:
    """Return the number of cgroups, aggressors and devices without series in this cycle because there are too many.

    What the profile leaves out is not counted.
    """
    aggressors = devices = 0
    for sample in snapshot.cgroups.values():
        blame = sample.blame
        if blame is not None and len(blame.by_cgroup) - 1 > MAX_AGGRESSORS_PER_CGROUP:
            aggressors += len(blame.by_cgroup) - 1 - MAX_AGGRESSORS_PER_CGROUP
        if len(sample.io) > MAX_DEVICES_PER_CGROUP or len(sample.block_io) > MAX_DEVICES_PER_CGROUP:
            devices += max(len(sample.io), len(sample.block_io)) - MAX_DEVICES_PER_CGROUP
    too_many = len(snapshot.cgroups) > scope.max_cgroups
    return {
        "cgroup": max(0, len(profile_cgroups(snapshot, scope)) - scope.max_cgroups) if too_many else 0,
        "culprit": aggressors,
        "device": devices,
    }


def worst_aggressors(
    path: str, blame: Blame, before: Blame | None = None, limit: int = MAX_AGGRESSORS_PER_CGROUP
) -> Mapping[str, int]:
    """Return nanoseconds by aggressor, without the cgroup itself; if there are too many, the worst since `before`."""
    others = {aggressor: ns for aggressor, ns in blame.by_cgroup.items() if aggressor != path and ns}
    if len(others) <= limit:
        return others
    then = {} if before is None else before.by_cgroup
    # A new or growing aggressor must have a series at once, whatever others did in the past.
    return dict(nlargest(limit, others.items(), key=lambda item: (item[1] - then.get(item[0], 0), item[1])))


def device_names(snapshot: Snapshot) -> Mapping[str, str]:
    """Return names of disks by `MAJOR:MINOR`, as used in cgroup files."""
    return {disk.number: encodable(name) for name, disk in snapshot.node.disks.items()}


class _CycleExemplar(NamedTuple):
    """Trace labels and time of the exemplars of a cycle."""

    trace: tuple[tuple[str, str], ...]
    at_ns: int


def _runq_latency(
    shown: list[CgroupSeries], previous: Snapshot | None, exemplar: _CycleExemplar, layout: BucketLayout
) -> MetricFamily:
    distributions = tuple(
        slot_distribution(
            owner, (), sample.wait, layout, _longest_wait_exemplar(sample, previous, exemplar) if owner[1] else None
        )
        for owner, sample in shown
        if sample.wait is not None
    )
    return MetricFamily(AGENT_METRICS_BY_NAME["dioptase_cgroup_runq_wait_seconds"], distributions=distributions)


def _evaluated_latency(latencies: Mapping[str, RunqLatency | None], shown: list[CgroupSeries]) -> MetricFamily:
    points = [
        MetricPoint(owner, (percentile,), value / NS_PER_S)
        for owner, sample in shown
        if (latency := latencies.get(sample.path)) is not None and latency.slots is not None
        for percentile, quantile in EVALUATED_PERCENTILES
        if (value := quantile_ns(latency.slots, quantile)) is not None
    ]
    return MetricFamily(AGENT_METRICS_BY_NAME["dioptase_cgroup_runq_wait_evaluated_seconds"], points=tuple(points))


def _longest_wait_exemplar(
    sample: CgroupSample, previous: Snapshot | None, exemplar: _CycleExemplar
) -> Mapping[int, Exemplar]:
    """Return the longest wait of this cycle as the upper bound of its slot. The last slot has no bound."""
    before = previous.cgroups.get(sample.path) if previous is not None else None
    slots = sample.wait.slots if sample.wait is not None else None
    if slots is None or before is None or before.id != sample.id or before.wait is None or before.wait.slots is None:
        return {}
    earlier = before.wait.slots
    for slot in range(len(RUNQ_LATENCY_BOUNDS_S) - 1, -1, -1):
        if slots[slot] > earlier[slot]:
            return {slot: Exemplar(exemplar.trace, RUNQ_LATENCY_BOUNDS_S[slot], exemplar.at_ns)}
    return {}


def _blame(
    snapshot: Snapshot, previous: Snapshot | None, shown: list[CgroupSeries], max_aggressors: int
) -> MetricFamily:
    pods = {container.cgroup: encodable(pod.key) for pod in snapshot.pods for container in pod.containers}
    points: list[MetricPoint] = []
    for owner, sample in shown:
        blame = sample.blame
        if blame is None:
            continue
        then = previous.cgroups.get(sample.path) if previous is not None else None
        before = then.blame if then is not None else None
        for aggressor, ns in worst_aggressors(sample.path, blame, before, max_aggressors).items():
            own = ("neighbour", encodable(aggressor), pods.get(aggressor, ""))
            points.append(MetricPoint(owner, own, ns / NS_PER_S))
        for cause, ns in (
            ("self", blame.by_cgroup.get(sample.path, 0)),
            ("own_quota", blame.throttled_ns),
            ("higher_class", blame.higher_class_ns),
            ("other", blame.other_ns),
        ):
            points.append(MetricPoint(owner, (cause, "", ""), ns / NS_PER_S))
    return MetricFamily(AGENT_METRICS_BY_NAME["dioptase_cgroup_blame_seconds_total"], points=tuple(points))


def _distribution_family(
    name: str,
    shown: list[CgroupSeries],
    of: Callable[[CgroupSample], Iterable[tuple[Labels, Durations]]],
    layout: BucketLayout,
) -> MetricFamily:
    distributions = tuple(
        slot_distribution(owner, own, durations, layout) for owner, sample in shown for own, durations in of(sample)
    )
    return MetricFamily(AGENT_METRICS_BY_NAME[name], distributions=distributions)


def _throttles(sample: CgroupSample) -> Iterable[tuple[Labels, Durations]]:
    return () if sample.throttles is None else (((), sample.throttles),)


def _reclaim(sample: CgroupSample) -> Iterable[tuple[Labels, Durations]]:
    reclaim = sample.reclaim
    return () if reclaim is None else ((("direct",), reclaim.direct), (("limit",), reclaim.limit))


def _devices(snapshot: Snapshot, shown: list[CgroupSeries], layout: BucketLayout) -> Iterator[MetricFamily]:
    names = device_names(snapshot)
    moved: list[MetricPoint] = []
    done: list[MetricPoint] = []
    requested: list[MetricPoint] = []
    block_times: list[MetricDistribution] = []
    for owner, sample in shown:
        for number, io in islice(sample.io.items(), MAX_DEVICES_PER_CGROUP):
            device = names.get(number, number)
            operations = [("read", io.read_bytes, io.reads), ("write", io.write_bytes, io.writes)]
            if io.discards:
                operations.append(("discard", io.discard_bytes, io.discards))
            for operation, size, times in operations:
                moved.append(MetricPoint(owner, (device, operation), size))
                done.append(MetricPoint(owner, (device, operation), times))
        for number, block in islice(sample.block_io.items(), MAX_DEVICES_PER_CGROUP):
            device = names.get(number, number)
            for operation, size, durations in (
                ("read", block.read_bytes, block.reads),
                ("write", block.write_bytes, block.writes),
            ):
                requested.append(MetricPoint(owner, (device, operation), size))
                block_times.append(slot_distribution(owner, (device, operation), durations, layout))
    yield MetricFamily(AGENT_METRICS_BY_NAME["dioptase_cgroup_io_bytes_total"], points=tuple(moved))
    yield MetricFamily(AGENT_METRICS_BY_NAME["dioptase_cgroup_io_operations_total"], points=tuple(done))
    yield MetricFamily(AGENT_METRICS_BY_NAME["dioptase_cgroup_block_io_request_bytes_total"], points=tuple(requested))
    yield MetricFamily(AGENT_METRICS_BY_NAME["dioptase_cgroup_block_io_seconds"], distributions=tuple(block_times))


def first_value(stat: Mapping[str, int], names: tuple[str, ...]) -> int | None:
    """Return the value of the first name that the kernel has."""
    return next((stat[name] for name in names if name in stat), None)


def _by_reclaimer(sample: CgroupSample, prefix: str) -> OwnSamples:
    return (((by,), sample.memory_stat.get(prefix + by)) for by in ("kswapd", "direct"))


def working_set(sample: CgroupSample) -> int | None:
    """Return usage without inactive page cache, at least 0: the two files are read at different times."""
    inactive = first_value(sample.memory_stat, ("total_inactive_file", "inactive_file"))
    return None if sample.memory_bytes is None or inactive is None else max(0, sample.memory_bytes - inactive)


def _cores(limits: CgroupLimits) -> float | None:
    if limits.quota_us is None or limits.quota_us < 0 or not limits.period_us:
        return None
    return limits.quota_us / limits.period_us


@lru_cache(maxsize=256)
def _cpus(text: str | None) -> int | None:
    try:
        return None if text is None else len(parse_cpu_list(text))
    except ValueError:
        return None


def _limit(value: int | None) -> int | None:
    return None if value == UNLIMITED else value


def _memory_limits(limits: CgroupLimits) -> OwnSamples:
    """Yield limits; a protection of zero is none."""
    return (
        (("max",), _limit(limits.memory_max_bytes)),
        (("high",), _limit(limits.memory_high_bytes)),
        (("low",), limits.memory_low_bytes or None),
        (("min",), limits.memory_min_bytes or None),
        (("swap_max",), _limit(limits.swap_max_bytes)),
    )


def _numa(stat: Mapping[str, Mapping[int, int]]) -> OwnSamples:
    """Yield bytes by kind and NUMA node. Version 1 counts pages, and is recognized by its line `total`."""
    size = PAGESIZE if "total" in stat else 1
    for kind in ("anon", "file", "unevictable"):
        for node, count in stat.get(f"hierarchical_{kind}", stat.get(kind, {})).items():
            yield (kind, str(node)), count * size


def _threads(sample: CgroupSample) -> OwnSamples:
    states = sample.threads_by_state
    if states is None:
        return ()
    return (
        (("runnable",), states.runnable),
        (("uninterruptible",), states.uninterruptible - (states.iowait or 0)),
        (("iowait",), states.iowait),
        (("sleeping",), states.sleeping),
    )


def _load(sample: CgroupSample, prefix: str) -> OwnSamples:
    load = sample.load
    if load is None:
        return ()
    values = (getattr(load, f"{prefix}{minutes}") for minutes in (1, 5, 15))
    return (((period,), value) for period, value in zip(LOAD_PERIODS, values, strict=True))


def _network(net: SocketTraffic | None, unit: str) -> OwnSamples:
    if net is None:
        return ()
    return (
        ((protocol, direction), getattr(net, f"{protocol}_{direction}_{unit}"))
        for protocol in ("tcp", "udp")
        for direction in ("sent", "received")
    )


CGROUP_SCALARS: tuple[tuple[str, Callable[[CgroupSample], MetricNumber | None]], ...] = (
    ("dioptase_cgroup_cpu_usage_seconds_total", lambda c: ns_to_seconds(c.cpu_usage_ns)),
    ("dioptase_cgroup_cpu_limit_cores", lambda c: _cores(c.limits)),
    ("dioptase_cgroup_cpu_weight", lambda c: c.limits.weight),
    ("dioptase_cgroup_cpu_idle", lambda c: None if c.limits.idle is None else int(c.limits.idle)),
    ("dioptase_cgroup_cpuset_cpus", lambda c: _cpus(c.limits.cpus)),
    ("dioptase_cgroup_cpu_periods_total", lambda c: c.periods),
    ("dioptase_cgroup_cpu_throttled_periods_total", lambda c: c.throttled_periods),
    ("dioptase_cgroup_cpu_throttled_seconds_total", lambda c: ns_to_seconds(c.throttled_ns)),
    ("dioptase_cgroup_cpu_cycles_total", lambda c: c.counters.cycles if c.counters else None),
    ("dioptase_cgroup_cpu_instructions_total", lambda c: c.counters.instructions if c.counters else None),
    ("dioptase_cgroup_cpu_cache_misses_total", lambda c: c.counters.misses if c.counters else None),
    ("dioptase_cgroup_threads", lambda c: c.threads),
    ("dioptase_cgroup_pids_limit", lambda c: _limit(c.limits.pids_max)),
    ("dioptase_cgroup_numa_migrations_total", lambda c: c.numa_migrations),
    ("dioptase_cgroup_memory_usage_bytes", lambda c: c.memory_bytes),
    ("dioptase_cgroup_memory_working_set_bytes", working_set),
    ("dioptase_cgroup_memory_swap_bytes", lambda c: c.swap_bytes),
    ("dioptase_cgroup_memory_kernel_bytes", lambda c: c.kernel_memory_bytes),
    ("dioptase_cgroup_page_faults_total", lambda c: first_value(c.memory_stat, ("total_pgfault", "pgfault"))),
    (
        "dioptase_cgroup_major_page_faults_total",
        lambda c: first_value(c.memory_stat, ("total_pgmajfault", "pgmajfault")),
    ),
    ("dioptase_cgroup_oom_kills_total", lambda c: c.oom_kills),
    ("dioptase_cgroup_reclaimed_pages_total", lambda c: c.reclaim.reclaimed_pages if c.reclaim else None),
    ("dioptase_cgroup_kswapd_wakeups_total", lambda c: c.reclaim.kswapd_wakeups if c.reclaim else None),
    ("dioptase_cgroup_network_retransmits_total", lambda c: c.net.tcp_retransmits if c.net else None),
)
CGROUP_SPLITS: tuple[tuple[str, Callable[[CgroupSample], OwnSamples]], ...] = (
    ("dioptase_cgroup_cpu_seconds_total", lambda c: (
        (("user",), ns_to_seconds(c.cpu_user_ns)), (("system",), ns_to_seconds(c.cpu_system_ns)))),
    ("dioptase_cgroup_threads_by_state", _threads),
    ("dioptase_cgroup_load", lambda c: _load(c, "load")),
    ("dioptase_cgroup_load_runnable", lambda c: _load(c, "runnable")),
    ("dioptase_cgroup_pressure_seconds_total", stalled_seconds),
    ("dioptase_cgroup_memory_limit_bytes", lambda c: _memory_limits(c.limits)),
    ("dioptase_cgroup_memory_bytes", lambda c: (((kind,), first_value(c.memory_stat, names)) for kind, names in MEMORY_KINDS)),
    ("dioptase_cgroup_memory_numa_bytes", lambda c: _numa(c.numa_stat)),
    (
        "dioptase_cgroup_workingset_pages_total",
        lambda c: ((own, first_value(c.memory_stat, names)) for own, names in WORKINGSET),
    ),
    ("dioptase_cgroup_reclaim_scanned_pages_total", lambda c: _by_reclaimer(c, "pgscan_")),
    ("dioptase_cgroup_reclaim_stolen_pages_total", lambda c: _by_reclaimer(c, "pgsteal_")),
    ("dioptase_cgroup_memory_events_total", lambda c: (((event,), c.memory_events.get(event)) for event in MEMORY_EVENTS)),
    ("dioptase_cgroup_network_bytes_total", lambda c: _network(c.net, "bytes")),
    ("dioptase_cgroup_network_packets_total", lambda c: _network(c.net, "packets")),
)  # fmt: skip

"""Builds the View of a cycle that the page and `dioptase top` draw.
Pure. Units are cores, microseconds, ratios and rates per second; None means unknown. Every managed container is
included, and of all other cgroups those with most CPU use, latency, reclaim or memory, so that a View of thousands of
cgroups stays small.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import nlargest

import msgspec

from api.advice import Headroom, MemoryAdvice, NicBandwidth, PoolSize, RegionAdvice
from api.colocation import ColocationTotals
from api.cpu import format_cpu_list
from api.decision import Cycle, OutcomeStatus
from api.forecast import Forecast
from api.histogram import BOUNDS_NS, quantile_ns
from api.knobs import Reason
from api.pod import Container, Pod
from api.rates import (
    CgroupRates,
    Rates,
    cgroups_by_container,
    delta,
    runq_latency_delta,
    sum_runq_latencies,
)
from api.snapshot import (
    UNLIMITED,
    Blame,
    CgroupSample,
    ComponentHealth,
    Durations,
    MemoryZone,
    OomVictim,
    RunqLatency,
    Snapshot,
    ThreadStates,
)
from api.units import NS_PER_MS, NS_PER_S, NS_PER_US, Count
from exporters.prometheus.cgroup_families import working_set
from exporters.view.activity import (
    KswapdView,
    LatencyView,
    PressureView,
    ReclaimView,
    TrafficView,
    kswapd_views,
    latency_view,
    pressure_views,
    reclaim_view,
    refaults_per_second,
    traffic_view,
)
from exporters.view.decision_view import (
    ChangeView,
    EvictionView,
    NodeAdviceView,
    ShadowView,
    change_view,
    eviction_view,
    node_advice_views,
    shadow_view,
)
from exporters.view.descendant_sums import sum_descendants
from exporters.view.placement_view import HarmIndicatorView, PlacementView, harm_views, placement_views

MAX_SHOWN_AGGRESSORS = 6
"""Number of aggressors listed per cgroup, the worst ones; the rest is one number."""


class RunqLatencyView(msgspec.Struct, frozen=True, kw_only=True):
    """Run-queue waits that ended since the previous cycle; quantiles are None if the source has sums only."""

    count: int
    mean_us: float | None
    p50_us: float | None
    p99_us: float | None
    slots: tuple[int, ...] | None
    """Log2 histogram; the upper bounds are View.bounds_us and then +Inf."""


class BlameView(msgspec.Struct, frozen=True, kw_only=True):
    """Run-queue latency of a cgroup by aggressor: milliseconds of waiting per second."""

    culprits: tuple[tuple[str, float], ...]
    """Paths and milliseconds of the worst aggressors, worst first; the cgroup itself may be one of them."""
    rest_ms: float
    """Sum of all other aggressors."""
    throttled_ms: float
    """Time throttled by a quota of the cgroup or of an ancestor."""
    higher_class_ms: float
    """Time in which real-time, deadline or stop tasks ran."""
    other_ms: float
    """Time without an aggressor: CPUs that leave the idle state, and removed cgroups."""


class ContainerView(msgspec.Struct, frozen=True, kw_only=True):
    """One managed container and its cgroup, or another cgroup, for which pod, container and qos are empty."""

    pod: str
    container: str
    qos: str
    cgroup: str
    cpu_cores: float | None
    throttled_ratio: float | None
    """Share of CFS periods in which the container was throttled."""
    throttled_ms: float | None
    threads: int | None
    memory_bytes: Count | None
    cpu_pressure_ratio: float | None
    wait: RunqLatencyView | None
    """Run-queue latency as measured, the container's own throttling included."""
    evaluated_wait: RunqLatencyView | None = None
    """Run-queue latency as the advisor evaluates it: own throttling excluded, without slots. Online containers only."""
    latency: LatencyView | None = None
    wait_cores: float | None = None
    """Mean number of tasks that waited for a CPU."""
    throttle_p99_us: float | None = None
    """99th percentile of the duration of single throttles."""
    blame: BlameView | None = None
    threads_by_state: ThreadStates | None = None
    load: tuple[float, float, float] | None = None
    """Load averages over 1, 5 and 15 minutes."""
    memory_limit_bytes: int | None = None
    """Limit in bytes; None if unlimited or unknown."""
    memory_pressure_ratio: float | None = None
    io_pressure_ratio: float | None = None
    refaults: float | None = None
    """Pages per second that were read again soon after their reclaim; None between two reads of the file."""
    reclaim: ReclaimView | None = None
    oom_kills: int | None = None
    """Kills since the probe was loaded, or from the kernel's file since the cgroup was created."""
    traffic: TrafficView | None = None


def container_view(
    pod: Pod,
    container: Container,
    now: Snapshot,
    before: Snapshot | None,
    rate: CgroupRates | None,
    members: Sequence[str] = (),
) -> ContainerView:
    """Return the view of one container of a listed pod; `members` are its cgroup and its descendants, if they exist."""
    sample = now.cgroups.get(container.cgroup) or CgroupSample(path=container.cgroup, id=0)
    earlier = before.cgroups.get(container.cgroup) if before else None
    if len(members) > 1 and before is not None and rate is not None:
        sample, earlier = sum_descendants(members, now.cgroups, before.cgroups)
        wait = runq_latency_delta(earlier.wait, sample.wait) if earlier else None
        waiting = None if wait is None else wait.sum_ns / rate.interval_ns
        rate = msgspec.structs.replace(rate, wait=wait, wait_cores=waiting)
    return _build_container_view(
        sample,
        earlier,
        rate,
        identity=(pod.key, container.name, pod.qos.value),
        latency=latency_view(pod.key, now, before),
    )


def with_evaluated_latency(view: ContainerView, evaluated: RunqLatency | None) -> ContainerView:
    """Return the view with the run-queue latency that the advisor evaluates, without slots to keep the history small."""
    evaluated_wait = runq_latency_view(evaluated)
    if evaluated_wait is None:
        return view
    return msgspec.structs.replace(view, evaluated_wait=msgspec.structs.replace(evaluated_wait, slots=None))


def evaluated_p99_us(container: ContainerView) -> float | None:
    """Return the run-queue latency p99 that policies evaluate; as measured, if they do not evaluate this container."""
    wait = container.evaluated_wait or container.wait
    return None if wait is None else wait.p99_us


def other_cgroup_view(
    sample: CgroupSample, before: CgroupSample | None, rate: CgroupRates | None, own_cores: float | None
) -> ContainerView:
    """Return the view of a cgroup without a listed pod. `own_cores` is its CPU use without descendants."""
    view = _build_container_view(sample, before, rate, identity=("", "", ""), latency=None)
    return msgspec.structs.replace(view, cpu_cores=own_cores)


def past_container_view(c: ContainerView) -> ContainerView:
    """Return a copy without the fields that are shown for the latest cycle only."""
    return msgspec.structs.replace(
        c, traffic=None, reclaim=None, threads_by_state=None, load=None, throttle_p99_us=None,
        memory_pressure_ratio=None, io_pressure_ratio=None,
    )  # fmt: skip


def _build_container_view(
    now: CgroupSample, before: CgroupSample | None, rate: CgroupRates | None, *,
    identity: tuple[str, str, str], latency: LatencyView | None,
) -> ContainerView:  # fmt: skip
    pod, container, qos = identity
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
        wait=runq_latency_view(rate.wait) if rate else None,
        latency=latency,
        wait_cores=rate.wait_cores if rate else None,
        throttle_p99_us=_p99_us(runq_latency_delta(earlier.throttles, now.throttles)) if earlier else None,
        blame=_blame_view(earlier.blame, now.blame, rate.interval_ns) if earlier and rate else None,
        threads_by_state=now.threads_by_state,
        load=(now.load.load1, now.load.load5, now.load.load15) if now.load else None,
        memory_limit_bytes=None if limit == UNLIMITED else limit,
        memory_pressure_ratio=rate.memory_pressure_ratio if rate else None,
        io_pressure_ratio=rate.io_pressure_ratio if rate else None,
        refaults=refaults_per_second(earlier, now) if earlier else None,
        reclaim=reclaim_view(earlier.reclaim, now.reclaim, rate.interval_ns) if earlier and rate else None,
        oom_kills=now.oom_kills if now.oom_kills is not None else now.memory_events.get("oom_kill"),
        traffic=traffic_view(earlier, now, rate.interval_ns) if earlier and rate else None,
    )


def runq_latency_view(wait: Durations | None) -> RunqLatencyView | None:
    """Return count, mean and quantiles of the waits of an interval in microseconds."""
    if wait is None:
        return None

    def microseconds(q: float) -> float | None:
        value = quantile_ns(wait.slots, q) if wait.slots is not None else None
        return None if value is None else value / NS_PER_US

    return RunqLatencyView(
        count=wait.count,
        mean_us=wait.sum_ns / wait.count / NS_PER_US if wait.count else None,
        p50_us=microseconds(0.5),
        p99_us=microseconds(0.99),
        slots=wait.slots,
    )


def _p99_us(durations: Durations | None) -> float | None:
    if durations is None or durations.slots is None:
        return None
    value = quantile_ns(durations.slots, 0.99)
    return None if value is None else value / NS_PER_US


def _blame_view(before: Blame | None, now: Blame | None, interval_ns: int) -> BlameView | None:
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
        culprits=tuple((path, round(ms, 4)) for path, ms in ranked[:MAX_SHOWN_AGGRESSORS]),
        rest_ms=round(sum(ms for _, ms in ranked[MAX_SHOWN_AGGRESSORS:]), 4),
        throttled_ms=round(throttled * per_s, 4),
        higher_class_ms=round(higher * per_s, 4),
        other_ms=round(other * per_s, 4),
    )


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """Values of the node. Rates are None or absent in the first cycle."""

    pressure: Mapping[str, PressureView] = {}
    """Pressure by resource: cpu, memory, io."""
    load: tuple[float, float, float] | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    running: int | None = None
    blocked: int | None = None
    wait: RunqLatencyView | None = None
    """Run-queue latency of all cgroups together."""
    kswapd: tuple[KswapdView, ...] = ()
    zones: tuple[MemoryZone, ...] = ()
    """Zones with pages; sizes and watermarks are in pages."""
    reclaim: ReclaimView | None = None
    """Sum over all cgroups."""
    refaults: float | None = None
    oom_victims: tuple[OomVictim, ...] = ()


def node_view(
    now: Snapshot,
    before: Snapshot | None,
    interval_ns: int | None,
    waits: Iterable[RunqLatency],
    reclaims: Collection[ReclaimView],
) -> NodeView:
    """Return the node's view; without rates `before` and `interval_ns` are None. `waits` and `reclaims` are of every cgroup."""
    node = now.node
    earlier = before.node if before is not None and interval_ns else None
    return NodeView(
        pressure=pressure_views(earlier, node, interval_ns) if earlier and interval_ns else {},
        load=node.load,
        memory_total_bytes=node.memory_total_bytes,
        memory_available_bytes=node.memory_available_bytes,
        running=node.procs_running,
        blocked=node.procs_blocked,
        wait=_all_cgroups_latency(waits),
        kswapd=kswapd_views(earlier.kswapd, node.kswapd, interval_ns) if earlier and interval_ns else (),
        zones=tuple(zone for zone in node.zones if zone.managed),
        reclaim=_sum_reclaim(reclaims),
        refaults=refaults_per_second(earlier, node) if earlier else None,
        oom_victims=node.oom_victims,
    )


def _all_cgroups_latency(waits: Iterable[RunqLatency]) -> RunqLatencyView | None:
    latencies = list(waits)
    # Most cgroups did not wait at all, and adding up distributions takes the time.
    return (
        runq_latency_view(sum_runq_latencies([wait for wait in latencies if wait.count] or latencies[:1]))
        if latencies
        else None
    )


def _sum_reclaim(reclaims: Collection[ReclaimView]) -> ReclaimView | None:
    if not reclaims:
        return None
    return ReclaimView(
        direct_ms=sum(reclaim.direct_ms for reclaim in reclaims),
        limit_ms=sum(reclaim.limit_ms for reclaim in reclaims),
        pages=sum(reclaim.pages for reclaim in reclaims),
        kswapd_wakeups=sum(reclaim.kswapd_wakeups for reclaim in reclaims),
    )


BOUNDS_US: tuple[int, ...] = tuple(bound // NS_PER_US for bound in BOUNDS_NS)
MAX_OTHER_CGROUPS = 24
"""Number of cgroups without a listed pod in a View: they fit on one screen."""
MAX_LARGEST_CGROUPS, MAX_FULLEST_CGROUPS = 6, 2
"""Number of them that are chosen by memory, and by closeness to their limit, without any activity."""
MIN_DEMAND_CORES = 0.0005
"""Minimum of cores used, waited for or spent in reclaim for a cgroup to be listed."""
MIN_HELD_BYTES = 1 << 20


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One cycle, for the page and `dioptase top`."""

    seq: int
    taken_at_ms: int
    """CLOCK_MONOTONIC, used for ages, because the wall clock may be set."""
    wall_time_ms: int
    """CLOCK_REALTIME, for display only."""
    node_name: str = ""
    """Name of the node; empty from agents that do not report it."""
    act: str
    trigger: str
    interval_ms: float | None
    round_ms: float
    policy: str
    action: str
    rule: str
    reason: str
    quota_trial: str = ""
    """Whether the CPU quota of reclaimed pods helps, with the numbers of the latest trial; empty without a verdict."""
    threshold: float | None = None
    """Threshold of the rule, in the unit named by `reason` (rules `wait_*`: milliseconds)."""
    node_cpus: Count
    busy_cores: float | None
    steal_cores: float | None
    cpu_pressure_ratio: float | None
    reclaimable_cores: float | None = msgspec.field(name="lent_cores")
    """CPU that reclaimed pods may use now."""
    reclaimed_cores: float | None
    """CPU that reclaimed pods used since the previous cycle."""
    requirement_cores: float | None
    interference_ms: float | None = None
    """Milliseconds a second that tasks of online pods waited while reclaimed pods had the CPU; None if it is not measured."""
    totals: ColocationTotals | None = None
    """Totals of colocation up to this cycle, in nanoseconds."""
    headroom: Headroom | None = None
    """Resources that reclaimed pods can request in total, including what they use now."""
    reported_headroom: Headroom | None = msgspec.field(default=None, name="advertised")
    """Headroom that the node reports."""
    shadow: ShadowView | None = None
    answers: tuple[NodeAdviceView, ...] = ()
    """Advice for the node as a whole, if enabled."""
    forecasts: tuple[Forecast, ...] = ()
    """Peak use of online work within an hour, with the accuracy of earlier forecasts."""
    pools: Mapping[str, str]
    """CPU list of each pool."""
    sizes: tuple[PoolSize, ...] = ()
    """Size of each pool by NUMA node."""
    regions: tuple[RegionAdvice, ...] = ()
    """Regions of the pools with policies and reasons."""
    rejected: Mapping[str, Reason] = {}
    """Pods whose request for CPUs or network bandwidth cannot be satisfied, with the reason."""
    cards: tuple[NicBandwidth, ...] = ()
    """Network cards with a known speed, and their allocations."""
    memory: MemoryAdvice | None = None
    """Memory advice; its changes of cgroups are in `changes`."""
    node: NodeView = NodeView()
    harm: tuple[HarmIndicatorView, ...] = ()
    """Indicators of harm as the agent reports them to the scheduler."""
    placements: tuple[PlacementView, ...] = ()
    """Reclaimed pods that were placed here last; empty if the source of pods has no times."""
    containers: tuple[ContainerView, ...]
    others: tuple[ContainerView, ...] = ()
    """Cgroups without a listed pod: first those with most activity, then idle ones with most memory; `cpu_cores` excludes
    descendants."""
    other_cgroups: int = 0
    """Number of all cgroups without a listed pod."""
    changes: tuple[ChangeView, ...]
    evictions: EvictionView | None = None
    """Evictions; None if no eviction plugin is configured."""
    sources: tuple[ComponentHealth, ...]
    startup_warnings: tuple[str, ...] = msgspec.field(name="banner")
    bounds_us: tuple[int, ...] = BOUNDS_US


def _container_views(finished: Cycle) -> tuple[ContainerView, ...]:
    snapshot, previous, change = finished.snapshot, finished.previous, finished.rates
    rate_of = change.cgroups if change else {}
    parts = cgroups_by_container(
        snapshot.cgroups, [container.cgroup for pod in snapshot.pods for container in pod.containers]
    )
    return tuple(
        with_evaluated_latency(
            container_view(
                pod, container, snapshot, previous, rate_of.get(container.cgroup), parts.get(container.cgroup, ())
            ),
            finished.evaluated_latency.get(container.cgroup),
        )
        for pod in snapshot.pods
        for container in pod.containers
    )


def build_view(finished: Cycle, node_name: str = "") -> View:
    """Return the view of a cycle of this node; rates are absent in the first one."""
    snapshot, previous, advice = finished.snapshot, finished.previous, finished.advice
    change = finished.rates
    containers = _container_views(finished)
    reclaimed = [c.cpu_cores for c in containers if c.qos == "reclaimed_cores" and c.cpu_cores is not None]
    listed = {c.cgroup for c in containers}
    reclaims = _reclaims(snapshot, previous, change) if previous and change else {}
    ended = [rate.wait for rate in change.cgroups.values() if rate.wait is not None] if change else []
    return View(
        seq=snapshot.seq,
        taken_at_ms=snapshot.taken_at_ns // 1_000_000,
        wall_time_ms=snapshot.wall_time_ns // 1_000_000,
        node_name=node_name,
        act=finished.act.value,
        trigger=finished.trigger,
        interval_ms=change.node.interval_ns / 1e6 if change else None,
        round_ms=finished.duration_ns / 1e6,
        policy=advice.policy if advice else "",
        action=advice.action if advice else "",
        rule=advice.reason.rule if advice else "",
        reason=advice.reason.text if advice else "",
        quota_trial=advice.quota_verdict.text if advice and advice.quota_verdict else "",
        threshold=advice.reason.threshold if advice else None,
        node_cpus=len(snapshot.topology.cpus),
        busy_cores=change.node.busy_cores if change else None,
        steal_cores=change.node.steal_cores if change else None,
        cpu_pressure_ratio=change.node.cpu_pressure_ratio if change else None,
        reclaimable_cores=advice.reclaimable_cores if advice else None,
        reclaimed_cores=sum(reclaimed) if reclaimed else None,
        requirement_cores=advice.requirement_cores if advice else None,
        interference_ms=_interference_ms(finished),
        totals=finished.totals,
        headroom=advice.headroom if advice else None,
        reported_headroom=advice.reported_headroom if advice else None,
        shadow=shadow_view(finished.shadow),
        answers=node_advice_views(finished.node),
        forecasts=finished.forecasts,
        pools={pool.name: format_cpu_list(pool.cpus) for pool in advice.pools} if advice else {},
        sizes=advice.cpu.sizes if advice else (),
        regions=advice.cpu.regions if advice else (),
        rejected=advice.rejected if advice else {},
        cards=advice.cards if advice else (),
        memory=_without_knob_requests(finished.memory),
        node=node_view(snapshot, previous, change.node.interval_ns if change else None, ended, reclaims.values()),
        harm=harm_views(finished),
        placements=placement_views(snapshot.pods),
        containers=containers,
        others=_other_cgroups(snapshot, previous, change, reclaims, listed) if previous and change else (),
        other_cgroups=sum(path not in listed for path in snapshot.cgroups),
        changes=tuple(change_view(o) for o in finished.done if o.status is not OutcomeStatus.UNCHANGED),
        evictions=eviction_view(finished),
        sources=snapshot.sources,
        startup_warnings=finished.startup_warnings,
    )


def _interference_ms(finished: Cycle) -> float | None:
    waited_ns, rates = finished.interference_ns, finished.rates
    return None if waited_ns is None or rates is None else waited_ns * NS_PER_S / NS_PER_MS / rates.node.interval_ns


def _without_knob_requests(memory: MemoryAdvice | None) -> MemoryAdvice | None:
    return None if memory is None else msgspec.structs.replace(memory, knob_requests=())


def past_view(view: View) -> View:
    """Return the part of a view that is kept for five minutes: what charts over time need."""
    node = msgspec.structs.replace(view.node, zones=(), oom_victims=())
    return msgspec.structs.replace(
        view,
        node=node,
        forecasts=(),
        containers=tuple(map(past_container_view, view.containers)),
        others=tuple(map(past_container_view, view.others)),
        sizes=(),
        regions=(),
        rejected={},
        cards=(),
        memory=None,
        evictions=None,
        totals=None,
        harm=(),
        placements=(),
        headroom=None,
        reported_headroom=None,
    )


def _reclaims(snapshot: Snapshot, previous: Snapshot, change: Rates) -> dict[str, ReclaimView]:
    views = {}
    for path, rate in change.cgroups.items():
        after = snapshot.cgroups[path].reclaim
        view = reclaim_view(previous.cgroups[path].reclaim, after, rate.interval_ns) if after is not None else None
        if view is not None:
            views[path] = view
    return views


def _other_cgroups(
    snapshot: Snapshot, previous: Snapshot, change: Rates, reclaims: Mapping[str, ReclaimView], listed: set[str]
) -> tuple[ContainerView, ...]:
    own = _without_descendants(
        {path: rate.cpu_cores for path, rate in change.cgroups.items() if rate.cpu_cores is not None}
    )

    demand_by_path = {path: 0.0 for path in change.cgroups if path not in listed}
    for path in demand_by_path:
        reclaim_view_of = reclaims.get(path)
        stalled_s = (reclaim_view_of.direct_ms + reclaim_view_of.limit_ms) / 1000 if reclaim_view_of else 0.0
        demand = own.get(path, 0.0) + (change.cgroups[path].wait_cores or 0.0) + stalled_s
        if demand >= MIN_DEMAND_CORES:
            demand_by_path[path] = demand
    sizes = {path: size for path in change.cgroups if (size := _memory_size(snapshot.cgroups[path])) is not None}
    held = _without_descendants(sizes)
    busy = sorted(
        (path for path, cores in demand_by_path.items() if cores), key=lambda path: (-demand_by_path[path], path)
    )
    large = nlargest(
        MAX_LARGEST_CGROUPS,
        (path for path in demand_by_path if held.get(path, 0) >= MIN_HELD_BYTES),
        key=held.__getitem__,
    )
    limits = {path: snapshot.cgroups[path].limits.memory_max_bytes for path in demand_by_path}
    full = {path: sizes[path] / limit for path, limit in limits.items() if limit and path in sizes}
    places = busy[: MAX_OTHER_CGROUPS - MAX_LARGEST_CGROUPS - MAX_FULLEST_CGROUPS]
    shown = list(dict.fromkeys((*places, *large, *nlargest(MAX_FULLEST_CGROUPS, full, key=full.__getitem__), *busy)))[
        :MAX_OTHER_CGROUPS
    ]
    return tuple(
        other_cgroup_view(snapshot.cgroups[path], previous.cgroups.get(path), change.cgroups[path], own.get(path))
        for path in sorted(shown, key=lambda path: (-demand_by_path[path], -held.get(path, 0), path))
    )


def _memory_size(sample: CgroupSample) -> int | None:
    """Return the working set, or all memory if memory.stat was not read yet."""
    held = working_set(sample)
    return sample.memory_bytes if held is None else held


def _without_descendants(used: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each cgroup without descendants, which the kernel's counters include."""
    own = dict(used)
    for path, amount in used.items():
        if amount and path != "/":
            parent = path.rpartition("/")[0] or "/"
            if parent in own:
                own[parent] -= amount
    # The files are read one after the other, so a difference may be negative.
    return {path: max(amount, 0.0) for path, amount in own.items()}

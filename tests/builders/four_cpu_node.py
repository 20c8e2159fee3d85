"""Cycles of a four-CPU node whose numbers can be computed by hand, for every test that needs one.

The node runs one online pod, `default/web`, and one batch pod, `default/batch`. All counters are straight
lines through zero: what grows by N a second has the value N * seq in the snapshot of that seq, one second apart.

    per second          /web                         /batch
    CPU                 1.5 cores                    2.25 cores
    CFS periods         10, of which 2 throttled     none counted
    throttled           40 ms                        0
    PSI cpu, some       25 ms                        700 ms
    run-queue waits     100: 90 of 4-8 us,           50 of 512-1024 us
                        9 of 64-128 us, 1 of 8-16 ms
    requests            200, of which 2 above 50 ms  -

Other counters are zero or absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from api.advice import Headroom
from api.cpu import Cpu, Topology
from api.decision import ActMode, Advice, Cycle, Decision, Outcome, OutcomeStatus, Pool
from api.histogram import BOUNDS_NS, SLOT_COUNT
from api.knobs import Knob, Reason
from api.snapshot import (
    CgroupSample,
    ComponentHealth,
    CpuTimes,
    NodeSample,
    Pressure,
    RequestLatency,
    RunqLatency,
    Snapshot,
)
from api.units import MIB
from exporters.prometheus.families import AgentInfo
from tests.builders.pods import reclaimed, shared

S = 1_000_000_000
MS = 1_000_000
BOOTED_AT_NS = 1_700_000_000 * S
"""CLOCK_REALTIME when CLOCK_MONOTONIC was zero."""
WEB_ID, BATCH_ID = 101, 102
WEB_WAITS: Mapping[int, int] = {3: 90, 7: 9, 14: 1}
"""Waits per second by slot: p50 is inside 4-8 us, p99 is 128 us exactly, since 99 of 100 waits are no longer."""
SLOW_WAITS: Mapping[int, int] = {7: 80, 15: 20}
"""An online pod in trouble: p99 is inside 16-33 ms."""
BATCH_WAITS: Mapping[int, int] = {10: 50}

WEB = shared(
    "web",
    cpu_request=2.0,
    memory_request=256 * MIB,
    annotations={"dioptase.io/latency-metric": "http_request_duration_seconds"},
)
BATCH = reclaimed("batch")


def topology(cpus: int = 4) -> Topology:
    """One socket, one NUMA node, a core per CPU."""
    return Topology(cpus=tuple(Cpu(id=i, core=i, socket=0, numa=0) for i in range(cpus)))


def waits(per_second: Mapping[int, int], seconds: int) -> RunqLatency:
    """That many seconds of waits, each as long as the upper bound of its slot."""
    slots = tuple(per_second.get(k, 0) * seconds for k in range(SLOT_COUNT))
    return RunqLatency(
        sum_ns=sum(BOUNDS_NS[k] * count * seconds for k, count in per_second.items()),
        count=sum(slots),
        slots=slots,
    )


def web_sample(seconds: int, per_second: Mapping[int, int] = WEB_WAITS) -> CgroupSample:
    return CgroupSample(
        path="/web",
        id=WEB_ID,
        cpu_usage_ns=1500 * MS * seconds,
        periods=10 * seconds,
        throttled_periods=2 * seconds,
        throttled_ns=40 * MS * seconds,
        threads=8,
        memory_bytes=64 * MIB,
        cpu_pressure=Pressure(some_us=25_000 * seconds, some_avg10=2.5, full_us=5_000 * seconds, full_avg10=0.5),
        memory_pressure=Pressure(some_us=1_000 * seconds, some_avg10=0.1, full_us=0, full_avg10=0.0),
        io_pressure=Pressure(some_us=2_000 * seconds, some_avg10=0.2, full_us=0, full_avg10=0.0),
        wait=waits(per_second, seconds),
    )


def batch_sample(seconds: int) -> CgroupSample:
    """Without memory and I/O pressure and without CFS periods: a kernel that gives less."""
    return CgroupSample(
        path="/batch",
        id=BATCH_ID,
        cpu_usage_ns=2250 * MS * seconds,
        throttled_ns=0,
        threads=4,
        memory_bytes=16 * MIB,
        cpu_pressure=Pressure(some_us=700_000 * seconds, some_avg10=70.0),
        wait=waits(BATCH_WAITS, seconds),
    )


def node_sample(seconds: int) -> NodeSample:
    """4 CPUs: 2.5 cores in user, 1.0 nice, 0.25 system, 0.25 idle, the rest zero."""
    return NodeSample(
        cpu=CpuTimes(
            user_ns=2500 * MS * seconds,
            nice_ns=1000 * MS * seconds,
            system_ns=250 * MS * seconds,
            idle_ns=250 * MS * seconds,
            iowait_ns=0,
            irq_ns=0,
            softirq_ns=0,
            steal_ns=0,
        ),
        load=(3.5, 3.25, 3.0),
        memory_total_bytes=8192 * MIB,
        memory_available_bytes=6144 * MIB,
        cpu_pressure=Pressure(some_us=300_000 * seconds, some_avg10=30.0),
        memory_pressure=Pressure(some_us=0, some_avg10=0.0, full_us=0, full_avg10=0.0),
        io_pressure=Pressure(some_us=10_000 * seconds, some_avg10=1.0, full_us=5_000 * seconds, full_avg10=0.5),
    )


def indicator(seconds: int, sampled_at_ns: int) -> RequestLatency:
    """Per second: 150 requests up to 5 ms, 48 more up to 50 ms, 2 more up to 500 ms, none beyond."""
    return RequestLatency(
        bounds_s=(0.005, 0.05, 0.5),
        buckets=tuple(count * seconds for count in accumulate((150, 48, 2, 0))),
        sum_s=1.25 * seconds,
        sampled_at_ns=sampled_at_ns,
    )


SOURCES = (
    ComponentHealth(name="runqlat", ok=True, duration_ns=2 * MS, detail="tp_btf", lost_events=7),
    ComponentHealth(name="cgroups", ok=True, duration_ns=5 * MS, detail="hybrid"),
    ComponentHealth(
        name="psi",
        ok=False,
        duration_ns=MS,
        error="/proc/pressure/cpu: operation not supported",
        remedy="boot the kernel with psi=1",
    ),
)


def busy_snapshot(seq: int, *, cgroups: int = 0, per_second: Mapping[int, int] = WEB_WAITS) -> Snapshot:
    """Return the node at second `seq`, with this many more cgroups `/other-N`, which resemble /web and belong to no pod."""
    taken_at_ns = seq * S
    others = (CgroupSample(**_fields(web_sample(seq), path=f"/other-{i}", id=1000 + i)) for i in range(cgroups))
    root = CgroupSample(path="/", id=1, cpu_usage_ns=3750 * MS * seq, threads=120)
    samples = (root, web_sample(seq, per_second), batch_sample(seq), *others)
    return Snapshot(
        seq=seq,
        taken_at_ns=taken_at_ns,
        wall_time_ns=BOOTED_AT_NS + taken_at_ns,
        boot_id="5b2d4d0c-0000-4000-8000-000000000000",
        topology=topology(),
        node=node_sample(seq),
        cgroups={sample.path: sample for sample in samples},
        pods=(WEB, BATCH),
        indicators={WEB.key: indicator(seq, taken_at_ns)},
        sources=SOURCES,
    )


def advice(action: str = "grow", reclaimable_cores: float = 2.5) -> Advice:
    return Advice(
        policy="latency",
        pools=(Pool(name="share", cpus=(0, 1, 2, 3)), Pool(name="reclaim", cpus=(2, 3))),
        requirement_cores=1.5,
        headroom=Headroom(cores=0.25, reason=Reason(rule="estimate", text="0.25 cores of headroom")),
        reclaimable_cores=reclaimable_cores,
        idle=True,
        action=action,
        reason=Reason(
            rule="wait_below_target",
            text="online pods wait 128 us at p99, below the target of 1000 us: lend half a core more",
            threshold=1000.0,
            inputs={"wait_p99_us": 128.0, "pods": 1, "slowest": "default/web", "indicator": None},
        ),
    )


def outcome(
    knob: Knob = Knob.CPUSET,
    value: str = "2-3",
    status: OutcomeStatus = OutcomeStatus.APPLIED,
    **changes: str | bool | None,
) -> Outcome:
    """A decision on /batch and what came of it; `changes` are fields of Outcome."""
    decision = Decision(
        cgroup="/batch",
        cgroup_id=BATCH_ID,
        pod=BATCH.key,
        knob=knob,
        value=value,
        reason=advice().reason,
    )
    return Outcome(decision=decision, status=status, **changes)  # type: ignore[arg-type]


OUTCOMES = (
    outcome(before="3", after="2-3", repaired=True),
    outcome(Knob.IDLE, "1", OutcomeStatus.UNCHANGED, before="1"),
    outcome(Knob.QUOTA, "250000 100000", OutcomeStatus.REFUSED, before="max 100000", error="cpu.max: invalid argument"),
)

ABOUT = AgentInfo(
    interval_s=2.0,
    runq_latency_target_s=0.005,
    journal_writable=False,
    syncs={"originals.json": (4, 0.5)},
    sync_pending_s=0.25,
    otel_failures=3,
    otel_dropped_spans=7,
    api_requests={("PATCH", "customnoderesources.v1alpha1.node.katalyst.kubewharf.io", "200"): 12},
    nri_answers={"adjusted": 5, "unchanged": 0, "unknown": 1, "late": 0},
    applied_configs={("AdminQoSConfiguration", "kube-system/all", "1f0c9e6a2b7d"): True},
    calls={
        ("made", "runtime.v1.RuntimeService.ListContainers", "OK"): 60,
        ("made", "runtime.v1.RuntimeService.StopContainer", "UNAVAILABLE"): 2,
    },
    advice_ages_s={("given", "cpu"): 2.5},
    peers={"qrm-plugin": 1},
)


def busy_cycle(
    seq: int = 2,
    *,
    cgroups: int = 0,
    per_second: Mapping[int, int] = WEB_WAITS,
    outcomes: tuple[Outcome, ...] = OUTCOMES,
    act: ActMode = ActMode.ON,
) -> Cycle:
    """A round in which everything has something to show, one second after the one before it."""
    return Cycle(
        snapshot=busy_snapshot(seq, cgroups=cgroups, per_second=per_second),
        previous=busy_snapshot(seq - 1, cgroups=cgroups, per_second=per_second) if seq > 1 else None,
        act=act,
        trigger="tick",
        advice=advice(),
        outcomes=outcomes,
        duration_ns=12 * MS,
        startup_warnings=("PSI triggers need CAP_SYS_RESOURCE: add it to get them every second instead of every two",),
    )


def bare_cycle(seq: int = 1) -> Cycle:
    """The least a round can be: a machine that gives nothing, no pods, no advice."""
    return Cycle(
        snapshot=Snapshot(
            seq=seq,
            taken_at_ns=seq * S,
            wall_time_ns=BOOTED_AT_NS + seq * S,
            boot_id="",
            topology=Topology(cpus=()),
            node=NodeSample(),
            cgroups={"/": CgroupSample(path="/", id=1)},
        ),
        previous=None,
        act=ActMode.OFF,
        trigger="tick",
    )


def _fields(sample: CgroupSample, **changes: object) -> dict[str, object]:
    return {field: getattr(sample, field) for field in sample.__struct_fields__} | changes

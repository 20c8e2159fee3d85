"""The round of tests/builders/four_cpu_node.py on a machine that gives everything: every field of every sample has
something to say.

All counters are straight lines through zero here too: N a second have the value N * seq in the snapshot of that seq.
"""

from __future__ import annotations

import msgspec

from api.advice import (
    ControlKnob,
    CpuAdvice,
    Headroom,
    IndicatorState,
    MemoryAdvice,
    MemoryCondition,
    MemoryPressure,
    NicBandwidth,
    NodeAdvice,
    OvercommitAdvice,
    PoolSize,
    PowerAction,
    PowerActionKind,
    PowerCap,
    Region,
    RegionAdvice,
    RegionKind,
)
from api.colocation import ColocationTotals, OnlineTotals
from api.decision import Cycle
from api.eviction import (
    ActiveCondition,
    EvictionBlock,
    EvictionCondition,
    EvictionEvent,
    EvictionEventReason,
    EvictionResult,
    EvictionThreshold,
    EvictionVictim,
    ThresholdMet,
)
from api.forecast import Forecast, ForecastResource, ForecastScore, PeakForecast
from api.histogram import BOUNDS_NS, SLOT_COUNT
from api.knobs import Reason
from api.snapshot import (
    Blame,
    BlockIo,
    CgroupLimits,
    CgroupSample,
    CpuCounters,
    CpuTimes,
    Disk,
    Durations,
    Filesystem,
    Interface,
    IoStat,
    Kswapd,
    L3Monitor,
    LoadAverages,
    Machine,
    MemoryZone,
    NodeSample,
    NumaNode,
    OomVictim,
    ReclaimLatency,
    Snapshot,
    SocketTraffic,
    ThreadStates,
)
from api.units import MIB
from exporters.prometheus.families import RecordingState
from tests.builders.four_cpu_node import ABOUT, BATCH, BOOTED_AT_NS, MS, WEB_WAITS, S, advice, busy_cycle, waits
from tests.builders.quota_verdicts import quota_verdict

RICH_ABOUT = msgspec.structs.replace(
    ABOUT, traced=True, recording=RecordingState(writable=True, size_bytes=5 * MIB, cycles=40, lost_cycles=2)
)
_CAP_REASON = Reason(
    rule="power_cap", text="The node draws 100 W of 80 W at alert s0: power is capped to 80 W.", threshold=80
)
RICH_NODE = NodeAdvice(
    power=PowerAction(
        kind=PowerActionKind.CAP, at_ns=S, target_watts=80, current_watts=100, reason=_CAP_REASON
    ),
    power_cap=PowerCap(target_watts=80, package_watts=60, reason=_CAP_REASON),
    overcommit=OvercommitAdvice(
        cpu_ratio=1.6, memory_ratio=1.17, reason=Reason(rule="overcommit_realtime", text="CPU: 1.60. Memory: 1.17.")
    ),
)  # fmt: skip
RICH_CPU = CpuAdvice(
    regions=(
        RegionAdvice(
            region=Region(name="share-NUMA0", kind=RegionKind.SHARE, pool="share-NUMA0", numa_nodes=(0,), bound=True,
                          containers=("/web",), pods=("default/web",)),
            policy="rama",
            controls={ControlKnob.REQUIREMENT: 3.0},
            upper_cores=4.0,
            lower_cores=1.0,
            headroom_cores=2.5,
            headroom_reason=Reason(rule="region_canonical", text="Region share-NUMA0 leaves 2.50 cores."),
            signals=(IndicatorState(name="cpu_sched_wait", current=450.0, target=400.0),),
            reason=Reason(rule="provision_rama", text="share-NUMA0: it gets 3.", threshold=4.0, inputs={"cpus": 3}),
        ),
    ),
    sizes=(PoolSize(pool="share-NUMA0", numa=0, cpus=3), PoolSize(pool="reclaim", cpus=1, quota_cores=1.5)),
)  # fmt: skip
RICH_REJECTED = {"default/db": Reason(rule="dedicated_needs_numa_binding", text="default/db asks for the impossible.")}
RICH_CARDS = (
    NicBandwidth(name="eth0", speed=10_000, egress_capacity=9400, ingress_capacity=9000, allocated_mbit=500,
                  pods={"default/web": 500}),
)  # fmt: skip
RICH_MEMORY = MemoryAdvice(
    policy="canonical",
    headroom_bytes=3072.0 * MIB,
    headroom_by_numa={0: 3072.0 * MIB},
    headroom_reason=Reason(rule="memory_headroom_canonical", text="3 GiB of headroom.", inputs={"total_bytes": 8192 * MIB}),
    provision_by_numa={0: 2048.0 * MIB},
    condition=MemoryCondition(state=MemoryPressure.NO_RISK, reason=Reason(rule="memory_no_risk", text="4 GiB are free.")),
    numa_conditions={
        0: MemoryCondition(state=MemoryPressure.TUNE_MEMCG, target_bytes=256 * MIB,
                           reason=Reason(rule="memory_tune_memcg", text="NUMA node 0 has 4 GiB free.")),
        1: MemoryCondition(state=MemoryPressure.UNKNOWN,
                           reason=Reason(rule="memory_pressure_unknown", text="MemFree of NUMA node 1 is missing.")),
    },
    reasons=(Reason(rule="memory_reap_disabled", text="The cache reaper is switched off."),),
)  # fmt: skip
MEMORY_PLUGIN = "system-memory-pressure-eviction-plugin"
RICH_EVICTIONS = EvictionResult(
    thresholds=(
        EvictionThreshold(
            plugin=MEMORY_PLUGIN, met=ThresholdMet.HARD, scope="SystemMemory", subject="free", value=float(96 * MIB),
            observed=float(64 * MIB), operator="<", since_ns=S, condition=EvictionCondition(name="MemoryPressure"),
            reason=Reason(rule="hard_threshold_met", text="64.0 MiB of memory are free; the watermark is 96.0 MiB."),
        ),
        EvictionThreshold(
            plugin=MEMORY_PLUGIN, met=ThresholdMet.NOT_MET, scope="SystemMemory", subject="psi",
            reason=Reason(rule="input_missing", text="memory pressure is not known; no pod is evicted for that."),
        ),
        EvictionThreshold(
            plugin="rss-overuse-eviction-plugin", met=ThresholdMet.SOFT, scope="rss", value=1.05, observed=1.5, since_ns=S,
            reason=Reason(rule="soft_threshold_met", text="1 of 2 pods use more memory than they may."), dry_run=True,
        ),
    ),
    conditions=(
        ActiveCondition(
            condition=EvictionCondition(name="MemoryPressure"), plugin=MEMORY_PLUGIN, since_ns=S, last_met_ns=S, ends_ns=301 * S
        ),
    ),
    victims=(
        EvictionVictim(
            pod=BATCH.key, uid=BATCH.uid, plugin=MEMORY_PLUGIN, scope="SystemMemory", forced=True, grace_s=1.0,
            reason=Reason(
                rule="hard_threshold_met", text="plugin met threshold: 64.0 MiB are free", threshold=float(96 * MIB),
                inputs={"free_bytes": 64 * MIB},
            ),
        ),
        EvictionVictim(
            pod="default/web", uid="default/web", plugin="rss-overuse-eviction-plugin", scope="rss", forced=False,
            grace_s=None, dry_run=True,
            reason=Reason(rule="soft_threshold_met", text="Resident memory is 384.0 MiB.", threshold=1.05),
        ),
    ),
    terminating=(BATCH.key,),
    held={"default/needed": EvictionBlock.BUDGET},
)  # fmt: skip
RICH_KILLS = (
    EvictionEvent(
        pod=BATCH.key, reason=EvictionEventReason.CREATED, message="Successfully create eviction; reason: x", at_ns=S
    ),
    EvictionEvent(
        pod="default/stuck", reason=EvictionEventReason.EXCEEDED, message="processes are left 45 s after", at_ns=S
    ),
)
RICH_PROMISE = Headroom(
    cores=0.25,
    cores_by_numa={0: 0.25},
    memory_bytes=3072.0 * MIB,
    memory_by_numa={0: 3072.0 * MIB},
    reason=Reason(rule="estimate", text="0.25 cores of headroom."),
)
RICH_ADVERTISED = Headroom(
    cores=0.5,
    cores_by_numa={0: 0.5},
    memory_bytes=2048.0 * MIB,
    memory_by_numa={0: 2048.0 * MIB},
    reason=Reason(rule="advertised", text="CPU: 0.50 cores advertised, of a level of 0.50 cores."),
)
RICH_SHADOW = msgspec.structs.replace(
    advice(), policy="canonical", reclaimable_cores=1.0, headroom=Headroom(cores=0.5, reason=advice().reason)
)
FORECASTS = (
    Forecast(
        resource=ForecastResource.CPU,
        used=1.5,
        forecast=PeakForecast(
            peak=2.25, expected=1.75, margin=0.5, season=True, alarm=False, trusted=True, history_s=90_000.0,
            reason=Reason(rule="calibrated", text="1.75 are expected at the most within the hour, 2.25 with the margin."),
        ),
        target_miss_ratio=0.055,
        score=ForecastScore(miss_ratio=0.0625, big_miss_ratio=0.015625, shortfall_mean=0.25, shortfall_max=0.75, bias=0.375,
                    quantile_ratio=0.95, evaluated=64, missed=4),
    ),
    Forecast(
        resource=ForecastResource.MEMORY,
        used=2000.0 * MIB,
        forecast=PeakForecast(
            peak=3000.0 * MIB, expected=2500.0 * MIB, margin=500.0 * MIB, alarm=True, trusted=False, history_s=7200.0,
            reason=Reason(rule="drift_alarm", text="Use rose above every forecast within the last hour."),
        ),
        target_miss_ratio=0.055,
        score=ForecastScore(miss_ratio=0.25, big_miss_ratio=0.0, shortfall_mean=64.0 * MIB, shortfall_max=128.0 * MIB,
                    bias=256.0 * MIB, quantile_ratio=0.94, evaluated=12, missed=3),
    ),
)  # fmt: skip
DEVICE = "253:0"


def durations(slot: int, per_second: int, seconds: int) -> Durations:
    """So many a second, each as long as the upper bound of its slot."""
    count = per_second * seconds
    slots = tuple(count if k == slot else 0 for k in range(SLOT_COUNT))
    return Durations(sum_ns=BOUNDS_NS[slot] * count, count=count, slots=slots)


def full_cgroup(sample: CgroupSample, seconds: int, blame: Blame | None) -> CgroupSample:
    """A cgroup of version 2 with everything that files and probes give."""
    return msgspec.structs.replace(
        sample,
        cpu_user_ns=1000 * MS * seconds,
        cpu_system_ns=500 * MS * seconds,
        limits=CgroupLimits(
            quota_us=200_000, period_us=100_000, burst_us=0, weight=79, idle=False, cpus="0-3", mems="0",
            memory_max_bytes=512 * MIB, memory_high_bytes=(1 << 64) - 1, memory_low_bytes=64 * MIB, memory_min_bytes=0,
            swap_max_bytes=0, pids_max=1000,
        ),
        swap_bytes=MIB,
        kernel_memory_bytes=2 * MIB,
        memory_stat={
            "anon": 32 * MIB, "file": 30 * MIB, "shmem": 0, "file_mapped": 8 * MIB, "file_dirty": 4096,
            "file_writeback": 0, "active_anon": 30 * MIB, "inactive_anon": 2 * MIB, "active_file": 10 * MIB,
            "inactive_file": 20 * MIB, "unevictable": 0, "anon_thp": 0, "slab_reclaimable": MIB,
            "slab_unreclaimable": MIB, "kernel_stack": 131072, "pagetables": 262144, "sock": 4096,
            "pgfault": 300 * seconds, "pgmajfault": 3 * seconds, "pgscan_kswapd": 50 * seconds,
            "pgscan_direct": 20 * seconds, "pgsteal_kswapd": 40 * seconds, "pgsteal_direct": 10 * seconds,
            "workingset_refault_anon": 0, "workingset_refault_file": 7 * seconds, "workingset_activate_anon": 0,
            "workingset_activate_file": 3 * seconds, "workingset_restore_anon": 0,
            "workingset_restore_file": 2 * seconds,
        },
        numa_stat={"anon": {0: 32 * MIB}, "file": {0: 30 * MIB}},
        memory_events={"low": 0, "high": 0, "max": 5 * seconds, "oom": seconds, "oom_kill": seconds},
        io={DEVICE: IoStat(read_bytes=MIB * seconds, write_bytes=2 * MIB * seconds, reads=16 * seconds,
                           writes=32 * seconds, discard_bytes=MIB * seconds, discards=seconds)},
        files_read_at_ns=BOOTED_AT_NS + seconds * S,
        blame=blame,
        throttles=durations(15, 2, seconds),
        threads_by_state=ThreadStates(runnable=3, uninterruptible=2, iowait=1, sleeping=3),
        load=LoadAverages(load1=3.5, load5=2.5, load15=1.5, runnable1=3.0, runnable5=2.0, runnable15=1.0),
        reclaim=ReclaimLatency(direct=durations(12, 4, seconds), limit=durations(10, 6, seconds),
                        reclaimed_pages=320 * seconds, kswapd_wakeups=seconds),
        oom_kills=seconds,
        numa_migrations=5 * seconds,
        counters=CpuCounters(cycles=3_000_000_000 * seconds, instructions=2_000_000_000 * seconds, misses=1_000_000 * seconds),
        block_io={DEVICE: BlockIo(reads=durations(8, 16, seconds), writes=durations(11, 32, seconds),
                                  read_bytes=MIB * seconds, write_bytes=2 * MIB * seconds)},
        net=SocketTraffic(tcp_sent_bytes=3000 * seconds, tcp_received_bytes=2000 * seconds, tcp_sent_packets=3 * seconds,
                tcp_received_packets=2 * seconds, udp_sent_bytes=500 * seconds, udp_received_bytes=0,
                udp_sent_packets=seconds, udp_received_packets=0, tcp_retransmits=seconds),
    )  # fmt: skip


def full_node(sample: NodeSample, seconds: int) -> NodeSample:
    """Everything of tests/builders/four_cpu_node.py, and four CPUs that share it evenly on one NUMA node."""
    assert sample.cpu is not None
    quarter = CpuTimes(**{field: getattr(sample.cpu, field) // 4 for field in sample.cpu.__struct_fields__})
    columns = {"bytes": 1000 * seconds, "packets": 10 * seconds, "errs": 0, "drop": seconds}
    return msgspec.structs.replace(
        sample,
        machine=Machine(codename="Intel_CascadeLake", is_vm=True),
        per_cpu=dict.fromkeys(range(4), quarter),
        procs_running=3,
        procs_blocked=1,
        run_delay_ns=dict.fromkeys(range(4), 10 * MS * seconds),
        cpu_khz=dict.fromkeys(range(4), 2_500_000),
        meminfo={"MemTotal": 8192 * MIB, "MemFree": 4096 * MIB, "MemAvailable": 6144 * MIB, "Buffers": 64 * MIB,
                 "Cached": 2048 * MIB, "AnonPages": 1024 * MIB, "SReclaimable": 128 * MIB, "SUnreclaim": 64 * MIB,
                 "SwapTotal": 1024 * MIB, "SwapFree": 1000 * MIB},
        vmstat={"pgfault": 5000 * seconds, "pgmajfault": 10 * seconds, "pgscan_kswapd": 200 * seconds,
                "pgscan_direct": 100 * seconds, "pgsteal_kswapd": 150 * seconds, "pgsteal_direct": 50 * seconds,
                "workingset_refault_file": 30 * seconds, "oom_kill": seconds, "pswpin": 2 * seconds,
                "pswpout": 3 * seconds, "kswapd_low_wmark_hit_quickly": seconds},
        netstat={"Tcp.RetransSegs": 2 * seconds, "Tcp.OutSegs": 1000 * seconds, "TcpExt.ListenDrops": 0},
        tcp_states={"established": 12, "close_wait": 1},
        numa={0: NumaNode(cpus=(0, 1, 2, 3), distances={0: 10},
                          meminfo={"MemTotal": 8192 * MIB, "MemFree": 4096 * MIB, "FilePages": 2048 * MIB})},
        zones=(MemoryZone(node=0, name="Normal", free=1_048_576, min=4096, low=5120, high=6144, managed=2_097_152),),
        fragmentation={0: {0: -1000, 9: 823}},
        disks={"vda": Disk(number=DEVICE, reads=20 * seconds, read_bytes=2 * MIB * seconds, read_ns=4 * MS * seconds,
                           writes=40 * seconds, write_bytes=4 * MIB * seconds, write_ns=12 * MS * seconds,
                           busy_ns=15 * MS * seconds, in_flight=2, kind="VIRTIO")},
        interfaces={"eth0": Interface(received=columns, sent=columns, duplex="full", speed_mbit=10_000)},
        filesystems={"/": Filesystem(size_bytes=1 << 36, available_bytes=1 << 35, inodes=1 << 20, free_inodes=1 << 19)},
        interrupts=dict.fromkeys(range(4), 1000 * seconds),
        power_uj={"package-0": 40_000_000 * seconds},
        l3=(L3Monitor(id=0, group="", total_bytes=MIB * seconds, local_bytes=MIB * seconds, occupancy_bytes=8 * MIB),),
        kswapd={0: Kswapd(wakeups=2 * seconds, active_ns=30 * MS * seconds, scanned_pages=200 * seconds,
                          reclaimed_pages=150 * seconds)},
        softirq_ns={key: {"NET_RX": 2 * MS * seconds, "TIMER": MS * seconds} for key in range(4)},
        oom_victims=(OomVictim(wall_time_ns=BOOTED_AT_NS + S, cgroup="/web", pid=4711, command="web"),),
    )  # fmt: skip


def full_snapshot(snapshot: Snapshot) -> Snapshot:
    """The batch pod made the web pod wait 200 ms a second; its own tasks 10 ms, its quota 40 ms, others 2 ms."""
    seconds = snapshot.seq
    web = Blame(by_cgroup={"/batch": 200 * MS * seconds, "/web": 10 * MS * seconds}, throttled_ns=40 * MS * seconds,
                higher_class_ns=MS * seconds, other_ns=MS * seconds)  # fmt: skip
    batch = Blame(by_cgroup={"/web": 30 * MS * seconds}, throttled_ns=0, higher_class_ns=0, other_ns=0)
    blames = {"/batch": batch, "/": None}
    return msgspec.structs.replace(
        snapshot,
        node=full_node(snapshot.node, seconds),
        cgroups={
            path: sample if path == "/" else full_cgroup(sample, seconds, blames.get(path, web))
            for path, sample in snapshot.cgroups.items()
        },
    )


def full_policy_result(finished: Cycle) -> Cycle:
    """The round with something of everything that policies can say."""
    changed = msgspec.structs.replace(
        finished.advice or advice(),
        cpu=RICH_CPU,
        rejected=RICH_REJECTED,
        quota_verdict=quota_verdict(),
        cards=RICH_CARDS,
        headroom=RICH_PROMISE,
        reported_headroom=RICH_ADVERTISED,
    )
    return msgspec.structs.replace(
        finished,
        advice=changed,
        memory=RICH_MEMORY,
        shadow=RICH_SHADOW,
        evictions=RICH_EVICTIONS,
        kills=RICH_KILLS,
        node=RICH_NODE,
        forecasts=FORECASTS,
    )


def rich_totals(seconds: int) -> ColocationTotals:
    """Return the totals after this many seconds: 2.5 cores reclaimable, 2.125 used, 5 ms a second of interference; in three
    quarters of the time reclaimed pods were busy. p99 of online pods is 128 us with batch work, 60.8 us without."""
    busy, idle = seconds * 3 // 4, seconds // 4
    return ColocationTotals(
        since_wall_ns=BOOTED_AT_NS,
        duration_ns=seconds * S,
        reclaimable_ns=2500 * MS * seconds,
        reclaimed_ns={"default": 2000 * MS * seconds, "team-a": 125 * MS * seconds},
        interference_ns=5 * MS * seconds,
        interference_duration_ns=seconds * S,
        busy=OnlineTotals(duration_ns=busy * S, cpu_ns=1500 * MS * busy, latency=waits(WEB_WAITS, busy)),
        idle=OnlineTotals(duration_ns=idle * S, cpu_ns=1200 * MS * idle, latency=waits({3: 90, 6: 10}, idle)),
        reductions={"wait_above_target": seconds // 600},
        evictions={"below_min": seconds // 7200},
    )


RICH_TOTALS = rich_totals(7200)
"""Of two hours."""


def full_cycle(seq: int = 2, *, cgroups: int = 0) -> Cycle:
    """Return a cycle with a value for every row of the catalogue; `cgroups` more belong to no pod and resemble /web."""
    finished = busy_cycle(seq, cgroups=cgroups)
    return full_policy_result(
        msgspec.structs.replace(
            finished,
            snapshot=full_snapshot(finished.snapshot),
            previous=None if finished.previous is None else full_snapshot(finished.previous),
            totals=RICH_TOTALS,
        )
    )

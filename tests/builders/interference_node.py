"""A node whose cgroups wait for one another, for every view of run-queue interference. No clock, no random numbers.

All counters grow by the same every second unless `waves` is set, so each rate can be computed by hand:

    per second            /web               /batch            /system.slice/build
    CPU                   0.8 cores          1.5 cores         0.6 cores
    waits                 400 ms             900 ms            120 ms
      because of /batch   240 ms             -                 100 ms
      because of /build   100 ms             300 ms            -
      because of itself    20 ms             500 ms             15 ms
      own quota            30 ms              80 ms              0
      real-time             4 ms               0                 0
      other                 6 ms              20 ms              5 ms
    direct reclaim         12 ms               0                70 ms
    reclaim at the limit    0                200 ms              0

The node: CPU pressure 30 % some, memory 12 % some and 3 % all, kswapd awake for 40 %, zone Normal below its low watermark.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sin

from api.cpu import Cpu, Topology
from api.decision import ActMode, Cycle
from api.histogram import SLOT_COUNT, slot_of
from api.pod import Container, Pod
from api.qos import QoSLevel
from api.snapshot import (
    UNLIMITED,
    Blame,
    BlockIo,
    CgroupLimits,
    CgroupSample,
    ComponentHealth,
    CpuTimes,
    Durations,
    Kswapd,
    LoadAverages,
    MemoryZone,
    NodeSample,
    OomVictim,
    Pressure,
    ReclaimLatency,
    Snapshot,
    SocketTraffic,
    ThreadStates,
)
from api.units import MIB

S, MS = 1000000000, 1000000
STARTED_AT_NS = 1_795_269_600 * S
"""2026-11-21 14:00:00 UTC."""
WEB, BATCH, BUILD = "/web", "/batch", "/system.slice/build"
BLAMES: Mapping[str, tuple[Mapping[str, int], int, int, int]] = {
    WEB: ({BATCH: 240, BUILD: 100, WEB: 20}, 30, 4, 6),
    BATCH: ({BUILD: 300, BATCH: 500}, 80, 0, 20),
    BUILD: ({BATCH: 100, BUILD: 15}, 0, 0, 5),
}
"""Milliseconds of a second by aggressor; own quota, real-time tasks, other causes."""
CORES = {WEB: 0.8, BATCH: 1.5, BUILD: 0.6}
WAIT_NS = {WEB: 2 * MS, BATCH: 30 * MS, BUILD: 6 * MS}
"""How long each single wait is."""
HOSTILE = ("/kubepods/<script>alert(1)</script>", "/a'b\"c", "/new\nline\x1b[31m\u202egnp", "/" + "x" * 300)
PODS = (
    Pod(uid="w", namespace="shop", name="web", qos=QoSLevel.SHARED, containers=(Container(name="web", cgroup=WEB),)),
    Pod(uid="b", namespace="lab", name="batch", qos=QoSLevel.RECLAIMED, containers=(Container(name="train", cgroup=BATCH),)),
)  # fmt: skip
SOURCES = (
    ComponentHealth(name="waits", ok=True, duration_ns=310_000, detail="tp_btf"),
    ComponentHealth(name="blame", ok=True, duration_ns=210_000, detail="tp_btf"),
    ComponentHealth(name="threads", ok=True, duration_ns=810_000, detail="iter"),
    ComponentHealth(name="kswapd", ok=True, duration_ns=90_000, detail="tp_btf"),
)


def durations(total_ns: float, each_ns: int) -> Durations:
    """So many of one length."""
    count = int(total_ns) // each_ns
    slots = [0] * SLOT_COUNT
    slots[slot_of(each_ns)] = count
    return Durations(sum_ns=int(total_ns), count=count, slots=tuple(slots))


def cgroup(path: str, number: int, seconds: float, like: str) -> CgroupSample:
    """A cgroup whose counters are those of `like` after that time."""
    by, throttled, higher, other = BLAMES[like]
    waited_ms = sum(by.values()) + throttled + higher + other
    direct_ms, limit_ms = {WEB: (12, 0), BATCH: (0, 200), BUILD: (70, 0)}[like]
    return CgroupSample(
        path=path,
        id=number,
        cpu_usage_ns=int(CORES[like] * S * seconds),
        periods=int(10 * seconds),
        throttled_periods=int(throttled / 10 * seconds) // 2,
        throttled_ns=int(throttled * MS * seconds),
        threads=12,
        memory_bytes=(300 if like == BATCH else 80) * MIB,
        limits=CgroupLimits(memory_max_bytes=320 * MIB if like == BATCH else UNLIMITED),
        cpu_pressure=Pressure(some_us=int(250_000 * seconds), some_avg10=25.0),
        memory_pressure=Pressure(some_us=int(20_000 * seconds), some_avg10=2.0),
        io_pressure=Pressure(some_us=int(5_000 * seconds), some_avg10=0.5),
        wait=durations(waited_ms * MS * seconds, WAIT_NS[like]),
        throttles=durations(throttled * MS * seconds, 15 * MS) if throttled else None,
        blame=Blame(
            by_cgroup={aggressor: int(ms * MS * seconds) for aggressor, ms in by.items()},
            throttled_ns=int(throttled * MS * seconds),
            higher_class_ns=int(higher * MS * seconds),
            other_ns=int(other * MS * seconds),
        ),
        threads_by_state=ThreadStates(runnable=3, uninterruptible=2, iowait=1, sleeping=7),
        load=LoadAverages(load1=1.5, load5=1.25, load15=1.0, runnable1=1.0, runnable5=1.0, runnable15=1.0),
        reclaim=ReclaimLatency(
            direct=durations(direct_ms * MS * seconds, 2 * MS),
            limit=durations(limit_ms * MS * seconds, 5 * MS),
            reclaimed_pages=int(640 * seconds),
            kswapd_wakeups=int(2 * seconds),
        ),
        oom_kills=1 if like == BATCH else 0,
        memory_stat={"workingset_refault_anon": int(10 * seconds), "workingset_refault_file": int(30 * seconds)},
        files_read_at_ns=STARTED_AT_NS + int(seconds) * S,
        block_io={"8:0": BlockIo(reads=durations(30 * MS * seconds, 3 * MS), writes=durations(0, MS),
                                 read_bytes=int(MIB * seconds), write_bytes=0)},
        net=SocketTraffic(tcp_sent_bytes=int(2 * MIB * seconds), tcp_received_bytes=int(MIB * seconds), tcp_sent_packets=0,
                tcp_received_packets=0, udp_sent_bytes=0, udp_received_bytes=0, udp_sent_packets=0, udp_received_packets=0,
                tcp_retransmits=int(3 * seconds)),
    )  # fmt: skip


def node(seconds: int) -> NodeSample:
    def times(busy: float) -> CpuTimes:
        return CpuTimes(user_ns=int(busy * S * seconds), nice_ns=0, system_ns=0, idle_ns=int((4 - busy) * S * seconds),
                        iowait_ns=0, irq_ns=0, softirq_ns=0, steal_ns=0)  # fmt: skip

    return NodeSample(
        cpu=times(3.1),
        load=(5.5, 4.25, 3.0),
        memory_total_bytes=8192 * MIB,
        memory_available_bytes=2048 * MIB,
        procs_running=6,
        procs_blocked=1,
        cpu_pressure=Pressure(some_us=300_000 * seconds, some_avg10=30.0),
        memory_pressure=Pressure(some_us=120_000 * seconds, some_avg10=12.0, full_us=30_000 * seconds, full_avg10=3.0),
        io_pressure=Pressure(some_us=50_000 * seconds, some_avg10=5.0, full_us=10_000 * seconds, full_avg10=1.0),
        vmstat={"workingset_refault_file": 80 * seconds},
        zones=(
            MemoryZone(node=0, name="DMA32", free=90_000, min=1_000, low=1_500, high=2_000, managed=480_000),
            MemoryZone(node=0, name="Normal", free=12_000, min=10_000, low=12_500, high=15_000, managed=1_500_000),
        ),
        files_read_at_ns=STARTED_AT_NS + seconds * S,
        kswapd={0: Kswapd(wakeups=3 * seconds, active_ns=400 * MS * seconds, scanned_pages=5_000 * seconds,
                          reclaimed_pages=4_000 * seconds)},
        oom_victims=(OomVictim(wall_time_ns=STARTED_AT_NS + 5 * S, cgroup=BATCH, pid=4242, command="train<b>"),),
    )  # fmt: skip


def snapshot(t: int, pods: tuple[Pod, ...], more: int, hostile: bool, waves: bool) -> Snapshot:
    def seconds(k: int) -> float:
        # The integral of 1 + sin(t / 11 + k), which never goes backwards.
        return t + 11 * (1 - sin(t / 11 + k + 1.57)) if waves else float(t)

    cgroups = [cgroup(path, 10 + k, seconds(k), path) for k, path in enumerate((WEB, BATCH, BUILD))]
    likes = (WEB, BUILD, BATCH)
    cgroups += [
        cgroup(f"/kubepods/burstable/pod{k:03}", 100 + k, seconds(k) / (k + 2), likes[k % 3]) for k in range(more)
    ]
    if hostile:
        cgroups += [cgroup(path, 1000 + k, seconds(k) / 3, BUILD) for k, path in enumerate(HOSTILE)]
    cgroups.append(CgroupSample(path="/", id=1, cpu_usage_ns=int(2.3 * S * t), threads=120))
    return Snapshot(
        seq=t + 1,
        taken_at_ns=1000 * S + t * S,
        wall_time_ns=STARTED_AT_NS + t * S,
        boot_id="boot",
        topology=Topology(cpus=tuple(Cpu(id=i, core=i, socket=0, numa=0) for i in range(4))),
        node=node(t),
        cgroups={sample.path: sample for sample in cgroups},
        pods=pods,
        sources=SOURCES,
    )


def interference_cycles(
    count: int = 60, *, pods: tuple[Pod, ...] = PODS, more: int = 0, hostile: bool = False, waves: bool = False
) -> tuple[Cycle, ...]:
    """Return `count` cycles of an agent that only watches, a second apart; `more` cgroups belong to no pod."""
    cycles: list[Cycle] = []
    for t in range(count):
        observed = snapshot(t, pods, more, hostile, waves)
        before = cycles[-1].snapshot if cycles else None
        cycles.append(Cycle(snapshot=observed, previous=before, act=ActMode.OFF, trigger="tick", duration_ns=6_300_000))
    return tuple(cycles)

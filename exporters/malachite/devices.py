"""Makes `system/io`, `system/network`, `system/info` and `realtime/*` (power, frequencies, resctrl).
Pure. The client stores any number it gets, so a missing sensor raises Unavailable instead of giving zero. Counters
are since boot.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from api.interfaces import Unavailable
from api.rates import delta
from api.snapshot import Disk, Interface, Snapshot
from api.units import NS_PER_MS, NS_PER_US
from exporters.malachite.history import RETRANSMITTED_SEGMENTS, SENT_SEGMENTS, MalachiteHistory, node_read_at_ns
from exporters.malachite.wire import MalachiteStruct, finite, i64, in_unit, known_values, u64, unix_seconds

_PARTITION = re.compile(r"(?:(?P<numbered>.*\d)p|(?P<lettered>(?:sd|vd|xvd|hd)[a-z]+))\d+$")
"""Names of partitions: vda1 belongs to vda, nvme0n1p2 to nvme0n1 (p after a digit), sdp1 to sdp."""


class DiskIo(MalachiteStruct, frozen=True):
    """One disk: operations, and milliseconds in which it was busy."""

    primary_device_id: int
    secondary_device_id: int
    device_name: str
    io_read: int | None = None
    io_write: int | None = None
    io_busy: int | None = None
    disk_type: str | None = None
    wbt_lat_usec: int | None = None


class IoDocument(MalachiteStruct, frozen=True):
    """The document `system/io`."""

    disk_io: tuple[DiskIo, ...]
    update_time: int | None = None


def io_document(now: Snapshot, _history: MalachiteHistory) -> IoDocument:
    """Return every disk by its name below /sys/block."""
    disks = now.node.disks
    shown = (_disk(name, disk) for name, disk in sorted(disks.items()) if not is_partition(name, disks.keys()))
    return IoDocument(
        disk_io=tuple(disk for disk in shown if disk is not None),
        update_time=unix_seconds(node_read_at_ns(now)),
    )


def is_partition(name: str, names: object) -> bool:
    """Return whether the name is that of a partition of a disk in `names`."""
    parent = _PARTITION.fullmatch(name)
    return parent is not None and hasattr(names, "__contains__") and (parent["numbered"] or parent["lettered"]) in names


def _disk(name: str, disk: Disk) -> DiskIo | None:
    major, _, minor = disk.number.partition(":")
    if not (major.isascii() and major.isdigit() and minor.isascii() and minor.isdigit() and len(disk.number) < 20):
        return None
    return DiskIo(
        primary_device_id=int(major),
        secondary_device_id=int(minor),
        device_name=name,
        io_read=u64(disk.reads),
        io_write=u64(disk.writes),
        io_busy=in_unit(disk.busy_ns, NS_PER_MS),
        disk_type=disk.kind or None,
        wbt_lat_usec=i64(disk.wbt_lat_us),
    )


class InterfaceCounters(MalachiteStruct, frozen=True):
    """One interface; the client uses those whose names begin with `eth`. `speeds` is in Mbit/s."""

    name: str
    duplex: str | None = None
    update_time: int | None = None
    receive_bytes: int | None = None
    receive_packets: int | None = None
    receive_errs: int | None = None
    receive_drop: int | None = None
    receive_fifo: int | None = None
    receive_frame: int | None = None
    receive_compressed: int | None = None
    receive_multicast: int | None = None
    transmit_bytes: int | None = None
    transmit_packets: int | None = None
    transmit_errs: int | None = None
    transmit_drop: int | None = None
    transmit_fifo: int | None = None
    transmit_colls: int | None = None
    transmit_carrier: int | None = None
    transmit_compressed: int | None = None
    speeds: int | None = None


class TcpCounters(MalachiteStruct, frozen=True):
    """TCP of the node. `tcp_retran` is the percentage of retransmitted segments in the last five seconds."""

    tcp_delay_acks: int | None = None
    tcp_listen_overflows: int | None = None
    tcp_listen_drops: int | None = None
    tcp_abort_on_memory: int | None = None
    tcp_req_q_full_drop: int | None = None
    tcp_retran: float | None = None
    tcp_retrans_segs: int | None = None
    tcp_old_retrans_segs: int | None = None
    tcp_out_segs: int | None = None
    tcp_old_out_segs: int | None = None
    tcp_close_wait: int | None = None
    tcp_timeouts: int | None = None
    tcp_mem_press: int | None = None
    tcp_mem_press_chrono: int | None = None


class NetworkDocument(MalachiteStruct, frozen=True):
    """The document `system/network`."""

    networkcard: tuple[InterfaceCounters, ...]
    tcp: TcpCounters
    update_time: int | None = None


def network_document(now: Snapshot, history: MalachiteHistory) -> NetworkDocument:
    """Return every interface of the agent's network namespace, and its TCP."""
    at = unix_seconds(node_read_at_ns(now))
    return NetworkDocument(
        networkcard=tuple(_card(name, card, at) for name, card in sorted(now.node.interfaces.items())),
        tcp=_tcp(now.node.netstat, now.node.tcp_states, history),
        update_time=at,
    )


def _card(name: str, card: Interface, at: int | None) -> InterfaceCounters:
    received = {f"receive_{kind}": count for kind, count in card.received.items()}
    sent = {f"transmit_{kind}": count for kind, count in card.sent.items()}
    return InterfaceCounters(
        name=name,
        duplex=card.duplex or None,
        update_time=at,
        speeds=u64(card.speed_mbit),
        **known_values(InterfaceCounters.__struct_fields__, received | sent),
    )


def _tcp(counters: Mapping[str, int], states: Mapping[str, int], history: MalachiteHistory) -> TcpCounters:
    before = history.tcp
    before_sent = None if before is None else before.sent
    before_again = None if before is None else before.again
    sent, again = (
        delta(before_sent, counters.get(SENT_SEGMENTS)),
        delta(before_again, counters.get(RETRANSMITTED_SEGMENTS)),
    )
    return TcpCounters(
        tcp_delay_acks=u64(counters.get("TcpExt.DelayedACKs")),
        tcp_listen_overflows=u64(counters.get("TcpExt.ListenOverflows")),
        tcp_listen_drops=u64(counters.get("TcpExt.ListenDrops")),
        tcp_abort_on_memory=u64(counters.get("TcpExt.TCPAbortOnMemory")),
        tcp_req_q_full_drop=u64(counters.get("TcpExt.TCPReqQFullDrop")),
        tcp_retran=None if sent is None or again is None else finite(100 * again / max(sent, 1)),
        tcp_retrans_segs=u64(counters.get(RETRANSMITTED_SEGMENTS)),
        tcp_old_retrans_segs=u64(before_again),
        tcp_out_segs=u64(counters.get(SENT_SEGMENTS)),
        tcp_old_out_segs=u64(before_sent),
        tcp_close_wait=u64(states.get("close_wait")),
        tcp_timeouts=u64(counters.get("TcpExt.TCPTimeouts")),
        tcp_mem_press=u64(counters.get("TcpExt.TCPMemoryPressures")),
        tcp_mem_press_chrono=u64(counters.get("TcpExt.TCPMemoryPressuresChrono")),
    )


RAPL_PLATFORM, RAPL_DRAM = "psys", "dram"


class PowerSensors(MalachiteStruct, frozen=True):
    """Power in watts since the tick before.

    RAPL measures processors and their memory; the total lacks fans, disks and power supplies.
    """

    total_power: float
    cpu_power: float | None = None
    mem_power: float | None = None
    update_time: int | None = None


class PowerDocument(MalachiteStruct, frozen=True):
    """The document `realtime/power`."""

    sensors: PowerSensors


class CpuFrequency(MalachiteStruct, frozen=True):
    """Frequency of one CPU in kHz."""

    scaling_cur_freq: int


class CpuFrequencies(MalachiteStruct, frozen=True):
    """Frequencies in order of CPU number; the client reads the first."""

    cpu_freq: tuple[CpuFrequency, ...]
    update_time: int | None = None


class FrequencyDocument(MalachiteStruct, frozen=True):
    """The document `realtime/freq`."""

    sysfreq: CpuFrequencies


class L3Bandwidth(MalachiteStruct, frozen=True):
    """Counters of one L3 cache, in bytes."""

    id: int
    mbm_local_bytes: int
    mbm_total_bytes: int


class ResctrlGroupCounters(MalachiteStruct, frozen=True):
    """Counters by resctrl group; `root` is the default group."""

    group_mbm: dict[str, tuple[L3Bandwidth, ...]]
    update_time: int | None = None


class ResctrlDocument(MalachiteStruct, frozen=True):
    """The document `realtime/resctrl`."""

    resctrl: ResctrlGroupCounters


class InfoDocument(MalachiteStruct, frozen=True):
    """The document `system/info`."""

    is_vm: bool
    update_time: int | None = None


def power_document(now: Snapshot, history: MalachiteHistory) -> PowerDocument:
    """Return power from the energy counters of RAPL. Raises Unavailable without counters, and in the first snapshot."""
    if not now.node.power_uj:
        raise Unavailable("no energy counters (RAPL) are readable here", "see /sys/class/powercap; a VM has none")
    before = history.previous
    watts: dict[str, float] = {}
    if before is not None:
        elapsed_us = (now.taken_at_ns - before.taken_at_ns) / NS_PER_US
        for domain, energy in now.node.power_uj.items():
            spent = delta(before.power_uj.get(domain), energy)
            if spent is None:
                break  # a counter wrapped, or a domain is new: a sum would lack it
            watts[domain] = spent / elapsed_us
        else:
            return PowerDocument(sensors=_sensors(watts, now))
    raise Unavailable("two samples of the energy counters are needed", "retry after a second")


def _sensors(watts: dict[str, float], now: Snapshot) -> PowerSensors:
    packages = [w for domain, w in watts.items() if domain.startswith("package") and "/" not in domain]
    memory = [w for domain, w in watts.items() if domain.rpartition("/")[2] == RAPL_DRAM]
    total = watts.get(RAPL_PLATFORM, sum(packages) + sum(memory))
    return PowerSensors(
        total_power=finite(total) or 0.0,
        cpu_power=finite(sum(packages)) if packages else None,
        mem_power=finite(sum(memory)) if memory else None,
        update_time=unix_seconds(now.wall_time_ns),
    )


def frequency_document(now: Snapshot, _history: MalachiteHistory) -> FrequencyDocument:
    """Return current frequencies. Raises Unavailable if the kernel reports none."""
    shown = [CpuFrequency(scaling_cur_freq=khz) for _, khz in sorted(now.node.cpu_khz.items()) if i64(khz) is not None]
    if not shown:
        raise Unavailable("the kernel reports no CPU frequencies", "see /sys/devices/system/cpu/cpu0/cpufreq")
    return FrequencyDocument(sysfreq=CpuFrequencies(cpu_freq=tuple(shown), update_time=unix_seconds(now.wall_time_ns)))


def resctrl_document(now: Snapshot, _history: MalachiteHistory) -> ResctrlDocument:
    """Return memory bandwidth by resctrl group. Raises Unavailable without resctrl."""
    groups: dict[str, list[L3Bandwidth]] = {}
    for monitor in now.node.l3:
        if monitor.is_monitoring_group:
            continue  # the counters of its control group include it
        counters = (i64(monitor.id), i64(monitor.local_bytes), i64(monitor.total_bytes))
        if None not in counters:
            shown = L3Bandwidth(id=monitor.id, mbm_local_bytes=monitor.local_bytes, mbm_total_bytes=monitor.total_bytes)
            groups.setdefault(monitor.group or "root", []).append(shown)
    if not groups:
        raise Unavailable(
            "resctrl is not mounted, or monitors no memory bandwidth", "mount -t resctrl none /sys/fs/resctrl"
        )
    return ResctrlDocument(
        resctrl=ResctrlGroupCounters(
            group_mbm={group: tuple(shown) for group, shown in groups.items()},
            update_time=unix_seconds(now.wall_time_ns),
        )
    )


def info_document(now: Snapshot, _history: MalachiteHistory) -> InfoDocument:
    """Return whether the node is a VM. Raises Unavailable if unknown: the client assumes hardware without a response."""
    if now.node.machine.is_vm is None:
        raise Unavailable("it is unknown whether this is a virtual machine", "give the agent the host's /sys and /proc")
    return InfoDocument(is_vm=now.node.machine.is_vm, update_time=unix_seconds(now.wall_time_ns))

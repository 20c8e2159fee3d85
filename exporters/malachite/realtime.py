"""`realtime/*` and `system/info`: power, CPU frequencies, memory bandwidth by resctrl group, and whether this is a VM.

The client stores whatever number it gets, so where the machine has no such sensor these are errors and not zeros.
"""

from __future__ import annotations

from api.ports import Unavailable
from api.rates import delta
from api.samples import Snapshot
from exporters.malachite.past import History
from exporters.malachite.wire import NS_PER_US, Wire, i64, real, seconds

PLATFORM, DRAM = "psys", "dram"


class Sensors(Wire, frozen=True):
    """Watts since the tick before. What RAPL measures is the processors and their memory; fans, disks and power supplies
    are not seen, so the total is what is known of the whole."""

    total_power: float
    cpu_power: float | None = None
    mem_power: float | None = None
    update_time: int | None = None


class Power(Wire, frozen=True):
    """The document `realtime/power`."""

    sensors: Sensors


class Frequency(Wire, frozen=True):
    """One CPU, in kHz."""

    scaling_cur_freq: int


class Frequencies(Wire, frozen=True):
    """CPUs in order of number; the client reads the first."""

    cpu_freq: tuple[Frequency, ...]
    update_time: int | None = None


class Freq(Wire, frozen=True):
    """The document `realtime/freq`."""

    sysfreq: Frequencies


class Bandwidth(Wire, frozen=True):
    """Counters of one L3 cache, in bytes."""

    id: int
    mbm_local_bytes: int
    mbm_total_bytes: int


class Groups(Wire, frozen=True):
    """By resctrl group; `root` is the one that tasks are in by default."""

    group_mbm: dict[str, tuple[Bandwidth, ...]]
    update_time: int | None = None


class Resctrl(Wire, frozen=True):
    """The document `realtime/resctrl`."""

    resctrl: Groups


class Info(Wire, frozen=True):
    """The document `system/info`."""

    is_vm: bool
    update_time: int | None = None


def power(now: Snapshot, history: History) -> Power:
    """Power from the energy counters of RAPL. Raises Unavailable where there are none, or none to compare with yet."""
    if not now.node.power_uj:
        raise Unavailable("no energy counters (RAPL) are readable here", "see /sys/class/powercap; a VM has none")
    before = history.previous
    watts: dict[str, float] = {}
    if before is not None:
        elapsed_us = (now.taken_at_ns - before.taken_at_ns) / NS_PER_US
        for domain, energy in now.node.power_uj.items():
            spent = delta(before.power_uj.get(domain), energy)
            if spent is None:
                break  # a counter that wrapped, or a domain that is new: no sum is right this time
            watts[domain] = spent / elapsed_us
        else:
            return Power(sensors=_sensors(watts, now))
    raise Unavailable("two samples of the energy counters are needed", "ask again in a second")


def _sensors(watts: dict[str, float], now: Snapshot) -> Sensors:
    packages = [w for domain, w in watts.items() if domain.startswith("package") and "/" not in domain]
    memory = [w for domain, w in watts.items() if domain.rpartition("/")[2] == DRAM]
    total = watts.get(PLATFORM, sum(packages) + sum(memory))
    return Sensors(
        total_power=real(total) or 0.0,
        cpu_power=real(sum(packages)) if packages else None,
        mem_power=real(sum(memory)) if memory else None,
        update_time=seconds(now.wall_time_ns),
    )


def freq(now: Snapshot, _history: History) -> Freq:
    """Current frequencies. Raises Unavailable where the kernel tells none."""
    shown = [Frequency(scaling_cur_freq=khz) for _, khz in sorted(now.node.cpu_khz.items()) if i64(khz) is not None]
    if not shown:
        raise Unavailable("the kernel tells no CPU frequencies", "see /sys/devices/system/cpu/cpu0/cpufreq")
    return Freq(sysfreq=Frequencies(cpu_freq=tuple(shown), update_time=seconds(now.wall_time_ns)))


def resctrl(now: Snapshot, _history: History) -> Resctrl:
    """Memory bandwidth by group. Raises Unavailable without resctrl."""
    groups: dict[str, list[Bandwidth]] = {}
    for monitor in now.node.l3:
        if monitor.nested:
            continue  # its group's counters have it in them
        counters = (i64(monitor.id), i64(monitor.local_bytes), i64(monitor.total_bytes))
        if None not in counters:
            shown = Bandwidth(id=monitor.id, mbm_local_bytes=monitor.local_bytes, mbm_total_bytes=monitor.total_bytes)
            groups.setdefault(monitor.group or "root", []).append(shown)
    if not groups:
        raise Unavailable(
            "resctrl is not mounted, or monitors no memory bandwidth", "mount -t resctrl none /sys/fs/resctrl"
        )
    return Resctrl(
        resctrl=Groups(
            group_mbm={group: tuple(shown) for group, shown in groups.items()},
            update_time=seconds(now.wall_time_ns),
        )
    )


def info(now: Snapshot, _history: History) -> Info:
    """Raises Unavailable where it is not known: the client would take the lack of an answer for a real machine."""
    if now.node.machine.is_vm is None:
        raise Unavailable("whether this is a virtual machine is not known", "give the agent the host's /sys and /proc")
    return Info(is_vm=now.node.machine.is_vm, update_time=seconds(now.wall_time_ns))

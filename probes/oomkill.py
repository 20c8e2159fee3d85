"""Counts processes that the kernel killed for memory, per cgroup, and lists the latest victims by name.
A process counts when the kernel marks it as an OOM victim; it belongs to the cgroup that it is in, which may lie
below the one whose limit was reached. Kernels before 6.9 pass only a pid; there the marking function is probed by
fentry or kprobe.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from api.interfaces import ProbeReading, Unavailable
from api.snapshot import OomVictim
from probes import bpf, kernel_fields
from probes.btf import VMLINUX
from probes.loader import CHILD_PYTHON, Form, Job, Loaded, Program, load_probe, tracepoint_forms
from probes.lost_events import LostEventCounter
from probes.maps import BpfMap
from probes.per_cgroup_probe import RemovedCgroupTracker, open_maps

FORMS = ("tp_btf", "raw_tp", "fentry", "kprobe")
"""Forms in order of preference."""
RING_VICTIMS = 256
"""Number of victims that the BPF program keeps until they are read."""
MAX_SHOWN_VICTIMS = 32
"""Number of latest victims in the snapshot."""
_FIELDS: kernel_fields.KernelFields = {
    **kernel_fields.TASK_CGROUP_FIELDS,
    "TGID": [("task_struct", "tgid", 4)],
    "LEADER": [("task_struct", "group_leader", 8)],
    "COMM": [("task_struct", "comm", 16)],
}
_MARK_FIELDS: kernel_fields.KernelFields = {
    **_FIELDS,
    "SIGNAL": [("task_struct", "signal", 8)],
    "OOM_MM": [("signal_struct", "oom_mm", 8)],
}
# The tracepoint passes the task since 72ba14deb40a (Linux 6.9, and 2025 updates of older series), before only its pid.
_PROGRAMS = [Program("on_victim", "mark_victim", "dtse_oomkill", arguments=kernel_fields.TASK_ARGUMENTS)]
_MARK = [Program("on_mark", "mark_oom_victim", "dtse_oommark", arguments=kernel_fields.TASK_ARGUMENTS, at="entry")]
_FORMS = {
    **tracepoint_forms(_PROGRAMS, _FIELDS),
    "fentry": Form(name="fentry", typed=True, fields=_MARK_FIELDS, programs=_MARK, constants={"TYPED": 1}),
    "kprobe": Form(
        name="kprobe", typed=False, fields={**_MARK_FIELDS, **kernel_fields.KPROBE_ARGUMENT_FIELDS}, programs=_MARK
    ),
}


class OomKillProbe:
    """The running probe (`api.interfaces.Probe`), with statistics for the command line."""

    name = "oomkill"

    def __init__(self, loaded: Loaded) -> None:
        self._loaded, self.form, self.refused = loaded, loaded.form, loaded.refused
        self._ring, self._count = (BpfMap(*loaded.maps[label], cpus=1) for label in ("oomkill", "kills"))
        self._open, self._read_total, self._missed = True, 0, LostEventCounter()
        self._kills: dict[int, int] = {}
        self._victims: deque[OomVictim] = deque(maxlen=MAX_SHOWN_VICTIMS)
        self._live: Mapping[int, str] = {}
        self._removed = RemovedCgroupTracker()

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:
        """Return kills since the probe was opened. Raises Unavailable once closed."""
        with open_maps(self.name, is_open=self._open):
            self._read_victims(live)
        if complete:
            for number in self._removed.removed_in(self._kills, live):
                del self._kills[number]
        self._live = live
        zero: Mapping[str, object] = {"oom_kills": 0}
        uncertain = self._missed.grew_since_listing(self._missed.total, live)
        cgroups = dict.fromkeys(() if uncertain else live, zero)
        cgroups.update((number, {"oom_kills": kills}) for number, kills in self._kills.items())
        return ProbeReading(cgroups=cgroups, node={"oom_victims": tuple(self._victims)})

    def problem(self) -> Unavailable | None:
        """Return whether the ring overflowed between two reads lately."""
        return self._missed.problem(
            f"kills were not attributed: more than {RING_VICTIMS} happened between two reads",
            "check the node's memory; the kernel log has every victim",
        )

    @property
    def lost_events(self) -> int | None:
        """Return the kills since the start whose cgroup is unknown."""
        return self._missed.total

    def stats(self) -> dict[str, bpf.ProgramInfo]:
        """Return runs and run time of each program; they grow only while kernel statistics are on."""
        return self._loaded.stats()

    def close(self) -> None:
        """Detach from the kernel. Idempotent."""
        self._open = False
        self._loaded.close()

    def _read_victims(self, live: Mapping[int, str]) -> None:
        total = int(self._count.rows([0])[0])
        new, self._read_total = total - self._read_total, total
        if not new:
            return
        self._missed.update(self._missed.total + max(0, new - RING_VICTIMS))
        positions = [at % RING_VICTIMS for at in range(total - min(new, RING_VICTIMS), total)]
        rows = dict(zip(sorted(positions), self._ring.rows(sorted(positions)), strict=True))
        offset_ns = time.time_ns() - time.monotonic_ns()
        for position in positions:
            number = int(rows[position]["cgroup_id"])
            self._kills[number] = self._kills.get(number, 0) + 1
            # A victim's cgroup is often removed at once: the previous listing may still contain it.
            path = live.get(number) or self._live.get(number) or f"id {number}"
            self._victims.append(decode(rows[position], offset_ns, path))


def decode(row: Any, offset_ns: int, cgroup: str) -> OomVictim:
    """Decode one `struct victim`; `offset_ns` is CLOCK_REALTIME minus CLOCK_MONOTONIC."""
    return OomVictim(
        wall_time_ns=int(row["at_ns"]) + offset_ns,
        cgroup=cgroup,
        pid=int(row["pid"]),
        command=row["command"].tobytes().split(b"\0")[0].decode(errors="replace"),
    )


def job(forms: Sequence[str], btf: Path = VMLINUX) -> Job:
    """Return the loader's job."""
    here = Path(__file__).parent
    return Job(
        sources=[here / "kernel.bpf.h", here / "oomkill.bpf.c"],
        forms=[_FORMS[name] for name in forms],
        maps=["oomkill", "kills"],
        remedy="use Linux 6.9 or later, or one with fentry or kprobes; without the probe,"
        " memory.events and memory.oom_control count the kills",
        constants={"VICTIMS": RING_VICTIMS, **kernel_fields.unified_macro()},
        btf=btf,
    )


def open_oomkill(
    *, forms: Sequence[str] = FORMS, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX
) -> OomKillProbe:
    """Start the probe in the first form that the kernel accepts. Raises Unavailable if it accepts none."""
    return load_probe(job(forms, btf), OomKillProbe, child_python=child_python)

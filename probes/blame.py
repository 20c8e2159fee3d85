"""Who makes whom wait: each wait of a cgroup's tasks for a CPU, split among those who had that CPU meanwhile.

What the numbers mean: they are the waits of probes/runqlat.py, counted when they end, by the same program and on the same
clock, so the parts of a cgroup add up to the sum of its waits, but for those that end while both are read. A part goes to
the cgroup whose task ran on the CPU on which this one waited: four burners that share a CPU are each to blame for what they
ran. The waiting cgroup is among them when its own tasks queue behind each other. Autogroups and kernel threads are the
root's. Interrupts are part of whatever they interrupted. Real-time, deadline and stop tasks count as higher class wherever
they are from. Throttled is the time during which the cgroup was held back by its own quota, or one above it, on that CPU. A
task that is moved while it waits leaves the part until then to those of the CPU that it waited on.

What it cannot see, and counts as other: the way out of idle; what lies longer ago than a CPU remembers, which is its latest 48
changes of hands and, where four cgroups at most take turns of less than 1 ms, a quarter of a second; cgroups that are gone or
not listed; and pairs beyond the table's bound, which `problem` tells of. Turns of less than 1 ms are told apart one by one for
the latest 16; a wait that began among older ones has up to 8 ms split by proportion. Throttles are exact to the microsecond
since Linux 6.6; blame.bpf.h says what is less exact before. A cgroup that is made again under its old path begins at zero.

The forms tp_btf and raw_tp know this. The classic form has another clock than the kernel's throttling, and schedstat has
sums only, so with them nobody is blamed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from api.ports import Absent, Probe, Seen, Unavailable, WaitSource
from probes.btf import VMLINUX
from probes.loader import CHILD_PYTHON
from probes.runqlat import RunqLat, open_waits

FORMS = ("tp_btf", "raw_tp")


class Blames:
    """What a running RunqLat knows beside the waits; where it is not `owned`, whoever opened it closes it."""

    name = "blame"

    def __init__(self, waits: RunqLat, *, owned: bool) -> None:
        self._waits, self._owned, self._closed = waits, owned, False
        self.form = waits.form

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> Seen:
        """`blame` of every cgroup whose waits are known, and the waits for each CPU."""
        if self._closed:
            raise Unavailable("the probe blame is closed", "open it again")
        found = self._waits.blames(live, complete=complete)
        return Seen({number: {"blame": blame} for number, blame in found.items()}, {"cpu_waits": self._waits.by_cpu()})

    def problem(self) -> Unavailable | None:
        return self._waits.blame_problem()

    @property
    def lost_events(self) -> int | None:
        return self._waits.lost_blames

    def close(self) -> None:
        """Detach from the kernel, unless others need the waits. Idempotent."""
        self._closed = True
        if self._owned:
            self._waits.close()


def beside(waits: WaitSource) -> Probe:
    """The probe that shares the program of running waits. Raises Absent where that does not know who ran."""
    return _blames(waits, owned=False)


def open_blame(*, forms: Sequence[str] = FORMS, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX) -> Probe:
    """The probe with a program of its own. Raises Unavailable with reason and remedy where the kernel takes no form of it."""
    waits = open_waits(forms=forms, child_python=child_python, btf=btf)
    try:
        return _blames(waits, owned=True)
    except Unavailable:
        waits.close()
        raise


def _blames(waits: WaitSource, *, owned: bool) -> Probe:
    if isinstance(waits, RunqLat) and waits.blaming:
        return Blames(waits, owned=owned)
    said = f" ({waits.refused[0]})" if isinstance(waits, RunqLat) and waits.refused else ""
    # Why a better form does not run, the waits' own status or the banner says.
    raise Absent(
        f"the form {waits.form} of run-queue waits does not tell who had the CPU{said}",
        "give the agent the capabilities BPF and PERFMON, on Linux 5.5 or later with BTF: tp_btf and raw_tp tell it",
    )

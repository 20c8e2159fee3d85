"""Splits each run-queue wait among the cgroups that had that CPU meanwhile.
The parts of a cgroup add up to the sum of its waits. Kernel threads and autogroups count as the root, higher
scheduling classes and the cgroup's own throttling are parts of their own. Unattributed time (leaving idle, expired
history, removed cgroups, pairs beyond the table's bound) counts as other. Only the forms tp_btf and raw_tp know it;
probes/blame.bpf.h states the accuracy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from api.interfaces import KernelFeatureAbsent, Probe, ProbeReading, RunqLatencySource, Unavailable
from probes.btf import VMLINUX
from probes.loader import CHILD_PYTHON
from probes.runqlat import RunqLatencyProbe, open_runqlat

FORMS = ("tp_btf", "raw_tp")


class BlameProbe:
    """What a running RunqLat knows beside the waits; where it is not `owned`, whoever opened it closes it."""

    name = "blame"

    def __init__(self, waits: RunqLatencyProbe, *, owned: bool) -> None:
        self._waits, self._owned, self._closed = waits, owned, False
        self.form = waits.form

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:
        """`blame` of every cgroup whose waits are known, and the waits for each CPU."""
        if self._closed:
            raise Unavailable("the probe blame is closed", "open it again")
        found = self._waits.blames(live, complete=complete)
        return ProbeReading(
            {number: {"blame": blame} for number, blame in found.items()}, {"cpu_waits": self._waits.by_cpu()}
        )

    def problem(self) -> Unavailable | None:
        return self._waits.blame_problem()

    @property
    def lost_events(self) -> int | None:
        return self._waits.lost_blame_parts

    def close(self) -> None:
        """Detach from the kernel, unless others need the waits. Idempotent."""
        self._closed = True
        if self._owned:
            self._waits.close()


def shared_blame(waits: RunqLatencySource) -> Probe:
    """The probe that shares the program of running waits. Raises Absent where that does not know who ran."""
    return _blame_probe(waits, owned=False)


def open_blame(*, forms: Sequence[str] = FORMS, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX) -> Probe:
    """The probe with a program of its own. Raises Unavailable with reason and remedy where the kernel takes no form of it."""
    waits = open_runqlat(forms=forms, child_python=child_python, btf=btf)
    try:
        return _blame_probe(waits, owned=True)
    except Unavailable:
        waits.close()
        raise


def _blame_probe(waits: RunqLatencySource, *, owned: bool) -> Probe:
    if isinstance(waits, RunqLatencyProbe) and waits.has_blame:
        return BlameProbe(waits, owned=owned)
    said = f" ({waits.refused[0]})" if isinstance(waits, RunqLatencyProbe) and waits.refused else ""
    # Why a better form does not run, the waits' own status or the banner says.
    raise KernelFeatureAbsent(
        f"the form {waits.form} of run-queue waits does not tell who had the CPU{said}",
        "give the agent the capabilities BPF and PERFMON, on Linux 5.5 or later with BTF: tp_btf and raw_tp tell it",
    )

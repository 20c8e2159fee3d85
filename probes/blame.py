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
    """Blame of a running run-queue latency probe, which `close` ends only if it is `owned`."""

    name = "blame"

    def __init__(self, runqlat: RunqLatencyProbe, *, owned: bool) -> None:
        self._runqlat, self._owned, self._closed = runqlat, owned, False
        self.form = runqlat.form

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:
        """Return `blame` of every cgroup with a known latency, and the latency of each CPU."""
        if self._closed:
            raise Unavailable("the probe blame is closed", "open it again")
        by_cgroup = self._runqlat.read_blame(live, complete=complete)
        return ProbeReading(
            {number: {"blame": blame} for number, blame in by_cgroup.items()}, {"cpu_waits": self._runqlat.by_cpu()}
        )

    def problem(self) -> Unavailable | None:
        return self._runqlat.blame_problem()

    @property
    def lost_events(self) -> int | None:
        return self._runqlat.lost_blame_parts

    def close(self) -> None:
        """Detach from the kernel, unless the run-queue latency probe is shared. Idempotent."""
        self._closed = True
        if self._owned:
            self._runqlat.close()


def shared_blame(runqlat: RunqLatencySource) -> Probe:
    """Return the probe that shares a running program. Raises KernelFeatureAbsent if its form does not measure blame."""
    return _blame_probe(runqlat, owned=False)


def open_blame(*, forms: Sequence[str] = FORMS, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX) -> Probe:
    """Open the probe with a program of its own. Raises Unavailable with reason and remedy if the kernel accepts no form."""
    runqlat = open_runqlat(forms=forms, child_python=child_python, btf=btf)
    try:
        return _blame_probe(runqlat, owned=True)
    except Unavailable:
        runqlat.close()
        raise


def _blame_probe(runqlat: RunqLatencySource, *, owned: bool) -> Probe:
    if isinstance(runqlat, RunqLatencyProbe) and runqlat.has_blame:
        return BlameProbe(runqlat, owned=owned)
    refused = f" ({runqlat.refused[0]})" if isinstance(runqlat, RunqLatencyProbe) and runqlat.refused else ""
    # The status of run-queue latency itself, or a startup warning, says why a better form does not run.
    raise KernelFeatureAbsent(
        f"the form {runqlat.form} of run-queue latency does not measure blame{refused}",
        "give the agent the capabilities BPF and PERFMON, on Linux 5.5 or later with BTF: tp_btf and raw_tp measure it",
    )

"""Measures the time of softirqs per CPU and kind: network packets, timers, block I/O, RCU.
The time is monotonic, from entry to exit on one CPU; hard interrupts in between are included. PREEMPT_RT kernels are
refused, because softirqs can preempt each other there. /proc/stat has the sum over kinds only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from api.interfaces import ProbeReading, Unavailable
from probes import kernel_fields
from probes.btf import VMLINUX
from probes.loader import CHILD_PYTHON, Job, Loaded, Program, load_probe, tracepoint_forms
from probes.maps import BpfMap, possible_cpu_ids
from probes.per_cgroup_probe import open_maps

FORMS = ("tp_btf", "raw_tp")
"""Forms in order of preference."""
VECTORS = ("HI", "TIMER", "NET_TX", "NET_RX", "BLOCK", "IRQ_POLL", "TASKLET", "SCHED", "HRTIMER", "RCU")
"""Kinds in the order of include/linux/interrupt.h, spelled as in /proc/softirqs."""
_PROGRAMS = [
    Program("on_entry", "softirq_entry", "dtse_sirq_in", arguments=kernel_fields.SOFTIRQ_ARGUMENTS),
    Program("on_exit", "softirq_exit", "dtse_sirq_out", arguments=kernel_fields.SOFTIRQ_ARGUMENTS),
]
_FORMS = tracepoint_forms(_PROGRAMS, {}, kernel_fields.PREEMPT_RT_FIELDS)


class SoftIrqProbe:
    """The running probe: a Probe (`api.interfaces`) of the node alone."""

    name = "softirq"
    lost_events = None

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self.form = loaded.form
        self._cpus = possible_cpu_ids()
        self._counters: BpfMap | None = BpfMap(*loaded.maps["softirq"], len(self._cpus))

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:  # noqa: ARG002 - the port's signature
        """Return nanoseconds by CPU and kind since the probe was opened. Raises Unavailable once closed."""
        with open_maps(self.name, is_open=self._counters is not None):
            assert self._counters is not None
            (per_cpu,) = self._counters.rows([0])["ns"].tolist()
        return ProbeReading(node={"softirq_ns": decode(self._cpus, per_cpu)})

    def problem(self) -> Unavailable | None:
        """Return None: each kind has a counter, so nothing can be lost."""
        return None

    def close(self) -> None:
        """Detach from the kernel. Idempotent."""
        self._counters = None
        self._loaded.close()


def decode(cpus: Sequence[int], rows: Sequence[Sequence[int]]) -> dict[int, dict[str, int]]:
    """Decode a row per CPU with a value per kind; CPUs that never ran a softirq are left out."""
    return {cpu: dict(zip(VECTORS, row, strict=True)) for cpu, row in zip(cpus, rows, strict=True) if any(row)}


def job(forms: Sequence[str], btf: Path = VMLINUX) -> Job:
    """Return the loader's job."""
    return Job(
        sources=[Path(__file__).with_name("softirq.bpf.c")],
        forms=[_FORMS[name] for name in forms],
        maps=["softirq"],
        constants={"VECTORS": len(VECTORS)},
        btf=btf,
        remedy="boot Linux 5.5 or later, without PREEMPT_RT; without the probe, /proc/stat has the sum of all kinds",
    )


def open_softirq(
    *, forms: Sequence[str] = FORMS, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX
) -> SoftIrqProbe:
    """Start the probe in the first form that the kernel accepts. Raises Unavailable if it accepts none."""
    return load_probe(job(forms, btf), SoftIrqProbe, child_python=child_python)

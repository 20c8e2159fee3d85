"""Who wakes whom: wakeups of each cgroup's tasks by the cgroup that woke them, and the time from each until the task ran.

What the numbers mean: every wakeup counts once, where the waker does it (sched_waking, and sched_wakeup_new for a task that is
made). The time is monotonic, from there until the scheduler switches the task in, on whatever CPU; a task that was woken before
it had left its CPU goes on at once, and its wakeup took 0. It is the latency of one hop: like run-queue waits it has time that
is throttled by a quota, unlike them what an interrupt to another CPU and the way out of idle take, and nothing of waits after a
preemption. A task belongs to the cgroup whose CPU weight it has, autogroups to the root; kernel threads are a class of their
own as wakers, and the root's tasks when they are woken.

Wakeups in interrupts, hard and soft, are nobody's: whatever task they interrupted has nothing to do with them. But packets that
a task sends over loopback, or to another network namespace of this node, are received in a softirq that the task itself has
asked for: wakeups there are the sender's, so that chains of services that talk by TCP on one node are seen. Where several
asked one CPU for it before it came to that, a network device among them, and where packets were left over for the next
softirq, wakeups count as an interrupt's.

What it cannot see: why somebody was woken (a waker need not have sent anything: releasing a lock wakes too); which packets a
network device brings while a sender's are being received, in the same softirq: what they wake is the sender's; wakeups that
have not led to a switch yet; and interrupts that run in threads, which are kernel threads here. PREEMPT_RT kernels are refused.
Lost is a wakeup whose task shares the low bits of its pid with another one that was woken meanwhile; and, since Linux 6.2, one
in an interrupt that comes while a wakeup on that CPU is being counted, which only a task that wakes itself leaves room for.

It costs something at each wakeup and each switch, and most people do not need it all the time, so the agent loads it only where
the setting `probes` names it. docs/adding-a-probe.md says what it costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from api.facts import Durations, Wakeups
from api.histograms import SLOTS
from api.ports import Seen, Unavailable
from probes import fields
from probes.btf import VMLINUX
from probes.groups import places_for
from probes.loader import CHILD_PYTHON, Form, Job, Loaded, Program, opened
from probes.maps import cpu_numbers
from probes.pairs import PAIR_BYTES, Ledger, pair_bits
from probes.tabled import Tabled, durations

FORMS = ("tp_btf", "raw_tp")
"""In order of preference."""
SEATS = 1 << 17
"""Tasks that can be remembered between their wakeup and their switch, by the low bits of their pid: 2 MiB."""
MAX_BYTES = 16 << 20
"""Bound of the table of pairs over all CPUs."""
NEVER = Durations(sum_ns=0, count=0, slots=(0,) * SLOTS)
NOTHING = Wakeups(by_cgroup={}, interrupt=NEVER, kernel_thread=NEVER, other=NEVER)
_HIST = 1 + SLOTS
_CLASSES = 3
"""Histograms of struct woken."""
_FIELDS = {
    **fields.GROUP,
    "PID": [("task_struct", "pid", 4)],
    "FLAGS": [("task_struct", "flags", 4)],
    "ON_CPU": [("task_struct", "on_cpu", 4)],
    "ON_RQ": [("task_struct", "on_rq", 4)],
    "CFS_RQ": [("task_struct", "se.cfs_rq", 8)],
    "RQ": [("cfs_rq", "rq", 8)],
}
_PREEMPTION = {
    **fields.PREEMPT_RT,
    # Of each task (arm64, riscv), or of each CPU: x86, in one struct with others from 64701838bf05 (6.2) to 6.14.
    "PREEMPT_COUNT": [
        ("task_struct", "thread_info.preempt.count", 4),
        ("task_struct", "thread_info.preempt_count", 4),
    ],
    "CPU_PREEMPT_COUNT": [("", "__preempt_count", 4), ("", "pcpu_hot", 64)],
    "HOT_PREEMPT_COUNT": [("pcpu_hot", "preempt_count", 4)],
    "RUNQUEUES": [("", "runqueues", 0)],
}
_PROGRAMS = [
    Program("on_waking", "sched_waking", "dtse_waking", arguments=fields.TASK),
    Program("on_new", "sched_wakeup_new", "dtse_wake_new", arguments=fields.TASK),
    Program("on_switch", "sched_switch", "dtse_wake_run", arguments=fields.SWITCH),
    Program("on_raise", "softirq_raise", "dtse_wake_ask", arguments=fields.VECTOR),
    Program("on_softirq", "softirq_entry", "dtse_wake_in", arguments=fields.VECTOR),
    Program("on_softirq_end", "softirq_exit", "dtse_wake_out", arguments=fields.VECTOR),
]
_FORMS = {
    "tp_btf": Form(
        name="tp_btf",
        typed=True,
        fields=_FIELDS,
        optional=_PREEMPTION,
        programs=_PROGRAMS,
        constants={"TYPED": 1},
    ),
    "raw_tp": Form(name="raw_tp", typed=False, fields=_FIELDS, optional=_PREEMPTION, programs=_PROGRAMS),
}


class Wakers(Tabled):
    """The running probe: a Probe (`api.ports`)."""

    name = "wakeups"

    def __init__(self, loaded: Loaded) -> None:
        self._ledger = Ledger(loaded, "wakeups", "who wakes whom")
        super().__init__(loaded, self.name, self.name)

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> Seen:
        """Wakeups by cgroup id of the woken since the probe was opened. Wakers that `live` does not have are not named.
        Raises Unavailable once closed."""
        with self.reading() as table:
            # Pairs first: then every tag that is found there and not in the table is of a cgroup that is gone.
            pairs = self._ledger.read()
            counted = self.count(live, complete=complete)
            settled = self._ledger.balance(pairs, table.owners, live)
        found = {
            number: decode(row, settled.by_path.get(number, {}), settled.unnamed.get(number))
            for number, row in counted.by_cgroup().items()
        }
        return Seen(counted.filled("wakeups", found, live, NOTHING))

    def problem(self) -> Unavailable | None:
        """What could not be counted lately, as of the latest read."""
        return super().problem() or self._ledger.problem()

    @property
    def lost_events(self) -> int | None:
        """Those of every probe with a table, and wakeups that count as other because they found no place."""
        return (super().lost_events or 0) + self._ledger.without_place.total

    def close(self) -> None:
        """Detach from the kernel. Idempotent."""
        self._ledger.close()
        super().close()


def decode(row: Sequence[int], by_path: Mapping[str, Sequence[int]], unnamed: Sequence[int] | None) -> Wakeups:
    """Pure: a row of `struct woken`, and the rows of wakers, named and without a name, to wakeups."""
    interrupt, kernel_thread, other = (row[at : at + _HIST] for at in range(0, _CLASSES * _HIST, _HIST))
    if unnamed is not None:
        other = [known + more for known, more in zip(other, unnamed, strict=True)]
    return Wakeups(
        by_cgroup={path: durations(value) for path, value in by_path.items()},
        interrupt=durations(interrupt),
        kernel_thread=durations(kernel_thread),
        other=durations(other),
    )


def job(forms: Sequence[str], cpus: int, btf: Path = VMLINUX) -> Job:
    """What the child is asked to do; CPU numbers are below `cpus`."""
    here = Path(__file__).parent
    return Job(
        sources=[here / name for name in ("common.bpf.h", "pairs.bpf.h", "wakeups.bpf.c")],
        forms=[_FORMS[name] for name in forms],
        maps=["wakeups", "groups", "owners", "lost", "pairs", "crowded"],
        constants={
            "SLOTS": SLOTS,
            "SEATS": SEATS,
            "PLACES": places_for(cpus, 8 * _CLASSES * _HIST),
            "CPUS": cpus,
            "PAIRS": 1,
            "PAIR_BITS": pair_bits(cpus, PAIR_BYTES + 8 * SLOTS, MAX_BYTES),
            "PAIR_SLOTS": SLOTS,
        },
        btf=btf,
        remedy="boot Linux 5.10 or later without PREEMPT_RT, with its per-CPU variables in BTF (CONFIG_DEBUG_INFO_BTF, pahole"
        " 1.18 or later)",
    )


def open_wakeups(*, forms: Sequence[str] = FORMS, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX) -> Wakers:
    """Start the probe in the first form that the kernel takes. Raises Unavailable with reason and remedy if it takes none."""
    return opened(job(forms, cpu_numbers(), btf), Wakers, child_python=child_python)

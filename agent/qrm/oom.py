"""Who goes first when the kernel runs out of memory: oom_priority as oom_score_adj, for every listed container. Pure.

Katalyst leaves priorities in a map for an OOM killer in BPF, which takes a kernel that has one. Everywhere else there is
oom_score_adj: thousandths of the memory that a process counts as using beside what it does (mm/oom_kill.c, oom_badness()).
So a reclaimed pod goes before everybody who uses less than nine tenths of the memory, and each level of online pods bears
three tenths more than the one below before one of it has to go.
"""

from __future__ import annotations

from collections.abc import Iterator

from api.decisions import Decision
from api.enhancements import OOM_NEVER
from api.knobs import Knob, Verdict
from api.samples import Snapshot

NEVER_KILLED = -1000
"""OOM_SCORE_ADJ_MIN of include/uapi/linux/oom.h: the kernel does not take it at all."""
RECLAIMED_FROM, STEP = 900, 3


def score(priority: int) -> int:
    """oom_score_adj of a process: the lower the priority, the higher. 901 to 1000 of reclaimed pods, whose priorities are
    below 0; 0 to -897 of online and system pods; and -1000 of those that must never be killed."""
    if priority >= OOM_NEVER:
        return NEVER_KILLED
    return RECLAIMED_FROM - priority if priority < 0 else -STEP * priority


def score_decisions(snapshot: Snapshot) -> Iterator[Decision]:
    """For every listed container that is there, what its processes are to have."""
    for pod in snapshot.pods:
        priority = pod.enhancements.oom_priority
        value = score(priority)
        goes = "the OOM killer never takes them" if value == NEVER_KILLED else "the highest goes first"
        text = f"Processes of {pod.qos.value} with oom_priority {priority} have {value}: {goes}."
        verdict = Verdict(rule="oom_priority", text=text, inputs={"oom_priority": priority})
        for container in pod.containers:
            sample = snapshot.cgroups.get(container.cgroup)
            if sample is not None:
                yield Decision(
                    cgroup=container.cgroup,
                    cgroup_id=sample.id,
                    pod=pod.key,
                    knob=Knob.OOM_SCORE_ADJ,
                    value=str(value),
                    verdict=verdict,
                )

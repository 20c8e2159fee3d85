"""Decides `oom_score_adj` of every listed container from its Katalyst `oom_priority`. Pure.
Katalyst passes OOM priorities to a BPF OOM killer; `oom_score_adj` (mm/oom_kill.c, oom_badness()) works on every
kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

from api.annotations import OOM_PRIORITY_NEVER
from api.decision import Decision
from api.knobs import Knob, Reason
from api.snapshot import Snapshot

NEVER_KILLED = -1000
"""OOM_SCORE_ADJ_MIN of include/uapi/linux/oom.h: the kernel does not take it at all."""
RECLAIMED_BASE_SCORE, ONLINE_SCORE_STEP = 900, 3


def oom_score_adj(priority: int) -> int:
    """oom_score_adj of a process: the lower the priority, the higher. 901 to 1000 of reclaimed pods, whose priorities are
    below 0; 0 to -897 of online and system pods; and -1000 of those that must never be killed."""
    if priority >= OOM_PRIORITY_NEVER:
        return NEVER_KILLED
    return RECLAIMED_BASE_SCORE - priority if priority < 0 else -ONLINE_SCORE_STEP * priority


def decide_oom_scores(snapshot: Snapshot) -> Iterator[Decision]:
    """For every listed container that is there, what its processes are to have."""
    for pod in snapshot.pods:
        priority = pod.enhancements.oom_priority
        value = oom_score_adj(priority)
        goes = "the OOM killer never takes them" if value == NEVER_KILLED else "the highest goes first"
        text = f"Processes of {pod.qos.value} with oom_priority {priority} have {value}: {goes}."
        verdict = Reason(rule="oom_priority", text=text, inputs={"oom_priority": priority})
        for container in pod.containers:
            sample = snapshot.cgroups.get(container.cgroup)
            if sample is not None:
                yield Decision(
                    cgroup=container.cgroup,
                    cgroup_id=sample.id,
                    pod=pod.key,
                    knob=Knob.OOM_SCORE_ADJ,
                    value=str(value),
                    reason=verdict,
                )

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
"""OOM_SCORE_ADJ_MIN (include/uapi/linux/oom.h): the OOM killer never selects such a process."""
RECLAIMED_BASE_SCORE, ONLINE_SCORE_STEP = 900, 3


def oom_score_adj(priority: int) -> int:
    """Return `oom_score_adj` for an OOM priority: the lower the priority, the higher the score. 901 to 1000 for
    reclaimed pods (priority below 0), 0 to -897 for online and system pods, -1000 for processes that must never be
    killed."""
    if priority >= OOM_PRIORITY_NEVER:
        return NEVER_KILLED
    return RECLAIMED_BASE_SCORE - priority if priority < 0 else -ONLINE_SCORE_STEP * priority


def decide_oom_scores(snapshot: Snapshot) -> Iterator[Decision]:
    """Yield the decision for every listed container that has a cgroup."""
    for pod in snapshot.pods:
        priority = pod.enhancements.oom_priority
        value = oom_score_adj(priority)
        effect = (
            "the OOM killer never takes them" if value == NEVER_KILLED else "the OOM killer takes the highest first"
        )
        text = f"oom_score_adj of {pod.qos.value} with oom_priority {priority} is {value}: {effect}."
        reason = Reason(rule="oom_priority", text=text, inputs={"oom_priority": priority})
        for container in pod.containers:
            sample = snapshot.cgroups.get(container.cgroup)
            if sample is not None:
                yield Decision(
                    cgroup=container.cgroup,
                    cgroup_id=sample.id,
                    pod=pod.key,
                    knob=Knob.OOM_SCORE_ADJ,
                    value=str(value),
                    reason=reason,
                )

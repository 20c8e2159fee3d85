"""Recognizes repairs that repeat: another program writes the same value periodically, and the agent writes its own again."""

from __future__ import annotations

from collections import OrderedDict

from api.decision import Outcome, OutcomeStatus

RepairKey = tuple[int, str | None, str]
"""Inode of the cgroup, the other program's value and the agent's."""


class RepeatedRepairs:
    """The latest repair of each knob. The kubelet clears cpu.idle of its classes every minute
    (pkg/kubelet/cm/qos_container_manager_linux.go, periodicQOSCgroupUpdateInterval): 1,440 equal entries a day."""

    def __init__(self, max_knobs: int) -> None:
        """Repairs of at most `max_knobs` knobs are remembered."""
        self._latest: OrderedDict[tuple[str, str], RepairKey] = OrderedDict()
        self._max_knobs = max_knobs

    def includes(self, outcome: Outcome) -> bool:
        """Return whether the outcome repeats the latest change of its knob, which was a repair from and to the same
        values. Each outcome has to be passed once."""
        if outcome.status is OutcomeStatus.UNCHANGED:
            return False
        decision = outcome.decision
        knob = (decision.cgroup, decision.knob.value)
        previous = self._latest.pop(knob, None)
        if not outcome.repaired:
            return False
        repair: RepairKey = (decision.cgroup_id, outcome.before, decision.value)
        self._latest[knob] = repair
        if len(self._latest) > self._max_knobs:
            self._latest.popitem(last=False)
        return repair == previous

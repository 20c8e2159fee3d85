"""Writes one line to the agent's log for each change of a knob, a pod list or a component's health.
Unchanged states are not repeated.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping

from agent.journal.evictions import EvictionLog
from agent.journal.repeated_repairs import RepeatedRepairs
from api.advice import QUOTA_HELPED
from api.decision import Cycle, Outcome, OutcomeStatus
from api.knobs import Reason
from api.snapshot import ComponentHealth

log = logging.getLogger("dioptase")
MAX_KNOBS = 8192
"""Maximum number of knobs whose last line is remembered; cgroups come and go while the agent runs."""


class CycleLog:
    """Sink of cycles that logs changes."""

    def __init__(self) -> None:
        self._logged: OrderedDict[tuple[str, str], tuple[OutcomeStatus, str, str]] = OrderedDict()
        self._repairs = RepeatedRepairs(MAX_KNOBS)
        self._failing: dict[str, str] = {}
        self._rejected = frozenset[str]()
        self._pods: tuple[str, ...] | None = None
        self._evictions = EvictionLog()

    def publish(self, cycle: Cycle) -> None:
        """Log what is new in this cycle. Never raises."""
        if self._pods is None:
            for line in cycle.startup_warnings:
                log.warning("%s", line)
        self._log_pods(cycle)
        self._log_sources(cycle.snapshot.sources)
        self._log_rejected({} if cycle.advice is None else cycle.advice.rejected)
        for outcome in cycle.done:
            self._log_outcome(outcome)
        if cycle.advice is not None and cycle.advice.reason.rule == QUOTA_HELPED:
            log.info("%s", cycle.advice.reason.text)
        self._evictions.publish(cycle)

    def _log_pods(self, cycle: Cycle) -> None:
        pods = tuple(f"{pod.key} ({pod.qos.value})" for pod in cycle.snapshot.pods)
        if pods != self._pods:
            self._pods = pods
            shown = ", ".join(pods[:10]) + (f" and {len(pods) - 10} more" if len(pods) > 10 else "")
            log.info("act %s, pods: %s", cycle.act.value, shown or "none")

    def _log_sources(self, sources: tuple[ComponentHealth, ...]) -> None:
        failing = {source.name: f"{source.error}: {source.remedy}" for source in sources if not source.ok}
        for name, text in failing.items():
            if self._failing.get(name) != text:
                log.warning("%s: %s", name, text)
        for name in self._failing.keys() - failing.keys():
            log.info("%s: works again", name)
        self._failing = failing

    def _log_rejected(self, rejected: Mapping[str, Reason]) -> None:
        reasons = frozenset(rejected)
        for pod in sorted(reasons - self._rejected):
            log.warning("request of pod %s cannot be satisfied: %s", pod, rejected[pod].text)
        for pod in sorted(self._rejected - reasons):
            log.info("request of pod %s is satisfied, or the pod has ended", pod)
        self._rejected = reasons

    def _log_outcome(self, outcome: Outcome) -> None:
        if self._repairs.includes(outcome):
            return
        decision = outcome.decision
        key, state = (decision.cgroup, decision.knob.value), (outcome.status, decision.value, outcome.error)
        if self._logged.get(key) == state and outcome.status is not OutcomeStatus.APPLIED:
            return
        self._logged[key] = state
        self._logged.move_to_end(key)
        if len(self._logged) > MAX_KNOBS:
            self._logged.popitem(last=False)
        if outcome.status is OutcomeStatus.UNCHANGED:
            return
        level = logging.INFO if outcome.status in (OutcomeStatus.APPLIED, OutcomeStatus.DRY_RUN) else logging.WARNING
        log.log(
            level,
            "%s: %s %s -> %s (%s) %s",
            decision.cgroup,
            decision.knob.value,
            outcome.before,
            decision.value,
            "repaired" if outcome.repaired else outcome.status.value,
            outcome.error or decision.reason.text,
        )

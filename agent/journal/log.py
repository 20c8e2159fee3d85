"""Writes one line to the agent's log for each change of a knob, a pod list or a component's health.
Nothing is repeated while it stays the same.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping

from agent.journal.evictions import EvictionLog
from api.decision import Cycle, Outcome, OutcomeStatus
from api.knobs import Reason
from api.snapshot import ComponentHealth

log = logging.getLogger("dioptase")
MAX_KNOBS = 8192
"""Knobs of which is known what was said last; cgroups come and go for as long as the agent runs."""


class CycleLog:
    """Sink of rounds. Remembers what it said last of each knob and source, so that nothing is said twice in a row."""

    def __init__(self) -> None:
        self._said: OrderedDict[tuple[str, str], tuple[OutcomeStatus, str, str]] = OrderedDict()
        self._failing: dict[str, str] = {}
        self._rejected = frozenset[str]()
        self._pods: tuple[str, ...] | None = None
        self._evictions = EvictionLog()

    def publish(self, finished: Cycle) -> None:
        """Log what is new in this round. Never raises."""
        if self._pods is None:
            for line in finished.startup_warnings:
                log.warning("%s", line)
        self._tell_pods(finished)
        self._tell_sources(finished.snapshot.sources)
        self._tell_rejected({} if finished.advice is None else finished.advice.rejected)
        for outcome in finished.done:
            self._tell(outcome)
        self._evictions.publish(finished)

    def _tell_pods(self, finished: Cycle) -> None:
        pods = tuple(f"{pod.key} ({pod.qos.value})" for pod in finished.snapshot.pods)
        if pods != self._pods:
            self._pods = pods
            shown = ", ".join(pods[:10]) + (f" and {len(pods) - 10} more" if len(pods) > 10 else "")
            log.info("act %s, pods: %s", finished.act.value, shown or "none")

    def _tell_sources(self, sources: tuple[ComponentHealth, ...]) -> None:
        failing = {source.name: f"{source.error}: {source.remedy}" for source in sources if not source.ok}
        for name, text in failing.items():
            if self._failing.get(name) != text:
                log.warning("%s: %s", name, text)
        for name in self._failing.keys() - failing.keys():
            log.info("%s: works again", name)
        self._failing = failing

    def _tell_rejected(self, rejected: Mapping[str, Reason]) -> None:
        reasons = frozenset(rejected)
        for pod in sorted(reasons - self._rejected):
            log.warning("%s does not get what it asks for: %s", pod, rejected[pod].text)
        for pod in sorted(self._rejected - reasons):
            log.info("%s: what it asks for is there, or it is gone", pod)
        self._rejected = reasons

    def _tell(self, outcome: Outcome) -> None:
        decision = outcome.decision
        key, said = (decision.cgroup, decision.knob.value), (outcome.status, decision.value, outcome.error)
        if self._said.get(key) == said and outcome.status is not OutcomeStatus.APPLIED:
            return
        self._said[key] = said
        self._said.move_to_end(key)
        if len(self._said) > MAX_KNOBS:
            self._said.popitem(last=False)
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

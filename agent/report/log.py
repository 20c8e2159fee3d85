"""The agent's own log: what a person who started it in a terminal, or reads the service manager's journal, gets to know.

One line for each change, dry or real, for whatever stops or starts working, and nothing while all stays as it is.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping

from agent.report.evictions import EvictionLog
from api.decisions import Outcome, Round, Status
from api.knobs import Verdict
from api.samples import SourceStatus

log = logging.getLogger("dioptase")
REMEMBERED = 8192
"""Knobs of which is known what was said last; cgroups come and go for as long as the agent runs."""


class RoundLog:
    """Sink of rounds. Remembers what it said last of each knob and source, so that nothing is said twice in a row."""

    def __init__(self) -> None:
        self._said: OrderedDict[tuple[str, str], tuple[Status, str, str]] = OrderedDict()
        self._failing: dict[str, str] = {}
        self._rejected = frozenset[str]()
        self._pods: tuple[str, ...] | None = None
        self._evictions = EvictionLog()

    def publish(self, finished: Round) -> None:
        """Log what is new in this round. Never raises."""
        if self._pods is None:
            for line in finished.banner:
                log.warning("%s", line)
        self._tell_pods(finished)
        self._tell_sources(finished.snapshot.sources)
        self._tell_rejected({} if finished.advice is None else finished.advice.rejected)
        for outcome in finished.done:
            self._tell(outcome)
        self._evictions.publish(finished)

    def _tell_pods(self, finished: Round) -> None:
        pods = tuple(f"{pod.key} ({pod.qos.value})" for pod in finished.snapshot.pods)
        if pods != self._pods:
            self._pods = pods
            shown = ", ".join(pods[:10]) + (f" and {len(pods) - 10} more" if len(pods) > 10 else "")
            log.info("act %s, pods: %s", finished.act.value, shown or "none")

    def _tell_sources(self, sources: tuple[SourceStatus, ...]) -> None:
        failing = {source.name: f"{source.error}: {source.remedy}" for source in sources if not source.ok}
        for name, text in failing.items():
            if self._failing.get(name) != text:
                log.warning("%s: %s", name, text)
        for name in self._failing.keys() - failing.keys():
            log.info("%s: works again", name)
        self._failing = failing

    def _tell_rejected(self, rejected: Mapping[str, Verdict]) -> None:
        reasons = frozenset(rejected)
        for pod in sorted(reasons - self._rejected):
            log.warning("%s does not get what it asks for: %s", pod, rejected[pod].text)
        for pod in sorted(self._rejected - reasons):
            log.info("%s: what it asks for is there, or it is gone", pod)
        self._rejected = reasons

    def _tell(self, outcome: Outcome) -> None:
        decision = outcome.decision
        key, said = (decision.cgroup, decision.knob.value), (outcome.status, decision.value, outcome.error)
        if self._said.get(key) == said and outcome.status is not Status.APPLIED:
            return
        self._said[key] = said
        self._said.move_to_end(key)
        if len(self._said) > REMEMBERED:
            self._said.popitem(last=False)
        if outcome.status is Status.UNCHANGED:
            return
        level = logging.INFO if outcome.status in (Status.APPLIED, Status.DRY_RUN) else logging.WARNING
        log.log(
            level,
            "%s: %s %s -> %s (%s) %s",
            decision.cgroup,
            decision.knob.value,
            outcome.before,
            decision.value,
            "repaired" if outcome.repaired else outcome.status.value,
            outcome.error or decision.verdict.text,
        )

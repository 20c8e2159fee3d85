"""Restores all original values at the end of the agent, and reports the result to the journal and the log.
It never raises: `dioptase reset` restores what is left.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from agent.qrm.actuator.originals import OriginalsJournal
from agent.qrm.actuator.writer import KnobWriter
from api.decision import Cycle, Outcome, OutcomeStatus
from api.interfaces import CycleSink, Unavailable

if TYPE_CHECKING:
    from agent.qrm.actuator.node_knobs import NodeKnobs

log = logging.getLogger("dioptase")


def restore_all(
    originals: OriginalsJournal | None,
    files: KnobWriter,
    node_knobs: NodeKnobs | None,
    latest: Cycle | None,
    journal: CycleSink,
    late_outcomes: tuple[Outcome, ...] = (),
) -> int:
    """Restore everything; return how many values could not be restored. Never raises. `late_outcomes` are those
    since the last cycle. `dioptase reset` tries again what is left."""
    if originals is None:
        return 0
    outcomes, remaining = originals.restore(files), 0
    if node_knobs is not None:
        node_outcomes, remaining = _restore_node_knobs(node_knobs)
        outcomes += node_outcomes
    if latest is not None:
        journal.publish(
            msgspec.structs.replace(
                latest, trigger="end", advice=None, runtime_outcomes=late_outcomes, outcomes=outcomes
            )
        )
    restored_count = sum(outcome.status in (OutcomeStatus.APPLIED, OutcomeStatus.UNCHANGED) for outcome in outcomes)
    log.info("%d changed values were put back", restored_count)
    for outcome in outcomes:
        if outcome.error and outcome.status is not OutcomeStatus.VANISHED:
            log.error("%s %s: %s", outcome.decision.cgroup, outcome.decision.knob.value, outcome.error)
    for message in originals.messages:
        log.warning("%s", message)
    remaining += len(originals.entries())
    if remaining:
        log.error("%d values could not be put back; run `dioptase reset`", remaining)
    return remaining


def _restore_node_knobs(node_knobs: NodeKnobs) -> tuple[tuple[Outcome, ...], int]:
    try:
        outcomes = node_knobs.restore()
    except Unavailable as error:
        log.error("%s: %s", error.reason, error.remedy)
        return (), 1
    return outcomes, sum(outcome.status is OutcomeStatus.REFUSED for outcome in outcomes)

"""The end of the agent: every original back in its place, and what became of it in the journal and in the log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from agent.qrm.knobs import KnobFiles
from agent.qrm.originals import Originals
from api.decisions import Outcome, Round, Status
from api.ports import Sink, Unavailable

if TYPE_CHECKING:
    from agent.qrm.node_knobs import NodeKnobs

log = logging.getLogger("dioptase")


def put_back(
    originals: Originals | None,
    files: KnobFiles,
    node_knobs: NodeKnobs | None,
    latest: Round | None,
    journal: Sink,
    made: tuple[Outcome, ...] = (),
) -> int:
    """Restore everything, what was `made` since the latest round too; how many values could not be. Never raises: what is left,
    `dioptase reset` tries again."""
    if originals is None:
        return 0
    outcomes, left = originals.restore(files), 0
    if node_knobs is not None:
        more, left = _of_the_node(node_knobs)
        outcomes += more
    if latest is not None:
        journal.publish(msgspec.structs.replace(latest, trigger="end", advice=None, made=made, outcomes=outcomes))
    done = sum(outcome.status in (Status.APPLIED, Status.UNCHANGED) for outcome in outcomes)
    log.info("%d changed values were put back", done)
    for outcome in outcomes:
        if outcome.error and outcome.status is not Status.VANISHED:
            log.error("%s %s: %s", outcome.decision.cgroup, outcome.decision.knob.value, outcome.error)
    for message in originals.messages:
        log.warning("%s", message)
    left += len(originals.entries())
    if left:
        log.error("%d values could not be put back; run `dioptase reset`", left)
    return left


def _of_the_node(node_knobs: NodeKnobs) -> tuple[tuple[Outcome, ...], int]:
    try:
        outcomes = node_knobs.restore()
    except Unavailable as error:
        log.error("%s: %s", error.reason, error.remedy)
        return (), 1
    return outcomes, sum(outcome.status is Status.REFUSED for outcome in outcomes)

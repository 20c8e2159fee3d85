"""Pending reclaimed pods and the latest placements of reclaimed pods, as sections of `kubectl dioptase top`. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from api.placement import placement_score
from api.quantity import format_count
from api.text import printable
from cli import formats
from cli.fleet.pending_pods import PendingReason, pending_reasons
from cli.fleet.reclaimed_pods import ClusterObjects, PlacedPod
from cli.tables import TableHeading, format_table, wrap_text

MAX_SHOWN_REASONS, MAX_SHOWN_PLACEMENTS = 10, 5
"""Lines of each section below the table of nodes; `top pending` and `top placements` show all."""
MIN_REASON_WIDTH = 40


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """A reclaimed pod that got a node and has not ended."""

    pod: str
    node: str
    placed_s: float
    """Time at which it got the node, in seconds since the epoch."""
    scheduler: str
    score: float | None = None
    """Score of the node for this pod, 0 to 100, which the scheduler extender wrote; None for pods of other schedulers."""


def latest_placements(pods: Sequence[PlacedPod], nodes: Collection[str] | None = None) -> list[Placement]:
    """Return the placements of reclaimed pods, the latest first; `nodes` limits them to these nodes."""
    results = [
        Placement(
            pod=pod.key,
            node=pod.spec.node_name,
            placed_s=placed_s,
            scheduler=pod.spec.scheduler_name,
            score=placement_score(pod.metadata.annotations),
        )
        for pod in pods
        if pod.is_reclaimed
        and (placed_s := pod.placed_s) is not None
        and (nodes is None or pod.spec.node_name in nodes)
    ]
    return sorted(results, key=lambda placement: (-placement.placed_s, placement.pod))


def pending_table(
    reasons: Sequence[PendingReason], now_s: float, width: int | None, limit: int | None = None
) -> list[str]:
    """Return a line for each reason: one pod, the number of pods with this reason, the age of the oldest of them, and the
    reason, wrapped to `width` cells. After `limit` reasons, one line has the number of the others."""
    if not reasons:
        return ["No reclaimed pod is pending."]
    shown = reasons[:limit]
    heads = [TableHeading("PENDING"), TableHeading("PODS", right=True), TableHeading("AGE", right=True)]
    rows = [
        [
            printable(reason.pods[0]),
            formats.integer(len(reason.pods)),
            formats.ABSENT if reason.since_s is None else formats.age(now_s - reason.since_s),
        ]
        for reason in shown
    ]
    lines = format_table([*heads, TableHeading("REASON")], [[*row, ""] for row in rows])
    start = len(lines[0]) - len("REASON")
    result = lines[:1]
    for line, reason in zip(lines[1:], shown, strict=True):
        texts = _wrapped(printable(reason.detail), width, start)
        result += [line.ljust(start) + texts[0], *(" " * start + text for text in texts[1:])]
    if others := reasons[len(shown) :]:
        count = format_count(sum(len(reason.pods) for reason in others), "pod")
        result.append(f"and {count} for {format_count(len(others), 'other reason')}: kubectl dioptase top pending")
    return result


def _wrapped(text: str, width: int | None, start: int) -> list[str]:
    return [text] if width is None else wrap_text(text, max(width - start, MIN_REASON_WIDTH))


def placement_table(placements: Sequence[Placement], now_s: float, limit: int | None = None) -> list[str]:
    """Return a line for each placement, the latest first, at most `limit`."""
    if not placements:
        return ["No reclaimed pod has a node."]
    heads = [TableHeading("PLACED"), TableHeading("NODE"), TableHeading("AGE", right=True)]
    heads.append(TableHeading("SCORE", right=True))
    rows = [
        [
            printable(placement.pod),
            printable(placement.node),
            formats.age(now_s - placement.placed_s),
            formats.ABSENT if placement.score is None else formats.fixed(placement.score, 0),
        ]
        for placement in placements[:limit]
    ]
    return format_table(heads, rows)


def pending_of(objects: ClusterObjects, now_s: float) -> tuple[PendingReason, ...]:
    """Return why reclaimed pods of the cluster are pending."""
    return pending_reasons(objects.pods or (), objects.nodes or (), now_s, objects.cnrs or ())


def overview_lines(
    objects: ClusterObjects, nodes: Collection[str] | None, now_s: float, width: int | None, *, with_pending: bool
) -> list[str]:
    """Return the sections below the table of nodes, each after an empty line, and lists that failed with their remedy. `nodes`
    limits the placements to these nodes."""
    lines = []
    if objects.pods is not None:
        if with_pending:
            lines += ["", *pending_table(pending_of(objects, now_s), now_s, width, MAX_SHOWN_REASONS)]
        lines += ["", *placement_table(latest_placements(objects.pods, nodes), now_s, MAX_SHOWN_PLACEMENTS)]
    if objects.problem:
        lines += ["", f"not shown: {printable(objects.problem)}", f"  remedy: {objects.remedy}"]
    return lines

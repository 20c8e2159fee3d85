"""Latest moves, for the cool-downs that prevent moves to and fro between nodes. Pure.
They are stored in an annotation of a Lease before a pod is evicted, so that the next leader continues the cool-downs, even
after a crash."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

MOVES_ANNOTATION = "dioptase.io/descheduler-moves"
MAX_ANNOTATION_CHARS = 200_000
"""The API server accepts 256 KiB of annotations."""


class MoveHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the latest moves, in seconds since the epoch."""

    workloads: Mapping[str, float] = {}
    """Also of evictions that were refused."""
    sources: Mapping[str, float] = {}
    targets: Mapping[str, float] = {}

    def with_move(self, workload: str, source: str, target: str, at_s: float) -> MoveHistory:
        """Return the history with one more move."""
        return MoveHistory(
            workloads={**self.workloads, workload: at_s},
            sources={**self.sources, source: at_s},
            targets={**self.targets, target: at_s},
        )

    def with_attempt(self, workload: str, at_s: float) -> MoveHistory:
        """Return the history with a refused eviction, after which only the workload rests."""
        return MoveHistory(workloads={**self.workloads, workload: at_s}, sources=self.sources, targets=self.targets)

    def within(self, node_cooldown_s: float, workload_cooldown_s: float, now_s: float) -> MoveHistory:
        """Return the moves whose cool-down has not ended. A move with a time that is further in the future than its cool-down
        is long was written with a wrong clock, and is left out."""
        return MoveHistory(
            workloads=_recent(self.workloads, workload_cooldown_s, now_s),
            sources=_recent(self.sources, node_cooldown_s, now_s),
            targets=_recent(self.targets, node_cooldown_s, now_s),
        )


def parse_history(annotations: Mapping[str, str]) -> MoveHistory | None:
    """Return the stored moves, none without the annotation; None if it is invalid."""
    text = annotations.get(MOVES_ANNOTATION, "{}")
    if len(text) > MAX_ANNOTATION_CHARS:
        return None
    try:
        return msgspec.json.decode(text, type=MoveHistory)
    except (msgspec.DecodeError, RecursionError):
        return None


def format_history(history: MoveHistory) -> str:
    """Return the text of the annotation."""
    return msgspec.json.encode(history, order="sorted").decode()


def _recent(moves: Mapping[str, float], cooldown_s: float, now_s: float) -> dict[str, float]:
    return {name: at_s for name, at_s in moves.items() if abs(now_s - at_s) < cooldown_s}

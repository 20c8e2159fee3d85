"""Results and moves of the latest evaluation, as JSON for people and programs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

MAX_LISTED = 100
"""Entries of a list in the report."""


class DeschedulerHalt(StrEnum):
    """Why no pod is moved from any node."""

    NONE = "none"
    PAUSED = "paused"
    STALE = "stale"
    TARGETS = "targets"
    HISTORY = "history"


class _ReportStruct(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    pass


class MoveReport(_ReportStruct, frozen=True, kw_only=True):
    """A move, and its result."""

    pod: str
    level: str
    target: str
    """Node with the best score for the pod by the scheduler's plugins. The scheduler decides later where the new pod runs."""
    relieves: float
    """Estimated share of the node's capacity that the pod uses, in the resources that make the node hot."""
    result: str
    message: str


class HotNodeReport(_ReportStruct, frozen=True, kw_only=True):
    """A hot node."""

    node: str
    reasons: tuple[str, ...]
    hot_reports: int
    """Consecutive reports in which it is hot."""
    state: str
    moves: tuple[MoveReport, ...] = ()
    skipped: Mapping[str, str] = {}
    """Reasons why pods are not moved, by namespace and name of the pod."""


class DeschedulingReport(_ReportStruct, frozen=True, kw_only=True):
    """The latest evaluation."""

    at: str
    dry_run: bool
    halt: DeschedulerHalt = DeschedulerHalt.NONE
    message: str = ""
    """Why no pod is moved, and the remedy; empty if pods may be moved."""
    hot_nodes: tuple[HotNodeReport, ...] = ()
    targets: tuple[str, ...] = ()
    target_count: int = 0
    stale_nodes: tuple[str, ...] = ()
    """Nodes without a fresh report, which are neither relieved nor targets."""
    stale_count: int = 0
    problems: Mapping[str, str] = {}
    """Objects with a value that cannot be read."""

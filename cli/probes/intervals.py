"""What a probe saw within an interval: what the views of probes read, and what `dioptase probe NAME --json` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cli.probes.changes import Cell


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of one cgroup within an interval."""

    cgroup: str
    """Path, or `id N` for a cgroup that was gone before it could be looked up or is outside this mount."""
    id: int
    values: Mapping[str, Any]
    """By field of a cgroup's sample: how much counters have grown by, and what is no counter as it is."""


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints, one line each."""

    probe: str
    form: str
    wall_time_ns: int
    interval_s: float
    cgroups: tuple[Group, ...]
    """Only those where something happened; the busiest comes first."""
    node: Mapping[str, Any]
    problem: str
    """What the probe could not count, since the start."""


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """An interval, and its numbers with the cgroup that each belongs to; empty for the node."""

    interval: Interval
    cells: tuple[tuple[str, Cell], ...]

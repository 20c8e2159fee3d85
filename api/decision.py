"""Decisions, their outcomes, and the Cycle: one run of sense, advise, act that exporters and journals receive.
Field names are part of the decision journal, of `/api/v1` and of recordings.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from api.advice import CpuAdvice, Headroom, MemoryAdvice, NicBandwidth, NodeAdvice
from api.eviction import EvictionEvent, EvictionResult
from api.forecast import Forecast
from api.knobs import Knob, Reason
from api.snapshot import Snapshot


class ActMode(StrEnum):
    """How far the agent goes: `off` decides nothing, `dry-run` decides and writes nothing, `on` writes."""

    OFF = "off"
    DRY_RUN = "dry-run"
    ON = "on"


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """A set of CPUs that pods share: Katalyst's `share` and `reclaim`; with overlap, pools have CPUs in common."""

    name: str
    cpus: tuple[int, ...]


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """The advisor's answer for one round. Cores are CPUs' worth of time per second."""

    policy: str
    cpu: CpuAdvice = CpuAdvice()
    """How large every pool is to be,"""
    pools: tuple[Pool, ...] = ()
    """and the CPUs that QRM chose."""
    rejected: Mapping[str, Reason] = {}
    """Pods whose wish for CPUs or network bandwidth cannot be fulfilled, by `namespace/name`, and why; they run on."""
    cards: tuple[NicBandwidth, ...] = ()
    """Network cards whose speed is known, and what they are promised to whom."""
    requirement_cores: float | None
    """What the online pods need, estimated; None where inputs are missing."""
    headroom: Headroom | None = None
    """What may be promised to reclaimed pods, found in this round; None in recordings that are older than that,"""
    reported_headroom: Headroom | None = msgspec.field(default=None, name="advertised")
    """and what the node advertises of it (Katalyst's reclaimed_millicpu / 1000, reclaimed_memory)."""
    reclaimable_cores: float = msgspec.field(name="lent_cores")
    """What reclaimed pods may use right now; equals the node's CPUs when nothing holds them back but priority."""
    idle: bool
    """Whether reclaimed pods are to run with cpu.idle."""
    claims: Mapping[str, float] = {}
    """By cgroup of a reclaimed container that made online pods wait: the part of its claim to lent CPU that counts."""
    action: str
    """`grow`, `hold`, `shrink` or `freeze`."""
    reason: Reason = msgspec.field(name="verdict")

    @property
    def headroom_cores(self) -> float | None:
        """CPU that may be promised in all; None where an input is missing."""
        return None if self.headroom is None else self.headroom.cores


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One knob of one cgroup, or of the node, is to have this value, and why."""

    cgroup: str
    """Its path; of a knob of the node the path below /sys of the disk or group that it belongs to."""
    cgroup_id: int
    """0 of a knob of the node."""
    pod: str
    """`namespace/name`; empty of the node's, and of a cgroup that is no pod's and that the settings name."""
    knob: Knob
    value: str
    reason: Reason = msgspec.field(name="verdict")


class OutcomeStatus(StrEnum):
    """What came of a decision."""

    APPLIED = "applied"
    """Written and read back."""
    UNCHANGED = "unchanged"
    """The kernel had that value already; nothing was written."""
    DRY_RUN = "dry-run"
    """Would have been written."""
    REFUSED = "refused"
    """The kernel said no, or the original could not be journalled."""
    VANISHED = "vanished"
    """The cgroup is gone, or another one took its path."""
    MISMATCH = "mismatch"
    """Written, but the kernel shows something else."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A decision and what came of it."""

    decision: Decision
    status: OutcomeStatus
    before: str | None = None
    """Value read before the write, in the knob's own notation."""
    after: str | None = None
    """Value read back."""
    error: str = ""
    clamped_from: str | None = None
    """The value asked for, where the actuator had to bound it."""
    repaired: bool = False
    """Whether the knob had been as decided, and was not any more: somebody else, or the kernel, had put `before` there."""


class Cycle(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of sense, advise, act: all that any exporter, page or explanation needs."""

    snapshot: Snapshot
    previous: Snapshot | None
    act: ActMode
    """What was done; may be less than what was asked for, see `banner`."""
    trigger: str
    """`tick`, `wait` (online pods waited too long between ticks), `psi` (a pressure trigger fired), or `end` (the agent
    puts everything back)."""
    advice: Advice | None = None
    memory: MemoryAdvice | None = None
    """The same of memory; None where nothing was judged."""
    node: NodeAdvice | None = None
    """Of the node as a whole; None where nobody asks for that."""
    forecasts: tuple[Forecast, ...] = ()
    """What online work is foretold to use at the most, by resource; empty where nothing was judged."""
    shadow: Advice | None = None
    """What another policy would have advised; nothing is done about it."""
    made: tuple[Outcome, ...] = ()
    """What containers were made with, or changed to, before this round by the runtime that asked the agent (NRI): `before` is
    what their owners asked for."""
    outcomes: tuple[Outcome, ...] = ()
    evictions: EvictionResult | None = None
    """Who has to leave, and why; None where no eviction plugin is configured."""
    kills: tuple[EvictionEvent, ...] = ()
    """What became of those who had to."""
    duration_ns: int = 0
    startup_warnings: tuple[str, ...] = msgspec.field(default=(), name="banner")
    """What is missing on this node and how to get it, one sentence each."""

    @property
    def done(self) -> tuple[Outcome, ...]:
        """All outcomes, in the order in which they came about."""
        return (*self.made, *self.outcomes)


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the decision journal: an outcome and the round it belongs to."""

    seq: int
    """Grows by one for every entry, across restarts too."""
    wall_time_ns: int
    cycle_seq: int = msgspec.field(name="round_seq")
    trigger: str
    """The round's; `nri` of what the container runtime did because the agent had said so when it asked."""
    policy: str
    outcome: Outcome

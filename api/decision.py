"""Decisions, their outcomes, and the Cycle: one run of sense, advise, act that exporters and journals receive.
Encoded names are part of the decision journal, of `/api/v1` and of recordings. Where a field has another name in code, its
encoded name is given by `name=`: `reason` is `verdict` there, `reclaimable_cores` is `lent_cores`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from api.advice import CpuAdvice, Headroom, MemoryAdvice, NicBandwidth, NodeAdvice, QuotaVerdict
from api.colocation import ColocationTotals
from api.eviction import EvictionEvent, EvictionResult
from api.forecast import Forecast
from api.knobs import Knob, Reason
from api.rates import Rates, online_runq_latency, rates_since, reclaimed_interference_ns
from api.snapshot import RunqLatency, Snapshot

_RATES, _EVALUATED, _INTERFERENCE = "rates", "evaluated", "interference"


class ActMode(StrEnum):
    """How far the agent acts: `off` makes no decisions, `dry-run` makes them without writing, `on` writes."""

    OFF = "off"
    DRY_RUN = "dry-run"
    ON = "on"


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """A named set of CPUs that pods share, such as Katalyst's `share` and `reclaim`; pools may overlap."""

    name: str
    cpus: tuple[int, ...]


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """The advisor's result of one cycle. `_cores` fields are CPU time per second."""

    policy: str
    cpu: CpuAdvice = CpuAdvice()
    """Regions and pool sizes."""
    pools: tuple[Pool, ...] = ()
    """CPUs of each pool as QRM allocated them."""
    rejected: Mapping[str, Reason] = {}
    """Pods whose CPU or network bandwidth request cannot be satisfied, by `namespace/name`; they keep running."""
    cards: tuple[NicBandwidth, ...] = ()
    """Network cards of known speed, with the bandwidth allocated to each pod."""
    requirement_cores: float | None
    """Estimated CPU requirement of the online pods; None if inputs are missing."""
    headroom: Headroom | None = None
    """Headroom for reclaimed pods computed in this cycle; None in recordings from before the field existed."""
    reported_headroom: Headroom | None = msgspec.field(default=None, name="advertised")
    """Headroom that the node reports (Katalyst's reclaimed_millicpu / 1000, reclaimed_memory)."""
    reclaimable_cores: float = msgspec.field(name="lent_cores")
    """CPU that reclaimed pods may use now; all CPUs of the node if only priority restrains them."""
    idle: bool
    """Whether reclaimed pods run with cpu.idle."""
    claims: Mapping[str, float] = {}
    """Factor on the reclaim weight, by cgroup of a reclaimed container that interfered with online pods."""
    action: str
    """`grow`, `hold`, `shrink` or `freeze`."""
    reason: Reason = msgspec.field(name="verdict")
    quota_verdict: QuotaVerdict | None = None
    """Whether the CPU quota of reclaimed pods helps the online workloads of this node; None while that is not known."""

    @property
    def headroom_cores(self) -> float | None:
        """CPU headroom of the node; None if an input is missing."""
        return None if self.headroom is None else self.headroom.cores


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One value for one knob of a cgroup or of the node, and the reason."""

    cgroup: str
    """Path of the cgroup; for a knob of the node the path below /sys of its disk or resctrl group."""
    cgroup_id: int
    """Inode of the cgroup; 0 for a knob of the node."""
    pod: str
    """`namespace/name`; empty for the node, and for a cgroup of no pod that the settings name."""
    knob: Knob
    value: str
    reason: Reason = msgspec.field(name="verdict")


class OutcomeStatus(StrEnum):
    """Result of carrying out a decision."""

    APPLIED = "applied"
    """Written and read back."""
    UNCHANGED = "unchanged"
    """The kernel had this value already; nothing was written."""
    DRY_RUN = "dry-run"
    """Not written because of dry-run."""
    REFUSED = "refused"
    """The kernel rejected the value, or the original could not be journalled."""
    VANISHED = "vanished"
    """The cgroup was removed, or another one has its path."""
    MISMATCH = "mismatch"
    """Written, but the kernel reads back a different value."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A decision and its result."""

    decision: Decision
    status: OutcomeStatus
    before: str | None = None
    """Value read before the write, in the knob's own notation."""
    after: str | None = None
    """Value read back."""
    error: str = ""
    clamped_from: str | None = None
    """Decided value if the actuator had to clamp it."""
    repaired: bool = False
    """Whether another process or the kernel had changed the applied value to `before`."""


class Cycle(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One cycle of sense, advise and act: everything that an exporter, the page or an explanation needs."""

    snapshot: Snapshot
    previous: Snapshot | None
    act: ActMode
    """Mode in effect; may be less than the configured mode, see `startup_warnings`."""
    trigger: str
    """Cause of the cycle: `tick`, `wait` (run-queue latency above target between ticks), `psi` (a pressure trigger fired) or
    `end` (the agent restores all originals)."""
    advice: Advice | None = None
    memory: MemoryAdvice | None = None
    """Memory advice; None if memory was not evaluated."""
    node: NodeAdvice | None = None
    """Power and overcommitment advice; None if both are disabled."""
    forecasts: tuple[Forecast, ...] = ()
    """Predicted peak use of online pods, by resource; empty if nothing was evaluated."""
    shadow: Advice | None = None
    """Advice of the shadow policy; it is never applied."""
    runtime_outcomes: tuple[Outcome, ...] = msgspec.field(default=(), name="made")
    """Values that the container runtime applied since the last cycle to containers it created or updated (NRI); `before` is
    the value in the container's own spec."""
    outcomes: tuple[Outcome, ...] = ()
    evictions: EvictionResult | None = None
    """Thresholds and victims; None if no eviction plugin is configured."""
    kills: tuple[EvictionEvent, ...] = ()
    """Progress of the evictions."""
    totals: ColocationTotals | None = None
    """Totals up to this cycle; None in recordings of agents that did not count."""
    duration_ns: int = 0
    startup_warnings: tuple[str, ...] = msgspec.field(default=(), name="banner")
    """Missing prerequisites of this node and their remedies, one sentence each."""

    @property
    def rates(self) -> Rates | None:
        """Rates since the previous cycle; None without one. They are computed once per cycle, and are no part of recordings."""
        # msgspec.structs.replace() copies `__dict__`, so the rates are stored with the snapshots that they belong to.
        previous, snapshot, shared = self.__dict__.get(_RATES, (None, None, None))
        rates: Rates | None = shared
        if previous is not self.previous or snapshot is not self.snapshot:
            rates = rates_since(self.previous, self.snapshot)
            self.share_rates(rates)
        return rates

    def share_rates(self, rates: Rates | None) -> None:
        """Take the rates that the control loop has computed from the same two snapshots."""
        self.__dict__[_RATES] = (self.previous, self.snapshot, rates)

    @property
    def evaluated_latency(self) -> Mapping[str, RunqLatency | None]:
        """Run-queue latency by online container's cgroup as the policy evaluated it, None where it is not measured. Of a
        recorded cycle, which does not contain it, that of a policy that may use all CPUs."""
        snapshot, shared = self.__dict__.get(_EVALUATED, (None, {}))
        if snapshot is not self.snapshot:
            shared = online_runq_latency(self.snapshot, self.rates, self.previous)
            self.share_evaluated_latency(shared)
        evaluated: Mapping[str, RunqLatency | None] = shared
        return evaluated

    def share_evaluated_latency(self, latency: Mapping[str, RunqLatency | None]) -> None:
        """Take the latency that the policy of this cycle evaluated; empty if it evaluates none."""
        self.__dict__[_EVALUATED] = (self.snapshot, latency)

    @property
    def interference_ns(self) -> int | None:
        """Time that tasks of online pods waited since the previous cycle while reclaimed pods had the CPU; None if unknown."""
        snapshot, shared = self.__dict__.get(_INTERFERENCE, (None, None))
        if snapshot is not self.snapshot:
            shared = reclaimed_interference_ns(self.snapshot, self.rates, self.previous)
            self.__dict__[_INTERFERENCE] = (self.snapshot, shared)
        interference_ns: int | None = shared
        return interference_ns

    @property
    def done(self) -> tuple[Outcome, ...]:
        """All outcomes in chronological order."""
        return (*self.runtime_outcomes, *self.outcomes)


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the decision journal: an outcome and the cycle it belongs to."""

    seq: int
    """Increases by one for every entry, also across restarts."""
    wall_time_ns: int
    cycle_seq: int = msgspec.field(name="round_seq")
    trigger: str
    """Trigger of the cycle; `nri` for values that the container runtime applied on the agent's reply."""
    policy: str
    outcome: Outcome

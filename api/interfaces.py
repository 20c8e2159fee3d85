"""Protocols between packages, such as Probe and CycleSink, and the exceptions Unavailable and Vanished.
Unavailable carries a reason and a remedy; Vanished means that a cgroup or process ended between two reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from api.decision import Cycle, JournalEntry
from api.eviction import EvictionEntry
from api.measurements import RunqLatency
from api.pod import Pod


class Unavailable(Exception):
    """This machine cannot give something: what and why, and what a person can do about it."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


class KernelFeatureAbsent(Unavailable):
    """The running kernel does not have it: nothing has failed, and only another kernel has it."""


class Vanished(Exception):
    """A cgroup or process went away between two looks at it: normal, and never an error."""


class RunqLatencySource(Protocol):
    """Run-queue wait of cgroups, cumulative."""

    @property
    def form(self) -> str:
        """Which way of measuring runs, for people and metrics: `tp_btf`, `raw_tp`, `classic` or `schedstat`."""

    def read(
        self, live: Mapping[int, str], wanted: Collection[int] | None = None, *, complete: bool = True
    ) -> Mapping[int, RunqLatency]:
        """Waits by cgroup id, of the wanted cgroups or of all. `live` has the paths of the cgroups that exist.

        A live cgroup that has not waited yet has a Wait of zero; one whose waits are not known is absent. Cgroups that
        `live` lacks may be forgotten, unless it is not `complete`. Raises Unavailable when the source has stopped working.
        """

    def problem(self) -> Unavailable | None:
        """What the source could not count lately although it works, and what to do; None when all is well."""

    @property
    def lost_events(self) -> int | None:
        """How much the source could not count since it was opened; None where nothing can be lost."""

    def close(self) -> None:
        """Detach from the kernel. Idempotent."""


class ProbeReading(msgspec.Struct, frozen=True):
    """What a probe has counted: values by name of the field of CgroupSample or NodeSample that they are for."""

    cgroups: Mapping[int, Mapping[str, object]] = {}
    """By cgroup id."""
    node: Mapping[str, object] = {}


class Probe(Protocol):
    """One question that the kernel answers, beside run-queue waits, which have a port of their own."""

    name: str
    """Stem of its files, name of its source in the snapshot and of `dioptase probe NAME`."""

    @property
    def form(self) -> str:
        """Which way of measuring runs; `loading` before any does, `absent` where the running kernel takes none."""

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:
        """Everything it has counted since it was opened; what it does not know is absent. `live` and `complete` as for
        WaitSource. Raises Unavailable when it has stopped working."""

    def problem(self) -> Unavailable | None:
        """What it could not count lately although it works, and what to do; None when all is well."""

    @property
    def lost_events(self) -> int | None:
        """How much it could not count since it was opened; None where nothing can be lost."""

    def close(self) -> None:
        """Detach from the kernel. Idempotent."""


class PodSource(Protocol):
    """Whoever lists the node's pods: a file, the kubelet, the container runtime."""

    def read(self) -> tuple[Pod, ...]:
        """All pods of this node. Raises Unavailable when they cannot be listed now."""


class CycleSink(Protocol):
    """Whoever is shown each round. Must return quickly and must not raise."""

    def publish(self, finished: Cycle) -> None: ...


class DecisionRecord(Protocol):
    """The bounded record of decisions, as readers see it, from any thread."""

    def entries(
        self, after: int = 0, limit: int = 200, wanted: Callable[[JournalEntry], bool] | None = None
    ) -> Sequence[JournalEntry]:
        """The newest `limit` entries that are wanted and whose seq is greater than `after`, oldest first."""


class EvictionRecord(Protocol):
    """The bounded record of evictions, as readers see it, from any thread."""

    def entries(
        self, after: int = 0, limit: int = 200, wanted: Callable[[EvictionEntry], bool] | None = None
    ) -> Sequence[EvictionEntry]:
        """The newest `limit` entries that are wanted and whose seq is greater than `after`, oldest first."""

"""Protocols between packages, such as Probe and CycleSink, and the exceptions Unavailable and Vanished.
Unavailable carries a reason and a remedy; Vanished means that a cgroup or process ended between two reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from api.decision import Cycle, JournalEntry
from api.eviction import EvictionEntry
from api.pod import Pod
from api.snapshot import RunqLatency
from api.text import MAX_MESSAGE_CHARS, printable


class Unavailable(Exception):
    """This machine cannot provide something: the reason, and a remedy that a person can carry out. Both are printable."""

    def __init__(self, reason: str, remedy: str) -> None:
        # Reasons quote peers, pods and files, and are shown in logs, in terminals and on the page.
        self.reason, self.remedy = printable(reason, MAX_MESSAGE_CHARS), printable(remedy, MAX_MESSAGE_CHARS)
        super().__init__(self.reason)


class KernelFeatureAbsent(Unavailable):
    """The running kernel lacks a feature. Nothing has failed, and only another kernel has it."""


class Vanished(Exception):
    """A cgroup or process ended between two reads: normal, never an error."""


class RunqLatencySource(Protocol):
    """Cumulative run-queue latency of cgroups."""

    @property
    def form(self) -> str:
        """Measurement variant, for people and metrics: `tp_btf`, `raw_tp`, `classic` or `schedstat`."""

    def read(
        self, live: Mapping[int, str], cgroup_ids: Collection[int] | None = None, *, complete: bool = True
    ) -> Mapping[int, RunqLatency]:
        """Latency by cgroup id, of `cgroup_ids` or of all cgroups. `live` maps the ids of existing cgroups to their paths.

        A live cgroup that has not waited yet has a latency of zero; one whose waits are unknown is absent. Cgroups missing
        from `live` may be dropped if it is `complete`. Raises Unavailable when the source has stopped working.
        """

    def problem(self) -> Unavailable | None:
        """Events that a working source could not count recently, with the remedy; None if there are none."""

    @property
    def lost_events(self) -> int | None:
        """Number of events not counted since the source was opened; None if none can be lost."""

    def close(self) -> None:
        """Detach from the kernel. Idempotent."""


class HealthReporter(Protocol):
    """Component whose health every snapshot shows, whether or not it measures anything."""

    name: str
    """Name of the component in the snapshot; of a probe also the stem of its files and the argument of `dioptase probe`."""

    @property
    def form(self) -> str:
        """Variant of the component; of a probe `loading` before it is attached, `absent` if the kernel supports none."""

    @property
    def lost_events(self) -> int | None:
        """Number of events not counted since the start; None if none can be lost."""

    def problem(self) -> Unavailable | None:
        """Current failure, or the events that a working component could not count recently; None if there are none."""


class ProbeReading(msgspec.Struct, frozen=True):
    """Values counted by a probe, by the name of their field in CgroupSample or NodeSample."""

    cgroups: Mapping[int, Mapping[str, object]] = {}
    """By cgroup id."""
    node: Mapping[str, object] = {}


class Probe(HealthReporter, Protocol):
    """Kernel measurement other than run-queue latency, which has a protocol of its own."""

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:
        """Everything counted since the probe was opened; unknown values are absent. `live` and `complete` as in
        RunqLatencySource. Raises Unavailable when the probe has stopped working."""

    def close(self) -> None:
        """Detach from the kernel. Idempotent."""


class PodSource(Protocol):
    """Source of the node's pods: a file, the kubelet, or the container runtime."""

    def read(self) -> tuple[Pod, ...]:
        """All pods of this node. Raises Unavailable if they cannot be listed now."""


class CycleSink(Protocol):
    """Consumer of finished cycles. `publish` must return quickly and must not raise."""

    def publish(self, finished: Cycle) -> None: ...


class DecisionRecord(Protocol):
    """Readable, bounded record of decisions; safe to use from any thread."""

    def entries(
        self, after: int = 0, limit: int = 200, matches: Callable[[JournalEntry], bool] | None = None
    ) -> Sequence[JournalEntry]:
        """The newest `limit` entries that match and whose seq is greater than `after`, oldest first."""


class EvictionRecord(Protocol):
    """Readable, bounded record of evictions; safe to use from any thread."""

    def entries(
        self, after: int = 0, limit: int = 200, matches: Callable[[EvictionEntry], bool] | None = None
    ) -> Sequence[EvictionEntry]:
        """The newest `limit` entries that match and whose seq is greater than `after`, oldest first."""

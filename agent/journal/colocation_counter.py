"""Adds up the totals of colocation over cycles, and keeps them in a state file.
A cycle adds the interval since the previous cycle. Reclaimed pods are busy in an interval if they used at least BUSY_CORES in
it, and idle otherwise. The file is written once a minute and at exit, so a killed agent loses at most a minute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from api.colocation import ColocationTotals, OnlineTotals, add_counts
from api.decision import ActMode, Cycle, OutcomeStatus
from api.interfaces import Unavailable
from api.knobs import Knob
from api.pod import Pod
from api.qos import QoSLevel
from api.rates import Rates, online_runq_latency, sum_runq_latencies
from api.snapshot import RunqLatency, reclaimed_containers
from common.disk_writer import INLINE_WRITER, FileWriter
from common.files import read_small_file
from common.state_file import StateFileDamaged, decode_state, encode_state, replace_file, set_aside, write_failure

BUSY_CORES = 0.05
"""Reclaimed pods of a node count as busy if they use at least this CPU together. Paused pods use less."""
VERSION = 1
FILE_NAME = "colocation_state"
MAX_BYTES = 1 << 20
SAVE_INTERVAL_NS = 60 * 1_000_000_000
_TAKING_KNOBS = frozenset((Knob.QUOTA, Knob.CPUSET))


class SavedTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the file."""

    version: int = VERSION
    totals: ColocationTotals
    checksum: str = ""


class ColocationCounter:
    """The totals of this node, and the file that holds them."""

    def __init__(self, state_dir: Path | None, wall_ns: int, disk: FileWriter = INLINE_WRITER) -> None:
        """Load the totals of the previous agent. `state_dir` is locked by this process; None keeps the totals in memory only,
        and so does a damaged file that cannot be renamed."""
        self.path = None if state_dir is None else state_dir / FILE_NAME
        self._disk = disk
        self.messages: tuple[str, ...] = ()
        """Why earlier totals were discarded; empty if they were not."""
        self.earlier = self._load() or ColocationTotals(since_wall_ns=wall_ns)
        """Totals of the agents before this one."""
        self.totals = self.earlier
        self._saved: ColocationTotals | None = None
        self._saved_at_ns: int | None = None
        self._reclaimable_cores: float | None = None
        self.failure: Unavailable | None = None
        """Why the latest write failed; None if it did not."""

    def count(self, finished: Cycle) -> Cycle:
        """Return the cycle with the totals up to it, and have them saved once a minute."""
        self.totals = add_cycle(self.totals, finished, self._reclaimable_cores)
        # The decision of this cycle is in force until the next cycle, which counts its CPU time.
        acts = finished.act is ActMode.ON and finished.advice is not None
        self._reclaimable_cores = finished.advice.reclaimable_cores if acts and finished.advice else None
        now_ns = finished.snapshot.taken_at_ns
        if self._saved_at_ns is None or now_ns - self._saved_at_ns >= SAVE_INTERVAL_NS:
            self._saved_at_ns = now_ns
            self._save()
        return msgspec.structs.replace(finished, totals=self.totals)

    def close(self) -> None:
        """Save the totals of the last minute too."""
        self._save()

    def _load(self) -> ColocationTotals | None:
        if self.path is None:
            return None
        try:
            return decode_state(read_small_file(self.path, MAX_BYTES), SavedTotals, VERSION).totals
        except FileNotFoundError:
            return None
        except OSError as error:
            self.messages = (f"Totals of colocation start at zero: {self.path} cannot be read: {error.strerror}.",)
        except StateFileDamaged as error:
            consequence, unsaved = "Totals of colocation start at zero", "They are not saved"
            message, self.path = set_aside(self.path, error, consequence, unsaved)
            self.messages = (message,)
        return None

    def _save(self) -> None:
        if self.path is not None and self.totals is not self._saved:
            self._disk.submit(FILE_NAME, partial(self._write, self.path))

    def _write(self, path: Path) -> None:
        totals = self.totals
        try:
            replace_file(path, encode_state(SavedTotals(totals=totals)))
        except OSError as error:
            self.failure = write_failure("the totals of colocation cannot be written to", path, error)
            return
        self._saved, self.failure = totals, None


def add_cycle(totals: ColocationTotals, finished: Cycle, reclaimable_cores: float | None) -> ColocationTotals:
    """Return the totals with one more cycle. `reclaimable_cores` was in force since the previous cycle; None if none was."""
    totals = msgspec.structs.replace(
        totals,
        reductions=add_counts(totals.reductions, _reductions(finished)),
        evictions=add_counts(totals.evictions, _evictions(finished)),
    )
    rates = finished.rates
    if rates is None:
        return totals
    interval_ns = rates.node.interval_ns
    used = _used_by_namespace(finished.snapshot.pods, rates)
    interference_ns = finished.interference_ns
    totals = msgspec.structs.replace(
        totals,
        duration_ns=totals.duration_ns + interval_ns,
        reclaimed_ns=add_counts(totals.reclaimed_ns, {name: ns for name, ns in used.items() if ns}),
        reclaimable_ns=totals.reclaimable_ns + _reclaimable_ns(finished, rates, sum(used.values()), reclaimable_cores),
        interference_ns=totals.interference_ns + (interference_ns or 0),
        interference_duration_ns=totals.interference_duration_ns + (0 if interference_ns is None else interval_ns),
    )
    if not used and reclaimed_containers(finished.snapshot):
        return totals  # their use since the previous cycle is not known yet
    latency = _online_latency(finished, rates)
    if latency is None:
        return totals
    if sum(used.values()) >= BUSY_CORES * interval_ns:
        return msgspec.structs.replace(totals, busy=_add_interval(totals.busy, finished, rates, latency))
    return msgspec.structs.replace(totals, idle=_add_interval(totals.idle, finished, rates, latency))


def _used_by_namespace(pods: Iterable[Pod], rates: Rates) -> dict[str, int]:
    """Return the CPU time of reclaimed pods since the previous cycle; empty if no container of them is known since then."""
    used: dict[str, int] = {}
    for pod in pods:
        if pod.qos is not QoSLevel.RECLAIMED:
            continue
        for container in pod.containers:
            rate = rates.cgroups.get(container.cgroup)
            if rate is not None and rate.cpu_cores is not None:
                used[pod.namespace] = used.get(pod.namespace, 0) + round(rate.cpu_cores * rate.interval_ns)
    return used


def _reclaimable_ns(finished: Cycle, rates: Rates, used_ns: int, reclaimable_cores: float | None) -> int:
    """Return the CPU time that reclaimed pods could use since the previous cycle. If only their priority limits them, they may
    run on every CPU: the CPU time that online pods and the system used is then subtracted."""
    if reclaimable_cores is None:
        return 0
    node, limit_ns = rates.node, reclaimable_cores * rates.node.interval_ns
    if node.busy_cores is not None:
        elsewhere_ns = max(node.busy_cores * node.interval_ns - used_ns, 0.0)
        limit_ns = min(limit_ns, len(finished.snapshot.topology.cpus) * node.interval_ns - elsewhere_ns)
    return round(max(limit_ns, 0.0))


def _online_latency(finished: Cycle, rates: Rates) -> RunqLatency | None:
    """Return the distribution of all online containers together since the previous cycle; None if there is none."""
    # An agent that does not act evaluates no latency. The comparison is useful there too, before the agent changes anything.
    evaluated = finished.evaluated_latency or online_runq_latency(finished.snapshot, rates, finished.previous)
    measured = [wait for wait in evaluated.values() if wait is not None and wait.slots is not None]
    return sum_runq_latencies([wait for wait in measured if wait.count] or measured[:1]) if measured else None


def _add_interval(totals: OnlineTotals, finished: Cycle, rates: Rates, latency: RunqLatency) -> OnlineTotals:
    cores = [
        rate.cpu_cores
        for pod in finished.snapshot.pods
        if pod.qos.online
        for container in pod.containers
        if (rate := rates.cgroups.get(container.cgroup)) is not None and rate.cpu_cores is not None
    ]
    return OnlineTotals(
        duration_ns=totals.duration_ns + rates.node.interval_ns,
        cpu_ns=totals.cpu_ns + round(sum(cores) * rates.node.interval_ns),
        latency=sum_runq_latencies((totals.latency, latency)),
    )


def _reductions(finished: Cycle) -> Mapping[str, int]:
    advice = finished.advice
    if advice is None or advice.action != "shrink" or finished.act is not ActMode.ON:
        return {}
    written = any(o.status is OutcomeStatus.APPLIED and o.decision.knob in _TAKING_KNOBS for o in finished.outcomes)
    return {advice.reason.rule: 1} if written else {}


def _evictions(finished: Cycle) -> Mapping[str, int]:
    result = finished.evictions
    if result is None or not result.victims:
        return {}
    reclaimed = {pod.uid for pod in finished.snapshot.pods if pod.qos is QoSLevel.RECLAIMED}
    counts: dict[str, int] = {}
    for victim in result.victims:
        if victim.uid in reclaimed and not victim.dry_run and not victim.notify:
            counts[victim.reason.rule] = counts.get(victim.reason.rule, 0) + 1
    return counts

"""Eviction records of pods: the disruption budget that selects a pod, and recent evictions of its workload.
Katalyst passes such records to eviction plugins, from a record manager that is not part of its tree
(pkg/agent/evictionmanager/record). Here budgets come from the API server, and evictions are those of this agent
since its start: a workload's evictions on other nodes are not counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from agent.eviction.eviction_inputs import EvictionBucket, PodEvictionRecord
from api.decision import Cycle
from api.eviction import EvictionEventReason
from api.interfaces import Unavailable
from api.pod import Pod
from api.qos import QoSLevel
from api.units import NS_PER_S
from kube.client import KubeClient, ListScope
from kube.errors import ApiError, ApiUnreachable
from kube.objects import KubeMetadata, ResourceType

log = logging.getLogger(__name__)
BUCKET_S, BUCKETS = 600, 13
"""Evictions are counted in buckets of ten minutes for two hours, the longest window of Katalyst's scorer."""
REFRESH_S = 60.0
"""Time between two lists of the budgets that built-in plugins need."""
MAX_BUDGET_AGE_S = 5.0
"""Maximum age of the budgets that external plugins receive."""
LIST_REMEDY = (
    "give the agent's role list of poddisruptionbudgets.policy (the chart: --set agent.evictions=true), or see the API "
    "server's log"
)
LIST_TIMEOUT_S = 1.0
"""Deadline of a list, a part of the time that an external plugin has for all its calls."""
COUNTED = (EvictionEventReason.CREATED, EvictionEventReason.STOPPED)


class BudgetRequirement(msgspec.Struct, frozen=True):
    """Requirement of a label selector on one label."""

    key: str
    operator: str
    """In, NotIn, Exists or DoesNotExist."""
    values: tuple[str, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether labels meet the requirement; an unknown operator is never met."""
        present = self.key in labels
        listed = present and labels[self.key] in self.values
        met = {"In": listed, "NotIn": not listed, "Exists": present, "DoesNotExist": not present}
        return met.get(self.operator, False)


class BudgetSelector(msgspec.Struct, frozen=True, rename="camel"):
    """Label selector of policy/v1: an empty one selects every pod of the namespace."""

    match_labels: Mapping[str, str] = {}
    match_expressions: tuple[BudgetRequirement, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether labels meet all requirements."""
        return self.match_labels.items() <= labels.items() and all(
            requirement.matches(labels) for requirement in self.match_expressions
        )


class BudgetSpec(msgspec.Struct, frozen=True):
    """What of a budget's spec is read; without a selector it selects no pod."""

    selector: BudgetSelector | None = None


class BudgetStatus(msgspec.Struct, frozen=True, rename="camel"):
    """Numbers of pods, by the disruption controller."""

    disruptions_allowed: int = 0
    current_healthy: int = 0
    desired_healthy: int = 0
    expected_pods: int = 0


class DisruptionBudget(msgspec.Struct, frozen=True):
    """What of a PodDisruptionBudget is read."""

    metadata: KubeMetadata
    spec: BudgetSpec = BudgetSpec()
    status: BudgetStatus = BudgetStatus()

    def selects(self, pod: Pod) -> bool:
        """Return whether the budget covers this pod of its namespace."""
        return self.spec.selector is not None and self.spec.selector.matches(pod.labels)


DISRUPTION_BUDGETS = ResourceType(
    "policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", DisruptionBudget, namespaced=True
)


class EvictionHistory:
    """Number of evictions by workload, in buckets of BUCKET_S."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[int]] = {}

    def add(self, workload: str, at_s: float) -> None:
        """Count one eviction at this time (Unix seconds), and drop buckets that are too old."""
        bucket = int(at_s) // BUCKET_S
        self._counts.setdefault(workload, Counter())[bucket] += 1
        for name, counts in list(self._counts.items()):
            recent = Counter({number: count for number, count in counts.items() if number > bucket - BUCKETS})
            self._counts[name] = recent
            if not recent:
                del self._counts[name]

    def buckets(self, workload: str, now_s: float) -> tuple[EvictionBucket, ...]:
        """Return the buckets until now, oldest first, empty ones included: Katalyst's scorer rates a workload without
        buckets 0, below one that lost few pods. Return none for a pod without a workload."""
        if not workload:
            return ()
        newest, counts = int(now_s) // BUCKET_S, self._counts.get(workload, Counter())
        return tuple(
            EvictionBucket(time_s=number * BUCKET_S, duration_s=BUCKET_S, count=counts[number])
            for number in range(newest - BUCKETS + 1, newest + 1)
        )


class EvictionRecords:
    """Sink of cycles, whose evictions are counted, and health component."""

    name, form, lost_events = "eviction-records", "list", None

    def __init__(
        self,
        client: KubeClient,
        workload: Callable[[str], str],
        needed: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`workload` returns the controller of the pod with a uid, or empty; `needed` whether built-in plugins use
        records."""
        self._client, self._workload, self._needed = client, workload, needed
        self._clock, self._wall_clock = clock, wall_clock
        self._history = EvictionHistory()
        self._budgets: dict[str, tuple[float, Sequence[DisruptionBudget]]] = {}
        """Budgets by namespace with the time of the list."""
        self._victims: dict[str, str] = {}
        """Workloads of the pods under eviction, which may be gone when the eviction is reported."""
        self._pods: tuple[Pod, ...] = ()
        self._latest: Mapping[str, PodEvictionRecord] = {}
        self._problem: Unavailable | None = None
        self._failed_at_s = 0.0

    def publish(self, finished: Cycle) -> None:
        """Count the cycle's evictions."""
        self._pods = finished.snapshot.pods
        for event in finished.kills:
            if event.reason in COUNTED and (workload := self._victims.get(event.pod)):
                self._history.add(workload, finished.snapshot.wall_time_ns / NS_PER_S)
        listed = {pod.key for pod in self._pods}
        self._victims = {key: workload for key, workload in self._victims.items() if key in listed}
        for victim in finished.evictions.victims if finished.evictions is not None else ():
            if not victim.dry_run and not victim.notify:
                self._victims[victim.pod] = self._workload(victim.uid)

    def problem(self) -> Unavailable | None:
        """Return why budgets are not available; None if they are or were not needed lately."""
        return self._problem if self._clock() - self._failed_at_s <= 2 * REFRESH_S else None

    def latest(self) -> Mapping[str, PodEvictionRecord]:
        """Return the records of the pods of built-in plugins by uid, without waiting."""
        return self._latest

    async def run(self) -> None:
        """Load the records that built-in plugins need every REFRESH_S until cancelled."""
        while True:
            try:
                await self.refresh()
            except Exception:
                log.exception("eviction records could not be loaded; plugins evaluate without them")
                self._latest = {}
            await asyncio.sleep(REFRESH_S)

    async def refresh(self) -> None:
        """Load the records that built-in plugins need: those of shared pods, or none."""
        shared = [pod for pod in self._pods if pod.qos is QoSLevel.SHARED] if self._needed() else []
        self._latest = await self.load(shared)

    async def load(self, pods: Iterable[Pod]) -> Mapping[str, PodEvictionRecord]:
        """Return the records of these pods by uid, without pods whose budgets cannot be listed. Never raises for an error of
        the API server: `problem` reports it."""
        listed, now_s = list(pods), self._clock()
        # Pruned by age, so that calls for other namespaces share what is recent.
        self._budgets = {name: each for name, each in self._budgets.items() if now_s - each[0] < MAX_BUDGET_AGE_S}
        missing = sorted({pod.namespace for pod in listed} - self._budgets.keys())
        problems: list[Unavailable] = []
        try:
            # One deadline for all: a caller waits no longer with many namespaces.
            async with asyncio.timeout(LIST_TIMEOUT_S):
                await asyncio.gather(*(self._list(namespace, now_s, problems) for namespace in missing))
        except TimeoutError:
            text = f"the API server did not answer within {LIST_TIMEOUT_S:g} s"
            late = next(namespace for namespace in missing if namespace not in self._budgets)
            problems.append(Unavailable(f"disruption budgets of namespace {late}: {text}", LIST_REMEDY))
        if listed:
            self._problem, self._failed_at_s = next(iter(problems), None), now_s
        budgets = self._budgets
        return {pod.uid: self._record(pod, budgets[pod.namespace][1]) for pod in listed if pod.namespace in budgets}

    async def _list(self, namespace: str, now_s: float, problems: list[Unavailable]) -> None:
        try:
            answer = await self._client.list(DISRUPTION_BUDGETS, ListScope(namespace=namespace))
        except (ApiError, ApiUnreachable) as error:
            problems.append(Unavailable(f"disruption budgets of namespace {namespace}: {error}", LIST_REMEDY))
        else:
            self._budgets[namespace] = now_s, tuple(answer.objects.values())

    def _record(self, pod: Pod, budgets: Iterable[DisruptionBudget]) -> PodEvictionRecord:
        """Return the record of one pod. Of several budgets the one that allows the fewest disruptions counts; the API server
        refuses to evict such a pod at all (pkg/registry/core/pod/storage/eviction.go)."""
        buckets = self._history.buckets(self._workload(pod.uid), self._wall_clock())
        statuses = [budget.status for budget in budgets if budget.selects(pod)]
        if not statuses:
            return PodEvictionRecord(buckets=buckets)
        status = min(statuses, key=lambda each: each.disruptions_allowed)
        return PodEvictionRecord(
            has_budget=True,
            buckets=buckets,
            disruptions_allowed=status.disruptions_allowed,
            current_healthy=status.current_healthy,
            desired_healthy=status.desired_healthy,
            expected_pods=status.expected_pods,
        )

"""The controller `descheduler`: evaluates nodes, plans moves, and evicts by the Eviction API.
Every evaluation starts from current objects. If the API server does not answer, or if copies are stale, no pod is evicted:
before an eviction the pods of the hot node are listed, and the move is written to the Lease."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import msgspec

from common.throttled_log import ThrottledLog
from controller.descheduler.cluster_copy import ClusterCopy
from controller.descheduler.descheduler_kinds import MOVABLE_PODS
from controller.descheduler.descheduler_settings import DeschedulerSettings
from controller.descheduler.descheduling_report import (
    MAX_LISTED,
    DeschedulerHalt,
    DeschedulingReport,
    HotNodeReport,
    MoveReport,
)
from controller.descheduler.movable_pods import DisruptionAllowances
from controller.descheduler.move_history import (
    MAX_ANNOTATION_CHARS,
    MOVES_ANNOTATION,
    MoveHistory,
    format_history,
    parse_history,
)
from controller.descheduler.move_plan import HotNode, MovePlanner, NodePlan, PlanInputs, PlannedMove
from controller.descheduler.node_load import (
    HotCause,
    HotStreaks,
    NodeClasses,
    NodeLoad,
    NodeThresholds,
    classify_nodes,
    severity,
)
from controller.kinds import ControllerNode
from controller.object_events import ObjectWarning, write_warning
from controller.reconcile import MetricValues
from kube.client import KubeClient, ListScope
from kube.errors import ApiError, ApiUnreachable
from kube.informer import Informer
from kube.objects import LEASE_METADATA, format_timestamp

log = logging.getLogger(__name__)
CONTROLLER_NAME = "descheduler"
MAX_RELIEVED_NODES = 20
"""Hot nodes whose pods are listed in one evaluation, those with the highest usage first."""
HOT_METRIC, TARGETS_METRIC = "dioptase_descheduler_hot_nodes", "dioptase_descheduler_target_nodes"
STALE_METRIC, HALT_METRIC = "dioptase_descheduler_stale_nodes", "dioptase_descheduler_halt"
EVICTIONS_METRIC = "dioptase_descheduler_evictions_total"
EVICTED, DRY_RUN = "evicted", "dry-run"
SUCCESSES = (EVICTED, DRY_RUN)
TakeBudget = Callable[[str], Awaitable[str]]
"""Counts an eviction of a node in the eviction budget of the cluster; returns why it is not allowed, empty if it is."""


class DeschedulerController:
    """Controller of moves; `run` it while leading. The caller runs the informers, also those of `copy`."""

    def __init__(
        self,
        client: KubeClient,
        nodes: Informer[ControllerNode],
        settings: DeschedulerSettings,
        namespace: str,
        take_budget: TakeBudget,
        metrics: MetricValues,
    ) -> None:
        """`namespace` is the controller's namespace, in which the Lease with the moves is."""
        self._client, self._settings, self._metrics, self._take_budget = client, settings, metrics, take_budget
        self.copy = ClusterCopy(client, nodes, settings)
        self.report: DeschedulingReport | None = None
        """The latest evaluation; None before the first one."""
        self._streaks = HotStreaks(settings.low_node_load)
        self._lease_key = f"{namespace}/{settings.lease}"
        self._history = MoveHistory()
        """The moves that the Lease has; in a dry run those that would have been made."""
        self._lease_version: str | None = None
        self._throttled_log = ThrottledLog(log)

    async def run(self) -> None:
        """Run until cancelled."""
        for informer in (self.copy.nodes, *self.copy.informers):
            await informer.synced.wait()
        try:
            while True:
                try:
                    await self.evaluate(time.time(), time.monotonic())
                    self._throttled_log.clear()
                except (ApiError, ApiUnreachable) as error:
                    self._throttled_log.warn(f"no other pod is moved in this evaluation: {error}")
                await asyncio.sleep(self._settings.interval_s)
        finally:
            # The next leader reports other nodes.
            for name in (HOT_METRIC, TARGETS_METRIC, STALE_METRIC, HALT_METRIC):
                self._metrics.set(name, ())

    async def evaluate(self, now_s: float, tick_s: float) -> None:
        """Evaluate all nodes once, and move pods. `now_s` is since the epoch, `tick_s` monotonic. Raises ApiError and
        ApiUnreachable."""
        args = self._settings.low_node_load
        if args.paused:
            self._publish_halt(DeschedulerHalt.PAUSED, "lowNodeLoad.paused is true", now_s)
            return
        if stale := self.copy.stale_resources(tick_s):
            message = f"nothing was received from the API server about {', '.join(stale)}; check whether it answers"
            self._publish_halt(DeschedulerHalt.STALE, message, now_s)
            return
        loads = self.copy.loads()
        classes, thresholds = classify_nodes(loads.values(), self._settings, now_s)
        ready = self._observe(loads, classes)
        report = self._describe(classes, now_s)
        if len(classes.targets) <= args.number_of_nodes:
            message = (
                f"{len(classes.targets)} nodes may take pods, more than {args.number_of_nodes} are needed"
                " (lowNodeLoad.numberOfNodes)"
            )
            report = msgspec.structs.replace(report, halt=DeschedulerHalt.TARGETS, message=message)
            ready = []
        elif ready and not await self._load_history(now_s):
            what = f"annotation {MOVES_ANNOTATION} of Lease {self._lease_key}"
            message = f"{what} is invalid, so that cool-downs are not known; remove it"
            report = msgspec.structs.replace(report, halt=DeschedulerHalt.HISTORY, message=message)
            ready = []
        self._publish(report)
        resting = self._history.sources.keys() | self._history.targets.keys()
        state = f"waits: it took part in a move less than {self._settings.node_cooldown_s:g} s ago (nodeCooldownS)"
        for name in resting & set(ready):
            self._update_report(name, state=state)
        if due := [name for name in ready if name not in resting]:
            await self._relieve(due, loads, classes, thresholds, now_s)

    def _observe(self, loads: Mapping[str, NodeLoad], classes: NodeClasses) -> list[str]:
        """Count the reports of all nodes; return the nodes to relieve, the one with the highest usage first."""
        stale = set(classes.stale)
        self._streaks.retain(loads.keys() - stale)
        ready = [
            name
            for name, load in loads.items()
            if name not in stale and self._streaks.observe(name, load.reported_at_s, is_hot=name in classes.hot)
        ]
        args = self._settings.low_node_load
        return sorted(ready, key=lambda name: (-severity(loads[name], args), name))[:MAX_RELIEVED_NODES]

    async def _relieve(
        self,
        due: Iterable[str],
        loads: Mapping[str, NodeLoad],
        classes: NodeClasses,
        thresholds: NodeThresholds,
        now_s: float,
    ) -> None:
        nodes = []
        for name in due:
            listed = await self._client.list(MOVABLE_PODS, ListScope(fields=f"spec.nodeName={name}"))
            nodes.append(HotNode(name, self.copy.with_requests(listed.objects), self.copy.group_usages(name)))
        inputs = PlanInputs(
            state=self.copy.state,
            chain=self.copy.chain,
            settings=self._settings,
            factors=self.copy.factors,
            loads=loads,
            classes=classes,
            thresholds=thresholds,
            targets=self.copy.target_nodes(classes.targets),
            allowances=DisruptionAllowances(self.copy.budgets.store.values()),
            history=self._history,
            now_s=now_s,
        )
        for plan in MovePlanner(inputs).plan(nodes):
            await self._execute(plan, now_s)

    async def _execute(self, plan: NodePlan, now_s: float) -> None:
        moves: list[MoveReport] = []
        skipped = {each.pod: each.reason for each in plan.skipped[:MAX_LISTED]}
        try:
            for number, move in enumerate(plan.moves):
                result = await self._move(move, now_s)
                self._metrics.count(EVICTIONS_METRIC, move.candidate.parsed.level.value, result)
                moves.append(_describe_move(move, result))
                level = logging.INFO if result in SUCCESSES else logging.WARNING
                log.log(level, "pod %s: %s: %s", move.candidate.pod.key, result, moves[-1].message)
                if result not in SUCCESSES:
                    # What was planned next was for a node without this pod: an online pod must not leave in its place.
                    why = f"the move of {move.candidate.pod.key}, planned before it, was not made: {result}"
                    skipped |= {each.candidate.pod.key: why for each in plan.moves[number + 1 :]}
                    break
        finally:
            state = "relieved" if any(each.result in SUCCESSES for each in moves) else "no pod can be moved"
            self._update_report(plan.node, state=state, moves=tuple(moves), skipped=skipped)

    async def _move(self, move: PlannedMove, now_s: float) -> str:
        """Move one pod; return the result. Raises ApiError and ApiUnreachable if no other pod can be moved now."""
        before, pod = self._history, move.candidate.pod
        self._history = before.with_move(move.candidate.workload, move.source, move.target, now_s)
        if len(format_history(self._history)) > MAX_ANNOTATION_CHARS:
            self._history = before
            log.warning(
                "pod %s is not moved: the Lease has no room for another cool-down; shorten workloadCooldownS", pod.key
            )
            return "refused"
        if self._settings.low_node_load.dry_run:
            return DRY_RUN
        if denial := await self._take_budget(move.source):
            self._history = before
            log.warning("pod %s is not moved: the eviction budget of the cluster: %s", pod.key, denial)
            return "cluster-budget"
        await self._store_history()
        try:
            await self._client.evict(MOVABLE_PODS, pod.key, pod.metadata.uid)
        except ApiError as error:
            # After ApiUnreachable, and after an error of the server, such as a timeout of etcd, the pod may have been evicted,
            # so that the move stays recorded.
            if error.status >= 500:
                raise
            is_gone = error.missing or error.conflict
            # A refused pod would be refused again in the next evaluations, and each request counts in the cluster's budget.
            self._history = before if is_gone else before.with_attempt(move.candidate.workload, now_s)
            await self._store_history()
            if is_gone:
                return "gone"
            if error.status != 429:
                log.warning("pod %s cannot be evicted: %s", pod.key, error)
            return "budget" if error.status == 429 else "refused"
        self._streaks.reset(move.source)
        warning = ObjectWarning("Descheduled", "Evict", _describe_move(move, EVICTED).message)
        await write_warning(self._client, MOVABLE_PODS, pod.metadata, warning)
        return EVICTED

    async def _load_history(self, now_s: float) -> bool:
        """Read the latest moves; return False if they are invalid. A dry run uses only its own moves."""
        history: MoveHistory | None = self._history
        if not self._settings.low_node_load.dry_run:
            try:
                lease = await self._client.get(LEASE_METADATA, self._lease_key)
            except ApiError as error:
                if not error.missing:
                    raise
                history, self._lease_version = MoveHistory(), None
            else:
                history, self._lease_version = (
                    parse_history(lease.metadata.annotations),
                    lease.metadata.resource_version,
                )
        if history is None:
            return False
        self._history = history.within(self._settings.node_cooldown_s, self._settings.workload_cooldown_s, now_s)
        return True

    async def _store_history(self) -> None:
        """Write the moves. A conflict (409) means that another replica writes too; ApiError then prevents the eviction."""
        annotations = {MOVES_ANNOTATION: format_history(self._history)}
        metadata: dict[str, Any] = {"annotations": annotations}
        if self._lease_version is None:
            namespace, _, metadata["name"] = self._lease_key.rpartition("/")
            body = {"apiVersion": LEASE_METADATA.api_version, "kind": LEASE_METADATA.kind, "metadata": metadata}
            written = await self._client.create(LEASE_METADATA, body, namespace)
        else:
            metadata["resourceVersion"] = self._lease_version
            written = await self._client.merge_patch(LEASE_METADATA, self._lease_key, {"metadata": metadata})
        self._lease_version = written.metadata.resource_version

    def _describe(self, classes: NodeClasses, now_s: float) -> DeschedulingReport:
        needed = self._settings.low_node_load.anomaly_condition.consecutive_abnormalities
        hot = []
        for name, reasons in classes.hot.items():
            count = self._streaks.count(name)
            state = "hot for long enough" if count >= needed else f"{count} of {needed} consecutive hot reports"
            hot.append(
                HotNodeReport(node=name, reasons=tuple(each.text for each in reasons), hot_reports=count, state=state)
            )
        causes = Counter(cause for reasons in classes.hot.values() for cause in {each.cause for each in reasons})
        self._metrics.set(HOT_METRIC, [((cause.value,), causes[cause]) for cause in HotCause])
        self._metrics.set(TARGETS_METRIC, [((), len(classes.targets))])
        self._metrics.set(STALE_METRIC, [((), len(classes.stale))])
        return DeschedulingReport(
            at=format_timestamp(now_s),
            dry_run=self._settings.low_node_load.dry_run,
            hot_nodes=tuple(sorted(hot, key=lambda each: (-each.hot_reports, each.node))[:MAX_LISTED]),
            targets=classes.targets[:MAX_LISTED],
            target_count=len(classes.targets),
            stale_nodes=classes.stale[:MAX_LISTED],
            stale_count=len(classes.stale),
            problems=dict(self.copy.state.problems),
        )

    def _update_report(self, name: str, **fields: Any) -> None:
        """Change fields of a hot node in the report."""
        assert self.report is not None, "a report is published before pods are moved"
        hot = tuple(
            msgspec.structs.replace(each, **fields) if each.node == name else each for each in self.report.hot_nodes
        )
        self.report = msgspec.structs.replace(self.report, hot_nodes=hot)

    def _publish_halt(self, halt: DeschedulerHalt, message: str, now_s: float) -> None:
        dry_run = self._settings.low_node_load.dry_run
        self._publish(DeschedulingReport(at=format_timestamp(now_s), dry_run=dry_run, halt=halt, message=message))

    def _publish(self, report: DeschedulingReport) -> None:
        if self.report is None or self.report.halt is not report.halt:
            log.info("descheduler: %s", report.message or "pods may be moved")
        self.report = report
        self._metrics.set(HALT_METRIC, [((halt.value,), halt is report.halt) for halt in DeschedulerHalt])


def _describe_move(move: PlannedMove, result: str) -> MoveReport:
    """Describe a move. The event of the pod has the message."""
    relieves = f"Moving the pod relieves {move.gain:.1%} of node {move.source}"
    reasons = "; ".join(reason.text for reason in move.reasons)
    message = f"{relieves}, which is hot: {reasons}. Node {move.target} would take it"
    return MoveReport(
        pod=move.candidate.pod.key,
        level=move.candidate.parsed.level.value,
        target=move.target,
        relieves=round(move.gain, 4),
        result=result,
        message=message,
    )

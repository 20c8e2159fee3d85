"""Writes reclaimable CPU and memory as extended resources of the Node, for a stock scheduler.
The kubelet resets them to zero when it registers the Node again, so they are written on change and every 30 s.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent.reporter.cnr_inputs import reclaimed_allocatable
from agent.reporter.desired_state_writer import NODES, WithdrawableWriter
from api.decision import Cycle
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from kube.client import KubeClient

RESYNC_S = 30.0
MAX_SILENT_POLLS = 12
"""Polls without an evaluated cycle before writing stops. Such an agent cannot take resources back either, and must not
restore amounts that the lifecycle controller has removed from the Node meanwhile."""
REMOVED_RESOURCES: Mapping[str, str | int | None] = {RECLAIMED_CPU: None, RECLAIMED_MEMORY: None}


class ExtendedResources(WithdrawableWriter):
    """Capacity and allocatable of the reclaimed resources in the Node's status."""

    name, form = "extended-resources", "patch"
    forbidden_remedy = (
        "give the agent's role patch of nodes/status (the chart: --set agent.extendedResources=true), or set "
        "report.extendedResources: false"
    )
    leftover_text = "reclaimed resources stay allocatable; remove them from its status"

    def __init__(self, client: KubeClient, node: str, *, reports_reclaimable: bool = True) -> None:
        """Without `reports_reclaimable`, as in a dry run, amounts that an earlier agent wrote are removed."""
        super().__init__(client, node)
        self._reports_reclaimable = reports_reclaimable
        self._desired: Mapping[str, str | int | None] = {}
        self._silent_polls = 0

    def publish(self, cycle: Cycle) -> None:
        """Take the headroom of this cycle. An unknown headroom keeps the previous amounts."""
        headroom = None if cycle.advice is None else cycle.advice.reported_headroom
        if not self._reports_reclaimable:
            self._silent_polls, self._desired = 0, REMOVED_RESOURCES
        elif headroom is not None:
            if cycle.snapshot.pods_fresh:
                self._silent_polls = 0
            self._desired = dict(reclaimed_allocatable(headroom.cores, headroom.memory_bytes)) or self._desired

    async def sync(self, now_s: float) -> None:
        self._silent_polls += 1
        await super().sync(now_s)

    async def _write(self, now_s: float) -> bool:
        desired = self._desired
        if not desired or self._silent_polls > MAX_SILENT_POLLS:
            return False
        if desired == self._written and now_s < self._resync_due_s:
            return False
        await self._patch(desired)
        self._written, self._resync_due_s = desired, now_s + RESYNC_S
        return True

    async def _delete(self) -> None:
        await self._patch(dict.fromkeys(self._written))

    async def _patch(self, amounts: Mapping[str, str | int | None]) -> None:
        body = {"status": {"capacity": amounts, "allocatable": amounts}}
        await self._client.merge_patch(NODES, self._node, body, "status")

    def _failure_text(self, error: Exception) -> str:
        return f"reclaimable resources cannot be written to Node {self._node}: {error}"

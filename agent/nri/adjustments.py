"""Computes the adjustment of a container from the latest cycle's inputs, in a worker thread.
It keeps a deadline, and returns None where the inputs are stale or the request is not understood. It reads the
parent cgroup's limits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from posixpath import dirname
from typing import Any, NamedTuple

import msgspec

from agent.advisor.preview import PreviewInputs, preview_decisions
from agent.nri.oci_resources import ContainerBounds, clamp_values, knobs_in_resources, original_values, requested_values
from agent.qrm.actuator.pending_originals import PendingOriginals
from agent.qrm.actuator.writer import cgroup_directory, read_effective_list
from agent.qrm.cpuset.state import CpusetEntry
from agent.qrm.knobs.knob_files import CFS_PERIOD, CFS_QUOTA
from agent.qrm.knobs.notation import DEFAULT_PERIOD_US
from agent.sensors.cgroup.hierarchy import Hierarchy
from agent.sensors.cgroup.pod_cgroup_paths import is_valid_id, parse_cgroups_path
from agent.sensors.pods.pod_join import (
    KubeletPod,
    KubeletPodMetadata,
    KubeletPodSpec,
    pod_from_kubelet,
)
from agent.sensors.pods.pod_spec import KubernetesContainer, KubernetesResources, PodParsingContext
from api.decision import Decision, Outcome, OutcomeStatus
from api.knobs import Knob
from api.pod import Pod
from api.text import quote
from api.units import NS_PER_S

log = logging.getLogger(__name__)
MIN_SHARES, SHARES_PER_CPU, MILLICORES_PER_CPU = 2, 1024, 1000
"""Constants of the kubelet's conversion between millicores and CPU shares (its `MinShares`, `SharesPerCPU`)."""
_CPUSET_FILES = {True: ("cpuset.cpus.effective", "cpuset.mems.effective"), False: ("cpuset.cpus", "cpuset.mems")}
ListedPod = Callable[[str], KubeletPod | None]
"""Function from a uid to its pod in the kubelet's latest list; None if it is not listed."""
MAX_AGE_CYCLES, MIN_MAX_AGE_S = 5, 15.0
"""Inputs older than both are stale."""
EXPECTED_CONTAINER_S = 30.0
"""Time during which a created container counts as running although no cycle has listed it."""


def container_cgroup(container: Any) -> str:
    """Return the path of the container's future cgroup. Raises ValueError unless the runtime names an absolute path."""
    return parse_cgroups_path(container.linux.cgroups_path)


def pod_of_request(request: Any, cgroup: str, listed: ListedPod, parsing: PodParsingContext) -> Pod:
    """Return the pod with the one container of the request, as the kubelet lists it, else as the runtime describes it: without
    priority and with no resources but CPU and memory. Raises ValueError for an invalid uid or an empty name."""
    sandbox, container = request.pod, request.container
    if not is_valid_id(sandbox.uid) or not container.name:
        raise ValueError(f"{quote(sandbox.uid)} is not a pod uid, or its container has no name")
    kube = listed(sandbox.uid)
    if kube is None or container.name not in _container_names(kube):
        amounts = _resource_amounts(container.linux.resources)
        kube = KubeletPod(
            metadata=KubeletPodMetadata(
                name=sandbox.name,
                uid=sandbox.uid,
                namespace=sandbox.namespace or "default",
                labels=dict(sandbox.labels),
                annotations=dict(sandbox.annotations),
            ),
            spec=KubeletPodSpec(containers=[KubernetesContainer(name=container.name, resources=amounts)]),
        )
    return pod_from_kubelet(kube, {container.name: cgroup}, parsing)


def read_bounds(cgroup: str, hierarchy: Hierarchy) -> ContainerBounds:
    """Read the limits of the parent cgroup, which bound the container."""
    unified, parent = hierarchy.mode == "v2", dirname(cgroup)
    cpuset = hierarchy.controller("cpuset")
    cpus = mems = None
    if cpuset is not None:
        files = _CPUSET_FILES[unified]
        cpus, mems = (read_effective_list(cgroup_directory(cpuset, parent), (file,)) for file in files)
    return ContainerBounds(
        cpus=frozenset(cpus or ()),
        mems=frozenset(mems or ()),
        cores=None if unified else _parent_quota_cores(hierarchy, parent),
        unified=unified,
    )


def _parent_quota_cores(hierarchy: Hierarchy, cgroup: str) -> float | None:
    """Return the nearest quota above. On cgroup v1 the kernel refuses a larger quota ratio than that of an ancestor
    (`tg_cfs_schedulable_down` in kernel/sched/core.c)."""
    cpu = hierarchy.controller("cpu")
    while cpu is not None and cgroup not in ("", "/"):
        try:
            quota, period = (
                int((cgroup_directory(cpu, cgroup) / file).read_text()) for file in (CFS_QUOTA, CFS_PERIOD)
            )
        except (OSError, ValueError):
            return None
        if quota > 0:
            return quota / (period or DEFAULT_PERIOD_US)
        cgroup = dirname(cgroup)
    return None


def _container_names(kube: KubeletPod) -> set[str]:
    kinds = (kube.spec.containers, kube.spec.init_containers or (), kube.spec.ephemeral_containers or ())
    return {each.name for kind in kinds for each in kind}


def _resource_amounts(resources: Any) -> KubernetesResources:
    """Return requests and limits, converted back from the kubelet's OCI resources."""
    cpu, memory = resources.cpu, resources.memory
    requests: dict[str, str | int | float] = {}
    limits: dict[str, str | int | float] = {}
    if cpu.quota.value > 0:
        limits["cpu"] = f"{cpu.quota.value * MILLICORES_PER_CPU // (cpu.period.value or DEFAULT_PERIOD_US)}m"
    if cpu.shares.value > MIN_SHARES:
        # Rounded down like the kubelet's conversion, so that the request never exceeds the limit.
        requests["cpu"] = f"{cpu.shares.value * MILLICORES_PER_CPU // SHARES_PER_CPU}m"
    if memory.limit.value > 0:
        limits["memory"] = memory.limit.value
    return KubernetesResources(requests=requests, limits=limits)


class NriContext(NamedTuple):
    """Inputs of the plugin. Every function may be called from any thread."""

    preview_inputs: Callable[[], PreviewInputs | None]
    listed: ListedPod
    wake: Callable[[], None]
    """Requests a pod list at once, because a pod is coming or has started."""
    parsing: PodParsingContext
    hierarchy: Hierarchy
    pending_originals: PendingOriginals


class ContainerAdjustment(NamedTuple):
    """Values for a container, and the values that its owner requested of the same knobs."""

    pod: Pod
    cgroup: str
    values: dict[Knob, str]
    owners: dict[Knob, str]
    cpu_entries: Mapping[str, CpusetEntry]
    """CPU allocations of the pod's containers by name, to be reserved until a cycle lists the pod."""
    outcomes: Mapping[Knob, Outcome]
    """Outcome of each value once the runtime has created the container, with its reason."""


class ContainerAdjuster:
    """Computes adjustments one at a time; its methods belong to one event loop."""

    def __init__(self, context: NriContext, timeout_s: float) -> None:
        self._context, self._timeout_s = context, timeout_s
        self.counts = dict.fromkeys(("adjusted", "unchanged", "unknown", "late", "refused"), 0)
        """Number of requests by answer. Any thread may read it."""
        self._expected: dict[str, tuple[float, Pod]] = {}
        self._worker = ThreadPoolExecutor(1, "nri-answer")
        self._busy = False

    def close(self) -> None:
        """Stop the worker. Idempotent."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def expect(self, adjustment: ContainerAdjustment) -> None:
        """Treat this container as running and reserve its CPUs, although no cycle has listed it yet."""
        now = time.monotonic()
        self._expected[adjustment.cgroup] = (now, adjustment.pod)
        self._context.pending_originals.reservations.reserve(adjustment.pod.uid, adjustment.cpu_entries, now)

    def forget(self, container: Any) -> None:
        """Drop a stopped container."""
        with suppress(ValueError):
            self._expected.pop(container_cgroup(container), None)

    async def adjust_new(self, request: Any) -> ContainerAdjustment | None:
        """Return the adjustment of a container about to be created; None if there is none in time. Never raises."""
        return await self._adjust(request, request.container.linux.resources, frozenset(Knob))

    async def adjust_update(self, request: Any) -> ContainerAdjustment | None:
        """Return the adjustment of the knobs that an update sets; None if there is none in time. Never raises."""
        return await self._adjust(request, request.linux_resources, knobs_in_resources(request.linux_resources))

    async def _adjust(self, request: Any, resources: Any, knobs: frozenset[Knob]) -> ContainerAdjustment | None:
        if self._busy:
            self.counts["late"] += 1
            return None
        self._busy = True
        expected = self._still_expected()
        work = asyncio.get_running_loop().run_in_executor(
            self._worker, self._compute, request, resources, knobs, expected
        )
        work.add_done_callback(self._release)
        adjustment = None
        try:
            async with asyncio.timeout(self._timeout_s):
                adjustment = await asyncio.shield(work)
        except TimeoutError:
            self.counts["late"] += 1
            return None
        except ValueError as error:
            log.warning("NRI: container %s is not adjusted: %s", request.container.id[:80], error)
        except Exception:
            log.exception("NRI: container %s is not adjusted", request.container.id[:80])
        self.counts["unknown" if adjustment is None else "adjusted" if adjustment.values else "unchanged"] += 1
        return adjustment

    def _release(self, work: asyncio.Future[ContainerAdjustment | None]) -> None:
        self._busy = False
        if not work.cancelled():
            work.exception()  # Mark an exception after the timeout as retrieved.

    def _still_expected(self) -> list[Pod]:
        inputs, now = self._context.preview_inputs(), time.monotonic()
        self._expected = {
            cgroup: (since_s, pod)
            for cgroup, (since_s, pod) in self._expected.items()
            if now - since_s < EXPECTED_CONTAINER_S and not (inputs is not None and _is_listed(cgroup, inputs))
        }
        return [pod for _, pod in self._expected.values()]

    def _compute(
        self, request: Any, resources: Any, knobs: frozenset[Knob], expected: list[Pod]
    ) -> ContainerAdjustment | None:
        """Compute in the worker thread. Raises ValueError for an invalid request."""
        inputs, reservations = self._context.preview_inputs(), self._context.pending_originals.reservations
        if inputs is None:
            return None
        age_s = (time.monotonic_ns() - inputs.now_ns) / NS_PER_S
        if age_s > max(MAX_AGE_CYCLES * inputs.config.interval_s, MIN_MAX_AGE_S):
            return None
        cgroup = container_cgroup(request.container)
        pod = pod_of_request(request, cgroup, self._context.listed, self._context.parsing)
        state = msgspec.structs.replace(inputs.state, cpus=reservations.merge_into(inputs.state.cpus))
        decisions, cpus = preview_decisions(msgspec.structs.replace(inputs, state=state), [*expected, pod], cgroup)
        bounds = read_bounds(cgroup, self._context.hierarchy)
        requested = requested_values(resources, bounds)
        desired = {knob: decision.value for knob, decision in decisions.items()}
        values = clamp_values(desired, requested, resources, bounds)
        values = {knob: value for knob, value in values.items() if knob in knobs}
        outcomes = {
            knob: _adjustment_outcome(knob, value, requested[knob], decisions) for knob, value in values.items()
        }
        owners = original_values(values, requested, resources)
        return ContainerAdjustment(pod, cgroup, values, owners, cpus.pod(pod.uid), outcomes)


def _is_listed(cgroup: str, inputs: PreviewInputs) -> bool:
    """Return whether a cycle has seen both the container's cgroup and its pod."""
    snapshot = inputs.snapshot
    return cgroup in snapshot.cgroups and any(
        container.cgroup == cgroup for pod in snapshot.pods for container in pod.containers
    )


def _adjustment_outcome(knob: Knob, value: str, requested: str, decisions: Mapping[Knob, Decision]) -> Outcome:
    """Return the outcome of changing a requested value, with the decision that caused it."""
    # The lowest weight replaces cpu.idle (see oci_resources), whatever weight was decided as well.
    idle = knob is Knob.WEIGHT and Knob.IDLE in decisions and decisions[Knob.IDLE].value == "1"
    cause = decisions[Knob.IDLE if idle else knob]
    return Outcome(
        decision=msgspec.structs.replace(cause, knob=knob, value=value),
        status=OutcomeStatus.APPLIED,
        before=requested,
        after=value,
        clamped_from=None if idle or cause.value == value else cause.value,
    )

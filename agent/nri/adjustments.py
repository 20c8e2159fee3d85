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
from posixpath import dirname
from typing import Any, NamedTuple

import msgspec

from agent.advisor.preview import PreviewInputs, preview_decisions
from agent.nri.oci_resources import (
    PERIOD_US,
    ContainerBounds,
    clamp_values,
    knobs_in_resources,
    original_values,
    requested_values,
)
from agent.qrm.actuator.pending_originals import PendingOriginals
from agent.qrm.actuator.writer import cgroup_directory, read_effective_list
from agent.qrm.cpuset.state import CpusetEntry
from agent.qrm.knobs.knob_files import CFS_PERIOD, CFS_QUOTA
from agent.sensors.cgroup.hierarchy import Hierarchy
from agent.sensors.cgroup.pod_cgroup_paths import is_valid_id, parse_cgroups_path
from agent.sensors.pods.pod_join import (
    KubeletContainerSpec,
    KubeletPod,
    KubeletPodMetadata,
    KubeletPodSpec,
    KubeletResources,
    pod_from_kubelet,
)
from agent.sensors.pods.pod_spec import PodParsingContext
from api.decision import Decision, Outcome, OutcomeStatus
from api.knobs import Knob
from api.pod import Pod

MIN_SHARES, SHARES_PER_CPU, MILLICORES_PER_CPU = 2, 1024, 1000
_CPUSET_FILES = {True: ("cpuset.cpus.effective", "cpuset.mems.effective"), False: ("cpuset.cpus", "cpuset.mems")}
ListedPod = Callable[[str], KubeletPod | None]
"""What the kubelet has said of the pod with that uid, if it has."""


def container_cgroup(container: Any) -> str:
    """Where it will be. Raises ValueError where the runtime does not say so from the root on."""
    return parse_cgroups_path(container.linux.cgroups_path)


def pod_of_request(request: Any, cgroup: str, listed: ListedPod, door: PodParsingContext) -> Pod:
    """The pod with that one container: as the kubelet lists it, else as the runtime tells it, which has no resources but CPU
    and memory, and no priority. Raises ValueError for a name that cannot be."""
    said, container = request.pod, request.container
    if not is_valid_id(said.uid) or not container.name:
        raise ValueError(f"{said.uid[:80]!r} is no uid of a pod, or its container has no name")
    kube = listed(said.uid)
    if kube is None or container.name not in _container_names(kube):
        amounts = _resource_amounts(container.linux.resources)
        kube = KubeletPod(
            metadata=KubeletPodMetadata(
                name=said.name,
                uid=said.uid,
                namespace=said.namespace or "default",
                labels=dict(said.labels),
                annotations=dict(said.annotations),
            ),
            spec=KubeletPodSpec(containers=[KubeletContainerSpec(name=container.name, resources=amounts)]),
        )
    return pod_from_kubelet(kube, {container.name: cgroup}, door)


def read_bounds(cgroup: str, hierarchy: Hierarchy) -> ContainerBounds:
    """What bounds it, as its parent's files say now."""
    unified, above = hierarchy.mode == "v2", dirname(cgroup)
    cpuset = hierarchy.controller("cpuset")
    cpus = mems = None
    if cpuset is not None:
        files = _CPUSET_FILES[unified]
        cpus, mems = (read_effective_list(cgroup_directory(cpuset, above), (file,)) for file in files)
    return ContainerBounds(
        cpus=frozenset(cpus or ()),
        mems=frozenset(mems or ()),
        cores=None if unified else _parent_quota_cores(hierarchy, above),
        unified=unified,
    )


def _parent_quota_cores(hierarchy: Hierarchy, cgroup: str) -> float | None:
    """On version 1 nobody may have a larger part of his period than the cgroup above him."""
    cpu = hierarchy.controller("cpu")
    while cpu is not None and cgroup not in ("", "/"):
        try:
            quota, period = (
                int((cgroup_directory(cpu, cgroup) / file).read_text()) for file in (CFS_QUOTA, CFS_PERIOD)
            )
        except (OSError, ValueError):
            return None
        if quota > 0:
            return quota / (period or PERIOD_US)
        cgroup = dirname(cgroup)
    return None


def _container_names(kube: KubeletPod) -> set[str]:
    kinds = (kube.spec.containers, kube.spec.init_containers or (), kube.spec.ephemeral_containers or ())
    return {each.name for kind in kinds for each in kind}


def _resource_amounts(resources: Any) -> KubeletResources:
    """Requests and limits as the kubelet has translated them for the runtime."""
    cpu, memory = resources.cpu, resources.memory
    requests: dict[str, str | int | float] = {}
    limits: dict[str, str | int | float] = {}
    if cpu.quota.value > 0:
        limits["cpu"] = f"{cpu.quota.value * MILLICORES_PER_CPU // (cpu.period.value or PERIOD_US)}m"
    if cpu.shares.value > MIN_SHARES:
        # Rounded down as the kubelet rounds, so that it is never more than the limit.
        requests["cpu"] = f"{cpu.shares.value * MILLICORES_PER_CPU // SHARES_PER_CPU}m"
    if memory.limit.value > 0:
        limits["memory"] = memory.limit.value
    return KubeletResources(requests=requests, limits=limits)


log = logging.getLogger(__name__)
MAX_AGE_CYCLES, MIN_MAX_AGE_S = 5, 15.0
"""A round that is older than so many, and than that, says nothing of now."""
EXPECTED_CONTAINER_S = 30.0
"""So long somebody who was made is taken for one who will be listed."""


class NriContext(NamedTuple):
    """What is looked at, all of which any thread may ask."""

    preview_inputs: Callable[[], PreviewInputs | None]
    listed: ListedPod
    wake: Callable[[], None]
    """Have the pods looked at now: one is coming, or one has started."""
    door: PodParsingContext
    hierarchy: Hierarchy
    foretold: PendingOriginals


class ContainerAdjustment(NamedTuple):
    """What is to be of a container, and what its owner wanted of the same knobs."""

    pod: Pod
    cgroup: str
    values: dict[Knob, str]
    owners: dict[Knob, str]
    places: Mapping[str, CpusetEntry]
    """CPUs of the pod's containers, by name, as they are to stay."""
    outcomes: Mapping[Knob, Outcome]
    """What will have come of each value once the container is there, and why it has it."""


class ContainerAdjuster:
    """To be asked in one event loop."""

    def __init__(self, surroundings: NriContext, bound_s: float) -> None:
        self._around, self._bound_s = surroundings, bound_s
        self.counts = dict.fromkeys(("adjusted", "unchanged", "unknown", "late", "refused"), 0)
        """Containers about to be made or changed, by what was answered. Any thread may read."""
        self._expected: dict[str, tuple[float, Pod]] = {}
        self._worker = ThreadPoolExecutor(1, "nri-answer")
        self._busy = False

    def close(self) -> None:
        """Idempotent."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def expect(self, found: ContainerAdjustment) -> None:
        """Count on that container from now on, though nobody lists it yet."""
        now = time.monotonic()
        self._expected[found.cgroup] = (now, found.pod)
        self._around.foretold.promised.make(found.pod.uid, found.places, now)

    def forget(self, container: Any) -> None:
        """It is gone."""
        try:
            self._expected.pop(container_cgroup(container), None)
        except ValueError:
            return

    async def made(self, request: Any) -> ContainerAdjustment | None:
        """What is to be of a container that is about to be made; None where that is not known in time. Never raises."""
        return await self._in_time(request, request.container.linux.resources, frozenset(Knob))

    async def changed(self, request: Any) -> ContainerAdjustment | None:
        """The same of one whose owner is about to set some of its knobs."""
        return await self._in_time(request, request.linux_resources, knobs_in_resources(request.linux_resources))

    async def _in_time(self, request: Any, resources: Any, knobs: frozenset[Knob]) -> ContainerAdjustment | None:
        if self._busy:
            self.counts["late"] += 1
            return None
        self._busy = True
        coming = self._still_expected()
        work = asyncio.get_running_loop().run_in_executor(self._worker, self._find, request, resources, knobs, coming)
        work.add_done_callback(self._free)
        try:
            async with asyncio.timeout(self._bound_s):
                found = await asyncio.shield(work)
        except TimeoutError:
            self.counts["late"] += 1
            return None
        except ValueError as error:
            log.warning("NRI: container %s is left as it is: %s", request.container.id[:80], error)
            found = None
        except Exception:
            log.exception("NRI: container %s is left as it is", request.container.id[:80])
            found = None
        self.counts["unknown" if found is None else "adjusted" if found.values else "unchanged"] += 1
        return found

    def _free(self, work: asyncio.Future[ContainerAdjustment | None]) -> None:
        self._busy = False
        if not work.cancelled():
            work.exception()  # whoever came too late to hear of it has said so

    def _still_expected(self) -> list[Pod]:
        basis, now = self._around.preview_inputs(), time.monotonic()
        there = basis.snapshot.cgroups if basis is not None else {}
        listed = {one.cgroup for pod in basis.snapshot.pods for one in pod.containers} if basis is not None else set()
        self._expected = {
            cgroup: each
            for cgroup, each in self._expected.items()
            if now - each[0] < EXPECTED_CONTAINER_S and not (cgroup in there and cgroup in listed)
        }
        return [pod for _, pod in self._expected.values()]

    def _find(
        self, request: Any, resources: Any, knobs: frozenset[Knob], coming: list[Pod]
    ) -> ContainerAdjustment | None:
        """In a thread beside. Raises ValueError for what cannot be understood."""
        basis = self._around.preview_inputs()
        if basis is None:
            return None
        age_s = (time.monotonic_ns() - basis.now_ns) / 1e9
        if age_s > max(MAX_AGE_CYCLES * basis.config.interval_s, MIN_MAX_AGE_S):
            return None
        cgroup = container_cgroup(request.container)
        pod = pod_of_request(request, cgroup, self._around.listed, self._around.door)
        known = msgspec.structs.replace(basis.state, cpus=self._around.foretold.promised.kept(basis.state.cpus))
        decisions, cpus = preview_decisions(msgspec.structs.replace(basis, state=known), [*coming, pod], cgroup)
        wanted = {knob: decision.value for knob, decision in decisions.items()}
        bounds = read_bounds(cgroup, self._around.hierarchy)
        asked = requested_values(resources, bounds)
        values = clamp_values(wanted, asked, resources, bounds)
        values = {knob: value for knob, value in values.items() if knob in knobs}
        outcomes = {knob: _adjustment_outcome(knob, value, asked[knob], decisions) for knob, value in values.items()}
        return ContainerAdjustment(
            pod, cgroup, values, original_values(values, asked, resources), cpus.pod(pod.uid), outcomes
        )


def _adjustment_outcome(knob: Knob, given: str, asked: str, decisions: Mapping[Knob, Decision]) -> Outcome:
    """From what the owner asked for to what the container is given, because of what was decided."""
    # The least weight stands in for cpu.idle, whatever weight was decided beside it.
    idle = knob is Knob.WEIGHT and Knob.IDLE in decisions and decisions[Knob.IDLE].value == "1"
    why = decisions[Knob.IDLE if idle else knob]
    return Outcome(
        decision=msgspec.structs.replace(why, knob=knob, value=given),
        status=OutcomeStatus.APPLIED,
        before=asked,
        after=given,
        clamped_from=None if idle or why.value == given else why.value,
    )

"""Serves the resource plugins of CPU and memory for KubeWharf's kubelet or Katalyst's ORM.
The protocol is `resourceplugin.v1alpha1`. Admitted containers are kept until the pod is listed and are merged
into the state of the next cycle. No cgroup is written here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from agent.katalyst.admission import (
    CPU,
    MEMORY,
    AdmissionInputs,
    AdmissionRefused,
    AdmissionRequest,
    AdmissionResult,
    admit_container,
    allowed_mems,
    cpu_hints,
    memory_hints,
    parse_admission_request,
)
from agent.katalyst.messages import MAX_ENTRIES, UnusableMessage, pods_by_uid
from agent.qrm.cpuset.state import POOL_ENTRY, RESERVE, CpusetEntry, CpusetState, cpu_lists_by_numa
from agent.qrm.cpuset.topology_hints import TopologyHint
from agent.qrm.cpuset.topology_layout import layout_of
from api.cpu import format_cpu_list, parse_cpu_list
from api.pod import Pod
from api.proto import resource_plugin_pb2 as plugin
from api.qos import AnnotationMapping
from common.grpc_unix import GrpcHandler, GrpcService, HandlerRefusal

log = logging.getLogger(__name__)
NS_PER_S = 1_000_000_000
OCI_PROPERTIES = {CPU: "CpusetCpus", MEMORY: "CpusetMems"}
OPTIONS = plugin.ResourcePluginOptions(with_topology_alignment=True, need_reconcile=True)
_ECHOED_FIELDS = (
    "pod_uid", "pod_namespace", "pod_name", "container_name", "container_type", "container_index", "pod_role", "pod_type",
    "native_qos_class",
)  # fmt: skip


class ResourcePluginServer:
    """Answers of both plugins; rounds come in by `look`."""

    def __init__(self, dialect: AnnotationMapping | None = None, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._dialect, self._now_ns = dialect or AnnotationMapping(), now_ns
        self._seen: AdmissionInputs | None = None
        self._admitted: dict[str, Pod] = {}
        self._entries: dict[str, dict[str, CpusetEntry]] = {}
        self._since_ns: dict[str, int] = {}
        self._removed: set[str] = set()

    def look(self, seen: AdmissionInputs) -> None:
        """Take what a round saw and decided. Who is listed is not only admitted any more, and who never is, was let go of by
        others: what it was given is kept as long as that of a pod that is gone."""
        self._seen = seen
        now, long_ns = self._now_ns(), round(seen.config.residual_s * NS_PER_S)
        # Rounds run in another thread: a pod may be admitted while this one was judged, and only the next one has its entry.
        never = {uid for uid, since_ns in tuple(self._since_ns.items()) if now - since_ns > long_ns}
        for uid in (*pods_by_uid(seen.pods), *never):
            if uid in never or self._entries.get(uid, {}).keys() <= seen.state.pod(uid).keys():
                self._forget(uid)
        self._removed &= seen.state.pod_entries.keys()

    def merged(self, state: CpusetState) -> CpusetState:
        """What the next round is to know: with the containers that were admitted, without the pods that were removed."""
        listed = pods_by_uid(self._seen.pods) if self._seen is not None else {}
        entries = {uid: its for uid, its in state.pod_entries.items() if uid not in self._removed or uid in listed}
        for uid, its in tuple(self._entries.items()):
            entries[uid] = {**its, **entries.get(uid, {})}
        return msgspec.structs.replace(state, pod_entries=entries)

    def listed(self) -> tuple[Pod, ...]:
        """Pods that run or were admitted. Raises Refusal before the first round."""
        return self._now().pods

    def services(self, resource: str) -> GrpcService:
        """`resourceplugin.v1alpha1.ResourcePlugin` for `cpu` or `memory`."""
        handlers: dict[str, GrpcHandler] = {
            "GetResourcePluginOptions": self._options,
            "GetTopologyHints": partial(self._hints, resource),
            "Allocate": partial(self._allocate, resource),
            "RemovePod": self._remove,
            "GetResourcesAllocation": partial(self._allocations, resource),
            "GetTopologyAwareResources": partial(self._aware, resource),
            "GetTopologyAwareAllocatableResources": partial(self._allocatable, resource),
            "PreStartContainer": self._prestart,
        }
        return GrpcService(plugin.DESCRIPTOR.services_by_name["ResourcePlugin"], handlers)

    def _now(self) -> AdmissionInputs:
        if self._seen is None:
            raise HandlerRefusal("no round is finished yet; ask again in a moment")
        seen = self._seen
        pods = (*(pod for pod in seen.pods if pod.uid not in self._admitted), *self._admitted.values())
        return msgspec.structs.replace(seen, pods=pods, state=self.merged(seen.state), now_ns=self._now_ns())

    def _ask(self, resource: str, request: Any, seen: AdmissionInputs) -> AdmissionRequest:
        try:
            return parse_admission_request(
                request, resource, pods_by_uid(seen.pods).get(request.pod_uid), self._dialect
            )
        except UnusableMessage as error:
            raise HandlerRefusal(str(error)) from None

    async def _options(self, _request: Any, _words: Mapping[str, str]) -> Any:
        return OPTIONS

    async def _prestart(self, _request: Any, _words: Mapping[str, str]) -> Any:
        return plugin.PreStartContainerResponse()

    async def _hints(self, resource: str, request: Any, _words: Mapping[str, str]) -> Any:
        answer = _echo_request(plugin.ResourceHintsResponse(resource_name=resource), request)
        if request.container_type == plugin.INIT:
            return answer
        seen = self._now()
        ask = self._ask(resource, request, seen)
        try:
            found = (cpu_hints if resource == CPU else memory_hints)(ask, seen)
        except AdmissionRefused as error:
            raise HandlerRefusal(str(error)) from None
        if found is not None:
            # Nothing said is no preference; an empty list would be: nowhere.
            answer.resource_hints[resource].CopyFrom(_encode_hints(found))
        return answer

    async def _allocate(self, resource: str, request: Any, _words: Mapping[str, str]) -> Any:
        answer = _echo_request(plugin.ResourceAllocationResponse(resource_name=resource), request)
        if request.container_type == plugin.INIT:
            return answer
        seen = self._now()
        ask = self._ask(resource, request, seen)
        try:
            given = admit_container(ask, seen)
        except AdmissionRefused as error:
            log.info("not admitted: %s", error)
            raise HandlerRefusal(str(error)) from None
        self._admit(ask, given)
        made = answer.allocation_result.resource_allocation[resource]
        made.CopyFrom(_encode_allocation(resource, given.entry, given.mems, ask.amount))
        if request.HasField("hint"):
            made.resource_hints.hints.add().CopyFrom(request.hint)
        return answer

    def _admit(self, ask: AdmissionRequest, given: AdmissionResult) -> None:
        """Remember what was promised, until rounds see the pod themselves."""
        uid = ask.pod.uid
        self._removed.discard(uid)
        if self._seen is not None and uid in pods_by_uid(self._seen.pods):
            return
        if uid not in self._admitted and len(self._admitted) >= MAX_ENTRIES:
            raise HandlerRefusal(f"{MAX_ENTRIES} pods were admitted and none was ever listed; see where pods come from")
        bound = given.mems if ask.pod.enhancements.numa_binding and not ask.pod.bound_numa else ask.pod.bound_numa
        self._admitted[uid] = msgspec.structs.replace(ask.pod, bound_numa=bound)
        self._since_ns[uid] = self._now_ns()
        if ask.resource == CPU:
            self._entries.setdefault(uid, {})[ask.container.name] = given.entry

    def _forget(self, uid: str) -> None:
        self._admitted.pop(uid, None)
        self._entries.pop(uid, None)
        self._since_ns.pop(uid, None)

    async def _remove(self, request: Any, _words: Mapping[str, str]) -> Any:
        self._forget(request.pod_uid)
        if self._seen is not None and request.pod_uid in self._seen.state.pod_entries:
            self._removed.add(request.pod_uid)
        return plugin.RemovePodResponse()

    async def _allocations(self, resource: str, _request: Any, _words: Mapping[str, str]) -> Any:
        seen = self._now()
        pods, answer = pods_by_uid(seen.pods), plugin.GetResourcesAllocationResponse()
        for uid, its in seen.state.pod_entries.items():
            for name, entry in its.items():
                if name != POOL_ENTRY and uid in pods:
                    made = answer.pod_resources[uid].container_resources[name].resource_allocation[resource]
                    made.CopyFrom(
                        _encode_allocation(
                            resource, entry, allowed_mems(entry, seen), _container_memory_bytes(pods[uid], name)
                        )
                    )
        return answer

    async def _aware(self, resource: str, request: Any, _words: Mapping[str, str]) -> Any:
        made = self.held(resource, request.pod_uid, request.container_name)
        pod = pods_by_uid(self._now().pods).get(request.pod_uid)
        if made is None or pod is None:
            raise HandlerRefusal(
                f"pod_uid {request.pod_uid!r:.80}, container_name {request.container_name!r:.80}: not known here"
            )
        answer = plugin.GetTopologyAwareResourcesResponse(
            pod_uid=pod.uid, pod_name=pod.name, pod_namespace=pod.namespace
        )
        its = answer.container_topology_aware_resources
        its.container_name = request.container_name
        its.allocated_resources[resource].CopyFrom(made)
        return answer

    def held(self, resource: str, uid: str, container: str) -> Any:
        """What a container has of it by NUMA node (TopologyAwareResource); None of one that has nothing, or is not known."""
        seen = self._now()
        entry, pod = seen.state.pod(uid).get(container), pods_by_uid(seen.pods).get(uid)
        if entry is None or pod is None:
            return None
        made = plugin.TopologyAwareResource(is_scalar_resource=True)
        if entry.container_type == "SIDECAR":
            return made  # it has what its main container has, which is counted there
        if resource == CPU:
            spread = {numa: float(len(parse_cpu_list(text))) for numa, text in entry.topology_aware_assignments.items()}
            total = float(len(entry.cpus))
        else:
            total = float(_container_memory_bytes(pod, container))
            spread = {numa: total / len(entry.bound_numa) for numa in entry.bound_numa}
        made.aggregated_quantity = made.original_aggregated_quantity = total
        _add_quantities(made.topology_aware_quantity_list, spread)
        _add_quantities(made.original_topology_aware_quantity_list, spread)
        return made

    async def _allocatable(self, resource: str, _request: Any, _words: Mapping[str, str]) -> Any:
        answer = plugin.GetTopologyAwareAllocatableResourcesResponse()
        answer.allocatable_resources[resource].CopyFrom(self.allocatable(resource))
        return answer

    def allocatable(self, resource: str) -> Any:
        """What the node has of it, and can give, by NUMA node (AllocatableTopologyAwareResource)."""
        seen = self._now()
        if resource == CPU:
            node = layout_of(seen.topology)
            capacity = {numa: float(len(cpus)) for numa, cpus in node.numa.items()}
            reserved = cpu_lists_by_numa(node, seen.state.pool(RESERVE) & frozenset(node.order))
            free = {numa: size - len(parse_cpu_list(reserved.get(numa, ""))) for numa, size in capacity.items()}
        else:
            capacity = {numa: float(size) for numa, size in seen.memory_by_numa.items()}
            free = capacity
        made = plugin.AllocatableTopologyAwareResource(is_scalar_resource=True)
        made.aggregated_capacity_quantity = sum(capacity.values())
        made.aggregated_allocatable_quantity = sum(free.values())
        _add_quantities(made.topology_aware_capacity_quantity_list, capacity)
        _add_quantities(made.topology_aware_allocatable_quantity_list, free)
        return made


def _echo_request(answer: Any, request: Any) -> Any:
    for field in _ECHOED_FIELDS:
        setattr(answer, field, getattr(request, field))
    answer.labels.update(request.labels)
    answer.annotations.update(request.annotations)
    return answer


def _encode_hints(found: tuple[TopologyHint, ...]) -> Any:
    return plugin.ListOfTopologyHints(
        hints=[plugin.TopologyHint(nodes=hint.nodes, preferred=hint.preferred) for hint in found]
    )


def _encode_allocation(resource: str, entry: CpusetEntry, mems: tuple[int, ...], memory_bytes: float) -> Any:
    amount, text = float(len(entry.cpus)), entry.allocation_result
    if resource == MEMORY:
        amount, text = float(memory_bytes), format_cpu_list(mems)
    return plugin.ResourceAllocationInfo(
        oci_property_name=OCI_PROPERTIES[resource],
        is_scalar_resource=True,
        allocated_quantity=amount,
        allocation_result=text,
    )


def _container_memory_bytes(pod: Pod, container: str) -> int:
    found = next((one for one in pod.containers if one.name == container), None)
    return 0 if found is None else found.reclaimed_memory_bytes or found.memory_request_bytes or 0


def _add_quantities(target: Any, by_numa: Mapping[int, float]) -> None:
    for numa, value in sorted(by_numa.items()):
        target.add(resource_value=value, node=numa)

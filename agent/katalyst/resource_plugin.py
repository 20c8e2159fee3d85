"""Serves the resource plugins of CPU and memory for KubeWharf's kubelet or Katalyst's ORM.
The protocol is `resourceplugin.v1alpha1`. Admitted containers are retained until the pod is listed and are merged
into the state of the next cycle. It writes no cgroup.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from agent.config.qos import QosConfig
from agent.katalyst.admission import (
    AdmissionInputs,
    AdmissionRefused,
    AdmissionRequest,
    AdmissionResult,
    admit_container,
    allowed_mems,
    container_memory_bytes,
    cpu_hints,
    memory_hints,
    parse_admission_request,
)
from agent.katalyst.messages import CPU, MAX_ENTRIES, MEMORY, UnusableMessage, pods_by_uid
from agent.qrm.cpuset.state import POOL_ENTRY, RESERVE, CpusetEntry, CpusetState, cpu_lists_by_numa
from agent.qrm.cpuset.topology_hints import TopologyHint
from agent.qrm.cpuset.topology_layout import layout_of
from api.cpu import format_cpu_list, parse_cpu_list
from api.pod import Pod
from api.proto import resource_plugin_pb2 as plugin
from api.text import quote
from api.units import NS_PER_S
from common.grpc_unix import GrpcHandler, GrpcService, HandlerRefusal

log = logging.getLogger(__name__)
OCI_PROPERTIES = {CPU: "CpusetCpus", MEMORY: "CpusetMems"}
OPTIONS = plugin.ResourcePluginOptions(with_topology_alignment=True, need_reconcile=True)
_ECHOED_FIELDS = (
    "pod_uid", "pod_namespace", "pod_name", "container_name", "container_type", "container_index", "pod_role", "pod_type",
    "native_qos_class",
)  # fmt: skip


class ResourcePluginServer:
    """Answers of both plugins, from the inputs of the latest `update`."""

    def __init__(self, config: QosConfig | None = None, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._config, self._now_ns = config or QosConfig(), now_ns
        self._inputs: AdmissionInputs | None = None
        self._admitted: dict[str, Pod] = {}
        self._entries: dict[str, dict[str, CpusetEntry]] = {}
        self._since_ns: dict[str, int] = {}
        self._removed: set[str] = set()

    def update(self, inputs: AdmissionInputs) -> None:
        """Take the result of a cycle. Listed pods are no longer pending; pods that are not listed within `residual_s`, as if
        their removal was missed, are dropped."""
        self._inputs = inputs
        now, residual_ns = self._now_ns(), round(inputs.config.residual_s * NS_PER_S)
        expired = {uid for uid, since_ns in tuple(self._since_ns.items()) if now - since_ns > residual_ns}
        for uid in (*pods_by_uid(inputs.pods), *expired):
            # Cycles run in another thread: of a pod admitted during an evaluation only the next cycle has the entry.
            if uid in expired or self._entries.get(uid, {}).keys() <= inputs.state.pod(uid).keys():
                self._forget(uid)
        self._removed &= inputs.state.pod_entries.keys()

    def merge_into(self, state: CpusetState) -> CpusetState:
        """Return the state with the admitted containers and without the removed pods, for the next cycle."""
        listed = pods_by_uid(self._inputs.pods) if self._inputs is not None else {}
        entries = {uid: pod for uid, pod in state.pod_entries.items() if uid not in self._removed or uid in listed}
        for uid, pod in tuple(self._entries.items()):
            entries[uid] = {**pod, **entries.get(uid, {})}
        return msgspec.structs.replace(state, pod_entries=entries)

    def listed(self) -> tuple[Pod, ...]:
        """Return the pods that run or were admitted. Raises HandlerRefusal before the first cycle."""
        return self._current().pods

    def services(self, resource: str) -> GrpcService:
        """Return `resourceplugin.v1alpha1.ResourcePlugin` for `cpu` or `memory`."""
        handlers: dict[str, GrpcHandler] = {
            "GetResourcePluginOptions": self._options,
            "GetTopologyHints": partial(self._hints, resource),
            "Allocate": partial(self._allocate, resource),
            "RemovePod": self._remove,
            "GetResourcesAllocation": partial(self._allocations, resource),
            "GetTopologyAwareResources": partial(self._topology_aware, resource),
            "GetTopologyAwareAllocatableResources": partial(self._allocatable, resource),
            "PreStartContainer": self._prestart,
        }
        return GrpcService(plugin.DESCRIPTOR.services_by_name["ResourcePlugin"], handlers)

    def _current(self) -> AdmissionInputs:
        inputs = self._inputs
        if inputs is None:
            raise HandlerRefusal("no cycle has finished yet; retry in a few seconds")
        pods = (*(pod for pod in inputs.pods if pod.uid not in self._admitted), *self._admitted.values())
        return msgspec.structs.replace(inputs, pods=pods, state=self.merge_into(inputs.state), now_ns=self._now_ns())

    def _parse(self, resource: str, request: Any, inputs: AdmissionInputs) -> AdmissionRequest:
        before = pods_by_uid(inputs.pods).get(request.pod_uid)
        try:
            return parse_admission_request(request, resource, before, self._config)
        except UnusableMessage as error:
            raise HandlerRefusal(str(error)) from None

    async def _options(self, _request: Any, _metadata: Mapping[str, str]) -> Any:
        return OPTIONS

    async def _prestart(self, _request: Any, _metadata: Mapping[str, str]) -> Any:
        return plugin.PreStartContainerResponse()

    async def _hints(self, resource: str, request: Any, _metadata: Mapping[str, str]) -> Any:
        answer = _echo_request(plugin.ResourceHintsResponse(resource_name=resource), request)
        if request.container_type == plugin.INIT:
            return answer
        inputs = self._current()
        admission = self._parse(resource, request, inputs)
        try:
            hints = (cpu_hints if resource == CPU else memory_hints)(admission, inputs)
        except AdmissionRefused as error:
            raise HandlerRefusal(str(error)) from None
        if hints is not None:
            # A missing list means no preference; the topology manager reads an empty list as: fits nowhere.
            answer.resource_hints[resource].CopyFrom(_encode_hints(hints))
        return answer

    async def _allocate(self, resource: str, request: Any, _metadata: Mapping[str, str]) -> Any:
        answer = _echo_request(plugin.ResourceAllocationResponse(resource_name=resource), request)
        if request.container_type == plugin.INIT:
            return answer
        inputs = self._current()
        admission = self._parse(resource, request, inputs)
        try:
            result = admit_container(admission, inputs)
        except AdmissionRefused as error:
            log.info("container not admitted: %s", error)
            raise HandlerRefusal(str(error)) from None
        self._admit(admission, result)
        allocation = answer.allocation_result.resource_allocation[resource]
        allocation.CopyFrom(_encode_allocation(resource, result.entry, result.mems, admission.amount))
        if request.HasField("hint"):
            allocation.resource_hints.hints.add().CopyFrom(request.hint)
        return answer

    def _admit(self, admission: AdmissionRequest, result: AdmissionResult) -> None:
        """Keep the allocation until a cycle lists the pod."""
        pod = admission.pod
        self._removed.discard(pod.uid)
        if self._inputs is not None and pod.uid in pods_by_uid(self._inputs.pods):
            return
        if pod.uid not in self._admitted and len(self._admitted) >= MAX_ENTRIES:
            raise HandlerRefusal(f"{MAX_ENTRIES} admitted pods were never listed; check where the agent gets its pods")
        bound = result.mems if pod.enhancements.numa_binding and not pod.bound_numa else pod.bound_numa
        self._admitted[pod.uid] = msgspec.structs.replace(pod, bound_numa=bound)
        self._since_ns[pod.uid] = self._now_ns()
        if admission.resource == CPU:
            self._entries.setdefault(pod.uid, {})[admission.container.name] = result.entry

    def _forget(self, uid: str) -> None:
        self._admitted.pop(uid, None)
        self._entries.pop(uid, None)
        self._since_ns.pop(uid, None)

    async def _remove(self, request: Any, _metadata: Mapping[str, str]) -> Any:
        self._forget(request.pod_uid)
        if self._inputs is not None and request.pod_uid in self._inputs.state.pod_entries:
            self._removed.add(request.pod_uid)
        return plugin.RemovePodResponse()

    async def _allocations(self, resource: str, _request: Any, _metadata: Mapping[str, str]) -> Any:
        inputs = self._current()
        pods, answer = pods_by_uid(inputs.pods), plugin.GetResourcesAllocationResponse()
        for uid, containers in inputs.state.pod_entries.items():
            for name, entry in containers.items():
                if name != POOL_ENTRY and uid in pods:
                    size = _container_memory_bytes(pods[uid], name)
                    answer.pod_resources[uid].container_resources[name].resource_allocation[resource].CopyFrom(
                        _encode_allocation(resource, entry, allowed_mems(entry, inputs), size)
                    )
        return answer

    async def _topology_aware(self, resource: str, request: Any, _metadata: Mapping[str, str]) -> Any:
        amounts = self.allocated(resource, request.pod_uid, request.container_name)
        pod = pods_by_uid(self._current().pods).get(request.pod_uid)
        if amounts is None or pod is None:
            raise HandlerRefusal(
                f"pod_uid {quote(request.pod_uid)}, container_name {quote(request.container_name)}: no such container"
            )
        answer = plugin.GetTopologyAwareResourcesResponse(
            pod_uid=pod.uid, pod_name=pod.name, pod_namespace=pod.namespace
        )
        container = answer.container_topology_aware_resources
        container.container_name = request.container_name
        container.allocated_resources[resource].CopyFrom(amounts)
        return answer

    def allocated(self, resource: str, uid: str, container: str) -> Any:
        """Return the allocation of a container by NUMA node (TopologyAwareResource); None if it has none."""
        inputs = self._current()
        entry, pod = inputs.state.pod(uid).get(container), pods_by_uid(inputs.pods).get(uid)
        if entry is None or pod is None:
            return None
        amounts = plugin.TopologyAwareResource(is_scalar_resource=True)
        if entry.container_type == "SIDECAR":
            return amounts  # A sidecar shares the allocation of the main container, which is counted there.
        if resource == CPU:
            by_numa = {
                numa: float(len(parse_cpu_list(text))) for numa, text in entry.topology_aware_assignments.items()
            }
            total = float(len(entry.cpus))
        else:
            total = float(_container_memory_bytes(pod, container))
            by_numa = {numa: total / len(entry.bound_numa) for numa in entry.bound_numa}
        amounts.aggregated_quantity = amounts.original_aggregated_quantity = total
        _add_quantities(amounts.topology_aware_quantity_list, by_numa)
        _add_quantities(amounts.original_topology_aware_quantity_list, by_numa)
        return amounts

    async def _allocatable(self, resource: str, _request: Any, _metadata: Mapping[str, str]) -> Any:
        answer = plugin.GetTopologyAwareAllocatableResourcesResponse()
        answer.allocatable_resources[resource].CopyFrom(self.allocatable(resource))
        return answer

    def allocatable(self, resource: str) -> Any:
        """Return capacity and allocatable of the node by NUMA node (AllocatableTopologyAwareResource)."""
        inputs = self._current()
        if resource == CPU:
            node = layout_of(inputs.topology)
            capacity = {numa: float(len(cpus)) for numa, cpus in node.numa.items()}
            reserved = cpu_lists_by_numa(node, inputs.state.pool(RESERVE) & frozenset(node.order))
            free = {numa: size - len(parse_cpu_list(reserved.get(numa, ""))) for numa, size in capacity.items()}
        else:
            capacity = {numa: float(size) for numa, size in inputs.memory_by_numa.items()}
            free = capacity
        amounts = plugin.AllocatableTopologyAwareResource(is_scalar_resource=True)
        amounts.aggregated_capacity_quantity = sum(capacity.values())
        amounts.aggregated_allocatable_quantity = sum(free.values())
        _add_quantities(amounts.topology_aware_capacity_quantity_list, capacity)
        _add_quantities(amounts.topology_aware_allocatable_quantity_list, free)
        return amounts


def _echo_request(answer: Any, request: Any) -> Any:
    for field in _ECHOED_FIELDS:
        setattr(answer, field, getattr(request, field))
    answer.labels.update(request.labels)
    answer.annotations.update(request.annotations)
    return answer


def _encode_hints(hints: tuple[TopologyHint, ...]) -> Any:
    return plugin.ListOfTopologyHints(
        hints=[plugin.TopologyHint(nodes=hint.nodes, preferred=hint.preferred) for hint in hints]
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


def _container_memory_bytes(pod: Pod, name: str) -> int:
    return next((container_memory_bytes(container) for container in pod.containers if container.name == name), 0)


def _add_quantities(target: Any, by_numa: Mapping[int, float]) -> None:
    for numa, value in sorted(by_numa.items()):
        target.add(resource_value=value, node=numa)

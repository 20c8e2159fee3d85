"""The resource plugins over real sockets, called like by a kubelet or ORM: 2 NUMA nodes of 24 CPUs, 64 GiB each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.config.qos import ALL_RIGHTS, QosConfig
from agent.config.qrm import CpuPlacementConfig
from agent.katalyst.admission import AdmissionInputs, parse_admission_request, requested_quantity
from agent.katalyst.messages import UnusableMessage
from agent.katalyst.plugin_registration import PluginEndpoint, PluginIdentity, PluginRegistration, register_plugin
from agent.katalyst.resource_plugin import OPTIONS, ResourcePluginServer
from agent.qrm.cpuset.allocate import allocate_cpusets
from agent.qrm.cpuset.state import CpusetState
from api.advice import PoolSize
from api.cpu import parse_cpu_list
from api.interfaces import Unavailable
from api.pod import Pod
from api.proto import plugin_registration_pb2 as watched
from api.proto import resource_plugin_pb2 as plugin
from api.qos import QoSLevel
from common.grpc_unix import CallRefused, GrpcClient, GrpcService, HandlerRefusal, MethodNotOffered, serve_on_socket
from tests.agent.katalyst.builders import node, pod

PLUGIN = plugin.DESCRIPTOR.services_by_name["ResourcePlugin"]
GI = 1 << 30
CONFIG = CpuPlacementConfig(ramp_up_s=0, reserved_cpus=2)
MILLI = "resource.katalyst.kubewharf.io/reclaimed_millicpu"
BOUND = {"katalyst.kubewharf.io/memory_enhancement": '{"numa_binding": "true"}'}
EXCLUSIVE = {"katalyst.kubewharf.io/memory_enhancement": '{"numa_binding": "true", "numa_exclusive": "true"}'}
LEVEL = "katalyst.kubewharf.io/qos_level"


def admission_inputs(*pods: Pod, sizes: tuple[PoolSize, ...] = (), state: CpusetState | None = None) -> AdmissionInputs:
    _placement, after = allocate_cpusets(sizes, pods, node(), state or CpusetState(policy_name="dynamic"), CONFIG, 5)
    return AdmissionInputs(
        topology=node(), pods=pods, sizes=sizes, state=after, config=CONFIG, memory_by_numa={0: 64 * GI, 1: 64 * GI}
    )


def resource_request(name: str, amount: float = 2.0, key: str = "cpu", **fields: Any) -> plugin.ResourceRequest:
    message = plugin.ResourceRequest(
        pod_uid=f"u-{name}", pod_namespace="ns", pod_name=name, container_name="main", container_type=plugin.MAIN
    )
    message.resource_requests[key] = amount
    message.resource_name = "memory" if "memory" in key else "cpu"
    for field, value in fields.items():
        if field == "annotations":
            message.annotations.update(value)
        elif field == "nodes":
            message.hint.nodes.extend(value)
        else:
            setattr(message, field, value)
    return message


class Wire:
    """Both plugins on sockets, and a client for each."""

    def __init__(self, plugin_server: ResourcePluginServer, clients: Mapping[str, GrpcClient], now: list[int]) -> None:
        self.plugin, self._peers, self.now = plugin_server, clients, now

    async def call(self, method: str, request: Any, resource: str = "cpu") -> Any:
        return await self._peers[resource].call(method, request)


@pytest.fixture
async def wire(tmp_path: Path) -> AsyncIterator[Wire]:
    now = [7]
    plugin_server = ResourcePluginServer(QosConfig(rights=ALL_RIGHTS), now_ns=lambda: now[0])
    servers = [
        await serve_on_socket(tmp_path / f"{name}.sock", (plugin_server.services(name),)) for name in ("cpu", "memory")
    ]
    clients = {server.path.stem: GrpcClient(server.path, PLUGIN) for server in servers}
    yield Wire(plugin_server, clients, now)
    for client in clients.values():
        await client.close()
    for server in servers:
        await server.stop()


def cpus(answer: plugin.ResourceAllocationResponse) -> tuple[int, ...]:
    return parse_cpu_list(answer.allocation_result.resource_allocation["cpu"].allocation_result)


async def test_options_and_methods_that_are_not_offered(wire: Wire) -> None:
    options = await wire.call("GetResourcePluginOptions", plugin.Empty())
    assert (options.with_topology_alignment, options.need_reconcile, options.pre_start_required) == (True, True, False)
    with pytest.raises(MethodNotOffered):
        await wire.call("AllocateForPod", plugin.PodResourceRequest())
    with pytest.raises(CallRefused, match="no cycle has finished yet"):
        await wire.call("Allocate", resource_request("web"))


async def test_a_shared_pod_has_no_preference_and_its_pool(wire: Wire) -> None:
    inputs = admission_inputs(
        pod("other", cores=4), sizes=(PoolSize(pool="share", cpus=10), PoolSize(pool="reclaim", cpus=36))
    )
    wire.plugin.update(inputs)
    hints = await wire.call("GetTopologyHints", resource_request("web", annotations={"a": "b"}))
    assert not hints.resource_hints, "no entry means anywhere; an empty list would mean nowhere"
    assert (hints.pod_uid, hints.resource_name, hints.annotations["a"]) == ("u-web", "cpu", "b")
    got = await wire.call("Allocate", resource_request("web", native_qos_class="Burstable"))
    info = got.allocation_result.resource_allocation["cpu"]
    assert (info.oci_property_name, info.is_scalar_resource, info.allocated_quantity) == ("CpusetCpus", True, 10.0)
    assert len(cpus(got)) == 10
    assert frozenset(cpus(got)) == inputs.state.pool("share")
    assert (got.native_qos_class, got.container_type) == ("Burstable", plugin.MAIN)
    memory = await wire.call("Allocate", resource_request("web", 4 * GI, "memory"), "memory")
    info = memory.allocation_result.resource_allocation["memory"]
    assert (info.oci_property_name, info.allocated_quantity, info.allocation_result) == ("CpusetMems", 4 * GI, "0-1")
    state = wire.plugin.merge_into(inputs.state)
    assert state.pod("u-web")["main"].allocation_result == state.pod_entries["share"][""].allocation_result


async def test_a_bound_pod_gets_hints_and_keeps_the_agreed_node(wire: Wire) -> None:
    """23 CPUs of each node are usable; 20 are requested on node 1, so that 8 more fit only on node 0."""
    held = pod("held", cores=20, bound=(1,))
    wire.plugin.update(admission_inputs(held))
    hints = await wire.call("GetTopologyHints", resource_request("web", 8, annotations=BOUND))
    assert [(list(hint.nodes), hint.preferred) for hint in hints.resource_hints["cpu"].hints] == [([0], True)]
    memory = await wire.call("GetTopologyHints", resource_request("web", 8 * GI, "memory", annotations=BOUND), "memory")
    assert [list(hint.nodes) for hint in memory.resource_hints["memory"].hints] == [[0], [1]]
    got = await wire.call("Allocate", resource_request("web", 8, annotations=BOUND, nodes=[0]))
    assert {cpu // 24 for cpu in cpus(got)} == {0}
    assert [list(hint.nodes) for hint in got.allocation_result.resource_allocation["cpu"].resource_hints.hints] == [[0]]
    again = await wire.call("GetTopologyHints", resource_request("web", 8, annotations=BOUND))
    assert [(list(hint.nodes), hint.preferred) for hint in again.resource_hints["cpu"].hints] == [([0], True)]
    assert await wire.call("Allocate", resource_request("web", 8, annotations=BOUND, nodes=[0])) == got
    mems = await wire.call(
        "Allocate", resource_request("web", 8 * GI, "memory", annotations=BOUND, nodes=[0]), "memory"
    )
    assert mems.allocation_result.resource_allocation["memory"].allocation_result == "0"
    with pytest.raises(
        CallRefused, match=r"ns/big requests 24 CPUs; no NUMA nodes have them \(left on node 0: 15, 1: 3\)"
    ):
        await wire.call("GetTopologyHints", resource_request("big", 24, annotations=BOUND))
    with pytest.raises(
        CallRefused, match=r"ns/huge requests .* bytes .*available by node: 0: 60129542144, 1: 67645734912"
    ):
        await wire.call("GetTopologyHints", resource_request("huge", 65 * GI, "memory", annotations=BOUND), "memory")


async def test_cpus_follow_memory_that_was_allocated_first(wire: Wire) -> None:
    """Without topology alignment there are no hints: the first allocation selects the node."""
    wire.plugin.update(admission_inputs(pod("other", cores=4)))
    mems = await wire.call("Allocate", resource_request("web", 8 * GI, "memory", annotations=BOUND), "memory")
    chosen = mems.allocation_result.resource_allocation["memory"].allocation_result
    got = await wire.call("Allocate", resource_request("web", 8, annotations=BOUND))
    assert {str(cpu // 24) for cpu in cpus(got)} == {chosen}


async def test_a_dedicated_pod_has_whole_nodes_and_its_sidecar_runs_there(wire: Wire) -> None:
    wire.plugin.update(admission_inputs(pod("web", cores=2)))
    level = {LEVEL: "dedicated_cores", **EXCLUSIVE}
    hints = await wire.call("GetTopologyHints", resource_request("db", 23, annotations=level))
    hints_ = [(list(hint.nodes), hint.preferred) for hint in hints.resource_hints["cpu"].hints]
    assert hints_ == [([0], True), ([1], True), ([0, 1], False)]
    got = await wire.call("Allocate", resource_request("db", 23, annotations=level, nodes=[1]))
    assert len(cpus(got)) == 23
    assert {cpu // 24 for cpu in cpus(got)} == {1}
    side = resource_request(
        "db", 1, annotations=level, container_name="proxy", container_type=plugin.SIDECAR, nodes=[1]
    )
    assert cpus(await wire.call("Allocate", side)) == cpus(got)
    with pytest.raises(CallRefused, match="ns/plain requests dedicated_cores without numa_binding"):
        await wire.call("Allocate", resource_request("plain", 2, annotations={LEVEL: "dedicated_cores"}))
    aware = await wire.call(
        "GetTopologyAwareResources", plugin.GetTopologyAwareResourcesRequest(pod_uid="u-db", container_name="main")
    )
    message = aware.container_topology_aware_resources.allocated_resources["cpu"]
    assert (
        message.aggregated_quantity,
        [(item.node, item.resource_value) for item in message.topology_aware_quantity_list],
    ) == (23, [(1, 23)])
    proxy = plugin.GetTopologyAwareResourcesRequest(pod_uid="u-db", container_name="proxy")
    message = (
        await wire.call("GetTopologyAwareResources", proxy)
    ).container_topology_aware_resources.allocated_resources["cpu"]
    assert (message.aggregated_quantity, len(message.topology_aware_quantity_list)) == (0, 0)


async def test_shared_pods_beyond_the_node_are_refused_with_the_numbers(wire: Wire) -> None:
    wire.plugin.update(admission_inputs(pod("web", cores=40)))
    with pytest.raises(CallRefused, match=r"ns/more requests 8 CPUs; 6 of 46 are left for shared pods"):
        await wire.call("Allocate", resource_request("more", 8))
    got = await wire.call("Allocate", resource_request("less", 6))
    assert cpus(got)


async def test_cycles_retain_admitted_containers(wire: Wire) -> None:
    """Admitted, not listed yet, listed, removed: the next cycle has the current state each time."""
    inputs = admission_inputs(pod("web", cores=2))
    wire.plugin.update(inputs)
    level = {LEVEL: "dedicated_cores", **BOUND}
    got = await wire.call("Allocate", resource_request("db", 4, annotations=level, nodes=[0]))
    mine = frozenset(cpus(got))
    unlisted = admission_inputs(pod("web", cores=2), state=wire.plugin.merge_into(inputs.state))
    assert unlisted.state.pod("u-db")["main"].cpus == mine
    assert not mine & unlisted.state.pool("share"), "no other pod gets them while the pod is not listed yet"
    wire.plugin.update(unlisted)
    db = pod("db", QoSLevel.DEDICATED, 4, bound=(0,))
    listed = admission_inputs(pod("web", cores=2), db, state=wire.plugin.merge_into(unlisted.state))
    assert listed.state.pod("u-db")["main"].cpus == mine
    wire.plugin.update(listed)
    both = await wire.call("GetResourcesAllocation", plugin.GetResourcesAllocationRequest())
    info = both.pod_resources["u-db"].container_resources["main"].resource_allocation["cpu"]
    assert (frozenset(parse_cpu_list(info.allocation_result)), info.allocated_quantity) == (mine, 4.0)
    memory = await wire.call("GetResourcesAllocation", plugin.GetResourcesAllocationRequest(), "memory")
    info = memory.pod_resources["u-db"].container_resources["main"].resource_allocation["memory"]
    assert (info.allocation_result, info.allocated_quantity, info.oci_property_name) == ("0", GI, "CpusetMems")
    await wire.call("RemovePod", plugin.RemovePodRequest(pod_uid="u-db"))
    assert "u-db" in wire.plugin.merge_into(listed.state).pod_entries, "it is listed still"
    without_db = admission_inputs(pod("web", cores=2), state=wire.plugin.merge_into(listed.state))
    wire.plugin.update(without_db)
    assert "u-db" not in wire.plugin.merge_into(without_db.state).pod_entries, "its CPUs are not kept for five minutes"


async def test_an_admitted_pod_that_is_never_listed_expires(wire: Wire) -> None:
    """Another plugin refused the pod without a RemovePod call: its CPUs are free again after five minutes."""
    inputs = admission_inputs(pod("web", cores=2))
    wire.plugin.update(inputs)
    await wire.call("Allocate", resource_request("db", 4, annotations={LEVEL: "dedicated_cores", **BOUND}))
    assert "u-db" in wire.plugin.merge_into(inputs.state).pod_entries
    wire.now[0] = 8 + 300 * 1_000_000_000
    wire.plugin.update(inputs)
    assert "u-db" not in wire.plugin.merge_into(inputs.state).pod_entries


async def test_allocatable_excludes_reserved_cpus(wire: Wire) -> None:
    wire.plugin.update(admission_inputs(pod("web")))
    got = await wire.call("GetTopologyAwareAllocatableResources", plugin.GetTopologyAwareAllocatableResourcesRequest())
    message = got.allocatable_resources["cpu"]
    assert (message.aggregated_capacity_quantity, message.aggregated_allocatable_quantity) == (48, 46)
    assert [(item.node, item.resource_value) for item in message.topology_aware_allocatable_quantity_list] == [
        (0, 23),
        (1, 23),
    ]
    got = await wire.call(
        "GetTopologyAwareAllocatableResources", plugin.GetTopologyAwareAllocatableResourcesRequest(), "memory"
    )
    assert got.allocatable_resources["memory"].aggregated_capacity_quantity == 128 * GI


async def test_init_containers_pass(wire: Wire) -> None:
    wire.plugin.update(admission_inputs(pod("web")))
    init = await wire.call("Allocate", resource_request("web", container_type=plugin.INIT))
    assert not init.HasField("allocation_result")
    assert not (await wire.call("GetTopologyHints", resource_request("x", container_type=plugin.INIT))).resource_hints


QUANTITIES = [
    ("cpu", "cpu", "shared_cores", 2.0, 2.0),
    ("cpu", "cpu", "dedicated_cores", 0.25, 0.25),
    # GetTopologyHints has the original resource, Allocate the mapped one: 2k of reclaimed_millicpu is two CPUs in both.
    ("cpu", MILLI, "reclaimed_cores", 2000.0, 2.0),
    ("cpu", "cpu", "reclaimed_cores", 2000.0, 2.0),
    ("cpu", MILLI, "reclaimed_cores", 1.0, 0.001),
    ("memory", "memory", "shared_cores", float(GI), float(GI)),
    ("memory", "resource.katalyst.kubewharf.io/reclaimed_memory", "reclaimed_cores", 5.0, 5.0),
    ("memory", "memory", "reclaimed_cores", 5.0, 5.0),
]


@pytest.mark.parametrize(("resource", "key", "level", "amount", "expected"), QUANTITIES)
def test_both_keys_of_a_quantity(resource: str, key: str, level: str, amount: float, expected: float) -> None:
    message = plugin.ResourceRequest()
    message.resource_requests[key] = amount
    assert requested_quantity(message, resource, QoSLevel(level)) == expected


INVALID_REQUESTS: dict[str, tuple[dict[str, Any], str]] = {
    "no uid": ({"pod_uid": ""}, "pod_uid is empty"),
    "no container": ({"container_name": ""}, "container_name is empty"),
    "another resource": (
        {"key": "nvidia.com/gpu"},
        r"resource_requests\[nvidia\.com/gpu\] does not belong to the plugin of cpu",
    ),
    "bandwidth": (
        {"key": "resource.katalyst.kubewharf.io/net_bandwidth"},
        r"net_bandwidth\] does not belong to the plugin of cpu",
    ),
    "negative": ({"amount": -1.0}, r"resource_requests\[cpu\] is -1\.0"),
    "no number": ({"amount": float("nan")}, r"is nan"),
    "infinite": ({"amount": float("inf")}, r"is inf"),
    "no level": (
        {"annotations": {LEVEL: "best"}},
        r"annotations: annotation katalyst\.kubewharf\.io/qos_level: 'best' is not a QoS",
    ),
}


@pytest.mark.parametrize("name", INVALID_REQUESTS)
async def test_an_invalid_request_names_its_field(wire: Wire, name: str) -> None:
    fields, text = INVALID_REQUESTS[name]
    wire.plugin.update(admission_inputs(pod("web")))
    with pytest.raises(CallRefused, match=text):
        await wire.call("Allocate", resource_request(**{"name": "x", **fields}))


def test_a_request_of_two_quantities_is_refused() -> None:
    message = resource_request("x")
    message.resource_requests[MILLI] = 1
    with pytest.raises(UnusableMessage, match="resource_requests has 2 entries"):
        parse_admission_request(message, "cpu", None, QosConfig())


async def test_a_watcher_and_a_kubelet_find_the_plugin(tmp_path: Path) -> None:
    """A watcher queries the socket, a kubelet gets a registration call; a removed socket is created again."""
    registered: list[plugin.RegisterRequest] = []

    async def take(request: plugin.RegisterRequest, _words: Mapping[str, str]) -> plugin.Empty:
        if request.version != "v1alpha1":
            raise HandlerRefusal("version")
        registered.append(request)
        return plugin.Empty()

    registry = GrpcService(plugin.DESCRIPTOR.services_by_name["Registration"], {"Register": take})
    registration = PluginRegistration(PluginIdentity(kind="ResourcePlugin", name="cpu"))
    endpoint = PluginEndpoint(tmp_path / "qrm_cpu.sock", registration, ResourcePluginServer().services("cpu"), OPTIONS)
    await endpoint.ensure()
    assert (endpoint.problem, registered) == (None, [])
    kubelet = await serve_on_socket(tmp_path / "kubelet.sock", (registry,))
    await endpoint.ensure()
    await endpoint.ensure()
    assert [(item.endpoint, item.resource_name, item.options.need_reconcile) for item in registered] == [
        ("qrm_cpu.sock", "cpu", True)
    ]
    client = GrpcClient(tmp_path / "qrm_cpu.sock", watched.DESCRIPTOR.services_by_name["Registration"])
    info = await client.call("GetInfo", watched.InfoRequest())
    assert (info.type, info.name, list(info.supported_versions)) == ("ResourcePlugin", "cpu", ["v1alpha1"])
    await client.call("NotifyRegistrationStatus", watched.RegistrationStatus(error="no room"))
    assert (registration.registered, registration.error) == (False, "no room")
    await client.call("NotifyRegistrationStatus", watched.RegistrationStatus(plugin_registered=True))
    assert registration.registered
    await client.close()
    await kubelet.stop()
    (tmp_path / "qrm_cpu.sock").unlink()
    kubelet = await serve_on_socket(tmp_path / "kubelet.sock", (registry,))
    await endpoint.ensure()
    assert (tmp_path / "qrm_cpu.sock").is_socket()
    assert len(registered) == 2, "the plugin is registered again after a restart of the kubelet"
    await endpoint.close()
    await kubelet.stop()
    assert not list(tmp_path.iterdir())


async def test_a_refused_registration_is_reported_and_repeated(tmp_path: Path) -> None:
    refuses = [True]

    async def take(_request: plugin.RegisterRequest, _words: Mapping[str, str]) -> plugin.Empty:
        if refuses:
            raise HandlerRefusal("the resource name is taken")
        return plugin.Empty()

    registry = GrpcService(plugin.DESCRIPTOR.services_by_name["Registration"], {"Register": take})
    kubelet = await serve_on_socket(tmp_path / "kubelet.sock", (registry,))
    endpoint = PluginEndpoint(
        tmp_path / "cpu.sock",
        PluginRegistration(PluginIdentity(kind="ResourcePlugin", name="cpu")),
        ResourcePluginServer().services("cpu"),
        OPTIONS,
    )
    run = asyncio.create_task(endpoint.run(0.02))
    async with asyncio.timeout(20):
        while endpoint.problem is None:
            await asyncio.sleep(0.01)
        assert "the resource name is taken" in endpoint.problem.reason
        refuses.clear()
        while endpoint.problem is not None:
            await asyncio.sleep(0.01)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    await kubelet.stop()
    with pytest.raises(Unavailable, match="no server answers"):
        await register_plugin(tmp_path / "kubelet.sock", "cpu.sock", "cpu", OPTIONS)


def test_a_pod_accumulates_its_requests() -> None:
    first = parse_admission_request(resource_request("web", 2, annotations=BOUND, nodes=[1]), "cpu", None, QosConfig())
    then = parse_admission_request(
        resource_request("web", GI, "memory", annotations=BOUND), "memory", first.pod, QosConfig()
    )
    (container,) = then.pod.containers
    assert (container.cpu_request_cores, container.memory_request_bytes) == (2.0, GI)
    assert then.pod.bound_numa == (1,)
    side = parse_admission_request(
        resource_request("web", 1, container_name="proxy", container_type=plugin.SIDECAR),
        "cpu",
        then.pod,
        QosConfig(),
    )
    assert [(item.name, item.sidecar) for item in side.pod.containers] == [("main", False), ("proxy", True)]
    assert msgspec.structs.replace(side.pod.containers[0]) == container

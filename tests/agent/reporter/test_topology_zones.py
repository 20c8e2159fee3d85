"""Resources of the pod-resources service in the tree of zones, by number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.reporter.cnr import build_cnr_report, hardware_properties
from agent.reporter.cnr_inputs import CnrInputs
from agent.sensors.node.machine import read_hardware
from api.katalyst.cnr import CustomNodeResourceStatus, TopologyZone
from api.node_resources import (
    ContainerAllocation,
    DeviceAllocation,
    HardwareInventory,
    MemoryAllocation,
    NetworkInterfaceCard,
    NodeAllocatable,
    PodAllocation,
    TopologyLevel,
    TopologyQuantity,
    TopologyResource,
)
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from api.units import GIB, MIB
from tests.agent.reporter.test_cnr import finished

GPU, FPGA = "nvidia.com/gpu", "example.com/fpga"
RECLAIMABLE = {RECLAIMED_CPU: "3123", RECLAIMED_MEMORY: str(6 * GIB)}


def part(value: float, node: int, **changes: Any) -> TopologyQuantity:
    return TopologyQuantity(value=value, node=node, **changes)


NODE = NodeAllocatable(
    cpus=(1, 2, 3, 5, 6, 7),
    memory=(
        MemoryAllocation(kind="memory", bytes=15 * GIB, numa_nodes=(1,)),
        MemoryAllocation(kind="hugepages-2Mi", bytes=64 * MIB, numa_nodes=(1,)),
        MemoryAllocation(kind="memory", bytes=GIB),
    ),
    devices=(
        DeviceAllocation(resource=GPU, ids=("gpu-0", "gpu-1"), numa_nodes=(1,)),
        DeviceAllocation(resource=FPGA, ids=("a", "b", "c"), numa_nodes=(1,)),
        DeviceAllocation(resource=FPGA, ids=("nowhere",)),
    ),
    resources=(
        TopologyResource(
            name="katalyst.kubewharf.io/net_bandwidth",
            total=20_000,
            parts=(
                part(9_000, 0, level=TopologyLevel.SOCKET, kind="NIC", name="eth0", annotations={"netns_name": "n"}),
            ),
            capacity_parts=(part(10_000, 0, level=TopologyLevel.SOCKET, kind="NIC", name="eth0"),),
        ),
        TopologyResource(name="x.io/bandwidth", total=5, parts=(part(5, 1),), capacity_parts=(part(6, 1),)),
    ),
)
DB = PodAllocation(
    namespace="shop",
    name="db",
    containers=(
        ContainerAllocation(
            name="main",
            cpus=(5, 6),
            memory=(MemoryAllocation(kind="memory", bytes=10 * GIB, numa_nodes=(0, 1)),),
            devices=(
                DeviceAllocation(resource=GPU, ids=("gpu-1",), numa_nodes=(1,)),
                DeviceAllocation(resource=FPGA, ids=("b",), numa_nodes=(1,)),
            ),
            resources=(TopologyResource(name="x.io/bandwidth", total=2, parts=(part(2, 1),)),),
        ),
        ContainerAllocation(
            name="side", cpus=(7,), devices=(DeviceAllocation(resource=FPGA, ids=("c",), numa_nodes=(1,)),)
        ),
    ),
)
STRANGER = PodAllocation(namespace="shop", name="stranger", containers=DB.containers)


def status(**changes: Any) -> CustomNodeResourceStatus:
    inputs = CnrInputs(node=NODE, pods=(DB, STRANGER), zone_types={GPU: "GPU"})
    result = build_cnr_report(finished(), metrics=False, inputs=msgspec.structs.replace(inputs, **changes)).status
    assert result is not None
    return result


def socket(number: int, result: CustomNodeResourceStatus) -> TopologyZone:
    return next(zone for zone in result.topology_zone or () if zone.name == str(number))


def numa(number: int, result: CustomNodeResourceStatus) -> TopologyZone:
    return next(zone for zone in socket(number, result).children or () if zone.type == "Numa")


def test_amounts_of_a_numa_node() -> None:
    item = numa(1, status()).resources
    assert item is not None
    counted = {FPGA: "3", "hugepages-2Mi": str(64 * MIB)}
    # The kubelet reserves CPU 4 and 1 GiB; a device without a NUMA node is in no zone.
    assert item.allocatable == {"cpu": "3", "memory": str(15 * GIB), **counted, "x.io/bandwidth": "5", **RECLAIMABLE}
    assert item.capacity == {"cpu": "4", "memory": str(16 * GIB), **counted, "x.io/bandwidth": "6", **RECLAIMABLE}


def test_reserved_cpus_are_those_of_the_kubelet_and_of_the_agent() -> None:
    result = status()
    values = {n: {item.name: item.value for item in numa(n, result).attributes or ()} for n in (0, 1)}
    assert values == {0: {"reserved_cpu_list": "0"}, 1: {"reserved_cpu_list": "4"}}


def test_allocated_amounts_replace_requested_ones() -> None:
    allocations = {item.consumer: item.requests for item in numa(1, status()).allocations or ()}
    assert allocations["shop/db/uid-db"] == {"cpu": "3", "memory": str(5 * GIB), FPGA: "2", "x.io/bandwidth": "2"}
    assert set(allocations) == {"shop/db/uid-db", "shop/batch/uid-batch"}, "the uid of an unlisted pod is unknown"


def test_devices_that_are_zones() -> None:
    children = [child for child in numa(1, status()).children or () if child.type == "GPU"]
    assert [(child.name, child.allocations and child.allocations[0].consumer) for child in children] == [
        ("gpu-0", None),
        ("gpu-1", "shop/db/uid-db"),
    ]
    (first, _) = children
    assert first.resources is not None
    assert first.resources.allocatable == first.resources.capacity == {GPU: "1"}
    assert [child.type for child in numa(1, status()).children or ()] == ["L3CacheGroup", "L3CacheGroup", "GPU", "GPU"]
    counted = numa(1, status(zone_types={}))
    assert counted.resources is not None
    assert (counted.resources.allocatable or {})[GPU] == "2"


def test_cards_are_zones_of_their_socket() -> None:
    (card,) = [child for child in socket(0, status()).children or () if child.type == "NIC"]
    assert card.resources is not None
    name = "katalyst.kubewharf.io/net_bandwidth"
    assert (card.name, card.resources.allocatable, card.resources.capacity) == ("eth0", {name: "9000"}, {name: "10000"})
    assert [(item.name, item.value) for item in card.attributes or ()] == [("netns_name", "n")]


def test_a_kubelet_without_managers_adds_nothing() -> None:
    plain = build_cnr_report(finished(), metrics=False)
    silent = CnrInputs(node=NodeAllocatable(), pods=(PodAllocation(namespace="shop", name="db", containers=()),))
    assert build_cnr_report(finished(), metrics=False, inputs=silent) == plain
    assert build_cnr_report(finished(), metrics=False, inputs=CnrInputs(pods=(DB,))) == plain


def test_the_zones_fit_the_definition() -> None:
    encoded = msgspec.json.encode(status())
    assert msgspec.json.decode(encoded, type=CustomNodeResourceStatus) == status()


def test_the_machine_by_katalysts_names() -> None:
    card = NetworkInterfaceCard(name="eth0", index=2, numa=1, pci="0000:3b:00.0", speed_mbit=25_000, enabled=True)
    flags = ("fpu", "avx2", "avx512f", "avx512bw")
    result = {
        item.property_name: item.property_values
        for item in hardware_properties(HardwareInventory(flags=flags, cards=(card,)))
    }
    assert result.keys() == {"cis", "topology"}
    assert result["cis"] == ("avx2", "avx512")
    (text,) = result["topology"] or ()
    assert json.loads(text) == {
        "NSName": "", "NSInode": 0, "NSAbsDir": "", "Name": "eth0", "IfIndex": 2, "Speed": 25000, "NumaNode": 1,
        "Enable": True, "Addr": None, "PCIAddr": "0000:3b:00.0",
    }  # fmt: skip
    (cis, all_flags) = hardware_properties(HardwareInventory(flags=flags), flags=True)
    assert all_flags.property_values == ("fpu,avx2,avx512f,avx512bw",)
    assert list(hardware_properties(HardwareInventory())) == []
    assert next(hardware_properties(HardwareInventory(flags=("fpu",)))).property_values == ()
    assert cis.property_name == "cis"


def _lay(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_machine_is_read(tmp_path: Path) -> None:
    device = tmp_path / "devices/pci0000:3a/0000:3b:00.0"
    _lay(device, numa_node="1\n")
    net = tmp_path / "sys/class/net"
    _lay(net, eth0__ifindex="2\n", eth0__speed="25000\n", eth0__operstate="up\n", lo__ifindex="1\n")
    _lay(net, eth1__ifindex="x\n", eth1__operstate="down\n")
    for name in ("eth0", "eth1"):
        (net / name / "device").symlink_to(device)
    (device / "numa_node").write_text("1\n")
    for name, place in (("eth2", "pci0000:00/0000:00:03.0/virtio2"), ("eth3", "platform/mmio/virtio3")):
        _lay(net, **{f"{name}__operstate": "up\n"})
        (tmp_path / "devices" / place).mkdir(parents=True)
        (net / name / "device").symlink_to(tmp_path / "devices" / place)
    _lay(tmp_path, proc__cpuinfo="processor\t: 0\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    result = read_hardware(tmp_path / "proc", tmp_path / "sys")
    assert result.flags == ("fpu", "avx2")
    assert result.cards == (
        NetworkInterfaceCard(name="eth0", index=2, numa=1, pci="0000:3b:00.0", speed_mbit=25_000, enabled=True),
        NetworkInterfaceCard(name="eth1", index=0, numa=1, pci="0000:3b:00.0", speed_mbit=-1, enabled=False),
        NetworkInterfaceCard(name="eth2", index=0, numa=-1, pci="0000:00:03.0", speed_mbit=-1, enabled=True),
        NetworkInterfaceCard(name="eth3", index=0, numa=-1, pci="", speed_mbit=-1, enabled=True),
    )
    assert read_hardware(tmp_path / "none", tmp_path / "none") == HardwareInventory()


@pytest.mark.parametrize("number", [0, 1])
def test_a_policy_that_is_unknown_is_left_out(number: int) -> None:
    result = build_cnr_report(finished(), metrics=False, inputs=CnrInputs(policy=None)).status_body()
    assert "topologyPolicy" not in result["status"]
    assert len(result["status"]["topologyZone"][number]["children"]) == 1

"""Wire format: bytes written by the stock peers' Go code are decoded and encoded identically; generated code is current.

golden/protocols.json was written by Marshal of katalyst-core v0.5.47, katalyst-api v0.5.11, kubelet v1.24.6-kubewharf-pre.2 and
k8s.io/api v0.24.6, with every field set and no map of two keys: the order of map keys is undefined.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from api.proto import core_v1_pb2 as core
from api.proto import cpu_advisor_pb2 as cpu
from api.proto import eviction_plugin_pb2 as eviction
from api.proto import pod_resources_pb2 as podres
from api.proto import resource_plugin_pb2 as plugin

HERE = Path(__file__).resolve().parent
PROTO = HERE.parents[1] / "api" / "proto"
GOLDEN = json.loads((HERE.parent / "golden" / "protocols.json").read_text())
MODULES = {
    "advisorsvc": "advisor_svc",
    "cpuadvisor": "cpu_advisor",
    "evictionplugin.v1alpha1": "eviction_plugin",
    "pluginregistration": "plugin_registration",
    "reporterplugin.v1alpha1": "reporter_plugin",
    "resourceplugin.v1alpha1": "resource_plugin",
    "v1": "pod_resources",
}


def message(name: str) -> Any:
    package, _dot, kind = name.rpartition(".")
    message_type = getattr(import_module(f"api.proto.{MODULES[package]}_pb2"), kind)
    assert message_type.DESCRIPTOR.full_name == name
    return message_type


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_bytes_of_the_stock_peers_are_read_and_written_alike(name: str) -> None:
    data = bytes.fromhex(GOLDEN[name])
    read = message(name).FromString(data)
    again = read.SerializeToString(deterministic=True)
    if name == "evictionplugin.v1alpha1.GetEvictPodsRequest":
        # What a pod has beyond our fields stays, but goes to the end of its message.
        assert sorted(again) == sorted(data)
    else:
        assert again == data


def test_numbers_that_the_facts_name() -> None:
    request = plugin.ResourceRequest.FromString(bytes.fromhex(GOLDEN["resourceplugin.v1alpha1.ResourceRequest"]))
    assert (request.container_type, request.hint.nodes, request.hint.preferred) == (plugin.MAIN, [0, 1, 300], True)
    assert request.resource_requests == {"resource.katalyst.kubewharf.io/reclaimed_millicpu": 2000.0}
    advice = cpu.GetAdviceResponse.FromString(bytes.fromhex(GOLDEN["cpuadvisor.GetAdviceResponse"]))
    blocks = advice.entries["reclaim"].entries[""].calculation_results_by_numas[-1].blocks
    assert [(block.result, block.block_id) for block in blocks] == [(300, "b-1")]
    assert blocks[0].overlap_targets[0].overlap_type == cpu.OverlapWithPool
    listed = podres.ListPodResourcesResponse.FromString(bytes.fromhex(GOLDEN["v1.ListPodResourcesResponse"]))
    container = listed.pod_resources[0].containers[0]
    assert (container.cpu_ids, container.memory[0].size) == ([2, 3, 300], 1 << 40)
    assert container.resources[0].topology_aware_quantity_list[0].topology_level == podres.SOCKET


def test_a_pod_keeps_fields_that_are_not_read() -> None:
    data = bytes.fromhex(GOLDEN["evictionplugin.v1alpha1.GetEvictPodsRequest"])
    (pod,) = eviction.GetEvictPodsRequest.FromString(data).active_pods
    assert (pod.metadata.uid, pod.spec.priority, pod.spec.nodeName, pod.status.qosClass) == (
        "u1",
        -5,
        "n1",
        "Burstable",
    )
    assert pod.metadata.ownerReferences[0].kind == "DaemonSet"
    assert pod.spec.containers[0].resources.requests["cpu"].string == "1500m"
    assert pod.spec.containers[0].resources.limits["memory"].string == "1Gi"
    assert not pod.spec.HasField("priorityClassName") or pod.spec.priorityClassName == ""
    pod.metadata.annotations["seen"] = "yes"
    again = core.Pod.FromString(pod.SerializeToString())
    assert again == pod
    assert b"\n\x01E\x12\x011" in again.SerializeToString(), "its variable E=1 is in a field that our message has not"


def test_hand_computed_bytes() -> None:
    """Where no golden file is trusted: tags are (number << 3 | type), a negative NUMA node takes ten bytes."""
    block = cpu.Block(result=300, block_id="a")
    assert block.SerializeToString() == bytes.fromhex("08ac021a0161")
    numa = cpu.NumaCalculationResult(blocks=[block])
    assert numa.SerializeToString()[0] == 2 << 3 | 2, "blocks are field 2"
    info = cpu.CalculationInfo(owner_pool_name="share")
    info.calculation_results_by_numas[-1].SetInParent()
    assert info.SerializeToString().hex() == "0a057368617265" + "120d" + "08" + "ff" * 9 + "01" + "1200"
    hint = plugin.TopologyHint(nodes=[0, 1], preferred=True)
    assert hint.SerializeToString().hex() == "0a0200011001", "numbers are packed"


def test_garbage_is_an_error_and_an_unknown_field_is_none() -> None:
    with pytest.raises(Exception, match=r"Error parsing message|truncated|wire"):
        cpu.GetAdviceResponse.FromString(b"\xff\xff\xff")
    assert cpu.Block.FromString(b"\x08\x05\xfa\x01\x01x").result == 5


def test_the_generated_python_is_current(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    from tests.protocols import generate  # noqa: PLC0415 - needs the tools

    generate(tmp_path)
    written = sorted((tmp_path / "api" / "proto").iterdir())
    assert {path.stem.removesuffix("_pb2") for path in written} == {path.stem for path in PROTO.glob("*.proto")}
    for path in written:
        assert path.read_text() == (PROTO / path.name).read_text(), f"run python -m tests.protocols: {path.name}"

"""Fields removed from each kind of object, and errors of the command; on a real API server: tests/cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner

from api.katalyst.kinds import KATALYST_KINDS
from cli.controller import withdraw as command
from controller import cleanup
from controller.cleanup import (
    ReportedCnr,
    _clean_resource,
    cleanup_steps,
    cnr_steps,
    configuration_steps,
    node_steps,
    parse_workload,
)
from controller.kcc.ownership import FINALIZER as KCC_FINALIZER
from controller.kcc.targets import FINALIZER, LEGACY_FINALIZERS
from controller.kinds import ControllerNode, ControllerNodeStatus
from controller.lifecycle.health_policy import with_own_taint
from kube.objects import KubeMetadata, PartialObjectMetadata, TaintsSpec
from tests.builders.api_server import FakeApiServer, client_of, status_response

META = KubeMetadata(name="n1", resource_version="7")
AS_OF = {"resourceVersion": "7"}
PRESSURE = {"key": "node.katalyst.kubewharf.io/MemoryPressure", "effect": "NoSchedule"}
UNRECORDED = {"key": "node.katalyst.kubewharf.io/CPUPressure", "effect": "NoSchedule"}
RECORD = "dioptase.io/node-taints"
FOREIGN_TAINT = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule", "extra": "1"}
MILLICPU, MEMORY = (f"resource.katalyst.kubewharf.io/reclaimed_{name}" for name in ("millicpu", "memory"))


@pytest.mark.parametrize(
    ("finalizers", "expected"),
    [
        ((), None),
        (("someone/else",), None),
        ((FINALIZER,), []),
        ((KCC_FINALIZER, "someone/else"), ["someone/else"]),
        ((*LEGACY_FINALIZERS, FINALIZER), []),
    ],
)
def test_finalizers_of_other_owners_stay(finalizers: tuple[str, ...], expected: list[str] | None) -> None:
    object_ = PartialObjectMetadata(
        metadata=KubeMetadata(name="all", namespace="kat", resource_version="7", finalizers=finalizers)
    )
    assert configuration_steps(object_) == (
        [] if expected is None else [({"metadata": {**AS_OF, "finalizers": expected}}, "")]
    )


@pytest.mark.parametrize(
    ("taints", "status", "steps"),
    [
        ((), {}, []),
        ((FOREIGN_TAINT,), {"conditions": [{}], "topologyPolicy": "None"}, []),
        ((PRESSURE, FOREIGN_TAINT), {}, [({"metadata": AS_OF, "spec": {"taints": [FOREIGN_TAINT]}}, "")]),
        (tuple(with_own_taint(ReportedCnr(), 0)), {}, [({"metadata": AS_OF, "spec": {"taints": []}}, "")]),
        (
            (),
            {"resources": {}, "topologyZone": [], "conditions": []},
            [({"status": {"resources": None, "topologyZone": None}}, "status")],
        ),
    ],
)
def test_steps_of_a_custom_node_resource(
    taints: tuple[Mapping[str, Any], ...], status: Mapping[str, Any], steps: list[Any]
) -> None:
    assert cnr_steps(ReportedCnr(metadata=META, spec=TaintsSpec(taints=taints), status=status)) == steps


def test_steps_of_a_node() -> None:
    resources = {MILLICPU: "4000", MEMORY: "1", "cpu": "8"}
    object_ = ControllerNode(
        metadata=KubeMetadata(name="n1", resource_version="7", annotations={RECORD: f"{PRESSURE['key']}:NoSchedule"}),
        spec=TaintsSpec(taints=(FOREIGN_TAINT, PRESSURE, UNRECORDED)),
        status=ControllerNodeStatus(capacity=resources, allocatable={"cpu": "8", MILLICPU: "0"}),
    )
    nothing = {MILLICPU: None, MEMORY: None}
    assert node_steps(object_) == [
        ({"metadata": {**AS_OF, "annotations": {RECORD: None}}, "spec": {"taints": [FOREIGN_TAINT, UNRECORDED]}}, ""),
        ({"status": {"capacity": nothing, "allocatable": nothing}}, "status"),
    ]
    assert node_steps(ControllerNode(metadata=META, status=ControllerNodeStatus(capacity={"cpu": "8"}))) == []


def test_overcommit_ratios_of_the_controller_are_removed_and_others_stay() -> None:
    ratios = {
        "katalyst.kubewharf.io/cpu_overcommit_ratio": "2",
        "katalyst.kubewharf.io/overcommit_capacity_cpu": "16",
        "katalyst.kubewharf.io/original_capacity_cpu": "8",
    }
    record = {"dioptase.io/overcommit-config": "batch"}
    by_hand = ControllerNode(metadata=KubeMetadata(name="n1", annotations=ratios))
    own = ControllerNode(metadata=KubeMetadata(name="n1", annotations=ratios | record))
    assert node_steps(by_hand) == []
    ((patch, subresource),) = node_steps(own)
    assert subresource == ""
    assert isinstance(patch, dict)
    assert patch["metadata"]["annotations"] == dict.fromkeys([*record, *list(ratios)[:2]])


def test_every_configuration_kind_is_cleaned_up() -> None:
    group = "config.katalyst.kubewharf.io"
    kinds = {kind.plural for kind in KATALYST_KINDS if kind.group == group and kind.plural != "customnodeconfigs"}
    looked = [resource.plural for resource, _ in cleanup_steps()]
    assert sorted(looked) == sorted([*kinds, "customnoderesources", "nodes"])


@pytest.mark.parametrize(
    "text", ["", "daemonset", "daemonset/a", "daemonset/a/b/c", "pod/a/b", "daemonset/a/..", "deployment//a"]
)
def test_an_invalid_workload_is_rejected(text: str) -> None:
    with pytest.raises(ValueError):
        parse_workload(text)


def test_a_workload_has_a_resource_and_a_key() -> None:
    resource, key = parse_workload("daemonset/dioptase/dioptase-agent")
    assert resource.path(key) == "/apis/apps/v1/namespaces/dioptase/daemonsets/dioptase-agent"


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (
            ["--stop", "pod/a/b"],
            2,
            "--stop: 'pod/a/b' is invalid; write daemonset/NAMESPACE/NAME or deployment/NAMESPACE/NAME",
        ),
        (["--timeout", "nan"], 2, "not a number of seconds"),
        ([], 1, "kubeconfig: current-context: is not set"),
    ],
)
def test_the_command_reports_invalid_options(tmp_path: Path, options: list[str], status: int, message: str) -> None:
    (tmp_path / "kubeconfig").write_text("{}")
    result = CliRunner().invoke(command, options, env={"KUBECONFIG": str(tmp_path / "kubeconfig")})
    assert result.exit_code == status
    assert message in result.output


@pytest.mark.parametrize(("served", "left"), [(True, 10), (False, 0)])
async def test_a_missing_kind_is_skipped_and_a_404_of_a_proxy_is_reported(served: bool, left: int) -> None:
    """The API server has no Node, and its list of groups has Katalyst's or not."""
    groups = [{"versions": [{"groupVersion": f"{name}.katalyst.kubewharf.io/v1alpha1"}]} for name in ("config", "node")]

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/api/v1/nodes":
            return status_response(200, '{"metadata": {"resourceVersion": "1"}, "items": []}')
        if request.path == "/apis":
            return status_response(200, json.dumps({"kind": "APIGroupList", "groups": groups if served else []}))
        return status_response(404, "404 page not found\n")

    async with client_of(answer) as client:
        failures = [
            each for resource, steps in cleanup_steps() for each in await _clean_resource(client, resource, steps)
        ]
    assert len(failures) == left


DAEMON_SET = "/apis/apps/v1/namespaces/dioptase/daemonsets/agent"


async def test_agents_that_are_being_replaced_start_before_they_are_deleted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only a running agent restores the values that the agent before it has handed over."""
    monkeypatch.setattr(cleanup, "POLL_INTERVAL_S", 0.01)
    status = {"desiredNumberScheduled": 3, "numberReady": 2}
    server = FakeApiServer({DAEMON_SET: {"metadata": {"name": "agent", "namespace": "dioptase"}, "status": status}})

    async def become_ready() -> None:
        while len(server.requests) < 3:
            await asyncio.sleep(0.01)
        server.objects[DAEMON_SET]["status"] = {**status, "numberReady": 3}

    async with server.client() as client:
        ready = asyncio.create_task(become_ready())
        failures = await cleanup.delete_workloads(client, [parse_workload("daemonset/dioptase/agent")], 60)
        await ready
    methods = [request.method for request in server.requests]
    assert failures == []
    assert methods.index("DELETE") > 3
    assert set(methods[: methods.index("DELETE")]) == {"GET"}
    assert caplog.text == ""


async def test_nodes_without_a_ready_agent_are_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cleanup, "POLL_INTERVAL_S", 0.01)
    status = {"desiredNumberScheduled": 3, "numberReady": 1}
    server = FakeApiServer({DAEMON_SET: {"metadata": {"name": "agent", "namespace": "dioptase"}, "status": status}})
    async with server.client() as client:
        await cleanup.delete_workloads(client, [parse_workload("daemonset/dioptase/agent")], 0.2)
    assert "daemonsets dioptase/agent: 2 nodes have no ready pod" in caplog.text
    assert "run `dioptase reset` on these nodes" in caplog.text
    assert DAEMON_SET not in server.objects

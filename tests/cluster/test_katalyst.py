"""The stock Katalyst agent as a peer, over the real sockets: its QRM plugins obey our advisor, our QRM obeys its advisor, its
reporter publishes what it learns from ours.

Its CPU plugin does not start on fewer CPUs than it keeps for reclaimed pods, so both see a machine of eight, whose pods
nobody runs. What it does to cgroups is not looked at here.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import declared
from tests.cluster.binaries import Missing
from tests.cluster.cluster import Cluster
from tests.cluster.daemons import wait
from tests.cluster.names import CONTROL
from tests.cluster.server import Server
from tests.cluster.stock import ADVISOR, CNRS, OURS, QRM, REPORTER, STAND_IN, Beside, Place, obtain_katalyst

pytestmark = pytest.mark.katalyst
CPUS = 8
ROOT = "/dioptase-nobody"
"""No cgroup, so that what they write for reclaimed pods hits nobody."""
LENT = "resource.katalyst.kubewharf.io/reclaimed_"


def pod(name: str, qos: str, requests: dict[str, str]) -> dict[str, Any]:
    container = {"name": "main", "image": "none", "resources": {"requests": requests, "limits": {}}}
    said = {"name": "main", "ready": True, "containerID": f"containerd://{name}", "state": {"running": {}}}
    annotations = {"katalyst.kubewharf.io/qos_level": qos, "cgroup.dioptase.io/main": f"{ROOT}/{name}"}
    return {
        "metadata": {"name": name, "namespace": "default", "uid": str(uuid.uuid4()), "annotations": annotations},
        "spec": {"nodeName": "peer", "containers": [container]},
        "status": {"phase": "Running", "containerStatuses": [said]},
    }


WEB = pod("web", "shared_cores", {"cpu": "500m", "memory": "64Mi"})
BATCH = pod("batch", "reclaimed_cores", {f"{LENT}millicpu": "200", f"{LENT}memory": "64Mi"})
PODS = {"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": [WEB, BATCH]}


@pytest.fixture(scope="module")
def program() -> Path:
    try:
        return obtain_katalyst()
    except Missing as error:
        pytest.skip(str(error))


@pytest.fixture
def beside(ours: Cluster, definitions: Server, program: Path) -> Iterator[Beside]:
    folder = ours.names.run / uuid.uuid4().hex[:4]
    declared.write(folder / "machine", CPUS)
    place = Place(ours.names.space(CONTROL), ours.names.address(CONTROL), declared.inside(folder / "machine"))
    made = Beside(ours, place, program, folder / "k", "peer")
    (folder / "pods.json").write_text(json.dumps(PODS))
    made.start(STAND_IN, "python3", Path(__file__).with_name("stand_in.py"), "0.0.0.0", folder / "pods.json")
    definitions.ask("POST", "/api/v1/nodes", {"metadata": {"name": "peer"}})
    yield made
    made.end()
    definitions.ask("DELETE", "/api/v1/nodes/peer")


def settings(**sockets: list[str]) -> dict[str, Any]:
    return {
        "advisor": {"policy": "canonical", "minShareCores": 2},
        "memory": {"reclaimRoot": ROOT},
        "placing": {"rampUpS": 0},
        "sockets": sockets,
    }


def start_ours(beside: Beside, **sockets: list[str]) -> None:
    pods = beside.folder.parent / "pods.json"
    beside.start_ours(settings(**sockets), "--pods", str(pods), "--act", "dry-run")


def pools(beside: Beside) -> dict[str, int]:
    """CPUs of share and reclaim, as ours has them."""
    told = beside.metrics()
    return {name: int(told[f'dioptase_pool_cpus{{pool="{name}"}}']) for name in ("share", "reclaim")}


def size(text: str) -> int:
    """CPUs of a list in the kernel's syntax."""
    parts = [part.split("-") for part in text.split(",") if part]
    return sum(int(part[-1]) - int(part[0]) + 1 for part in parts)


def given(beside: Beside) -> dict[str, int]:
    """CPUs of share and reclaim, as their CPU plugin has them on disk."""
    entries = beside.state("cpu")["pod_entries"]
    return {name: size(entries[name][""]["allocation_result"]) for name in ("share", "reclaim") if name in entries}


def test_a_stock_qrm_plugin_obeys_our_advisor(beside: Beside) -> None:
    start_ours(beside, serve=["advisor"])
    advisor = [f"--{kind}-resource-plugin-advisor=true" for kind in ("cpu", "memory")]
    beside.start_stock("katalyst-qrm", QRM, *advisor, f"--reclaim-relative-root-cgroup-path={ROOT}")
    asked = 'dioptase_advice_age_seconds{direction="given",resource="%s"}'
    wait("advice", lambda: {asked % kind for kind in ("cpu", "memory")} <= beside.metrics().keys(), 60)
    wait("their pools", lambda: given(beside) == pools(beside), 30)
    # Its own rule would have put every CPU that no request needs into reclaim: 7 of 8.
    assert given(beside) == pools(beside) != {"share": 1, "reclaim": 7}
    assert sum(given(beside).values()) == CPUS
    told = beside.metrics()
    assert told['dioptase_protocol_peers{role="qrm-plugin"}'] == 2
    refused = [name for name in told if "calls_total" in name and "GetAdvice" in name and 'code="OK"' not in name]
    assert refused == []
    for complaint in ("get advice from cpu advisor failed", "handle control knob failed"):
        assert complaint not in beside.log("katalyst-qrm")


def test_our_qrm_obeys_a_stock_advisor(beside: Beside) -> None:
    start_ours(beside, take=["cpu", "memory"])
    alone = pools(beside)
    beside.start_stock("katalyst-advisor", [ADVISOR], f"--reclaim-relative-root-cgroup-path={ROOT}")
    trusted = 'dioptase_protocol_peers{role="advisor"}'
    wait("both to be trusted", lambda: beside.metrics()[trusted] == 2, 90)
    # Its share pool has 4 CPUs at least; ours was told 2.
    wait("their sizes", lambda: pools(beside) != alone, 30)
    assert alone == {"share": 2, "reclaim": 6}
    assert pools(beside) == {"share": 4, "reclaim": 4}


def test_a_stock_reporter_publishes_what_ours_tells(beside: Beside, definitions: Server) -> None:
    """With metrics it waits for those before it lets them begin, so it runs without: what it says comes by our socket."""
    start_ours(beside, serve=["pod-resources"])
    beside.start_stock("katalyst-reporter", [REPORTER], "--enable-metrics-fetcher=false")
    wait("their zones", lambda: beside.cnr()["status"]["topologyZone"], 60)
    found = beside.cnr()
    (socket,) = found["status"]["topologyZone"]
    (numa,) = socket["children"]
    assert (socket["type"], socket["name"], numa["type"], numa["name"]) == ("Socket", "0", "Numa", "0")
    assert numa["resources"]["capacity"]["cpu"] == numa["resources"]["allocatable"]["cpu"] == str(CPUS)
    total = next(
        int(line.split()[3]) * 1024
        for line in (declared.REAL / "node/node0/meminfo").read_text().splitlines()
        if "MemTotal" in line
    )
    assert abs(int(numa["resources"]["capacity"]["memory"]) / total - 1) < 0.2, (
        "this machine's memory changes while it runs"
    )
    properties = {one["propertyName"]: one.get("propertyQuantity") for one in found["spec"]["nodeResourceProperties"]}
    assert (properties["numa"], properties["cpu"]) == ("1", str(CPUS))
    definitions.ask("DELETE", f"{CNRS}/{beside.name}")
    assert OURS in beside.cluster.daemons.names()

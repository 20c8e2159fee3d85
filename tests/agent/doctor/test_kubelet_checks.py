"""What `dioptase doctor --kubelet` says of a kubelet and a runtime: where they are not, and of managers in the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agent.config.loader import build_config
from agent.doctor.kubelet_checks import _check_kubelet
from api.diagnostics import DoctorCheck
from tests.agent.nri.fake_runtime import Runtime
from tests.agent.sensors.pods.kubelet_objects import listing, pod
from tests.agent.sensors.pods.test_cri_client import Containerd
from tests.agent.sensors.pods.test_kubelet_client import serving

CONFIGZ = {
    "kubeletconfig": {
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": "/",
        "topologyManagerPolicy": "single-numa-node",
        "topologyManagerScope": "pod",
        "cpuManagerPolicy": "static",
        "memoryManagerPolicy": "None",
    }
}


async def examined(tmp_path: Path, **kubelet: Any) -> dict[str, DoctorCheck]:
    answer = {"url": "http://127.0.0.1:1", "runtimeSocket": "", "nriSocket": "", "rootDir": str(tmp_path), **kubelet}
    config = build_config({"kubelet": answer, "advisor": {"policy": "canonical"}}, "test")
    result = await _check_kubelet(config, Path("/proc"))
    return {check.name: check for check in result.checks}


async def test_missing_sockets_are_reported_with_the_remedy(tmp_path: Path) -> None:
    result = await examined(tmp_path, nriSocket=str(tmp_path / "nri.sock"))
    assert [(name, check.ok) for name, check in result.items()] == [
        ("kubelet", False),
        ("container runtime", False),
        ("optional: NRI", True),
        ("kubelet's managers", False),
        ("optional: kubelet's configuration", True),
    ]
    assert "kubelet.url" in result["kubelet"].remedy
    assert "kubelet.runtimeSocket" in result["container runtime"].remedy
    assert "NRI enabled" in result["optional: NRI"].remedy
    managers = result["kubelet's managers"]
    assert "connection refused" in managers.detail
    assert f"{tmp_path}/cpu_manager_state cannot be read" in managers.detail
    assert "nodes/configz" in managers.remedy
    assert "nodes/configz" in result["optional: kubelet's configuration"].remedy


async def test_available_services_are_reported_with_their_answers(tmp_path: Path) -> None:
    containerd = Containerd()
    containerd.run("web", "main", "aa")
    server = await containerd.serve(tmp_path / "c.sock")
    static = {"policyName": "static", "defaultCpuSet": "0", "entries": {"u": {"main": "1"}}, "checksum": 1}
    (tmp_path / "cpu_manager_state").write_text(json.dumps(static))

    async def kubelet(request: web.Request) -> web.Response:
        return web.json_response(CONFIGZ) if request.path == "/configz" else web.Response(body=listing(pod("web")))

    async with serving(kubelet) as url, Runtime(tmp_path / "nri.sock"):
        sockets = {"runtimeSocket": str(tmp_path / "c.sock"), "nriSocket": str(tmp_path / "nri.sock")}
        result = await examined(tmp_path, url=url, **sockets)
    await server.stop()
    assert (result["kubelet"].ok, result["kubelet"].detail) == (False, "no cgroup of shop/web/main")
    assert result["container runtime"].detail == f"{tmp_path}/c.sock runs 1 containers in 1 pods"
    assert result["optional: NRI"].detail == f"{tmp_path}/nri.sock: containers start with their limits"
    manager = result["kubelet's CPU manager"]
    assert (manager.ok, manager.detail.startswith("static, by /configz: ")) == (False, True)
    assert "1 containers have exclusive CPUs" in manager.detail
    assert result["kubelet's memory manager"].detail == "none, by /configz"
    assert "cpuManagerPolicy: none" in manager.remedy
    configuration = next(check for name, check in result.items() if name.endswith("kubelet's configuration"))
    assert "cgroupDriver cgroupfs, cgroupRoot /, topology manager single-numa-node (pod)" in configuration.detail


@pytest.mark.parametrize("root", ["/other", "/node2"])
async def test_a_cgroup_root_that_differs_from_the_kubelets_is_reported(tmp_path: Path, root: str) -> None:
    async def kubelet(request: web.Request) -> web.Response:
        return web.json_response(CONFIGZ) if request.path == "/configz" else web.Response(body=listing())

    async with serving(kubelet) as url:
        result = await examined(tmp_path, url=url, cgroupRoot=root)
    check = result["kubelet's configuration"]
    assert (check.ok, check.remedy) == (False, "set kubelet.cgroupRoot: /")

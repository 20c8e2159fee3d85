"""The files in which the kubelet's managers keep whom they gave what: as Kubernetes 1.33 writes them, and otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from aiohttp import web

from agent.config.kubelet import KubeletConfig
from agent.sensors.pods.kubelet_client import CONFIGZ_PATH, KubeletClient
from agent.sensors.pods.kubelet_managers import (
    CPU_STATE_FILE,
    MEMORY_STATE_FILE,
    KubeletConfigPoller,
    KubeletManagerPolicies,
    KubeletManagersProbe,
    read_manager_state,
)
from api.interfaces import Unavailable
from api.measurements import KubeletManagers
from tests.agent.sensors.pods.test_kubelet_client import serving

STATIC = {
    "policyName": "static",
    "defaultCpuSet": "0,4-7",
    "entries": {"uid-db": {"main": "1-3"}},
    "checksum": 1654942117,
}
MEMORY = {
    "policyName": "Static",
    "machineState": {"0": {"numberOfAssignments": 1, "memoryMap": {}, "cells": [0]}},
    "entries": {"uid-db": {"main": [{"numaAffinity": [0], "type": "memory", "size": 1073741824}]}},
    "checksum": 1,
}
REAL_NONE = '{"policyName":"none","defaultCpuSet":"","checksum":1353318690}'


NOBODY = KubeletConfigPoller(KubeletClient(KubeletConfig(url="http://127.0.0.1:1"), CONFIGZ_PATH))
"""Was not asked yet."""


def saying(cpu: str, memory: str = "None") -> KubeletConfigPoller:
    """A kubelet that said this."""
    asking = KubeletConfigPoller(KubeletClient(KubeletConfig(url="http://127.0.0.1:1"), CONFIGZ_PATH))
    asking.policies = KubeletManagerPolicies(cpu_manager_policy=cpu, memory_manager_policy=memory)
    return asking


def write(root: Path, name: str, content: object) -> None:
    (root / name).write_text(content if isinstance(content, str) else json.dumps(content))


def test_what_both_hand_out(tmp_path: Path) -> None:
    write(tmp_path, CPU_STATE_FILE, STATIC)
    write(tmp_path, MEMORY_STATE_FILE, MEMORY)
    found = read_manager_state(tmp_path)
    assert found == KubeletManagers(
        cpu="static", memory="static", exclusive={"uid-db": {"main": (1, 2, 3)}}, bound=frozenset({"uid-db"})
    )
    assert found.manages_cpusets
    assert found.mems


def test_a_manager_that_is_off_hands_out_nothing_and_old_kubelets_have_no_other(tmp_path: Path) -> None:
    write(tmp_path, CPU_STATE_FILE, REAL_NONE)
    found = read_manager_state(tmp_path)
    assert (found.cpu, found.memory, found.manages_cpusets, found.mems) == ("none", "none", False, False)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "Input data was truncated"),
        ('{"policyName": 5}', "Expected `str`, got `int`"),
        ({**STATIC, "entries": {"uid-db": "1-3"}}, "Expected `object`"),
        ({**STATIC, "entries": {"uid-db": {"main": "1-x"}}}, "1-x"),
        ("[" * 100_000, ""),
    ],
)
def test_what_cannot_be_read_is_told_and_what_was_known_holds(tmp_path: Path, content: object, said: str) -> None:
    write(tmp_path, CPU_STATE_FILE, STATIC)
    probe = KubeletManagersProbe(tmp_path, NOBODY, needs_cpusets=False)
    known = probe.read({}).node["kubelet"]
    assert (probe.problem(), probe.form) == (None, "cpu static, memory none")
    write(tmp_path, CPU_STATE_FILE, content)
    assert probe.read({}).node["kubelet"] == known
    problem = probe.problem()
    assert problem is not None
    assert f"{tmp_path}/{CPU_STATE_FILE} cannot be read: " in problem.reason
    assert said in problem.reason
    write(tmp_path, CPU_STATE_FILE, REAL_NONE + " ")
    probe.read({})
    assert (probe.problem(), probe.form) == (None, "cpu none, memory none")


def test_a_static_manager_in_the_policys_way_is_told_with_what_to_do(tmp_path: Path) -> None:
    write(tmp_path, CPU_STATE_FILE, STATIC)
    probe = KubeletManagersProbe(tmp_path, NOBODY, needs_cpusets=True)
    probe.read({})
    problem = probe.problem()
    assert problem is not None
    assert "1 containers have exclusive CPUs" in problem.reason
    assert "`cpuManagerPolicy: none`" in problem.remedy


@pytest.mark.parametrize("wants", [True, False])
@pytest.mark.parametrize("there", [True, False])
def test_where_nobody_tells_both_may_be_static(tmp_path: Path, *, there: bool, wants: bool) -> None:
    root = tmp_path / "kubelet"
    if there:
        root.mkdir()  # an empty one, as a mount that does not work
    with pytest.raises(Unavailable, match=r"there is no such (directory|file)"):
        read_manager_state(root)
    probe = KubeletManagersProbe(root, NOBODY, needs_cpusets=wants)
    found = probe.read({}).node["kubelet"]
    assert isinstance(found, KubeletManagers)
    assert (found.manages_cpusets, found.mems, probe.form) == (True, True, "unknown")
    problem = probe.problem()
    assert (problem is not None) is (wants or there), "who writes no cpusets has nobody's to respect"
    if wants and problem is not None:
        assert problem.reason.startswith("it is unknown whether the kubelet's CPU manager is static: ")
        assert "there is no such" in problem.reason
        assert "nodes/configz" in problem.remedy


@pytest.mark.parametrize(
    ("asking", "file", "cpu", "memory", "manages_cpusets"),
    [
        (saying("none"), None, "none", "none", False),
        (saying("static", "Static"), None, "static", "static", True),
        (saying("none"), REAL_NONE, "none", "none", False),
        # Whichever of them says more.
        (saying("none"), STATIC, "static", "none", True),
        (saying("static"), REAL_NONE, "static", "none", True),
        (NOBODY, REAL_NONE, "none", "none", False),
    ],
)
def test_the_kubelet_is_believed_first_and_its_files_second(
    tmp_path: Path, asking: KubeletConfigPoller, file: object, cpu: str, memory: str, *, manages_cpusets: bool
) -> None:
    if file is not None:
        write(tmp_path, CPU_STATE_FILE, file)
    probe = KubeletManagersProbe(tmp_path if file is not None else tmp_path / "none", asking, needs_cpusets=True)
    found = probe.read({}).node["kubelet"]
    assert isinstance(found, KubeletManagers)
    assert (found.cpu, found.memory, found.manages_cpusets) == (cpu, memory, manages_cpusets)
    assert (probe.problem() is not None) is manages_cpusets
    if manages_cpusets and file != STATIC:
        problem = probe.problem()
        assert problem is not None
        assert ("is unknown" in problem.reason) is (file is None)


async def test_what_the_kubelet_said_stands_while_it_cannot_be_asked() -> None:
    answers = [(200, {"cpuManagerPolicy": "static", "memoryManagerPolicy": "None"}), (403, {}), (200, {})]

    async def kubelet(_request: web.Request) -> web.Response:
        status, said = answers.pop(0)
        return web.json_response({"kubeletconfig": said}, status=status)

    async with serving(kubelet) as url, KubeletClient(KubeletConfig(url=url), CONFIGZ_PATH) as there:
        asking = KubeletConfigPoller(there)
        for problem in ("", "answered 403", "/configz has an unexpected format"):
            await asking.poll()
            assert asking.policies == KubeletManagerPolicies(cpu_manager_policy="static", memory_manager_policy="None")
            assert problem in ("" if asking.problem is None else asking.problem.reason)

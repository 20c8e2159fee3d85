"""The state files of the kubelet's managers: as Kubernetes 1.33 writes them, and malformed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.config.kubelet import KubeletConfig
from agent.sensors.pods.kubelet_client import CONFIGZ_PATH, KubeletClient
from agent.sensors.pods.kubelet_configuration import KubeletConfigPoller, KubeletConfiguration
from agent.sensors.pods.kubelet_managers import (
    CPU_STATE_FILE,
    MEMORY_STATE_FILE,
    KubeletManagersProbe,
    read_manager_state,
)
from api.interfaces import Unavailable
from api.snapshot import KubeletManagers

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


NOT_POLLED = KubeletConfigPoller(KubeletClient(KubeletConfig(url="http://127.0.0.1:1"), CONFIGZ_PATH))
"""A poller without an answer."""


def saying(cpu: str, memory: str = "None") -> KubeletConfigPoller:
    """A kubelet that said this."""
    asking = KubeletConfigPoller(KubeletClient(KubeletConfig(url="http://127.0.0.1:1"), CONFIGZ_PATH))
    asking.configuration = KubeletConfiguration(cpu_manager_policy=cpu, memory_manager_policy=memory)
    return asking


def write(root: Path, name: str, content: object) -> None:
    (root / name).write_text(content if isinstance(content, str) else json.dumps(content))


def test_exclusive_cpus_and_memory_bindings_are_read(tmp_path: Path) -> None:
    write(tmp_path, CPU_STATE_FILE, STATIC)
    write(tmp_path, MEMORY_STATE_FILE, MEMORY)
    result = read_manager_state(tmp_path)
    assert result == KubeletManagers(
        cpu="static", memory="static", exclusive={"uid-db": {"main": (1, 2, 3)}}, bound=frozenset({"uid-db"})
    )
    assert result.manages_cpusets
    assert result.mems


def test_a_manager_that_is_off_hands_out_nothing_and_old_kubelets_have_no_other(tmp_path: Path) -> None:
    write(tmp_path, CPU_STATE_FILE, REAL_NONE)
    result = read_manager_state(tmp_path)
    assert (result.cpu, result.memory, result.manages_cpusets, result.mems) == ("none", "none", False, False)


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        ("", "Input data was truncated"),
        ('{"policyName": 5}', "Expected `str`, got `int`"),
        ({**STATIC, "entries": {"uid-db": "1-3"}}, "Expected `object`"),
        ({**STATIC, "entries": {"uid-db": {"main": "1-x"}}}, "1-x"),
        ("[" * 100_000, ""),
    ],
)
def test_unreadable_files_are_reported_and_the_last_values_stay(tmp_path: Path, content: object, answer: str) -> None:
    write(tmp_path, CPU_STATE_FILE, STATIC)
    probe = KubeletManagersProbe(tmp_path, NOT_POLLED, needs_cpusets=False)
    previous = probe.read({}).node["kubelet"]
    assert (probe.problem(), probe.form) == (None, "cpu static, memory none")
    write(tmp_path, CPU_STATE_FILE, content)
    assert probe.read({}).node["kubelet"] == previous
    problem = probe.problem()
    assert problem is not None
    assert f"{tmp_path}/{CPU_STATE_FILE} cannot be read: " in problem.reason
    assert answer in problem.reason
    write(tmp_path, CPU_STATE_FILE, REAL_NONE + " ")
    probe.read({})
    assert (probe.problem(), probe.form) == (None, "cpu none, memory none")


def test_a_static_manager_that_prevents_the_policy_is_reported_with_a_remedy(tmp_path: Path) -> None:
    write(tmp_path, CPU_STATE_FILE, STATIC)
    probe = KubeletManagersProbe(tmp_path, NOT_POLLED, needs_cpusets=True)
    probe.read({})
    problem = probe.problem()
    assert problem is not None
    assert "1 containers have exclusive CPUs" in problem.reason
    assert "`cpuManagerPolicy: none`" in problem.remedy


@pytest.mark.parametrize("wants", [True, False])
@pytest.mark.parametrize("there", [True, False])
def test_without_any_source_both_managers_may_be_static(tmp_path: Path, *, there: bool, wants: bool) -> None:
    root = tmp_path / "kubelet"
    if there:
        root.mkdir()  # an empty one, as a mount that does not work
    with pytest.raises(Unavailable, match=r"there is no such (directory|file)"):
        read_manager_state(root)
    probe = KubeletManagersProbe(root, NOT_POLLED, needs_cpusets=wants)
    result = probe.read({}).node["kubelet"]
    assert isinstance(result, KubeletManagers)
    assert (result.manages_cpusets, result.mems, probe.form) == (True, True, "unknown")
    problem = probe.problem()
    assert (problem is not None) is (wants or there), "a policy without cpusets has no conflict"
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
        (NOT_POLLED, REAL_NONE, "none", "none", False),
    ],
)
def test_the_kubelet_is_believed_first_and_its_files_second(
    tmp_path: Path, asking: KubeletConfigPoller, file: object, cpu: str, memory: str, *, manages_cpusets: bool
) -> None:
    if file is not None:
        write(tmp_path, CPU_STATE_FILE, file)
    probe = KubeletManagersProbe(tmp_path if file is not None else tmp_path / "none", asking, needs_cpusets=True)
    result = probe.read({}).node["kubelet"]
    assert isinstance(result, KubeletManagers)
    assert (result.cpu, result.memory, result.manages_cpusets) == (cpu, memory, manages_cpusets)
    assert (probe.problem() is not None) is manages_cpusets
    if manages_cpusets and file != STATIC:
        problem = probe.problem()
        assert problem is not None
        assert ("is unknown" in problem.reason) is (file is None)

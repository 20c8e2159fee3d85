"""The files in which the kubelet's managers keep whom they gave what: as Kubernetes 1.33 writes them, and otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.sense.kubelet_managers import CPU_STATE, MEMORY_STATE, ManagersProbe, read
from api.facts import KubeletManagers
from api.ports import Unavailable

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


def write(root: Path, name: str, content: object) -> None:
    (root / name).write_text(content if isinstance(content, str) else json.dumps(content))


def test_what_both_hand_out(tmp_path: Path) -> None:
    write(tmp_path, CPU_STATE, STATIC)
    write(tmp_path, MEMORY_STATE, MEMORY)
    found = read(tmp_path)
    assert found == KubeletManagers(
        cpu="static", memory="static", exclusive={"uid-db": {"main": (1, 2, 3)}}, bound=frozenset({"uid-db"})
    )
    assert found.cpusets
    assert found.mems


def test_a_manager_that_is_off_or_has_no_file_hands_out_nothing(tmp_path: Path) -> None:
    write(tmp_path, CPU_STATE, REAL_NONE)
    found = read(tmp_path)
    assert (found.cpu, found.memory, found.cpusets, found.mems) == ("none", "none", False, False)


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
    write(tmp_path, CPU_STATE, STATIC)
    probe = ManagersProbe(tmp_path, wants_cpusets=False)
    known = probe.read({}).node["kubelet"]
    assert (probe.problem(), probe.form) == (None, "cpu static, memory none")
    write(tmp_path, CPU_STATE, content)
    assert probe.read({}).node["kubelet"] == known
    problem = probe.problem()
    assert problem is not None
    assert f"{tmp_path}/{CPU_STATE} cannot be read: " in problem.reason
    assert said in problem.reason
    write(tmp_path, CPU_STATE, REAL_NONE + " ")
    probe.read({})
    assert (probe.problem(), probe.form) == (None, "cpu none, memory none")


def test_a_static_manager_in_the_policys_way_is_told_with_what_to_do(tmp_path: Path) -> None:
    write(tmp_path, CPU_STATE, STATIC)
    probe = ManagersProbe(tmp_path, wants_cpusets=True)
    probe.read({})
    problem = probe.problem()
    assert problem is not None
    assert "1 containers have CPUs to themselves" in problem.reason
    assert "`cpuManagerPolicy: none`" in problem.remedy


@pytest.mark.parametrize("wants", [True, False])
def test_a_directory_that_is_not_there_tells_nothing(tmp_path: Path, *, wants: bool) -> None:
    with pytest.raises(Unavailable, match="there is no such directory"):
        read(tmp_path / "kubelet")
    probe = ManagersProbe(tmp_path / "kubelet", wants_cpusets=wants)
    assert probe.read({}).node == {"kubelet": None}
    assert (probe.problem() is not None) is wants, "who writes no cpusets has nobody's to respect"

"""Unset cgroup paths follow the kubelet's cgroup driver and root."""

from __future__ import annotations

from typing import Any

import pytest

from agent.config.loader import build_config
from agent.config.node_check import kubelet_root_settings
from agent.config.profiles import with_defaults

SLICE = "/node_2.slice/node_2-kubepods"
SYSTEMD = "/kubepods.slice/kubepods-besteffort.slice"


@pytest.mark.parametrize(
    ("document", "root", "there", "expected"),
    [
        ({}, "/", {"/kubepods"}, "/kubepods/besteffort"),
        ({}, "/", {"/kubepods.slice"}, SYSTEMD),
        # After a change of the driver, cgroups of the other driver may remain.
        ({}, "/", {"/kubepods", "/kubepods.slice"}, SYSTEMD),
        ({}, "/", set(), ""),
        ({"memory": {"usageMargin": 1.2}}, "/", {"/kubepods"}, "/kubepods/besteffort"),
        ({"memory": {"reclaimRoot": ""}}, "/", {"/kubepods"}, ""),
        ({"memory": {"reclaimRoot": "/batch"}}, "/", {"/kubepods"}, "/batch"),
        ({}, "/node-2", {"/node-2/kubepods"}, "/node-2/kubepods/besteffort"),
        ({}, "/node-2", {f"{SLICE}.slice"}, f"{SLICE}.slice/node_2-kubepods-besteffort.slice"),
    ],
)  # fmt: skip
def test_the_root_of_reclaimed_pods_is_that_of_best_effort(
    document: dict[str, Any], root: str, there: set[str], expected: str
) -> None:
    config = build_config(with_defaults(document, kubelet_root_settings(root, there.__contains__)), "test")
    assert config.memory.reclaim_root == expected
    assert config.memory.usage_margin == document.get("memory", {}).get("usageMargin", 1.1)


def test_other_paths_follow_a_configured_root() -> None:
    config = build_config(kubelet_root_settings("/n2", {"/n2/kubepods"}.__contains__), "test")
    below = ("/n2/kubepods/burstable", "/n2.slice/n2-kubepods.slice/n2-kubepods-burstable.slice")
    assert config.eviction.system_memory.psi_roots == below
    assert config.memory.offloading.dying_cgroups == (below[0], "/n2/kubepods/offline-besteffort-*", below[1])
    plain = build_config(kubelet_root_settings("/", {"/kubepods"}.__contains__), "test")
    assert plain.memory.offloading == build_config({}, "test").memory.offloading


def test_an_invalid_section_is_left_for_validation() -> None:
    assert with_defaults({"memory": 5}, kubelet_root_settings("/", {"/kubepods"}.__contains__)) == {"memory": 5}

"""The node of tests/cluster/test_systemd_driver.py after a reboot: the same disk, and an agent that has restored nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import pytest

from tests.cluster.binaries import obtain
from tests.cluster.cgroups import ROOT
from tests.cluster.cluster import Cluster
from tests.cluster.daemons import wait
from tests.cluster.names import Names
from tests.cluster.systemd_node import CLASS, DISK, NAMESPACE, OUT, SystemdNode, is_idle, mount_disk, settings_of_pods

pytestmark = pytest.mark.vm_rebooted


@pytest.fixture(scope="module")
def node() -> Iterator[SystemdNode]:
    """The node, whose programs start as they do with a machine."""
    mount_disk()
    try:
        cluster = Cluster(Names(0), obtain())
        cluster.resume()
        yield SystemdNode(cluster)
    finally:
        for folder in DISK.glob("*/daemons"):
            shutil.copytree(folder, OUT / "daemons", dirs_exist_ok=True)


def test_after_a_reboot_the_priority_is_there_and_originals_of_lost_cgroups_are_dropped(node: SystemdNode) -> None:
    assert not CLASS.exists(), "systemd has removed every slice with the machine"
    saved = json.loads((node.state / "originals.json").read_bytes())["body"]
    assert f"/{CLASS.relative_to(ROOT)}" in {entry["cgroup"] for entry in saved["entries"]}
    wait("the agent", lambda: node.cycle() >= 2, 120)
    wait("the class is idle", lambda: is_idle(CLASS), 90)
    wait("the pod is idle", lambda: is_idle(node.scope("batch").parent))
    log = node.cluster.kubectl("--namespace", NAMESPACE, "logs", "daemonset/dioptase-agent")
    assert f"dropped {len(saved['entries'])} originals of another boot, whose cgroups no longer exist" in log


def test_after_uninstall_every_cgroup_file_is_as_it_was_before_the_first_agent(node: SystemdNode) -> None:
    before = json.loads((DISK / "before.json").read_text())
    node.uninstall()
    after = settings_of_pods(node, "web", "batch")
    assert {name: (text, after.get(name)) for name, text in before.items() if "-pod" in name} == {
        name: (text, text) for name, text in before.items() if "-pod" in name
    }
    assert not is_idle(CLASS)

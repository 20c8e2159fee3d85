"""A stock kubelet with the systemd cgroup driver on cgroup v2: systemd is the init of the guest.

Most clusters run this way. Slices and scopes belong to systemd, which writes weights that others have changed, so that the
agent, the kubelet and systemd share the same files. The tests run in their order: the gate runs those that show that the chart
acts there, `tests/run vm-systemd-long` all of them. The last one leaves the node to tests/cluster/test_reboot.py, which the
next boot of the same disk runs.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cgroups import ROOT
from tests.cluster.cluster import CONSENT, create_cluster
from tests.cluster.control_plane import API_SERVER
from tests.cluster.daemons import wait
from tests.cluster.node import SYSTEMD
from tests.cluster.objects import IDLING
from tests.cluster.systemd_node import CLASS, DISK, OUT, SystemdNode, is_idle, mount_disk, settings_of_pods

MILLICPU, BYTES = "resource.katalyst.kubewharf.io/reclaimed_millicpu", "resource.katalyst.kubewharf.io/reclaimed_memory"
OWN_QUOTA = f"cat /sys/fs/cgroup/cpu.max; {IDLING}"
"""Shell script of a pod that prints the quota that its first instruction finds."""
PERIOD_US = 100_000


@pytest.fixture(scope="module")
def node() -> Iterator[SystemdNode]:
    """A cluster of one node on the data disk, with an online and a reclaimed pod. It ends as with the machine's power, but
    for the programs that do not sync their files."""
    shutil.rmtree(DISK, ignore_errors=True)
    mount_disk()
    cluster = None
    try:
        cluster = create_cluster(1, retained=True, cgroup_driver=SYSTEMD)
        node = SystemdNode(cluster)
        account = f"/api/v1/namespaces/{CONSENT}/serviceaccounts/default"
        wait("the service account", lambda: cluster.server.ask("GET", account))
        node.create("web", "shared_cores", resources={"requests": {"cpu": "200m"}})
        node.create("batch", "reclaimed_cores")
        yield node
    finally:
        if cluster is not None:
            for name in (API_SERVER, "etcd"):
                cluster.daemons.end(name, signal.SIGTERM)
        for folder in DISK.glob("*/daemons"):
            shutil.copytree(folder, OUT / "daemons", dirs_exist_ok=True)


@pytest.fixture(scope="module")
def before(node: SystemdNode) -> Mapping[str, str]:
    """The settings of all cgroups of pods before the first agent."""
    return settings_of_pods(node, "web", "batch")


@pytest.fixture(scope="module")
def installed(node: SystemdNode, before: Mapping[str, str]) -> SystemdNode:
    """The same node once the chart is installed."""
    assert len(before) > 100
    node.install()
    return node


def path_of(cgroup: Path) -> str:
    """Return the cgroup's path as the agent writes it."""
    return f"/{cgroup.relative_to(ROOT)}"


def wait_for_priority(node: SystemdNode) -> None:
    """Wait until the reclaimed pod and its class are idle."""
    pod = node.scope("batch").parent
    wait("cpu.idle of the pod and of its class", lambda: is_idle(pod) and is_idle(CLASS))


def wait_for_repair(node: SystemdNode, cgroup: Path) -> None:
    """Wait until cgroup is idle again: in the first cycle that began after this call at the latest, and that is the cycle
    after the current one."""
    current = node.cycle()
    while True:
        cycle = node.cycle()
        if is_idle(cgroup):
            return
        assert cycle < current + 2, f"{cgroup} is not idle in cycle {cycle}, and was not in cycle {current}"


def originals(node: SystemdNode) -> Mapping[str, object]:
    """Return the recorded original values of cpu.idle by cgroup."""
    entries = json.loads((node.state / "originals.json").read_bytes())["body"]["entries"]
    return {entry["cgroup"]: entry["raw"]["texts"] for entry in entries if entry["knob"] == "cpu.idle"}


def changes(node: SystemdNode, cgroup: Path, knob: str) -> list[Any]:
    """Return the journal's entries of one knob."""
    entries = [entry for entry in node.decisions() if entry["outcome"]["decision"]["cgroup"] == path_of(cgroup)]
    return [entry for entry in entries if entry["outcome"]["decision"]["knob"] == knob]


@pytest.mark.vm_systemd
def test_slices_are_named_by_the_systemd_driver(node: SystemdNode) -> None:
    assert [node.scope(name).relative_to(ROOT).parts[:2] for name in ("web", "batch")] == [
        ("kubepods.slice", "kubepods-burstable.slice"),
        ("kubepods.slice", "kubepods-besteffort.slice"),
    ]


@pytest.mark.vm_systemd
def test_a_kubelet_starts_while_its_class_is_idle_and_writes_the_weight(
    node: SystemdNode, before: Mapping[str, str]
) -> None:
    """With the cgroupfs driver it does not start. systemd writes the weight, which clears cpu.idle, before the kubelet does."""
    (CLASS / "cpu.idle").write_text("1")
    with pytest.raises(OSError, match="Invalid argument"):
        (CLASS / "cpu.weight").write_text("1")
    node.restart_kubelet()
    wait("the kubelet has written the class's weight", lambda: not is_idle(CLASS), 90)
    assert (CLASS / "cpu.weight").read_text() == before["kubepods.slice/kubepods-besteffort.slice/cpu.weight"] == "1\n"


@pytest.mark.vm_systemd
def test_the_pod_of_the_chart_gives_reclaimed_pods_the_lowest_priority(installed: SystemdNode) -> None:
    """The priority belongs to the pod's cgroup, and to that of the class while it contains only reclaimed pods."""
    wait_for_priority(installed)
    web, batch = installed.scope("web"), installed.scope("batch")
    assert not any(map(is_idle, (web, web.parent, web.parent.parent, batch)))
    for source in ("kubelet", "container-runtime", "pod-cgroups", "pod-siblings", "nri"):
        wait(source, lambda source=source: installed.source_is_healthy(source))  # type: ignore[misc]


@pytest.mark.vm_systemd
def test_a_pod_of_another_level_ends_the_priority_of_its_class(installed: SystemdNode) -> None:
    installed.create("guest", "shared_cores")
    wait("the class is not idle", lambda: not is_idle(CLASS) and (CLASS / "cpu.weight").read_text() == "1\n")
    assert is_idle(installed.scope("batch").parent), "beside the guest, which is of the same class"
    # Until the kubelet lists the pod, the reason is that its tasks belong to none.
    reason = f"it also contains {CONSENT}/guest, which is not reclaimed"
    wait("the reason", lambda: reason in installed.errors()["pod-siblings"])
    installed.delete("guest")
    wait_for_priority(installed)


@pytest.mark.vm_systemd_long
def test_a_stock_scheduler_places_a_reclaimed_pod_whose_limit_holds_from_its_first_instruction(
    installed: SystemdNode,
) -> None:
    amounts = {MILLICPU: "500", BYTES: "16Mi"}
    installed.create("lent", "reclaimed_cores", OWN_QUOTA, {"requests": amounts, "limits": amounts})
    (quota,) = installed.logs("lent", 1)
    answered = [each for each in changes(installed, installed.scope("lent"), "cpu.max") if each["trigger"] == "nri"]
    assert quota == (answered[0]["outcome"]["after"] if answered else f"max {PERIOD_US}")
    installed.delete("lent")


@pytest.mark.vm_systemd_long
def test_the_kubelet_s_update_every_minute_is_repaired_and_adds_no_entry(installed: SystemdNode) -> None:
    """A repair is an entry once; equal ones that follow are only counted."""
    wait_for_priority(installed)
    for _ in range(2):
        repairs, recorded, saved = installed.repairs(), changes(installed, CLASS, "cpu.idle"), originals(installed)
        wait("the kubelet's update", lambda repairs=repairs: installed.repairs() > repairs, 90)  # type: ignore[misc]
        if recorded[-1]["outcome"]["repaired"]:
            break
    wait("the repair", lambda: is_idle(CLASS))
    assert (changes(installed, CLASS, "cpu.idle"), originals(installed)) == (recorded, saved)


@pytest.mark.parametrize(
    "words", [("daemon-reload",), ("set-property", "--runtime", CLASS.name, "CPUWeight=50")], ids=["reload", "property"]
)
@pytest.mark.vm_systemd_long
def test_what_systemd_clears_is_set_in_the_next_cycle(installed: SystemdNode, words: tuple[str, ...]) -> None:
    before = originals(installed)
    subprocess.run(["systemctl", *words], check=True)
    wait_for_repair(installed, CLASS)
    wait_for_priority(installed)
    assert originals(installed) == before


@pytest.mark.vm_systemd_long
def test_a_kubelet_restarts_while_the_agent_keeps_its_class_idle(installed: SystemdNode) -> None:
    repairs = installed.repairs()
    installed.restart_kubelet()
    wait("the kubelet's weight, and the repair", lambda: installed.repairs() > repairs, 90)
    wait_for_priority(installed)


@pytest.mark.vm_systemd_long
def test_a_kubelet_restarts_while_a_killed_agent_has_left_its_class_idle(installed: SystemdNode) -> None:
    """The kubelet starts, writes the weight, and then starts the agent again."""
    killed, saved = installed.agent_pid(), originals(installed)
    installed.restart_kubelet(killed_agent=killed)
    wait("the next agent", lambda: installed.agent_pid() != killed, 90)
    wait("its cycles", lambda: installed.cycle() >= 2, 90)
    wait_for_priority(installed)
    assert originals(installed) == saved


@pytest.mark.vm_systemd_long
def test_a_runtime_that_restarts_has_the_limits_of_new_containers_again(installed: SystemdNode) -> None:
    daemons, name = installed.cluster.daemons, installed.node.containerd
    daemons.end(name, signal.SIGKILL)
    daemons.again(name)
    wait("the runtime", lambda: installed.node.run("true") == "" and installed.cluster.ready(installed.node.name))
    wait("the NRI plugin", lambda: installed.source_is_healthy("nri"))
    assert is_idle(CLASS)
    answers = installed.nri_answers()
    installed.create("later", "reclaimed_cores")
    wait("the answer for the container", lambda: installed.nri_answers() > answers)
    installed.delete("later")


@pytest.mark.vm_systemd_long
def test_after_uninstall_every_cgroup_file_is_as_it_was(installed: SystemdNode, before: Mapping[str, str]) -> None:
    installed.uninstall()
    # The kubelet computes the weights of its classes from the requests of pods when a pod starts, and every minute.
    installed.create("last", "shared_cores")
    installed.delete("last")

    def differences() -> dict[str, tuple[str, str | None]]:
        after = settings_of_pods(installed, "web", "batch")
        changed = {name: (text, after.get(name)) for name, text in before.items() if after.get(name) != text}
        # The kubelet sets it, and systemd writes its own OOMPolicy over it at each reload (cgroup_context_apply in
        # src/core/cgroup.c), with or without an agent; a test above reloads.
        return {name: texts for name, texts in changed.items() if not name.endswith("/memory.oom.group")}

    assert not {name: texts for name, texts in differences().items() if "-pod" in name}
    wait("the weights of the classes", lambda: not differences(), 90)
    assert not (installed.state / "originals.json").exists()


@pytest.mark.vm_systemd_long
def test_an_agent_acts_when_the_machine_is_switched_off(node: SystemdNode, before: Mapping[str, str]) -> None:
    node.install()
    wait_for_priority(node)
    assert path_of(CLASS) in originals(node)
    (DISK / "before.json").write_text(json.dumps(before))

"""`vagrant up`, and what a person does then: look at the page, log in, run a probe and tests, provision again, destroy.

The tests go on with one machine, in this order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from api.decision import JournalEntry, OutcomeStatus
from api.snapshot import Snapshot
from cli.probe.runqlat import RunqlatInterval
from exporters.view.cycle_view import View
from tests.builders.waiting import until
from tests.vagrant.machine import DIRECTORY, ROOT, Machine, box, missing, processes

pytestmark = pytest.mark.vagrant
ONLINE, BATCH = "/dioptase-demo-online", "/dioptase-demo-batch"
OWN = (
    *(f"/{top}/libvirt" for top in ("etc", "run", "var/lib", "var/log", "var/cache")),
    *("~/.vagrant.d", str(ROOT / ".vagrant")),
)
"""Where Vagrant and libvirt keep what they know."""
TESTS = ("tests/vm/test_guest.py", "tests/vm/test_knobs_cpu.py")
"""Of all that need a kernel of their own, those that look at the machine: `python -m tests.vm` runs the others."""
Anything = TypeVar("Anything")


def traces() -> dict[str, list[str]]:
    """What Vagrant and libvirt might leave on this machine, outside of the namespaces."""
    owned = [Path(name).expanduser() for name in OWN]
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return {
        "interfaces": [
            str(path) for path in Path("/sys/class/net").iterdir() if path.name.startswith(("virbr", "vnet"))
        ],
        "mounts": [mount for mount in mounts if "libvirt" in mount or str(DIRECTORY) in mount],
        "files": [
            str(path) for directory in owned for path in [directory, *sorted(directory.rglob("*"))] if path.exists()
        ],
    }


@pytest.fixture(scope="module")
def before() -> dict[str, list[str]]:
    """The machine around us, before anything was started."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    return traces()


@pytest.fixture(scope="module")
def machine(before: dict[str, list[str]]) -> Iterator[Machine]:
    """The machine of the Vagrantfile, provisioned."""
    directory = box()
    created = Machine(directory)
    try:
        created.vagrant("box", "add", "--name", "dioptase", str(directory / "dioptase.box"))
        created.vagrant("up")
        yield created
    finally:
        created.close()


def fetch(machine: Machine, path: str, kind: type[Anything]) -> Anything:
    """What the agent says at the forwarded port."""
    return msgspec.json.decode(machine.get(path), type=kind)


def test_the_page_of_the_demo_is_seen_from_outside(machine: Machine) -> None:
    assert b"<title>Dioptase</title>" in machine.get("/")
    metrics = machine.get("/metrics").decode()
    assert f'dioptase_cgroup_runq_wait_seconds_count{{cgroup="{ONLINE}"' in metrics
    view = fetch(machine, "/api/v1/view", View)
    assert (view.act, view.node_cpus) == ("on", 4)
    assert {container.cgroup: container.qos for container in view.containers} == {
        ONLINE: "shared_cores",
        BATCH: "reclaimed_cores",
    }


def test_it_has_two_nodes_with_memory_of_their_own_and_swap(machine: Machine) -> None:
    snapshot = fetch(machine, "/api/v1/snapshot", Snapshot)
    assert {cpu.id: cpu.numa for cpu in snapshot.topology.cpus} == {0: 0, 1: 0, 2: 1, 3: 1}
    for node in snapshot.node.numa.values():
        assert 1200 < node.meminfo["MemTotal"] >> 20 < 1536
    assert snapshot.node.meminfo["SwapTotal"] >> 20 == 1023  # the first page of 1 GiB is the header


def test_the_service_ends_with_every_value_put_back(machine: Machine) -> None:
    """What the agent says to have written is in the file, until the service is ended."""

    def written() -> dict[str, str | None]:
        entries = fetch(machine, "/api/v1/decisions?limit=500", list[JournalEntry])
        applied = [entry.outcome for entry in entries if entry.outcome.status is OutcomeStatus.APPLIED]
        return {o.decision.knob.value: o.after for o in applied if o.decision.cgroup == BATCH}

    until(lambda: written().get("cpu.idle") == "1", "cpu.idle is written", 60)
    text = machine.ssh(
        f"echo idle: $(cat /sys/fs/cgroup{BATCH}/cpu.idle); systemctl stop dioptase-demo; "
        "systemctl show --property ExecMainStatus dioptase-demo; "
        "journalctl --unit dioptase-demo --output cat --lines 12; ls -d /sys/fs/cgroup/dioptase* 2>&1 || true"
    )
    assert "idle: 1\n" in text
    assert "ExecMainStatus=0" in text
    compared = re.search(r"put back \((\d+) values compared, none differs\) and removed", text)
    assert compared is not None
    assert int(compared[1]) >= 12  # six knobs of two cgroups at least
    assert "cannot access '/sys/fs/cgroup/dioptase*'" in text


def test_of_two_processes_on_one_cpu_one_waits(machine: Machine) -> None:
    """A probe alone, as a person runs it: in the cheapest form, it counts one task's waiting per time, by cgroup."""
    text = machine.ssh(
        "systemd-run --quiet --unit pair --property CPUWeight=100 --property AllowedCPUs=3 "
        "sh -c 'while :; do :; done & while :; do :; done'; "
        "dioptase probe runqlat --json --interval 10 --duration 10 --cgroup /system.slice/pair; systemctl stop pair"
    )
    interval = msgspec.json.decode(
        next(line for line in text.splitlines() if line.startswith("{")), type=RunqlatInterval
    )
    assert interval.form == "tp_btf"
    (pair,) = interval.cgroups
    assert pair.cgroup == "/system.slice/pair.service"
    assert 0.8 < pair.sum_ns / 1e9 / interval.interval_s < 1.3
    assert interval.lost.full == interval.lost.task_slot == 0


def test_tests_of_the_kernel_pass_in_it(machine: Machine) -> None:
    text = machine.ssh(f"/vagrant/deploy/vagrant/tests {' '.join(TESTS)}")
    summary = text.splitlines()[-1]
    assert re.search(r"^=* ?12 passed in", summary), summary


def test_all_tests_that_fit_it_load_in_it(machine: Machine) -> None:
    """Without a file the script chooses them; they take too long here."""
    text = machine.ssh("/vagrant/deploy/vagrant/tests --collect-only -q")
    collected = re.search(r"^(\d+)(/\d+)? tests collected", text.splitlines()[-1])
    assert collected is not None, text
    assert int(collected[1]) > 100


def test_provisioning_again_installs_nothing_and_starts_the_demo_again(machine: Machine) -> None:
    text = machine.vagrant("provision")
    assert "installing" not in text
    assert fetch(machine, "/api/v1/view", View).act == "on"


def volumes(machine: Machine) -> list[str]:
    return [line.split()[0] for line in machine.virsh("vol-list", "default").splitlines() if line.strip()]


def test_nothing_is_left_of_it(machine: Machine, before: dict[str, list[str]]) -> None:
    names = set(processes(machine.namespace).values())
    assert {"libvirtd", "dnsmasq", "qemu-system-x86", "ssh"} <= names
    assert len(volumes(machine)) == 4  # the box, the root disk, swap and data
    machine.vagrant("destroy", "--force")
    assert machine.virsh("list", "--all", "--name").split() == []
    assert len(volumes(machine)) == 1  # the box, which a person would use again
    assert not {"qemu-system-x86", "ssh"} & set(processes(machine.namespace).values())
    machine.close()
    assert processes(machine.namespace) == {}
    assert not machine.directory.exists()
    assert traces() == before

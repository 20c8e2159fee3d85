"""A process that creates a cluster may be killed at any time: its remains are found and removed, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster import cgroups, cleanup
from tests.cluster.cleanup import Owner, is_abandoned, known_clusters, owner_of, release_abandoned
from tests.cluster.daemons import SPACES, members, started, wait
from tests.cluster.names import Names, index, number_of
from tests.cluster.node import OWN

MAKE = """
import sys, time
from tests.cluster.cluster import create_cluster
cluster = create_cluster(1)
cluster.kubectl("run", "web", "--image=localhost/busybox:1", "--image-pull-policy=Never", "--command", "--", "sleep", "987654")
cluster.kubectl("wait", "--for=condition=Ready", "pod/web", "--timeout=60s")
print(cluster.names.number, flush=True)
time.sleep(3600)
"""

BUILD = """
import signal, subprocess
from tests.cluster.__main__ import _end
signal.signal(signal.SIGTERM, _end)
compiler = subprocess.Popen(["sleep", "3600"])
print(compiler.pid, flush=True)
compiler.wait()
"""


def test_compilers_end_with_the_process_that_started_them() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BUILD], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[2],
        start_new_session=True,
    ) as build:  # fmt: skip
        assert build.stdout is not None
        compiler = int(build.stdout.readline())
        build.terminate()
        assert build.wait(20) == 128 + signal.SIGTERM
    wait("the end of the compiler", lambda: started(compiler) == "")


def test_namespaces_say_of_which_cluster_they_are() -> None:
    assert number_of(Names(3).space("node1")) == 3
    assert [number_of(text) for text in ("dioptase-3", "dioptase-31-node1", "x-dioptase-3-node1", "cni-1")] == [
        None
    ] * 4
    assert all(len(Names(7).link(machine)) <= 15 for machine in ("control", "node9"))
    with pytest.raises(ValueError, match="node1 to node9"):
        index("node10")


def test_no_two_clusters_share_an_address() -> None:
    every = [
        address
        for number in range(8)
        for address in (
            Names(number).host,
            Names(number).address("control"),
            *(Names(number).address(f"node{n}") for n in range(1, 10)),
            *(Names(number).pods(f"node{n}") for n in range(1, 10)),
        )
    ]
    assert len(set(every)) == len(every) == 8 * 20


def test_a_process_is_known_by_when_it_began() -> None:
    mine = Owner(os.getpid(), started(os.getpid()))
    assert mine.alive
    assert not Owner(os.getpid(), "1").alive
    assert not Owner(1 << 22, "").alive or started(1 << 22) == ""


def test_a_cluster_without_its_folder_is_abandoned_and_one_that_is_kept_is_not(tmp_path: Path) -> None:
    assert is_abandoned(Names(1, tmp_path))
    Names(1, tmp_path).run.mkdir()
    assert not is_abandoned(Names(1, tmp_path))


def test_only_what_a_cluster_made_is_its_own(tmp_path: Path) -> None:
    """A foreign `kubepods` stays, and is not used."""
    root = tmp_path / "cgroup"
    for hierarchy in ("cpu", "cpuset"):
        (root / hierarchy).mkdir(parents=True)
        (root / hierarchy / "cgroup.procs").write_text("")
    for file in ("cpuset.cpus", "cpuset.mems"):
        (root / "cpuset" / file).write_text("0-1")
    first, second = Names(1, tmp_path), Names(2, tmp_path)
    assert cgroups.prepare(first, "node1", root) == "/"
    assert cgroups.prepare(second, "node1", root) == "/dioptase-2-node1"
    assert (root / "cpuset/dioptase-2-node1/cpuset.mems").read_text() == "0-1"
    (root / "cpu/kubepods/burstable").mkdir(parents=True)
    assert cgroups.mine(second, root) == [root / "cpu/dioptase-2-node1", root / "cpuset/dioptase-2-node1"]
    assert cgroups.mine(first, root) == [root / "cpu/kubepods"]
    (tmp_path / "kubepods").unlink()
    assert cgroups.mine(first, root) == []
    assert cgroups.prepare(first, "node1", root) == "/dioptase-1-node1"


def traces(number: int) -> list[str]:
    """Return all traces of a cluster on this machine."""
    names = Names(number)
    run = f"{names.run}/"
    results = [str(path) for path in cgroups.mine(names)]
    results += [str(path) for path in SPACES.glob(f"dioptase-{number}-*")] if SPACES.exists() else []
    results += [
        path.name for path in Path("/sys/class/net").iterdir() if path.name.startswith((names.bridge, f"dio{number}"))
    ]
    results += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if run in line]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            mounts = (process / "mountinfo").read_text()
        except OSError:
            continue
        if run in words or run in mounts or "987654" in words.split():
            results.append(f"{process.name}: {words}")
    return results + [str(names.run)] * names.run.exists()


def owned(pid: int) -> set[int]:
    """Return the clusters of a process, which may have ended."""
    owners = {number: owner_of(Names(number)) for number in known_clusters()}
    return {number for number, owner in owners.items() if owner is not None and owner.pid == pid}


@pytest.mark.cluster
@pytest.mark.parametrize(
    "seconds",
    [pytest.param(0.5, marks=pytest.mark.long), 2.0, pytest.param(5.0, marks=pytest.mark.long), None],
    ids=lambda value: "at work" if value is None else f"after {value} s",
)
def test_nothing_is_left_of_a_cluster_whose_maker_was_killed(seconds: float | None) -> None:
    before = {path for path in map(Path, OWN) if path.exists()}
    with subprocess.Popen(
        [sys.executable, "-c", MAKE], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[2]
    ) as maker:
        assert maker.stdout is not None
        if seconds is None:
            assert maker.stdout.readline().strip().isdigit()
        else:
            time.sleep(seconds)
        numbers = owned(maker.pid)
        if seconds is None:
            (number,) = numbers
            assert len(members(Names(number).space("node1"))) >= 4
            assert any("sleep 987654" in trace for trace in traces(number))
        maker.send_signal(signal.SIGKILL)
    # A child of the killed one may be about to make something.
    time.sleep(0.5)
    numbers = owned(maker.pid)
    assert set(release_abandoned()) >= numbers
    assert {number: traces(number) for number in numbers} == {number: [] for number in numbers}
    if not known_clusters():
        assert {path for path in map(Path, OWN) if path.exists()} <= before


@pytest.mark.cluster
def test_a_new_cluster_takes_away_what_a_killed_one_left(api_server: object) -> None:
    names = cleanup.claim(range(1, 8), retained=False)
    (names.run / "owner").write_text('{"pid":1,"started":"0"}')
    subprocess.run(["ip", "netns", "add", names.space("node1")], check=True)
    again = cleanup.claim([names.number], retained=False)
    assert again.number == names.number
    assert not (SPACES / names.space("node1")).exists()
    cleanup.release(again)
    assert traces(names.number) == []

"""Pressure triggers of this kernel: armed, fired by two burners on one CPU, and gone with their cgroup."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest

from agent.sensors.triggers.psi_triggers import PsiTriggerSet, open_psi_trigger
from api.interfaces import Unavailable
from tests.kernel.real_cgroups import cgroup, require_writable_cgroups

pytestmark = pytest.mark.kernel


def wait_ready(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def test_two_tasks_on_one_cpu_fire_the_trigger_and_none_do_not() -> None:
    hierarchy = require_writable_cgroups()
    if hierarchy.v2 is None or not (hierarchy.v2 / "cpu.pressure").exists():
        pytest.skip("this machine has no unified hierarchy with PSI: boot with psi=1")
    with cgroup(hierarchy, "psi") as group:
        triggers = PsiTriggerSet(hierarchy.v2, stall_us=150_000, window_us=1_000_000)
        triggers.watch({group.path: group.id})
        assert not wait_ready(triggers.fileno(), 2.5), "nothing runs there yet"
        cpu = min(os.sched_getaffinity(0))
        for process in group.burn(2):
            os.sched_setaffinity(process.pid, {cpu})
        assert wait_ready(triggers.fileno(), 15), "half of a second stalls in every second, the threshold is 15 %"
        assert triggers.fired()
        triggers.watch({})
        assert not wait_ready(triggers.fileno(), 0.1)
        triggers.close()
        triggers.close()


def test_a_trigger_ends_with_its_cgroup() -> None:
    hierarchy = require_writable_cgroups()
    if hierarchy.v2 is None or not (hierarchy.v2 / "cpu.pressure").exists():
        pytest.skip("this machine has no unified hierarchy with PSI: boot with psi=1")
    triggers = PsiTriggerSet(hierarchy.v2, stall_us=150_000, window_us=1_000_000)
    with cgroup(hierarchy, "psi-gone") as group:
        triggers.watch({group.path: group.id})
    assert wait_ready(triggers.fileno(), 5)
    assert not triggers.fired()
    assert not wait_ready(triggers.fileno(), 0.1), "the dead trigger was dropped"
    triggers.close()


def test_a_file_that_is_not_there_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as caught:
        open_psi_trigger(tmp_path / "cpu.pressure", 150_000, 1_000_000)
    assert "psi=1" in caught.value.remedy
    triggers = PsiTriggerSet(tmp_path, stall_us=150_000, window_us=1_000_000)
    triggers.watch({"/none": 7})
    assert not wait_ready(triggers.fileno(), 0.1)
    triggers.close()


def test_a_cgroup_that_comes_later_and_its_successor_get_their_triggers() -> None:
    hierarchy = require_writable_cgroups()
    if hierarchy.v2 is None or not (hierarchy.v2 / "cpu.pressure").exists():
        pytest.skip("this machine has no unified hierarchy with PSI: boot with psi=1")
    path = f"/dioptase-test-{os.getpid()}-psi-late"
    triggers = PsiTriggerSet(hierarchy.v2, stall_us=150_000, window_us=1_000_000)
    triggers.watch({path: 7})
    for cgroup_id in (7, 8):
        with cgroup(hierarchy, "psi-late") as group:
            assert group.path == path
            triggers.watch({path: cgroup_id})
        assert wait_ready(triggers.fileno(), 5), f"{cgroup_id} was armed, so the end of its cgroup is reported"
        assert not triggers.fired()
    triggers.close()


def test_a_file_that_refuses_is_opened_once_for_each_cgroup(tmp_path: Path) -> None:
    """First a directory stands for the file, which cannot be opened; then a pipe, which shows what is written to it."""
    file = tmp_path / "web/cpu.pressure"
    file.mkdir(parents=True)
    triggers = PsiTriggerSet(tmp_path, stall_us=150_000, window_us=1_000_000)
    triggers.watch({"/web": 7})
    file.rmdir()
    os.mkfifo(file)
    reader = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    try:
        triggers.watch({"/web": 7})
        assert os.read(reader, 100) == b"", "refused once: not tried again"
        triggers.watch({"/web": 8})
        assert os.read(reader, 100) == b"some 150000 1000000\0", "another cgroup at that path is"
    finally:
        triggers.close()
        os.close(reader)

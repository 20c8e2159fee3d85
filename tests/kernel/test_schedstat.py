"""Waits of /proc/PID/schedstat on this kernel: two burners on one CPU, each waiting while the other runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent.sensors.cgroup.schedstat import SchedstatRunqLatency
from tests.kernel.real_cgroups import cgroup, require_root, require_writable_cgroups

pytestmark = pytest.mark.kernel
SHORT = (
    "import threading\nfor _ in range(200): t = threading.Thread(target=sum, args=(range(2000),)); t.start(); t.join()"
)


def test_two_burners_on_one_cpu_wait_one_cpu_second_a_second() -> None:
    """At any time one runs and one waits. What else runs on that CPU makes both wait, hence the wide upper bound."""
    hierarchy = require_writable_cgroups()
    source = SchedstatRunqLatency(Path("/proc"), hierarchy)
    with cgroup(hierarchy, "schedstat") as group:
        cpu = min(os.sched_getaffinity(0))
        for process in group.burn(2):
            os.sched_setaffinity(process.pid, {cpu})
        live = {group.id: group.path}
        time.sleep(0.5)
        before, started = source.read(live)[group.id], time.monotonic()
        time.sleep(2.0)
        after, seconds = source.read(live)[group.id], time.monotonic() - started
    source.close()
    assert 0.9 <= (after.sum_ns - before.sum_ns) / 1e9 / seconds <= 1.9
    assert after.count - before.count > 100, "turns of at most 10 ms each"


def test_threads_that_end_do_not_take_their_waits_with_them() -> None:
    hierarchy = require_writable_cgroups()
    source = SchedstatRunqLatency(Path("/proc"), hierarchy)
    with cgroup(hierarchy, "short") as group:
        process = group.start([sys.executable, "-c", SHORT])
        live, last = {group.id: group.path}, (0, 0)
        while process.poll() is None:
            wait = source.read(live)[group.id]
            assert (wait.sum_ns, wait.count) >= last
            last = wait.sum_ns, wait.count
        assert process.returncode == 0
        wait = source.read(live)[group.id]
    source.close()
    assert wait.count >= last[1] > 0


def test_without_privileges_it_reads_all_the_same() -> None:
    """/proc/TID/schedstat is open to everybody, which makes this the form for agents without root."""
    require_root()
    program = "print(open(f'/proc/1/schedstat').read())"
    done = subprocess.run(["/usr/bin/python3", "-c", program], user=65534, capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) == 3

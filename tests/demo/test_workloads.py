"""The real processes: what they cost, what they count, and that none of them outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bench.machine import memory_kib_of
from demo.batch import ARENA_MIB, FILE_MIB, BatchWork
from demo.counters import ClientCell
from demo.launch import ROOT, launch_in_cgroups, module_command
from demo.online import CACHED_READS, bind_service, pieces_for
from demo.schedule import ConstantRate
from demo.workloads import MAX_RATE, DemoWorkloads, FileReads, WorkloadSize, demo_wave, size_for
from tests.builders.waiting import until

pytestmark = pytest.mark.kernel
SMALL = WorkloadSize(cpus=1, service_us=500, workers=2, burners=2)
PARENT = """
import sys, time
from pathlib import Path
from demo.schedule import ConstantRate
from demo.workloads import WorkloadSize, DemoWorkloads
loads = DemoWorkloads(WorkloadSize(cpus=1, service_us=500, workers=2, burners=2), Path(sys.argv[1]))
loads.start_online(); loads.start_batch(); loads.start_client(ConstantRate(rate=50))
while not (loads.client.values()[-2] and loads.units()): time.sleep(0.01)
print("running", flush=True)
time.sleep(600)
"""


def mentioning(text: str) -> set[int]:
    """Living processes whose environment has `text`: every descendant of a parent that had it."""
    actual = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if text.encode() in (entry / "environ").read_bytes():
                    actual.add(int(entry.name))
            except OSError:
                continue
    return actual


def test_a_node_of_any_size_gets_a_load_that_one_client_can_send() -> None:
    two, many = size_for(2), size_for(64)
    assert (two.service_us, two.workers, two.burners) == (500, 8, 4)
    assert two.rate(0.6) == 2400
    assert demo_wave(two).low == 400
    assert many.rate(0.6) == pytest.approx(MAX_RATE)
    assert many.workers >= 64 * 0.6 * 2
    assert many.burners == 128


def test_the_service_uses_rate_times_cost_of_cpu(tmp_path: Path) -> None:
    """1,000 requests of 2 ms are 2 s of CPU; the socket calls and two interpreters' start come on top."""
    loads = DemoWorkloads(WorkloadSize(cpus=1, service_us=2000, workers=2, burners=1), tmp_path)
    try:
        loads.start_online()
        loads.start_client(ConstantRate(rate=200), duration_s=5)
        client = loads.process("client")
        assert client.wait(60) == 0
        requests = loads.client[ClientCell.ANSWERED]
        assert loads.client[ClientCell.LOST] == 0
        used = sum(_cpu_ns(pid) for pid in _workers(loads.process("online").pid)) / 1e9
    finally:
        loads.close()
    assert requests == pytest.approx(1000, abs=130)
    assert 0.002 <= used / requests <= 0.0023


def test_requests_of_work_on_memory_cost_more_the_more_pieces_they_are(tmp_path: Path) -> None:
    """Twenty times as many; a tenth of that is left for the start of the service, for caches that are cold after each rest, and
    for a machine that others use too."""
    used = {}
    for pieces in (2_000, 40_000):
        loads = DemoWorkloads(SMALL, tmp_path)
        try:
            loads.start_online(pieces=pieces)
            loads.start_client(ConstantRate(rate=50), duration_s=3)
            assert loads.process("client").wait(60) == 0
            workers = _workers(loads.process("online").pid)
            used[pieces] = sum(map(_cpu_ns, workers)) / loads.client[ClientCell.ANSWERED]
        finally:
            loads.close()
    assert used[40_000] > 2 * used[2_000]
    assert pieces_for(4000) > 2 * pieces_for(1000)


def test_memory_burners_hold_memory_and_page_cache_and_leave_nothing(tmp_path: Path) -> None:
    loads = DemoWorkloads(SMALL, tmp_path)
    try:
        loads.start_batch(kind=BatchWork.STREAM)
        until(lambda: min(loads.batch.values()) > 2 * ARENA_MIB)
        workers = _workers(loads.process("batch").pid)
        largest = max(memory_kib_of(pid, "VmHWM") for pid in workers)
        assert largest >= (ARENA_MIB << 10) * 0.9
        assert (tmp_path / "batch.data").stat().st_size == FILE_MIB << 20
    finally:
        loads.close()


@pytest.mark.parametrize(
    ("kind", "reads"), [(BatchWork.PAGE_CACHE, FileReads.PAGE_CACHE), (BatchWork.DISK, FileReads.DISK)]
)
def test_files_are_read_and_written_through_the_page_cache_or_past_it(kind: BatchWork, reads: FileReads) -> None:
    """On a disk, as file systems in memory may refuse direct I/O. A request reads a block of 4 KiB, or 16 from the cache."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        loads = DemoWorkloads(SMALL, Path(name))
        try:
            loads.start_online(reads=reads)
            loads.start_batch(kind=kind)
            loads.start_client(ConstantRate(rate=50), duration_s=3)
            assert loads.process("client").wait(60) == 0
            until(lambda: min(loads.batch.values()) > 64)
            assert loads.client[ClientCell.ANSWERED] > 100
            read = sum(_io(pid, "rchar") for pid in _workers(loads.process("online").pid))
            from_disk = sum(_io(pid, "read_bytes") for pid in _workers(loads.process("online").pid))
            assert not any(map(loads.has_ended, ("online", "batch")))
        finally:
            loads.close()
    assert read >= (CACHED_READS if reads is FileReads.PAGE_CACHE else 1) * 100 * 4096
    assert (from_disk >= 100 * 4096) is (reads is FileReads.DISK)


def _io(pid: int, field: str) -> int:
    return next(
        int(line.split()[1]) for line in Path(f"/proc/{pid}/io").read_text().splitlines() if line.startswith(field)
    )


def _workers(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _cpu_ns(pid: int) -> int:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])


def test_burners_count_their_units_and_can_run_idle(tmp_path: Path) -> None:
    loads = DemoWorkloads(SMALL, tmp_path)
    try:
        loads.start_batch(idle=True)
        until(lambda: min(loads.batch.values()) > 10)
        before = loads.units()
        until(lambda: loads.units() > before)
        workers = _workers(loads.process("batch").pid)
        assert [os.sched_getscheduler(pid) for pid in workers] == [os.SCHED_IDLE] * 2
        assert loads.ended() is None
    finally:
        loads.close()


def test_a_worker_that_dies_ends_its_job_visibly(tmp_path: Path) -> None:
    loads = DemoWorkloads(SMALL, tmp_path)
    try:
        loads.start_batch()
        until(lambda: min(loads.batch.values()) > 0)
        os.kill(_workers(loads.process("batch").pid)[0], signal.SIGKILL)
        until(lambda: loads.ended() is not None)
        assert loads.ended() == "the batch process ended by itself with exit code 1"
    finally:
        loads.close()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_a_killed_parent(tmp_path: Path, signum: int) -> None:
    mark = f"DIOPTASE_TEST={tmp_path}"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "DIOPTASE_TEST": str(tmp_path)}
    argv = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environ, cwd=tmp_path) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"running\n"
            until(lambda: len(mentioning(mark)) == 1 + (1 + 2) + (1 + 2) + 1)
        finally:
            parent.send_signal(signum)
    until(lambda: not mentioning(mark), lambda: f"left behind: {mentioning(mark)}")


def test_the_end_signal_is_the_requested_one(tmp_path: Path) -> None:
    """What must put things back itself gets SIGTERM, not SIGKILL, when its parent is gone."""
    out, ready = tmp_path / "out", tmp_path / "ready"
    child = (
        "import signal, sys; from pathlib import Path;"
        "signal.signal(15, lambda *_: (Path(sys.argv[1]).write_text('put back'), sys.exit()));"
        "Path(sys.argv[2]).touch(); signal.pause()"
    )
    parent = (
        "import sys, time; from demo.launch import launch_in_cgroups;"
        f"launch_in_cgroups([sys.executable, '-c', {child!r}, {str(out)!r}, {str(ready)!r}], end_signal=15); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        until(ready.exists)
        process.kill()
    until(lambda: out.exists() and out.read_text() == "put back")


def test_our_modules_start_from_a_directory_with_a_namesake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "__init__.py").write_text("raise RuntimeError('the wrong demo')")
    monkeypatch.chdir(tmp_path)
    assert launch_in_cgroups([*module_command("demo.batch"), "--help"]).wait(30) == 0


def test_a_program_that_does_not_exist_is_an_exit_code() -> None:
    assert launch_in_cgroups(["/nonexistent/program"]).wait(30) != 0


def test_the_services_queue_is_deep_enough_for_a_second_of_overload() -> None:
    sock = bind_service()
    try:
        granted = sock.getsockopt(1, 8)
    finally:
        sock.close()
    if os.geteuid() != 0:
        pytest.skip(f"needs root to go beyond net.core.rmem_max; granted {granted} bytes")
    assert granted >= 2 * 4 << 20

"""The node reader on a declared /proc, on one that lacks everything, and on this machine's."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.sense.node import NodeReader
from api.samples import NodeSample
from tests.agent.sense import trees

FILES = {
    "stat": "cpu  300 0 100 500 0 0 0 100 0 0\ncpu0 200 0 50 200 0 0 0 50 0 0\ncpu1 100 0 50 300 0 0 0 50 0 0\nintr 5\n",
    "meminfo": "MemTotal:       2048 kB\nMemFree:  100 kB\nMemAvailable:   1024 kB\n",
    "loadavg": "0.84 1.82 1.08 1/94 12303\n",
    "pressure/cpu": trees.PRESSURE.format(7000, 0),
    "pressure/memory": trees.PRESSURE.format(8000, 0),
    "pressure/io": trees.PRESSURE.format(9000, 0),
    "sys/kernel/random/boot_id": "b7c1\n",
}


def test_everything_is_read(tmp_path: Path) -> None:
    trees.make(tmp_path, FILES)
    reader = NodeReader(tmp_path)
    sample = reader.read()
    assert sample.cpu is not None
    # A tick is 10 ms: 300 user and 100 system ticks are 4 s of work in 10 s.
    assert (sample.cpu.busy_ns, sample.cpu.steal_ns, sample.cpu.total_ns) == (4 * 10**9, 10**9, 10 * 10**9)
    assert {cpu: times.busy_ns for cpu, times in sample.per_cpu.items()} == {0: 2_500_000_000, 1: 1_500_000_000}
    assert sample.load == (0.84, 1.82, 1.08)
    assert (sample.memory_total_bytes, sample.memory_available_bytes) == (2 << 20, 1 << 20)
    stalls = [p and p.some_us for p in (sample.cpu_pressure, sample.memory_pressure, sample.io_pressure)]
    assert stalls == [7000, 8000, 9000]
    assert (reader.boot_id, reader.problems()) == ("b7c1", ())
    reader.close()


def test_what_is_missing_is_none_and_named(tmp_path: Path) -> None:
    reader = NodeReader(tmp_path)
    assert reader.read() == NodeSample()
    assert reader.boot_id == ""
    (problem,) = reader.problems()
    assert not problem.ok
    assert problem.error.startswith("stat is missing; meminfo is missing")
    trees.make(tmp_path, {name: text for name, text in FILES.items() if not name.startswith("pressure")})
    assert reader.read().load == (0.84, 1.82, 1.08)
    (problem,) = reader.problems()
    assert "psi=1" in problem.remedy
    reader.close()


@pytest.mark.parametrize("garbage", ["", "\0\0", "cpu one two\n", "9" * 5000, "some avg10=\n"])
def test_garbage_is_named_and_does_not_raise(tmp_path: Path, garbage: str) -> None:
    trees.make(tmp_path, dict.fromkeys(FILES, garbage))
    reader = NodeReader(tmp_path)
    sample = reader.read()
    assert (sample.cpu, sample.per_cpu, sample.cpu_pressure, sample.memory_total_bytes) == (None, {}, None, None)
    for name in ("stat", "meminfo", "loadavg", "pressure/io"):
        assert f"{name} is not what it should be" in reader.problems()[0].error
    reader.close()


def test_this_machine_adds_up() -> None:
    reader = NodeReader(Path("/proc"))
    sample = reader.read()
    reader.close()
    assert sample.cpu is not None
    # Each line is rounded down to ticks for itself, and the lines are read one after another.
    assert sum(times.total_ns for times in sample.per_cpu.values()) == pytest.approx(sample.cpu.total_ns, rel=0.01)
    assert sample.memory_total_bytes is not None
    assert sample.memory_available_bytes is not None
    assert 0 < sample.memory_available_bytes <= sample.memory_total_bytes
    assert len(reader.boot_id) == 36

"""Waits by CPU: two burners on one CPU, whose own books say how long they waited for it, and the waits of all cgroups."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

import pytest

from api.snapshot import RunqLatency
from probes.blame import BlameProbe
from probes.loader import load
from probes.runqlat import RunqLatencyProbe, job
from tests.kernel.open_probes import LAST_CPU, PINNED, Schedstat, probe
from tests.kernel.real_cgroups import cgroup, require_writable_cgroups

pytestmark = pytest.mark.kernel

MS = 1_000_000


def growth(before: Mapping[int, RunqLatency], after: Mapping[int, RunqLatency]) -> dict[int, tuple[int, int]]:
    """Nanoseconds and times, by CPU or cgroup."""
    nothing = RunqLatency(sum_ns=0, count=0)
    return {
        key: (wait.sum_ns - before.get(key, nothing).sum_ns, wait.count - before.get(key, nothing).count)
        for key, wait in after.items()
    }


def totals(waits: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
    return sum(ns for ns, _ in waits.values()), sum(times for _, times in waits.values())


@pytest.mark.parametrize("form", ["tp_btf", "raw_tp"])
def test_waits_by_cpu_are_the_waits_of_all_cgroups_where_they_waited(form: str) -> None:
    """Each burner waits what the other runs: about a second of two, on that CPU and no other."""
    with probe(form) as waits, cgroup(require_writable_cgroups(), "burning") as group:
        live = {group.id: group.path}
        burners = [group.start([sys.executable, "-c", PINNED, str(LAST_CPU)]) for _ in range(2)]
        time.sleep(0.3)
        books = [Schedstat(burner.pid) for burner in burners]
        # A wait of seconds may end between two reads, so that the cgroups are read before and after the CPUs.
        began, cpus, first = waits.read(live), waits.by_cpu(), waits.read(live)
        time.sleep(2.0)
        last, later_cpus, ended = waits.read(live), waits.by_cpu(), waits.read(live)
        delays = [book.growth()[1] for book in books]
    by_cpu = growth(cpus, later_cpus)
    assert by_cpu[LAST_CPU][0] >= 0.97 * sum(delays) > 1000 * MS
    least_ns, least_times = totals(growth(first, last))
    most_ns, most_times = totals(growth(began, ended))
    waited_ns, times = totals(by_cpu)
    assert 0.97 * least_times <= times <= 1.03 * most_times
    # A task of the least priority may wait for seconds, and each CPU that it leaves meanwhile has its part at once. Waits that
    # counted twice would be twice as long.
    assert 0.97 * least_ns <= waited_ns <= 1.9 * most_ns


def test_cpus_have_their_own_numbers_where_some_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine whose CPUs are this one and number 7."""
    with probe("tp_btf"):
        pass
    monkeypatch.setattr("probes.runqlat.possible_cpu_ids", lambda: (LAST_CPU, 7))
    with load(job(("tp_btf",), 8, blame=True)) as loaded:
        waits = RunqLatencyProbe(loaded)
        time.sleep(0.3)
        by_cpu = waits.by_cpu()
        waits.close()
    assert by_cpu.keys() == {LAST_CPU, 7}
    assert by_cpu[LAST_CPU].count > 0
    assert by_cpu[7].count == 0


def test_the_blame_probe_gives_them_and_those_without_blame_give_none() -> None:
    with probe("tp_btf") as waits:
        observed = BlameProbe(waits, owned=False).read({1: "/"})
        by_cpu = observed.node["cpu_waits"]
        assert isinstance(by_cpu, dict)
        assert set(range(LAST_CPU + 1)) <= by_cpu.keys(), "also CPUs without a wait"
    with probe("classic") as waits:
        assert waits.by_cpu() == {}

"""A process that is sent from CPU to CPU a known number of times, with a NUMA node for each CPU, and with one for all."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping

import pytest

from api.interfaces import Unavailable
from probes.migrations import FORMS, ONE_NODE, MigrationsProbe, numa_nodes_of_cpus, open_migrations
from probes.remedies import REMEDIES
from tests.builders.waiting import until
from tests.kernel.open_probes import PINNED, having, opened
from tests.kernel.real_cgroups import cgroup, require_writable_cgroups

pytestmark = pytest.mark.kernel

CPUS = sorted(os.sched_getaffinity(0))
APART = {cpu: node for node, cpu in enumerate(CPUS)}
TOGETHER = {**dict.fromkeys(CPUS, 0), max(CPUS) + 1: 1}
TIMES = 50


@pytest.mark.parametrize(("cpu_nodes", "expected"), [(APART, TIMES), (TOGETHER, 0)], ids=["apart", "together"])
@pytest.mark.parametrize("form", FORMS)
def test_each_move_to_another_node_counts(form: str, cpu_nodes: Mapping[int, int], expected: int) -> None:
    if len(CPUS) < 2:
        pytest.skip("needs two CPUs")
    hierarchy = require_writable_cgroups()

    def open_probe() -> MigrationsProbe:
        return open_migrations(forms=(form,), cpu_nodes=cpu_nodes)

    with opened(open_probe) as probe, cgroup(hierarchy, "moved") as group, cgroup(hierarchy, "stays") as stays:
        assert probe.form == form
        moved = group.start([sys.executable, "-c", PINNED, str(CPUS[0])])
        stays.burn(1)
        live = {group.id: group.path, stays.id: stays.path}
        until(lambda: os.sched_getaffinity(moved.pid) == {CPUS[0]})
        before = probe.read(live).cgroups[group.id]["numa_migrations"]
        for turn in range(TIMES):
            os.sched_setaffinity(moved.pid, {CPUS[(turn + 1) % 2]})
            time.sleep(0.002)
        after = probe.read(live).cgroups
        assert isinstance(before, int)
        assert after[group.id] == {"numa_migrations": before + expected}
        if not expected:
            assert after[stays.id] == {"numa_migrations": 0}
        assert probe.problem() is None
        probe.close()
        probe.close()
        with pytest.raises(Unavailable, match="is closed"):
            probe.read(live)


TRY = """
import json
from api.interfaces import Unavailable
from probes.migrations import open_migrations
try:
    probe = open_migrations(cpu_nodes={0: 0, 1: 1})
    print(json.dumps([probe.form, *probe.read({1: "/"}).cgroups[1]]))
except Unavailable as error:
    print(json.dumps([error.reason, error.remedy]))
"""


@pytest.mark.parametrize("names", [("BPF", "PERFMON"), ("BPF",), ("PERFMON", "SYS_PTRACE")], ids=" and ".join)
def test_bpf_and_perfmon_are_needed_and_enough(names: tuple[str, ...]) -> None:
    """With two nodes; tests/kernel/test_registry.py has the same of every other probe."""
    with opened(lambda: open_migrations(cpu_nodes=APART)) as probe:
        form = probe.form
    answer = json.loads(having(names, TRY))
    if names == ("BPF", "PERFMON"):
        assert answer == [form, "numa_migrations"]
    else:
        assert "Operation not permitted" in answer[0]
        assert answer[1] == REMEDIES["permission"]


def test_the_machines_own_nodes_decide_whether_there_is_anything_to_count() -> None:
    with opened(open_migrations) as probe:
        assert (probe.form == ONE_NODE) == (len(set(numa_nodes_of_cpus().values())) < 2)

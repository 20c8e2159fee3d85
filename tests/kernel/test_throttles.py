"""One thread on one CPU with 20 ms of every 100: a throttle in every period, 80 ms long, as the kernel's own file has it."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack, closing
from itertools import pairwise

import pytest

from api.histogram import BOUNDS_NS, slot_of
from api.interfaces import ProbeReading
from api.snapshot import Durations
from probes.per_cgroup_probe import NO_DURATIONS
from probes.throttles import ThrottlesProbe, open_throttles
from tests.builders.waiting import until
from tests.kernel.open_probes import LAST_CPU, PINNED, probe_fixture
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups

pytestmark = pytest.mark.kernel

MS = 1_000_000
QUOTA_US = 20_000
"""Of a period of 100 ms."""
TRACEPOINTS = ("tp_btf", "raw_tp")
"""Forms that run at tracepoints. Where functions can be probed, in a VM, tests/vm/test_probes_cpu.py does that."""
LACKING = "no member throttled_clock_self_time"


probe = probe_fixture(open_throttles, TRACEPOINTS, lacking=LACKING)


def throttles_of(observed: ProbeReading, group: TestCgroup) -> Durations:
    counts = observed.cgroups[group.id]["throttles"]
    assert isinstance(counts, Durations)
    return counts


def kernels_books(group: TestCgroup) -> tuple[int, int]:
    """Throttled periods and nanoseconds."""
    words = group.file("cpu", "cpu.stat").read_text().split()
    counts = dict(zip(words[::2], words[1::2], strict=True))
    if "throttled_usec" in counts:
        return int(counts["nr_throttled"]), int(counts["throttled_usec"]) * 1000
    return int(counts["nr_throttled"]), int(counts["throttled_time"])


def test_each_period_has_one_throttle_of_80_ms(probe: ThrottlesProbe) -> None:
    """80 ms lies in (65.5, 131]. A CPU that others use too shortens the throttles, never lengthens them beyond the period."""
    hierarchy = require_writable_cgroups()
    with cgroup(hierarchy, "throttled") as group, cgroup(hierarchy, "free") as free:
        group.limit_cpu(QUOTA_US)
        live = {group.id: group.path, free.id: free.path}
        free.burn(1)
        group.start([sys.executable, "-c", PINNED, str(LAST_CPU)])
        time.sleep(3.0)
        throttles, (periods, total_ns) = throttles_of(probe.read(live), group), kernels_books(group)
        assert throttles_of(probe.read(live), free) == NO_DURATIONS
    # The thread may have started on another CPU, whose throttle was never ended; and one may be going on.
    assert periods - 2 <= throttles.count <= periods
    assert throttles.count >= 20
    assert total_ns - 200 * MS <= throttles.sum_ns <= total_ns + MS
    assert throttles.slots is not None
    slot = slot_of(80 * MS)
    assert BOUNDS_NS[slot] == 131_072_000
    assert sum(throttles.slots[slot + 1 :]) == 0
    assert throttles.slots[slot] + throttles.slots[slot - 1] >= 0.8 * throttles.count
    assert probe.problem() is None


def test_a_quota_above_holds_back_too_and_both_at_once_are_one_throttle(probe: ThrottlesProbe) -> None:
    """Two cgroups share 40 ms of every 100; one of them may have no more than 15 of those anyway. On Linux 6.6 to 6.17 fewer
    throttles are distinguished, and their sum is the same."""
    hierarchy = require_writable_cgroups()
    with cgroup(hierarchy, "above") as above, ExitStack() as stack:
        if hierarchy.mode == "v2":
            above.file("cpu", "cgroup.subtree_control").write_text("+cpu")
        free, own = (stack.enter_context(closing(TestCgroup(hierarchy, f"{above.path}/{name}"))) for name in ("a", "b"))
        above.limit_cpu(40_000)
        own.limit_cpu(15_000)
        for group in (free, own):
            group.start([sys.executable, "-c", PINNED, str(LAST_CPU)])
        live = {group.id: group.path for group in (free, own)}
        until(lambda: throttles_of(probe.read(live), free).count > 2)

        def observed() -> list[tuple[int, int]]:
            counts = [throttles_of(probe.read(live), group) for group in (free, own)]
            return [(each.count, each.sum_ns) for each in counts] + [kernels_books(group) for group in (above, own)]

        before = observed()
        time.sleep(3.0)
        after = observed()
    freely, owned, (above_times, above_ns), (own_times, own_ns) = (
        (times - times_before, ns - ns_before)
        for (times, ns), (times_before, ns_before) in zip(after, before, strict=True)
    )
    assert above_ns > 900 * MS
    assert own_ns > 200 * MS
    assert freely[1] == pytest.approx(above_ns, abs=100 * MS)
    assert freely[0] <= above_times + 2
    # Longer than either quota alone, where they begin one after the other, and never longer than there is time.
    assert max(above_ns, own_ns) - 200 * MS <= owned[1] <= min(above_ns + own_ns, 3300 * MS)
    assert owned[0] <= above_times + own_times + 2


def test_counts_only_grow(probe: ThrottlesProbe) -> None:
    with cgroup(require_writable_cgroups(), "throttled") as group:
        group.limit_cpu(QUOTA_US)
        live = {group.id: group.path}
        group.burn(2)
        observed = [throttles_of(probe.read(live), group) for _ in range(8) if time.sleep(0.15) is None]
    assert all(earlier.count <= later.count for earlier, later in pairwise(observed))
    assert all(earlier.sum_ns <= later.sum_ns for earlier, later in pairwise(observed))
    assert observed[-1].count >= 3

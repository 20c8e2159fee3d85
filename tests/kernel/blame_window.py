"""Cgroups that wait for each other on one CPU, and the blame that the probe measures in an interval."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from api.snapshot import Blame, RunqLatency
from probes.per_cgroup_probe import ROOT_CGROUP_ID
from probes.runqlat import RunqLatencyProbe
from tests.builders.waiting import until
from tests.kernel.open_probes import LAST_CPU, PINNED
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups

MS = 1_000_000
FORMS = ("tp_btf", "raw_tp")
WINDOW_S = 3.0
SHARES = 16 * 1024
"""Weight of every cgroup here, so that they get nearly all of their CPU on a busy machine too."""
NOTHING = Blame(by_cgroup={}, throttled_ns=0, higher_class_ns=0, other_ns=0)


class Shot(NamedTuple):
    """Readings of some cgroups at one moment, by path."""

    blames: Mapping[str, Blame]
    waits: Mapping[str, RunqLatency]
    ran_ns: Mapping[str, int]
    throttled_ns: Mapping[str, int]
    at_ns: int
    late_ns: int = 0
    """Maximum distance between the readings: from before the awaited arrival until the last one."""


def live(*groups: TestCgroup) -> dict[int, str]:
    return {ROOT_CGROUP_ID: "/", **{group.id: group.path for group in groups}}


def shoot(source: RunqLatencyProbe, groups: Sequence[TestCgroup]) -> Shot:
    listed = live(*groups)
    blames, waits = source.read_blame(listed), source.read(listed)
    return Shot(
        {group.path: blames[group.id] for group in groups},
        {group.path: waits[group.id] for group in groups},
        {group.path: usage_ns(group) for group in groups},
        {group.path: throttled_ns(group) for group in groups},
        time.monotonic_ns(),
    )


def usage_ns(group: TestCgroup) -> int:
    if group.hierarchy.mode == "v2":
        return 1000 * _stat(group, "usage_usec")
    return int(group.file("cpuacct", "cpuacct.usage").read_text())


def throttled_ns(group: TestCgroup) -> int:
    """Return the time throttled by the group's own quota; files of groups below do not include it."""
    return 1000 * _stat(group, "throttled_usec") if group.hierarchy.mode == "v2" else _stat(group, "throttled_time")


def _stat(group: TestCgroup, name: str) -> int:
    lines = group.file("cpu", "cpu.stat").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


def weigh(group: TestCgroup, shares: int) -> None:
    if group.hierarchy.mode == "v2":
        group.file("cpu", "cpu.weight").write_text(f"{round(shares * 100 / 1024)}\n")
    else:
        group.file("cpu", "cpu.shares").write_text(f"{shares}\n")


def limit(group: TestCgroup, quota_us: int = 20_000, period_us: int = 100_000) -> None:
    """Set the quota; a negative one removes it."""
    if group.hierarchy.mode == "v2":
        group.file("cpu", "cpu.max").write_text(f"{quota_us if quota_us > 0 else 'max'} {period_us}\n")
        return
    group.file("cpu", "cpu.cfs_period_us").write_text(f"{period_us}\n")
    group.file("cpu", "cpu.cfs_quota_us").write_text(f"{quota_us}\n")


def pin(group: TestCgroup, cpu: int = LAST_CPU) -> subprocess.Popen[bytes]:
    return group.start([sys.executable, "-c", PINNED, str(cpu)])


def grown(before: Blame, after: Blame) -> Blame:
    return Blame(
        by_cgroup={path: ns - before.by_cgroup.get(path, 0) for path, ns in after.by_cgroup.items()},
        throttled_ns=after.throttled_ns - before.throttled_ns,
        higher_class_ns=after.higher_class_ns - before.higher_class_ns,
        other_ns=after.other_ns - before.other_ns,
    )


def parts(blame: Blame) -> int:
    return sum(blame.by_cgroup.values()) + blame.throttled_ns + blame.higher_class_ns + blame.other_ns


class Watched(NamedTuple):
    """Growth of the readings within an interval."""

    before: Shot
    after: Shot

    def blame(self, group: TestCgroup) -> Blame:
        return grown(self.before.blames[group.path], self.after.blames[group.path])

    def waited(self, group: TestCgroup) -> int:
        return self.after.waits[group.path].sum_ns - self.before.waits[group.path].sum_ns

    def ran(self, group: TestCgroup) -> int:
        return self.after.ran_ns[group.path] - self.before.ran_ns[group.path]

    def throttled(self, group: TestCgroup) -> int:
        return self.after.throttled_ns[group.path] - self.before.throttled_ns[group.path]

    @property
    def elapsed(self) -> int:
        return self.after.at_ns - self.before.at_ns


def watch(source: RunqLatencyProbe, groups: Sequence[TestCgroup], *, also: Sequence[TestCgroup] = ()) -> Watched:
    """Measure an interval once all groups wait for each other; `also` are groups without tasks of their own."""
    until(lambda: all(source.read(live(*groups))[group.id].count > 20 for group in groups))
    time.sleep(0.5)
    before = shoot_at_arrival(source, [*groups, *also])
    time.sleep(WINDOW_S)
    return Watched(before, shoot_at_arrival(source, [*groups, *also]))


def shoot_at_arrival(source: RunqLatencyProbe, groups: Sequence[TestCgroup]) -> Shot:
    """Read just after a task of the first group got the CPU: a wait in progress is not counted yet."""
    first = groups[0]

    def arrivals() -> int:
        return source.read(live(*groups), {first.id}, complete=False)[first.id].count

    before, deadline = arrivals(), time.monotonic() + 5
    since = time.monotonic_ns()
    while arrivals() == before and time.monotonic() < deadline:
        since = time.monotonic_ns()
        time.sleep(0.001)
    shot = shoot(source, groups)
    return shot._replace(late_ns=shot.at_ns - since)


@contextmanager
def several(*names: str) -> Iterator[list[TestCgroup]]:
    hierarchy = require_writable_cgroups()
    with ExitStack() as stack:
        groups = [stack.enter_context(cgroup(hierarchy, name)) for name in names]
        for group in groups:
            weigh(group, SHARES)
        yield groups

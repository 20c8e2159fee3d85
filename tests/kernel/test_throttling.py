"""A quota of 20 ms per 100 ms on one thread that wants everything: its throttling can be computed, and is measured."""

from __future__ import annotations

import time

import pytest

from agent.sensors.cgroup.cgroup_reader import CgroupReader
from tests.kernel.real_cgroups import cgroup, require_writable_cgroups

pytestmark = pytest.mark.kernel
QUOTA_US = 20_000
SECONDS = 3.0


def test_a_fifth_of_a_cpu_is_used_and_four_fifths_of_each_period_are_throttled() -> None:
    """In 3 s: 30 periods, 0.6 s used, 80 ms throttled a period. What the thread has to wait for a busy CPU in a period
    before its 20 ms are used up shortens the throttled part, hence the wide lower bound on that alone."""
    hierarchy = require_writable_cgroups()
    reader = CgroupReader(hierarchy)
    with cgroup(hierarchy, "throttled") as group:
        group.limit_cpu(QUOTA_US)
        group.burn(1)
        time.sleep(1.0)
        before, started = reader.read()[group.path], time.monotonic()
        time.sleep(SECONDS)
        after, seconds = reader.read()[group.path], time.monotonic() - started
    reader.close()
    assert after.periods is not None
    assert before.periods is not None
    assert after.throttled_periods is not None
    assert before.throttled_periods is not None
    assert after.throttled_ns is not None
    assert before.throttled_ns is not None
    assert after.cpu_usage_ns is not None
    assert before.cpu_usage_ns is not None
    periods = after.periods - before.periods
    assert periods == pytest.approx(10 * seconds, abs=1.5)
    assert periods - 4 <= after.throttled_periods - before.throttled_periods <= periods
    assert (after.cpu_usage_ns - before.cpu_usage_ns) / 1e9 / seconds == pytest.approx(0.2, abs=0.015)
    assert 60 <= (after.throttled_ns - before.throttled_ns) / 1e6 / periods <= 83


def test_without_a_quota_there_are_no_periods() -> None:
    hierarchy = require_writable_cgroups()
    reader = CgroupReader(hierarchy)
    with cgroup(hierarchy, "free") as group:
        group.burn(1)
        time.sleep(0.5)
        sample = reader.read()[group.path]
    reader.close()
    assert (sample.periods, sample.throttled_periods, sample.throttled_ns) == (0, 0, 0)
    assert sample.cpu_usage_ns is not None
    assert sample.cpu_usage_ns > 0

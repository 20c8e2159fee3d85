"""Memory knobs on version 2, with swap and NUMA nodes: written by the agent's own code, felt by a workload, put back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from api.decision import OutcomeStatus
from api.knobs import Knob
from api.units import MIB
from tests.builders.waiting import until
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups
from tests.vm.workloads import (
    DATA,
    HOLD,
    PYTHON,
    KnobWriters,
    cache,
    charged,
    family,
    hold,
    numa_nodes,
    number,
    numbers,
    on_nodes,
    swapped,
)

pytestmark = pytest.mark.vm


@pytest.fixture
def group() -> Iterator[TestCgroup]:
    with cgroup(require_writable_cgroups(), "memory") as created:
        yield created


def test_a_group_above_memory_high_swaps_and_goes_on(agent: KnobWriters, group: TestCgroup) -> None:
    with agent.turned((group, Knob.MEMORY_HIGH, str(64 * MIB))):
        hold(group, 128 * MIB)
        events = numbers(group, "memory.events")
        assert events["high"] > 0
        assert (events["max"], events["oom_kill"]) == (0, 0)
        until(lambda: number(group, "memory.current") <= 68 * MIB, "it is down to the mark")
        assert swapped(group) >= 60 * MIB


def test_a_group_that_cannot_fit_into_its_maximum_loses_a_task_and_no_other_does(
    agent: KnobWriters, group: TestCgroup
) -> None:
    with cgroup(group.hierarchy, "beside") as other:
        hold(other, 32 * MIB)
        with agent.turned((group, Knob.MEMORY_MAX, str(48 * MIB)), (group, Knob.SWAP_MAX, "0")):
            killed = group.start([*PYTHON, HOLD, str(96 * MIB)])
            assert killed.wait() == -9
            assert numbers(group, "memory.events")["oom_kill"] == 1
            assert number(group, "memory.peak") <= 48 * MIB
        assert numbers(other, "memory.events")["oom_kill"] == 0
        assert other.processes[0].poll() is None


@pytest.mark.parametrize("knob", [None, Knob.MEMORY_LOW, Knob.MEMORY_MIN], ids=["neither", "low", "min"])
def test_what_is_protected_stays_while_its_neighbour_swaps(
    agent: KnobWriters, group: TestCgroup, knob: Knob | None
) -> None:
    """Two of 64 MiB in a group of 80: without protection it is the older one that has to go."""
    with family(group, "older", "newer") as (older, newer):
        group.file("memory", "memory.max").write_text(str(80 * MIB))

        def press() -> tuple[int, int]:
            hold(older, 64 * MIB)
            hold(newer, 64 * MIB)
            return swapped(older), swapped(newer)

        if knob is None:
            assert press()[0] >= 16 * MIB
            return
        with agent.turned((older, knob, str(96 * MIB))):
            rest, removed = press()
            assert rest < MIB
            assert removed >= 40 * MIB


def test_memory_is_reclaimed_on_request(agent: KnobWriters, group: TestCgroup) -> None:
    hold(group, 96 * MIB)
    outcome = agent.once(group, Knob.MEMORY_RECLAIM, str(48 * MIB))
    assert outcome.status is OutcomeStatus.APPLIED
    assert 44 * MIB <= int(outcome.before or 0) - int(outcome.after or 0) <= 56 * MIB
    assert 40 * MIB <= swapped(group) <= 72 * MIB
    assert agent.originals.entries() == ()


def test_no_more_is_swapped_than_swap_max(agent: KnobWriters, group: TestCgroup) -> None:
    hold(group, 96 * MIB)
    with agent.turned((group, Knob.SWAP_MAX, str(16 * MIB))):
        outcome = agent.once(group, Knob.MEMORY_RECLAIM, str(64 * MIB))
        assert outcome.status is OutcomeStatus.APPLIED
        assert outcome.error.startswith("partial: the kernel could reclaim less than the requested 67108864 bytes")
        assert 12 * MIB <= swapped(group) <= 16 * MIB
        assert numbers(group, "memory.swap.events")["max"] > 0
        assert charged(group) >= 96 * MIB


def test_page_cache_is_dropped_and_anonymous_memory_stays(agent: KnobWriters, group: TestCgroup) -> None:
    """Requires Linux 6.9 with swap; older kernels skip this test."""
    hold(group, 32 * MIB)
    cache(group, DATA / "cached", 48 * MIB)
    try:
        group.file("memory", "memory.reclaim").write_text("4096 swappiness=0")
        chooses = True
    except OSError:
        chooses = False
    before = numbers(group, "memory.stat")
    outcome = agent.once(group, Knob.DROP_CACHE, str(48 * MIB))
    if not chooses:
        assert outcome.status is OutcomeStatus.REFUSED
        assert "cannot drop page cache without swapping: use Linux 6.9 or newer, or disable swap" in outcome.error
        assert numbers(group, "memory.stat")["file"] >= 47 * MIB
        return
    assert outcome.status is OutcomeStatus.APPLIED
    after = numbers(group, "memory.stat")
    assert before["file"] - after["file"] >= 40 * MIB
    assert (swapped(group), after["anon"] >= 32 * MIB) == (0, True)


def test_pages_are_migrated_between_numa_nodes(agent: KnobWriters, group: TestCgroup) -> None:
    first, *_, last = numa_nodes()
    hold(group, 48 * MIB, cpu=numa_nodes()[first][0])
    until(lambda: on_nodes(group)[first] >= 48 * MIB, "it is where it was touched")
    outcome = agent.once(group, Knob.MIGRATE_PAGES, f"{first} {last}")
    assert outcome.status is OutcomeStatus.APPLIED
    assert int(outcome.before or 0) - int(outcome.after or 0) >= 47 * MIB
    until(lambda: on_nodes(group)[last] >= 47 * MIB, "it has moved")
    assert on_nodes(group)[first] < 2 * MIB

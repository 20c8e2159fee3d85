"""Reclaim of memory that removed cgroups left behind."""

from __future__ import annotations

import pytest

from agent.advisor.memory.cache_reaper import reclaim_dying_cgroups
from agent.advisor.memory.memory_inputs import MemoryInputs
from agent.config.memory import MemoryConfig, OffloadingConfig
from api.snapshot import CgroupSample
from tests.agent.advisor.memory.builders import GIB, MIB, S, situation

CONFIG = MemoryConfig(offloading=OffloadingConfig(dying=True))
SIZES: dict[str, int | None] = {
    "/kubepods": 20 * GIB,
    "/kubepods/burstable": 10 * GIB,
    "/kubepods/burstable/pod1": 6 * GIB,
    "/kubepods/burstable/pod1/c": 6 * GIB,
    "/kubepods/burstable/pod2": 3 * GIB,
    "/kubepods/offline-besteffort-0": 2 * GIB,
    "/kubepods/offline-besteffort-1": 2 * GIB,
    "/kubepods/offline-besteffort-1/pod": 2 * GIB - MIB,
    "/kubepods/besteffort": 5 * GIB,
    "/kubepods/offline-besteffort-0/burstable": None,
}


def node(change: dict[str, int | None] | None = None, at_s: float = 1000) -> MemoryInputs:
    sizes = SIZES | (change or {})
    groups = [CgroupSample(path=path, id=index, memory_bytes=size) for index, (path, size) in enumerate(sizes.items())]
    return situation([], groups, cpus=8, at_s=at_s)


def requested_bytes(
    inputs: MemoryInputs, config: MemoryConfig = CONFIG, before_ns: int | None = None
) -> dict[str, int]:
    return {
        request.cgroup: int(request.value) for request in reclaim_dying_cgroups(inputs, config, before_ns).knob_requests
    }


def test_only_memory_without_a_live_child_is_reclaimed() -> None:
    # burstable: 10 - 6 - 3. The second: a MiB is less than what 8 CPUs may have charged in advance (2 MiB). The first has
    # a member that is not measured.
    assert requested_bytes(node()) == {"/kubepods/burstable": GIB}
    assert requested_bytes(node({"/kubepods/offline-besteffort-1": 2 * GIB + 2 * MIB})) == {
        "/kubepods/burstable": GIB,
        "/kubepods/offline-besteffort-1": 3 * MIB,
    }


@pytest.mark.parametrize(("at_s", "due"), [(1299.9, False), (1300, True), (999, True)])
def test_dying_cgroups_are_evaluated_once_per_interval(at_s: float, due: bool) -> None:
    result = reclaim_dying_cgroups(node(at_s=at_s), CONFIG, 1000 * S)
    assert bool(result.knob_requests) == due
    assert result.at_ns == (round(at_s * S) if due else 1000 * S)


@pytest.mark.parametrize(
    "change", [{"/kubepods/burstable": None}, {"/kubepods/burstable/pod2": None}, {"/kubepods/burstable": 9 * GIB}]
)
def test_nothing_is_reclaimed_with_a_missing_size_or_without_a_rest(change: dict[str, int | None]) -> None:
    assert requested_bytes(node(change)) == {}
    result = reclaim_dying_cgroups(node(change), CONFIG, None)
    assert ("/kubepods/burstable" in [each.inputs["cgroup"] for each in result.reasons]) == (None in change.values())


def test_dying_cgroups_are_ignored_unless_configured() -> None:
    assert requested_bytes(node(), MemoryConfig()) == {}

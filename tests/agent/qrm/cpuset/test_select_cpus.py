"""Selection of CPUs on a small machine, compared with a selection by hand."""

from __future__ import annotations

import pytest

from agent.qrm.cpuset.select_cpus import select_cpus, select_evenly, select_round_robin
from agent.qrm.cpuset.topology_layout import layout_of, restrict_topology
from api.cpu import format_cpu_list, parse_cpu_list
from tests.agent.qrm.cpuset.builders import machine

# Two sockets of one NUMA node each, with two caches of two cores of two threads: CPU n and n + 8 are one core,
# 0,1,8,9 share a cache.
SMALL = layout_of(machine(2, 1, 2, 2, 2))
PLAIN = layout_of(machine(1, 1, 1, 8, 1))


@pytest.mark.parametrize(
    ("count", "free", "retained", "used", "expected"),
    [
        (0, "0-15", "", "", ""),
        (2, "0-15", "", "", "0,8"),  # one core, not two halves
        (4, "0-15", "", "", "0-1,8-9"),  # one cache
        (6, "0-15", "", "", "0-2,8-10"),  # one socket
        (8, "0-15", "", "", "0-3,8-11"),
        (10, "0-15", "", "", "0-4,8-12"),  # sockets in order
        (3, "0-15", "", "", "0-1,8"),
        (1, "0-15", "", "", "0"),
        (1, "0-7,9-15", "", "", "0"),  # a core that is broken already
        (4, "1-7,9-15", "", "", "2-3,10-11"),  # the cache that holds all of it
        (6, "1-3,5,9-11,13", "", "", "1-3,9-11"),
        (4, "0-1,4-6,8-9,12-14", "", "", "0-1,8-9"),
        (8, "0-2,4-7,8-10,12-15", "", "", "4-7,12-15"),  # the node that holds it rather than a part of each
        (4, "0-15", "6,14", "", "6-7,14-15"),  # grows in its cache
        (6, "0-15", "6,14", "", "4,6-7,12,14-15"),  # then in its node
        (3, "0-15", "6,14", "", "6-7,14"),
        (2, "0-15", "6", "", "6,14"),  # the other half of its core
        (2, "0-15", "0-1,8-9", "", "0,8"),  # gives back a whole core
        (3, "0-15", "0-1,8-9", "", "0-1,8"),
        (3, "0-15", "0-1,4,8-9", "", "0-1,8"),  # halves of cores go first
        (4, "0-15", "0-1,4,8-9,12", "", "0-1,8-9"),  # then what is away from the rest
        (2, "0-15", "", "0-3,8-11", "4,12"),  # unused CPUs before those of other pools
        (4, "0-15", "", "0-6,8-14", "6-7,14-15"),  # and what is near it
        (5, "0,3,5", "", "", "0,3,5"),  # there are no more
        (2, "4-7", "0,1", "", "4-5"),  # what it had and cannot have any more
    ],
)
def test_select_cpus(count: int, free: str, retained: str, used: str, expected: str) -> None:
    chosen = select_cpus(SMALL, count, parse_cpu_list(free), parse_cpu_list(retained), parse_cpu_list(used))
    assert format_cpu_list(chosen) == expected


@pytest.mark.parametrize(
    ("sockets", "nodes", "cores", "threads", "count", "expected"),
    [
        (2, 2, 2, 2, 2, "0,2"),  # Katalyst's 16 CPUs on 4 NUMA nodes: one of each in turn
        (2, 2, 2, 2, 4, "0,2,4,6"),
        (2, 2, 2, 2, 5, "0-2,4,6"),
        (2, 2, 2, 2, 8, "0-7"),  # each on a core of its own
        (2, 2, 2, 2, 9, "0-8"),  # before a second thread of one
        (1, 1, 4, 2, 3, "0-2"),
        (2, 1, 2, 1, 9, "0-3"),
    ],
)
def test_select_round_robin(sockets: int, nodes: int, cores: int, threads: int, count: int, expected: str) -> None:
    node = layout_of(machine(sockets, nodes, 1, cores, threads))
    assert format_cpu_list(select_round_robin(node, count, node.order)) == expected


@pytest.mark.parametrize(
    ("count", "nodes", "free", "expected"),
    [
        (4, (0, 1), "0-15", "0,4,8,12"),
        (5, (0, 1), "0-15", "0-1,4,8,12"),
        (4, (0, 1), "0,4-7,12-15", "0,4-5,12"),  # as even as it goes
    ],
)
def test_spread_evenly(count: int, nodes: tuple[int, ...], free: str, expected: str) -> None:
    assert format_cpu_list(select_evenly(SMALL, count, parse_cpu_list(free), nodes)) == expected


def test_layout_groups_cpus_by_core_cache_and_node() -> None:
    assert SMALL.order == (0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15)
    assert SMALL.threads == 2
    assert PLAIN.threads == 1
    assert SMALL.whole_cores((0, 8, 1)) == [(0, 0)]
    assert SMALL.nodes_of((1, 4)) == (0, 1)
    assert SMALL.sockets_of((0, 1)) == {0, 1}
    assert SMALL.on([1]) == {4, 5, 6, 7, 12, 13, 14, 15}


@pytest.mark.parametrize(("ceiling", "expected"), [(None, "0-7"), ((2, 3, 9), "2-3"), ((9,), "0-7"), ((), "0-7")])
def test_allowed_cpus_that_do_not_exist_are_ignored(ceiling: tuple[int, ...] | None, expected: str) -> None:
    assert format_cpu_list(restrict_topology(PLAIN.topology, ceiling).ids) == expected

"""NUMA masks by Katalyst's rules, one rule per row, and the hint selected from them."""

from __future__ import annotations

import pytest

from agent.config.qrm import CpuPlacementConfig
from agent.qrm.cpuset.topology_hints import NoTopologyHint, NumaRequest, TopologyHint, select_hint, topology_hints
from agent.qrm.cpuset.topology_layout import CpuLayout, layout_of
from api.qos import Enhancements
from tests.agent.qrm.cpuset.builders import machine

# Two sockets of two NUMA nodes of four cores of two threads: 8 CPUs a node, 16 a socket.
FOUR = layout_of(machine(2, 2, 1, 4, 2))
ALL = {0: 8.0, 1: 8.0, 2: 8.0, 3: 8.0}


def masks(cores: float, left: dict[int, float] | None = None, node: CpuLayout = FOUR, **wants: object) -> list[str]:
    """As `01` for nodes 0 and 1; `+` marks preferred ones."""
    enhancements = Enhancements(numa_binding=True, **wants)
    ask = NumaRequest(cores=cores, enhancements=enhancements, several=enhancements.numa_exclusive)
    available = left or ALL
    free = {cpu for numa in node.numa for cpu in list(node.numa[numa])[: int(available.get(numa, 0))]}
    return ["".join(map(str, hint.nodes)) + "+" * hint.preferred for hint in topology_hints(ask, available, free, node)]


@pytest.mark.parametrize(
    ("cores", "left", "wants", "expected"),
    [
        (4, None, {}, "0+ 1+ 2+ 3+"),
        (4, {0: 3.0, 1: 4.0, 2: 0.0, 3: 8.0}, {}, "1+ 3+"),
        (0.5, {0: 0.4, 1: 0.6, 2: 0.0, 3: 0.0}, {}, "1+"),
        # Exclusive: also more nodes than needed, not preferred; two nodes only of one socket.
        (8, None, {"numa_exclusive": True}, "0+ 1+ 2+ 3+ 01 23 012 013 023 123 0123"),
        (9, None, {"numa_exclusive": True}, "01+ 23+ 012 013 023 123 0123"),
        (9, {0: 8.0, 1: 0.0, 2: 8.0, 3: 8.0}, {"numa_exclusive": True}, "23+ 023"),
        (17, None, {"numa_exclusive": True}, "012+ 013+ 023+ 123+ 0123"),
        (32, None, {"numa_exclusive": True}, "0123+"),
        # One socket is enough for 16, so no mask of both.
        (9, None, {"numa_exclusive": True, "align_by_socket": True}, "01+ 23+"),
        (17, None, {"numa_exclusive": True, "align_by_socket": True}, "012+ 013+ 023+ 123+ 0123"),
        # Nine do not divide by two, but by three.
        (9, None, {"numa_exclusive": True, "distribute_evenly": True}, "012 013 023 123"),
        (12, {0: 8.0, 1: 5.0, 2: 6.0, 3: 6.0}, {"numa_exclusive": True, "distribute_evenly": True}, "23+ 012 013 023 123 0123"),
        # Whole cores: half of each core is taken on nodes with 4 of 8 CPUs left, numbered by threads.
        (2, {0: 4.0, 1: 8.0, 2: 0.0, 3: 5.0}, {"full_cores": True}, "1+ 3+"),
        (4, {0: 4.0, 1: 8.0, 2: 0.0, 3: 5.0}, {"full_cores": True}, "1+"),
        (4, None, {"numa_ids": (2,)}, "2+"),
        (10, None, {"numa_ids": (1, 3)}, "13+"),
        (4, None, {"numa_number": 2}, "01+ 23+"),
        (10, None, {"numa_number": 3, "numa_exclusive": True}, "012+ 013+ 023+ 123+"),
        (4, None, {"numa_number": 2, "numa_ids": (3,)}, "3+"),
    ],
)  # fmt: skip
def test_numa_masks_that_can_hold_a_request(
    cores: float, left: dict[int, float] | None, wants: dict[str, object], expected: str
) -> None:
    assert masks(cores, left, **wants) == expected.split()


@pytest.mark.parametrize(
    ("cores", "left", "wants", "reason"),
    [
        (9, None, {}, r"requests 9 CPUs, more than one NUMA node has"),
        (33, None, {"numa_exclusive": True}, r"requests 33 CPUs, the node has 32"),
        (4, {0: 3.0, 1: 3.5, 2: 0.0, 3: 0.0}, {}, r"left on node 0: 3, 1: 3.5, 2: 0, 3: 0"),
        (4, None, {"numa_ids": (5,)}, r"requests NUMA nodes 5, the machine has 0,1,2,3"),
        (20, None, {"numa_ids": (0, 1)}, r"on nodes 0,1; no NUMA nodes have them"),
        (20, None, {"numa_number": 2}, r"requests 20 CPUs on 2 NUMA nodes, and needs 3"),
        (4, None, {"numa_number": 9}, r"on 9 nodes; no NUMA nodes have them"),
        (
            3,
            {0: 8.0, 1: 8.0, 2: 8.0, 3: 8.0},
            {"numa_number": 2, "distribute_evenly": True},
            r"the same number on each",
        ),
    ],
)
def test_a_request_without_a_mask_has_a_reason(
    cores: float, left: dict[int, float] | None, wants: dict[str, object], reason: str
) -> None:
    with pytest.raises(NoTopologyHint, match=reason):
        masks(cores, left, **wants)


def test_large_machines_consider_the_minimum_number_of_nodes_and_one_more() -> None:
    twelve = layout_of(machine(2, 6, 1, 2, 1))
    hints = masks(3, dict.fromkeys(range(12), 2.0), twelve, numa_exclusive=True)
    # Pairs and triples of six nodes within each of two sockets.
    assert (len([mask for mask in hints if mask.endswith("+")]), len(hints)) == (30, 70)


@pytest.mark.parametrize(
    ("prefer", "left", "expected"),
    [
        ("spreading", {0: 3.0, 1: 7.0, 2: 7.0, 3: 5.0}, (1,)),
        ("packing", {0: 3.0, 1: 7.0, 2: 7.0, 3: 5.0}, (0,)),
        ("packing", {0: 3.0, 1: 7.0, 2: 7.0, 3: 3.0}, (0,)),
        ("dynamic-packing", {0: 3.0, 1: 7.0, 2: 8.0, 3: 4.0}, (3,)),  # the least left of those with half of 8
        ("dynamic-packing", {0: 3.0, 1: 3.5, 2: 3.9, 3: 1.0}, (2,)),  # none has half: the most left
    ],
)
def test_hints_spread_or_pack(prefer: str, left: dict[int, float], expected: tuple[int, ...]) -> None:
    hints = [TopologyHint(nodes=(node,), preferred=True) for node in (3, 2, 1, 0)]
    assert select_hint(hints, left, FOUR, CpuPlacementConfig(numa_hint=prefer)).nodes == expected


def test_preferred_hints_come_first_then_few_nodes() -> None:
    wide, few, good = (
        TopologyHint((0, 1, 2), preferred=False),
        TopologyHint((1, 2), preferred=False),
        TopologyHint((0, 1, 3), preferred=True),
    )
    assert select_hint([wide, few], ALL, FOUR, CpuPlacementConfig()) == few
    assert select_hint([wide, few, good], ALL, FOUR, CpuPlacementConfig()) == good

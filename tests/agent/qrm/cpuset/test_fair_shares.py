"""Limits of what annotations may take beyond requests. Without them, each case took most of a node of 64 CPUs from pods that
requested it."""

from __future__ import annotations

from itertools import permutations

import msgspec
import pytest

from agent.config.qrm import CpuPlacementConfig
from agent.qrm.cpuset.fair_shares import ceil_cores, limit_own_pools
from agent.qrm.cpuset.state import CpusetAllocation, CpusetState, pods_as_allocated
from api.cpu import Topology, format_cpu_list
from api.pod import Container, Pod
from api.qos import Enhancements, QoSLevel
from tests.agent.qrm.cpuset.builders import bound, counts, cpus, dedicated, machine, pod, run, size

NODE = machine(2, 2, 1, 16, 1)
"""64 CPUs on four NUMA nodes of 16."""
NO_RAMP_UP = CpuPlacementConfig(ramp_up_s=0)
BIG = (pod("big-1", cores=30.0), pod("big-2", cores=30.0))
"""Two shared pods that request 60 of the 64 CPUs."""


def arrive(pods: tuple[Pod, ...], topology: Topology = NODE) -> tuple[CpusetAllocation, CpusetState]:
    """Return the allocation after the pods came one by one, with an allocation after each."""
    state = CpusetState()
    for number in range(1, len(pods) + 1):
        placement, state = run((), pods[:number], topology, state, NO_RAMP_UP, at_s=float(number))
    return placement, state


def greedy(count: int, cores: float | None, **wants: object) -> tuple[Pod, ...]:
    """Return dedicated pods with this request each."""
    return tuple(dedicated(f"greedy-{number}", cores, **wants) for number in range(count))  # type: ignore[arg-type]


def own_pools(count: int) -> tuple[Pod, ...]:
    """Return shared pods of 1m with a pool of its own each."""
    return tuple(
        pod(f"greedy-{number}", cores=0.001, wants=Enhancements(cpuset_pool=f"own-{number}")) for number in range(count)
    )


@pytest.mark.parametrize(
    ("attack", "own_cpus"),
    [
        # A pod of 1 CPU on three exclusive NUMA nodes had 48 CPUs.
        (greedy(1, 1.0, numa_exclusive=True, numa_number=3), 1),
        # Twelve pods without a request had 48.
        (greedy(12, None), 0),
        # Fifty pods of 1m had 50; three of them fit into the CPUs that no pod requests.
        (greedy(50, 0.001), 3),
        # Pods of 1m bound to three NUMA nodes left the others one node of 16.
        (tuple(bound(f"greedy-{numa}", 0.001, numa_ids=(numa,)) for numa in range(3)), 0),
        (greedy(1, 1.0, full_cores=True), 1),
    ],
    ids=["numa-exclusive", "no-request", "fractions", "bound", "full-cores"],
)  # fmt: skip
def test_two_shared_pods_keep_the_sixty_cpus_that_they_request(attack: tuple[Pod, ...], own_cpus: int) -> None:
    for order in permutations((attack, BIG[:1], BIG[1:])):
        placement, state = arrive(tuple(each for part in order for each in part))
        assert counts(placement)["share"] >= 60
        assert len(placement.cpus["/big-1"]) >= 60
        assert len(state.exclusive_cpus()) <= own_cpus


def test_forty_pools_of_their_own_leave_the_share_pool_its_requests() -> None:
    for pods in ((*own_pools(40), *BIG), (*BIG, *own_pools(40))):
        placement, _ = arrive(pods)
        assert counts(placement)["share"] == 60
        assert {len(placement.cpus[f"/greedy-{number}"]) for number in range(40)} == {1}


def test_without_other_pods_an_exclusive_pod_has_its_request_and_the_reason_says_what_it_lacks() -> None:
    placement, state = arrive(greedy(1, 1.0, numa_exclusive=True, numa_number=3))
    assert len(placement.cpus["/greedy-0"]) == 1
    assert placement.rejected["default/greedy-0"].rule == "numa_exclusive_not_requested"
    assert placement.rejected["default/greedy-0"].text == (
        "default/greedy-0 sets numa_exclusive on NUMA nodes 0,1,2, which have 48 CPUs, and requests 1. It gets 1 exclusive, "
        "and other pods run on the rest. Request all 48 CPUs to have the nodes alone."
    )
    (as_allocated,) = pods_as_allocated(greedy(1, 1.0, numa_exclusive=True), state)
    assert not as_allocated.enhancements.numa_exclusive, "the advisor counts its nodes as shared too"


def test_numa_nodes_are_exclusive_where_the_request_covers_them() -> None:
    placement, state = arrive((*greedy(1, 32.0, numa_exclusive=True), pod("web", cores=20.0)))
    assert len(placement.cpus["/greedy-0"]) == 32
    assert state.pod("u-greedy-0")["c"].exclusive
    assert placement.rejected == {}
    # 15 of 16 CPUs do not cover a node, unless one is reserved.
    placement, state = arrive(greedy(1, 15.0, numa_exclusive=True))
    assert not state.pod("u-greedy-0")["c"].exclusive
    reserved = CpuPlacementConfig(reserved_cpus=1, ramp_up_s=0)
    placement, state = run((), greedy(1, 15.0, numa_exclusive=True), NODE, config=reserved)
    assert (cpus(placement)["/greedy-0"], state.pod("u-greedy-0")["c"].exclusive) == ("1-15", True)


def test_the_reasons_name_what_a_dedicated_pod_lacks() -> None:
    placement, _ = arrive((*BIG, *greedy(1, None)))
    assert placement.rejected["default/greedy-0"].text == (
        "default/greedy-0 has dedicated_cores and its main container requests no CPU; it runs with the shared pods. "
        "Request the CPUs that it needs."
    )
    fractions = tuple(dedicated(f"greedy-{number}", 0.5) for number in range(8))
    placement, _ = arrive((*BIG, *fractions))
    shared = {name for name, reason in placement.rejected.items() if reason.rule == "dedicated_exceeds_free_requests"}
    assert len(shared) == 8, "60 + 8 x 0.5 CPUs are requested: nothing is left for rounding up"
    placement, _ = arrive((pod("web", cores=4.0), *fractions[:6]), machine(1, 1, 1, 8, 1))
    assert len(placement.rejected) == 4, "7 of 8 CPUs are requested: of six pods of 0.5, two can have a whole CPU"


def test_a_dedicated_pod_that_shrinks_in_place_returns_cpus() -> None:
    _, state = run((), (dedicated("db", 48.0, numa_exclusive=True),), NODE, config=NO_RAMP_UP)
    assert len(state.exclusive_cpus()) == 48
    small = dedicated("db", 1.0, numa_exclusive=True)
    placement, state = run((), (small, *BIG), NODE, state, NO_RAMP_UP, at_s=1.0)
    assert len(placement.cpus["/db"]) == 1
    assert counts(placement)["share"] >= 60
    placement, _ = run((), (dedicated("db", 3.0, numa_exclusive=True), *BIG), NODE, state, NO_RAMP_UP, at_s=2.0)
    assert len(placement.cpus["/db"]) == 1, "it grows again with its next start only"
    assert placement.rejected["default/db"].rule == "dedicated_resize"


def test_pods_that_come_and_go_hold_no_cpus_that_others_request() -> None:
    """Allocations outlast their pods by five minutes: deleting and creating pods would hold the whole node."""
    state = CpusetState()
    for number in range(8):
        churning = (dedicated(f"churn-{number}", 16.0),)
        _, state = run((), churning, NODE, state, NO_RAMP_UP, at_s=float(number))
    placement, state = run((), BIG, NODE, state, NO_RAMP_UP, at_s=9.0)
    assert counts(placement)["share"] >= 60


@pytest.mark.parametrize(
    ("requested", "exclusive"),
    [
        (8.0, "0-7"),  # With the 8 CPUs of the deleted pod, these are all.
        (8.5, ""),
        (10.5, ""),
    ],
)
def test_cpus_of_a_deleted_pod_are_exclusive_only_while_no_pod_requests_them(requested: float, exclusive: str) -> None:
    """The state counted CPUs as exclusive to a deleted pod that the share pool had, or that an advisor lent to reclaim."""
    topology = machine(1, 1, 1, 16, 1)
    web = pod("web", cores=requested)
    _, state = run((), (dedicated("db", 7.5),), topology, config=NO_RAMP_UP)
    for at_s, sizes in enumerate(((), (size("share", 0),), ()), 1):
        placement, state = run(sizes, (web,), topology, state, NO_RAMP_UP, at_s=at_s)
        assert format_cpu_list(state.exclusive_cpus()) == exclusive
        assert state.machine_state[0].allocated_cpuset == exclusive
        assert counts(placement)["share"] == (1 if sizes else ceil_cores(requested))
    # A forgotten pod takes no CPUs back when they are free again.
    placement, state = run((), (), topology, state, NO_RAMP_UP, at_s=4.0)
    assert format_cpu_list(state.exclusive_cpus()) == exclusive


@pytest.mark.parametrize(
    ("bound_cores", "dedicated_cores", "expected"),
    [
        # The dedicated pod took 3 CPUs of node 0 and left 17 to pods that request 18 there and run on no other node.
        ((18.0, 0.0), 3.0, (0, 3)),
        ((18.0, 10.0), 12.0, (2, 10)),
        ((0.001, 0.0), 39.0, (19, 20)),
        # 1.5 + 18.5 CPUs are left, but only 1 + 18 whole ones: the pod runs with the shared pods.
        ((18.5, 1.5), 20.0, (0, 0)),
        ((18.5, 1.5), 19.0, (1, 18)),
    ],
)
def test_a_dedicated_pod_on_two_numa_nodes_leaves_the_pods_bound_to_each_their_requests(
    bound_cores: tuple[float, float], dedicated_cores: float, expected: tuple[int, int]
) -> None:
    topology = machine(1, 2, 1, 20, 1)
    near = tuple(bound(f"near-{numa}", cores, numa_ids=(numa,)) for numa, cores in enumerate(bound_cores) if cores)
    db = dedicated("db", dedicated_cores, numa_share=True, numa_ids=(0, 1))
    for order in permutations((*near, db)):
        placement, state = arrive(order, topology)
        for each in near:
            assert len(placement.cpus[f"/{each.name}"]) >= (each.containers[0].cpu_request_cores or 0.0)
        if order[-1] is db:
            own = state.exclusive_cpus()
            assert tuple(len(own.intersection(range(20 * numa, 20 * numa + 20))) for numa in (0, 1)) == expected


def test_a_postponed_dedicated_pod_leaves_a_pod_bound_before_it_the_requests_on_that_node() -> None:
    """23.501 of 24 CPUs are requested, so `small` gets a whole CPU only after `db`, whose sidecar needs none of the 4 CPUs that
    it requests. By then `near` is bound to the node of `small` and requests all of it: it had 2 of 3 CPUs."""
    sidecar = Container(name="s", cgroup="/db-s", cpu_request_cores=4.0, sidecar=True)
    db = dedicated("db", 1.5)
    db = msgspec.structs.replace(db, containers=(*db.containers, sidecar))
    near = bound("near", 3.0, numa_ids=(0,))
    topology = machine(1, 8, 1, 3, 1)
    placement, state = arrive((dedicated("small", 0.001), pod("web", cores=15.0), near, db), topology)
    assert cpus(placement)["/near"] == "0-2"
    assert {name: len(placement.cpus[f"/{name}"]) for name in ("small", "db", "web")} == {
        "small": 1,
        "db": 2,
        "web": 15,
    }
    assert len(state.exclusive_cpus()) == 3


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        # Two pools shared the two CPUs that reclaim and the pool of the NUMA node left, and reclaim had none of them.
        ((pod("web", cores=0.001),), {"own-0": 1, "share": 1, "share-NUMA0": 1, "reclaim": 1}),
        # A dedicated pod that cannot have CPUs of its own runs with the shared pods: the named pool had 2 CPUs.
        ((pod("db", QoSLevel.DEDICATED, 0.001),), {"own-0": 1, "share": 1, "share-NUMA0": 1, "reclaim": 1}),
        # Four pools on three CPUs: the unbound ones share two of them.
        (
            (pod("web", cores=0.001), pod("flink", cores=0.001, wants=Enhancements(cpuset_pool="flink"))),
            {"own-0": 2, "flink": 2, "share": 2, "share-NUMA0": 1, "reclaim": 1},
        ),
    ],
    ids=["shared", "rejected", "four-pools"],
)
def test_pools_are_disjoint_while_there_is_a_cpu_for_each(pods: tuple[Pod, ...], expected: dict[str, int]) -> None:
    placement, _ = run((), (bound("near", 0.0), *pods, *own_pools(1)), machine(1, 1, 1, 3, 1), config=NO_RAMP_UP)
    assert {name: count for name, count in counts(placement).items() if name != "fallback"} == expected


def test_pods_without_requests_keep_no_dedicated_pod_from_its_cpus() -> None:
    """When each pod without a request counted as four CPUs, sixteen of them left no NUMA node with room for a dedicated pod."""
    for idle in (tuple(pod(f"idle-{n}") for n in range(16)), tuple(bound(f"idle-{n}", 0.0) for n in range(16))):
        placement, _ = arrive((*idle, dedicated("db", 8.0)))
        assert placement.rejected == {}
        assert len(placement.cpus["/db"]) == 8


def test_sidecars_count_for_the_requests_of_their_pool() -> None:
    """A sidecar runs on the CPUs of its pod's pool, and the scheduler counts its request like any other."""
    heavy = pod("heavy", cores=1.0)
    sidecar = Container(name="s", cgroup="/heavy-s", cpu_request_cores=40.0, sidecar=True)
    heavy = msgspec.structs.replace(heavy, containers=(*heavy.containers, sidecar))
    placement, _ = run((), (heavy,), NODE, config=NO_RAMP_UP)
    assert counts(placement)["share"] == 41


def test_an_advisor_gives_idle_cpus_of_the_share_pool_to_reclaim_only() -> None:
    """Reclaimed pods return CPUs on demand; CPUs of other online pools do not come back."""
    placement, _ = run((size("share", 8), size("reclaim", 56)), BIG, NODE, config=NO_RAMP_UP)
    assert (counts(placement)["share"], counts(placement)["reclaim"]) == (8, 56)
    near = tuple(bound(f"near-{numa}", 0.001, numa_ids=(numa,)) for numa in range(3))
    sizes = (size("share", 15), *(size(f"share-NUMA{numa}", 16, numa) for numa in range(3)), size("reclaim", 1))
    placement, _ = run(sizes, (*BIG, *near), NODE, arrive(near)[1], NO_RAMP_UP, at_s=9.0)
    assert counts(placement)["share"] == 60, "an advisor keeps unbound pools off NUMA nodes with bound ones"


def test_sizes_of_an_advisor_cannot_take_requests_from_the_share_pool() -> None:
    named = pod("named", cores=2.5, wants=Enhancements(cpuset_pool="own"))
    sizes = (size("share", 10), size("own", 50), size("reclaim", 4))
    placement, _ = run(sizes, (named, *BIG), NODE, config=NO_RAMP_UP)
    assert {name: count for name, count in counts(placement).items() if name != "fallback"} == {
        "share": 57, "own": 3, "reclaim": 4
    }, "the share pool lends at most what reclaim has"  # fmt: skip


def test_a_pool_without_requests_is_no_pool() -> None:
    nothing = pod("nothing", wants=Enhancements(cpuset_pool="own"))
    near = bound("near", 0.0, cpuset_pool="own")
    placement, _ = run((), (nothing, near, pod("web", cores=2.0)), NODE, config=NO_RAMP_UP)
    assert not any(name.startswith("own") for name in counts(placement))
    assert placement.cpus["/nothing"] == placement.cpus["/web"]


def test_what_a_pool_of_its_own_cannot_have_goes_to_the_share_pool() -> None:
    sizes = (size("share", 2), size("own", 9), size("own-NUMA1", 9, 1), size("reclaim", 1, 1))
    limited = limit_own_pools(sizes, {("own", -1): 1.5, ("own-NUMA1", 1): 4.0, ("share", -1): 1.0})
    assert [(each.pool, each.cpus) for each in limited] == [("share", 9), ("own", 2), ("own-NUMA1", 4), ("reclaim", 6)]
    assert ceil_cores(0.1 + 0.2 + 0.7) == 1


def test_system_pods_have_no_part_in_the_requests() -> None:
    placement, _ = run((), (pod("agent", QoSLevel.SYSTEM, 60.0), *greedy(1, 4.0)), NODE, config=NO_RAMP_UP)
    assert len(placement.cpus["/greedy-0"]) == 4

"""CPUs that whole cycles assign: exclusive ones, and those that no pod may have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
from msgspec.structs import replace

from agent.advisor.engine import PolicyState, evaluate_policy
from agent.advisor.policy_result import PolicyResult
from agent.config.config import AgentConfig
from agent.qrm.cpuset.allowed_cpus import AllowedCpus, allowed_cpus_of
from agent.qrm.decisions.cpu import compose_decisions, managed_cgroups
from api.cpu import format_cpu_list, parse_cpu_list
from api.knobs import Knob
from api.pod import Container, Pod
from api.qos import Enhancements, QoSLevel
from api.snapshot import CgroupLimits, CgroupSample, Snapshot, ThreadStates
from tests.agent.advisor.cycles import advice_of, evaluate_cycles, headroom_of, settings
from tests.builders.nodes import S, topology
from tests.builders.pods import dedicated, reclaimed, shared
from tests.builders.snapshots import snapshot


def confined(current: Snapshot, lists: Mapping[str, str | None]) -> Snapshot:
    """Return the snapshot with these effective CPU lists by cgroup; missing cgroups are added."""
    cgroups = dict(current.cgroups)
    for path, cpus in lists.items():
        sample = cgroups.get(path, CgroupSample(path=path, id=50 + len(cgroups)))
        cgroups[path] = replace(sample, limits=CgroupLimits(cpus=cpus))
    return replace(current, cgroups=cgroups)


def cpusets(current: Snapshot, result: PolicyResult) -> dict[str, str]:
    knobs = dict.fromkeys(managed_cgroups(current.pods), frozenset(Knob))
    return {d.cgroup: d.value for d in compose_decisions(result, current, knobs) if d.knob is Knob.CPUSET}


CANONICAL = "advisor: {policy: canonical}"
IDLE = {"db": 0.0, "web": 0.0, "b": 0.0}
DB, BATCH, WEB = dedicated("db", cpu_request=2.0), reclaimed("b"), shared("web")


def test_suppressed_pods_get_no_exclusive_cpus() -> None:
    """8 x 65 % without load is 6 CPUs; 0 and 1 serve interrupts, 2 is reserved for the system, and two are exclusive to db."""
    config = settings(
        "advisor: {policy: none}\n"
        "placing: {interruptCpuList: '0-1', reservedCpuList: '2'}\n"
        "knobs: {suppress: {policy: cpuset}}\n"
    )
    shots = [
        confined(snapshot(second, [DB, BATCH], machine=8, usage_s={"db": 0.0, "b": 0.0}), {"/db": "3-4"})
        for second in range(6)
    ]
    cycles = [replace(shot, node=replace(shot.node, cpu=shot.node.per_cpu[0])) for shot in shots]
    assert cpusets(cycles[-1], evaluate_cycles(cycles, config)[0][-1]) == {"/b": "5-7"}


def test_a_dedicated_pod_without_its_own_cpus_counts_in_the_pool_where_it_runs() -> None:
    """Without numa_binding it runs with the shared pods; otherwise unused CPUs would be reserved for it."""
    cycles = [
        snapshot(second, [DB, BATCH, WEB], machine=8, usage_s={"db": 2.0 * second, "web": 1.0 * second, "b": 0.0})
        for second in range(4)
    ]
    result = evaluate_cycles(cycles, settings(CANONICAL))[0][-1]
    advice = advice_of(result)
    assert advice.rejected["default/db"].rule == "dedicated_needs_numa_binding"
    assert {size.pool for size in advice.cpu.sizes} == {"share", "reclaim"}
    share = next(each for each in advice.cpu.regions if each.region.pool == "share")
    assert set(share.region.pods) == {"default/db", "default/web"}
    pools = {pool.name: pool.cpus for pool in advice.pools}
    assert pools.keys() == {"share", "reclaim"}
    assert sum(len(cpus) for cpus in pools.values()) == 8
    assert result.placement is not None
    assert result.placement.cpus["/db"] == pools["share"]


def test_pods_on_the_cpus_of_an_exclusive_pod_avoid_its_reclaimable_ones() -> None:
    """The first pod is exclusive on the only NUMA node of 20 CPUs; the second runs there too, and a quarter is
    reclaimable. With sharing by priority, online pods keep all CPUs."""
    enhancements = Enhancements(numa_binding=True, numa_exclusive=True)
    alone = replace(dedicated("db", cpu_request=20.0), enhancements=enhancements)
    cycles = [snapshot(second, [alone, WEB, BATCH], machine=20, usage_s=IDLE) for second in range(3)]
    advice = advice_of(evaluate_cycles(cycles, settings(CANONICAL))[0][-1])
    pools = {pool.name: set(pool.cpus) for pool in advice.pools}
    assert len(pools["reclaim"]) == 5
    assert pools["share"] == set(range(20)) - pools["reclaim"]
    result = evaluate_cycles(cycles, AgentConfig())[0][-1]
    assert result.placement is not None
    assert result.placement.cpus["/web"] == tuple(range(20))


def test_a_refused_binding_leaves_no_pool_where_the_pod_is_not() -> None:
    """12 CPUs fit on neither NUMA node of 8: db runs with the others, and nothing is reserved on the node of its binding."""
    asks = replace(dedicated("db", cpu_request=12.0), enhancements=Enhancements(numa_binding=True), bound_numa=(0,))
    cycles = [
        snapshot(second, [asks, WEB, BATCH], machine=topology(16, sockets=2), usage_s=IDLE) for second in range(4)
    ]
    advice = advice_of(evaluate_cycles(cycles, settings(CANONICAL))[0][-1])
    assert advice.rejected.keys() == {"default/db"}
    assert {pool.name for pool in advice.pools} == {"share", "reclaim"}


ROOT = "/offline"


@pytest.mark.parametrize(
    ("neighbour", "threads", "idle"),
    [
        (f"{ROOT}/b/sandbox", 1, True),  # the pod's own
        (f"{ROOT}/proxy/c", 12, False),
        (f"{ROOT}/proxy/c", 0, True),
        (f"{ROOT}/proxy/c", None, False),
        ("/offline-0/other", 3, True),  # another root
    ],
)
def test_a_reclaim_root_with_only_reclaimed_pods_is_idle(neighbour: str, threads: int | None, idle: bool) -> None:
    batch = replace(BATCH, containers=(Container(name="b", cgroup=f"{ROOT}/b/c"),))
    current = snapshot(0, [batch, WEB])
    paths = {
        ROOT: 3,
        f"{ROOT}/b": 3,
        f"{ROOT}/b/c": 2,
        neighbour.rpartition("/")[0]: threads,
        neighbour: threads,
    }
    groups = {path: CgroupSample(path=path, id=50 + i, threads=n) for i, (path, n) in enumerate(paths.items())}
    current = replace(current, cgroups={**current.cgroups, **groups})
    config = settings(f"memory: {{reclaimRoot: {ROOT}}}")
    policy_result, _ = evaluate_policy(current, config, PolicyState(), current.taken_at_ns)
    for knob, value in ((Knob.IDLE, "1"), (Knob.WEIGHT, "1")):
        had = dict.fromkeys(managed_cgroups(current.pods), frozenset({knob}))
        result = {d.cgroup: d.value for d in compose_decisions(policy_result, current, had) if d.knob is knob}
        assert (result.get(ROOT) == value) == idle
        assert result[f"{ROOT}/b/c"] == value


@pytest.mark.parametrize(
    "root", ["/kubepods/besteffort", "/kubepods.slice/kubepods-besteffort.slice", "/k-kubepods.slice"]
)
def test_a_reclaim_root_that_is_a_qos_class_is_not_idle_where_the_kubelet_could_not_restart(root: str) -> None:
    """The kernel would reject the shares of an idle cgroup."""
    batch = replace(BATCH, containers=(Container(name="b", cgroup=f"{root}/b/c"),))
    current = snapshot(0, [batch, WEB])
    groups = {
        path: CgroupSample(path=path, id=50 + i, threads=2) for i, path in enumerate((root, f"{root}/b", f"{root}/b/c"))
    }
    current = replace(current, cgroups={**current.cgroups, **groups})
    policy_result, _ = evaluate_policy(
        current, settings(f"memory: {{reclaimRoot: {root}}}"), PolicyState(), current.taken_at_ns
    )
    knobs = dict.fromkeys(groups, frozenset({Knob.IDLE, Knob.WEIGHT}))
    result = {
        d.cgroup: d.knob for d in compose_decisions(policy_result, current, knobs) if d.knob in (Knob.IDLE, Knob.WEIGHT)
    }
    assert result == {f"{root}/b/c": Knob.IDLE}


def test_a_refused_pod_is_not_isolated() -> None:
    """Pod db has nine runnable tasks on its one core, which would isolate other pods; it shares CPUs in any case."""
    config = settings("advisor: {policy: canonical, provision: {isolation: {enabled: true, lockInRounds: 1}}}")
    db = dedicated("db", cpu_request=1.0)
    webs = [shared(f"w{n}", cpu_request=4.0) for n in range(4)]
    idle, busy = (ThreadStates(runnable=count, uninterruptible=0, iowait=None, sleeping=0) for count in (0, 9))
    cycles = []
    for second in range(40):
        pods = [db, *webs, BATCH]
        shot = snapshot(second, pods, machine=32, usage_s={each.name: 0.5 * second for each in pods})
        cgroups = {
            path: replace(item, threads_by_state=busy if path == "/db" else idle) for path, item in shot.cgroups.items()
        }
        cycles.append(replace(shot, cgroups=cgroups))
    advice = advice_of(evaluate_cycles(cycles, config)[0][-1])
    assert {pool.name for pool in advice.pools} == {"share", "reclaim"}


POD_PATHS = ("/kubepods", "/kubepods/burstable/web", "/kubepods/besteffort/b")


def node_below(second: int, kubepods: str | None, cpus: int = 48) -> Snapshot:
    """Return a node of 48 CPUs of which /kubepods has these; web requests 8 CPUs and uses 4, batch uses all it gets."""
    pods = [
        Pod(uid=name, namespace="default", name=name, qos=qos, containers=(Container(name=name, cgroup=path, **asks),))
        for name, qos, path, asks in (
            ("web", QoSLevel.SHARED, POD_PATHS[1], {"cpu_request_cores": 8.0}),
            ("b", QoSLevel.RECLAIMED, POD_PATHS[2], {}),
        )
    ]
    current = snapshot(second, pods, machine=topology(cpus, sockets=2))
    cgroups = {
        path: CgroupSample(path=path, id=number, cpu_usage_ns=second * used * S)
        for number, (path, used) in enumerate(zip(POD_PATHS, (14, 4, 10), strict=True), 2)
    }
    return confined(replace(current, cgroups={**current.cgroups, **cgroups}), {"/kubepods": kubepods})


def run_cycles(kubepods: Iterable[str | None], text: str) -> list[tuple[Snapshot, PolicyResult]]:
    cycles = [node_below(second, cpus) for second, cpus in enumerate(kubepods)]
    return list(zip(cycles, evaluate_cycles(cycles, settings(text))[0], strict=True))


@pytest.mark.parametrize("policy", ["canonical", "latency"])
def test_cpus_outside_of_the_allowed_set_are_not_assigned(policy: str) -> None:
    for current, policy_result in run_cycles(["0-23"] * 3, f"advisor: {{policy: {policy}}}"):
        advice = advice_of(policy_result)
        pools = {pool.name: set(pool.cpus) for pool in advice.pools}
        assert set().union(*pools.values()) == set(range(24))
        assert sum(size.cpus for size in advice.cpu.sizes) == 24
        assert advice.reclaimable_cores <= 24
        assert (headroom_of(policy_result).cores or 0) <= 24
        assert "/kubepods limits pods to CPUs 0-23 of the node's 48." in advice.reason.text
        assert len(current.topology.cpus) == 48
        result = cpusets(current, policy_result)
        if policy == "canonical":
            assert pools["share"] & pools["reclaim"] == set()
            assert {path: set(parse_cpu_list(text)) for path, text in result.items()} == {
                POD_PATHS[1]: pools["share"], POD_PATHS[2]: pools["reclaim"],
            }  # fmt: skip
        else:
            assert result == {}, "a pod that may use all CPUs has no list of its own"


def test_a_change_of_the_allowed_cpus_is_followed_in_both_directions() -> None:
    cycles = run_cycles(["0-47", "0-47", "4-11", "4-11", "0-47"], CANONICAL)
    sizes = []
    for _, result in cycles:
        cpus = [cpu for pool in advice_of(result).pools for cpu in pool.cpus]
        assert len(cpus) == len(set(cpus))
        sizes.append((min(cpus), max(cpus), len(cpus)))
    assert sizes == [(0, 47, 48)] * 2 + [(4, 11, 8)] * 2 + [(0, 47, 48)]


@pytest.mark.parametrize("missing", [None, ""])
def test_unreadable_allowed_cpus_stay_as_they_were(missing: str | None) -> None:
    cycles = run_cycles([missing, "0-23", missing, missing], CANONICAL)
    sizes = [sum(len(pool.cpus) for pool in advice_of(result).pools) for _, result in cycles]
    assert sizes == [48, 24, 24, 24]


@pytest.mark.parametrize(
    ("lists", "before", "expected"),
    [
        ({"/kubepods": "0-3"}, None, ("/kubepods", "0-3")),
        ({"/": "0-3"}, None, None),  # what is online
        # what only one of them is below says nothing of the other
        ({"/kubepods": "0-7", "/kubepods/burstable": "0-3"}, None, ("/kubepods", "0-7")),
        ({}, ("/kubepods", "1-2"), ("/kubepods", "1-2")),
        ({}, ("/elsewhere", "1-2"), None),
        ({"/kubepods": "x"}, None, None),
    ],
)
def test_source_of_the_allowed_cpus(
    lists: Mapping[str, str | None], before: tuple[str, str] | None, expected: tuple[str, str] | None
) -> None:
    current = confined(node_below(0, None), lists)
    state = None if before is None else AllowedCpus(cgroup=before[0], cpus=parse_cpu_list(before[1]))
    result = allowed_cpus_of(current, state)
    assert (None if result is None else (result.cgroup, format_cpu_list(result.cpus))) == expected


def test_an_unreadable_parent_is_skipped_for_the_next_one() -> None:
    current = node_below(0, "0-5")
    alone = replace(current, pods=current.pods[:1])
    assert allowed_cpus_of(alone, None) == AllowedCpus(cgroup="/kubepods", cpus=tuple(range(6)))
    assert allowed_cpus_of(replace(current, pods=()), None) is None

"""Which CPUs whole rounds leave to whom: those that are somebody's alone, and those that no pod may have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import pytest

from agent.advisor.engine import PolicyState, evaluate_policy
from agent.config.config import AgentConfig
from agent.config.loader import parse_config
from agent.qrm.cpuset.allowed_cpus import AllowedCpus, allowed_cpus_of
from agent.qrm.decisions.compose import PolicyResult, compose_decisions
from agent.qrm.decisions.cpu import managed_cgroups
from api.cpu import format_cpu_list, parse_cpu_list
from api.knobs import Knob
from api.measurements import CgroupLimits, ThreadStates
from api.pod import Container, Pod
from api.qos import Enhancements, QoSLevel
from api.snapshot import CgroupSample, Snapshot
from tests.agent.advisor.builders import S, pod, snapshot, topology


def settings(text: str) -> AgentConfig:
    return parse_config(text.encode(), "test.yaml")


def confined(seen: Snapshot, lists: Mapping[str, str | None]) -> Snapshot:
    """The same with these CPU lists in force, by cgroup; cgroups that are not there are made."""
    cgroups = dict(seen.cgroups)
    for path, cpus in lists.items():
        sample = cgroups.get(path, CgroupSample(path=path, id=50 + len(cgroups)))
        cgroups[path] = msgspec.structs.replace(sample, limits=CgroupLimits(cpus=cpus))
    return msgspec.structs.replace(seen, cgroups=cgroups)


def cpusets(seen: Snapshot, judged: PolicyResult) -> dict[str, str]:
    knobs = dict.fromkeys(managed_cgroups(seen.pods), frozenset(Knob))
    return {d.cgroup: d.value for d in compose_decisions(judged, seen, knobs) if d.knob is Knob.CPUSET}


CANONICAL = "advisor: {policy: canonical}"
DB, BATCH, WEB = pod("db", QoSLevel.DEDICATED, request=2.0), pod("b", QoSLevel.RECLAIMED), pod("web", QoSLevel.SHARED)


def test_suppressed_pods_get_no_cpus_that_are_for_others_alone() -> None:
    """8 x 65 % without load is 6 CPUs; 0 and 1 serve interrupts, 2 is the system's, and two are db's by its own cpuset."""
    config = settings(
        "advisor: {policy: none}\n"
        "placing: {interruptCpuList: '0-1', reservedCpuList: '2'}\n"
        "knobs: {suppress: {policy: cpuset}}\n"
    )
    known, found = PolicyState(), dict[str, str]()
    for second in range(6):
        seen = confined(snapshot(second, [DB, BATCH], cpus=8, usage_s={"db": 0.0, "b": 0.0}), {"/db": "3-4"})
        seen = msgspec.structs.replace(seen, node=msgspec.structs.replace(seen.node, cpu=seen.node.per_cpu[0]))
        judged, known = evaluate_policy(seen, config, known, seen.taken_at_ns)
        found = cpusets(seen, judged)
    assert found == {"/b": "5-7"}


def test_a_dedicated_pod_that_was_refused_its_own_cpus_is_provided_for_where_it_runs() -> None:
    """Without numa_binding it runs with the shared pods: CPUs that nobody runs on would be set aside for it otherwise."""
    known, config = PolicyState(), settings(CANONICAL)
    for second in range(4):
        seen = snapshot(second, [DB, BATCH, WEB], cpus=8, usage_s={"db": 2.0 * second, "web": 1.0 * second, "b": 0.0})
        judged, known = evaluate_policy(seen, config, known, seen.taken_at_ns)
    assert judged.advice is not None
    assert judged.advice.rejected["default/db"].rule == "dedicated_needs_numa_binding"
    assert {size.pool for size in judged.advice.cpu.sizes} == {"share", "reclaim"}
    share = next(each for each in judged.advice.cpu.regions if each.region.pool == "share")
    assert set(share.region.pods) == {"default/db", "default/web"}
    pools = {pool.name: pool.cpus for pool in judged.advice.pools}
    assert pools.keys() == {"share", "reclaim"}
    assert sum(len(cpus) for cpus in pools.values()) == 8
    assert judged.placement is not None
    assert judged.placement.cpus["/db"] == pools["share"]


def test_pods_on_the_cpus_of_one_that_owns_them_all_keep_off_those_that_it_lends() -> None:
    """One NUMA node of 20 CPUs is the first pod's alone; the second has nowhere else, and a quarter is reclaimed pods'. Where
    priority keeps them apart, none of it is taken from online pods."""
    enhancements = Enhancements(numa_binding=True, numa_exclusive=True)
    alone = msgspec.structs.replace(pod("db", QoSLevel.DEDICATED), enhancements=enhancements)
    known = PolicyState()
    for second in range(3):
        seen = snapshot(second, [alone, WEB, BATCH], cpus=20, usage_s={"db": 0.0, "web": 0.0, "b": 0.0})
        judged, known = evaluate_policy(seen, settings(CANONICAL), known, seen.taken_at_ns)
    assert judged.advice is not None
    pools = {pool.name: set(pool.cpus) for pool in judged.advice.pools}
    assert len(pools["reclaim"]) == 5
    assert pools["share"] == set(range(20)) - pools["reclaim"]
    for second in range(3):
        seen = snapshot(second, [alone, WEB, BATCH], cpus=20, usage_s={"db": 0.0, "web": 0.0, "b": 0.0})
        judged, known = evaluate_policy(seen, AgentConfig(), PolicyState() if second == 0 else known, seen.taken_at_ns)
    assert judged.placement is not None
    assert judged.placement.cpus["/web"] == tuple(range(20))


def test_a_refused_binding_leaves_no_pool_where_the_pod_is_not() -> None:
    """12 CPUs fit on neither node of 8: db runs with the others, and nothing is set aside on the node that it names."""
    asks = msgspec.structs.replace(
        pod("db", QoSLevel.DEDICATED, request=12.0), enhancements=Enhancements(numa_binding=True), bound_numa=(0,)
    )
    known = PolicyState()
    for second in range(4):
        seen = snapshot(
            second, [asks, WEB, BATCH], cpus=topology(16, numa=2), usage_s={"db": 0.0, "web": 0.0, "b": 0.0}
        )
        judged, known = evaluate_policy(seen, settings(CANONICAL), known, seen.taken_at_ns)
    assert judged.advice is not None
    assert judged.advice.rejected.keys() == {"default/db"}
    assert {pool.name for pool in judged.advice.pools} == {"share", "reclaim"}


ROOT = "/offline"


@pytest.mark.parametrize(
    ("beside", "threads", "idle"),
    [
        (f"{ROOT}/b/sandbox", 1, True),  # the pod's own
        (f"{ROOT}/proxy/c", 12, False),
        (f"{ROOT}/proxy/c", 0, True),
        (f"{ROOT}/proxy/c", None, False),
        ("/offline-0/other", 3, True),  # another root
    ],
)
def test_a_reclaim_root_yields_as_a_whole_if_nobody_else_is_in_it(beside: str, threads: int | None, idle: bool) -> None:
    batch = msgspec.structs.replace(BATCH, containers=(Container(name="b", cgroup=f"{ROOT}/b/c"),))
    seen = snapshot(0, [batch, WEB])
    paths = {
        ROOT: 3,
        f"{ROOT}/b": 3,
        f"{ROOT}/b/c": 2,
        beside.rpartition("/")[0]: threads,
        beside: threads,
    }
    groups = {path: CgroupSample(path=path, id=50 + i, threads=n) for i, (path, n) in enumerate(paths.items())}
    seen = msgspec.structs.replace(seen, cgroups={**seen.cgroups, **groups})
    config = settings(f"memory: {{reclaimRoot: {ROOT}}}")
    judged, _ = evaluate_policy(seen, config, PolicyState(), seen.taken_at_ns)
    for knob, value in ((Knob.IDLE, "1"), (Knob.WEIGHT, "1")):
        had = dict.fromkeys(managed_cgroups(seen.pods), frozenset({knob}))
        found = {d.cgroup: d.value for d in compose_decisions(judged, seen, had) if d.knob is knob}
        assert (found.get(ROOT) == value) == idle
        assert found[f"{ROOT}/b/c"] == value


@pytest.mark.parametrize(
    "root", ["/kubepods/besteffort", "/kubepods.slice/kubepods-besteffort.slice", "/k-kubepods.slice"]
)
def test_what_the_kubelet_writes_shares_to_is_never_idle(root: str) -> None:
    """The kernel would refuse them, and a kubelet that is refused does not start."""
    batch = msgspec.structs.replace(BATCH, containers=(Container(name="b", cgroup=f"{root}/b/c"),))
    seen = snapshot(0, [batch, WEB])
    groups = {
        path: CgroupSample(path=path, id=50 + i, threads=2) for i, path in enumerate((root, f"{root}/b", f"{root}/b/c"))
    }
    seen = msgspec.structs.replace(seen, cgroups={**seen.cgroups, **groups})
    judged, _ = evaluate_policy(seen, settings(f"memory: {{reclaimRoot: {root}}}"), PolicyState(), seen.taken_at_ns)
    knobs = dict.fromkeys(groups, frozenset({Knob.IDLE, Knob.WEIGHT}))
    found = {d.cgroup: d.knob for d in compose_decisions(judged, seen, knobs) if d.knob in (Knob.IDLE, Knob.WEIGHT)}
    assert found == {f"{root}/b/c": Knob.IDLE}


def test_a_refused_pod_is_not_kept_apart_where_it_is_not() -> None:
    """db has nine tasks to run on its one core, which keeps others apart; it runs with all of them in any case."""
    config, known = (
        settings("advisor: {policy: canonical, provision: {isolation: {enabled: true, lockInRounds: 1}}}"),
        PolicyState(),
    )
    db = pod("db", QoSLevel.DEDICATED, request=1.0)
    webs = [pod(f"w{n}", QoSLevel.SHARED, request=4.0) for n in range(4)]
    for second in range(40):
        seen = snapshot(second, [db, *webs, BATCH], cpus=32, usage_s={p.name: 0.5 * second for p in (db, *webs, BATCH)})
        busy = {
            path: msgspec.structs.replace(
                one,
                threads_by_state=ThreadStates(
                    runnable=9 if path == "/db" else 0, uninterruptible=0, iowait=None, sleeping=0
                ),
            )
            for path, one in seen.cgroups.items()
        }
        judged, known = evaluate_policy(msgspec.structs.replace(seen, cgroups=busy), config, known, seen.taken_at_ns)
    assert judged.advice is not None
    assert {pool.name for pool in judged.advice.pools} == {"share", "reclaim"}


POD_PATHS = ("/kubepods", "/kubepods/burstable/web", "/kubepods/besteffort/b")


def node_below(second: int, kubepods: str | None, cpus: int = 48) -> Snapshot:
    """48 CPUs of which /kubepods has these; web asks for 8 CPUs and uses 4, batch as much as it gets."""
    pods = [
        Pod(uid=name, namespace="default", name=name, qos=qos, containers=(Container(name=name, cgroup=path, **asks),))
        for name, qos, path, asks in (
            ("web", QoSLevel.SHARED, POD_PATHS[1], {"cpu_request_cores": 8.0}),
            ("b", QoSLevel.RECLAIMED, POD_PATHS[2], {}),
        )
    ]
    seen = snapshot(second, pods, cpus=topology(cpus, numa=2))
    cgroups = {
        path: CgroupSample(path=path, id=number, cpu_usage_ns=second * used * S)
        for number, (path, used) in enumerate(zip(POD_PATHS, (14, 4, 10), strict=True), 2)
    }
    return confined(msgspec.structs.replace(seen, cgroups={**seen.cgroups, **cgroups}), {"/kubepods": kubepods})


def told(kubepods: Iterable[str | None], text: str) -> list[tuple[Snapshot, PolicyResult]]:
    config, known, found = settings(text), PolicyState(), []
    for second, cpus in enumerate(kubepods):
        seen = node_below(second, cpus)
        judged, known = evaluate_policy(seen, config, known, seen.taken_at_ns)
        found.append((seen, judged))
    return found


@pytest.mark.parametrize("policy", ["canonical", "latency"])
def test_cpus_that_no_pod_may_have_are_nobodys(policy: str) -> None:
    for seen, judged in told(["0-23"] * 3, f"advisor: {{policy: {policy}}}"):
        assert judged.advice is not None
        assert judged.advice.headroom is not None
        pools = {pool.name: set(pool.cpus) for pool in judged.advice.pools}
        assert set().union(*pools.values()) == set(range(24))
        assert sum(size.cpus for size in judged.advice.cpu.sizes) == 24
        assert judged.advice.reclaimable_cores <= 24
        assert (judged.advice.headroom.cores or 0) <= 24
        assert "/kubepods limits pods to CPUs 0-23 of the node's 48." in judged.advice.reason.text
        assert len(seen.topology.cpus) == 48
        found = cpusets(seen, judged)
        if policy == "canonical":
            assert pools["share"] & pools["reclaim"] == set()
            assert {path: set(parse_cpu_list(text)) for path, text in found.items()} == {
                POD_PATHS[1]: pools["share"], POD_PATHS[2]: pools["reclaim"],
            }  # fmt: skip
        else:
            assert found == {}, "who may use all that there is has no list of its own"


def test_a_ceiling_that_comes_down_while_the_agent_runs_takes_everybody_with_it_and_lets_them_up_again() -> None:
    rounds = told(["0-47", "0-47", "4-11", "4-11", "0-47"], CANONICAL)
    sizes = []
    for _, judged in rounds:
        assert judged.advice is not None
        cpus = [cpu for pool in judged.advice.pools for cpu in pool.cpus]
        assert len(cpus) == len(set(cpus))
        sizes.append((min(cpus), max(cpus), len(cpus)))
    assert sizes == [(0, 47, 48)] * 2 + [(4, 11, 8)] * 2 + [(0, 47, 48)]


@pytest.mark.parametrize("missing", [None, ""])
def test_a_ceiling_that_cannot_be_read_is_not_zero_cpus_and_stays_as_it_was(missing: str | None) -> None:
    sizes = []
    for _, judged in told([missing, "0-23", missing, missing], CANONICAL):
        assert judged.advice is not None
        sizes.append(sum(len(pool.cpus) for pool in judged.advice.pools))
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
def test_whose_cpus_are_above_all_pods(
    lists: Mapping[str, str | None], before: tuple[str, str] | None, expected: tuple[str, str] | None
) -> None:
    seen = confined(node_below(0, None), lists)
    known = None if before is None else AllowedCpus(cgroup=before[0], cpus=parse_cpu_list(before[1]))
    found = allowed_cpus_of(seen, known)
    assert (None if found is None else (found.cgroup, format_cpu_list(found.cpus))) == expected


def test_one_pod_below_another_group_that_is_not_read_has_the_next_one_s() -> None:
    seen = node_below(0, "0-5")
    alone = msgspec.structs.replace(seen, pods=seen.pods[:1])
    assert allowed_cpus_of(alone, None) == AllowedCpus(cgroup="/kubepods", cpus=tuple(range(6)))
    assert allowed_cpus_of(msgspec.structs.replace(seen, pods=()), None) is None

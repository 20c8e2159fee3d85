"""The lowest CPU priority is written where the competitors of a reclaimed pod are siblings, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from agent.advisor.engine import PolicyState, evaluate_policy
from agent.advisor.policy_result import PolicyResult
from agent.config.config import AgentConfig
from agent.config.kubelet import KubeletConfig
from agent.config.qrm import KnobsConfig
from agent.qrm.decisions.cpu import compose_decisions, managed_cgroups
from agent.qrm.decisions.cpu_priority import priority_health, yield_reason
from api.decision import Decision, Outcome, OutcomeStatus
from api.knobs import Knob
from api.pod import Container, Pod
from api.qos import QoSLevel
from api.snapshot import CgroupSample, ComponentHealth, Machine, Snapshot
from tests.builders.pods import pod, reclaimed, shared
from tests.builders.snapshots import snapshot

V1, SLICES = "/kubepods", "/kubepods.slice"
SYSTEMD = Machine(cgroup_version="v2", systemd_version=252)
UID = "1234-ab"


def class_cgroup(root: str, qos: str) -> str:
    return f"{SLICES}/kubepods-{qos}.slice" if root == SLICES else f"{V1}/{qos}"


def pod_cgroup(root: str, qos: str, uid: str) -> str:
    if root == V1:
        return f"{class_cgroup(root, qos) if qos else V1}/pod{uid}"
    name = f"kubepods-{qos}-pod" if qos else "kubepods-pod"
    return f"{class_cgroup(root, qos) if qos else SLICES}/{name}{uid.replace('-', '_')}.slice"


def on(root: str, qos: str, which: Pod) -> Pod:
    """Return the pod with a uid and a container where a kubelet would place it."""
    uid = f"{UID}-{which.name}"
    container = replace(which.containers[0], cgroup=f"{pod_cgroup(root, qos, uid)}/c")
    return replace(which, uid=uid, containers=(container,))


def observe(
    pods: Sequence[Pod], machine: Machine = SYSTEMD, *, also: dict[str, int | None] | None = None, seconds: float = 10
) -> Snapshot:
    """Return a snapshot with the cgroups above the pods' containers, and those of `also` by their number of tasks."""
    observed = snapshot(seconds, pods, machine=4)
    tasks = {path: 2 for path in observed.cgroups if path != "/"} | (also or {})
    cgroups = dict(observed.cgroups)
    for path in tasks:
        above = path
        while above:
            count = tasks.get(above, 5)
            number = 1000 + len(cgroups)
            cgroups[above] = CgroupSample(
                path=above, id=cgroups[above].id if above in cgroups else number, threads=count
            )
            above = above.rpartition("/")[0]
    return replace(observed, cgroups=cgroups, node=replace(observed.node, machine=machine))


def decide(
    observed: Snapshot,
    knobs: frozenset[Knob] = frozenset(Knob),
    *,
    idle_class: bool | None = None,
    short_slices: bool = True,
) -> tuple[PolicyResult, tuple[Decision, ...]]:
    config = AgentConfig(kubelet=KubeletConfig(idle_class=idle_class), knobs=KnobsConfig(short_slices=short_slices))
    result, _ = evaluate_policy(observed, config, PolicyState(), observed.taken_at_ns)
    return result, compose_decisions(
        result, observed, dict.fromkeys(managed_cgroups(observed.pods, observed.cgroups), knobs)
    )


def priorities(
    observed: Snapshot, knobs: frozenset[Knob] = frozenset(Knob), *, idle_class: bool | None = None
) -> dict[str, str]:
    """Return the decided `cpu.idle` and `cpu.weight`, by cgroup."""
    decisions = decide(observed, knobs, idle_class=idle_class)[1]
    return {d.cgroup: f"{d.knob.value}={d.value}" for d in decisions if d.knob in (Knob.IDLE, Knob.WEIGHT)}


def health(observed: Snapshot) -> tuple[ComponentHealth, ...]:
    result, decisions = decide(observed)
    return priority_health(observed, decisions, result.idle_class_obstacles)


@pytest.mark.parametrize("root", [V1, SLICES])
@pytest.mark.parametrize("qos", ["", "burstable"])
def test_a_reclaimed_pod_gets_the_priority_at_the_level_of_its_siblings(root: str, qos: str) -> None:
    batch, web = on(root, qos, reclaimed("batch")), on(root, qos, shared("web"))
    batch = replace(batch, containers=(*batch.containers, Container(name="d", cgroup=f"{pod_of(batch)}/d")))
    observed = observe([batch, web])
    assert priorities(observed) == {pod_of(batch): "cpu.idle=1"}, "the containers keep their weights against each other"
    (decision,) = [d for d in decide(observed)[1] if d.knob is Knob.IDLE]
    assert (decision.pod, decision.cgroup_id) == ("default/batch", observed.cgroups[pod_of(batch)].id)
    parent = pod_of(batch).rpartition("/")[0]
    assert f"wakes up in another child of {parent} interrupts the tasks of this cgroup" in decision.reason.text
    assert f"A task outside of {parent} does not interrupt them." in decision.reason.text
    assert health(observed) == ()


@pytest.mark.parametrize(
    ("knob", "text"),
    [
        (
            Knob.IDLE,
            (
                "A task that wakes up in another child of / interrupts the tasks of this cgroup on its CPU, unless that child "
                "has cpu.idle as well."
            ),
        ),
        (
            Knob.WEIGHT,
            "This cgroup has the lowest weight of the children of /, because this kernel has no cpu.idle (Linux 5.15).",
        ),
    ],
)
def test_nothing_is_outside_of_the_root(knob: Knob, text: str) -> None:
    assert yield_reason("/", knob).text == text


def pod_of(which: Pod) -> str:
    return which.containers[0].cgroup.rpartition("/")[0]


def test_before_cpu_idle_the_pod_gets_the_minimum_weight() -> None:
    batch, web = on(V1, "burstable", reclaimed("batch")), on(V1, "burstable", shared("web"))
    assert priorities(observe([batch, web]), frozenset(Knob) - {Knob.IDLE}) == {pod_of(batch): "cpu.weight=1"}


def test_before_cpu_idle_a_best_effort_pod_keeps_the_weight_of_the_kubelet() -> None:
    """It has the kernel's minimum of 2 shares; the minimum in weights is 10 shares, more than that of its siblings."""
    batch, web = on(V1, "besteffort", reclaimed("batch")), on(V1, "besteffort", shared("web"))
    assert priorities(observe([batch, web]), frozenset(Knob) - {Knob.IDLE}) == {}


def best_effort(root: str = SLICES) -> tuple[Pod, Pod]:
    return on(root, "besteffort", reclaimed("batch")), on(root, "burstable", shared("web"))


def slices(observed: Snapshot) -> list[Decision]:
    return [decision for decision in decide(observed)[1] if decision.knob is Knob.SLICE]


def test_threads_of_a_best_effort_class_that_is_not_idle_have_short_slices() -> None:
    batch, web = best_effort(V1)
    batch = replace(batch, containers=(*batch.containers, Container(name="d", cgroup=f"{pod_of(batch)}/d")))
    observed = observe([batch, web, on(V1, "", shared("db"))])
    decided = slices(observed)
    assert [(d.cgroup, d.cgroup_id, d.pod, d.value) for d in decided] == [
        (c.cgroup, observed.cgroups[c.cgroup].id, "default/batch", "100001") for c in batch.containers
    ]
    assert decided[0].reason.text == (
        f"{V1}/besteffort is not idle, so default/web and 1 more may have to wait until the slice of a reclaimed thread "
        "ends. Reclaimed threads therefore have slices of 0.1 ms."
    )
    assert decided[0].reason.inputs == {"slice_ns": 100_001, "online_pod": "default/web"}


def test_slices_stay_as_they_are_where_they_would_not_help() -> None:
    """An idle class; no online pod outside; a class with more weight; an old kernel; the default setting."""
    assert slices(observe(best_effort())) == []
    assert slices(observe([on(V1, "besteffort", reclaimed("batch"))])) == []
    assert slices(observe([on(V1, "besteffort", reclaimed("batch")), on(V1, "besteffort", shared("web"))])) == []
    mixed = [on(SLICES, "burstable", reclaimed("b")), on(SLICES, "burstable", shared("w")), on(SLICES, "", shared("d"))]
    assert slices(observe(mixed)) == []
    for decided in (
        decide(observe(best_effort(V1)), frozenset(Knob) - {Knob.SLICE})[1],
        decide(observe(best_effort(V1)), short_slices=False)[1],
    ):
        assert [d for d in decided if d.knob is Knob.IDLE]
        assert not [d for d in decided if d.knob is Knob.SLICE]


@pytest.mark.parametrize(
    ("status", "error", "text", "remedy"),
    [
        (
            OutcomeStatus.APPLIED,
            "",
            "has the lowest weight of its siblings, and its threads have slices of 0.1 ms",
            "systemd",
        ),
        (
            OutcomeStatus.REFUSED,
            "thread 7 cannot: add SYS_NICE",
            "batch/c keep the default slice: thread 7 cannot",
            "; or add SYS_NICE",
        ),
        (OutcomeStatus.DRY_RUN, "", "would not restart while the class is idle", "systemd"),
    ],
)
def test_the_component_reports_what_holds_instead(status: OutcomeStatus, error: str, text: str, remedy: str) -> None:
    observed = observe(best_effort(V1))
    result, decisions = decide(observed)
    outcomes = [Outcome(decision=decision, status=status, error=error) for decision in slices(observed)]
    (failed,) = priority_health(observed, decisions, result.idle_class_obstacles, outcomes)
    assert text in failed.error
    assert remedy in failed.remedy
    # The alert about sources leaves out what a node cannot have; a refused write can be fixed.
    assert failed.detail == ("" if status is OutcomeStatus.REFUSED else "absent")


def test_a_qos_class_with_reclaimed_pods_only_is_idle_with_the_systemd_driver() -> None:
    batch, web = best_effort()
    path = class_cgroup(SLICES, "besteffort")
    observed = observe([batch, web])
    assert priorities(observed) == {pod_of(batch): "cpu.idle=1", path: "cpu.idle=1"}
    (decision,) = [d for d in decide(observed)[1] if d.cgroup == path]
    assert (decision.pod, decision.reason.rule) == ("", "yield_to_online")
    assert f"wakes up in another child of {SLICES} interrupts" in decision.reason.text
    assert health(observed) == ()


@pytest.mark.parametrize(
    ("machine", "reason", "remedy"),
    [
        (Machine(cgroup_version="hybrid", systemd_version=252), "would not restart", "cgroupDriver: systemd"),
        (Machine(cgroup_version="v2", systemd_version=249), "with systemd 249", "upgrade systemd to 252"),
        (Machine(cgroup_version="v2"), "the version here is unknown", "set kubelet.idleClass to true"),
        (Machine(), "would not restart", "use cgroup version 2"),
    ],
)
def test_a_class_is_not_idle_where_the_kubelet_could_not_restart(machine: Machine, reason: str, remedy: str) -> None:
    batch, web = best_effort()
    observed = observe([batch, web], machine)
    assert priorities(observed) == {pod_of(batch): "cpu.idle=1"}
    (failed,) = health(observed)
    assert (failed.name, failed.ok) == ("pod-siblings", False)
    path = class_cgroup(SLICES, "besteffort")
    assert f"do not yield to default/web: CPU priority holds only between the children of {path}" in failed.error
    assert reason in failed.error
    assert remedy in failed.remedy


def test_a_class_of_the_cgroupfs_driver_is_never_idle() -> None:
    batch, web = best_effort(V1)
    observed = observe([batch, web], SYSTEMD)
    assert priorities(observed) == {pod_of(batch): "cpu.idle=1"}
    assert "cgroupDriver: systemd" in health(observed)[0].remedy


@pytest.mark.parametrize(
    ("version", "setting", "idle"),
    [(252, False, False), (252, True, True), (None, True, True), (None, None, False), (249, True, False)],
)
def test_an_owner_decides_where_the_version_of_systemd_is_unknown(
    version: int | None, *, setting: bool | None, idle: bool
) -> None:
    observed = observe(best_effort(), Machine(cgroup_version="v2", systemd_version=version))
    assert (class_cgroup(SLICES, "besteffort") in priorities(observed, idle_class=setting)) is idle


def test_a_pod_that_is_not_reclaimed_ends_the_idle_class_at_once() -> None:
    batch, web = best_effort()
    path = class_cgroup(SLICES, "besteffort")
    other = on(SLICES, "besteffort", pod("proxy", namespace="kube-system"))
    observed = observe([batch, web, other])
    assert priorities(observed) == {pod_of(batch): "cpu.idle=1"}
    (failed,) = health(observed)
    assert f"{path} does not get cpu.idle: it also contains kube-system/proxy, which is not reclaimed" in failed.error
    assert "CPU requests, which puts them into another QoS class" in failed.remedy


@pytest.mark.parametrize(
    ("uid", "tasks", "idle"), [("9", 1, False), ("9", None, False), ("9", 0, True), ("start", 1, True)]
)
def test_tasks_of_unlisted_pods_end_the_idle_class(uid: str, tasks: int | None, idle: bool) -> None:
    """The kubelet lists a pod before its containers: the sandbox of a reclaimed pod that is starting is known."""
    batch, web = best_effort()
    starting = replace(reclaimed("starting"), uid="start", containers=())
    sandbox = {f"{pod_cgroup(SLICES, 'besteffort', uid)}/pause": tasks}
    path = class_cgroup(SLICES, "besteffort")
    assert (path in priorities(observe([batch, web, starting], also=sandbox))) is idle


def test_a_mixed_class_leaves_guaranteed_pods_without_priority() -> None:
    """The class Burstable has an online pod, so its reclaimed pod has no priority against the Guaranteed one."""
    batch, web = on(SLICES, "burstable", reclaimed("batch")), on(SLICES, "burstable", shared("web"))
    db = on(SLICES, "", shared("db"))
    observed = observe([batch, web, db])
    assert priorities(observed) == {pod_of(batch): "cpu.idle=1"}
    (failed,) = health(observed)
    assert "do not yield to default/db" in failed.error
    assert "it also contains default/web" in failed.error


@pytest.mark.parametrize(
    ("online", "batch", "related"),
    [
        ("/web", "/batch", True),
        ("/a/web", "/a/batch", True),
        ("/a/b/web", "/a/batch", True),
        ("/web", "/a/batch", False),
    ],
)
def test_without_a_kubelet_the_container_gets_the_priority(online: str, batch: str, related: bool) -> None:
    observed = observe([reclaimed("batch", cgroup=batch), shared("web", cgroup=online)])
    assert priorities(observed) == {batch: "cpu.idle=1"}
    assert (health(observed) == ()) is related


def test_the_node_s_own_daemons_are_no_online_pods() -> None:
    """The agent itself is one, in another QoS class than the reclaimed pod."""
    batch = on(V1, "burstable", reclaimed("batch"))
    daemon = on(V1, "", pod("agent", QoSLevel.SYSTEM))
    assert health(observe([batch, daemon])) == ()


def test_a_pod_between_two_containers_keeps_its_priority() -> None:
    batch, web = on(SLICES, "burstable", reclaimed("batch")), on(SLICES, "burstable", shared("web"))
    waiting = replace(batch, containers=(), waiting=batch.containers)
    observed = observe([waiting, web], also={f"{pod_of(batch)}/pause": 1})
    assert priorities(observed) == {pod_of(batch): "cpu.idle=1"}
    assert pod_of(batch) in managed_cgroups(observed.pods, observed.cgroups)

"""What a snapshot says of the listed pods: where they are not as listed, the source says so with the remedy."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent.sensors.cgroup.schedstat import SchedstatRunqLatency
from agent.sensors.pods.pod_indicators import PodIndicatorScraper
from api.interfaces import Unavailable
from api.pod import Container, Pod
from api.qos import QoSLevel
from api.snapshot import RequestLatency, RunqLatency
from tests.agent.sensors import kernel_trees
from tests.agent.sensors.sensor_machine import WEB, Machine, status


class Silent(PodIndicatorScraper):
    """Seven pods that do not answer, and one answer from long ago."""

    def latest(self) -> Mapping[str, RequestLatency]:
        return {"n/0": RequestLatency(bounds_s=(1.0,), buckets=(1, 2), sum_s=3.0, sampled_at_ns=4)}

    def errors(self) -> Mapping[str, str]:
        return {f"n/{pod}": "no answer" for pod in range(7)}


def test_a_listed_cgroup_without_cpu_controller_is_named_with_the_remedy(machine: Machine) -> None:
    sensor = machine.sensor()
    assert "pod-controllers" not in {s.name for s in sensor.snapshot(1, 1, 1).sources}
    (machine.root / "cpu/web/cpu.stat").write_text("usage_usec 1\n")
    result = status(sensor.snapshot(2, 6_000_000_000, 2), "pod-controllers")
    assert (result.ok, result.error) == (False, "no cpu controller in /web")
    assert "echo +cpu > /sys/fs/cgroup/cgroup.subtree_control" in result.remedy


def test_the_last_good_pods_stay_and_the_reason_is_shown(machine: Machine) -> None:
    def refuse() -> tuple[Pod, ...]:
        raise Unavailable("pods.yaml: line 2: not YAML", "correct the file")

    sensor = machine.sensor()
    sensor.snapshot(1, 1, 1)
    machine.pods.answer = refuse
    snapshot = sensor.snapshot(2, 2, 2)
    assert snapshot.pods == (WEB,)
    pods = status(snapshot, "pods")
    assert (pods.ok, pods.error, pods.remedy) == (False, "pods.yaml: line 2: not YAML", "correct the file")


def test_pods_that_do_not_answer_are_named_and_old_answers_keep_their_time(machine: Machine) -> None:
    snapshot = machine.sensor(indicators=Silent()).snapshot(1, 1000, 1)
    assert snapshot.indicators["n/0"].sampled_at_ns == 4
    silent = status(snapshot, "indicator-pods")
    reported = "n/0: no answer; n/1: no answer; n/2: no answer; n/3: no answer; n/4: no answer; and 2 more"
    assert (silent.ok, silent.error) == (False, reported)


def test_schedstat_follows_the_pods(machine: Machine) -> None:
    kernel_trees.make(
        machine.root / "proc", {"self/schedstat": "1000 0 1\n", "11/schedstat": "5 700 2\n", "11/stat": "11 (a) S"}
    )
    kernel_trees.make(machine.root / "cpu/web", {"tasks": "11\n"})
    sensor = machine.sensor(SchedstatRunqLatency(machine.root / "proc", machine.hierarchy))
    snapshot = sensor.snapshot(1, 1, 1)
    assert snapshot.cgroups["/web"].wait == RunqLatency(sum_ns=700, count=2)
    assert snapshot.cgroups["/"].wait is None
    assert status(snapshot, "waits").detail == "schedstat"
    assert sensor.read_runq_latency({machine.web_id}) == {machine.web_id: RunqLatency(sum_ns=700, count=2)}
    assert sensor.read_runq_latency(()) == {}
    machine.pods.answer = lambda: ()
    assert sensor.snapshot(2, 2, 2).cgroups["/web"].wait is None


def test_a_listed_container_without_a_cgroup_is_reported_with_its_path(machine: Machine) -> None:
    lost = Pod(
        uid="l", namespace="default", name="lost", qos=QoSLevel.SHARED, containers=(Container(name="c", cgroup="/wob"),)
    )
    machine.pods.answer = lambda: (WEB, lost)
    status = next(s for s in machine.sensor().snapshot(1, 1, 1).sources if s.name == "pod-cgroups")
    assert (status.ok, status.error) == (False, "there is no cgroup /wob of default/lost")


def test_a_missing_cgroup_is_tolerated_for_the_patience_of_the_pod_source(machine: Machine) -> None:
    lost = Pod(
        uid="l", namespace="n", name="lost", qos=QoSLevel.SHARED, containers=(Container(name="c", cgroup="/wob"),)
    )
    sensor = machine.sensor(patience_ns=3)
    listed = [(lost,), (lost,), (lost,), (), (lost,), (lost,)]
    reported = []
    for at_ns, pods in zip((1, 3, 4, 5, 6, 8), listed, strict=True):
        machine.pods.answer = lambda pods=pods: pods
        reported.append("pod-cgroups" in {source.name for source in sensor.snapshot(at_ns, at_ns, at_ns).sources})
    assert reported == [False, False, True, False, False, False]


def test_five_of_many_such_containers_are_named(machine: Machine) -> None:
    """Seven of nodes with hundreds: the first five in the order of the pods file, and how many more."""
    created = tuple(Container(name="c", cgroup=f"/w{k}") for k in range(7))
    machine.pods.answer = lambda: (Pod(uid="l", namespace="n", name="lost", qos=QoSLevel.SHARED, containers=created),)
    result = status(machine.sensor().snapshot(1, 1, 1), "pod-cgroups")
    named = ", ".join(f"/w{k} of n/lost" for k in range(5))
    assert result.error == f"there is no cgroup {named}, and 2 more"


def test_what_pods_cannot_have_as_they_say_it_is_one_line(machine: Machine) -> None:
    pods = [msgspec.structs.replace(WEB, problems=problems) for problems in ((), ("annotation a: b; c",), ("d", "e"))]
    machine.pods.answer = lambda: tuple(pods)
    result = status(machine.sensor().snapshot(1, 1, 1), "pod-annotations")
    assert (result.ok, result.error) == (False, f"{WEB.key}: annotation a: b; c; and 2 more")
    machine.pods.answer = lambda: (WEB,)
    assert "pod-annotations" not in {s.name for s in machine.sensor().snapshot(1, 1, 1).sources}

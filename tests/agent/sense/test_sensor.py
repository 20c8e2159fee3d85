"""One snapshot from all sources: what each gives, and that one which fails costs its own part and is seen to fail."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from agent.sense.cgroups import CgroupReader
from agent.sense.indicators import Indicators
from agent.sense.node import NodeReader
from agent.sense.schedstat import SchedstatWaits
from agent.sense.sensor import Sensor
from api.facts import ThreadStates, Wait
from api.pods import Container, Pod
from api.ports import Probe, Seen, Unavailable, WaitSource
from api.qos import QoSLevel
from api.samples import CgroupSample, Indicator, Snapshot, SourceStatus
from tests.agent.sense import trees
from tests.agent.sense.machines import PROC

WEB = Pod(
    uid="u", namespace="default", name="web", qos=QoSLevel.SHARED, containers=(Container(name="web", cgroup="/web"),)
)


class Pods:
    """A PodSource that does what the test tells it."""

    def __init__(self) -> None:
        self.answer: Callable[[], tuple[Pod, ...]] = lambda: (WEB,)

    def read(self) -> tuple[Pod, ...]:
        return self.answer()


class Waits:
    """A WaitSource that knows every live cgroup, or does what the test tells it."""

    form = "tp_btf"

    def __init__(self) -> None:
        self.answer: Callable[[Mapping[int, str]], Mapping[int, Wait]] = lambda live: dict.fromkeys(
            live, Wait(sum_ns=5, count=1)
        )
        self.asked: list[tuple[Collection[int] | None, bool]] = []
        self.lost: Unavailable | None = None
        self.lost_events: int | None = None

    def read(
        self, live: Mapping[int, str], wanted: Collection[int] | None = None, *, complete: bool = True
    ) -> Mapping[int, Wait]:
        self.asked.append((wanted, complete))
        return self.answer(live)

    def problem(self) -> Unavailable | None:
        return self.lost

    def close(self) -> None:
        pass


class Seeing:
    """A Probe that has seen what the test tells it."""

    form = "tp_btf"

    def __init__(self, name: str, answer: Callable[[Mapping[int, str]], Seen]) -> None:
        self.name, self.answer = name, answer
        self.lost: Unavailable | None = None
        self.lost_events: int | None = None
        self.asked: list[bool] = []

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> Seen:
        self.asked.append(complete)
        return self.answer(live)

    def problem(self) -> Unavailable | None:
        return self.lost

    def close(self) -> None:
        pass


class Machine:
    """A hybrid machine with one cgroup, `/web`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        trees.make(root / "proc", PROC)
        trees.make(root / "sys", {"devices/system/cpu/online": "0-1\n"})
        self.hierarchy = trees.hybrid(root, (".", "web"), ("web",))
        self.pods, self.waits = Pods(), Waits()
        self.web_id = (root / "cpu/web").stat().st_ino

    def sensor(
        self,
        waits: WaitSource | None = None,
        indicators: Indicators | None = None,
        limit: int = 4096,
        probes: Sequence[Probe] = (),
    ) -> Sensor:
        return Sensor(
            cgroups=CgroupReader(self.hierarchy, limit=limit),
            node=NodeReader(self.root / "proc", self.root / "sys", live=False),
            sys=self.root / "sys",
            pods=self.pods,
            waits=waits or self.waits,
            indicators=indicators or Indicators(),
            probes=probes,
        )


class Silent(Indicators):
    """Five pods that do not answer, and one answer from long ago."""

    def latest(self) -> Mapping[str, Indicator]:
        return {"n/0": Indicator(bounds_s=(1.0,), buckets=(1, 2), sum_s=3.0, sampled_at_ns=4)}

    def errors(self) -> Mapping[str, str]:
        return {f"n/{pod}": "no answer" for pod in range(5)}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def status(snapshot: Snapshot, name: str) -> SourceStatus:
    (found,) = (source for source in snapshot.sources if source.name == name)
    return found


def test_everything_is_in_one_snapshot(machine: Machine) -> None:
    snapshot = machine.sensor().snapshot(7, 1000, 2000)
    assert (snapshot.seq, snapshot.taken_at_ns, snapshot.wall_time_ns, snapshot.boot_id) == (7, 1000, 2000, "b7c1")
    assert snapshot.topology.ids == (0, 1)
    assert snapshot.pods == (WEB,)
    assert snapshot.node.load == (0.84, 1.82, 1.08)
    assert snapshot.cgroups.keys() == {"/", "/web"}
    web = snapshot.cgroups["/web"]
    assert (web.id, web.cpu_usage_ns, web.wait) == (machine.web_id, 1_500_000_000, Wait(sum_ns=5, count=1))
    assert all(source.ok and source.duration_ns >= 0 for source in snapshot.sources)
    assert {source.name for source in snapshot.sources} == {
        "pods",
        "topology",
        "node",
        "cgroups",
        "waits",
        "indicators",
    }
    assert status(snapshot, "waits").detail == "tp_btf"
    assert msgspec.json.decode(msgspec.json.encode(snapshot), type=Snapshot) == snapshot


def test_a_cgroup_without_waits_has_none_and_not_zero(machine: Machine) -> None:
    machine.waits.answer = lambda live: {}
    assert machine.sensor().snapshot(1, 1, 1).cgroups["/web"].wait is None


def test_a_probe_is_asked_for_all_and_between_snapshots_for_what_is_wanted(machine: Machine) -> None:
    batch = msgspec.structs.replace(
        WEB, uid="b", name="batch", qos=QoSLevel.RECLAIMED, containers=(Container(name="b", cgroup="/batch"),)
    )
    trees.v1(machine.root, ("batch",))
    machine.pods.answer = lambda: (WEB, batch)
    sensor = machine.sensor()
    sensor.snapshot(1, 1, 1)
    sensor.read_waits({machine.web_id})
    assert machine.waits.asked == [(None, True), ({machine.web_id}, False)]


def test_a_list_with_gaps_is_not_called_complete(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_reader: CgroupReader, *_: int) -> dict[str, CgroupSample]:
        raise Unavailable("the root of the cgroup tree cannot be read", "mount it")

    trees.v1(machine.root, ("other",))
    machine.sensor(limit=2).snapshot(1, 1, 1)
    sensor = machine.sensor()
    sensor.snapshot(1, 1, 1)
    monkeypatch.setattr(CgroupReader, "read", refuse)
    assert not status(sensor.snapshot(2, 2, 2), "cgroups").ok
    assert [complete for _, complete in machine.waits.asked] == [False, True, False]


def test_switches_that_were_lost_turn_the_waits_bad_and_keep_the_rest(machine: Machine) -> None:
    machine.waits.lost = Unavailable("3 switches were not counted", "remove cgroups")
    snapshot = machine.sensor().snapshot(1, 1, 1)
    waits = status(snapshot, "waits")
    assert (waits.ok, waits.error, waits.remedy) == (False, "3 switches were not counted", "remove cgroups")
    assert waits.detail == "tp_btf"
    assert snapshot.cgroups["/web"].wait == Wait(sum_ns=5, count=1)


def test_what_was_lost_long_ago_is_counted_and_no_problem(machine: Machine) -> None:
    machine.waits.lost_events = 3
    waits = status(machine.sensor().snapshot(1, 1, 1), "waits")
    assert (waits.ok, waits.error, waits.lost_events) == (True, "", 3)


def test_a_zero_of_a_cgroup_without_cpu_controller_is_its_ancestors_and_not_known(machine: Machine) -> None:
    zero = Wait(sum_ns=0, count=0, slots=(0,) * 27)
    machine.waits.answer = lambda live: dict.fromkeys(live, zero)
    assert machine.sensor().snapshot(1, 1, 1).cgroups["/web"].wait == zero
    (machine.root / "cpu/web/cpu.stat").write_text("usage_usec 1\n")
    (machine.root / "unified/web/cpu.stat").write_text("usage_usec 1\n")
    assert machine.sensor().snapshot(1, 1, 1).cgroups["/web"].wait is None


def test_a_listed_cgroup_without_cpu_controller_is_named_with_the_remedy(machine: Machine) -> None:
    sensor = machine.sensor()
    assert "pod-controllers" not in {s.name for s in sensor.snapshot(1, 1, 1).sources}
    (machine.root / "cpu/web/cpu.stat").write_text("usage_usec 1\n")
    found = status(sensor.snapshot(2, 2, 2), "pod-controllers")
    assert (found.ok, found.error) == (False, "no cpu controller in /web")
    assert "echo +cpu > /sys/fs/cgroup/cgroup.subtree_control" in found.remedy


@pytest.mark.parametrize(
    ("online", "batch", "related"),
    [
        ("/web", "/batch", True),
        ("/a/web", "/a/batch", True),
        ("/a/b/web", "/a/batch", True),
        ("/web", "/a/batch", False),
    ],
)
def test_batch_work_that_gives_way_to_nobody_is_named(machine: Machine, online: str, batch: str, related: bool) -> None:
    pods = [
        msgspec.structs.replace(
            WEB, uid=qos.value, name=qos.value, qos=qos, containers=(Container(name="c", cgroup=path),)
        )
        for qos, path in ((QoSLevel.SHARED, online), (QoSLevel.RECLAIMED, batch))
    ]
    machine.pods.answer = lambda: tuple(pods)
    found = [s for s in machine.sensor().snapshot(1, 1, 1).sources if s.name == "pod-siblings"]
    assert (not found) is related
    if found:
        assert f"{batch} beside {online}" in found[0].error


def test_waits_that_cannot_be_had_say_why_in_every_snapshot(machine: Machine) -> None:
    def refuse(_live: Mapping[int, str]) -> Mapping[int, Wait]:
        raise Unavailable("the kernel refuses BPF", "grant CAP_BPF")

    machine.waits.answer = refuse
    sensor = machine.sensor()
    for seq in (1, 2):
        snapshot = sensor.snapshot(seq, seq, seq)
        waits = status(snapshot, "waits")
        assert (waits.ok, waits.error, waits.remedy) == (False, "the kernel refuses BPF", "grant CAP_BPF")
        assert snapshot.cgroups["/web"].wait is None
        assert status(snapshot, "cgroups").ok
    assert sensor.read_waits({machine.web_id}) == {}


STATES = ThreadStates(runnable=1, uninterruptible=0, iowait=0, sleeping=2)


def test_what_probes_have_seen_is_joined_with_everything_else(machine: Machine) -> None:
    """By id and field; a cgroup that is not there any more is nobody's, and waits are not disturbed."""
    first = Seeing("threads", lambda live: Seen({number: {"threads_by_state": STATES} for number in live}))
    web = {machine.web_id: {"oom_kills": 3}, 10**12: {"oom_kills": 9}}
    second = Seeing("oomkill", lambda live: Seen(web, {"softirq_ns": {0: {"NET_RX": 7}}}))
    snapshot = machine.sensor(probes=(first, second)).snapshot(1, 1, 1)
    sample = snapshot.cgroups["/web"]
    assert (sample.threads_by_state, sample.oom_kills, sample.wait) == (STATES, 3, Wait(sum_ns=5, count=1))
    assert sample.cpu_usage_ns == 1_500_000_000
    assert (snapshot.cgroups["/"].threads_by_state, snapshot.cgroups["/"].oom_kills) == (STATES, None)
    assert snapshot.node.softirq_ns == {0: {"NET_RX": 7}}
    assert snapshot.node.load == (0.84, 1.82, 1.08)
    assert [(source.name, source.ok, source.detail) for source in snapshot.sources[5:7]] == [
        ("threads", True, "tp_btf"),
        ("oomkill", True, "tp_btf"),
    ]
    assert [source.name for source in snapshot.sources[:5]] == ["pods", "topology", "node", "cgroups", "waits"]


def test_probes_may_come_and_change_while_it_runs(machine: Machine) -> None:
    probes: list[Probe] = []
    sensor = machine.sensor(probes=probes)
    assert sensor.snapshot(1, 1, 1).cgroups["/web"].oom_kills is None
    probes.append(Seeing("oomkill", lambda live: Seen({number: {"oom_kills": 1} for number in live})))
    assert sensor.snapshot(2, 2, 2).cgroups["/web"].oom_kills == 1


def test_a_probe_knows_whether_the_list_has_gaps(machine: Machine) -> None:
    probe = Seeing("threads", lambda live: Seen())
    machine.pods.answer = lambda: ()  # the cgroups of pods are never left out
    machine.sensor(limit=1, probes=(probe,)).snapshot(1, 1, 1)
    machine.sensor(probes=(probe,)).snapshot(1, 1, 1)
    assert probe.asked == [False, True]


def test_a_probe_that_fails_says_why_and_costs_only_its_part(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """Three ways: it cannot, it has a bug, and it works but has lost something."""

    def refuse(_live: Mapping[int, str]) -> Seen:
        raise Unavailable("the kernel refuses it", "boot another")

    def bug(_live: Mapping[int, str]) -> Seen:
        raise IndexError("row 3")

    lossy = Seeing("lossy", lambda live: Seen({number: {"oom_kills": 2} for number in live}))
    lossy.lost, lossy.lost_events = Unavailable("4 events were lost", "lose less"), 4
    probes = (Seeing("refused", refuse), Seeing("buggy", bug), lossy)
    sensor = machine.sensor(probes=probes)
    for seq in (1, 2):
        snapshot = sensor.snapshot(seq, seq, seq)
        refused, buggy, lost = (status(snapshot, probe.name) for probe in probes)
        assert (refused.ok, refused.error, refused.remedy) == (False, "the kernel refuses it", "boot another")
        assert (buggy.ok, buggy.error) == (False, "IndexError: row 3")
        assert "bug" in buggy.remedy
        assert (lost.ok, lost.error, lost.remedy) == (False, "4 events were lost", "lose less")
        assert (refused.lost_events, buggy.lost_events, lost.lost_events) == (None, None, 4)
        assert (snapshot.cgroups["/web"].oom_kills, snapshot.cgroups["/web"].wait) == (2, Wait(sum_ns=5, count=1))
    assert len(caplog.records) == 1, "the bug is logged once"


@pytest.mark.parametrize(
    ("seen", "named"),
    [
        (lambda number: Seen({number: {"oom_kills": 1, "oom_kils": 1}}), "oom_kils"),
        (lambda number: Seen({number: {"path": "/elsewhere"}}), "path"),
        (lambda number: Seen({number: {"wait": None}}), "wait"),
        (lambda _: Seen({}, {"softirqs": {}, "kswapd": {}}), "softirqs"),
    ],
)
def test_a_field_that_no_sample_has_is_the_probes_error(
    machine: Machine, seen: Callable[[int], Seen], named: str
) -> None:
    """None of what it says is believed then, and nothing else is lost."""
    sensor = machine.sensor(probes=(Seeing("strange", lambda _: seen(machine.web_id)),))
    snapshot = sensor.snapshot(1, 1, 1)
    strange = status(snapshot, "strange")
    assert (strange.ok, strange.error) == (False, f"ValueError: it gives {named}, which no sample has")
    web = snapshot.cgroups["/web"]
    assert (web.path, web.oom_kills, web.wait) == ("/web", None, Wait(sum_ns=5, count=1))


def test_a_bug_in_a_source_is_seen_and_costs_only_its_part(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    def bug(_live: Mapping[int, str]) -> Mapping[int, Wait]:
        raise KeyError("slot 27")

    machine.waits.answer = bug
    sensor = machine.sensor()
    for seq in (1, 2, 3):
        snapshot = sensor.snapshot(seq, seq, seq)
        assert sensor.read_waits({machine.web_id}) == {}
    waits = status(snapshot, "waits")
    assert (waits.ok, waits.error) == (False, "KeyError: 'slot 27'")
    assert "bug" in waits.remedy
    assert snapshot.cgroups["/web"].cpu_usage_ns == 1_500_000_000
    assert len(caplog.records) == 1, "logged once, shown each time"


def test_the_last_good_pods_stay_and_the_reason_is_shown(machine: Machine) -> None:
    def refuse() -> tuple[Pod, ...]:
        raise Unavailable("pods.yaml: line 2: not YAML", "mend the file")

    sensor = machine.sensor()
    sensor.snapshot(1, 1, 1)
    machine.pods.answer = refuse
    snapshot = sensor.snapshot(2, 2, 2)
    assert snapshot.pods == (WEB,)
    pods = status(snapshot, "pods")
    assert (pods.ok, pods.error, pods.remedy) == (False, "pods.yaml: line 2: not YAML", "mend the file")


def test_cpus_that_come_and_go_change_the_topology(machine: Machine) -> None:
    sensor = machine.sensor()
    assert sensor.snapshot(1, 1, 1).topology.ids == (0, 1)
    trees.make(machine.root / "sys", {"devices/system/cpu/online": "1\n"})
    assert sensor.snapshot(2, 2, 2).topology.ids == (1,)


def test_a_machine_that_loses_everything_still_gives_snapshots(machine: Machine) -> None:
    sensor = machine.sensor()
    sensor.snapshot(1, 1, 1)
    for name in ("proc", "sys", "cpuacct", "memory", "pids", "unified"):
        shutil.rmtree(machine.root / name)
    shutil.rmtree(machine.root / "cpu/web")
    (machine.root / "cpu/cpu.stat").unlink()
    snapshot = sensor.snapshot(2, 2, 2)
    assert snapshot.cgroups.keys() == {"/"}
    assert snapshot.seq == 2


def test_pods_that_do_not_answer_are_named_and_old_answers_keep_their_time(machine: Machine) -> None:
    snapshot = machine.sensor(indicators=Silent()).snapshot(1, 1000, 1)
    assert snapshot.indicators["n/0"].sampled_at_ns == 4
    silent = status(snapshot, "indicator-pods")
    assert (silent.ok, silent.error) == (False, "n/0: no answer; n/1: no answer; n/2: no answer; and 2 more")


def test_schedstat_follows_the_pods(machine: Machine) -> None:
    trees.make(
        machine.root / "proc", {"self/schedstat": "1000 0 1\n", "11/schedstat": "5 700 2\n", "11/stat": "11 (a) S"}
    )
    trees.make(machine.root / "cpu/web", {"tasks": "11\n"})
    sensor = machine.sensor(SchedstatWaits(machine.root / "proc", machine.hierarchy))
    snapshot = sensor.snapshot(1, 1, 1)
    assert snapshot.cgroups["/web"].wait == Wait(sum_ns=700, count=2)
    assert snapshot.cgroups["/"].wait is None
    assert status(snapshot, "waits").detail == "schedstat"
    assert sensor.read_waits({machine.web_id}) == {machine.web_id: Wait(sum_ns=700, count=2)}
    assert sensor.read_waits(()) == {}
    machine.pods.answer = lambda: ()
    assert sensor.snapshot(2, 2, 2).cgroups["/web"].wait is None


def test_a_listed_container_without_a_cgroup_is_told_with_its_path(machine: Machine) -> None:
    lost = Pod(
        uid="l", namespace="default", name="lost", qos=QoSLevel.SHARED, containers=(Container(name="c", cgroup="/wob"),)
    )
    machine.pods.answer = lambda: (WEB, lost)
    status = next(s for s in machine.sensor().snapshot(1, 1, 1).sources if s.name == "pod-cgroups")
    assert (status.ok, status.error) == (False, "there is no cgroup /wob of default/lost")

"""What probes add to a snapshot, and that one which fails costs its own part and is seen to fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from api.interfaces import Probe, ProbeReading, Unavailable
from api.snapshot import RunqLatency, ThreadStates
from tests.agent.sensors.sensor_machine import Machine, ScriptedProbe, ScriptedReporter, status

STATES = ThreadStates(runnable=1, uninterruptible=0, iowait=0, sleeping=2)


def test_what_probes_have_seen_is_joined_with_everything_else(machine: Machine) -> None:
    """By id and field; readings of a removed cgroup are dropped, and waits stay."""
    first = ScriptedProbe(
        "threads", lambda live: ProbeReading({number: {"threads_by_state": STATES} for number in live})
    )
    web = {machine.web_id: {"oom_kills": 3}, 10**12: {"oom_kills": 9}}
    second = ScriptedProbe("oomkill", lambda live: ProbeReading(web, {"softirq_ns": {0: {"NET_RX": 7}}}))
    snapshot = machine.sensor(probes=(first, second)).snapshot(1, 1, 1)
    sample = snapshot.cgroups["/web"]
    assert (sample.threads_by_state, sample.oom_kills, sample.wait) == (STATES, 3, RunqLatency(sum_ns=5, count=1))
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
    probes.append(ScriptedProbe("oomkill", lambda live: ProbeReading({number: {"oom_kills": 1} for number in live})))
    assert sensor.snapshot(2, 2, 2).cgroups["/web"].oom_kills == 1


def test_a_probe_knows_whether_the_list_has_gaps(machine: Machine) -> None:
    probe = ScriptedProbe("threads", lambda live: ProbeReading())
    machine.pods.answer = lambda: ()  # the cgroups of pods are never left out
    machine.sensor(limit=1, probes=(probe,)).snapshot(1, 1, 1)
    machine.sensor(probes=(probe,)).snapshot(1, 1, 1)
    assert probe.requests == [False, True]


def test_a_probe_that_fails_says_why_and_costs_only_its_part(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """Three ways: it cannot, it has a bug, and it works but has lost something."""

    def refuse(_live: Mapping[int, str]) -> ProbeReading:
        raise Unavailable("the kernel refuses it", "boot another")

    def bug(_live: Mapping[int, str]) -> ProbeReading:
        raise IndexError("row 3")

    lossy = ScriptedProbe("lossy", lambda live: ProbeReading({number: {"oom_kills": 2} for number in live}))
    lossy.lost, lossy.lost_events = Unavailable("4 events were lost", "lose less"), 4
    probes = (ScriptedProbe("refused", refuse), ScriptedProbe("buggy", bug), lossy)
    sensor = machine.sensor(probes=probes)
    for seq in (1, 2):
        snapshot = sensor.snapshot(seq, seq, seq)
        refused, buggy, lost = (status(snapshot, probe.name) for probe in probes)
        assert (refused.ok, refused.error, refused.remedy) == (False, "the kernel refuses it", "boot another")
        assert (buggy.ok, buggy.error) == (False, "IndexError: row 3")
        assert "bug" in buggy.remedy
        assert (lost.ok, lost.error, lost.remedy) == (False, "4 events were lost", "lose less")
        assert (refused.lost_events, buggy.lost_events, lost.lost_events) == (None, None, 4)
        assert (snapshot.cgroups["/web"].oom_kills, snapshot.cgroups["/web"].wait) == (
            2,
            RunqLatency(sum_ns=5, count=1),
        )
    assert len(caplog.records) == 1, "the bug is logged once"


def test_components_that_measure_nothing_report_their_health(machine: Machine) -> None:
    reporter = ScriptedReporter()
    sensor = machine.sensor(probes=(ScriptedProbe("threads", lambda _: ProbeReading()),), reporters=(reporter,))
    good = status(sensor.snapshot(1, 1, 1), "reporter")
    assert (good.ok, good.detail, good.lost_events) == (True, "tp_btf", None)
    reporter.lost, reporter.lost_events = Unavailable("the disk is full", "remove files"), 2
    bad = sensor.snapshot(2, 2, 2)
    assert [source.name for source in bad.sources[5:7]] == ["threads", "reporter"]
    result = status(bad, "reporter")
    assert (result.ok, result.error, result.remedy, result.lost_events) == (
        False,
        "the disk is full",
        "remove files",
        2,
    )


@pytest.mark.parametrize(
    ("observed", "named"),
    [
        (lambda number: ProbeReading({number: {"oom_kills": 1, "oom_kils": 1}}), "oom_kils"),
        (lambda number: ProbeReading({number: {"path": "/elsewhere"}}), "path"),
        (lambda number: ProbeReading({number: {"wait": None}}), "wait"),
        (lambda _: ProbeReading({}, {"softirqs": {}, "kswapd": {}}), "softirqs"),
    ],
)
def test_a_field_that_no_sample_has_is_the_probes_error(
    machine: Machine, observed: Callable[[int], ProbeReading], named: str
) -> None:
    """None of what it says is believed then, and nothing else is lost."""
    sensor = machine.sensor(probes=(ScriptedProbe("strange", lambda _: observed(machine.web_id)),))
    snapshot = sensor.snapshot(1, 1, 1)
    strange = status(snapshot, "strange")
    assert (strange.ok, strange.error) == (False, f"ValueError: it returned {named}, which no sample has a field for")
    web = snapshot.cgroups["/web"]
    assert (web.path, web.oom_kills, web.wait) == ("/web", None, RunqLatency(sum_ns=5, count=1))

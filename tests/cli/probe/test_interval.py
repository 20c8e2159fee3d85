"""What `dioptase probe NAME` makes of two reads of any probe; on a live kernel: tests/kernel/test_registry.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from api.histogram import SLOT_COUNT
from api.interfaces import ProbeReading
from api.snapshot import Blame, BlockIo, Durations, LoadAverages, SocketTraffic, ThreadStates
from api.text import to_json
from cli.formats import ABSENT
from cli.probe.commands import summarize_interval
from cli.probe.interval import ChangeCell, DisplayedInterval, ProbeInterval, change_cells, render_interval, value_change
from tests.builders.terminal import rendered_lines

NO_TRAFFIC: Mapping[str, int] = dict.fromkeys(SocketTraffic.__struct_fields__, 0)
STATES = ThreadStates(runnable=2, uninterruptible=0, iowait=0, sleeping=5)


def times(sum_ns: int, **slots: int) -> Durations:
    counts = tuple(slots.get(f"s{k}", 0) for k in range(SLOT_COUNT))
    return Durations(sum_ns=sum_ns, count=sum(counts), slots=counts)


def net(**numbers: int) -> SocketTraffic:
    return SocketTraffic(**{**NO_TRAFFIC, **numbers})


def io_of(reads: Durations, read_bytes: int) -> BlockIo:
    return BlockIo(reads=reads, writes=times(0), read_bytes=read_bytes, write_bytes=0)


def blame(by_cgroup: Mapping[str, int], throttled_ns: int) -> Blame:
    return Blame(by_cgroup=by_cgroup, throttled_ns=throttled_ns, higher_class_ns=0, other_ns=0)


@pytest.mark.parametrize(
    ("before", "after", "grown"),
    [
        (3, 10, 7),
        (None, 10, 10),
        (10, 3, None),
        (times(100, s1=2), times(300, s1=3, s2=1), times(200, s1=1, s2=1)),
        (None, times(300, s1=3), times(300, s1=3)),
        ({0: {"RCU": 5}}, {0: {"RCU": 7}, 1: {"RCU": 4}}, {"0": {"RCU": 2}, "1": {"RCU": 4}}),
        (STATES, STATES, STATES),
        (1.5, 1.25, 1.25),
        (True, True, True),
        ("a", "b", "b"),
    ],
)
def test_counters_grow_and_everything_else_is_as_it_is(before: Any, after: Any, grown: Any) -> None:
    assert value_change(before, after) == grown


def test_structs_are_changed_field_by_field() -> None:
    changed = value_change(net(tcp_sent_bytes=5), net(tcp_sent_bytes=12, tcp_retransmits=1))
    assert changed == {**NO_TRAFFIC, "tcp_sent_bytes": 7, "tcp_retransmits": 1}


def test_keys_say_what_a_number_is_about_and_fields_what_it_is_called() -> None:
    after = {"8:0": io_of(times(4000, s2=1), 512), "8:16": io_of(times(0), 0)}
    cells = list(change_cells(value_change({}, after), after, name="block_io"))
    assert cells == [
        ChangeCell(("8:0",), "block_io.reads", times(4000, s2=1), grown=True),
        ChangeCell(("8:0",), "block_io.read_bytes", 512, grown=True),
    ]


def test_numbers_of_the_moment_are_shown_with_their_zeros_unless_all_are_zero() -> None:
    assert [(cell.name, cell.value, cell.grown) for cell in change_cells(STATES, STATES, name="threads_by_state")] == [
        ("threads_by_state.runnable", 2, False),
        ("threads_by_state.uninterruptible", 0, False),
        ("threads_by_state.iowait", 0, False),
        ("threads_by_state.sleeping", 5, False),
    ]
    none = ThreadStates(runnable=0, uninterruptible=0, iowait=0, sleeping=0)
    assert list(change_cells(none, none, name="threads_by_state")) == []


def test_only_what_happened_is_listed_the_busiest_first() -> None:
    before = ProbeReading({1: {"net": net(tcp_sent_bytes=5)}, 2: {"net": net(udp_sent_bytes=1)}})
    after = ProbeReading(
        {1: {"net": net(tcp_sent_bytes=6)}, 2: {"net": net(udp_sent_bytes=1)}, 3: {"net": net(udp_sent_bytes=9)}}
    )
    groups, result = summarize_interval(before, after, {1: "/a", 2: "/b", 3: "/c"}, "/")
    assert [(group.cgroup, group.id) for group in groups] == [("/c", 3), ("/a", 1)]
    assert [(cgroup, cell.name, cell.value) for cgroup, cell in result] == [
        ("/c", "net.udp_sent_bytes", 9),
        ("/a", "net.tcp_sent_bytes", 1),
    ]


def test_cgroups_are_chosen_by_how_their_path_begins_and_the_node_is_always_there() -> None:
    after = ProbeReading(
        {1: {"oom_kills": 1}, 2: {"oom_kills": 1}, 77: {"oom_kills": 1}}, {"softirq_ns": {0: {"RCU": 3}}}
    )
    groups, result = summarize_interval(ProbeReading(), after, {1: "/", 2: "/kubepods/a"}, "/kube")
    assert [group.cgroup for group in groups] == ["/kubepods/a"]
    assert result[-1] == ("", ChangeCell(("0", "RCU"), "softirq_ns", 3, grown=True))
    assert [group.cgroup for group in summarize_interval(ProbeReading(), after, {}, "")[0]] == ["/", "id 2", "id 77"]


def shown(before: ProbeReading, after: ProbeReading, paths: dict[int, str], problem: str = "") -> DisplayedInterval:
    cgroups, result = summarize_interval(before, after, paths, "/")
    interval = ProbeInterval(
        probe="x", form="tp_btf", wall_time_ns=1, interval_s=2.0, cgroups=cgroups, node={}, problem=problem
    )
    return DisplayedInterval(interval=interval, cells=result)


def drawn(of: DisplayedInterval, height: int | None = None) -> list[str]:
    return rendered_lines(render_interval(of, height))


def test_growth_is_shown_as_a_rate_in_the_unit_of_its_name() -> None:
    after = ProbeReading(
        {1: {"net": net(tcp_sent_bytes=4096, udp_sent_packets=30)}}, {"softirq_ns": {0: {"RCU": 3_000_000}}}
    )
    lines = drawn(shown(ProbeReading(), after, {1: "/web"}))
    assert lines[0] == "x, form tp_btf, 2.0 s"
    assert lines[1].split() == ["tcp", "sent", "udp", "sent", "packets", "softirq"]
    assert lines[2].split() == ["/web", "2.00", "KiB/s", "15.0/s", ABSENT]
    assert lines[3].split() == ["node", "0", "RCU", ABSENT, ABSENT, "1.50", "ms/s"]


def test_what_is_of_the_moment_is_no_rate() -> None:
    load = LoadAverages(load1=1.5, load5=0.25, load15=0.0, runnable1=1.0, runnable5=0.0, runnable15=0.0)
    lines = drawn(shown(ProbeReading(), ProbeReading({1: {"load": load, "threads_by_state": STATES}}), {1: "/web"}))
    heads = "load1 load5 load15 run1 run5 run15 run blocked i/o asleep"
    assert lines[1].split() == heads.split()
    assert lines[2].split() == ["/web", "1.50", "0.25", "0.00", "1.00", "0.00", "0.00", "2", "0", "0", "5"]


def test_each_aggressor_has_a_row() -> None:
    after = ProbeReading({1: {"blame": blame({"/batch": 8_000_000, "/web": 2_000_000}, 500_000)}})
    lines = drawn(shown(ProbeReading(), after, {1: "/web"}))
    assert lines[1].split() == ["by", "cgroup", "throttled"]
    assert [line.split() for line in lines[2:]] == [
        ["/web", "/batch", "4.00", "ms/s", ABSENT],
        ["/web", "/web", "1.00", "ms/s", ABSENT],
        ["/web", ABSENT, "250", "µs/s"],
    ]


def test_distributions_are_histograms() -> None:
    after = ProbeReading({1: {"block_io": {"8:0": io_of(times(12_000, s2=3), 0)}}})
    lines = drawn(shown(ProbeReading(), after, {1: "/web"}))
    assert lines[2] == "/web  8:0  reads: 3, mean 4.00 µs, p50 3.00 µs, p99 3.98 µs"
    assert lines[3].split() == ["≤", "4.00", "µs", "3", "█" * 40]


def test_what_does_not_fit_is_counted() -> None:
    after = ProbeReading({n: {"oom_kills": n, "throttles": times(3000, s1=1, s2=1)} for n in range(1, 21)})
    paths = {n: f"/{n}" for n in range(1, 21)}
    lines = drawn(shown(ProbeReading(), after, paths), height=12)
    assert len(lines) <= 12 + 2
    assert "and 11 more rows; choose with --cgroup" in lines
    assert lines[-1] == "and 20 more histograms; choose with --cgroup"
    assert len(drawn(shown(ProbeReading(), after, paths))) == 1 + 1 + 20 + 20 * 4


def test_a_quiet_interval_and_a_problem_are_said() -> None:
    assert drawn(shown(ProbeReading(), ProbeReading(), {}, "3 lost: lose less"))[1:] == [
        "3 lost: lose less",
        "nothing happened",
    ]


def test_a_path_that_would_move_the_cursor_is_spelled_out() -> None:
    assert "\x1b" not in "".join(drawn(shown(ProbeReading(), ProbeReading({1: {"oom_kills": 1}}), {1: "/a\x1b[2Jb"})))


def test_json_has_the_change_as_it_is_nested() -> None:
    after = ProbeReading({1: {"block_io": {"8:0": io_of(times(12_000, s2=3), 512)}}})
    document = json.loads(to_json(shown(ProbeReading(), after, {1: "/w\udcff"}).interval))
    assert document["cgroups"][0]["cgroup"] == "/w\\xff"
    disk = document["cgroups"][0]["values"]["block_io"]["8:0"]
    assert (disk["read_bytes"], disk["reads"]["sum_ns"], disk["reads"]["slots"][2]) == (512, 12_000, 3)

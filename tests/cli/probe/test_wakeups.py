"""The table and the chains of `dioptase probe wakeups`; on a live kernel: tests/kernel/test_registry.py."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.histogram import SLOT_COUNT
from api.interfaces import ProbeReading
from api.snapshot import Durations, Wakeups
from cli.probe.commands import summarize_interval
from cli.probe.interval import ProbeInterval
from cli.probe.wakeups import WakeupHop, chains, hops, render_wakeup_chains
from tests.builders.terminal import rendered_lines

NEVER = Durations(sum_ns=0, count=0, slots=(0,) * SLOT_COUNT)
PATHS = {1: "/ingress", 2: "/api", 3: "/db"}


def times(count: int, each_ns: int = 3000) -> Durations:
    """All in the slot (2, 4] us, whatever they took."""
    return Durations(sum_ns=count * each_ns, count=count, slots=(0, 0, count, *(0,) * (SLOT_COUNT - 3)))


def woken(by: Mapping[str, int], interrupt: int = 0, kernel_thread: int = 0, other: int = 0) -> Wakeups:
    return Wakeups(
        by_cgroup={path: times(count) for path, count in by.items()},
        interrupt=times(interrupt),
        kernel_thread=times(kernel_thread),
        other=times(other),
    )


def interval(by_id: Mapping[int, Wakeups], before: Mapping[int, Wakeups] = {}, problem: str = "") -> ProbeInterval:
    reads = [
        ProbeReading({number: {"wakeups": observed} for number, observed in read.items()}) for read in (before, by_id)
    ]
    cgroups, _ = summarize_interval(reads[0], reads[1], PATHS, "/")
    return ProbeInterval(
        probe="wakeups", form="tp_btf", wall_time_ns=1, interval_s=2.0, cgroups=cgroups, node={}, problem=problem
    )


def drawn(of: ProbeInterval, width: int = 110, height: int | None = None) -> list[str]:
    return rendered_lines(render_wakeup_chains(of, width, height), width)


def tree(*result: tuple[str, str, int]) -> list[str]:
    created = chains([WakeupHop(waker, name, times(count)) for waker, name, count in result])
    return ["  " * link.depth + link.name for link in created]


SERVICES = {
    1: woken({"/api": 1001}, interrupt=998),
    2: woken({"/ingress": 1000, "/db": 1002, "/api": 40}, interrupt=5),
    3: woken({"/api": 1000}, interrupt=5),
}


def test_request_and_reply_become_a_chain_from_the_external_waker() -> None:
    """Replies are as frequent as requests, or slightly more: they must not become the chain."""
    created = chains(hops(interval(SERVICES)))
    assert [(link.depth, link.name) for link in created] == [(0, "interrupt"), (1, "/ingress"), (2, "/api"), (3, "/db")]


@pytest.mark.parametrize(
    ("result", "lines"),
    [
        ([("/a", "/b", 9), ("/b", "/c", 9)], ["/a", "  /b", "    /c"]),
        ([("/a", "/a", 9)], []),
        ([("other", "/a", 9)], []),
        ([("/a", "/b", 9), ("/b", "/a", 9)], ["/a", "  /b"]),
        ([("interrupt", "/b", 4), ("/a", "/b", 9)], ["/a", "  /b"]),
        ([("interrupt", "/b", 5), ("/a", "/b", 9)], ["/a", "  /b"]),
        ([("interrupt", "/a", 9), ("interrupt", "/b", 3), ("/a", "/c", 2)], ["interrupt", "  /a", "    /c", "  /b"]),
        ([("kernel threads", "/a", 1), ("/b", "/c", 7), ("/c", "/b", 8)], ["kernel threads", "  /a", "/c", "  /b"]),
        (
            [("interrupt", "/d", 2), ("/a", "/b", 1), ("/a", "/c", 1), ("/b", "/d", 3), ("/c", "/a", 1)],
            ["interrupt", "  /d", "/a", "  /c", "  /b"],
        ),
    ],
)
def test_each_cgroup_is_once_below_a_strong_waker(result: list[tuple[str, str, int]], lines: list[str]) -> None:
    assert tree(*result) == lines


NAMES = st.sampled_from(["interrupt", "kernel threads", "other", "/a", "/b", "/c", "/d"])


@given(st.dictionaries(st.tuples(NAMES, st.sampled_from(["/a", "/b", "/c", "/d"])), st.integers(1, 50)))
def test_each_woken_cgroup_has_one_line_below_its_waker(
    result: dict[tuple[str, str], int],
) -> None:
    created = chains([WakeupHop(waker, name, times(count)) for (waker, name), count in result.items()])
    names = [link.name for link in created]
    assert len(names) == len(set(names))
    assert {name for waker, name in result if waker not in (name, "other")} <= set(names)
    above: list[str] = []
    for link in created:
        above[link.depth :] = [link.name]
        assert link.hop is None or link.hop.waker == above[link.depth - 1]


def test_the_table_has_the_longest_waits_first_as_rates() -> None:
    lines = drawn(interval({2: woken({"/ingress": 200, "/api": 2}, interrupt=10, kernel_thread=6, other=4)}))
    assert lines[0] == "wakeups, form tp_btf, 2.0 s: wakeups and latency, by waker"
    assert lines[1].split() == ["waker", "woken", "wakeups/s", "wait/s", "mean", "p50", "p99"]
    assert lines[2].split() == ["/ingress", "/api", "100", "300", "µs", "3.00", "µs", "3.00", "µs", "3.98", "µs"]
    assert [line.split("  ")[0] for line in lines[3:7]] == ["interrupt", "kernel threads", "other", "/api"]
    assert lines[8:] == [
        "chains: each cgroup below its strongest waker",
        "/ingress",
        "  → /api  100/s, mean 3.00 µs, p99 3.98 µs",
    ]


def test_only_growth_counts_and_a_recreated_cgroup_is_left_out_once() -> None:
    before = {2: woken({"/ingress": 150, "/db": 9})}
    result = hops(interval({2: woken({"/ingress": 200, "/db": 3})}, before))
    assert [(hop.waker, hop.times.count) for hop in result] == [("/ingress", 50)]


def test_what_does_not_fit_is_counted() -> None:
    many = {2: woken({f"/w{n:02}": n for n in range(1, 41)})}
    lines = drawn(interval(many, problem="3 wakeups count as other: remove cgroups"), height=14)
    assert len(lines) <= 14
    assert lines[1] == "3 wakeups count as other: remove cgroups"
    assert any(line.endswith("more pairs; choose with --cgroup") for line in lines)


def test_a_quiet_interval_says_so() -> None:
    assert drawn(interval({}))[1:] == ["no wakeups"]


def test_names_are_cut_at_their_beginning_and_cannot_move_the_cursor() -> None:
    lines = drawn(interval({2: woken({"/a\x1b[2J" + "x" * 80: 5})}), width=90)
    assert not any("\x1b" in line for line in lines)
    assert lines[2].startswith("…")
    assert all(len(line) <= 90 for line in lines[:3])

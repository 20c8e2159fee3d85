"""What `dioptase probe blame` makes of two reads; the command on a live kernel is in tests/kernel/test_blame_command.py."""

from __future__ import annotations

import io

from rich.console import Console

from api.facts import Blame
from cli.probes.blame import Interval, Victim, render, victims

PATHS = {1: "/", 2: "/a", 3: "/b", 4: "/c"}


def blame(throttled: int = 0, higher: int = 0, other: int = 0, **by_cgroup: int) -> Blame:
    paths = {f"/{name}": ns for name, ns in by_cgroup.items()}
    return Blame(by_cgroup=paths, throttled_ns=throttled, higher_class_ns=higher, other_ns=other)


def interval(*found: Victim, problem: str = "", seconds: float = 2.0) -> Interval:
    return Interval(
        probe="blame", form="tp_btf", wall_time_ns=0, interval_s=seconds, problem=problem, cgroups=tuple(found)
    )


def victim(cgroup: str, throttled: int = 0, **by_cgroup: int) -> Victim:
    paths = {f"/{name}": ns for name, ns in by_cgroup.items()}
    return Victim(
        cgroup=cgroup,
        id=7,
        waited_ns=sum(paths.values()) + throttled,
        by_cgroup=paths,
        throttled_ns=throttled,
        higher_class_ns=0,
        other_ns=0,
    )


def drawn(finished: Interval, width: int = 120, height: int | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(finished, width, height))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_only_what_came_about_between_two_reads_is_shown_most_waited_first() -> None:
    before = {2: blame(a=5, b=10), 3: blame(throttled=7)}
    after = {2: blame(a=6, b=30), 3: blame(throttled=90, higher=1, other=2), 4: blame(a=0)}
    first, second = victims(before, after, PATHS, "/")
    assert (first.cgroup, first.waited_ns, first.throttled_ns, first.higher_class_ns, first.other_ns) == (
        "/b",
        86,
        83,
        1,
        2,
    )
    assert (second.cgroup, second.waited_ns, list(second.by_cgroup.items())) == ("/a", 21, [("/b", 20), ("/a", 1)])


def test_a_culprit_made_again_under_its_path_begins_at_zero() -> None:
    (found,) = victims({2: blame(b=100)}, {2: blame(b=30)}, PATHS, "/")
    assert found.by_cgroup == {"/b": 30}


def test_victims_are_chosen_by_how_their_path_begins_and_culprits_are_not() -> None:
    (found,) = victims({}, {2: blame(b=1), 3: blame(a=1)}, PATHS, "/b")
    assert (found.cgroup, found.by_cgroup) == ("/b", {"/a": 1})


def test_cgroups_without_a_path_are_named_by_their_number_and_the_root_by_its_own() -> None:
    found = victims({}, {1: blame(a=20), 77: blame(a=10)}, {}, "")
    assert [v.cgroup for v in found] == ["/", "id 77"]


def test_a_matrix_of_milliseconds_a_second() -> None:
    lines = drawn(interval(victim("/a", throttled=500_000_000, b=200_000_000, c=2_000_000), victim("/b", a=1_000_000)))
    assert lines[0] == "who waits for whom, form tp_btf, 2.0 s, milliseconds of waiting a second"
    assert lines[1].split() == ["waited", "quota", "rt", "other", "rest", "b", "c", "a"]
    assert lines[2].split() == ["a", "/a", "351", "250", "·", "·", "·", "100", "1.00", "·"]
    assert lines[3].split() == ["b", "/b", "0.50", "·", "·", "·", "·", "·", "·", "0.50"]
    assert lines[4].split() == ["c", "/c", *"········"]


def test_what_has_no_column_is_the_rest() -> None:
    many = {f"c{k}": 1_000_000 * (k + 1) for k in range(20)}
    lines = drawn(interval(victim("/v", **many), seconds=1.0), width=100)
    heads, cells = lines[1].split(), lines[2].split()
    assert "rest" in heads
    named = [float(cell) for cell in cells[-(len(heads) - 5) :]]
    assert named == sorted(named, reverse=True)
    assert float(cells[heads.index("rest") + 2]) + sum(named) == sum(range(1, 21)) == float(cells[2])


def test_lines_fit_the_terminal_and_what_does_not_is_counted() -> None:
    found = [victim(f"/kubepods/pod{k}/container-with-a-very-long-name-{k}", a=10**9 - k) for k in range(30)]
    lines = drawn(interval(*found), width=80, height=12)
    assert len(lines) == 12
    assert all(len(line) <= 80 for line in lines)
    assert lines[-1] == "and 22 more cgroups; choose with --cgroup"
    assert "…" in lines[2]
    assert "long-name-0" in lines[2]


def test_problems_are_said_and_names_cannot_move_the_cursor() -> None:
    lines = drawn(interval(victim("/\x1b[31mred", a=1_000_000), problem="parts found no place"))
    assert lines[1] == "parts found no place"
    assert "\\x1b[31mred" in lines[3]


def test_a_quiet_node_is_an_empty_table() -> None:
    assert len(drawn(interval())) == 2

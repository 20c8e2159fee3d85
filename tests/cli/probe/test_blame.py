"""The matrix of `dioptase probe blame`; the command on a live kernel is in tests/kernel/test_probe_command.py."""

from __future__ import annotations

from api.interfaces import ProbeReading
from api.snapshot import Blame
from cli.probe.blame import blame_rows, render_blame_matrix
from cli.probe.commands import summarize_interval
from cli.probe.interval import CgroupChange, ProbeInterval
from tests.builders.terminal import rendered_lines


def blame(throttled: int = 0, higher: int = 0, other: int = 0, **by_cgroup: int) -> Blame:
    paths = {f"/{name}": ns for name, ns in by_cgroup.items()}
    return Blame(by_cgroup=paths, throttled_ns=throttled, higher_class_ns=higher, other_ns=other)


def reading(**by_name: Blame) -> ProbeReading:
    """Cgroups by path; their numbers are those of the letters."""
    return ProbeReading(cgroups={ord(name): {"blame": value} for name, value in by_name.items()})


PATHS = {ord(name): f"/{name}" for name in "abc"}


def interval(*groups: CgroupChange, problem: str = "", seconds: float = 2.0) -> ProbeInterval:
    return ProbeInterval(
        probe="blame",
        form="tp_btf",
        wall_time_ns=0,
        interval_s=seconds,
        problem=problem,
        cgroups=groups,
        node={},
    )


def group(cgroup: str, throttled: int = 0, **by_cgroup: int) -> CgroupChange:
    result, _ = summarize_interval(
        ProbeReading(), ProbeReading(cgroups={7: {"blame": blame(throttled, **by_cgroup)}}), {7: cgroup}, ""
    )
    return result[0]


def drawn(finished: ProbeInterval, width: int = 120, height: int | None = None) -> list[str]:
    return rendered_lines(render_blame_matrix(finished, width, height), width)


def test_waits_between_two_readings_longest_first() -> None:
    before = reading(a=blame(a=5, b=10), b=blame(throttled=7))
    after = reading(a=blame(a=6, b=30), b=blame(throttled=90, higher=1, other=2), c=blame(a=0))
    groups, _ = summarize_interval(before, after, PATHS, "/")
    first, second = blame_rows(interval(*groups))
    assert (first.cgroup, first.waited_ns) == ("/b", 86)
    assert (first.throttled_ns, first.higher_class_ns, first.other_ns) == (83, 1, 2)
    assert (second.cgroup, second.waited_ns, second.by_cgroup) == ("/a", 21, {"/a": 1, "/b": 20})


def test_a_recreated_aggressor_is_left_out_once() -> None:
    groups, _ = summarize_interval(reading(a=blame(b=100, c=1)), reading(a=blame(b=30, c=9)), PATHS, "/")
    (result,) = blame_rows(interval(*groups))
    assert result.by_cgroup == {"/c": 8}


def test_a_matrix_of_milliseconds_a_second() -> None:
    lines = drawn(interval(group("/b", a=1_000_000), group("/a", throttled=500_000_000, b=200_000_000, c=2_000_000)))
    assert lines[0] == "blame, form tp_btf, 2.0 s: milliseconds a second of wait for a CPU, by its holder"
    assert lines[1].split() == ["waited", "quota", "rt", "other", "rest", "b", "c", "a"]
    assert lines[2].split() == ["a", "/a", "351", "250", "·", "·", "·", "100", "1.00", "·"]
    assert lines[3].split() == ["b", "/b", "0.50", "·", "·", "·", "·", "·", "·", "0.50"]
    assert lines[4].split() == ["c", "/c", *"········"]


def test_what_has_no_column_is_the_rest() -> None:
    many = {f"c{k}": 1_000_000 * (k + 1) for k in range(20)}
    lines = drawn(interval(group("/v", **many), seconds=1.0), width=100)
    heads, cells = lines[1].split(), lines[2].split()
    named = [float(cell) for cell in cells[-(len(heads) - 5) :]]
    assert named == sorted(named, reverse=True)
    assert float(cells[heads.index("rest") + 2]) + sum(named) == sum(range(1, 21)) == float(cells[2])


def test_lines_fit_the_terminal_and_what_does_not_is_counted() -> None:
    results = [group(f"/kubepods/pod{k}/container-with-a-very-long-name-{k}", a=10**9 - k) for k in range(30)]
    lines = drawn(interval(*results), width=90, height=12)
    assert len(lines) == 12
    assert all(len(line) <= 90 for line in lines)
    assert lines[-1] == "and 22 more cgroups; choose with --cgroup"
    assert "…" in lines[2]
    assert "long-name-0" in lines[2]


def test_problems_are_said_and_names_cannot_move_the_cursor() -> None:
    lines = drawn(interval(group("/\x1b[31mred", a=1_000_000), problem="parts count as other"))
    assert lines[1] == "parts count as other"
    assert "\\x1b[31mred" in lines[3]


def test_a_quiet_node_is_an_empty_matrix() -> None:
    assert len(drawn(interval())) == 2

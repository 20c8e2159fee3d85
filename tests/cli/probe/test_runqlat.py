"""What `dioptase probe` makes of two reads; the command on a live kernel is in tests/kernel/test_probe_command.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner

import cli.probe.commands
from api.histogram import BOUNDS_NS, SLOT_COUNT
from api.interfaces import ProbeReading
from api.snapshot import BlockIo, RunqLatency
from cli.probe import commands
from cli.probe.commands import validate_cgroup_prefix
from cli.probe.runqlat import (
    CgroupRunqLatency,
    RunqlatInterval,
    read_runqlat_intervals,
    render_runqlat,
    runqlat_histogram,
    summarize_runqlat,
)
from probes.per_cgroup_probe import LostEvents
from tests.builders.terminal import rendered_lines


def wait(sum_ns: int, **slots: int) -> RunqLatency:
    counts = tuple(slots.get(f"s{k}", 0) for k in range(SLOT_COUNT))
    return RunqLatency(sum_ns=sum_ns, count=sum(counts), slots=counts)


def interval(*cgroups: CgroupRunqLatency, lost: LostEvents | None = None) -> RunqlatInterval:
    none = LostEvents(full=0, backwards=0, asleep=0, task_slot=0)
    return RunqlatInterval(
        probe="runqlat", form="tp_btf", wall_time_ns=0, interval_s=1.0, lost=lost or none, cgroups=tuple(cgroups)
    )


def drawn(finished: RunqlatInterval, height: int | None = None) -> list[str]:
    return rendered_lines(render_runqlat(finished, height))


class RecordingProbe:
    """A probe that records whether the lists of cgroups were passed as complete."""

    name, form = "recording", "tp_btf"

    def __init__(self, observed: Any) -> None:
        self._reading = observed
        self.complete: list[bool] = []

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> Any:
        assert live
        self.complete.append(complete)
        return self._reading

    def lost(self) -> LostEvents:
        return LostEvents(full=0, backwards=0, asleep=0, task_slot=0)

    def problem(self) -> None:
        return None


@pytest.mark.parametrize(("paths", "complete"), [({1: "/", 7: "/a"}, True), ({44: "/", 45: "/a"}, False)])
def test_a_part_of_the_hierarchy_is_not_passed_as_complete(
    monkeypatch: pytest.MonkeyPatch, paths: dict[int, str], complete: bool
) -> None:
    """The root cgroup has id 1; a container's mount begins elsewhere, and cgroups outside of it must stay counted."""
    for reading, read_intervals in (
        ({}, read_runqlat_intervals),
        (ProbeReading(), commands.read_probe_intervals),
    ):
        monkeypatch.setattr(commands, "cgroup_paths", lambda: paths)
        probe: Any = RecordingProbe(reading)
        finished = list(read_intervals(probe, 0.01, 0.015, "/"))
        assert probe.complete == [complete] * (len(finished) + 1)


def test_only_waits_that_ended_between_two_readings_are_shown_longest_first() -> None:
    before = {1: wait(500, s0=5), 2: wait(10_000, s3=2)}
    after = {1: wait(700, s0=7), 2: wait(10_000, s3=2), 3: wait(90_000, s6=3)}
    result = summarize_runqlat(before, after, {1: "/", 2: "/idle", 3: "/new"}, "/")
    assert [(w.cgroup, w.count, w.sum_ns) for w in result] == [("/new", 3, 90_000), ("/", 2, 200)]
    assert result[0].slots[6] == 3


def test_a_recreated_cgroup_is_left_out_once() -> None:
    assert summarize_runqlat({3: wait(90_000, s6=3)}, {3: wait(100, s1=1)}, {3: "/again"}, "/") == ()


def test_cgroups_are_chosen_by_how_their_path_begins() -> None:
    after = {1: wait(10, s0=1), 2: wait(10, s0=1), 3: wait(10, s0=1)}
    paths = {1: "/", 2: "/kubepods/a", 3: "/system"}
    assert [w.cgroup for w in summarize_runqlat({}, after, paths, "/kube")] == ["/kubepods/a"]


def test_cgroups_without_a_path_are_named_by_their_number_and_the_root_by_its_own() -> None:
    result = summarize_runqlat({}, {1: wait(20, s0=1), 77: wait(10, s0=1)}, {}, "")
    assert [w.cgroup for w in result] == ["/", "id 77"]


@pytest.mark.parametrize("probe", ["runqlat", "threads"])
def test_a_prefix_that_no_path_can_have_is_refused(probe: str) -> None:
    done = CliRunner().invoke(cli.probe.commands.probe, [probe, "--cgroup", "ux-web"])
    assert done.exit_code == 2
    assert "--cgroup" in done.output
    assert "no cgroup begins with 'ux-web': paths begin with /, such as /ux-web" in done.output


@pytest.mark.parametrize(("prefix", "text"), [("/web", ""), ("id 7", ""), ("/nope", "no cgroup begins with /nope; ")])
def test_a_prefix_without_a_cgroup_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prefix: str, text: str
) -> None:
    monkeypatch.setattr(commands, "cgroup_paths", lambda: {1: "/", 7: "/web/a"})
    command = click.Command("x")
    assert validate_cgroup_prefix(click.Context(command), click.Option(["--cgroup"]), prefix) == prefix
    err = capsys.readouterr().err
    assert err.startswith(text)
    assert bool(err) is bool(text)


def test_disks_are_called_what_the_kernel_calls_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev/block").mkdir(parents=True)
    (tmp_path / "dev/block/254:0").symlink_to("../../devices/pci0/virtio2/block/vda")
    assert [commands.device_name(number, tmp_path) for number in ("254:0", "8:0", "../x")] == ["vda", "8:0", "../x"]
    monkeypatch.setattr(commands, "device_name", lambda number: f"disk {number}")
    monkeypatch.setattr(commands, "cgroup_paths", lambda: {7: "/a"})
    idle = BlockIo(reads=wait(0), writes=wait(0), read_bytes=0, write_bytes=0)
    reads = iter(
        [
            ProbeReading({7: {"block_io": {"254:0": idle}}}),
            ProbeReading({7: {"block_io": {"254:0": msgspec.structs.replace(idle, read_bytes=512)}}}),
        ]
    )
    probe: Any = RecordingProbe(ProbeReading())
    probe.read = lambda _paths, *, complete: next(reads)
    (shown,) = commands.read_probe_intervals(probe, 0.05, 0.01, "/")
    ((cgroup, cell),) = shown.cells
    assert (cgroup, cell.about, cell.value) == ("/a", ("disk 254:0",), 512)
    assert shown.interval.cgroups[0].values["block_io"].keys() == {"254:0"}, "--json keeps the number"


def test_the_quantiles_are_microseconds() -> None:
    (result,) = summarize_runqlat({}, {5: wait(3_000_000, s10=100)}, {5: "/x"}, "/")
    assert 512 < (result.p50_us or 0) < (result.p99_us or 0) <= 1024


def test_bars_run_from_the_first_to_the_last_slot_in_use() -> None:
    (result,) = summarize_runqlat({}, {5: wait(5_000_000, s2=80, s4=1)}, {5: "/x"}, "/")
    lines = [line.plain for line in runqlat_histogram(result)]
    assert lines[1].startswith("/x  81 waits, mean 61.7 µs, p50 ")
    assert [line.split("█")[0].split() for line in lines[2:]] == [
        ["≤", "4.00", "µs", "80"],
        ["≤", "8.00", "µs", "0"],
        ["≤", "16.0", "µs", "1"],
    ]
    assert [line.count("█") for line in lines[2:]] == [40, 0, 1]


def test_the_open_slot_says_what_it_is_longer_than() -> None:
    (result,) = summarize_runqlat({}, {5: wait(50 * 10**9, s26=1)}, {5: "/x"}, "/")
    assert runqlat_histogram(result)[-1].plain.split() == [">", "33.6", "s", "1", "█" * 40]
    assert BOUNDS_NS[-1] == 33_554_432_000


def test_what_does_not_fit_is_counted() -> None:
    cgroups = summarize_runqlat(
        {}, {n: wait(1000 - n, s1=1) for n in range(10, 20)}, {n: f"/{n}" for n in range(10, 20)}, "/"
    )
    lines = drawn(interval(*cgroups), height=12)
    assert len(lines) <= 12
    assert lines[0] == "run-queue wait, form tp_btf, 1.0 s, 10 waits"
    assert lines[-1] == "and 7 more cgroups; choose with --cgroup"
    assert len(drawn(interval(*cgroups))) == 1 + 10 * 3


def test_losses_are_in_the_head_line() -> None:
    lost = LostEvents(full=3, backwards=0, asleep=2, task_slot=0)
    assert drawn(interval(lost=lost))[0].endswith("0 waits, 3 lost (full), 2 lost (asleep)")


def test_a_path_that_would_move_the_cursor_is_spelled_out() -> None:
    (result,) = summarize_runqlat({}, {5: wait(10, s0=1)}, {5: "/a\x1b[2Jb"}, "/")
    assert "\x1b" not in runqlat_histogram(result)[1].plain

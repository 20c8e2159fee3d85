"""One frame of `dioptase top`: its numbers are the View's, at any size of terminal."""

from __future__ import annotations

import io
import time
from collections.abc import Callable

import msgspec
import pytest
from rich.console import Console, Group

from api.advice import Headroom, MemoryPressure
from api.decision import ActMode, JournalEntry
from api.histogram import BOUNDS_NS
from api.knobs import Reason
from cli import formats
from cli.top.charts import bar, container_runq_latencies, histogram_lines, is_online, is_reclaimed, sparkline, wrap_text
from cli.top.frame import overview_lines
from cli.top.summary import notice_lines
from exporters.view.cycle_view import View, build_view
from tests.builders import colocation_run, four_cpu_node
from tests.builders.full_node import RICH_MEMORY, RICH_REJECTED
from tests.builders.quota_verdicts import quota_verdict


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks in the frame are local time."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def text(view: View | None, history: list[View], entries: tuple[JournalEntry, ...], width: int, height: int) -> str:
    console = Console(width=width, height=height, file=io.StringIO(), record=True)
    console.print(Group(*overview_lines(view, history, entries, width, height)))
    return console.export_text()


def calm() -> tuple[list[View], tuple[JournalEntry, ...]]:
    """Twelve seconds of the round whose numbers tests/builders/four_cpu_node.py lists."""
    views = [build_view(four_cpu_node.busy_cycle(seq)) for seq in range(1, 13)]
    entries = tuple(
        JournalEntry(
            seq=i,
            wall_time_ns=four_cpu_node.BOOTED_AT_NS + i * four_cpu_node.S,
            cycle_seq=i,
            trigger="tick",
            policy="latency",
            outcome=outcome,
        )
        for i, outcome in enumerate((four_cpu_node.OUTCOMES[0], four_cpu_node.OUTCOMES[2]), 1)
    )
    return views, entries


def test_golden_frame(golden: Callable[[str, str], None]) -> None:
    views, entries = calm()
    frame = text(views[-1], views, entries, 80, 24)
    golden("top-80x24.txt", "".join(f"{line.rstrip()}\n" for line in frame.splitlines()))


def test_numbers_of_the_frame_can_be_computed_by_hand() -> None:
    """See the table at the top of tests/builders/four_cpu_node.py."""
    views, entries = calm()
    frame = text(views[-1], views, entries, 140, 40)
    assert "3.75 of 4 busy · online 1.50 · other 0.00" in frame
    assert "2.50 of 4 lent · 2.25 used · need 1.50 · headroom 0.25" in frame
    assert "reported" not in frame
    web = next(line for line in frame.splitlines() if line.startswith("default/web"))
    # 100 waits a second: the 50th of 90 in 4-8 us, and the 99th, the last of 9 in 64-128 us.
    assert web.split()[1:7] == ["shared", "1.50", "20%", "8", "64.0M", "6.22µs/128µs"]
    # 200 requests, 150 up to 5 ms, 198 up to 50 ms: the 100th at two thirds of 5 ms, the 198th at 50 ms.
    assert web.split()[7] == "3.33ms/50.0ms"
    batch = next(line for line in frame.splitlines() if line.startswith("default/batch"))
    assert batch.split()[1:5] == ["reclaimed", "2.25", formats.ABSENT, "4"]
    # 11 rounds have waits, the first has none before it: 11 x 100 and 11 x 50.
    assert "online p50 6.22 µs · p99 128 µs · 1,100" in frame
    assert "batch p50 768 µs · p99 1.02 ms · 550" in frame


@pytest.mark.parametrize("size", [(20, 3), (40, 10), (60, 16), (80, 24), (100, 30), (140, 40), (300, 90)])
@pytest.mark.parametrize("kind", ["story", "hostile", "bare", "first"])
def test_frame_never_leaves_its_terminal(size: tuple[int, int], kind: str) -> None:
    width, height = size
    banner = ("x" * 200, "cgroups cannot be written: mount them read-write")
    result = colocation_run.simulate_run(
        30,
        others=(colocation_run.LONG, colocation_run.HOSTILE),
        sources=(*colocation_run.SOURCES, colocation_run.FAILING),
        startup_warnings=banner,
    )
    views = {
        "story": [build_view(r) for r in colocation_run.simulate_run(30).rounds],
        "hostile": [build_view(r) for r in result.rounds],
        "bare": [build_view(four_cpu_node.bare_cycle())],
        "first": [build_view(four_cpu_node.busy_cycle(1))],
    }[kind]
    entries = colocation_run.with_every_status(result) if kind == "hostile" else ()
    frame = overview_lines(
        views[-1], views, entries, width, height, notice="the agent does not answer" if kind == "hostile" else ""
    )
    assert len(frame) <= height
    assert max(line.cell_len for line in frame) <= width
    assert not any(char for line in frame for char in line.plain if not char.isprintable())


def test_the_reported_headroom_is_shown_only_if_it_fits() -> None:
    views, entries = calm()
    changed = msgspec.structs.replace(
        views[-1], reported_headroom=Headroom(cores=12.5, reason=Reason(rule="r", text="t"))
    )
    for width, fits in ((80, False), (140, True)):
        line = next(line for line in text(changed, views, entries, width, 24).splitlines() if line.startswith("lent"))
        assert line.endswith("headroom 0.25 · reported 12.50" if fits else "headroom 0.25")


def test_hostile_names_appear_as_text() -> None:
    result = colocation_run.simulate_run(10, others=(colocation_run.HOSTILE,))
    views = [build_view(r) for r in result.rounds]
    frame = text(views[-1], views, colocation_run.with_every_status(result), 200, 60)
    assert colocation_run.HOSTILE.key in frame
    assert "<i>read back</i> 0-1" in frame
    assert "[31m" not in frame, "cgroup paths are not shown here, and no colour code of theirs is"


def test_missing_numbers_are_dashes_not_zeros() -> None:
    frame = text(build_view(four_cpu_node.bare_cycle()), [], (), 100, 30)
    assert f"{formats.ABSENT} of 0 busy" in frame
    assert "No pods are listed: the agent watches every cgroup and decides nothing." in frame
    assert "Nothing runs" in frame


@pytest.mark.parametrize("act", list(ActMode))
def test_act_mode_is_always_in_the_first_line(act: ActMode) -> None:
    view = build_view(four_cpu_node.busy_cycle(2, act=act))
    first = text(view, [view], (), 80, 24).splitlines()[0]
    assert {ActMode.ON: "on: writes", ActMode.DRY_RUN: "dry-run: writes nothing", ActMode.OFF: "off: decides nothing"}[
        act
    ] in first


def test_banner_and_failed_sources_come_with_their_remedies() -> None:
    view = build_view(four_cpu_node.busy_cycle(2))
    frame = text(view, [view], (), 160, 30)
    assert "! PSI triggers need CAP_SYS_RESOURCE: add it to get them every second instead of every two" in frame
    assert "✕ psi: /proc/pressure/cpu: operation not supported (boot the kernel with psi=1)" in frame
    assert "✓ runqlat tp_btf" in frame


def colours(view: View) -> str:
    console = Console(
        width=120, height=30, file=io.StringIO(), force_terminal=True, color_system="standard", record=True
    )
    console.print(Group(*overview_lines(view, [view], (), 120, 30)))
    return console.export_text(styles=True)


def test_only_failures_are_red() -> None:
    well = colocation_run.simulate_run(3)
    assert ";31m" not in colours(build_view(well.rounds[-1])).replace("[31m", ";31m")
    ill = colocation_run.simulate_run(3, sources=(colocation_run.FAILING, *colocation_run.SOURCES))
    assert "\x1b[31m✕ psi" in colours(build_view(ill.rounds[-1]))


def test_an_unreachable_agent_is_reported() -> None:
    frame = overview_lines(
        None, [], (), 80, 24, notice="the agent at http://127.0.0.1:9102 does not answer; retrying every second"
    )
    assert "127.0.0.1:9102 does not answer" in frame[1].plain


def test_more_containers_than_lines() -> None:
    view = build_view(four_cpu_node.busy_cycle(2))
    many = tuple(
        msgspec.structs.replace(view.containers[1], pod=f"d/job-{i}", cgroup=f"/job-{i}", cpu_cores=i / 100)
        for i in range(50)
    )
    frame = text(msgspec.structs.replace(view, containers=many), [], (), 80, 24)
    assert "d/job-49" in frame
    assert "more with less CPU" in frame
    assert "d/job-1 " not in frame


def test_sources_that_know_sums_only() -> None:
    view = build_view(four_cpu_node.busy_cycle(2))
    web = view.containers[0]
    assert web.wait is not None
    wait = msgspec.structs.replace(web.wait, slots=None, p50_us=None, p99_us=None)
    sums = msgspec.structs.replace(view, containers=(msgspec.structs.replace(web, wait=wait),))
    frame = text(sums, [sums], (), 100, 30)
    assert f"100 waits, mean {formats.duration(wait.mean_us)}" in frame
    assert f"~{formats.duration(wait.mean_us).replace(' ', '')}" in frame


def test_bar_keeps_its_length_and_proportion() -> None:
    created = bar(20, 4.0, ((1.0, "o", ""), (2.0, "b", ""), (0.5, "r", "")))
    assert created.plain == "ooooo" + "b" * 10 + "rrr" + "··"
    assert bar(10, 2.0, ((5.0, "o", ""),)).plain == "o" * 10
    assert bar(10, 0.0, ((1.0, "o", ""),)).plain == "·" * 10


def test_sparkline_is_logarithmic_and_has_gaps() -> None:
    assert sparkline([100.0, None, 10_000.0, 1_000_000.0, 5e9], 100, 1_000_000) == "▁ ▅██"


def test_histogram_bars_stand_on_their_slots() -> None:
    slots = [0] * 27
    slots[3], slots[14] = 990, 10
    lines = histogram_lines("online", "cyan", (slots, 1000, 5.0), 40, 4)
    bottom = lines[4].plain
    assert bottom.startswith("0.1%│")
    assert [i for i, char in enumerate(bottom[5:32]) if char != " "] == [3, 14]
    # 1 % is two of four decades above 0.01 %: half of four rows; 99 % is nearly all of them.
    assert [lines[row].plain[5 + 14] for row in range(1, 5)] == [" ", " ", "█", "█"]
    assert [lines[row].plain[5 + 3] for row in range(1, 5)] == ["█"] * 4
    axis = lines[5].plain
    assert axis[5 + 3] == "┴"
    assert BOUNDS_NS[3] == 8000
    assert lines[0].plain.startswith("online p50 6.02 µs · p99 8.00 µs · 1,000")


def test_latencies_of_containers_and_cycles_are_merged() -> None:
    views = [build_view(four_cpu_node.busy_cycle(seq)) for seq in (2, 3)]
    slots, count, mean_us = container_runq_latencies(views, is_online)
    assert count == 200
    assert slots is not None
    assert (slots[3], slots[7], slots[14]) == (180, 18, 2)
    assert mean_us == pytest.approx((90 * 8 + 9 * 128 + 16384) / 100)
    assert container_runq_latencies(views, is_reclaimed)[1] == 100
    assert container_runq_latencies([], is_online) == (None, 0, None)


def test_wrapping_keeps_every_word_that_fits() -> None:
    sentence = "one two three four five six seven"
    created = [line.plain for line in wrap_text(sentence, 16, 5)]
    assert created == ["one two three", "  four five six", "  seven"]
    assert wrap_text(sentence, 16, 2)[1].plain.endswith("…")


def test_only_problems_have_a_line() -> None:
    history, entries = calm()
    assert not list(notice_lines(history[-1]))
    short = msgspec.structs.replace(
        RICH_MEMORY,
        condition=msgspec.structs.replace(RICH_MEMORY.condition, state=MemoryPressure.DROP_CACHE),
    )
    view = msgspec.structs.replace(history[-1], rejected=RICH_REJECTED, memory=short)
    shown = text(view, history, entries, 100, 40)
    assert f"! rejected default/db: {RICH_REJECTED['default/db'].text}" in shown
    assert f"! memory drop_cache: {short.condition.reason.text}" in shown


def test_the_verdict_on_the_cpu_quota_has_a_line() -> None:
    (view, *_), entries = calm()
    observed = msgspec.structs.replace(view, quota_trial=quota_verdict(helped=False).text)
    assert "The CPU quota of reclaimed pods did not help default/web: run-queue latency p99 41 ms -> 39 ms" in text(
        observed, [observed], entries, 120, 40
    )


def test_unknown_memory_is_no_alarm() -> None:
    unknown = msgspec.structs.replace(RICH_MEMORY, condition=RICH_MEMORY.numa_conditions[1])
    assert not list(notice_lines(msgspec.structs.replace(calm()[0][-1], memory=unknown)))

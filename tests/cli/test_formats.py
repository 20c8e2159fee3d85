"""Units and names in a person's words."""

from __future__ import annotations

import msgspec
import pytest

from api.decision import OutcomeStatus
from api.forecast import Forecast
from api.knobs import Knob, Reason
from api.text import printable
from cli import formats
from tests.builders import colocation_run
from tests.builders.full_node import FORECASTS


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (None, formats.ABSENT), (0.0, "0.00 µs"), (6.669, "6.67 µs"), (9.996, "10.0 µs"), (99.96, "100 µs"), (999.4, "999 µs"),
        (999.5, "1.00 ms"), (10_000.0, "10.0 ms"), (41_000.0, "41.0 ms"), (999_499.0, "999 ms"), (1_260_000.0, "1.26 s"),
        (34_000_000.0, "34.0 s"),
    ],
)  # fmt: skip
def test_durations_have_three_figures(us: float | None, text: str) -> None:
    assert formats.duration(us) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (None, formats.ABSENT),
        (0.0, "0 %"),
        (0.0004, "< 0.1 %"),
        (0.0125, "1.3 %"),
        (0.0994, "9.9 %"),
        (0.0996, "10 %"),
        (1.0, "100 %"),
    ],
)
def test_percentages_round_half_up_like_a_browser(ratio: float | None, text: str) -> None:
    assert formats.percent(ratio) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, formats.ABSENT),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (41 << 20, "41.0 MiB"),
        (3 << 30, "3.00 GiB"),
    ],
)
def test_sizes_are_powers_of_two(value: int | None, text: str) -> None:
    assert formats.size(value) == text


@pytest.mark.parametrize(
    ("knob", "value", "text"),
    [
        ("cpu.max", "max 100000", "no limit"), ("cpu.max", "55000 100000", "0.55 cores"), ("cpu.max", "rubbish", "rubbish"),
        ("cpu.max", "1 0", "1 0"), ("cpu.idle", "1", "yields to siblings"), ("cpu.idle", "0", "normal"),
        ("sched_runtime", "100001", "slice of 0.1 ms"), ("sched_runtime", "0", "default slice"),
        ("cpu.weight", "100", "100"),
        ("cpuset.mems", "0-1", "NUMA nodes 0-1"), ("memory.max", "max", "no limit"), ("memory.high", "536870912", "512 MiB"),
        ("drop_cache", "rubbish", "rubbish"),
        ("cpuset.cpus", "2-3", "CPUs 2-3"), ("cpuset.cpus", "", "all of its parent"), ("cpu.max", None, formats.ABSENT),
    ],
)  # fmt: skip
def test_knob_values_say_what_they_mean(knob: str, value: str | None, text: str) -> None:
    assert formats.knob_value(knob, value) == text


def test_names_cannot_move_the_cursor() -> None:
    assert printable("a\x1b[31mb\u202ec\r\n\x9bd é") == "a\\x1b[31mb\\u202ec\\r\\n\\x9bd é"


def test_a_decision_on_one_line() -> None:
    shrink = next(
        e for e in colocation_run.simulate_run(205).entries if e.outcome.decision.reason.rule == "wait_far_above_target"
    )
    line = formats.decision_line(shrink)
    text = shrink.outcome.decision.reason.text
    when = formats.clock(shrink.wall_time_ns / 1e6)
    assert line == f"{when}  ✓ applied  default/batch  cpu.max no limit → 0.20 cores  ({text})"


def test_a_decision_on_a_cgroup_of_no_pod_names_the_cgroup() -> None:
    entry = colocation_run.simulate_run(205).entries[-1]
    decision = msgspec.structs.replace(entry.outcome.decision, pod="", cgroup="/kubepods/besteffort")
    entry = msgspec.structs.replace(entry, outcome=msgspec.structs.replace(entry.outcome, decision=decision))
    assert "  /kubepods/besteffort  cpu.max " in formats.decision_line(entry)


def test_a_change_says_its_unit_once() -> None:
    quotas = [e.outcome for e in colocation_run.simulate_run(215).entries if e.outcome.decision.knob is Knob.QUOTA]
    changes = [formats.knob_change(outcome) for outcome in quotas]
    assert changes[:3] == ["no limit → 1.20 cores", "1.20 → 0.60 cores", "0.60 cores → no limit"]


def test_a_refused_decision_says_so_on_its_line() -> None:
    entries = colocation_run.with_every_status(colocation_run.simulate_run(120))
    lines = {entry.outcome.status: formats.decision_line(entry) for entry in entries}
    assert "✕ refused" in lines[OutcomeStatus.REFUSED]
    assert "(Permission denied (EACCES); " in lines[OutcomeStatus.REFUSED]
    assert all("\x1b" not in line and "\n" not in line for line in lines.values())
    assert Knob.CPUSET.value in lines[OutcomeStatus.MISMATCH]


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5.0, "0 s"), (0.4, "0 s"), (99.0, "99 s"), (150.0, "2 min"), (7200.0, "2.0 h")]
)
def test_ages(seconds: float, text: str) -> None:
    assert formats.age(seconds) == text


def test_huge_numbers_are_formatted() -> None:
    messages = [
        formats.cores(1e30),
        formats.integer(1e300),
        formats.percent(1e30),
        formats.duration(-1e40),
        formats.clock(1e30),
    ]
    assert messages == ["1.00e+30", "1.00e+300", "1.00e+32 %", "-1.00e+40 µs", formats.ABSENT]
    assert formats.size(10**30) == "9.09e+17 TiB"


CPU, MEMORY = FORECASTS
UNKNOWN = msgspec.structs.replace(
    CPU,
    forecast=msgspec.structs.replace(
        CPU.forecast,
        peak=None,
        reason=Reason(rule="no_history", text="Less than 10 minutes of use are known, too little for a forecast."),
    ),
)
MISSED = "the peak exceeded {} of the last day's forecasts, 5.5 % are allowed"
ALARM = "memory: at most 2.93 GiB within the hour, 1.95 GiB now, not trusted yet; above every forecast within the last hour; "


@pytest.mark.parametrize(
    ("outlook", "text"),
    [
        (CPU, f"cpu: at most 2.25 cores within the hour, 1.50 cores now; {MISSED.format('6.3 %')}"),
        (MEMORY, f"{ALARM}{MISSED.format('25 %')}"),
        (
            msgspec.structs.replace(CPU, score=None, used=None),
            f"cpu: at most 2.25 cores within the hour, {formats.ABSENT} cores now",
        ),
        (UNKNOWN, "cpu: Less than 10 minutes of use are known, too little for a forecast."),
    ],
)
def test_a_forecast_in_words(outlook: Forecast, text: str) -> None:
    assert formats.forecast_text(outlook) == text

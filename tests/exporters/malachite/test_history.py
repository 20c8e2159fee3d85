"""How far back rates look, whatever the rhythm of the cycles."""

from __future__ import annotations

import msgspec
import pytest

from api.snapshot import CgroupSample, IoStat, Snapshot
from exporters.malachite.history import MalachiteHistory
from tests.exporters.malachite.machine import BUSY, MS, S, snapshot


def at(taken_ns: int, *, boot: str = "one", read_at_ns: int | None = None, group: int = 11) -> Snapshot:
    """A snapshot at that time, with one cgroup that has used as many nanoseconds and read as many blocks."""
    sample = CgroupSample(
        path=BUSY, id=group, cpu_usage_ns=taken_ns, files_read_at_ns=read_at_ns,
        io={"8:0": IoStat(read_bytes=0, write_bytes=0, reads=read_at_ns or taken_ns, writes=0)},
    )  # fmt: skip
    return msgspec.structs.replace(
        snapshot(1), taken_at_ns=taken_ns, wall_time_ns=taken_ns, boot_id=boot, cgroups={BUSY: sample}
    )


def observed(*snapshots: Snapshot) -> MalachiteHistory:
    history = MalachiteHistory()
    for each in snapshots:
        history = history.after(each)
    return history


def ages(history: MalachiteHistory) -> tuple[float, float]:
    assert history.latest is not None
    assert history.past is not None
    assert history.previous is not None
    now = history.latest.taken_at_ns
    return (now - history.past.taken_at_ns) / S, (now - history.previous.taken_at_ns) / S


@pytest.mark.parametrize(
    ("interval_s", "past_s", "previous_s"),
    [(1.0, 5.0, 1.0), (0.999, 4.995, 0.999), (1.01, 5.05, 1.01), (2.0, 6.0, 2.0), (10.0, 10.0, 10.0), (0.1, 4.5, 0.5)],
)
def test_the_past_is_the_youngest_that_is_about_five_seconds_old(
    interval_s: float, past_s: float, previous_s: float
) -> None:
    interval_ns = int(interval_s * S)
    history = observed(*(at((n + 1) * interval_ns) for n in range(200)))
    past, previous = ages(history)
    assert past == pytest.approx(past_s, abs=0.5 if interval_s < 0.5 else 1e-6)
    assert previous <= max(previous_s, 0.6)


def test_cycles_that_alarms_start_do_not_crowd_out_the_past() -> None:
    ticks = [n * S for n in range(1, 11)]
    alarms = [10 * S + n * 20 * MS for n in range(1, 30)]
    history = observed(*(at(moment) for moment in ticks + alarms))
    past, _ = ages(history)
    assert 4.5 <= past < 5.6
    assert len(history.frames) <= 7


@pytest.mark.parametrize("change", [{"boot": "two"}, {"taken_ns": 3 * S}])
def test_after_a_reboot_nothing_is_compared(change: dict[str, object]) -> None:
    history = observed(at(9 * S), at(10 * S), at(**({"taken_ns": 11 * S} | change)))  # type: ignore[arg-type]
    assert history.past is None
    assert history.latest is not None
    assert history.cgroup(history.latest.cgroups[BUSY]) is None
    assert history.io(history.latest.cgroups[BUSY]) is None


def test_a_cgroup_is_compared_with_itself_as_far_back_as_it_goes() -> None:
    history = observed(*(at(n * S, group=11 if n < 9 else 12) for n in range(1, 12)))
    assert history.latest is not None
    actual = history.cgroup(history.latest.cgroups[BUSY])
    assert actual is not None
    assert actual[1].cpu_usage_ns == 9 * S


@pytest.mark.parametrize(("period_s", "apart_s"), [(1, 5), (5, 5), (10, 10), (3, 6)])
def test_files_that_are_read_less_often_are_compared_with_an_earlier_read(period_s: int, apart_s: int) -> None:
    history = observed(*(at(n * S, read_at_ns=n // period_s * period_s * S) for n in range(period_s, 41)))
    assert history.latest is not None
    sample = history.latest.cgroups[BUSY]
    before = history.io(sample)
    assert before is not None
    assert sample.io["8:0"].reads - before.io["8:0"].reads == apart_s * S


def test_only_one_read_is_no_past() -> None:
    history = observed(*(at(n * S, read_at_ns=S) for n in range(1, 5)))
    assert history.latest is not None
    assert history.io(history.latest.cgroups[BUSY]) is None
    assert history.tcp is None or history.tcp.read_at_ns < S


def test_a_history_that_requests_read_does_not_change() -> None:
    """The cycle thread makes the next one while the event loop answers from this one."""
    earlier = observed(*(snapshot(second) for second in range(3)))
    frames, latest = earlier.frames, earlier.latest
    later = earlier.after(snapshot(3))
    assert (earlier.frames, earlier.latest) == (frames, latest)
    assert (len(frames), len(later.frames)) == (3, 4)

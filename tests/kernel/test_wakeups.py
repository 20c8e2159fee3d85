"""Wakeups by waker, against workloads whose every wakeup is known: bytes that are passed on, timers, and a CPU that is held."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from api.histogram import BOUNDS_NS, slot_of
from api.rates import runq_latency_delta
from api.snapshot import Durations, Wakeups
from probes.loader import load
from probes.maps import cpu_id_limit
from probes.per_cgroup_probe import NO_DURATIONS, ROOT_CGROUP_ID
from probes.wakeups import FORMS, NO_WAKEUPS, WakeupsProbe, job, open_wakeups
from tests.builders.waiting import until
from tests.kernel.blame_window import several
from tests.kernel.open_probes import opened, probe_fixture
from tests.kernel.real_cgroups import TestCgroup
from tests.kernel.test_runqlat import Hog

pytestmark = pytest.mark.kernel

MS = 1_000_000
TIMES = 1000
CLOSE = 0.04
"""Error allowed: a byte that is there before its reader has gone to sleep wakes no task, and some virtual machines let no
tracepoint fire while a process of their supervisor has the CPU, whichever task an interrupt wakes meanwhile."""
FIRST = """
import os, sys, time
reader, writer, times = map(int, sys.argv[1:])
while sys.stdin.read(1):
    for _ in range(times):
        time.sleep(0.001)
        os.write(writer, b"x")
        if reader >= 0: os.read(reader, 1)
    print("done", flush=True)
"""
"""Sleeps, sends a byte and waits for the answer, if there is a next stage."""
NEXT = """
import os, sys, time
reader, writer, thinks = map(int, sys.argv[1:])
while os.read(reader, 1):
    if thinks: time.sleep(0.0005)
    if writer >= 0: os.write(writer, b"x")
"""
"""Passes on what it gets; one that answers thinks before, so that the other stage has gone to sleep."""
SERVER = """
import socket, sys, time
connection = socket.socket(fileno=int(sys.argv[1]))
while connection.recv(1):
    time.sleep(0.0005)
    connection.send(b"x")
"""
CLIENT = """
import socket, sys, time
connection, times = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
while sys.stdin.read(1):
    for _ in range(times):
        time.sleep(0.001)
        connection.send(b"x")
        connection.recv(1)
    print("done", flush=True)
"""
FORKER = """
import os, sys
while sys.stdin.read(1):
    for _ in range(int(sys.argv[1])):
        if os.fork() == 0: os._exit(0)
        os.wait()
    print("done", flush=True)
"""


class Stage(NamedTuple):
    """A process of the workload, in a cgroup of its own."""

    group: TestCgroup
    process: subprocess.Popen[bytes]

    def slept(self) -> int:
        """How often it has given up its CPU of its own accord: each sleep ends with one wakeup."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def start(group: TestCgroup, code: str, *arguments: int, fds: Sequence[int] = ()) -> Stage:
    argv = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(argv, pass_fds=fds, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    group.processes.append(process)
    for directory in group.dirs:
        (directory / "cgroup.procs").write_text(str(process.pid))
    return Stage(group, process)


def run(stage: Stage) -> None:
    """Let the first stage do its part: it starts on a byte, and writes one when it is done."""
    assert stage.process.stdin is not None
    assert stage.process.stdout is not None
    stage.process.stdin.write(b"x")
    stage.process.stdin.flush()
    assert stage.process.stdout.readline() == b"done\n"


def line(groups: Sequence[TestCgroup], *, answered: bool) -> list[Stage]:
    """Each passes on to the next what it gets; the last one answers the first."""
    pipes = [os.pipe() for _ in groups]
    stages = []
    for at, group in enumerate(groups):
        reader, writer = pipes[at - 1][0], pipes[at][1]
        if not answered:
            reader, writer = (reader if at else -1), (writer if at < len(groups) - 1 else -1)
        last = at == len(groups) - 1
        arguments = (reader, writer, int(last and answered)) if at else (reader, writer, TIMES)
        fds = [fd for fd in (reader, writer) if fd >= 0]
        stages.append(start(group, NEXT if at else FIRST, *arguments, fds=fds))
    for fd in (fd for pipe in pipes for fd in pipe):
        os.close(fd)
    return stages


source = probe_fixture(open_wakeups, FORMS)


def read(source: WakeupsProbe, *groups: TestCgroup) -> dict[str, Wakeups]:
    live = {ROOT_CGROUP_ID: "/", **{group.id: group.path for group in groups}}
    wakers = source.read(live).cgroups
    wakeups = {path: wakers[number]["wakeups"] for number, path in live.items()}
    assert all(isinstance(observed, Wakeups) for observed in wakeups.values())
    return wakeups  # type: ignore[return-value]


def delta(before: Durations, after: Durations) -> Durations:
    change = runq_latency_delta(before, after)
    assert change is not None
    return change


def grown(before: Wakeups, after: Wakeups) -> Wakeups:
    named = {
        path: delta(before.by_cgroup.get(path, NO_DURATIONS), observed) for path, observed in after.by_cgroup.items()
    }
    return Wakeups(
        by_cgroup={path: observed for path, observed in named.items() if observed.count},
        interrupt=delta(before.interrupt, after.interrupt),
        kernel_thread=delta(before.kernel_thread, after.kernel_thread),
        other=delta(before.other, after.other),
    )


def watch(source: WakeupsProbe, stages: Sequence[Stage]) -> tuple[list[Wakeups], list[int]]:
    """What a run of the workload has brought to each stage: its wakeups, and how often it slept."""
    groups = [stage.group for stage in stages]
    # Where the machine is so busy that bytes find no sleeping reader (the kernel counts those), the run says nothing of them.
    for _ in range(3):
        until(lambda: all(state(stage.process.pid) == "S" for stage in stages))
        before, started, missed = read(source, *groups), [stage.slept() for stage in stages], left_out(source)
        run(stages[0])
        until(lambda: all(state(stage.process.pid) == "S" for stage in stages))
        after, slept = read(source, *groups), [stage.slept() - at for stage, at in zip(stages, started, strict=True)]
        assert left_out(source) == missed, "CLOSE is not for what the kernel keeps from the programs"
        if min(slept) > (1 - CLOSE / 2) * TIMES:
            break
    return [grown(before[group.path], after[group.path]) for group in groups], slept


def left_out(source: WakeupsProbe) -> int:
    """Runs of its programs that the kernel left out because they came in the middle of another one."""
    return sum(program.missed for program in source.stats().values())


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def counts(wakeups: Wakeups) -> Mapping[str, int]:
    return {path: observed.count for path, observed in wakeups.by_cgroup.items()}


def total(wakeups: Wakeups) -> int:
    rest = wakeups.interrupt.count + wakeups.kernel_thread.count + wakeups.other.count
    return sum(counts(wakeups).values()) + rest


def as_often_as(slept: Sequence[int]) -> list[object]:
    """The kernel's own books: each sleep ends with one wakeup."""
    return [pytest.approx(times, rel=CLOSE) for times in slept]


def test_a_byte_there_and_back_is_one_wakeup_each_way_and_a_timer_is_an_interrupt(source: WakeupsProbe) -> None:
    with several("ping", "pong") as (ping, pong):
        (first, second), slept = watch(source, line([ping, pong], answered=True))
    assert counts(second) == {ping.path: pytest.approx(TIMES, rel=CLOSE)}
    assert counts(first) == {pong.path: pytest.approx(TIMES, rel=CLOSE), "/": pytest.approx(1, abs=2)}, "one to begin"
    assert first.interrupt.count == pytest.approx(TIMES, rel=CLOSE)
    assert second.interrupt.count == pytest.approx(TIMES, rel=CLOSE)
    assert [total(first), total(second)] == as_often_as(slept)
    assert first.other == second.other == NO_DURATIONS


def test_a_chain_of_three_has_two_hops(source: WakeupsProbe) -> None:
    with several("a", "b", "c") as groups:
        (first, second, third), slept = watch(source, line(groups, answered=False))
    a, b, _ = groups
    assert counts(second) == {a.path: pytest.approx(TIMES, rel=CLOSE)}
    assert counts(third) == {b.path: pytest.approx(TIMES, rel=CLOSE)}
    assert not counts(first).keys() - {"/"}
    assert first.interrupt.count == pytest.approx(TIMES, rel=CLOSE)
    assert [total(observed) for observed in (first, second, third)] == as_often_as(slept)


def test_packets_over_loopback_are_the_senders_doing(source: WakeupsProbe) -> None:
    """They are received in a softirq, and at most one in ten of those wakeups may count as an interrupt's."""
    with several("client", "server") as (client, server), socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        far, _ = listener.accept()
        stages = [
            start(client, CLIENT, near.fileno(), TIMES, fds=[near.fileno()]),
            start(server, SERVER, far.fileno(), fds=[far.fileno()]),
        ]
        near.close()
        far.close()
        (first, second), slept = watch(source, stages)
    assert counts(second)[client.path] == pytest.approx(TIMES, rel=0.1)
    assert counts(first)[server.path] == pytest.approx(TIMES, rel=0.1)
    assert first.interrupt.count == pytest.approx(TIMES, rel=0.1), "its timer"
    assert second.interrupt.count == pytest.approx(TIMES, rel=0.1)
    assert [total(first), total(second)] == as_often_as(slept)


def test_a_new_task_is_woken_by_its_maker(source: WakeupsProbe) -> None:
    """One wakeup for each child, and at most one more for the parent that waits for its end."""
    with several("forker") as (group,):
        ((observed,), _) = watch(source, [start(group, FORKER, TIMES)])
    assert TIMES <= counts(observed)[group.path] <= 2.1 * TIMES


def test_the_latency_is_how_long_the_cpu_was_held(source: WakeupsProbe) -> None:
    """A real-time program of the root wakes a sleeper on its CPU and holds that for 20 ms: in (16.4, 32.8] ms, each time."""
    times, hold_ns = 10, 20 * MS
    with several("held") as (group,):
        workload = Hog(group, fifo=False, hold_s=hold_ns / 1e9, times=times)
        assert workload.ready
        before = read(source, group)[group.path]
        assert len(list(workload.holdings())) == times
        workload.finish()
        wakers = grown(before, read(source, group)[group.path])
    observed = wakers.by_cgroup.get("/", wakers.other)
    assert observed.slots is not None
    slot = slot_of(hold_ns)
    assert BOUNDS_NS[slot - 1] < hold_ns <= BOUNDS_NS[slot]
    assert times - 1 <= observed.slots[slot] <= times
    assert observed.sum_ns == pytest.approx(observed.slots[slot] * hold_ns, rel=0.1)


def test_every_wakeup_has_a_reason(source: WakeupsProbe) -> None:
    with several("quiet") as (group,):
        assert read(source, group)[group.path] == NO_WAKEUPS


def test_a_full_table_of_pairs_says_so_and_every_wakeup_still_counts() -> None:
    """Two pairs on each CPU, for eight hops in a row."""
    with opened(open_wakeups) as example:
        form = example.form
    created = job((form,), cpu_id_limit())
    small = msgspec.structs.replace(created, constants={**created.constants, "PAIR_BITS": 1})
    with several(*"abcdefgh") as groups, load(small) as loaded:
        source = WakeupsProbe(loaded)
        wakers, slept = watch(source, line(groups, answered=True))
        problem = source.problem()
        source.close()
    assert [total(observed) for observed in wakers] == as_often_as(slept)
    assert sum(observed.other.count for observed in wakers) > TIMES
    assert problem is not None
    assert "wakeups count as other: the table of wakers and woken cgroups is full" in problem.reason


def test_wakers_that_are_gone_leave_what_is_new_to_the_rest(source: WakeupsProbe) -> None:
    """Counts of a removed waker are removed with it; all others never fall."""
    with several("woken") as (woken,):
        with several("gone") as (removed,):
            (_, observed), _ = watch(source, line([removed, woken], answered=False))
            assert counts(observed)[removed.path] == pytest.approx(TIMES, rel=CLOSE)
            reported = read(source, woken, removed)[woken.path]
        for _ in range(4):
            after = read(source, woken)[woken.path]
            assert removed.path not in after.by_cgroup
            assert after.other.count <= 0.1 * TIMES
            assert after.interrupt.count >= reported.interrupt.count


def test_the_best_form_is_taken() -> None:
    with opened(open_wakeups) as probe:
        assert probe.form == FORMS[0]

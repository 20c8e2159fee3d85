"""The killer by signals on real cgroups: processes that handle SIGTERM, ignore it, fork, vanish, or belong to no victim."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.eviction import signals
from agent.eviction.runner import evict_victims
from agent.eviction.signals import SignalEvictor
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.eviction import EvictionEvent, EvictionEventReason, EvictionResult, EvictionVictim
from api.knobs import Reason
from api.pod import Container, Pod
from api.qos import QoSLevel
from tests.builders import waiting
from tests.kernel.real_cgroups import TestCgroup, cgroup

pytestmark = pytest.mark.kernel

S = 1_000_000_000
SLEEP = "print(flush=True)\nimport time\ntime.sleep(600)"
IGNORING = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP
FORKS = """import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(flush=True)
while True:
    if os.fork() == 0:
        time.sleep(0.05)
        os.fork()
        time.sleep(0.05)
        os._exit(0)
    time.sleep(0.01)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""
FORK_ON_REQUEST = """import os, signal, time
signals = []
signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
print(flush=True)
while not signals:
    time.sleep(0.01)
os.fork()
time.sleep(600)
"""


class Clock:
    """CLOCK_MONOTONIC that a test turns."""

    def __init__(self) -> None:
        self.now_ns = 100 * S

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def killer(hierarchy: Hierarchy, clock: Clock) -> Iterator[SignalEvictor]:
    instance = SignalEvictor(hierarchy, clock=clock)
    yield instance
    instance.close()


@pytest.fixture
def group(hierarchy: Hierarchy) -> Iterator[TestCgroup]:
    with cgroup(hierarchy, "evict") as instance:
        yield instance


def pod(*cgroups: str) -> Pod:
    containers = tuple(Container(name=f"c{i}", cgroup=path) for i, path in enumerate(cgroups))
    return Pod(uid="default/p", namespace="default", name="p", qos=QoSLevel.RECLAIMED, containers=containers)


def run(group: TestCgroup, program: str) -> subprocess.Popen[bytes]:
    """A Python program inside the cgroup that has come as far as its first line."""
    procs = [str(directory / "cgroup.procs") for directory in group.dirs]
    joined = f"import os\nfor path in {procs!r}:\n    open(path, 'w').write(str(os.getpid()))\n{program}"
    process = subprocess.Popen([sys.executable, "-c", joined], stdout=subprocess.PIPE)
    group.processes.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    return process


@contextmanager
def inside(group: TestCgroup, hierarchy: Hierarchy) -> Iterator[None]:
    """This process in that cgroup, as the killer sees it, and back where it was."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    primary = hierarchy.primary
    home = next(path for _, names, path in lines if primary.name in names.split(",") or not names)
    (primary / group.path.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (primary / home.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))


def reasons(events: Sequence[EvictionEvent]) -> list[EvictionEventReason]:
    return [event.reason for event in events]


def until(killer: SignalEvictor, done: Callable[[list[EvictionEvent]], bool]) -> list[EvictionEvent]:
    """Return the outcomes until they satisfy the condition."""
    events: list[EvictionEvent] = []

    def finished() -> bool:
        events.extend(killer.outcomes())
        return done(events)

    waiting.until(finished, lambda: events, 60)
    return events


def ended(events: list[EvictionEvent]) -> bool:
    return EvictionEventReason.SUCCEEDED in reasons(events)


def test_a_pod_that_handles_sigterm_ends(killer: SignalEvictor, group: TestCgroup) -> None:
    processes = [run(group, SLEEP), run(group, SLEEP)]
    killer.evict(pod(group.path), 30.0, "because")
    assert killer.terminating == {"default/p"}
    events = until(killer, ended)
    assert reasons(events) == [EvictionEventReason.CREATED, EvictionEventReason.SUCCEEDED]
    assert [process.wait() for process in processes] == [-15, -15]
    assert events[0].message == "Successfully create eviction; reason: because"
    assert events[1].message == "Evicted pod has been deleted physically; reason: because"
    assert not killer.terminating


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace_period(
    killer: SignalEvictor, group: TestCgroup, clock: Clock
) -> None:
    process = run(group, IGNORING)
    killer.evict(pod(group.path), 5.0, "r")
    clock.now_ns += 5 * S - 1
    assert reasons(killer.outcomes()) == [EvictionEventReason.CREATED]
    assert process.poll() is None
    clock.now_ns += 1
    assert reasons(until(killer, ended)) == [EvictionEventReason.SUCCEEDED]
    assert process.wait() == -9


def test_a_shorter_grace_replaces_a_longer_one_and_a_longer_one_nothing(
    killer: SignalEvictor, group: TestCgroup, clock: Clock
) -> None:
    process = run(group, IGNORING)
    killer.evict(pod(group.path), 60.0, "slow")
    clock.now_ns += 10 * S
    killer.evict(pod(group.path), 1.0, "fast")
    killer.evict(pod(group.path), 600.0, "slower")
    clock.now_ns += S - 1
    assert reasons(killer.outcomes()) == [EvictionEventReason.CREATED]
    clock.now_ns += 1
    events = until(killer, ended)
    assert process.wait() == -9
    assert events[-1].message.endswith("reason: fast")


def test_no_grace_kills_at_once_and_no_process_outside_the_pod(
    killer: SignalEvictor, group: TestCgroup, hierarchy: Hierarchy
) -> None:
    with cgroup(hierarchy, "evict-not") as other:
        stays, leaves = run(other, SLEEP), run(group, IGNORING)
        killer.evict(pod(group.path), 0.0, "r")
        assert leaves.wait() == -9
        assert reasons(until(killer, ended)) == [EvictionEventReason.CREATED, EvictionEventReason.SUCCEEDED]
        assert stays.poll() is None


def test_forks_do_not_outrun_it(killer: SignalEvictor, group: TestCgroup, clock: Clock) -> None:
    run(group, FORKS)
    killer.evict(pod(group.path), 1.0, "r")
    clock.now_ns += S
    until(killer, ended)
    assert (group.dirs[0] / "cgroup.procs").read_text() == ""


def test_cgroups_below_are_the_pods_too(killer: SignalEvictor, group: TestCgroup, hierarchy: Hierarchy) -> None:
    inner = TestCgroup(hierarchy, f"{group.path}/inner")
    try:
        process = run(inner, SLEEP)
        killer.evict(pod(group.path), 30.0, "r")
        until(killer, ended)
        assert process.wait() == -15
    finally:
        inner.close()


def test_a_process_that_moved_to_another_cgroup_is_spared(
    killer: SignalEvictor, group: TestCgroup, hierarchy: Hierarchy, clock: Clock
) -> None:
    with cgroup(hierarchy, "evict-away") as other:
        process = run(group, IGNORING)
        killer.evict(pod(group.path), 5.0, "r")
        for directory in other.dirs:
            (directory / "cgroup.procs").write_text(str(process.pid))
        clock.now_ns += 10 * S
        assert reasons(until(killer, ended)) == [EvictionEventReason.CREATED, EvictionEventReason.SUCCEEDED]
        assert process.poll() is None
        process.kill()
        process.wait()


def test_a_cgroup_of_the_same_path_is_another(
    killer: SignalEvictor, group: TestCgroup, hierarchy: Hierarchy, clock: Clock
) -> None:
    first = TestCgroup(hierarchy, f"{group.path}/pod")
    old = run(first, IGNORING)
    killer.evict(pod(first.path), 5.0, "r")
    old.kill()
    old.wait()
    first.close()
    second = TestCgroup(hierarchy, f"{group.path}/pod")
    try:
        fresh = run(second, IGNORING)
        clock.now_ns += 10 * S
        assert ended(list(killer.outcomes()))
        assert fresh.poll() is None
    finally:
        second.close()


def test_a_process_started_again_in_the_cgroup_is_another(
    killer: SignalEvictor, group: TestCgroup, clock: Clock
) -> None:
    old = run(group, SLEEP)
    killer.evict(pod(group.path), 5.0, "r")
    assert old.wait() == -15
    fresh = run(group, SLEEP)
    clock.now_ns += 10 * S
    assert reasons(killer.outcomes()) == [EvictionEventReason.CREATED, EvictionEventReason.SUCCEEDED]
    assert (fresh.poll(), killer.terminating) == (None, frozenset())
    # It can be signalled as well.
    killer.evict(pod(group.path), 5.0, "r")
    assert fresh.wait() == -15


def test_a_container_that_is_started_again_is_spared_while_another_one_goes_on(
    killer: SignalEvictor, group: TestCgroup, hierarchy: Hierarchy, clock: Clock
) -> None:
    with cgroup(hierarchy, "evict-second") as other:
        terminates, ignores = run(group, SLEEP), run(other, IGNORING)
        killer.evict(pod(group.path, other.path), 5.0, "r")
        assert terminates.wait() == -15
        fresh = run(group, SLEEP)
        assert reasons(killer.outcomes()) == [EvictionEventReason.CREATED]
        clock.now_ns += 5 * S
        until(killer, ended)
        assert (ignores.wait(), fresh.poll()) == (-9, None)


def test_children_of_a_signalled_process_are_killed_too(killer: SignalEvictor, group: TestCgroup, clock: Clock) -> None:
    """The parent is gone before the grace period ends; its child is known and is killed."""
    parent = run(group, FORK_ON_REQUEST)
    killer.evict(pod(group.path), 5.0, "r")
    waiting.until(lambda: len((group.dirs[0] / "cgroup.procs").read_text().split()) == 2)
    assert reasons(killer.outcomes()) == [EvictionEventReason.CREATED]
    parent.kill()
    parent.wait()
    assert (reasons(killer.outcomes()), killer.terminating) == ([], {"default/p"})
    clock.now_ns += 5 * S
    until(killer, ended)
    assert (group.dirs[0] / "cgroup.procs").read_text() == ""


def test_a_failed_signal_is_reported_once_and_tried_again(
    killer: SignalEvictor, group: TestCgroup, clock: Clock
) -> None:
    process = run(group, IGNORING)

    def forbidden(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(signals, "_signal_cgroup", forbidden)
        patched.setattr(signals, "_kill_cgroup", forbidden)
        killer.evict(pod(group.path), 5.0, "r")
        assert (killer.stuck, killer.terminating) == ({"default/p"}, {"default/p"})
        events = list(killer.outcomes())
        for _ in range(20):
            clock.now_ns += 5 * S
            events += killer.outcomes()
    assert reasons(events) == [EvictionEventReason.CREATED, EvictionEventReason.FAILED, EvictionEventReason.EXCEEDED]
    assert events[1].message == "processes cannot be signalled: Operation not permitted; reason: r"
    assert process.poll() is None
    until(killer, ended)
    assert (process.wait(), killer.stuck, killer.terminating) == (-9, frozenset(), frozenset())


def test_the_agents_own_pod_is_refused(
    killer: SignalEvictor, group: TestCgroup, hierarchy: Hierarchy, clock: Clock
) -> None:
    with inside(group, hierarchy):
        killer.evict(pod(group.path), 0.0, "r")
    events = list(killer.outcomes())
    assert reasons(events) == [EvictionEventReason.FAILED]
    assert events[0].message == "the agent itself runs in this pod; reason: r"
    assert events[0].warning
    assert (killer.terminating, killer.stuck) == (frozenset(), {"default/p"})
    # After a minute it may be signalled again.
    clock.now_ns += 60 * S - 1
    killer.outcomes()
    assert killer.stuck == {"default/p"}
    clock.now_ns += 1
    killer.outcomes()
    assert killer.stuck == frozenset()


def test_the_agent_that_joins_a_pod_on_its_way_out_is_spared(
    killer: SignalEvictor, group: TestCgroup, hierarchy: Hierarchy, clock: Clock
) -> None:
    process = run(group, IGNORING)
    killer.evict(pod(group.path), 1.0, "r")
    with inside(group, hierarchy):
        clock.now_ns += S
        events = list(killer.outcomes())
        assert process.wait() == -9
    assert ended([*events, *killer.outcomes()])


@pytest.mark.parametrize("path", ["/dioptase-test-nobody", "/", "/../dioptase-test-nobody"])
def test_a_pod_without_cgroups_fails_visibly(killer: SignalEvictor, path: str) -> None:
    killer.evict(pod(path), 1.0, "r")
    events = list(killer.outcomes())
    assert [(event.reason, event.message) for event in events] == [
        (EvictionEventReason.FAILED, "no cgroup of the pod is there; reason: r")
    ]
    assert not killer.terminating


def test_a_pod_that_outlives_its_kill_is_reported_once(tmp_path: Path, clock: Clock) -> None:
    """Plain files stand for a cgroup that goes on listing a process that is killed already."""
    dead = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    dead.kill()
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    (tmp_path / "stuck").mkdir()
    (tmp_path / "stuck/cgroup.procs").write_text(f"{dead.pid}\n")
    killer = SignalEvictor(Hierarchy(v1={"cpu": tmp_path}, v2=None), clock=clock)
    killer.evict(pod("/stuck"), 60.0, "r")
    clock.now_ns += 90 * S - 1
    assert reasons(killer.outcomes()) == [EvictionEventReason.CREATED]
    clock.now_ns += 1
    late = list(killer.outcomes())
    assert reasons(late) == [EvictionEventReason.EXCEEDED]
    assert late[0].message == "processes remain 90 s after SIGTERM, grace period 60 s; reason: r"
    clock.now_ns += 90 * S
    assert not killer.outcomes()
    assert killer.terminating == killer.stuck == {"default/p"}
    dead.wait()
    killer.close()


@pytest.mark.parametrize("fields", [{"dry_run": True}, {"notify": True}])
def test_shown_and_soft_victims_are_not_killed(killer: SignalEvictor, fields: dict[str, bool]) -> None:
    victim = EvictionVictim(
        pod="default/p", uid="default/p", plugin="x", scope="", reason=Reason(rule="r", text="t"), forced=False,
        grace_s=0, **fields,
    )  # fmt: skip
    evict_victims(EvictionResult(victims=(victim,)), [pod("/nobody")], killer)
    assert not killer.outcomes()

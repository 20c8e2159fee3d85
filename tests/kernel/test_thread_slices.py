"""Slices of real threads in real cgroups: shortened, inherited, refused, restored, also after the agent was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner

from agent.qrm.actuator.sched_attr import SLICE_POLICIES, SchedulerCalls
from agent.qrm.actuator.state_dir import open_originals, read_boot_id
from agent.qrm.actuator.thread_slices import FILE_NAME, PERMISSION_REMEDY, ThreadSlices
from agent.qrm.decisions.cpu_priority import SHORT_SLICE
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.decision import Decision, OutcomeStatus
from api.knobs import Knob, Reason
from cli.reset import reset
from tests.builders.waiting import until
from tests.kernel.real_cgroups import TestCgroup, cgroup

SHORT, OWN_SLICE = int(SHORT_SLICE), 5_000_000
THREADS = """import os, sys, threading, time
def nap(): time.sleep(60)
for _ in range(3): threading.Thread(target=nap, daemon=True).start()
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
threading.Thread(target=nap, daemon=True).start()
pid = os.fork()
if pid: os.waitpid(pid, 0)
else: os.execvp("sleep", ["sleep", "60"])
"""
KILLED = """import os, signal, sys
from pathlib import Path
from agent.qrm.actuator.sched_attr import SchedulerCalls
from agent.qrm.actuator.state_dir import open_originals, read_boot_id
from agent.qrm.actuator.thread_slices import ThreadSlices
from agent.sensors.cgroup.hierarchy import detect_hierarchy
from tests.kernel.test_thread_slices import decision_of
state = Path(sys.argv[1])
open_originals(state, read_boot_id())
(outcome,) = ThreadSlices(detect_hierarchy(), SchedulerCalls(), state, read_boot_id()).apply([decision_of(*sys.argv[2:])])
print(outcome.status.value, outcome.error, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def calls() -> SchedulerCalls:
    opened = SchedulerCalls()
    if opened.default_slice_ns() is None:
        pytest.skip("this kernel ignores slices: needs Linux 6.12")
    return opened


@pytest.fixture
def state(tmp_path: Path) -> Path:
    open_originals(tmp_path / "state", read_boot_id()).close()
    return tmp_path / "state"


def decision_of(path: str, number: str | int) -> Decision:
    return Decision(
        cgroup=path, cgroup_id=int(number), pod="default/batch", knob=Knob.SLICE, value=SHORT_SLICE,
        reason=Reason(rule="short_slice", text="as decided"),
    )  # fmt: skip


def decision(group: TestCgroup) -> Decision:
    return decision_of(group.path, group.id)


def threads(group: TestCgroup) -> list[int]:
    name = "cgroup.threads" if group.hierarchy.mode == "v2" else "tasks"
    return [int(line) for line in group.file("cpu", name).read_text().split()]


def slices_of(group: TestCgroup, calls: SchedulerCalls) -> set[int]:
    readings = [calls.read(thread) for thread in threads(group)]
    return {reading.slice_ns for reading in readings if reading is not None}


def test_the_kernel_honours_the_slice_and_zero_is_the_default(calls: SchedulerCalls) -> None:
    before = calls.read(0)
    assert before is not None
    assert before.policy in SLICE_POLICIES
    assert 100_000 <= (calls.default_slice_ns() or 0) <= 100_000_000
    assert calls.read(0) == before, "the trial leaves the calling thread alone"


def test_children_inherit_and_a_reset_after_a_kill_restores_all(
    hierarchy: Hierarchy, calls: SchedulerCalls, state: Path, tmp_path: Path
) -> None:
    default, go = calls.default_slice_ns(), tmp_path / "go"
    with cgroup(hierarchy, "slices") as group:
        group.start([sys.executable, "-c", THREADS, str(go)])
        until(lambda: len(threads(group)) == 4)
        assert slices_of(group, calls) == {default}
        command = [sys.executable, "-c", KILLED, str(state), group.path, str(group.id)]
        killed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (killed.returncode, killed.stdout.strip()) == (-signal.SIGKILL, "applied"), killed.stderr
        go.touch()
        until(lambda: len(threads(group)) == 6)
        assert slices_of(group, calls) == {SHORT}, "a new thread and a program that was executed have it as well"
        (same,) = ThreadSlices(hierarchy, calls, state, read_boot_id()).apply([decision(group)])
        assert same.status is OutcomeStatus.UNCHANGED
        result = CliRunner().invoke(reset, ["--state-dir", str(state)])
        assert (result.exit_code, f"{group.path} sched_runtime: restored" in result.output) == (0, True), result.output
        assert slices_of(group, calls) == {default}
        assert not (state / FILE_NAME).exists()
        for pid in map(int, group.file("cpu", "cgroup.procs").read_text().split()):
            os.kill(pid, signal.SIGKILL)
        until(lambda: not threads(group))


def test_nice_policy_and_a_slice_of_its_own_stay(hierarchy: Hierarchy, calls: SchedulerCalls, state: Path) -> None:
    default = calls.default_slice_ns()
    assert default is not None
    with cgroup(hierarchy, "attributes") as group:
        processes = [group.start(["sleep", "60"]) for _ in range(4)]
        until(lambda: set(threads(group)) >= {process.pid for process in processes})
        nice, batch, idle, own = (process.pid for process in processes)
        os.setpriority(os.PRIO_PROCESS, nice, 7)
        os.sched_setscheduler(batch, os.SCHED_BATCH, os.sched_param(0))
        os.sched_setscheduler(idle, os.SCHED_IDLE, os.sched_param(0))
        calls.set_slice(own, 0, OWN_SLICE)
        slices = ThreadSlices(hierarchy, calls, state, read_boot_id())
        (done,) = slices.apply([decision(group)])
        assert (done.status, done.before, done.after) == (OutcomeStatus.APPLIED, str(default), SHORT_SLICE)
        after = [calls.read(pid) for pid in (nice, batch, idle, own)]
        assert after == [(0, 7, SHORT), (os.SCHED_BATCH, 0, SHORT), (os.SCHED_IDLE, 0, default), (0, 0, OWN_SLICE)]
        slices.restore()
        after = [calls.read(pid) for pid in (nice, batch, idle, own)]
        assert after == [(0, 7, default), (os.SCHED_BATCH, 0, default), (os.SCHED_IDLE, 0, default), (0, 0, OWN_SLICE)]


@pytest.mark.parametrize("user", [[], ["--reuid", "65534", "--clear-groups"]], ids=["root", "another-user"])
def test_without_the_capability_threads_of_others_are_refused(
    hierarchy: Hierarchy, calls: SchedulerCalls, state: Path, user: list[str]
) -> None:
    """A container of root has capabilities that an agent of root with fewer of them lacks."""
    with ExitStack() as stack:
        group = stack.enter_context(cgroup(hierarchy, "refused"))
        process = group.start(["setpriv", *user, "sleep", "60"] if user else ["sleep", "60"])
        until(lambda: Path(f"/proc/{process.pid}/comm").read_text().strip() == "sleep")
        without = ["setpriv", "--bounding-set", "-sys_nice", "--inh-caps", "-sys_nice"]
        command = [*without, sys.executable, "-c", KILLED, str(state), group.path, str(group.id)]
        killed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        refusal = f"refused thread {process.pid} cannot be given a slice of {SHORT} ns: {PERMISSION_REMEDY}"
        assert killed.stdout.strip() == refusal, killed.stderr
        assert slices_of(group, calls) == {calls.default_slice_ns()}

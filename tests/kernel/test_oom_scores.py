"""`oom_score_adj` of real processes in real cgroups: written, inherited, refused, restored, and which the kernel kills."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner

from agent.qrm.actuator.oom_scores import LOWERING_HINT, OomScores, ProcessTable
from agent.qrm.actuator.state_dir import open_originals, read_boot_id
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.decision import Decision, OutcomeStatus
from api.knobs import Knob, Reason
from api.units import MIB
from cli.reset import reset
from tests.builders.waiting import until
from tests.kernel.knob_cgroups import give_controllers
from tests.kernel.real_cgroups import TestCgroup, cgroup, limit_memory, require_writable_cgroups

FORKING = ["sh", "-c", "while :; do sleep 0.05; done"]
GROWS = """import os, sys, time
def have(mib): return bytearray(b"x") * (mib << 20)
kept = [have(int(sys.argv[1]))]
open(sys.argv[2] + ".has", "w").close()
while not os.path.exists(sys.argv[2]): time.sleep(0.01)
kept.append(have(int(sys.argv[3])))
"""
CAP_SYS_RESOURCE = 24


@pytest.fixture(scope="module")
def hierarchy() -> Hierarchy:
    return require_writable_cgroups()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    open_originals(tmp_path / "state", read_boot_id()).close()
    return tmp_path / "state"


def opened(hierarchy: Hierarchy, state: Path) -> OomScores:
    return OomScores(ProcessTable(Path("/proc"), hierarchy.primary), state, read_boot_id())


def score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def decision(group: TestCgroup, value: int) -> Decision:
    return Decision(
        cgroup=group.path, cgroup_id=group.id, pod="default/batch", knob=Knob.OOM_SCORE_ADJ, value=str(value),
        reason=Reason(rule="oom_priority", text="as configured"),
    )  # fmt: skip


def listed(group: TestCgroup) -> list[int]:
    return [int(line) for line in group.file("cpu", "cgroup.procs").read_text().split()]


def inside(group: TestCgroup, argv: list[str]) -> subprocess.Popen[bytes]:
    """A process of that group, once it has become that program."""
    process = group.start(argv)
    name = Path(f"/proc/{process.pid}/comm")
    until(lambda: process.pid in listed(group) and name.read_text().strip() == argv[0])
    return process


def may_lower() -> bool:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff"))
    return bool(int(line.split()[1], 16) >> CAP_SYS_RESOURCE & 1)


def test_processes_and_their_children_get_it_and_a_reset_puts_it_back(hierarchy: Hierarchy, state: Path) -> None:
    with ExitStack() as stack:
        group = stack.enter_context(cgroup(hierarchy, "oom"))
        below = TestCgroup(hierarchy, f"{group.path}/below")
        stack.callback(below.close)
        forking, other = inside(group, FORKING), inside(below, ["sleep", "60"])
        own = score(forking.pid)
        Path(f"/proc/{other.pid}/oom_score_adj").write_text(str(own + 77))
        (done,) = opened(hierarchy, state).apply([decision(group, 1000)])
        assert (done.status, done.before, done.after) == (OutcomeStatus.APPLIED, f"{own} {own + 77}", "1000")
        there = set(listed(group))
        until(lambda: bool(set(listed(group)) - there))  # a child whose score was not written
        result = CliRunner().invoke(reset, ["--state-dir", str(state)])
        assert (result.exit_code, f"{group.path} oom_score_adj: restored" in result.output) == (0, True), result.output
        until(lambda: not there & set(listed(group)) - {forking.pid})
        assert [score(pid) for pid in (forking.pid, other.pid)] == [own, own + 77]
        table = ProcessTable(Path("/proc"), hierarchy.primary)
        assert {table.score(pid) for pid in listed(group)} <= {own, None}
        forking.kill()
        until(lambda: not listed(group))
    assert not list(state.glob("oom-originals*"))


def test_lowering_is_done_or_said_to_take_a_capability(hierarchy: Hierarchy, state: Path) -> None:
    with cgroup(hierarchy, "lower") as group:
        process = inside(group, ["sleep", "60"])
        before, scores = score(process.pid), opened(hierarchy, state)
        (outcome,) = scores.apply([decision(group, -897)])
        if may_lower():
            assert (outcome.status, score(process.pid)) == (OutcomeStatus.APPLIED, -897)
        else:
            assert (outcome.status, score(process.pid)) == (OutcomeStatus.REFUSED, before)
            assert outcome.error == f"process {process.pid} cannot be given -897: {LOWERING_HINT}"
        scores.restore()
        assert (score(process.pid), scores.entries()) == (before, ())


@pytest.mark.parametrize(("enabled", "expected"), [(False, "web"), (True, "batch")])
def test_the_kernel_takes_the_reclaimed_process_first(
    hierarchy: Hierarchy, state: Path, tmp_path: Path, enabled: bool, expected: str
) -> None:
    """Of 192 MiB the online one uses 64 and wants 96 more, the reclaimed one uses 48: by size alone the online one dies."""
    with ExitStack() as stack:
        outer = stack.enter_context(cgroup(hierarchy, f"limited{enabled}"))
        give_controllers(outer)
        limit_memory(outer, 192 * MIB)
        groups = {name: TestCgroup(hierarchy, f"{outer.path}/{name}") for name in ("web", "batch")}
        for group in groups.values():
            stack.callback(group.close)
        sizes = {"web": ("64", "96"), "batch": ("48", "0")}
        running = {
            name: groups[name].start([sys.executable, "-c", GROWS, first, str(tmp_path / name), more])
            for name, (first, more) in sizes.items()
        }
        until(lambda: all((tmp_path / f"{name}.has").exists() for name in running))
        if enabled:
            (outcome,) = opened(hierarchy, state).apply([decision(groups["batch"], 1000)])
            assert outcome.status is OutcomeStatus.APPLIED
        (tmp_path / "web").touch()
        assert running[expected].wait(timeout=60) == -signal.SIGKILL
        if enabled:
            assert running["web"].wait(timeout=60) == 0, "it has what it wanted"

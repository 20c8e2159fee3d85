"""SIGKILL before every system call of whole cycles, with the CPU state: the next agent moves no container needlessly.
`dioptase reset` restores everything.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from agent.config.advisor import AdvisorConfig
from agent.config.config import AgentConfig
from agent.qrm.actuator.checkpoint import FILE_NAME as CPU_STATE
from agent.qrm.actuator.checkpoint import decode_state
from agent.qrm.actuator.originals import FILE_NAME, decode_journal
from api.pod import Pod
from api.qos import QoSLevel
from api.snapshot import Snapshot
from tests.agent.advisor import builders
from tests.kernel.kill_at_syscall import run_cycles, run_reset, run_to_exit
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups

pytestmark = pytest.mark.kernel

LEVELS = {"web": QoSLevel.SHARED, "alone": QoSLevel.DEDICATED, "batch": QoSLevel.RECLAIMED}
CPUSETS = AgentConfig(advisor=AdvisorConfig(policy="canonical"))
KNOBS = ("cpuset.cpus", "cpuset.mems")


class Three:
    """A shared pod, a dedicated one and a reclaimed one, on two CPUs."""

    def __init__(self, groups: Mapping[str, TestCgroup]) -> None:
        self.groups = groups

    def files(self) -> dict[tuple[str, str], str]:
        """What reset has to bring back, byte for byte."""
        return {
            (name, file): group.file("cpuset", file).read_text()
            for name, group in self.groups.items()
            for file in KNOBS
        }

    def cpus(self) -> dict[str, str]:
        return {name: group.file("cpuset", "cpuset.cpus").read_text().strip() for name, group in self.groups.items()}

    def observed(self, seq: int, *names: str) -> Snapshot:
        """The node with these pods on it."""
        pods: list[Pod] = [builders.pod(self.groups[name].path[1:], LEVELS[name], request=1.0) for name in names]
        return builders.snapshot(seq, pods, ids={self.groups[name].path[1:]: self.groups[name].id for name in names})


@pytest.fixture
def three() -> Iterator[Three]:
    hierarchy = require_writable_cgroups()
    with ExitStack() as stack:
        tree_ = Three({name: stack.enter_context(cgroup(hierarchy, f"k9-{name}")) for name in LEVELS})
        tree_.groups["web"].file("cpuset", "cpuset.cpus").write_text("0-1\n")
        tree_.groups["batch"].file("cpuset", "cpuset.cpus").write_text("0\n")
        yield tree_


def reset(three: Three, before: Mapping[tuple[str, str], str], state: Path, lost: str) -> None:
    assert run_to_exit(run_reset, 0, state) == 0, lost
    assert three.files() == before, lost
    assert not (state / FILE_NAME).exists(), lost


def undisturbed(
    three: Three, state: Path, before: Mapping[tuple[str, str], str], *stages: Snapshot
) -> list[dict[str, str]]:
    """Return the cpusets after each of these cycles, of agents that end between them without being killed in one."""
    cpusets = []
    for stage in stages:
        assert run_to_exit(run_cycles, 0, state, CPUSETS, [stage]) == 0
        cpusets.append(three.cpus())
    reset(three, before, state, "undisturbed")
    (state / CPU_STATE).unlink()
    return cpusets


def kill_everywhere(
    three: Three,
    tmp_path: Path,
    earlier: Sequence[Snapshot],
    now: Snapshot,
    decided: Mapping[str, str],
    start: Mapping[str, str],
) -> tuple[int, int]:
    """Kill the round `now` before each of its system calls: how many there are, and how many kinds of wreckage they leave."""
    before, last, code, wreckage = three.files(), 0, None, set()
    while code != 0:
        last += 1
        state = tmp_path / f"state-{len(earlier)}-{last}"
        for stage in earlier:
            assert run_to_exit(run_cycles, 0, state, CPUSETS, [stage]) == 0
        code = run_to_exit(run_cycles, last, state, CPUSETS, [now])
        assert code in (0, -signal.SIGKILL), f"step {last}"
        left, entries = three.cpus(), three.files()
        for name, cpus in left.items():
            assert cpus in (start[name], decided[name]), f"step {last}: {name} has an unexpected cpuset"
        if (state / FILE_NAME).exists():
            originals = {
                (entry.cgroup, file): text
                for entry in decode_journal((state / FILE_NAME).read_bytes())[1]
                for file, text in entry.raw.texts.items()
            }
        else:
            originals = {}
        for (name, file), text in entries.items():
            original = originals.get((three.groups[name].path, file))
            assert text == before[name, file] or original == before[name, file], f"step {last}: an original is lost"
        if any(left[name] != start[name] for name in left):
            decode_state((state / CPU_STATE).read_bytes())
        wreckage.add((tuple(left.items()), len(originals), (state / CPU_STATE).exists()))
        # The next agent moves the containers that had not been moved yet, and no other.
        assert run_to_exit(run_cycles, 0, state, CPUSETS, [now]) == 0
        assert three.cpus() == decided, f"step {last}"
        reset(three, before, state, f"step {last}")
    return last, len(wreckage)


def test_killed_at_every_step_of_placing(three: Three, tmp_path: Path) -> None:
    before, start = three.files(), three.cpus()
    first, second = three.observed(1, "web", "batch"), three.observed(2, "alone", "batch")
    container, both = undisturbed(three, tmp_path / "plain", before, first, second)
    assert container == {"web": "0", "alone": "0-1", "batch": "1"}, "they are kept apart"
    assert both == {"web": "0-1", "alone": "0", "batch": "1"}, "all originals are restored"
    # 17 and 21 steps here, with 5 kinds of wreckage each; far fewer would prove little.
    for earlier, now, decided, was in (([], first, container, start), ([first], second, both, container)):
        steps, kinds = kill_everywhere(three, tmp_path, earlier, now, decided, was)
        assert steps > 12
        assert kinds > 3

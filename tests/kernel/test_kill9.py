"""SIGKILL before every single system call of acting and of resetting: `dioptase reset` puts back every original."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.qrm.actuator.originals import FILE_NAME, decode_journal
from agent.qrm.knobs.knob_files import KNOB_SPECS
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.decision import Decision
from api.knobs import Knob
from tests.kernel.kill_at_syscall import act, run_reset, run_to_exit
from tests.kernel.knob_cgroups import ODD, KnobCgroup, nested
from tests.kernel.real_cgroups import require_writable_cgroups

pytestmark = pytest.mark.kernel

RESET = [sys.executable, "-c", "from cli.reset import reset; reset()"]
AGENT = """
import sys
from pathlib import Path
from agent.sensors.cgroup.hierarchy import detect_hierarchy
from agent.qrm.actuator.actuator import Actuator
from agent.qrm.actuator.writer import KnobWriter
from agent.qrm.actuator.state_dir import open_originals, read_boot_id
from api.decision import ActMode, Decision
from api.knobs import Knob, Reason
VALUES = ((Knob.IDLE, "10"), (Knob.WEIGHT, ("5", "500")), (Knob.QUOTA, ("9000 90000", "max")), (Knob.CPUSET, "10"))
files = KnobWriter(detect_hierarchy())
actuator = Actuator(files, open_originals(Path(sys.argv[1]), read_boot_id()), ActMode.ON)
for turn in range(10**9):
    for knob, values in VALUES:
        actuator.apply([Decision(cgroup=sys.argv[2], cgroup_id=int(sys.argv[3]), pod="default/batch", knob=knob,
                                 value=values[turn % 2], reason=Reason(rule="turn", text="turn by turn"))])
    if turn == 3:
        print("acting", flush=True)
"""
Pair = tuple[KnobCgroup, KnobCgroup]


@pytest.fixture
def pair() -> Iterator[Pair]:
    hierarchy: Hierarchy = require_writable_cgroups()
    with nested(hierarchy, "kill") as pair_:
        yield pair_


def texts(pair: Pair) -> dict[tuple[str, str], str]:
    return {(knobbed.path, name): text for knobbed in pair for name, text in knobbed.texts().items()}


def make_odd_again(pair: Pair) -> None:
    outer, inner = pair
    outer.put({"cpuset.cpus": "0-1\n"})
    inner.put(
        {
            "cpuset.cpus": "0\n",
            **{name: ODD[inner.version][name] for name in ("cpu.shares", "cpu.weight") if name in ODD[inner.version]},
        }
    )
    outer.put(ODD[outer.version])


def journalled(state: Path) -> dict[tuple[str, str], str]:
    """Original text of every journalled file."""
    try:
        _, entries = decode_journal((state / FILE_NAME).read_bytes())
    except FileNotFoundError:
        return {}
    return {(entry.cgroup, name): text for entry in entries for name, text in entry.raw.texts.items()}


def rounds(pair: Pair) -> list[list[Decision]]:
    """They use every knob that others depend on, change a quota's period, switch idle off and on, and move nested cpusets."""
    outer, inner = pair
    return [
        [
            outer.decide(Knob.IDLE, "1"),
            outer.decide(Knob.QUOTA, "30000 100000"),
            inner.decide(Knob.CPUSET, "1"),
            outer.decide(Knob.CPUSET, "1"),
        ],
        [
            outer.decide(Knob.IDLE, "0"),
            outer.decide(Knob.WEIGHT, "50"),
            outer.decide(Knob.CPUSET, "0-1"),
            inner.decide(Knob.IDLE, "1"),
        ],
        # The burst of 30 ms has to go down before this quota, and memory is written in the same cycle.
        [
            outer.decide(Knob.IDLE, "1"),
            outer.decide(Knob.QUOTA, "20000 40000"),
            outer.decide(Knob.MEMORY_MAX, "67108864"),
        ],
    ]


def cleared(pair: Pair, before: dict[tuple[str, str], str], state: Path, lost: str) -> tuple[object, ...]:
    """What a kill left: every change has its original on disk (else it is `lost`), and a reset puts all of them back."""
    on_disk, originals = texts(pair), journalled(state)
    assert not {key for key in before if on_disk[key] != before[key] and originals.get(key) != before[key]}, lost
    assert run_to_exit(run_reset, 0, state) == 0, lost
    assert texts(pair) == before, lost
    assert not (state / FILE_NAME).exists(), lost
    return tuple(on_disk.items()), tuple(originals.items())


def test_killed_at_every_step_of_acting(pair: Pair, tmp_path: Path) -> None:
    make_odd_again(pair)
    before = texts(pair)
    state = tmp_path / "state"
    wreckage, last, code = set(), 0, None
    while code != 0:
        last += 1
        code = run_to_exit(act, last, state, rounds(pair))
        assert code in (0, -signal.SIGKILL), f"step {last}"
        wreckage.add(cleared(pair, before, state, f"step {last}: changed without their originals on disk"))
    # On version 1 it is 41 steps and 18 kinds of wreckage; far fewer would prove little.
    assert last > 25
    assert len(wreckage) > 12


def test_killed_at_every_step_of_resetting(pair: Pair, tmp_path: Path) -> None:
    make_odd_again(pair)
    before = texts(pair)
    state = tmp_path / "state"
    wreckage, last, code = set(), 0, None
    while code != 0:
        last += 1
        assert run_to_exit(act, 0, state, rounds(pair)) == 0
        acted = texts(pair)
        unmoved = {name for name in ODD[pair[0].version] if acted[pair[0].path, name] == before[pair[0].path, name]}
        assert not unmoved
        code = run_to_exit(run_reset, last, state)
        assert code in (0, -signal.SIGKILL), f"step {last}"
        wreckage.add(cleared(pair, before, state, f"step {last}: forgotten before it was back"))
    assert last > 14
    assert len(wreckage) > 5


def test_the_original_is_safe_on_disk_before_the_knob_is_written(pair: Pair, tmp_path: Path) -> None:
    outer, _ = pair
    trace = tmp_path / "trace"
    assert run_to_exit(act, 0, tmp_path / "state", [[outer.decide(Knob.WEIGHT, "50")]], trace) == 0
    calls = trace.read_text().splitlines()
    file = getattr(KNOB_SPECS[Knob.WEIGHT], outer.version)[0].files[0]
    assert calls == [
        "mkdir state",
        f"write {FILE_NAME}.tmp",
        f"fsync {FILE_NAME}.tmp",
        f"rename {FILE_NAME}.tmp",
        "fsync state",
        f"write {file}",
    ]


def test_reset_waits_for_no_living_agent_and_needs_none(pair: Pair, tmp_path: Path) -> None:
    make_odd_again(pair)
    before = texts(pair)
    outer, _ = pair
    outer.put({"cpuset.cpus": "0-1\n"})
    before = texts(pair)
    argv = [sys.executable, "-c", AGENT, str(tmp_path), outer.path, str(outer.id)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"acting\n"
        refused = subprocess.run([*RESET, "--state-dir", str(tmp_path)], capture_output=True, text=True, check=False)
        agent.kill()
    assert refused.returncode == 1
    assert f"is in use by process {agent.pid}: stop process {agent.pid}" in refused.stderr
    assert agent.returncode == -signal.SIGKILL
    assert texts(pair) != before
    done = subprocess.run(
        [*RESET, "--state-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"COLUMNS": "120"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Nothing is left to restore." in done.stdout
    assert outer.path in done.stdout
    assert texts(pair) == before

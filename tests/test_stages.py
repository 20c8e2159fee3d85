"""The runner of the stages counts what was tested, here and in guests, and takes nothing that is missing for success."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cluster.binaries import DEFAULT_MINOR, VERSIONS
from tests.cluster.daemons import started, wait
from tests.vm.__main__ import BOOTS

ROOT = Path(__file__).resolve().parent.parent
WRITE = """
import sys
again = "--" in sys.argv
(path,) = (word.partition("=")[2] for word in sys.argv if word.startswith("--junit-xml=") and not word.endswith("/junit.xml"))
open(path, "w").write({report!r} if not again else {again!r})
sys.exit({status} if not again else 0)
"""
SUITE = "<testsuites><testsuite tests='{tests}' failures='{failures}' errors='{errors}' skipped='1'/></testsuites>"


@pytest.fixture
def stages() -> ModuleType:
    """Load tests/run, whose name has no suffix, as a module."""
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        spec = spec_from_loader("stages", SourceFileLoader("stages", str(ROOT / "tests/run")))
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


@pytest.mark.parametrize(
    ("report", "status", "ok", "counts"),
    [
        (SUITE.format(tests=4, failures=0, errors=0), 0, True, (3, 0, 1)),
        (SUITE.format(tests=4, failures=1, errors=1), 1, False, (1, 2, 1)),
        (SUITE.format(tests=4, failures=0, errors=0), 125, False, (3, 1, 1)),  # the guest was lost after its last test
        ("", 125, False, (0, 1, 0)),  # and before
        ("<a/>", 0, False, (0, 1, 0)),
        ("<a><b tests='x'/></a>", 0, False, (0, 1, 0)),
        ("<testsuites><testsuite tests='3'", 0, False, (0, 1, 0)),
        ("", 0, False, (0, 1, 0)),  # a result that is not there is none
        (SUITE.format(tests=0, failures=0, errors=0).replace("'1'", "'0'"), 0, False, (0, 1, 0)),
    ],
)
def test_the_tests_of_a_guest_are_counted(
    stages: ModuleType, report: str, status: int, ok: bool, counts: tuple[int, int, int]
) -> None:
    text = WRITE.format(report=report, status=status, again="") if report else f"raise SystemExit({status})"
    stages.GUEST[:] = [sys.executable, "-c", text]
    stages.STAGES["one"] = stages.Stage("a guest", [stages.GUEST])
    result = stages.run_stage("one")
    assert (result.ok, (result.passed, result.failed, result.skipped)) == (ok, counts)


FAILED = "<testsuites><testsuite tests='9' failures='{count}'>{cases}</testsuite></testsuites>"
CASE = "<testcase classname='tests.test_stages' name='test_{number}'><failure/></testcase>"
SINGLE = "<testsuites><testsuite tests='1' {failed}/></testsuites>"


def test_a_guest_that_was_lost_is_not_excused_by_what_passes_later(stages: ModuleType) -> None:
    """It left a report with one failure, and then it panicked."""
    report = FAILED.format(count=1, cases=CASE.format(number=0))
    stages.GUEST[:] = [sys.executable, "-c", WRITE.format(report=report, status=125, again=SINGLE.format(failed=""))]
    stages.STAGES["one"] = stages.Stage("a guest", [stages.GUEST])
    result = stages.run_stage("one")
    assert (result.ok, result.flaky, result.failed) == (False, (), 1)


@pytest.mark.parametrize(
    ("failing", "second", "ok", "flaky"),
    [
        (1, SINGLE.format(failed=""), True, ("tests/test_stages.py::test_0",)),
        (1, SINGLE.format(failed="skipped='1'"), False, ()),
        (1, SUITE.format(tests=2, failures=0, errors=0), False, ()),  # not the tests that were requested
        (1, "", False, ()),
        (4, SUITE.format(tests=4, failures=0, errors=0).replace("'1'", "'0'"), False, ()),  # too many
    ],
)
def test_what_fails_is_run_once_more_by_itself(
    stages: ModuleType, failing: int, second: str, ok: bool, flaky: tuple[str, ...]
) -> None:
    report = FAILED.format(count=failing, cases="".join(CASE.format(number=number) for number in range(failing)))
    stages.GUEST[:] = [sys.executable, "-c", WRITE.format(report=report, status=1, again=second)]
    stages.STAGES["one"] = stages.Stage("a guest", [stages.GUEST])
    result = stages.run_stage("one")
    assert (result.ok, result.flaky, result.failed) == (ok, flaky, 0 if ok else failing)
    assert result.passed == (9 if ok else 9 - failing)


@pytest.mark.parametrize(("stage", "tests", "ok"), [("one", 4, True), ("one", 1, False), ("vagrant", 4, False)])
def test_a_stage_of_which_all_is_skipped_has_tested_nothing(
    stages: ModuleType, stage: str, tests: int, ok: bool
) -> None:
    """Of what was booted for its tests, no test may be skipped at all."""
    report = SUITE.format(tests=tests, failures=0, errors=0)
    stages.GUEST[:] = [sys.executable, "-c", WRITE.format(report=report, status=0, again="")]
    stages.STAGES[stage] = stages.Stage("a guest", [stages.GUEST])
    assert stages.run_stage(stage).ok is ok


def test_there_is_a_stage_for_each_kernel_and_machine_and_none_is_left_out_of_all(stages: ModuleType) -> None:
    guests = {
        name: [" ".join(command[command.index("--kernel") :]) for command in commands if "--kernel" in command]
        for name, (_, commands, *_) in stages.STAGES.items()
        if commands[-1][: len(stages.GUEST)] == stages.GUEST
    }
    assert guests == {
        "vm-6.1": ["--kernel 6.1 --mark vm_probes --mark vm"],
        "vm-6.12": ["--kernel 6.12 --mark vm_probes --mark vm"],
        "vm-disk": ["--kernel 6.1 --mark vm_disk"],
        "vm-four": ["--kernel 6.1 --mark vm_four"],
        "vm-big": ["--kernel 6.1 --mark vm_big"],
        "vm-systemd": ["--kernel 6.12 --mark vm_systemd"],
        "vm-systemd-long": [
            "--kernel 6.12 --mark vm_systemd --mark vm_systemd_long",
            "--kernel 6.12 --mark vm_rebooted",
        ],
        "vm-cluster": ["--kernel 6.1 --mark vm_cluster"],
    }
    assert stages.main(["no-such-stage"]) == 2


def test_every_mark_has_its_stage(stages: ModuleType) -> None:
    """What the stage of pure tests leaves out runs in another one: a mark that is in neither would run nowhere."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    marks = {line.split(":")[0] for line in settings["markers"]}
    commands = [command for stage in stages.STAGES.values() for command in stage.commands]
    selected = {command[-1] for command in commands if command[: len(stages.PYTEST)] == stages.PYTEST}
    (left_out,) = (mark for mark in selected if mark.startswith("not ("))
    assert set(left_out.removeprefix("not (").removesuffix(")").split(" or ")) == marks - {"forms", "long", "versions"}
    # Two stages divide what needs this kernel, and leave what the third has, so that nothing runs twice in one of all.
    assert {mark for mark in selected if "kernel" in mark} - {left_out} == {
        "kernel and not live and not forms",
        "kernel and not live and forms",
    }
    assert {mark for mark in selected if "cluster" in mark} - {left_out} == {"cluster and not long", "cluster and long"}
    booted = [command for command in commands if command[: len(stages.GUEST)] == stages.GUEST]
    booted_marks = {word for command in booted for word in command[command.index("--mark") :]} - {"--mark"}
    assert marks - selected - {"kernel", "forms", "cluster", "long", "versions"} == set(BOOTS) == booted_marks


def test_other_versions_of_kubernetes_are_built_and_tested_on_request(stages: ModuleType) -> None:
    assert {*stages.VERSIONS, DEFAULT_MINOR} == set(VERSIONS)
    for minor in stages.VERSIONS:
        stage = stages.STAGES[f"cluster-{minor}"]
        assert [command[:2] for command in stage.commands] == [["env", f"DIOPTASE_KUBERNETES={minor}"]] * 2
        assert stage.commands[1][-1] == "cluster and versions and not long"
        assert stage.on_request


def test_property_tests_try_fresh_examples_on_request_only(stages: ModuleType) -> None:
    """A gate that tries random examples fails by chance, and the failure does not repeat."""
    fresh = [name for name, stage in stages.STAGES.items() if "DIOPTASE_FRESH_EXAMPLES=1" in stage.commands[-1]]
    assert fresh == ["properties"]
    assert stages.STAGES["properties"].on_request
    assert stages.STAGES["properties"].commands[-1][-1].startswith("hypothesis and not (kernel or ")

    def tried(profile: str) -> list[int]:
        values: list[int] = []

        @settings(settings.get_profile(profile), database=None, max_examples=50)
        @given(st.integers())
        def collect(value: int) -> None:
            values.append(value)

        collect()
        return values

    assert tried("repeated") == tried("repeated")
    assert tried("fresh") != tried("fresh")
    is_fresh = bool(os.environ.get("DIOPTASE_FRESH_EXAMPLES"))
    assert settings().derandomize is not is_fresh


ONCE = """#!{python}
import os, sys
(path,) = (word.partition("=")[2] for word in sys.argv if word.startswith("--junit-xml="))
again = os.path.exists({marker!r})
open({marker!r}, "w").close()
good = again and os.environ["DIOPTASE_KUBERNETES"] == "1.31"
open(path, "w").write({good!r} if good else {bad!r})
sys.exit(not good)
"""


def test_a_failed_test_on_another_version_runs_again_on_the_same(stages: ModuleType, tmp_path: Path) -> None:
    """The program reports a failure at first, and then success with the version of its stage."""
    program = tmp_path / "pytest"
    bad, good = FAILED.format(count=1, cases=CASE.format(number=0)), SINGLE.format(failed="")
    program.write_text(ONCE.format(python=sys.executable, marker=str(tmp_path / "once"), good=good, bad=bad))
    program.chmod(0o755)
    stages.PYTEST[:] = [str(program)]
    stages.STAGES["one"] = stages.Stage("a version", [["env", "DIOPTASE_KUBERNETES=1.31", str(program)]])
    result = stages.run_stage("one")
    assert (result.ok, result.flaky) == (True, ("tests/test_stages.py::test_0",))


def test_the_gate_has_two_lanes_and_test_all_has_every_stage(stages: ModuleType) -> None:
    gate = {lane: [n for n, s in stages.STAGES.items() if not s.on_request and s.lane == lane] for lane in (0, 1, 2)}
    assert gate == {
        0: ["format", "types", "contracts", "unit", "kernel", "prometheus", "browser", "vm-host"],
        1: ["vm-6.1", "vm-four", "vm-systemd", "cluster"],
        2: ["live"],
    }
    for target, packages in (("test", ("cluster", "image", "vm")), ("test-all", ("cluster", "image", "vm", "vagrant"))):
        commands = subprocess.run(
            ["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout
        assert {f"deploy/install-packages {name}" for name in packages} <= set(commands.splitlines())
    assert "tests/run --all" in commands


def test_lanes_run_side_by_side_and_print_whole_logs(
    stages: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each stage waits for a file that the other one writes: one after the other they would never end."""
    stages.ROOT = tmp_path
    for lane, (own, other) in enumerate((("a", "b"), ("b", "a"))):
        script = (
            f"from pathlib import Path; import time\nprint('hello from {own}')\nPath({own!r}).touch()\n"
            f"while not Path({other!r}).exists(): time.sleep(0.01)"
        )
        stages.STAGES[own] = stages.Stage(own, [[sys.executable, "-c", script]], lane)
    assert stages.main(["a", "b"]) == 0
    out = capfd.readouterr().out
    assert "hello from a\n" in out
    assert "hello from b\n" in out
    assert out.rstrip().endswith("2 passed, 0 failed, 0 skipped")


WORK = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
print(child.pid, flush=True)
while not {done}:
    time.sleep(0.05)
child.kill()
sys.exit({status})
"""


def autogroup_nice(pid: int) -> int | None:
    """Return the nice value of the autogroup of a process, or None on a kernel without autogroups."""
    try:
        return int(Path(f"/proc/{pid}/autogroup").read_text().split()[-1])
    except (FileNotFoundError, IndexError):
        return None


def start_build(stages: ModuleType, folder: Path, done: str, status: int = 0) -> tuple[Any, int]:
    """A background build, and the process that it started."""
    stages.ROOT = folder
    ahead = stages.BackgroundBuild([sys.executable, "-c", WORK.format(done=done, status=status)])
    log = folder / "build/ahead.log"
    wait("the child", lambda: log.read_text().endswith("\n"))
    return ahead, int(log.read_text())


@pytest.mark.parametrize(("status", "ok"), [(0, True), (1, False)])
def test_what_is_done_ahead_gives_way_until_it_is_waited_for(
    stages: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str], status: int, ok: bool
) -> None:
    """Then it has its share, with all that it has started, and what it said is shown."""
    ahead, child = start_build(stages, tmp_path, "os.sched_getscheduler(child.pid) == os.SCHED_OTHER", status)
    assert os.sched_getscheduler(child) == os.SCHED_IDLE
    assert autogroup_nice(child) in (19, None)
    stages.STAGES["one"] = stages.Stage("a build", [stages.BUILD])
    # It ends only once its child has been given its share.
    result = stages.run_stage("one", ahead)
    ahead.end()
    assert (result.ok, result.passed, result.failed) == (ok, int(ok), int(not ok))
    assert f"{child}\n" in capfd.readouterr().out


def test_what_is_done_ahead_ends_with_all_that_it_has_started(stages: ModuleType, tmp_path: Path) -> None:
    ahead, child = start_build(stages, tmp_path, "False")
    ahead.end()
    wait("the end of its child", lambda: started(child) == "")

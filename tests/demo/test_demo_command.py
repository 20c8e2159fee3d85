"""The orchestration of `dioptase demo` around a stub of the agent: real workloads, real cgroups, a real Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from agent.sensors.cgroup.hierarchy import Hierarchy
from cli.agent_process import free_port, is_port_free
from demo.launch import ROOT
from tests.builders.waiting import until
from tests.demo.test_workloads import mentioning
from tests.kernel.real_cgroups import require_writable_cgroups

ONLINE, BATCH = (f"dioptase-test-demo-{os.getpid()}-{name}" for name in ("online", "batch"))
STUB = Path(__file__).with_name("stub_agent.py")
RUN = """
import sys
from pathlib import Path
from api.decision import ActMode
from cli.demo import DemoSettings, run_demo
print("began", flush=True)
sys.exit(run_demo(DemoSettings(duration_s=float(sys.argv[3]) or None, act=ActMode.ON, host="127.0.0.1", port=int(sys.argv[2]),
                      command=(sys.executable, sys.argv[1]), online=sys.argv[4], batch=sys.argv[5],
                      record=Path(sys.argv[6]))))
"""


class Demo:
    """One `dioptase demo` on the stub, in a process of its own."""

    def __init__(
        self,
        tmp_path: Path,
        duration_s: float,
        prefix: Sequence[str] = (),
        *,
        terminal: int | None = None,
        **environ: str,
    ) -> None:
        self.rounds = tmp_path / f"rounds-{time.monotonic_ns()}"
        self.note, self.mark, self.port = tmp_path / "note", f"DIOPTASE_TEST={tmp_path}", free_port()
        self.temporary = tmp_path / "temporary"
        self.temporary.mkdir(exist_ok=True)
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self.temporary),
            "STUB_NOTE": str(self.note),
            "DIOPTASE_TEST": str(tmp_path),
            **environ,
        }
        command = [*prefix, sys.executable, "-c", RUN, str(STUB), str(self.port), str(duration_s), ONLINE, BATCH]
        command.append(str(self.rounds))
        out = subprocess.PIPE if terminal is None else terminal
        self.process = subprocess.Popen(command, stdin=terminal, stdout=out, stderr=out, text=True, env=env)

    def output(self) -> tuple[int, str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out + err


@pytest.fixture
def hierarchy() -> Iterator[Hierarchy]:
    actual = require_writable_cgroups()
    yield actual
    assert not (actual.primary / ONLINE).exists()
    assert not (actual.primary / BATCH).exists()


@pytest.mark.kernel
def test_a_run_ends_by_itself_and_leaves_a_summary_and_nothing_else(hierarchy: Hierarchy, tmp_path: Path) -> None:
    demo = Demo(tmp_path, 6)
    code, text = demo.output()
    assert code == 0, text
    act, *_, pods_end, _request, last = demo.note.read_text().splitlines()
    assert (act, last) == ("on", "SIGTERM")
    assert demo.rounds.is_dir(), "the agent records to the given directory"
    assert pods_end.strip() == f"cgroup: /{BATCH}"
    assert re.search(r"applied +demo/batch +cpu\.idle .*\(batch gives way\)", text)
    assert "changes        1 (cpu.idle 1)" in text
    assert re.search(r"CPU lent +1\.25 of \d+ cores on average, of which the batch job used 1\.00", text)
    assert re.search(r"cgroups +restored \(\d+ values compared, none differs\) and removed", text)
    alone, adjacent = (
        re.search(rf"^{name} +([\d,]+) +(\d+) .* ([\d,]+)$", text, re.M) for name in ("alone", "with batch")
    )
    assert alone is not None
    assert adjacent is not None, text
    answered, lost, units = (int(number.replace(",", "")) for number in adjacent.groups())
    assert answered > 100
    assert lost == 0
    assert units > 100
    assert int(alone[1].replace(",", "")) > 10
    assert alone[3] == "0"
    assert not mentioning(demo.mark)
    assert list(demo.temporary.iterdir()) == []


@pytest.mark.kernel
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_like_the_duration_does(hierarchy: Hierarchy, tmp_path: Path, signum: signal.Signals) -> None:
    demo = Demo(tmp_path, 0)
    until(lambda: (hierarchy.primary / BATCH).exists() and demo.note.exists())
    demo.process.send_signal(signum)
    code, text = demo.output()
    assert code == 0, text
    assert f"ending: {signum.name}" in text
    assert "none differs" in text
    assert demo.note.read_text().endswith("SIGTERM\n")
    assert not mentioning(demo.mark)
    assert list(demo.temporary.iterdir()) == []


@pytest.mark.kernel
def test_after_kill_9_no_process_is_left_and_the_next_demo_starts(hierarchy: Hierarchy, tmp_path: Path) -> None:
    demo = Demo(tmp_path, 0)
    until(demo.note.exists)
    demo.process.kill()
    demo.output()
    until(lambda: not mentioning(demo.mark), lambda: mentioning(demo.mark))
    assert demo.note.read_text().endswith("SIGTERM\n")
    assert (hierarchy.primary / ONLINE).exists()
    (abandoned,) = demo.temporary.iterdir()
    code, text = Demo(tmp_path, 3).output()
    assert code == 0, text
    assert f"demo: removed {abandoned}, left by a demo that was killed" in text
    assert list(demo.temporary.iterdir()) == []
    assert f"removed cgroup /{ONLINE}, left by a demo that was killed" in text


@pytest.mark.kernel
def test_an_agent_that_dies_fails_the_demo_with_its_last_words(hierarchy: Hierarchy, tmp_path: Path) -> None:
    demo = Demo(tmp_path, 0, STUB_DIES_AFTER="1")
    code, text = demo.output()
    assert code == 1
    assert "the agent ended by itself with exit code 7" in text
    assert "the stub is up" in text
    assert not mentioning(demo.mark)


@pytest.mark.kernel
def test_a_value_that_is_not_put_back_fails_the_demo_and_is_named(hierarchy: Hierarchy, tmp_path: Path) -> None:
    knob = hierarchy.primary / BATCH / "cpu.idle"
    code, text = Demo(tmp_path, 3, STUB_BREAKS=str(knob)).output()
    assert code == 1
    assert f"{knob} was '0', is '1'" in text


@pytest.mark.kernel
def test_in_a_terminal_it_shows_the_live_view_until_q(hierarchy: Hierarchy, tmp_path: Path) -> None:
    main, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (40, 120))
    demo = Demo(tmp_path, 30, terminal=terminal)
    os.close(terminal)
    observed = b""
    pressed = False
    while True:
        try:
            observed += os.read(main, 65536)
        except OSError:  # the last process with this terminal has ended
            break
        if b"1.25" in observed and not pressed:
            pressed = os.write(main, b"q") == 1
    os.close(main)
    assert demo.process.wait(30) == 0, observed
    entered, left = observed.find(b"\x1b[?1049h"), observed.rfind(b"\x1b[?1049l")
    assert 0 < entered < left
    assert b"1.25" in observed[entered:left]
    assert b"ending: requested by the user" in observed[left:]
    assert b"none differs" in observed[left:]


@pytest.mark.kernel
def test_a_second_demo_is_refused_with_a_remedy(hierarchy: Hierarchy, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    demo = Demo(tmp_path, 0)
    try:
        until(demo.note.exists)
        code, text = Demo(tmp_path / "other", 3).output()
    finally:
        demo.process.terminate()
        demo.output()
    assert code == 1
    assert "another demo is running" in text
    assert "remedy: end that one first" in text


@pytest.mark.kernel
def test_without_writable_cgroups_it_runs_dry_and_says_so(hierarchy: Hierarchy, tmp_path: Path) -> None:
    mounts = {str(mount) for mount in (*hierarchy.v1.values(), hierarchy.v2) if mount is not None}
    read_only = " && ".join(f"mount -o remount,bind,ro {mount}" for mount in sorted(mounts))
    prefix = ["unshare", "--mount", "sh", "-c", f'{read_only} && exec "$@"', "sh"]
    code, text = Demo(tmp_path, 3, prefix).output()
    if "unshare" in text or "mount:" in text:
        pytest.skip(f"no mount namespace of our own here: {text.splitlines()[0]}")
    assert code == 0, text
    assert "! cgroups cannot be created" in text
    assert "Read-only file system" in text
    assert "! remedy: run as root" in text
    assert demo_act(tmp_path) == "dry-run"
    assert "none were created or changed" in text
    assert re.search(r"^with batch +[\d,]{3,} ", text, re.M), text


def demo_act(tmp_path: Path) -> str:
    """The --act that the stub was started with."""
    return (tmp_path / "note").read_text().splitlines()[0]


def test_a_port_in_use_is_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not is_port_free("127.0.0.1", port)
    assert is_port_free("127.0.0.1", port)

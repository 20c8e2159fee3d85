"""`dioptase top` as a person runs it: in a terminal, without one, with an agent that comes and goes."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec
import pytest
from rich.console import Console

from api.decision import JournalEntry
from api.interfaces import Unavailable
from cli import formats
from cli.agent_process import free_port
from cli.client import AgentClient, AgentHistory
from cli.top.charts import runq_latency_charts
from cli.top.live import MAX_FAILURES_AFTER_ANSWER, connection_notice, run_top
from cli.top.summary import cycle_line
from exporters.view.cycle_view import build_view
from tests.builders import colocation_run
from tests.builders.agent_server import AgentServer

DIOPTASE = [sys.executable, "-c", "from cli.main import main; main()"]
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[()][A-Z0-9]|[=>])")


@pytest.fixture(scope="module")
def run_data() -> colocation_run.ColocationRun:
    return colocation_run.simulate_run(215)


@pytest.fixture
def agent(run_data: colocation_run.ColocationRun) -> Iterator[AgentServer]:
    server = AgentServer(run_data.entries)
    yield server
    server.close()


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, argv: list[str], width: int = 80, height: int = 24) -> None:
        self.fd, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.before = termios.tcgetattr(self.fd)
        environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "", "LINES": ""}
        del environ["COLUMNS"], environ["LINES"]
        self.process = subprocess.Popen(
            argv, stdin=other, stdout=other, stderr=other, env=environ, start_new_session=True
        )
        self._other = other  # open until close(), so that the output can still be read after the program has ended
        self.raw = b""

    def until(self, done: Callable[[str], bool], seconds: float = 30) -> str:
        """Read until the output satisfies a condition."""
        give_up = time.monotonic() + seconds
        while not done(self.text):
            ready, _, _ = select.select([self.fd], [], [], 0.2)
            if ready:
                self.raw += os.read(self.fd, 65536)
            assert time.monotonic() < give_up, self.text[-2000:]
        return self.text

    @property
    def text(self) -> str:
        return ESCAPES.sub("", self.raw.decode(errors="replace"))

    def end(self) -> int:
        """Wait for the program's end and return its exit status; reads its output, so that it never blocks."""
        while self.process.poll() is None:
            ready, _, _ = select.select([self.fd], [], [], 0.05)
            if ready:
                self.raw += os.read(self.fd, 65536)
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.fd)
        os.close(self._other)


@pytest.fixture
def terminal(agent: AgentServer, run_data: colocation_run.ColocationRun) -> Iterator[Terminal]:
    agent.show(run_data.rounds)
    created = Terminal([*DIOPTASE, "top", "--url", agent.url])
    yield created
    created.close()


def test_live_view_shows_the_agents_numbers_and_q_ends_it(
    terminal: Terminal, run_data: colocation_run.ColocationRun
) -> None:
    view = build_view(run_data.rounds[-1])
    text = terminal.until(lambda text: "decisions, newest first" in text)
    assert f"{formats.cores(view.reclaimable_cores)} of 4 lent · {formats.cores(view.reclaimed_cores)} used" in text
    assert "default/web" in text
    assert formats.knob_change(run_data.entries[-1].outcome) in text
    os.write(terminal.fd, b"q")
    assert terminal.end() == 0
    assert terminal.raw.rfind(b"\x1b[?25h") > terminal.raw.rfind(b"\x1b[?25l"), "the cursor is shown again"
    assert b"\x1b[?1049l" in terminal.raw, "the screen of before is back"
    assert termios.tcgetattr(terminal.fd) == terminal.before


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_it_cleanly(terminal: Terminal, signum: signal.Signals) -> None:
    terminal.until(lambda text: "decisions, newest first" in text)
    terminal.process.send_signal(signum)
    assert terminal.end() == 0
    assert b"\x1b[?1049l" in terminal.raw
    assert "Traceback" not in terminal.text
    assert termios.tcgetattr(terminal.fd) == terminal.before


def test_other_keys_do_nothing(terminal: Terminal, agent: AgentServer, run_data: colocation_run.ColocationRun) -> None:
    terminal.until(lambda text: "decisions, newest first" in text)
    os.write(terminal.fd, b"xyz\x1b[A")
    observed = len(terminal.raw)
    terminal.until(lambda _: b"decisions" in terminal.raw[observed:])
    assert terminal.process.poll() is None


def test_keys_switch_between_screens_at_once(
    terminal: Terminal, agent: AgentServer, run_data: colocation_run.ColocationRun
) -> None:
    terminal.until(lambda text: "decisions, newest first" in text)
    for key, shown in (
        (b"2", "── interference"),
        (b"3", "── memory"),
        (b"4", "── threads and pressure"),
        (b"?", "── keys"),
    ):
        observed = len(terminal.raw)
        os.write(terminal.fd, key)
        terminal.until(lambda _, observed=observed, shown=shown: shown.encode() in terminal.raw[observed:])  # type: ignore[misc]
    os.write(terminal.fd, b"1q")
    assert terminal.end() == 0


def test_a_stopped_agent_is_reported_and_polled_again(
    terminal: Terminal, agent: AgentServer, run_data: colocation_run.ColocationRun
) -> None:
    terminal.until(lambda text: "decisions, newest first" in text)
    agent.go_away()
    terminal.until(lambda text: "does not answer" in text)
    assert "Connection refused" in terminal.text
    observed = len(terminal.raw)
    agent.start()
    agent.show(run_data.rounds[:5])
    terminal.until(lambda _: b"cycle 5 " in terminal.raw[observed:])


def run(argv: list[str], seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    process = subprocess.Popen([*DIOPTASE, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if seconds is not None:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(argv, process.returncode, first + out, err)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


def test_without_a_terminal_there_are_lines(agent: AgentServer, run_data: colocation_run.ColocationRun) -> None:
    agent.show(run_data.rounds)
    out = io.StringIO()
    run_top(agent.url, duration=0.5, console=Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert lines[:-1] == [formats.decision_line(entry) for entry in run_data.entries], "every decision, once, in order"
    assert lines[-1] == cycle_line(build_view(run_data.rounds[-1]))
    assert "\x1b" not in out.getvalue()


def test_interrupted_without_a_terminal(agent: AgentServer, run_data: colocation_run.ColocationRun) -> None:
    agent.show(run_data.rounds)
    done = run(["top", "--url", agent.url], seconds=1)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_once_prints_one_frame(agent: AgentServer, run_data: colocation_run.ColocationRun) -> None:
    agent.show(run_data.rounds)
    done = run(["top", "--once", "--url", agent.url])
    assert done.returncode == 0
    assert f"{formats.cores(build_view(run_data.rounds[-1]).reclaimable_cores)} of 4 lent" in done.stdout
    assert "run-queue waits of the last 30 s" in done.stdout


@pytest.mark.parametrize(("view", "title"), [("memory", "memory and reclaim"), ("5", "disk and network")])
def test_once_prints_the_selected_view(
    agent: AgentServer, run_data: colocation_run.ColocationRun, view: str, title: str
) -> None:
    agent.show(run_data.rounds)
    done = run(["top", "--once", "--view", view, "--url", agent.url])
    assert (done.returncode, done.stderr) == (0, "")
    assert f"── {title} ──" in done.stdout
    assert "default/web" in done.stdout
    assert "q quit" not in done.stdout


def test_a_view_without_a_terminal_is_refused(agent: AgentServer) -> None:
    done = run(["top", "--view", "waits", "--url", agent.url])
    assert (done.returncode, "--view needs a terminal, or --once" in done.stderr) == (2, True)


def test_once_without_an_agent_says_how_to_start_one() -> None:
    port = free_port()
    done = run(["top", "--once", "--url", f"http://127.0.0.1:{port}"])
    assert done.returncode == 1
    assert f"http://127.0.0.1:{port} does not answer: Connection refused" in done.stderr
    assert "remedy: start it with dioptase agent" in done.stderr


def test_without_a_terminal_it_gives_up_after_some_failures() -> None:
    port = free_port()
    done = run(["top", "--url", f"http://127.0.0.1:{port}"])
    assert done.returncode == 1
    assert done.stdout.count("does not answer: Connection refused; retrying every second") == 1
    assert "remedy: start it with dioptase agent" in done.stderr


@pytest.mark.parametrize("url", ["bogus", "ftp://127.0.0.1", "http://", "http://127.0.0.1:99999", "file:///etc/passwd"])
def test_invalid_addresses_are_refused(url: str) -> None:
    done = run(["top", "--once", "--url", url])
    assert done.returncode == 2
    assert "is not an address such as http://127.0.0.1:9102" in done.stderr


def test_stop_and_on_tick_end_the_view(agent: AgentServer) -> None:
    stop = threading.Event()
    stop.set()
    run_top(agent.url, stop=stop, console=Console(file=io.StringIO()))
    calls: list[int] = []

    def on_tick() -> bool:
        calls.append(1)
        return len(calls) == 3

    run_top(agent.url, on_tick=on_tick, console=Console(file=io.StringIO()))
    assert len(calls) == 3


def test_before_the_first_cycle_the_agents_error_is_shown(agent: AgentServer) -> None:
    watch = AgentHistory(AgentClient(agent.url))
    assert watch.poll() == []
    assert "no cycle has finished yet" in connection_notice(watch)
    assert "retry after a second" in connection_notice(watch)


def test_an_agent_that_has_answered_gets_more_attempts(
    agent: AgentServer, run_data: colocation_run.ColocationRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be restarting."""
    historys: list[AgentHistory] = []
    poll = AgentHistory.poll

    def counted(watch: AgentHistory) -> list[JournalEntry]:
        historys.append(watch)
        if len(historys) == 2:
            agent.go_away()
        return poll(watch)

    agent.show(run_data.rounds[:5])
    monkeypatch.setattr(AgentHistory, "poll", counted)
    monkeypatch.setattr("cli.top.live.POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr("cli.top.live.KEY_POLL_INTERVAL_S", 0.0)
    with pytest.raises(Unavailable, match="Connection refused"):
        run_top(agent.url, console=Console(file=io.StringIO()))
    assert len(historys) == 1 + MAX_FAILURES_AFTER_ANSWER


def test_history_restarts_with_the_agent(agent: AgentServer, run_data: colocation_run.ColocationRun) -> None:
    agent.show(run_data.rounds[:50])
    watch = AgentHistory(AgentClient(agent.url))
    assert len(watch.poll()) == len(run_data.entries)
    assert [view.seq for view in watch.history] == list(range(1, 51))
    agent.show(run_data.rounds[50:53])
    watch.poll()
    assert [view.seq for view in watch.history] == list(range(1, 54))
    agent.go_away()
    assert watch.poll() == []
    assert "the numbers are from" in connection_notice(watch)
    agent.journal.all = list(run_data.entries[:2])
    agent.start()
    agent.show(run_data.rounds[:4])
    assert len(watch.poll()) == 2
    assert [view.seq for view in watch.history] == [1, 2, 3, 4]
    assert connection_notice(watch) == ""


@pytest.mark.parametrize("by_s", [-3600, 3600])
def test_a_clock_change_does_not_affect_the_history(
    agent: AgentServer, run_data: colocation_run.ColocationRun, by_s: int
) -> None:
    """The cycle before the change is a second older than the next, and five minutes of cycles stay five minutes."""
    plain = [build_view(finished) for finished in run_data.rounds[170:200]]
    moved = colocation_run.with_clock_step(run_data, 190, by_s).rounds
    agent.show(moved[:188])
    watch = AgentHistory(AgentClient(agent.url))
    watch.poll()
    for finished in moved[188:200]:
        agent.show([finished])
        watch.poll()
    assert [view.seq for view in watch.history] == list(range(1, 201))
    before, after = watch.history[188:190]
    assert after.wall_time_ms - before.wall_time_ms == (by_s + 1) * 1000, "the clock was set"
    assert watch.view is not None
    drawn = runq_latency_charts(watch.view, watch.history, 100, 4)
    assert drawn == runq_latency_charts(plain[-1], plain, 100, 4)
    total = sum(view.containers[0].wait.count for view in plain if view.containers[0].wait)
    assert f"· {formats.integer(total)}" in drawn[0].plain


def test_a_reboot_clears_the_history(agent: AgentServer, run_data: colocation_run.ColocationRun) -> None:
    """The sequence number of the new agent may be higher than the last one of the old agent; its monotonic clock is not."""
    agent.show(run_data.rounds[:10])
    watch = AgentHistory(AgentClient(agent.url))
    watch.poll()
    rebooted = [
        msgspec.structs.replace(
            r, snapshot=msgspec.structs.replace(r.snapshot, taken_at_ns=r.snapshot.seq * colocation_run.S)
        )
        for r in run_data.rounds[20:25]
    ]
    agent.go_away()
    agent.start()
    agent.show(rebooted)
    watch.poll()
    assert [view.seq for view in watch.history] == [21, 22, 23, 24, 25]


def test_history_is_five_minutes(agent: AgentServer) -> None:
    agent.journal.all = []
    agent.show(colocation_run.simulate_run(330).rounds)
    watch = AgentHistory(AgentClient(agent.url))
    watch.poll()
    assert len(watch.history) <= 301
    assert watch.history[-1].seq == 331


class OtherProgram(BaseHTTPRequestHandler):
    """Answers of another program on the agent's port."""

    def do_GET(self) -> None:
        status, body = {"/a": (200, b"<html>"), "/b": (200, b'{"seq": "x"}'), "/c": (500, b"oops")}.get(
            self.path.removesuffix("/api/v1/view"), (404, b"")
        )
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        """Keep the tests' output free of request logs."""


@pytest.mark.parametrize(
    ("prefix", "text"),
    [("/a", "is not a response of an agent"), ("/b", "is not a response of an agent"), ("/c", "answers 500")],
)
def test_another_program_on_the_port_is_reported(prefix: str, text: str) -> None:
    server = HTTPServer(("127.0.0.1", 0), OtherProgram)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with pytest.raises(Unavailable, match=text) as caught:
            AgentClient(f"http://127.0.0.1:{server.server_port}{prefix}").view()
        assert caught.value.remedy
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

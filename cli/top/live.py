"""The `dioptase top` command: the live view of a running agent, redrawn every second until q, Ctrl-C or its end.
Without a terminal it prints one line per cycle and one per decision; `--once` prints one frame. Linux only (termios).
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.live import Live

from api.decision import JournalEntry
from api.interfaces import Unavailable
from api.text import printable
from cli import formats
from cli.client import AgentClient, AgentHistory
from cli.formats import decision_line
from cli.options import exit_unavailable, url_option
from cli.top.charts import truncate_line
from cli.top.frame import overview_lines, render, screen_lines
from cli.top.screens import OVERVIEW, SCREENS, ScreenSelection, handle_key
from cli.top.summary import cycle_line

POLL_INTERVAL_S = 1.0
MAX_FAILURES, MAX_FAILURES_AFTER_ANSWER = 5, 120
"""Failed requests before giving up without a terminal: for an agent that never answered, and for one that may be restarting."""
KEY_POLL_INTERVAL_S = 0.2
"""Interval in which keys, `stop` and `on_tick` are polled between two frames."""
QUIT_KEY = "q"
ESCAPE_SEQUENCE = re.compile(r"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Za-z])")
"""Escape sequences of arrow and function keys, whose letters are not key presses."""


def run_top(
    url: str,
    *,
    stop: threading.Event | None = None,
    duration: float | None = None,
    on_tick: Callable[[], bool] | None = None,
    console: Console | None = None,
    begin: ScreenSelection | None = None,
) -> None:
    """Show the agent at `url` until `stop` is set, the duration is over, `on_tick` returns true or q is pressed.

    `on_tick` is called several times a second, between frames. KeyboardInterrupt passes through after the terminal has been
    restored. Raises Unavailable without a terminal, after too many failed requests.
    """
    terminal = console or Console(highlight=False)
    agent = AgentHistory(AgentClient(url))
    deadline = None if duration is None else time.monotonic() + duration

    def is_over() -> bool:
        expired = deadline is not None and time.monotonic() >= deadline
        return expired or bool(stop and stop.is_set()) or bool(on_tick and on_tick())

    if terminal.is_terminal:
        with _raw_keyboard() as typed, Live(console=terminal, screen=True, auto_refresh=False) as live:
            _interact(live, agent, typed, is_over, begin or ScreenSelection())
    else:
        _loop(lambda: _print_cycle(terminal, agent), lambda: _has_given_up(agent) or is_over())
        if agent.failure is not None and _has_given_up(agent):
            raise agent.failure


def _loop(show: Callable[[], None], is_over: Callable[[], bool]) -> None:
    """Call `show` once a second and `is_over` several times a second."""
    due_at = time.monotonic()
    while not is_over():
        if time.monotonic() >= due_at:
            show()
            due_at = max(due_at + POLL_INTERVAL_S, time.monotonic())
        time.sleep(KEY_POLL_INTERVAL_S)


def _interact(
    live: Live,
    agent: AgentHistory,
    read_keys: Callable[[], str],
    is_over: Callable[[], bool],
    selection: ScreenSelection,
) -> None:
    """Poll once a second; draw then, and at once after every key."""
    quit_pressed = False

    def show(*, poll: bool) -> None:
        if poll:
            agent.poll()
        size = (live.console.width, live.console.height)
        frame = render(agent.view, agent.history, agent.entries, size, selection, connection_notice(agent))
        live.update(frame, refresh=True)

    def is_ended() -> bool:
        nonlocal selection, quit_pressed
        previous = selection
        for key in read_keys():
            changed = handle_key(selection, key)
            quit_pressed = quit_pressed or changed is None
            selection = changed or selection
        if selection != previous and not quit_pressed:
            show(poll=False)
        return quit_pressed or is_over()

    _loop(lambda: show(poll=True), is_ended)


def connection_notice(agent: AgentHistory) -> str:
    """Return the notice while the agent does not answer; "" while it does."""
    if agent.failure is None:
        return ""
    text = printable(agent.failure.reason)
    if agent.view is None:
        return f"{text}; retrying every second. {printable(agent.failure.remedy)}"
    return f"{text}; the numbers are from {formats.clock(agent.view.wall_time_ms)}; retrying every second"


def _has_given_up(agent: AgentHistory) -> bool:
    return agent.failures >= (MAX_FAILURES if agent.view is None else MAX_FAILURES_AFTER_ANSWER)


def _print_cycle(console: Console, agent: AgentHistory) -> None:
    """Print the new decisions and one line about the cycle, each once."""
    before, failed = agent.view, agent.failure
    for entry in agent.poll():
        _print_text(console, decision_line(entry))
    if agent.failure is not None:
        if failed is None or failed.reason != agent.failure.reason:
            _print_text(console, connection_notice(agent))
    elif agent.view is not None and (before is None or agent.view.seq != before.seq):
        _print_text(console, cycle_line(agent.view))


def _print_text(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _raw_keyboard() -> Iterator[Callable[[], str]]:
    """Yield a function that returns the keys typed since its last call, without Enter; restores the terminal at the end."""
    if not sys.stdin.isatty():
        yield lambda: ""
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield lambda: _read_keys(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _read_keys(fd: int) -> str:
    ready, _, _ = select.select([fd], [], [], 0)
    if not ready:
        return ""
    try:
        keys = os.read(fd, 64)
    except OSError:
        return QUIT_KEY  # the terminal is gone
    return ESCAPE_SEQUENCE.sub("", keys.decode("ascii", "replace")) if keys else QUIT_KEY


def print_frame(url: str, console: Console, choice: ScreenSelection) -> None:
    """Print one frame. Raises Unavailable without data. Rates and latencies need two cycles, which the history has."""
    agent = AgentHistory(AgentClient(url))
    new: list[JournalEntry] = agent.poll()
    if agent.failure is not None:
        raise agent.failure
    assert agent.view is not None
    width, height = console.size
    if choice.screen == OVERVIEW.key:
        height = height if console.is_terminal else 24 + min(len(new), 16)
        lines = overview_lines(agent.view, agent.history, agent.entries, width, height)
    else:
        height = height if console.is_terminal else 24 + len(agent.view.containers) + len(agent.view.others)
        lines = screen_lines(agent.view, agent.history, (width, height), choice)
    for line in lines:
        console.print(truncate_line(line, width))


VIEW_KEYS = {screen.short: screen.key for screen in SCREENS.values()} | {key: key for key in SCREENS}
"""Values of --view and the key of the screen that each selects."""


@click.command()
@url_option
@click.option(
    "--once", "one_frame", is_flag=True, help="Print one frame and end; exit status 1 if the agent has no data."
)
@click.option(
    "--view", type=click.Choice(list(VIEW_KEYS)), default=OVERVIEW.short, show_default=True, help="The first screen."
)
def top(url: str, one_frame: bool, view: str) -> None:
    """Watch a running agent: reclaimable and used CPU, waits, throttling, and each change of a cgroup with its reason.

    Keys switch between the overview, interference, memory, threads, and disk and network; ? lists them, q or Ctrl-C
    ends it. Without a terminal: a line per cycle and a line per decision; exit status 1 if no agent answers.
    """
    console = Console(highlight=False)
    begin = ScreenSelection(screen=VIEW_KEYS[view])
    if begin != ScreenSelection() and not console.is_terminal and not one_frame:
        raise click.UsageError("--view needs a terminal, or --once: without them it prints a line per cycle")
    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda _signum, _frame: stop.set())
    try:
        if one_frame:
            print_frame(url, console, begin)
        else:
            run_top(url, stop=stop, console=console, begin=begin)
    except Unavailable as failure:
        exit_unavailable("top", failure)
    except (KeyboardInterrupt, BrokenPipeError):
        stop.set()

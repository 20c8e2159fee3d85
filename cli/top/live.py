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
from cli import formats
from cli.client import AgentClient, AgentHistory
from cli.formats import decision_line
from cli.options import url_option
from cli.top.charts import truncate_line
from cli.top.frame import overview_lines, render, screen_lines
from cli.top.screens import OVERVIEW, SCREENS, ScreenSelection, handle_key
from cli.top.summary import cycle_line

POLL_INTERVAL_S = 1.0
MAX_FAILURES, MAX_FAILURES_AFTER_ANSWER = 5, 120
"""How often an agent is asked in vain without a terminal: one that never answered, and one that did and may be restarting."""
KEY_POLL_INTERVAL_S = 0.2
"""How often keys, `stop` and `each` are looked at between two frames."""
QUIT_KEY = "q"
ESCAPE_SEQUENCE = re.compile(r"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Za-z])")
"""What the arrow and function keys send: letters that nobody typed."""


def run_top(
    url: str,
    *,
    stop: threading.Event | None = None,
    duration: float | None = None,
    each: Callable[[], bool] | None = None,
    console: Console | None = None,
    begin: ScreenSelection | None = None,
) -> None:
    """Show the agent at `url` until `stop` is set, the duration is over, `each` says so or q is pressed.

    `each` is called several times a second, between frames, and ends the view by returning true. KeyboardInterrupt passes
    through, with the terminal as it was before. Raises Unavailable without a terminal, once the agent was asked in vain for
    so long that nothing is to be expected of it.
    """
    shown = console or Console(highlight=False)
    watch = AgentHistory(AgentClient(url))
    deadline = None if duration is None else time.monotonic() + duration

    def over() -> bool:
        late = deadline is not None and time.monotonic() >= deadline
        return late or bool(stop and stop.is_set()) or bool(each and each())

    if shown.is_terminal:
        with _raw_keyboard() as typed, Live(console=shown, screen=True, auto_refresh=False) as live:
            _interact(live, watch, typed, over, begin or ScreenSelection())
    else:
        _loop(lambda: _print_cycle(shown, watch), lambda: _has_given_up(watch) or over())
        if watch.failure is not None and _has_given_up(watch):
            raise watch.failure


def _loop(show: Callable[[], None], over: Callable[[], bool]) -> None:
    """Show once a second; look several times a second whether that is over."""
    due = time.monotonic()
    while not over():
        if time.monotonic() >= due:
            show()
            due = max(due + POLL_INTERVAL_S, time.monotonic())
        time.sleep(KEY_POLL_INTERVAL_S)


def _interact(
    live: Live, watch: AgentHistory, typed: Callable[[], str], over: Callable[[], bool], chosen: ScreenSelection
) -> None:
    """Ask once a second, draw then and at once after every key."""
    left = False

    def show(*, ask: bool) -> None:
        if ask:
            watch.poll()
        size = (live.console.width, live.console.height)
        frame = render(watch.view, watch.history, watch.entries, size, chosen, connection_notice(watch))
        live.update(frame, refresh=True)

    def ended() -> bool:
        nonlocal chosen, left
        before = chosen
        for key in typed():
            after = handle_key(chosen, key)
            left = left or after is None
            chosen = after or chosen
        if chosen != before and not left:
            show(ask=False)
        return left or over()

    _loop(lambda: show(ask=True), ended)


def connection_notice(watch: AgentHistory) -> str:
    """What to say while the agent does not answer; empty while it does."""
    if watch.failure is None:
        return ""
    text = formats.printable(watch.failure.reason)
    if watch.view is None:
        return f"{text}; asking again every second. {formats.printable(watch.failure.remedy)}"
    return f"{text}; the numbers are of {formats.clock(watch.view.wall_time_ms)}; asking again every second"


def _has_given_up(watch: AgentHistory) -> bool:
    return watch.failures >= (MAX_FAILURES if watch.view is None else MAX_FAILURES_AFTER_ANSWER)


def _print_cycle(console: Console, watch: AgentHistory) -> None:
    """The new decisions and one line of where things stand; nothing twice."""
    before, failed = watch.view, watch.failure
    for entry in watch.poll():
        _print_text(console, decision_line(entry))
    if watch.failure is not None:
        if failed is None or failed.reason != watch.failure.reason:
            _print_text(console, connection_notice(watch))
    elif watch.view is not None and (before is None or watch.view.seq != before.seq):
        _print_text(console, cycle_line(watch.view))


def _print_text(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _raw_keyboard() -> Iterator[Callable[[], str]]:
    """What was typed since the last look, without waiting for Enter; the terminal is put back at the end."""
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


def print_frame(url: str, console: Console, choice: ScreenSelection) -> bool:
    """Print one frame; whether there was one to print. Rates and waits need two rounds, which history has."""
    watch = AgentHistory(AgentClient(url))
    new: list[JournalEntry] = watch.poll()
    if watch.failure is not None:
        _print_failure(watch.failure)
        return False
    assert watch.view is not None
    width, height = console.size
    if choice.screen == OVERVIEW.key:
        height = height if console.is_terminal else 24 + min(len(new), 16)
        made = overview_lines(watch.view, watch.history, watch.entries, width, height)
    else:
        height = height if console.is_terminal else 24 + len(watch.view.containers) + len(watch.view.others)
        made = screen_lines(watch.view, watch.history, (width, height), choice)
    for line in made:
        console.print(truncate_line(line, width))
    return True


def _print_failure(failure: Unavailable) -> None:
    click.echo(f"dioptase top: {failure.reason}\n  remedy: {failure.remedy}", err=True)


VIEW_KEYS = {screen.short: screen.key for screen in SCREENS.values()} | {key: key for key in SCREENS}
"""What --view may say, and the screen that it means."""


@click.command()
@url_option
@click.option("--once", "one_frame", is_flag=True, help="Print one frame and end; exit status 1 if there is none.")
@click.option(
    "--view", type=click.Choice(list(VIEW_KEYS)), default=OVERVIEW.short, show_default=True, help="What to show first."
)
def top(url: str, one_frame: bool, view: str) -> None:
    """Watch a running agent: lent and used CPU, waits, throttling, and each change of a cgroup with its reason.

    Keys switch between the overview, who waits on whom, memory, threads, and disk and network; ? lists them, q or Ctrl-C
    ends it. Without a terminal: a line a round and a line a decision; exit status 1 where no agent answers.
    """
    console = Console(highlight=False)
    begin = ScreenSelection(screen=VIEW_KEYS[view])
    if one_frame:
        sys.exit(0 if print_frame(url, console, begin) else 1)
    if begin != ScreenSelection() and not console.is_terminal:
        raise click.UsageError("--view needs a terminal, or --once: without them a line a round is printed")
    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda _signum, _frame: stop.set())
    try:
        run_top(url, stop=stop, console=console, begin=begin)
    except Unavailable as failure:
        _print_failure(failure)
        sys.exit(1)
    except (KeyboardInterrupt, BrokenPipeError):
        stop.set()

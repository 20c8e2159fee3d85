"""`dioptase top`: the live view of a running agent in the terminal, from the same numbers as its page.

In a terminal it redraws every second until q, Ctrl-C or its duration ends it. Without one it prints a line a round and
every decision on a line of its own; `--once` prints one frame and ends. An agent that is away is said to be, and asked again;
without a terminal, where nobody may be there to end it, not for ever.
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

from api.decisions import JournalEntry
from api.forecasts import Resource
from api.ports import Unavailable
from cli import foretold, words
from cli.client import Client, Watch, url_option
from cli.frame import fit, lines, render, screen_lines
from cli.keys import Choice, pressed
from cli.screens import OVERVIEW, SCREENS
from cli.words import decision_line
from exporters.view import View

__all__ = ["decision_line", "render", "run_top", "top"]

EVERY_S = 1.0
TRIES, TRIES_MORE = 5, 120
"""How often an agent is asked in vain without a terminal: one that never answered, and one that did and may be restarting."""
STEP_S = 0.2
"""How often keys, `stop` and `each` are looked at between two frames."""
QUIT = "q"
ESCAPE = re.compile(r"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Za-z])")
"""What the arrow and function keys send: letters that nobody typed."""


def run_top(
    url: str,
    *,
    stop: threading.Event | None = None,
    duration: float | None = None,
    each: Callable[[], bool] | None = None,
    console: Console | None = None,
    begin: Choice | None = None,
) -> None:
    """Show the agent at `url` until `stop` is set, the duration is over, `each` says so or q is pressed.

    `each` is called several times a second, between frames, and ends the view by returning true. KeyboardInterrupt passes
    through, with the terminal as it was before. Raises Unavailable without a terminal, once the agent was asked in vain for
    so long that nothing is to be expected of it.
    """
    shown = console or Console(highlight=False)
    watch = Watch(Client(url))
    deadline = None if duration is None else time.monotonic() + duration

    def over() -> bool:
        late = deadline is not None and time.monotonic() >= deadline
        return late or bool(stop and stop.is_set()) or bool(each and each())

    if shown.is_terminal:
        with _typed() as typed, Live(console=shown, screen=True, auto_refresh=False) as live:
            _interact(live, watch, typed, over, begin or Choice())
    else:
        _loop(lambda: _print_round(shown, watch), lambda: _given_up(watch) or over())
        if watch.failure is not None and _given_up(watch):
            raise watch.failure


def _loop(show: Callable[[], None], over: Callable[[], bool]) -> None:
    """Show once a second; look several times a second whether that is over."""
    due = time.monotonic()
    while not over():
        if time.monotonic() >= due:
            show()
            due = max(due + EVERY_S, time.monotonic())
        time.sleep(STEP_S)


def _interact(live: Live, watch: Watch, typed: Callable[[], str], over: Callable[[], bool], chosen: Choice) -> None:
    """Ask once a second, draw then and at once after every key."""
    left = False

    def show(*, ask: bool) -> None:
        if ask:
            watch.poll()
        size = (live.console.width, live.console.height)
        frame = render(watch.view, watch.history, watch.entries, size, chosen, notice(watch))
        live.update(frame, refresh=True)

    def ended() -> bool:
        nonlocal chosen, left
        before = chosen
        for key in typed():
            after = pressed(chosen, key)
            left = left or after is None
            chosen = after or chosen
        if chosen != before and not left:
            show(ask=False)
        return left or over()

    _loop(lambda: show(ask=True), ended)


def notice(watch: Watch) -> str:
    """What to say while the agent does not answer; empty while it does."""
    if watch.failure is None:
        return ""
    text = words.clean(watch.failure.reason)
    if watch.view is None:
        return f"{text}; asking again every second. {words.clean(watch.failure.remedy)}"
    return f"{text}; the numbers are of {words.clock(watch.view.wall_time_ms)}; asking again every second"


def _given_up(watch: Watch) -> bool:
    return watch.failures >= (TRIES if watch.view is None else TRIES_MORE)


def _print_round(console: Console, watch: Watch) -> None:
    """The new decisions and one line of where things stand; nothing twice."""
    before, failed = watch.view, watch.failure
    for entry in watch.poll():
        _say(console, decision_line(entry))
    if watch.failure is not None:
        if failed is None or failed.reason != watch.failure.reason:
            _say(console, notice(watch))
    elif watch.view is not None and (before is None or watch.view.seq != before.seq):
        _say(console, round_line(watch.view))


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def round_line(view: View) -> str:
    """One line of where things stand."""
    parts = [
        f"{words.clock(view.wall_time_ms)}  {view.act} {view.action or 'no advice'}",
        f"lent {words.cores(view.lent_cores)} of {view.node_cpus} cores",
        f"used {words.cores(view.reclaimed_cores)}",
        f"need {words.cores(view.requirement_cores)}",
        f"busy {words.cores(view.busy_cores)}",
    ]
    if view.shadow is not None:
        parts.append(f"shadow {words.clean(view.shadow.policy)} would lend {words.cores(view.shadow.lent_cores)}")
    parts += [f"{said.topic}: {words.clean(said.text)}" for said in view.answers]
    parts += [
        f"foretold {foretold.amount(outlook, outlook.forecast.peak)} at most"
        for outlook in view.forecasts
        if outlook.resource is Resource.CPU and outlook.forecast.peak is not None
    ]
    for container in view.containers:
        wait, latency = container.wait, container.latency
        if container.qos == "reclaimed_cores" or (wait is None and latency is None):
            continue
        told = [f"wait p99 {words.duration(wait.p99_us)}"] if wait and wait.p99_us is not None else []
        told += [f"wait mean {words.duration(wait.mean_us)}"] if wait and wait.p99_us is None else []
        told += [f"latency p99 {words.milliseconds(latency.p99_ms)}"] if latency else []
        parts.append(f"{words.clean(container.pod)}: {', '.join(told)}")
    return words.join(parts)


@contextmanager
def _typed() -> Iterator[Callable[[], str]]:
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
        return QUIT  # the terminal is gone
    return ESCAPE.sub("", keys.decode("ascii", "replace")) if keys else QUIT


def once(url: str, console: Console, choice: Choice) -> bool:
    """Print one frame; whether there was one to print. Rates and waits need two rounds, which history has."""
    watch = Watch(Client(url))
    new: list[JournalEntry] = watch.poll()
    if watch.failure is not None:
        _complain(watch.failure)
        return False
    assert watch.view is not None
    width, height = console.size
    if choice.screen == OVERVIEW.key:
        height = height if console.is_terminal else 24 + min(len(new), 16)
        made = lines(watch.view, watch.history, watch.entries, width, height)
    else:
        height = height if console.is_terminal else 24 + len(watch.view.containers) + len(watch.view.others)
        made = screen_lines(watch.view, watch.history, (width, height), choice)
    for line in made:
        console.print(fit(line, width))
    return True


def _complain(failure: Unavailable) -> None:
    click.echo(f"dioptase top: {failure.reason}\n  remedy: {failure.remedy}", err=True)


VIEWS = {screen.short: screen.key for screen in SCREENS.values()} | {key: key for key in SCREENS}
"""What --view may say, and the screen that it means."""


@click.command()
@url_option
@click.option("--once", "one_frame", is_flag=True, help="Print one frame and end; exit status 1 if there is none.")
@click.option(
    "--view", type=click.Choice(list(VIEWS)), default=OVERVIEW.short, show_default=True, help="What to show first."
)
def top(url: str, one_frame: bool, view: str) -> None:
    """Watch a running agent: lent and used CPU, waits, throttling, and each change of a cgroup with its reason.

    Keys switch between the overview, who waits on whom, memory, threads, and disk and network; ? lists them, q or Ctrl-C
    ends it. Without a terminal: a line a round and a line a decision; exit status 1 where no agent answers.
    """
    console = Console(highlight=False)
    begin = Choice(screen=VIEWS[view])
    if one_frame:
        sys.exit(0 if once(url, console, begin) else 1)
    if begin != Choice() and not console.is_terminal:
        raise click.UsageError("--view needs a terminal, or --once: without them a line a round is printed")
    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda _signum, _frame: stop.set())
    try:
        run_top(url, stop=stop, console=console, begin=begin)
    except Unavailable as failure:
        _complain(failure)
        sys.exit(1)
    except (KeyboardInterrupt, BrokenPipeError):
        stop.set()

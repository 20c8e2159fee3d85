"""What the views of probes share: the terminal, the paths of cgroups, and the bars of a histogram."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from agent.hierarchy import detect
from api.histograms import BOUNDS_NS
from api.ports import Unavailable
from cli.words import duration

BAR_WIDTH = 40
ROOT_ID = 1
T = TypeVar("T")


class Screen(Generic[T]):
    """Shows each interval in place on a terminal, one below the other anywhere else."""

    def __init__(self, render: Callable[[T, int | None], Group]) -> None:
        self._render = render
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> Callable[[T], None]:
        if not self._console.is_terminal:
            return lambda finished: self._console.print(self._render(finished, None))
        self._live.start()
        return lambda finished: self._live.update(self._render(finished, self._console.height - 1), refresh=True)

    def __exit__(self, *_: object) -> None:
        self._live.stop()


def cgroup_paths() -> dict[int, str]:
    """Path of every cgroup by its inode; empty where no hierarchy is mounted."""
    try:
        root = detect(Path("/proc")).primary
    except (Unavailable, OSError):
        return {}
    found: dict[int, str] = {}
    for directory, _, _ in os.walk(root):
        try:
            found[Path(directory).stat().st_ino] = directory[len(str(root)) :] or "/"
        except FileNotFoundError:
            continue
    return found


def checked_prefix(_context: click.Context, _parameter: click.Parameter, prefix: str) -> str:
    """Callback of --cgroup: a prefix that no cgroup can have is refused; one that none has now may get one later."""
    if not prefix.startswith(("/", "id ")):
        raise click.BadParameter(f"no cgroup begins with {prefix!r}: paths begin with /, such as /{prefix}")
    paths = cgroup_paths().values()
    if paths and prefix.startswith("/") and not any(path.startswith(prefix) for path in paths):
        click.echo(f"no cgroup begins with {prefix}; nothing is shown until there is one", err=True)
    return prefix


def whole(paths: Mapping[int, str]) -> bool:
    """Whether these are all cgroups. In a container the mount may show a part of the hierarchy, whose top is not its root;
    a probe must keep counting for the rest, which this list lacks although it lives."""
    return ROOT_ID in paths


def name_of(number: int, paths: dict[int, str]) -> str:
    """Path of a cgroup, or `id N` where it was gone before it could be looked up or is outside this mount."""
    return paths.get(number, "/" if number == ROOT_ID else f"id {number}")


def device_name(number: str, sys_root: Path = Path("/sys")) -> str:
    """What the kernel calls a disk, `vda` for `254:0`; the number itself of one that is gone."""
    try:
        return (sys_root / "dev/block" / number).readlink().name
    except OSError:
        return number


def bars(slots: Sequence[int]) -> list[Text]:
    """A bar per slot between the first and the last that is not empty."""
    lines = []
    filled = [k for k, count in enumerate(slots) if count]
    most = max(slots)
    for k in range(filled[0], filled[-1] + 1):
        label = f"≤ {duration(BOUNDS_NS[k] / 1000)}" if k < len(BOUNDS_NS) else f"> {duration(BOUNDS_NS[-1] / 1000)}"
        bar = "█" * max(round(BAR_WIDTH * slots[k] / most), 1 if slots[k] else 0)
        lines.append(Text(f"  {label:>12} {slots[k]:>8} {bar}"))
    return lines

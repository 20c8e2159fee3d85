"""Numbers of clusters, and removal of everything that belongs to one, found by name even after its process was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tests.cluster import cgroups
from tests.cluster.daemons import SPACES, members, started
from tests.cluster.names import CONTROL, HOME, MOST, Names, number_of
from tests.cluster.node import OWN


class ClusterNumberTaken(Exception):
    """The number belongs to another cluster."""


class Owner(msgspec.Struct, frozen=True):
    """The process for which a cluster was created; the cluster is abandoned when it ends."""

    pid: int
    started: str
    """Start time in the kernel's ticks, because process numbers are reused."""

    @property
    def alive(self) -> bool:
        return started(self.pid) == self.started


def claim(numbers: Iterable[int], *, retained: bool, home: Path = HOME) -> Names:
    """Claim the first free number for this process; if `retained`, until it is removed. Raises ClusterNumberTaken.

    Clusters abandoned by processes that have ended are removed first.
    """
    with _alone(home):
        for number in known_clusters(home):
            if is_abandoned(Names(number, home)):
                remove_all(Names(number, home))
        for number in numbers:
            names = Names(number, home)
            if number in known_clusters(home):
                continue
            # With its owner at once, or not at all.
            new = home / f"new-{number}"
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            if not retained:
                (new / "owner").write_bytes(msgspec.json.encode(Owner(os.getpid(), started(os.getpid()))))
            new.rename(names.run)
            make_mount_points(home)
            return names
    raise ClusterNumberTaken(_taken_text(retained=retained, home=home))


def _taken_text(*, retained: bool, home: Path) -> str:
    if retained:
        return (
            f"the cluster of make cluster exists already, in {Names(0, home).run}: print its shell lines with"
            " .venv/bin/python -m tests.cluster env, or remove it with make cluster-down"
        )
    return (
        f"all {MOST - 1} numbers of test clusters in {home} are taken: wait until other tests have ended, or remove what killed"
        " tests left with make cluster-down"
    )


def release(names: Names) -> None:
    """Remove a cluster, and the shared parts if it was the last one."""
    with _alone(names.home):
        remove_all(names)


def release_abandoned(also: Iterable[int] = (), home: Path = HOME) -> list[int]:
    """Remove the abandoned clusters and those of these numbers; return the numbers removed."""
    with _alone(home):
        removed = [number for number in known_clusters(home) if number in also or is_abandoned(Names(number, home))]
        for number in removed:
            remove_all(Names(number, home))
        _share_nothing(home)
    return removed


def known_clusters(home: Path = HOME) -> list[int]:
    """Return the numbers of clusters that have a folder, a namespace, a bridge or a cable."""
    every = [Names(number, home) for number in range(MOST)]
    return [names.number for names in every if names.run.exists() or _spaces(names) or _links(names)]


def is_abandoned(names: Names) -> bool:
    """Return whether the owner of the cluster has ended or its folder was removed."""
    if not names.run.exists():
        return True
    owner = owner_of(names)
    return owner is not None and not owner.alive


def owner_of(names: Names) -> Owner | None:
    """Return the owner of a cluster; None if the cluster is retained until it is removed explicitly."""
    try:
        return msgspec.json.decode((names.run / "owner").read_bytes(), type=Owner)
    except FileNotFoundError:
        return None


def remove_all(names: Names) -> None:
    """Remove processes, cgroups, namespaces, links, mounts and files of a cluster, as far as they exist."""
    spaces = _spaces(names)
    _end_all(spaces)
    cgroups.remove(names)
    # What was started meanwhile, by those that have ended now.
    _end_all(spaces)
    # A namespace takes its cables with it only when the kernel comes to that.
    for link in _links(names):
        _quietly("ip", "link", "del", link)
    for space in spaces:
        _quietly("ip", "netns", "del", space)
    for path in _mounts_below(names.run):
        _quietly("umount", "--lazy", path)
    shutil.rmtree(names.run, ignore_errors=True)
    if names.run.exists():
        # A file that was written while it was removed.
        shutil.rmtree(names.run)
    _share_nothing(names.home)


def _end_all(spaces: list[str], seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while pids := {pid for space in spaces for pid in members(space)}:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > until:
            raise OSError(f"processes {sorted(pids)} do not end")
        time.sleep(0.05)


def _spaces(names: Names) -> list[str]:
    if not SPACES.exists():
        return []
    return sorted(path.name for path in SPACES.iterdir() if number_of(path.name) == names.number)


def _links(names: Names) -> list[str]:
    own_links = (names.bridge, names.link(CONTROL), names.link("node"))
    return sorted(path.name for path in Path("/sys/class/net").iterdir() if path.name.startswith(own_links))


def _mounts_below(folder: Path) -> list[str]:
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in reversed(points) if point.startswith(f"{folder}/")]


def make_mount_points(home: Path) -> None:
    """Create the paths over which nodes mount, after recording which ones are new."""
    with (home / "made").open("a") as created:
        for path in map(Path, OWN):
            for part in (*reversed(path.parents), path):
                if not part.exists():
                    created.write(f"{part}\n")
                    created.flush()
                    part.mkdir()


def _share_nothing(home: Path) -> None:
    """Remove the shared parts if no cluster is left. Folders are removed only if they are empty: others may use them."""
    if known_clusters(home):
        return
    try:
        text = (home / "made").read_text().split()
    except OSError:
        return
    for part in reversed(text):
        if part == str(SPACES) and SPACES.exists() and not any(SPACES.iterdir()):
            # iproute2 has mounted it over itself.
            _quietly("umount", part)
        try:
            Path(part).rmdir()
        except OSError:
            continue
    (home / "made").unlink()


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    home.mkdir(exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _quietly(*words: str) -> None:
    subprocess.run(words, check=False, capture_output=True)

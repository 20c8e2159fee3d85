"""Writes resctrl groups and moves threads into them, where the file system is mounted.

Nothing has to be journalled: only groups of our own name are made and written, and removing one gives its threads back
to the default group. The kernel starts threads in the group of who starts them, so only those that came otherwise are moved.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from agent.qrm.resctrl import PREFIX, Caches, Group, parse_schemata
from agent.qrm.restore import VERDICT
from agent.smallfile import read_small
from api.decisions import Decision, Outcome, Status
from api.knobs import Knob, Verdict
from api.ports import Unavailable

ROOT = Path("/sys/fs/resctrl")
_LARGEST = 1 << 20


class ResctrlGroups:
    """The groups below one mount point."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root

    def caches(self) -> Caches:
        """What the default group has. Raises Unavailable where there is no resctrl."""
        try:
            return parse_schemata(_text(self._root / "schemata"))
        except (OSError, ValueError) as error:
            raise Unavailable(
                f"{self._root} cannot be read: {error}",
                f"mount -t resctrl resctrl {self._root}, on a CPU with cache allocation",
            ) from None

    def apply(
        self, wanted: Iterable[Group], members: Mapping[str, Iterable[int]], *, dry: bool = False
    ) -> tuple[Outcome, ...]:
        """Make these groups, give them their shares and move those threads in, by name of group; remove our other ones."""
        wanted = tuple(wanted)
        made = tuple(self._make(group, members.get(group.name, ()), dry) for group in wanted)
        return made if dry else (*made, *self._remove({group.name for group in wanted}))

    def restore(self) -> tuple[Outcome, ...]:
        """Remove every group of ours."""
        return self._remove(set())

    def _make(self, group: Group, members: Iterable[int], dry: bool) -> Outcome:
        directory, before = self._root / group.name, None
        decision = _decision(directory, _line(group.schemata), group.verdict)
        try:
            if directory.is_dir():
                before = _line(_text(directory / "schemata"))
            same = before is not None and parse_schemata(_text(directory / "schemata")) == parse_schemata(
                group.schemata
            )
            if dry:
                return Outcome(
                    decision=decision, status=Status.UNCHANGED if same else Status.DRY_RUN, before=before, after=before
                )
            if not same:
                directory.mkdir(exist_ok=True)
                _write(directory / "schemata", group.schemata)
            after = _line(_text(directory / "schemata"))
            failed = _move(directory, members)
        except (OSError, ValueError) as error:
            text = f"{directory}: {error}: see {self._root}/info/last_cmd_status"
            return Outcome(decision=decision, status=Status.REFUSED, before=before, error=text)
        status = Status.UNCHANGED if same else Status.APPLIED
        return Outcome(
            decision=decision, status=Status.MISMATCH if failed else status, before=before, after=after, error=failed
        )

    def _remove(self, but: set[str]) -> tuple[Outcome, ...]:
        found = []
        for directory in sorted(self._root.glob(f"{PREFIX}*")) if self._root.is_dir() else ():
            if directory.name in but:
                continue
            decision = _decision(directory, "", VERDICT)
            try:
                self.remove(directory)
            except OSError as error:
                text = f"{directory} cannot be removed: {error.strerror}: remove it by rmdir"
                found.append(Outcome(decision=decision, status=Status.REFUSED, error=text))
            else:
                found.append(Outcome(decision=decision, status=Status.APPLIED, after=""))
        return tuple(found)

    def remove(self, directory: Path) -> None:
        """The kernel removes a group's files with it."""
        directory.rmdir()


def _decision(directory: Path, value: str, verdict: Verdict) -> Decision:
    return Decision(cgroup=str(directory), cgroup_id=0, pod="", knob=Knob.SCHEMATA, value=value, verdict=verdict)


def _line(schemata: str) -> str:
    """All of it on one line."""
    return " ".join(schemata.split())


def _move(directory: Path, tids: Iterable[int]) -> str:
    """Why threads could not be moved; empty where all are there or have ended."""
    there = set(map(int, _text(directory / "tasks").split()))
    failed, why = [], ""
    for tid in sorted(set(tids) - there):
        try:
            # One at a time: the kernel takes no more, and a thread that has ended must not hold up the others.
            _write(directory / "tasks", f"{tid}\n")
        except ProcessLookupError:
            continue
        except OSError as error:
            failed.append(tid)
            why = error.strerror or str(error)
    return f"{len(failed)} threads cannot be moved, the first is {failed[0]}: {why}" if failed else ""


def _text(path: Path) -> str:
    return read_small(path, _LARGEST).decode("ascii")


def _write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)

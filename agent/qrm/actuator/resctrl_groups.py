"""Creates resctrl groups, writes their schemata and moves threads into them.
Only groups with the prefix of the agent are created, written or removed. No journal is needed: removing a group
returns its threads to the default group.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from agent.qrm.actuator.restore import RESTORE_REASON
from agent.qrm.knobs.resctrl import GROUP_PREFIX, CacheCapacity, ResctrlGroup, parse_schemata
from api.decision import Decision, Outcome, OutcomeStatus
from api.interfaces import Unavailable
from api.knobs import Knob, Reason
from common.files import read_small_file

ROOT = Path("/sys/fs/resctrl")
_MAX_FILE_BYTES = 1 << 20


class ResctrlWriter:
    """The groups below one mount point."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root

    def caches(self) -> CacheCapacity:
        """Return the caches of the default group. Raises Unavailable without resctrl."""
        try:
            return parse_schemata(_read_text(self._root / "schemata"))
        except (OSError, ValueError) as error:
            raise Unavailable(
                f"{self._root} cannot be read: {error}",
                f"mount -t resctrl resctrl {self._root}, on a CPU with cache allocation",
            ) from None

    def apply(
        self, groups: Iterable[ResctrlGroup], members: Mapping[str, Iterable[int]], *, dry: bool = False
    ) -> tuple[Outcome, ...]:
        """Create these groups, write their schemata, and move their threads (by group name) in; remove other groups
        of the agent."""
        groups = tuple(groups)
        outcomes = tuple(self._apply_group(group, members.get(group.name, ()), dry) for group in groups)
        return outcomes if dry else (*outcomes, *self._remove({group.name for group in groups}))

    def restore(self) -> tuple[Outcome, ...]:
        """Remove every group of the agent."""
        return self._remove(set())

    def _apply_group(self, group: ResctrlGroup, members: Iterable[int], dry: bool) -> Outcome:
        directory, before = self._root / group.name, None
        decision = _decision(directory, _one_line(group.schemata), group.reason)
        try:
            if directory.is_dir():
                before = _one_line(_read_text(directory / "schemata"))
            unchanged = before is not None and parse_schemata(_read_text(directory / "schemata")) == parse_schemata(
                group.schemata
            )
            if dry:
                return Outcome(
                    decision=decision,
                    status=OutcomeStatus.UNCHANGED if unchanged else OutcomeStatus.DRY_RUN,
                    before=before,
                    after=before,
                )
            if not unchanged:
                directory.mkdir(exist_ok=True)
                _write_text(directory / "schemata", group.schemata)
            after = _one_line(_read_text(directory / "schemata"))
            failed = _move_threads(directory, members)
        except (OSError, ValueError) as error:
            text = f"{directory}: {error}: see {self._root}/info/last_cmd_status"
            return Outcome(decision=decision, status=OutcomeStatus.REFUSED, before=before, error=text)
        status = OutcomeStatus.UNCHANGED if unchanged else OutcomeStatus.APPLIED
        return Outcome(
            decision=decision,
            status=OutcomeStatus.MISMATCH if failed else status,
            before=before,
            after=after,
            error=failed,
        )

    def _remove(self, keep: set[str]) -> tuple[Outcome, ...]:
        outcomes = []
        for directory in sorted(self._root.glob(f"{GROUP_PREFIX}*")) if self._root.is_dir() else ():
            if directory.name in keep:
                continue
            decision = _decision(directory, "", RESTORE_REASON)
            try:
                self.remove(directory)
            except OSError as error:
                text = f"{directory} cannot be removed: {error.strerror}: remove it by rmdir"
                outcomes.append(Outcome(decision=decision, status=OutcomeStatus.REFUSED, error=text))
            else:
                outcomes.append(Outcome(decision=decision, status=OutcomeStatus.APPLIED, after=""))
        return tuple(outcomes)

    def remove(self, directory: Path) -> None:
        """Remove the directory; the kernel removes the group's files with it."""
        directory.rmdir()


def _decision(directory: Path, value: str, reason: Reason) -> Decision:
    return Decision(cgroup=str(directory), cgroup_id=0, pod="", knob=Knob.SCHEMATA, value=value, reason=reason)


def _one_line(schemata: str) -> str:
    return " ".join(schemata.split())


def _move_threads(directory: Path, tids: Iterable[int]) -> str:
    """Return why threads could not be moved; empty if all were moved or have ended."""
    present = set(map(int, _read_text(directory / "tasks").split()))
    failed, reason = [], ""
    for tid in sorted(set(tids) - present):
        try:
            # One thread per write: the kernel accepts no more, and a thread that has ended must not affect others.
            _write_text(directory / "tasks", f"{tid}\n")
        except ProcessLookupError:
            continue
        except OSError as error:
            failed.append(tid)
            reason = error.strerror or str(error)
    return f"{len(failed)} threads cannot be moved, the first is {failed[0]}: {reason}" if failed else ""


def _read_text(path: Path) -> str:
    return read_small_file(path, _MAX_FILE_BYTES).decode("ascii")


def _write_text(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)

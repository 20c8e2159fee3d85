"""Writes settings of whole disks below /sys and journals their original values in a file of its own.
Originals are on disk before the first change. A value that was modified externally since the last write is left
alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from agent.qrm.actuator.restore import RESTORE_REASON
from agent.qrm.knobs.io import SysfsSetting
from api.decision import Decision, Outcome, OutcomeStatus
from api.interfaces import Unavailable
from api.knobs import Knob, Reason
from common.files import read_small_file
from common.state_file import replace_file, sync_directory

FILE_NAME = "node-originals.json"
_MAX_FILE_BYTES = 1 << 20
_RESET_WORDS = ("enable=0", "ctrl=auto")
"""What takes a device's line away, by the file's last word: io.cost.qos and io.cost.model."""


_ALLOWED_NAMES = (Knob.WBT.value, Knob.IO_COST_QOS.value, Knob.IO_COST_MODEL.value)


class SysfsOriginal(msgspec.Struct, frozen=True, kw_only=True):
    """What a file held of one device, or in all, and what the agent has left there."""

    path: str
    device: str
    text: str
    """Empty where there was no line of that device."""
    left: str = ""


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    boot_id: str
    entries: tuple[SysfsOriginal, ...]


class DiskSettings:
    """The writer of these files and its journal. Only one process may use a state directory; Originals locks it."""

    def __init__(self, sys: Path, state_dir: Path, boot_id: str) -> None:
        self.sys = sys
        """Where sysfs is."""
        self._path, self._boot_id = state_dir / FILE_NAME, boot_id
        self._entries: dict[tuple[str, str], SysfsOriginal] = {}
        self._load()

    def entries(self) -> tuple[SysfsOriginal, ...]:
        """Everything that may still differ from its original."""
        return tuple(self._entries.values())

    def apply(self, settings: Sequence[SysfsSetting], *, dry: bool = False) -> tuple[Outcome, ...]:
        """Write what differs; every original is on disk before the first of them is written. What came of each setting."""
        outcomes = {(setting.path, setting.device): self._look(setting) for setting in settings}
        due = [
            setting for setting in settings if outcomes[setting.path, setting.device].status is OutcomeStatus.DRY_RUN
        ]
        if dry or not due:
            return tuple(outcomes.values())
        try:
            # All at once: each time the journal is written, the disk is waited for.
            self._note(due, outcomes)
            for setting in due:
                key = setting.path, setting.device
                outcomes[key] = self._write_one(setting, outcomes[key])
            self._save()
        except Unavailable as error:
            text = f"{error.reason}: {error.remedy}"
            for setting in due:
                key = setting.path, setting.device
                found = outcomes[key]
                status = OutcomeStatus.REFUSED if found.status is OutcomeStatus.DRY_RUN else found.status
                outcomes[key] = msgspec.structs.replace(found, status=status, error=text)
        return tuple(outcomes.values())

    def restore(self, keep: Sequence[SysfsSetting] = ()) -> tuple[Outcome, ...]:
        """Put back what none of these settings is about; what cannot be stays in the journal."""
        outcomes = []
        kept = {(setting.path, setting.device) for setting in keep}
        for key, entry in tuple(self._entries.items()):
            if key in kept:
                continue
            outcome = self._restore(entry)
            outcomes.append(outcome)
            if outcome.status is not OutcomeStatus.REFUSED:
                del self._entries[key]
        if outcomes:
            self._save()
        return tuple(outcomes)

    def _look(self, setting: SysfsSetting) -> Outcome:
        """Whether it is as wanted; DRY_RUN stands for what has to be written."""
        decision = sysfs_decision(setting.path, setting.device, setting.line, setting.reason)
        try:
            before = self._read(setting.path, setting.device)
        except OSError as error:
            return _refused(decision, setting.path, error)
        if _shows_all_words(_split_words(setting.line), before):
            return Outcome(decision=decision, status=OutcomeStatus.UNCHANGED, before=before, after=before)
        return Outcome(decision=decision, status=OutcomeStatus.DRY_RUN, before=before)

    def _note(self, due: Sequence[SysfsSetting], found: Mapping[tuple[str, str], Outcome]) -> None:
        for setting in due:
            key = setting.path, setting.device
            known, before = self._entries.get(key), found[key].before or ""
            # Somebody else's value is the original from then on.
            if known is None or before not in (known.left, known.text):
                known = SysfsOriginal(path=setting.path, device=setting.device, text=before)
            # Whoever is killed from here on cannot say any more what it left there.
            self._entries[key] = msgspec.structs.replace(known, left="")
        self._save()

    def _write_one(self, setting: SysfsSetting, found: Outcome) -> Outcome:
        path, device = setting.path, setting.device
        try:
            self._write(path, setting.line)
            after = self._read(path, device)
        except OSError as error:
            return _refused(found.decision, path, error)
        self._entries[path, device] = msgspec.structs.replace(self._entries[path, device], left=after)
        status = (
            OutcomeStatus.APPLIED if _shows_all_words(_split_words(setting.line), after) else OutcomeStatus.MISMATCH
        )
        return msgspec.structs.replace(found, status=status, after=after)

    def _restore(self, entry: SysfsOriginal) -> Outcome:
        path, device = entry.path, entry.device
        decision = sysfs_decision(path, device, entry.text, RESTORE_REASON)
        try:
            before = self._read(path, device)
            if before == entry.text or (entry.left and before != entry.left):
                return Outcome(decision=decision, status=OutcomeStatus.UNCHANGED, before=before, after=before)
            nothing = f"{device} {_RESET_WORDS[path.endswith('model')]}"
            self._write(path, entry.text or nothing)
            after = self._read(path, device)
        except FileNotFoundError:
            return Outcome(decision=decision, status=OutcomeStatus.VANISHED)
        except OSError as error:
            return _refused(decision, path, error)
        return Outcome(decision=decision, status=OutcomeStatus.APPLIED, before=before, after=after)

    def _read(self, path: str, device: str) -> str:
        text = read_small_file(self.sys / path, _MAX_FILE_BYTES).decode("latin-1")
        if not device:
            return text.strip()
        return next((line.strip() for line in text.splitlines() if line.split()[:1] == [device]), "")

    def _write(self, path: str, line: str) -> None:
        fd = os.open(self.sys / path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.write(fd, f"{line}\n".encode("latin-1"))
        finally:
            os.close(fd)

    def _load(self) -> None:
        try:
            body = msgspec.json.decode(read_small_file(self._path, _MAX_FILE_BYTES), type=_Body)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            raise Unavailable(
                f"{self._path} cannot be read: {error}",
                "compare the disks it names with their defaults, then delete it",
            ) from None
        # Another boot has begun with the kernel's own values.
        if body.boot_id == self._boot_id:
            self._entries = {(entry.path, entry.device): entry for entry in body.entries if _is_ours(entry.path)}

    def _save(self) -> None:
        try:
            if self._entries:
                body = _Body(boot_id=self._boot_id, entries=self.entries())
                replace_file(self._path, msgspec.json.encode(body) + b"\n")
            else:
                self._path.unlink(missing_ok=True)
                sync_directory(self._path.parent)
        except OSError as error:
            raise Unavailable(
                f"original values cannot be journalled in {self._path}: {error.strerror}",
                "make room and make it writable",
            ) from None


def sysfs_decision(path: str, device: str, line: str, reason: Reason) -> Decision:
    """What is decided about a file below /sys, of the disk that it is a file of, or that its line is about."""
    disk = f"/sys/dev/block/{device}" if device else f"/sys/{path.removesuffix('/queue/wbt_lat_usec')}"
    knob = Knob(path.rpartition("/")[2])
    return Decision(cgroup=disk, cgroup_id=0, pod="", knob=knob, value=line, reason=reason)


def _is_ours(path: str) -> bool:
    """Whether a journal may have it: whoever writes one must not choose other files."""
    return not path.startswith("/") and ".." not in path.split("/") and path.rpartition("/")[2] in _ALLOWED_NAMES


def _split_words(line: str) -> list[str]:
    return line.split()


def _shows_all_words(wanted: Sequence[str], shown: str) -> bool:
    """Whether every word that is wanted is shown: the kernel adds those that were not given."""
    return set(wanted) <= set(shown.split()) and bool(shown)


def _refused(decision: Decision, path: str, error: OSError) -> Outcome:
    text = f"{path}: {error.strerror}: see whether this kernel and this disk have it"
    return Outcome(decision=decision, status=OutcomeStatus.REFUSED, error=text)

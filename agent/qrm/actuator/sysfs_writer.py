"""Writes settings of disks and processor packages below /sys and journals their original values in a file of its own.
Originals are on disk before the first change. A value that was modified externally since the last write is left
alone.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from errno import EROFS
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from agent.qrm.actuator.boot_journal import BootJournal, JournalBody, json_codec
from agent.qrm.actuator.restore import RESTORE_REASON
from agent.qrm.knobs.io import SysfsSetting
from api.decision import Decision, Outcome, OutcomeStatus
from api.knobs import Knob, Reason
from common.disk_writer import INLINE_WRITER, FileWriter
from common.files import read_small_file

FILE_NAME = "node-originals.json"
_MAX_FILE_BYTES = 1 << 20
_RESET_WORDS = {"io.cost.qos": "enable=0", "io.cost.model": "ctrl=auto"}
"""Words that remove the line of a device, by file name."""
DISK_KNOBS = (Knob.WBT, Knob.IO_COST_QOS, Knob.IO_COST_MODEL)
_SYSFS_KNOBS = (*DISK_KNOBS, Knob.POWER_LIMIT)
SettingKey = tuple[str, str]
"""Path and device."""


class SysfsOriginal(Struct, frozen=True, kw_only=True):
    """Original content of a file, or of its line for one device."""

    path: str
    device: str
    text: str
    """Empty if there was no line of that device."""
    left: str = ""
    """Text that the file showed after the last write; empty while a write is under way."""


class SysfsWriter:
    """Writes settings of disks and processor packages below /sys, with a journal of their originals."""

    def __init__(self, sys: Path, state_dir: Path, boot_id: str, disk: FileWriter = INLINE_WRITER) -> None:
        """Raise Unavailable if the journal cannot be read."""
        self.sys = sys
        """Mount point of sysfs."""
        self._journal = BootJournal(
            state_dir / FILE_NAME,
            boot_id,
            json_codec(JournalBody[SysfsOriginal], lambda entry: (entry.path, entry.device)),
            damage_remedy="compare the disks and processor packages it names with their defaults, then delete it",
            disk=disk,
        )
        self._unwritten: set[SettingKey] = set()
        """Files whose original was journalled and that were not written since."""
        for key in [key for key in self._journal.by_key if not _is_allowed(key[0])]:
            del self._journal.by_key[key]

    def entries(self) -> tuple[SysfsOriginal, ...]:
        """Return the originals of all values that may still differ from them."""
        return self._journal.entries()

    def apply(self, settings: Sequence[SysfsSetting], *, dry: bool = False) -> tuple[Outcome, ...]:
        """Write the settings that differ, after journalling the originals of all of them; return an outcome for each."""
        checked = [self._check(setting) for setting in settings]
        keys = [(setting.path, setting.device) for setting in settings]
        return self._journal.write_due(
            checked,
            lambda index: self._record(keys[index], checked[index].before or ""),
            lambda index: self._write_setting(keys[index], checked[index]),
            dry=dry,
        )

    def original(self, path: str) -> str:
        """Return the journalled original of a file, its content if there is none or if it was modified externally; empty if
        it cannot be read."""
        entry = self._journal.by_key.get((path, ""))
        try:
            text = self._read(path, "")
        except OSError:
            return ""
        if entry is None or (entry.left and text not in (entry.left, entry.text)):
            return text
        return entry.text

    def restore(self, keep: Sequence[SysfsSetting] = (), knobs: Collection[Knob] = _SYSFS_KNOBS) -> tuple[Outcome, ...]:
        """Restore the originals of these knobs in all files but those of `keep`; refused ones stay in the journal."""
        others = {key for key in self._journal.by_key if _knob_of(key[0]) not in knobs}
        return self._journal.restore_each(others | {(setting.path, setting.device) for setting in keep}, self._restore)

    def _check(self, setting: SysfsSetting) -> Outcome:
        """Compare the file with the setting; DRY_RUN means that the file has to be written."""
        decision = sysfs_decision(setting.path, setting.device, setting.line, setting.reason)
        try:
            before = self._read(setting.path, setting.device)
        except OSError as error:
            return _refused(decision, setting.path, error)
        if _contains_words(before, setting.line):
            return Outcome(decision=decision, status=OutcomeStatus.UNCHANGED, before=before, after=before)
        return Outcome(decision=decision, status=OutcomeStatus.DRY_RUN, before=before)

    def _record(self, key: SettingKey, before: str) -> None:
        entry = self._journal.by_key.get(key)
        # A value that was modified externally becomes the new original. Without `left`, an agent was killed between write
        # and save: the value may be the agent's, and the journalled original stays.
        external = entry is None or (entry.left and before not in (entry.left, entry.text))
        if entry is None or external or key in self._unwritten:
            entry = SysfsOriginal(path=key[0], device=key[1], text=before)
            self._unwritten.add(key)
        # An agent killed between write and save must not take its own value for an external one: left is empty.
        self._journal.by_key[key] = replace(entry, left="")

    def _write_setting(self, key: SettingKey, outcome: Outcome) -> Outcome | None:
        """Write the line; None if its original is not on disk yet."""
        if not self._journal.is_durable(key):
            return None
        line = outcome.decision.value
        self._unwritten.discard(key)
        try:
            self._write(key[0], line)
            after = self._read(*key)
        except OSError as error:
            return _refused(outcome.decision, key[0], error)
        self._journal.by_key[key] = replace(self._journal.by_key[key], left=after)
        status = OutcomeStatus.APPLIED if _contains_words(after, line) else OutcomeStatus.MISMATCH
        return replace(outcome, status=status, after=after)

    def _restore(self, entry: SysfsOriginal) -> Outcome:
        path, device = entry.path, entry.device
        decision = sysfs_decision(path, device, entry.text, RESTORE_REASON)
        unwritten = (path, device) in self._unwritten
        self._unwritten.discard((path, device))
        try:
            before = self._read(path, device)
            if unwritten or before == entry.text or (entry.left and before != entry.left):
                return Outcome(decision=decision, status=OutcomeStatus.UNCHANGED, before=before, after=before)
            self._write(path, entry.text or f"{device} {_RESET_WORDS.get(path.rpartition('/')[2], '')}")
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


def sysfs_decision(path: str, device: str, line: str, reason: Reason) -> Decision:
    """Return the decision on a file below /sys; its `cgroup` is the path of the disk or of the processor package."""
    knob = Knob(_knob_of(path))
    owner = (
        f"/sys/dev/block/{device}" if device else f"/sys/{path.removesuffix(f'/{knob.value}').removesuffix('/queue')}"
    )
    return Decision(cgroup=owner, cgroup_id=0, pod="", knob=knob, value=line, reason=reason)


def _is_allowed(path: str) -> bool:
    # A manipulated journal must not make the agent write to other files.
    return not path.startswith("/") and ".." not in path.split("/") and _knob_of(path) in _SYSFS_KNOBS


def _knob_of(path: str) -> str:
    return path.rpartition("/")[2]


def _contains_words(text: str, line: str) -> bool:
    # The kernel shows more words than were written.
    return set(line.split()) <= set(text.split()) and bool(text)


def _refused(decision: Decision, path: str, error: OSError) -> Outcome:
    hint = "see whether this kernel and this device have it"
    if error.errno == EROFS:
        hint = "make /sys writable for the agent"
    text = f"{path}: {error.strerror}: {hint}"
    return Outcome(decision=decision, status=OutcomeStatus.REFUSED, error=text)

"""Journal of original values: what each knob held before the agent first wrote it, safe against crashes.
An original is on disk before its knob is written, and is removed after it was restored and read back. The file is
one JSON line with a version and a SHA-256 checksum, replaced atomically; a damaged file is set aside and never
used in part. `LastWrittenValues` detects external modification: such a value becomes the new original.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from agent.qrm.actuator.boot_journal import MAX_FILE_BYTES, write_journal
from agent.qrm.actuator.restore import KnobKey, is_idle, key_of, restore_originals
from agent.qrm.actuator.writer import KnobWriter, OriginalValue, is_cgroup_path
from agent.qrm.knobs.knob_files import LIST_KNOBS
from agent.qrm.knobs.notation import DEFAULT_WEIGHT
from api.cpu import parse_cpu_list
from api.decision import Outcome
from api.interfaces import Unavailable, Vanished
from api.knobs import Knob
from common.files import read_small_file
from common.state_file import list_quarantined, quarantine_file


class LastWrittenValues:
    """What the files of each knob held when the agent had last written it."""

    def __init__(self) -> None:
        self._left: dict[KnobKey, Mapping[str, str]] = {}

    def forget(self, keys: Collection[KnobKey]) -> None:
        """Whatever these hold now, nobody can say whose it is."""
        for key in keys:
            self._left.pop(key, None)

    def keep_only(self, keys: Collection[KnobKey]) -> None:
        """Remember nothing of knobs that the agent has no original of."""
        self.forget(self._left.keys() - set(keys))

    def note(self, entry: OriginalValue, texts: Mapping[str, str]) -> None:
        """These texts are the agent's own, in a knob whose original is `entry`."""
        self._left[key_of(entry)] = texts

    def has_written(self, entry: OriginalValue) -> bool:
        """Whether the agent has written that knob since it was started."""
        return key_of(entry) in self._left

    def left(self, key: KnobKey) -> Mapping[str, str] | None:
        """What the agent left there, if it has written it since it was started."""
        return self._left.get(key)

    def is_externally_modified(self, entry: OriginalValue, now: OriginalValue, files: KnobWriter) -> bool:
        """Whether somebody else wrote what the knob holds now: neither its original nor what the agent left there."""
        left = self._left.get(key_of(entry))
        if left is None or now.raw.texts in (left, entry.raw.texts):
            return False
        if now.knob is Knob.WEIGHT:
            return not is_idle(now, files)
        if now.knob in LIST_KNOBS:
            return not _only_offline_removed(left[now.knob.value], now, files)
        return True


def weight_after_idle(files: KnobWriter, cgroup: str) -> Mapping[str, str]:
    """What the kernel puts into the weight's file when a group stops being idle."""
    return files.shown(cgroup, Knob.WEIGHT, str(DEFAULT_WEIGHT))


def _only_offline_removed(left: str, now: OriginalValue, files: KnobWriter) -> bool:
    """Whether the kernel alone makes that cpuset of the agent's one: without what is not there any more."""
    try:
        there = files.ceiling(now.cgroup, now.knob)
        has = parse_cpu_list(files.decode(now.cgroup, now.knob, now.raw))
        return there is not None and set(has) == set(parse_cpu_list(left)) & set(there)
    except (Unavailable, Vanished, ValueError):
        return False


VERSION = 1
FILE_NAME, HOLDER_NAME = "originals.json", "holder.pid"
LEFT_AS_MODIFIED = "changed by someone else since the agent last wrote it: left as it is"


class JournalDamaged(Exception):
    """The file is not what was written; the text says in which way."""


class StateDirLocked(Unavailable):
    """Another process works with this state directory."""


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    boot_id: str
    entries: tuple[OriginalValue, ...]


class _File(msgspec.Struct, frozen=True):
    version: int
    checksum: str
    body: msgspec.Raw


class _AnyVersion(msgspec.Struct, frozen=True):
    version: int


def encode_journal(boot_id: str, entries: Collection[OriginalValue]) -> bytes:
    """The file for these originals."""
    body = msgspec.json.encode(_Body(boot_id=boot_id, entries=tuple(entries)))
    return msgspec.json.encode(_File(VERSION, hashlib.sha256(body).hexdigest(), msgspec.Raw(body))) + b"\n"


def decode_journal(data: bytes) -> tuple[str, tuple[OriginalValue, ...]]:
    """Boot id and originals of a file. Raises Damaged unless every byte is as `encode_file` wrote it of real cgroups."""
    try:
        version = msgspec.json.decode(data, type=_AnyVersion).version
        if version != VERSION:
            raise JournalDamaged(f"it has layout version {version}, this program knows {VERSION}")
        file = msgspec.json.decode(data, type=_File)
        if hashlib.sha256(file.body).hexdigest() != file.checksum:
            raise JournalDamaged("its checksum does not match its content")
        body = msgspec.json.decode(file.body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise JournalDamaged(f"it cannot be read: {error}") from None
    if encode_journal(body.boot_id, body.entries) != data:
        raise JournalDamaged("it has bytes that this program never writes")
    for entry in body.entries:
        if not is_cgroup_path(entry.cgroup) or not all(map(_is_kernel_text, entry.raw.texts.values())):
            raise JournalDamaged(f"it has an entry of {entry.cgroup[:60]!r} that this program never writes")
    return body.boot_id, body.entries


class OriginalsJournal:
    """The journal in one file. Use `open_originals`, which also keeps a second process away.

    `messages` tells a person what was found wrong or outdated when the file was opened.
    """

    def __init__(self, path: Path, boot_id: str, *, lock: int | None = None) -> None:
        self.path = path
        self.messages: tuple[str, ...] = ()
        self.last_written = LastWrittenValues()
        self._boot_id = boot_id
        self._lock = lock
        self._entries: dict[KnobKey, OriginalValue] = {}
        self._load()

    def entries(self) -> tuple[OriginalValue, ...]:
        """Everything that may still differ from its original."""
        return tuple(self._entries.values())

    def find(self, cgroup: str, cgroup_id: int, knob: Knob) -> OriginalValue | None:
        """The original of that knob, or None if the agent never wrote it."""
        entry = self._entries.get((cgroup, knob))
        return entry if entry is not None and entry.cgroup_id == cgroup_id else None

    def damaged(self) -> tuple[Path, ...]:
        """Files set aside because they could not be trusted, until a person removes them."""
        return list_quarantined(self.path)

    def record(self, *originals: OriginalValue, replace: Collection[KnobKey] = ()) -> None:
        """Have these on disk when it returns; for a knob that is known already, the first original stays
        unless it is to be replaced.

        Raises Unavailable, and then nothing is recorded: the knobs must not be written.
        """
        merged = dict(self._entries)
        for original in originals:
            known = merged.get(key_of(original))
            if known is None or not _same_cgroup(known, original) or key_of(original) in replace:
                merged[key_of(original)] = original
        if merged != self._on_disk:
            self._save(merged)
        self._entries = merged

    def forget_vanished(self, files: KnobWriter) -> None:
        """Drop entries of cgroups that are gone. Only in memory: the next record carries it to the disk."""
        groups = {(entry.cgroup, entry.cgroup_id) for entry in self._entries.values()}
        gone = {group for group in groups if not files.alive(*group)}
        if gone:
            self._entries = {
                key: entry for key, entry in self._entries.items() if (entry.cgroup, entry.cgroup_id) not in gone
            }
        self.last_written.keep_only(self._entries)

    def restore(self, files: KnobWriter, keep: Collection[KnobKey] = ()) -> tuple[Outcome, ...]:
        """Put every original back, except those of the (cgroup, knob) pairs in `keep`.

        Entries that were put back or whose cgroup is gone are forgotten; those that the kernel refuses stay, for
        another try. All of them stay, and `messages` says why, where the file cannot be rewritten. What somebody else
        wrote over the agent's value is left as it is.
        """
        with files.one_cycle():
            return self._restored(files, keep)

    def _restored(self, files: KnobWriter, keep: Collection[KnobKey]) -> tuple[Outcome, ...]:
        owners = {key: entry if key in keep else self._owners(entry, files) for key, entry in self._entries.items()}
        theirs = {key for key, entry in owners.items() if entry is not self._entries[key]}
        outcomes, settled = restore_originals(tuple(owners.values()), files, keep)
        outcomes = tuple(_with_left_note(outcome, theirs) for outcome in outcomes)
        left = {key: entry for key, entry in self._entries.items() if key not in settled}
        try:
            if left != self._on_disk:
                self._save(left)
            self._entries = left
        except Unavailable as error:
            self.messages += (f"{error.reason}: {error.remedy}",)
        # Trying to put back may have moved what is still there, and leaving cpu.idle resets a weight that is kept.
        moved = owners.keys() - set(keep)
        self.last_written.forget(moved | {(cgroup, Knob.WEIGHT) for cgroup, knob in moved if knob is Knob.IDLE})
        return outcomes

    def _owners(self, entry: OriginalValue, files: KnobWriter) -> OriginalValue:
        """What is to be put back: the original, or what somebody else has written since the agent last did."""
        if not self.last_written.has_written(entry):
            return entry
        try:
            raw = files.read_raw(entry.cgroup, entry.cgroup_id, entry.knob, entry.raw.directory_id)
        except (Unavailable, Vanished):
            return entry
        now = msgspec.structs.replace(entry, raw=raw)
        return now if self.last_written.is_externally_modified(entry, now, files) else entry

    def close(self) -> None:
        """Let another process use the directory. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _load(self) -> None:
        # None: whatever the file holds must not stay.
        self._on_disk: Mapping[KnobKey, OriginalValue] | None = {}
        try:
            data = read_small_file(self.path, MAX_FILE_BYTES)
        except FileNotFoundError:
            return
        except OSError as error:
            raise Unavailable(
                f"originals cannot be read from {self.path}: {error.strerror}", "make the file readable for this user"
            ) from None
        try:
            boot_id, entries = decode_journal(data)
        except JournalDamaged as error:
            self._set_aside(str(error))
            return
        if boot_id == self._boot_id:
            self._entries = {key_of(entry): entry for entry in entries}
            self._on_disk = dict(self._entries)
        else:
            self._on_disk = None
            self.messages = (f"{self.path}: dropped {len(entries)} originals of another boot, whose cgroups are gone",)

    def _set_aside(self, reason: str) -> None:
        aside = quarantine_file(self.path, reason)
        self.messages = (
            f"{self.path} was damaged: {reason}. It is kept as {aside}; compare it with the cgroups it names, then delete it",
        )

    def _save(self, entries: Mapping[KnobKey, OriginalValue]) -> None:
        write_journal(self.path, encode_journal(self._boot_id, entries.values()) if entries else None)
        self._on_disk = dict(entries)


def _with_left_note(outcome: Outcome, theirs: Collection[KnobKey]) -> Outcome:
    if (outcome.decision.cgroup, outcome.decision.knob) not in theirs or outcome.error:
        return outcome
    return msgspec.structs.replace(outcome, error=LEFT_AS_MODIFIED)


def _is_kernel_text(text: str) -> bool:
    """Whether the text was read from a file: latin-1 has a character for each byte and no other."""
    return all(ord(char) < 256 for char in text)


def _same_cgroup(known: OriginalValue, fresh: OriginalValue) -> bool:
    return (known.cgroup_id, known.raw.directory_id) == (fresh.cgroup_id, fresh.raw.directory_id)

"""Journal of original values: what each knob held before the agent first wrote it, safe against crashes.
An original is on disk before its knob is written, and is removed after it was restored and read back. The file is
one JSON line with a version and a SHA-256 checksum, replaced atomically; a damaged file is set aside and never used
in part. On a full disk the same content goes to `originals.reserve`, whose space is allocated at the start.
`LastWrittenValues` detects external modification: such a value becomes the new original. `restore_all` restores
everything at the end of the agent.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from agent.qrm.actuator.boot_journal import LAYOUT_VERSION, BootJournal, JournalBody, JournalCodec
from agent.qrm.actuator.restore import KnobKey, is_idle, key_of, restore_originals
from agent.qrm.actuator.writer import KnobWriter, OriginalValue, is_cgroup_path
from agent.qrm.knobs.knob_files import LIST_KNOBS
from agent.qrm.knobs.notation import DEFAULT_WEIGHT
from api.cpu import parse_cpu_list
from api.decision import Cycle, Outcome, OutcomeStatus
from api.interfaces import CycleSink, Unavailable, Vanished
from api.knobs import Knob
from api.text import quote
from common.disk_writer import INLINE_WRITER, FileWriter
from common.reserve_file import ReserveFile
from common.state_file import StateFileDamaged, list_quarantined

log = logging.getLogger("dioptase")
VERSION = LAYOUT_VERSION
LEFT_AS_MODIFIED = "another program changed the value since the agent last wrote it: the value stays"


class LastWrittenValues:
    """File texts of each knob after the agent last wrote it."""

    def __init__(self) -> None:
        self._texts: dict[KnobKey, Mapping[str, str]] = {}

    def forget(self, keys: Collection[KnobKey]) -> None:
        """Drop these knobs: their present values may be the agent's or not."""
        for key in keys:
            self._texts.pop(key, None)

    def keep_only(self, keys: Collection[KnobKey]) -> None:
        """Drop all knobs but these, which have an original."""
        self.forget(self._texts.keys() - set(keys))

    def record(self, entry: OriginalValue, texts: Mapping[str, str]) -> None:
        """Store the texts as the agent's own; `entry` is the knob's original."""
        self._texts[key_of(entry)] = texts

    def get(self, key: KnobKey) -> Mapping[str, str] | None:
        """Return the texts that the agent wrote; None if it has not since its start."""
        return self._texts.get(key)

    def is_externally_modified(self, entry: OriginalValue, now: OriginalValue, files: KnobWriter) -> bool:
        """Return whether the knob holds neither its original nor the agent's value."""
        texts = self._texts.get(key_of(entry))
        if texts is None or now.raw.texts in (texts, entry.raw.texts):
            return False
        if now.knob is Knob.WEIGHT:
            return not is_idle(now, files)
        if now.knob in LIST_KNOBS:
            return not _only_offline_removed(texts[now.knob.value], now, files)
        return True


def weight_after_idle(files: KnobWriter, cgroup: str) -> Mapping[str, str]:
    """Return the texts of the weight's files after the cgroup has left cpu.idle."""
    return files.texts_after_write(cgroup, Knob.WEIGHT, str(DEFAULT_WEIGHT))


def _only_offline_removed(written: str, now: OriginalValue, files: KnobWriter) -> bool:
    """Return whether the kernel alone reduced the agent's cpuset, by CPUs that went offline."""
    try:
        allowed = files.allowed_above(now.cgroup, now.knob)
        cpus = parse_cpu_list(files.decode(now.cgroup, now.knob, now.raw))
        return allowed is not None and set(cpus) == set(parse_cpu_list(written)) & set(allowed)
    except (Unavailable, Vanished, ValueError):
        return False


FILE_NAME, HOLDER_NAME, RESERVE_NAME = "originals.json", "holder.pid", "originals.reserve"
RESERVE_SLOT_BYTES = 1 << 20
"""Space for the originals of about 3,500 knobs, which is 700 managed cgroups; the reserve takes twice as much."""
_BODY = JournalBody[OriginalValue]


class StateDirLocked(Unavailable):
    """Another process uses this state directory."""


class _File(msgspec.Struct, frozen=True):
    version: int
    checksum: str
    body: msgspec.Raw


class _AnyVersion(msgspec.Struct, frozen=True):
    version: int


def encode_journal(boot_id: str, entries: Collection[OriginalValue]) -> bytes:
    """Return the content of the file for these originals."""
    body = msgspec.json.encode(_BODY(boot_id=boot_id, entries=tuple(entries)))
    return msgspec.json.encode(_File(VERSION, hashlib.sha256(body).hexdigest(), msgspec.Raw(body))) + b"\n"


def decode_journal(data: bytes) -> tuple[str, tuple[OriginalValue, ...]]:
    """Return boot id and originals of a file. Raises StateFileDamaged unless every byte is as `encode_journal` wrote
    it and every path is a cgroup's."""
    try:
        version = msgspec.json.decode(data, type=_AnyVersion).version
        if version != VERSION:
            raise StateFileDamaged(f"it has layout version {version}, this program reads version {VERSION}")
        file = msgspec.json.decode(data, type=_File)
        if hashlib.sha256(file.body).hexdigest() != file.checksum:
            raise StateFileDamaged("its checksum does not match its content")
        body = msgspec.json.decode(file.body, type=_BODY)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StateFileDamaged(f"it cannot be read: {error}") from None
    if encode_journal(body.boot_id, body.entries) != data:
        raise StateFileDamaged("it has bytes that this program never writes")
    for entry in body.entries:
        if not is_cgroup_path(entry.cgroup) or not all(map(_is_kernel_text, entry.raw.texts.values())):
            raise StateFileDamaged(f"it has an entry of {quote(entry.cgroup, 60)} that this program never writes")
    return body.boot_id, body.entries


class OriginalsJournal(BootJournal[KnobKey, OriginalValue]):
    """The journal of knobs. `open_originals` opens it and locks the state directory."""

    def __init__(self, path: Path, boot_id: str, *, lock: int | None = None, disk: FileWriter = INLINE_WRITER) -> None:
        super().__init__(
            path,
            boot_id,
            JournalCodec(key_of, encode_journal, decode_journal),
            disk=disk,
            reserve=ReserveFile(path.with_name(RESERVE_NAME), RESERVE_SLOT_BYTES),
        )
        self.last_written = LastWrittenValues()
        self._unwritten: set[KnobKey] = set()
        """Knobs with an original that the agent has not changed since: their owner may still change them."""
        self._lock = lock

    def find(self, cgroup: str, cgroup_id: int, knob: Knob) -> OriginalValue | None:
        """Return the original of the knob; None if the agent never wrote it."""
        entry = self.by_key.get((cgroup, knob))
        return entry if entry is not None and entry.cgroup_id == cgroup_id else None

    def damaged(self) -> tuple[Path, ...]:
        """Return the quarantined files that have not been removed."""
        return list_quarantined(self.path)

    def record(self, *originals: OriginalValue, replace: Collection[KnobKey] = (), planned: bool = False) -> None:
        """Have these originals saved; a knob may be written once `may_write` says so. The first original of a knob stays,
        unless its key is in `replace`, or the agent has not written the knob since. `planned` means that the knobs still
        have these values. Without a disk thread they are on disk on return, or Unavailable is raised and nothing is
        recorded."""
        merged, new = dict(self.by_key), set()
        for original in originals:
            key = key_of(original)
            previous = merged.get(key)
            stays = previous is not None and _same_cgroup(previous, original)
            if not stays or key in replace or key in self._unwritten:
                merged[key] = original
                new.add(key)
        self.save(merged)
        self._unwritten = self._unwritten | new if planned else self._unwritten - new

    def may_write(self, keys_by_plan: Mapping[int, Collection[KnobKey]]) -> frozenset[int]:
        """Return the plans whose knobs all have their originals on disk, so that the agent may write them now. A commit that
        ends during the call counts for all plans or for none, because the kernel accepts nested cpusets in one order only."""
        on_disk = self.durable_entries({key for keys in keys_by_plan.values() for key in keys})
        ready = frozenset(
            plan
            for plan, keys in keys_by_plan.items()
            if all(key in on_disk and on_disk[key] == self.by_key.get(key) for key in keys)
        )
        for plan in ready:
            self._unwritten.difference_update(keys_by_plan[plan])
        return ready

    def is_unwritten(self, key: KnobKey) -> bool:
        """Return whether the knob has an original, and the agent has not written it."""
        return key in self._unwritten

    def forget_vanished(self, files: KnobWriter) -> None:
        """Drop entries of removed cgroups, in memory only: the next record saves it."""
        groups = {(entry.cgroup, entry.cgroup_id) for entry in self.by_key.values()}
        vanished = {group for group in groups if not files.alive(*group)}
        if vanished:
            self.by_key = {
                key: entry for key, entry in self.by_key.items() if (entry.cgroup, entry.cgroup_id) not in vanished
            }
        self.last_written.keep_only(self.by_key)
        self._unwritten &= self.by_key.keys()

    def restore(self, files: KnobWriter, keep: Collection[KnobKey] = ()) -> tuple[Outcome, ...]:
        """Restore every original, except those of the knobs in `keep`. Restored entries and those of removed cgroups
        are dropped; refused ones stay. If the file cannot be rewritten, all stay and `messages` says why. A value
        that was modified externally is left as it is."""
        with files.one_cycle():
            return self._restore(files, keep)

    def report(self, error: Unavailable) -> None:
        """Add the error to `messages` once: a full disk refuses a write in every cycle."""
        text = f"{error.reason}: {error.remedy}"
        if text not in self.messages:
            self.messages += (text,)

    def _restore(self, files: KnobWriter, keep: Collection[KnobKey]) -> tuple[Outcome, ...]:
        # A knob that the agent has not written has its owner's value, which may have changed since the agent read it.
        unwritten = self._unwritten.difference(keep)
        self.by_key = {key: entry for key, entry in self.by_key.items() if key not in unwritten}
        self._unwritten -= unwritten
        owners = {
            key: entry if key in keep else self._value_to_restore(entry, files) for key, entry in self.by_key.items()
        }
        modified = {key for key, entry in owners.items() if entry is not self.by_key[key]}
        outcomes, restored = restore_originals(tuple(owners.values()), files, keep)
        outcomes = tuple(_with_left_note(outcome, modified) for outcome in outcomes)
        remaining = {key: entry for key, entry in self.by_key.items() if key not in restored}
        try:
            self.save(remaining)
        except Unavailable as error:
            self.report(error)
        # A failed restore may have changed the value, and leaving cpu.idle resets the weight.
        restored_keys = owners.keys() - set(keep)
        self.last_written.forget(
            restored_keys | {(cgroup, Knob.WEIGHT) for cgroup, knob in restored_keys if knob is Knob.IDLE}
        )
        return outcomes

    def _value_to_restore(self, entry: OriginalValue, files: KnobWriter) -> OriginalValue:
        """Return the original, or the present value if it was modified externally since the agent's last write."""
        if self.last_written.get(key_of(entry)) is None:
            return entry
        try:
            raw = files.read_raw(entry.cgroup, entry.cgroup_id, entry.knob, entry.raw.directory_id)
        except (Unavailable, Vanished):
            return entry
        now = msgspec.structs.replace(entry, raw=raw)
        return now if self.last_written.is_externally_modified(entry, now, files) else entry

    def close(self) -> None:
        """Release the lock of the state directory. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _with_left_note(outcome: Outcome, modified: Collection[KnobKey]) -> Outcome:
    if (outcome.decision.cgroup, outcome.decision.knob) not in modified or outcome.error:
        return outcome
    return msgspec.structs.replace(outcome, error=LEFT_AS_MODIFIED)


def _is_kernel_text(text: str) -> bool:
    # Texts are decoded as latin-1, which has a character for each byte and no other.
    return all(ord(char) < 256 for char in text)


def _same_cgroup(previous: OriginalValue, current: OriginalValue) -> bool:
    return (previous.cgroup_id, previous.raw.directory_id) == (current.cgroup_id, current.raw.directory_id)


class Restorer(Protocol):
    """Controls with a journal of their own: ThreadSlices, NodeKnobs."""

    def restore(self) -> tuple[Outcome, ...]:
        """Restore all of them. Raises Unavailable if the journal cannot be written."""


def restore_all(
    originals: OriginalsJournal | None,
    files: KnobWriter,
    others: Sequence[Restorer],
    latest: Cycle | None,
    journal: CycleSink,
    late_outcomes: tuple[Outcome, ...] = (),
) -> int:
    """Restore all knobs of cgroups, of threads and of the node; return how many values could not be restored. Never raises:
    `dioptase reset` tries the rest again. `late_outcomes` are outcomes of the runtime since the last cycle."""
    if originals is None:
        return 0
    outcomes, remaining = originals.restore(files), 0
    for restorer in others:
        more, unrestored = _restore_other(restorer)
        outcomes, remaining = outcomes + more, remaining + unrestored
    if latest is not None:
        journal.publish(
            msgspec.structs.replace(
                latest, trigger="end", advice=None, runtime_outcomes=late_outcomes, outcomes=outcomes
            )
        )
    restored_count = sum(outcome.status in (OutcomeStatus.APPLIED, OutcomeStatus.UNCHANGED) for outcome in outcomes)
    log.info("Restored %d changed values", restored_count)
    for outcome in outcomes:
        if outcome.error and outcome.status is not OutcomeStatus.VANISHED:
            log.error("%s %s: %s", outcome.decision.cgroup, outcome.decision.knob.value, outcome.error)
    for message in originals.messages:
        log.warning("%s", message)
    remaining += len(originals.entries())
    if remaining:
        log.error("%d values could not be restored: run `dioptase reset`", remaining)
    return remaining


def _restore_other(restorer: Restorer) -> tuple[tuple[Outcome, ...], int]:
    try:
        outcomes = restorer.restore()
    except Unavailable as error:
        log.error("%s: %s", error.reason, error.remedy)
        return (), 1
    except Exception:
        # This process ends: the next control must be restored also after a defect in this one.
        log.exception("Restoring stopped at an unexpected error, and continues with the next control")
        return (), 1
    return outcomes, sum(outcome.status is OutcomeStatus.REFUSED for outcome in outcomes)

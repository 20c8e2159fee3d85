"""A journal of original values in one file, valid for one boot: an original is on disk before its knob is first written.

After a reboot the kernel has its own values again, so the entries of another boot are dropped. The file is replaced
atomically. A damaged file stops the agent from using this journal, or is set aside as NAME.damaged-N and never used in part.

In an agent a separate thread writes the file. Each commit saves all entries that are waiting when it begins (group commit). A
knob may be written once its own entry is `durable`; nothing else waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

from api.decision import Outcome, OutcomeStatus
from api.interfaces import Unavailable
from api.text import quote
from common.disk_writer import INLINE_WRITER, FileWriter
from common.files import read_small_file
from common.reserve_file import ReserveFile, digest_of
from common.state_file import StateFileDamaged, quarantine_file, replace_file, sync_directory, write_failure

MAX_FILE_BYTES = 64 << 20
"""A thousand times what 200 managed cgroups need."""
RETRY_INTERVAL_S = 10.0
"""Interval between attempts to write a file that could not be written, while no new entry has to be saved."""
NOT_ON_DISK_YET = "the original value is being saved to disk: the write follows when it is there"
LAYOUT_VERSION = 1
"""Layout of all journals. A file without the field `version` has layout 1."""
KeyT = TypeVar("KeyT")
EntryT = TypeVar("EntryT")


class JournalBody(msgspec.Struct, Generic[EntryT], frozen=True, kw_only=True):
    """Entries of one boot."""

    boot_id: str
    entries: tuple[EntryT, ...]


class _Layout(msgspec.Struct, frozen=True):
    version: int = 1


class JournalCodec(NamedTuple, Generic[KeyT, EntryT]):
    """Key of an entry and format of the file; `decode` raises StateFileDamaged or msgspec.DecodeError."""

    key: Callable[[EntryT], KeyT]
    encode: Callable[[str, Collection[EntryT]], bytes]
    decode: Callable[[bytes], tuple[str, tuple[EntryT, ...]]]


def json_codec(
    body: type[JournalBody[EntryT]],
    key: Callable[[EntryT], KeyT],
    is_valid: Callable[[EntryT], bool] = lambda _entry: True,
) -> JournalCodec[KeyT, EntryT]:
    """Return the codec of a file that is one JSON object without a checksum. An entry that is not valid is damage."""

    def decode(data: bytes) -> tuple[str, tuple[EntryT, ...]]:
        content = msgspec.json.decode(data, type=body)
        for entry in content.entries:
            if not is_valid(entry):
                raise StateFileDamaged(f"it has an entry of {quote(key(entry), 60)} that this program never writes")
        return content.boot_id, content.entries

    return JournalCodec(
        key, lambda boot_id, entries: msgspec.json.encode(body(boot_id=boot_id, entries=tuple(entries))) + b"\n", decode
    )


class BootJournal(Generic[KeyT, EntryT]):
    """Entries by key, and their file. Only the process that holds the state directory's lock may use it. One thread calls
    it; the commit runs in the thread of `disk`."""

    def __init__(
        self,
        path: Path,
        boot_id: str,
        codec: JournalCodec[KeyT, EntryT],
        *,
        damage_remedy: str = "",
        disk: FileWriter = INLINE_WRITER,
        reserve: ReserveFile | None = None,
    ) -> None:
        """Load the file. Raises Unavailable if it exists and cannot be read, or if a newer release wrote it. A damaged file
        raises Unavailable with `damage_remedy`; without a remedy it is set aside. `messages` reports what was wrong or
        outdated. While the file cannot be replaced, its content is written to `reserve`."""
        self.path = path
        self.messages: tuple[str, ...] = ()
        self.by_key: dict[KeyT, EntryT] = {}
        self.problem: Unavailable | None = None
        """Why the latest commit failed; None if it did not."""
        self.reserve_problem: Unavailable | None = None
        """Why the reserve cannot be used, or why it is in use; None if neither."""
        self.on_commit: Callable[[], object] = lambda: None
        """Called in the thread of the commit after entries that a write waits for are on disk."""
        self.before_commit: Callable[[], object] = lambda: None
        """Called in the thread of the commit before its entries are written; it never raises."""
        self._boot_id, self._codec = boot_id, codec
        self._disk, self._reserve = disk, reserve
        self._commit_lock = threading.Lock()
        self._on_disk: Mapping[KeyT, EntryT] | None = {}
        """None if the next save has to replace the file even without entries."""
        self._under_way: Mapping[KeyT, EntryT] | None = None
        """Entries that are being written: until that has ended, a crash may leave them or those before on disk."""
        self._staged: Mapping[KeyT, EntryT] | None = None
        """Entries of the commit that is queued or under way; None without one."""
        self._staged_since_s: float | None = None
        self._awaited = False
        self._uses_reserve = self._keeps_reserve = False
        self._retry_due_s = 0.0
        self._load(damage_remedy)

    def entries(self) -> tuple[EntryT, ...]:
        """Return the originals of all values that may still differ from them."""
        return tuple(self.by_key.values())

    def durable(self, key: KeyT) -> EntryT | None:
        """Return the entry of this key that is on disk, and stays there; None if none is."""
        return self.durable_entries((key,)).get(key)

    def durable_entries(self, keys: Collection[KeyT]) -> Mapping[KeyT, EntryT]:
        """Return the entries of these keys that are on disk, and stay there: a commit under way may be about to remove or to
        replace an entry that has been staged again since."""
        with self._commit_lock:
            on_disk, under_way = self._on_disk or {}, self._under_way
        return {
            key: on_disk[key]
            for key in keys
            if key in on_disk and (under_way is None or under_way.get(key) == on_disk[key])
        }

    def is_durable(self, key: KeyT) -> bool:
        """Return whether the entry of this key is on disk as it is."""
        entry = self.by_key.get(key)
        return entry is not None and self.durable(key) == entry

    def save(self, entries: Mapping[KeyT, EntryT] | None = None) -> None:
        """Have the entries, or these in their place, written to disk if they changed. Without a disk thread they are on
        disk on return, or Unavailable is raised and the entries stay as they were."""
        before = self.by_key
        self.by_key = dict(self.by_key if entries is None else entries)
        with self._commit_lock:
            if self.by_key == (self._on_disk if self._staged is None else self._staged):
                return
        if self._commit_now() and self.problem is not None:
            if entries is not None:
                self.by_key = before
            raise self.problem

    def retry(self) -> None:
        """Try again to write a file that could not be written. Each cycle calls this method, so that the journal recovers when
        the disk has space again, even if no new entry has to be saved."""
        now_s = time.monotonic()
        if (self.problem is None and not self._uses_reserve) or now_s < self._retry_due_s:
            return
        self._retry_due_s = now_s + RETRY_INTERVAL_S
        with self._commit_lock:
            if self._staged is not None:
                return
        self._commit_now()

    def wait_for_commit(self) -> None:
        """Have `on_commit` called when the entries of this moment are on disk: at once, if they are by now."""
        with self._commit_lock:
            self._awaited = self._staged is not None or self.problem is not None
            done = not self._awaited
        if done:
            self.on_commit()

    def stalled_s(self, now_s: float | None = None) -> float:
        """Return for how long the present commit has been under way; 0 without one. `now_s` is CLOCK_MONOTONIC."""
        with self._commit_lock:
            since_s = self._staged_since_s
        return 0.0 if since_s is None else (time.monotonic() if now_s is None else now_s) - since_s

    def write_due(
        self,
        checked: Sequence[Outcome],
        record: Callable[[int], None],
        write: Callable[[int], Outcome | None],
        *,
        dry: bool,
    ) -> tuple[Outcome, ...]:
        """Record the originals of all outcomes that are DRY_RUN, by index, save them, then write those that are on disk;
        return the outcomes of all. `write` returns None if the original is not on disk yet. Nothing is written if `dry`."""
        outcomes = list(checked)
        due = [index for index, outcome in enumerate(checked) if outcome.status is OutcomeStatus.DRY_RUN]
        if dry or not due:
            return tuple(outcomes)
        try:
            # Together, because every save waits for the disk.
            for index in due:
                record(index)
            self.save()
            for index in due:
                outcomes[index] = write(index) or self.deferred(outcomes[index])
            self.save()
        except Unavailable as error:
            for index in due:
                if outcomes[index].status is OutcomeStatus.DRY_RUN:
                    outcomes[index] = _with_error(outcomes[index], OutcomeStatus.REFUSED, error)
                else:
                    outcomes[index] = _with_error(outcomes[index], outcomes[index].status, error)
        return tuple(outcomes)

    def deferred(self, outcome: Outcome) -> Outcome:
        """Return the outcome of a write that has to wait for its original to be on disk: refused if the disk refuses it."""
        if self.problem is not None:
            return _with_error(outcome, OutcomeStatus.REFUSED, self.problem)
        self.wait_for_commit()
        return msgspec.structs.replace(
            outcome, status=OutcomeStatus.UNCHANGED, after=outcome.before, error=NOT_ON_DISK_YET
        )

    def restore_each(self, keep: Collection[KeyT], restore_entry: Callable[[EntryT], Outcome]) -> tuple[Outcome, ...]:
        """Restore all entries but those of `keep`; refused ones stay in the journal. Raises Unavailable."""
        outcomes = []
        for key, entry in tuple(self.by_key.items()):
            if key not in keep:
                outcomes.append(restore_entry(entry))
                if outcomes[-1].status is not OutcomeStatus.REFUSED:
                    del self.by_key[key]
        self.save()
        return tuple(outcomes)

    def allocate_reserve(self, disk: FileWriter) -> None:
        """Have the space of the reserve allocated, and again after the disk was full. `disk` is another thread than that of
        the journal, because the first originals must not wait for it."""
        if self._reserve is not None:
            disk.submit(self._reserve.path.name, self._allocate)

    def _commit_now(self) -> bool:
        with self._commit_lock:
            self._staged = dict(self.by_key)
            if self._staged_since_s is None:
                self._staged_since_s = time.monotonic()
        return self._disk.submit(self.path.name, self._commit)

    def _commit(self) -> None:
        """Write the newest staged entries. Runs in the thread of the disk."""
        with self._commit_lock:
            staged = self._under_way = self._staged
        if staged is None:
            return
        self.before_commit()
        problem, replaced = None, False
        try:
            replaced = self._write(self._codec.encode(self._boot_id, staged.values()) if staged else None)
        except Unavailable as error:
            problem = error
        with self._commit_lock:
            self.problem, self._under_way = problem, None
            if problem is None:
                self._on_disk = staged
            newest = self._staged is staged
            self._staged_since_s = None if newest else time.monotonic()
            if newest:
                self._staged = None
            wakes = self._awaited and newest and problem is None
            self._awaited = self._awaited and not wakes
        if wakes:
            self.on_commit()
        if replaced and self._reserve is not None:
            if self._uses_reserve:
                self._clear_reserve()
            if not self._reserve.allocated and self._keeps_reserve:
                self._allocate()

    def _load(self, damage_remedy: str) -> None:
        try:
            data = self._read()
            if data is None:
                return
            self._refuse_newer_layout(data)
            boot_id, entries = self._codec.decode(data)
        except OSError as error:
            raise Unavailable(
                f"originals cannot be read from {self.path}: {error.strerror}", "make the file readable for this user"
            ) from None
        except (StateFileDamaged, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if damage_remedy:
                raise Unavailable(f"{self.path} cannot be read: {error}", damage_remedy) from None
            aside = quarantine_file(self.path, str(error))
            self.messages = (
                f"{self.path} was damaged: {error}. It was renamed to {aside}: compare it with the cgroups, then delete it",
            )
            return
        if boot_id == self._boot_id:
            self.by_key = {self._codec.key(entry): entry for entry in entries}
            self._on_disk = dict(self.by_key)
        else:
            self._on_disk = None
            self.messages = (
                f"{self.path}: dropped {len(entries)} originals of another boot, whose cgroups no longer exist",
            )

    def _refuse_newer_layout(self, data: bytes) -> None:
        """Raise Unavailable for the file of a newer release, as after a rollback.

        If such a file were set aside like a damaged one, the agent would journal the present values as originals."""
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            version = msgspec.json.decode(data, type=_Layout).version
            if version > LAYOUT_VERSION:
                raise Unavailable(
                    f"{self.path} was written by a newer release: it has layout version {version}, this release reads "
                    f"{LAYOUT_VERSION}",
                    "install that release again, or run its `dioptase reset` on this node",
                )

    def _read(self) -> bytes | None:
        """Return the content of the file, or that of the reserve if it takes its place; None without either. Raises
        OSError."""
        data = self._read_file()
        if self._reserve is not None and (reserved := self._reserve.read()) is not None:
            # The reserve counts only while the file is still the one that could not be replaced.
            if reserved.replaces == digest_of(data):
                self._uses_reserve = True
                return reserved.data
            self._disk.submit(f"{self._reserve.path.name} clear", self._clear_reserve)
        return data

    def _read_file(self) -> bytes | None:
        try:
            return read_small_file(self.path, MAX_FILE_BYTES)
        except FileNotFoundError:
            return None

    def _write(self, data: bytes | None) -> bool:
        """Replace the file and sync it to disk; without data remove it. Return False if the content had to be written to the
        reserve instead. Raises Unavailable."""
        try:
            if data is not None:
                replace_file(self.path, data)
            else:
                # Removing a file works on a full disk as well, where nothing can be written.
                self.path.unlink(missing_ok=True)
                sync_directory(self.path.parent)
        except OSError as error:
            failure = write_failure("original values cannot be journalled in", self.path, error)
            if data is None or not self._write_to_reserve(data, failure):
                raise failure from None
            return False
        return True

    def _write_to_reserve(self, data: bytes, failure: Unavailable) -> bool:
        if self._reserve is None:
            return False
        try:
            self._reserve.write(data, digest_of(self._read_file()))
        except OSError as error:
            text = f"{failure.reason}; the reserve {self._reserve.path.name} cannot be used: {error.strerror}"
            self.reserve_problem = Unavailable(text, failure.remedy)
            return False
        self._uses_reserve = True
        text = f"{failure.reason}; they are saved in {self._reserve.path.name}, whose space was reserved for this"
        self.reserve_problem = Unavailable(text, failure.remedy)
        return True

    def _clear_reserve(self) -> None:
        assert self._reserve is not None
        try:
            self._reserve.clear()
        except OSError as error:
            # The next load ignores the reserve, because the file has changed since.
            self.reserve_problem = Unavailable(
                f"{self._reserve.path} cannot be written: {error.strerror}", f"make {self._reserve.path} writable"
            )
            return
        self._uses_reserve, self.reserve_problem = False, None

    def _allocate(self) -> None:
        assert self._reserve is not None
        self._keeps_reserve = False
        try:
            self._reserve.allocate()
        except OSError as error:
            self.reserve_problem = Unavailable(
                f"no space is reserved for originals in {self._reserve.path}: {error.strerror}",
                f"free space in {self._reserve.path.parent}: once the disk is full, no new knob can be changed",
            )
        else:
            self.reserve_problem = None
        finally:
            # From now on the thread of the journal tries again.
            self._keeps_reserve = True


def _with_error(outcome: Outcome, status: OutcomeStatus, error: Unavailable) -> Outcome:
    return msgspec.structs.replace(outcome, status=status, error=f"{error.reason}: {error.remedy}")

"""A journal of original values in one file, valid for one boot: originals are on disk before the first write.
After a reboot the kernel has its own values again, so the entries of another boot are dropped. The file is replaced
atomically. A damaged file stops the agent from using this journal, or is set aside as NAME.damaged-N and never used
in part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

from api.decision import Outcome, OutcomeStatus
from api.interfaces import Unavailable
from common.files import read_small_file
from common.state_file import StateFileDamaged, quarantine_file, replace_file, sync_directory

MAX_FILE_BYTES = 64 << 20
"""A thousand times what 200 managed cgroups need."""
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
                raise StateFileDamaged(f"it has an entry of {key(entry)!r:.60} that this program never writes")
        return content.boot_id, content.entries

    return JournalCodec(
        key, lambda boot_id, entries: msgspec.json.encode(body(boot_id=boot_id, entries=tuple(entries))) + b"\n", decode
    )


class BootJournal(Generic[KeyT, EntryT]):
    """Entries by key, and their file. Only the process that holds the state directory's lock may use it."""

    def __init__(self, path: Path, boot_id: str, codec: JournalCodec[KeyT, EntryT], *, damage_remedy: str = "") -> None:
        """Load the file. Raises Unavailable if it exists and cannot be read, or is that of a newer release. A damaged file
        raises Unavailable with `damage_remedy`; without a remedy it is set aside. `messages` reports what was wrong or
        outdated."""
        self.path = path
        self.messages: tuple[str, ...] = ()
        self.by_key: dict[KeyT, EntryT] = {}
        self._boot_id, self._codec = boot_id, codec
        self._on_disk: Mapping[KeyT, EntryT] | None = {}
        """None if the next save has to replace the file even without entries."""
        self._load(damage_remedy)

    def entries(self) -> tuple[EntryT, ...]:
        """Return the originals of all values that may still differ from them."""
        return tuple(self.by_key.values())

    def save(self, entries: Mapping[KeyT, EntryT] | None = None) -> None:
        """Write the entries, or these in their place, to disk if they changed. Raises Unavailable; then the entries
        stay as they were."""
        entries = self.by_key if entries is None else entries
        if entries != self._on_disk:
            self._write(self._codec.encode(self._boot_id, entries.values()) if entries else None)
            self._on_disk = dict(entries)
        self.by_key = dict(entries)

    def write_due(
        self, checked: Sequence[Outcome], record: Callable[[int], None], write: Callable[[int], Outcome], *, dry: bool
    ) -> tuple[Outcome, ...]:
        """Record the originals of all outcomes that are DRY_RUN, by index, save them, then write; return the outcomes
        of all. Nothing is written if `dry` or if the originals cannot be saved."""
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
                outcomes[index] = write(index)
            self.save()
        except Unavailable as error:
            for index in due:
                status = outcomes[index].status
                status = OutcomeStatus.REFUSED if status is OutcomeStatus.DRY_RUN else status
                error_text = f"{error.reason}: {error.remedy}"
                outcomes[index] = msgspec.structs.replace(outcomes[index], status=status, error=error_text)
        return tuple(outcomes)

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

    def _load(self, damage_remedy: str) -> None:
        try:
            data = read_small_file(self.path, MAX_FILE_BYTES)
            self._refuse_newer_layout(data)
            boot_id, entries = self._codec.decode(data)
        except FileNotFoundError:
            return
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

        If it were set aside like a damaged one, the present values would be journalled as originals in place of its own."""
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            version = msgspec.json.decode(data, type=_Layout).version
            if version > LAYOUT_VERSION:
                raise Unavailable(
                    f"{self.path} was written by a newer release: it has layout version {version}, this release reads "
                    f"{LAYOUT_VERSION}",
                    "install that release again, or run its `dioptase reset` on this node",
                )

    def _write(self, data: bytes | None) -> None:
        """Replace the file and sync it to disk; without data remove it. Raises Unavailable."""
        try:
            if data is not None:
                replace_file(self.path, data)
            else:
                # Removing a file works on a full disk as well, where nothing can be written.
                self.path.unlink(missing_ok=True)
                sync_directory(self.path.parent)
        except OSError as error:
            raise Unavailable(
                f"original values cannot be journalled in {self.path}: {error.strerror}",
                f"free space in {self.path.parent} and make it writable, or choose another with --state-dir",
            ) from None

"""A journal of original values in one JSON file, valid for one boot: originals are on disk before the first write.
After a reboot the kernel has its own values again, so the entries of another boot are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from api.decision import Outcome, OutcomeStatus
from api.interfaces import Unavailable
from common.files import read_small_file
from common.state_file import replace_file, sync_directory

MAX_FILE_BYTES = 64 << 20
"""A thousand times what 200 managed cgroups need."""
KeyT = TypeVar("KeyT")
EntryT = TypeVar("EntryT")


def write_journal(path: Path, data: bytes | None) -> None:
    """Replace the file and sync it to disk; without data remove it. Raises Unavailable."""
    try:
        if data is not None:
            replace_file(path, data)
        else:
            # Removing a file works on a full disk as well, where nothing can be written.
            path.unlink(missing_ok=True)
            sync_directory(path.parent)
    except OSError as error:
        raise Unavailable(
            f"original values cannot be journalled in {path}: {error.strerror}",
            f"make room in {path.parent} and make it writable, or choose another with --state-dir",
        ) from None


class JournalBody(msgspec.Struct, Generic[EntryT], frozen=True, kw_only=True):
    """Content of the file."""

    boot_id: str
    entries: tuple[EntryT, ...]


class BootJournal(Generic[KeyT, EntryT]):
    """Entries by key, and their file. Only the process that holds the state directory's lock may use it."""

    def __init__(
        self, path: Path, boot_id: str, body: type[JournalBody[EntryT]], key: Callable[[EntryT], KeyT], remedy: str
    ) -> None:
        """Load the file. Raises Unavailable, with `remedy`, if it exists and cannot be read."""
        self._path, self._boot_id, self._body = path, boot_id, body
        self.entries: dict[KeyT, EntryT] = {}
        self._on_disk: Mapping[KeyT, EntryT] = {}
        try:
            content = msgspec.json.decode(read_small_file(path, MAX_FILE_BYTES), type=body)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            raise Unavailable(f"{path} cannot be read: {error}", remedy) from None
        if content.boot_id == boot_id:
            self.entries = {key(entry): entry for entry in content.entries}
            self._on_disk = dict(self.entries)

    def save(self) -> None:
        """Write the entries to disk if they changed. Raises Unavailable."""
        if self.entries == self._on_disk:
            return
        body = self._body(boot_id=self._boot_id, entries=tuple(self.entries.values()))
        write_journal(self._path, msgspec.json.encode(body) + b"\n" if self.entries else None)
        self._on_disk = dict(self.entries)

    def restore(self, keep: Collection[KeyT], restore_entry: Callable[[EntryT], Outcome]) -> tuple[Outcome, ...]:
        """Restore all entries but those of `keep`; refused ones stay in the journal. Raises Unavailable."""
        outcomes = []
        for key, entry in tuple(self.entries.items()):
            if key not in keep:
                outcomes.append(restore_entry(entry))
                if outcomes[-1].status is not OutcomeStatus.REFUSED:
                    del self.entries[key]
        self.save()
        return tuple(outcomes)

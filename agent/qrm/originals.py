"""Journal of original values: what every knob held before the agent first wrote it, safe against a crash at any point.

An original is on disk before its knob is written and leaves the disk after it was put back and read back, so whatever
happens in between, the file names everything that may differ. One JSON line, replaced as a whole (temporary file,
fsync, rename, fsync of the directory):

    version   of this layout; another one is not read
    checksum  SHA-256 over `body` as it stands in the file
    body      boot_id   originals of another boot mean nothing: its cgroups are gone
              entries   one `Original` per cgroup and knob

An original changes only when somebody else, the cgroup's owner, writes the knob while the agent runs: what they wrote
is the original from then on.

No file means that nothing is left to put back. A file that is not exactly what was written is set aside as
NAME.damaged-N and never half-used. The directory is locked (flock) by whoever works with it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from agent.durable import damaged, replace_file, set_aside, sync_directory
from agent.qrm.hands import Hands
from agent.qrm.knobs import KnobFiles, Original, is_cgroup_path
from agent.qrm.restore import Key, key_of, put_back
from agent.smallfile import read_small
from api.decisions import Outcome
from api.knobs import Knob
from api.ports import Unavailable, Vanished

VERSION = 1
FILE_NAME, HOLDER_NAME = "originals.json", "holder.pid"
LARGEST_BYTES = 64 << 20
"""A thousand times what 200 managed cgroups need."""
LEFT = "changed by someone else since the agent last wrote it: left as it is"


class Damaged(Exception):
    """The file is not what was written; the text says in which way."""


class Locked(Unavailable):
    """Another process works with this state directory."""


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    boot_id: str
    entries: tuple[Original, ...]


class _File(msgspec.Struct, frozen=True):
    version: int
    checksum: str
    body: msgspec.Raw


class _AnyVersion(msgspec.Struct, frozen=True):
    version: int


def encode_file(boot_id: str, entries: Collection[Original]) -> bytes:
    """The file for these originals."""
    body = msgspec.json.encode(_Body(boot_id=boot_id, entries=tuple(entries)))
    return msgspec.json.encode(_File(VERSION, hashlib.sha256(body).hexdigest(), msgspec.Raw(body))) + b"\n"


def decode_file(data: bytes) -> tuple[str, tuple[Original, ...]]:
    """Boot id and originals of a file. Raises Damaged unless every byte is as `encode_file` wrote it of real cgroups."""
    try:
        version = msgspec.json.decode(data, type=_AnyVersion).version
        if version != VERSION:
            raise Damaged(f"it has layout version {version}, this program knows {VERSION}")
        file = msgspec.json.decode(data, type=_File)
        if hashlib.sha256(file.body).hexdigest() != file.checksum:
            raise Damaged("its checksum does not match its content")
        body = msgspec.json.decode(file.body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"it cannot be read: {error}") from None
    if encode_file(body.boot_id, body.entries) != data:
        raise Damaged("it has bytes that this program never writes")
    for entry in body.entries:
        if not is_cgroup_path(entry.cgroup) or not all(map(_is_kernel_text, entry.raw.texts.values())):
            raise Damaged(f"it has an entry of {entry.cgroup[:60]!r} that this program never writes")
    return body.boot_id, body.entries


class Originals:
    """The journal in one file. Use `open_originals`, which also keeps a second process away.

    `messages` tells a person what was found wrong or outdated when the file was opened.
    """

    def __init__(self, path: Path, boot_id: str, *, lock: int | None = None) -> None:
        self.path = path
        self.messages: tuple[str, ...] = ()
        self.hands = Hands()
        self._boot_id = boot_id
        self._lock = lock
        self._entries: dict[Key, Original] = {}
        self._load()

    def entries(self) -> tuple[Original, ...]:
        """Everything that may still differ from its original."""
        return tuple(self._entries.values())

    def find(self, cgroup: str, cgroup_id: int, knob: Knob) -> Original | None:
        """The original of that knob, or None if the agent never wrote it."""
        entry = self._entries.get((cgroup, knob))
        return entry if entry is not None and entry.cgroup_id == cgroup_id else None

    def damaged(self) -> tuple[Path, ...]:
        """Files set aside because they could not be trusted, until a person removes them."""
        return damaged(self.path)

    def record(self, *originals: Original, replace: Collection[Key] = ()) -> None:
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

    def forget_vanished(self, files: KnobFiles) -> None:
        """Drop entries of cgroups that are gone. Only in memory: the next record carries it to the disk."""
        groups = {(entry.cgroup, entry.cgroup_id) for entry in self._entries.values()}
        gone = {group for group in groups if not files.alive(*group)}
        if gone:
            self._entries = {
                key: entry for key, entry in self._entries.items() if (entry.cgroup, entry.cgroup_id) not in gone
            }
        self.hands.keep_only(self._entries)

    def restore(self, files: KnobFiles, keep: Collection[Key] = ()) -> tuple[Outcome, ...]:
        """Put every original back, except those of the (cgroup, knob) pairs in `keep`.

        Entries that were put back or whose cgroup is gone are forgotten; those that the kernel refuses stay, for
        another try. All of them stay, and `messages` says why, where the file cannot be rewritten. What somebody else
        wrote over the agent's value is left as it is.
        """
        with files.one_round():
            return self._restored(files, keep)

    def _restored(self, files: KnobFiles, keep: Collection[Key]) -> tuple[Outcome, ...]:
        owners = {key: entry if key in keep else self._owners(entry, files) for key, entry in self._entries.items()}
        theirs = {key for key, entry in owners.items() if entry is not self._entries[key]}
        outcomes, settled = put_back(tuple(owners.values()), files, keep)
        outcomes = tuple(_with_note(outcome, theirs) for outcome in outcomes)
        left = {key: entry for key, entry in self._entries.items() if key not in settled}
        try:
            if left != self._on_disk:
                self._save(left)
            self._entries = left
        except Unavailable as error:
            self.messages += (f"{error.reason}: {error.remedy}",)
        # Trying to put back may have moved what is still there, and leaving cpu.idle resets a weight that is kept.
        moved = owners.keys() - set(keep)
        self.hands.forget(moved | {(cgroup, Knob.WEIGHT) for cgroup, knob in moved if knob is Knob.IDLE})
        return outcomes

    def _owners(self, entry: Original, files: KnobFiles) -> Original:
        """What is to be put back: the original, or what somebody else has written since the agent last did."""
        if not self.hands.knows(entry):
            return entry
        try:
            raw = files.read_raw(entry.cgroup, entry.cgroup_id, entry.knob, entry.raw.directory_id)
        except (Unavailable, Vanished):
            return entry
        now = msgspec.structs.replace(entry, raw=raw)
        return now if self.hands.is_foreign(entry, now, files) else entry

    def close(self) -> None:
        """Let another process use the directory. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _load(self) -> None:
        # None: whatever the file holds must not stay.
        self._on_disk: Mapping[Key, Original] | None = {}
        try:
            data = read_small(self.path, LARGEST_BYTES)
        except FileNotFoundError:
            return
        except OSError as error:
            raise Unavailable(
                f"originals cannot be read from {self.path}: {error.strerror}", "make the file readable for this user"
            ) from None
        try:
            boot_id, entries = decode_file(data)
        except Damaged as error:
            self._set_aside(str(error))
            return
        if boot_id == self._boot_id:
            self._entries = {key_of(entry): entry for entry in entries}
            self._on_disk = dict(self._entries)
        else:
            self._on_disk = None
            self.messages = (f"{self.path}: dropped {len(entries)} originals of another boot, whose cgroups are gone",)

    def _set_aside(self, reason: str) -> None:
        aside = set_aside(self.path, reason)
        self.messages = (
            f"{self.path} was damaged: {reason}. It is kept as {aside}; compare it with the cgroups it names, then delete it",
        )

    def _save(self, entries: Mapping[Key, Original]) -> None:
        try:
            if entries:
                replace_file(self.path, encode_file(self._boot_id, entries.values()))
            else:
                # Also works on a full disk, where nothing could be written.
                self.path.unlink(missing_ok=True)
                sync_directory(self.path.parent)
        except OSError as error:
            raise Unavailable(
                f"original values cannot be journalled in {self.path}: {error.strerror}",
                f"make room in {self.path.parent} and make it writable, or choose another with --state-dir",
            ) from None
        self._on_disk = dict(entries)


def open_originals(state_dir: Path, boot_id: str) -> Originals:
    """The journal of that directory, made if need be, locked until `close` or the end of the process.

    Raises Locked where another process holds it, Unavailable where there is no such directory and none can be made, or
    where somebody else could change what is in it: originals are written to cgroups as they stand there.
    """
    try:
        # Not mkdir(parents=True), which makes those above as open as the umask allows.
        for directory in (*reversed(state_dir.parents), state_dir):
            if not directory.is_dir():
                directory.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise Unavailable(
            f"state directory {state_dir} cannot be used: {error.strerror}", "choose another with --state-dir"
        ) from None
    try:
        _check_trust(state_dir, os.fstat(lock))
    except Unavailable:
        os.close(lock)
        raise
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if not isinstance(error, BlockingIOError):
            raise Unavailable(
                f"{state_dir} cannot be locked: {error.strerror}", "choose a local file system with --state-dir"
            ) from None
        holder = _holder(state_dir)
        raise Locked(
            f"state directory {state_dir} is in use by {holder}", f"stop {holder} or choose another with --state-dir"
        ) from None
    unwritable = ""
    try:
        with open(state_dir / HOLDER_NAME, "w", opener=_without_links) as holder_file:
            holder_file.write(f"{os.getpid()}\n")
    except OSError as error:
        if error.errno == errno.ELOOP:
            os.close(lock)
            raise Unavailable(f"{state_dir / HOLDER_NAME} is a symbolic link", "remove that link") from None
        unwritable = f"{state_dir} cannot be written: {error.strerror}; no knob can be changed until it can"
    try:
        originals = Originals(state_dir / FILE_NAME, boot_id, lock=lock)
    except Unavailable:
        os.close(lock)
        raise
    originals.messages += (unwritable,) if unwritable else ()
    return originals


def default_state_dir(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    """/var/lib/dioptase for root; for others $XDG_STATE_HOME/dioptase or ~/.local/state/dioptase."""
    if (os.geteuid() if uid is None else uid) == 0:
        return Path("/var/lib/dioptase")
    state_home = environ.get("XDG_STATE_HOME", "")
    # The XDG specification has relative paths ignored.
    if Path(state_home).is_absolute():
        return Path(state_home) / "dioptase"
    return Path(environ.get("HOME") or Path.home()) / ".local/state/dioptase"


def demo_state_dir(state_dir: Path) -> Path:
    """The demo's own, below the agent's, so that the two can run beside one another."""
    return state_dir / "demo"


def boot_id(proc: Path = Path("/proc")) -> str:
    """What the kernel calls this boot."""
    return (proc / "sys/kernel/random/boot_id").read_text().strip()


def _with_note(outcome: Outcome, theirs: Collection[Key]) -> Outcome:
    if (outcome.decision.cgroup, outcome.decision.knob) not in theirs or outcome.error:
        return outcome
    return msgspec.structs.replace(outcome, error=LEFT)


def _is_kernel_text(text: str) -> bool:
    """Whether the text was read from a file: latin-1 has a character for each byte and no other."""
    return all(ord(char) < 256 for char in text)


def _same_cgroup(known: Original, fresh: Original) -> bool:
    return (known.cgroup_id, known.raw.directory_id) == (fresh.cgroup_id, fresh.raw.directory_id)


def _holder(state_dir: Path) -> str:
    # The holder writes its pid right after it has the lock; a disk that was full then leaves it unknown.
    try:
        pid = (state_dir / HOLDER_NAME).read_text().strip()
    except OSError:
        pid = ""
    return f"process {pid}" if pid.isdigit() else "another process"


def _check_trust(state_dir: Path, found: os.stat_result) -> None:
    if found.st_uid not in (0, os.geteuid()):
        raise Unavailable(
            f"state directory {state_dir} belongs to another user (uid {found.st_uid})",
            f"choose another with --state-dir, or make it yours: chown {os.geteuid()} {state_dir}",
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Unavailable(
            f"state directory {state_dir} can be written by other users (mode {stat.S_IMODE(found.st_mode):04o})",
            f"choose one of its own with --state-dir, or take that right away: chmod go-w {state_dir}",
        )


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)

"""Reads and writes the knobs of agent/qrm/table.py, and only in the cgroup that is meant.

A cgroup is its inode, not its path: a directory that took the path of a removed one is another cgroup and is never
touched. Files are opened relative to a descriptor of the directory, symbolic links are never followed, and each way to
fail has a type of its own: `Vanished` (the cgroup is gone: normal), `Forbidden` (privileges, read-only mount),
`Refused` (the kernel does not accept the value) and `Unavailable` (there is no such file, or it holds garbage).
"""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path

import msgspec

from agent.hierarchy import Hierarchy
from agent.qrm.table import EFFECTIVE_CPUS, REMEDIES, TABLE, Place, canonical
from api.cpus import parse_cpu_list
from api.knobs import Knob
from api.ports import Unavailable, Vanished

__all__ = ("Absent", "Forbidden", "KnobFiles", "Original", "RawValue", "Refused", "canonical", "is_cgroup_path")

KEPT_OPEN = 256
"""Descriptors of directories kept for the next round; beyond that the least recently used is closed."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_GONE = (errno.ENOENT, errno.ENODEV)
_LONGEST = 1 << 16
"""No knob's text is longer: a cpuset of 8192 CPUs with every second one is 23 KiB."""


class Absent(Unavailable):
    """The cgroup exists, but not in the hierarchy of this knob's controller."""


class Refused(Unavailable):
    """The kernel said no to one operation on one file."""

    def __init__(self, reason: str, remedy: str, code: int) -> None:
        super().__init__(reason, remedy)
        self.code = code


class Forbidden(Refused):
    """Not the value but the one who writes it is refused: privileges, or a read-only mount."""


class RawValue(msgspec.Struct, frozen=True, kw_only=True):
    """What the files of a knob held: exactly what must be written to put it back."""

    directory_id: int
    """Inode of the directory in the knob's own controller, which on version 1 is not the cpu controller's."""
    texts: Mapping[str, str]


class Original(msgspec.Struct, frozen=True, kw_only=True):
    """What one knob of one cgroup held before the agent first wrote it."""

    cgroup: str
    cgroup_id: int
    knob: Knob
    raw: RawValue


class KnobFiles:
    """Reads and writes knobs of cgroups. Keeps descriptors of directories; `close` gives them back."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self.hierarchy = hierarchy
        try:
            self._device = hierarchy.primary.stat().st_dev
        except OSError as error:
            raise Unavailable(
                f"{hierarchy.primary} cannot be looked at: {error.strerror}", "mount the cgroup file system there"
            ) from None
        self._open: OrderedDict[tuple[Path, str, int], int] = OrderedDict()

    def read(self, cgroup: str, cgroup_id: int, knob: Knob) -> str:
        """The knob's value in canonical notation."""
        return self.decode(cgroup, knob, self.read_raw(cgroup, cgroup_id, knob))

    def decode(self, cgroup: str, knob: Knob, raw: RawValue) -> str:
        """What those texts mean, in canonical notation. Raises Unavailable when they mean nothing."""
        place = self._place(knob)
        try:
            return canonical(knob, place.decode(raw.texts))
        except (ValueError, KeyError):
            held = " and ".join(f"{file} holds {text[:60]!r}" for file, text in raw.texts.items())
            raise Unavailable(
                f"{cgroup}: {held}, which is no {knob.value}", "see whether that file system is a real cgroup one"
            ) from None

    def read_raw(self, cgroup: str, cgroup_id: int, knob: Knob, directory_id: int | None = None) -> RawValue:
        """The knob's files as they are. With `directory_id`, a directory of another inode counts as vanished."""
        mount = self._mount(self._place(knob).controller)
        try:
            raw = self._raw(mount, cgroup, cgroup_id, self._place(knob).files)
        except Absent as error:
            if directory_id is None:
                raise
            raise Vanished(error.reason) from None
        if directory_id not in (None, raw.directory_id):
            raise Vanished(f"{cgroup} is another cgroup now below {mount}")
        return raw

    def write(self, cgroup: str, cgroup_id: int, knob: Knob, value: str) -> None:
        """Give the knob this value. Raises ValueError where it is none."""
        self.write_raw(cgroup, cgroup_id, knob, self._place(knob).encode(canonical(knob, value)))

    def write_raw(self, cgroup: str, cgroup_id: int, knob: Knob, texts: Mapping[str, str]) -> None:
        """Put these texts into the knob's files, in an order in which the kernel can accept each write."""
        place = self._place(knob)
        if not set(texts) <= set(place.files):
            raise Unavailable(
                f"{cgroup}: {knob.value} is not in {' and '.join(texts)} on this machine",
                "do it where cgroups are mounted as they were when these texts were read",
            )
        mount = self._mount(place.controller)
        current = self.read_raw(cgroup, cgroup_id, knob).texts
        try:
            for step in place.steps(current, texts):
                self._write(mount, cgroup, cgroup_id, knob, step)
        except Refused as error:
            if len(place.files) > 1:
                self._undo(cgroup, cgroup_id, knob, current, error)
            raise

    def shown(self, knob: Knob, value: str) -> Mapping[str, str]:
        """The texts that the knob's files show after this value was written."""
        return {file: f"{text}\n" for file, text in self._place(knob).encode(canonical(knob, value)).items()}

    def available(self, knob: Knob, cgroup: str) -> bool:
        """Whether the files of this knob are there: asked of the file system, not of a version number."""
        place = self._place(knob)
        mount = self.hierarchy.controller(place.controller)
        return mount is not None and all(os.access(_below(mount, cgroup) / file, os.F_OK) for file in place.files)

    def alive(self, cgroup: str, cgroup_id: int) -> bool:
        """Whether the path still names the cgroup with that inode."""
        try:
            found = _below(self.hierarchy.primary, cgroup).stat(follow_symlinks=False)
        except PermissionError as error:
            reason = f"{cgroup}: cannot look at it: {error.strerror}"
            raise Forbidden(reason, "run the agent as root", errno.EACCES) from None
        except OSError:
            return False
        return (found.st_ino, found.st_dev) == (cgroup_id, self._device)

    def obstacle(self, cgroups: Collection[str] = ()) -> Unavailable | None:
        """Why this process cannot change cgroups at all, or None: for the banner and `dioptase doctor`.

        Without the right to write the root, that of any of these cgroups will do: it may have been delegated to us.
        """
        root = self.hierarchy.primary
        if os.statvfs(root).f_flag & os.ST_RDONLY:
            return Unavailable(f"{root} is mounted read-only", "mount the host's cgroup file system read-write")
        if any(os.access(path, os.W_OK, effective_ids=True) for path in (root, *(_below(root, c) for c in cgroups))):
            return None
        return Unavailable(
            f"no permission to write below {root}", "run the agent as root, or delegate the pods' cgroups to its user"
        )

    def ceiling(self, cgroup: str) -> tuple[int, ...] | None:
        """CPUs that the cgroup above may use: nothing below can have more. None where the kernel does not tell."""
        mount = self.hierarchy.controller("cpuset")
        return None if mount is None else _effective(_below(mount, cgroup).parent)

    def cpu_count(self) -> int:
        """CPUs that the whole hierarchy may use; those of the machine where there is no cpuset controller."""
        mount = self.hierarchy.controller("cpuset")
        cpus = None if mount is None else _effective(mount)
        return len(cpus) if cpus else os.cpu_count() or 1

    def close(self) -> None:
        """Close every kept descriptor. Idempotent."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _place(self, knob: Knob) -> Place:
        row = TABLE[knob]
        return row.v2 if self.hierarchy.mode == "v2" else row.v1

    def _mount(self, controller: str) -> Path:
        mount = self.hierarchy.controller(controller)
        if mount is None:
            raise Unavailable(
                f"no {controller} controller is mounted",
                f"mount it: mount -t cgroup -o {controller} none /sys/fs/cgroup/{controller}",
            )
        return mount

    def _raw(self, mount: Path, cgroup: str, cgroup_id: int, files: tuple[str, ...]) -> RawValue:
        try:
            directory = self._directory(mount, cgroup, cgroup_id)
            try:
                texts = {file: _text(directory, file) for file in files}
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                # The kept descriptor may be of a directory that was replaced meanwhile.
                self._forget(mount, cgroup, cgroup_id)
                directory = self._directory(mount, cgroup, cgroup_id)
                texts = {file: _text(directory, file) for file in files}
        except OSError as error:
            raise self._failure(error, mount, cgroup, cgroup_id, f"read {' and '.join(files)}") from None
        return RawValue(directory_id=os.fstat(directory).st_ino, texts=texts)

    def _write(self, mount: Path, cgroup: str, cgroup_id: int, knob: Knob, step: tuple[str, str]) -> None:
        file, text = step
        directory = self._directory(mount, cgroup, cgroup_id)
        # The kernel reads a line: an empty text would be no write at all, and an empty cpuset is one newline.
        line = text if text.endswith("\n") else f"{text}\n"
        action = f"write {text.strip()!r} to {file}"
        try:
            fd = os.open(file, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        except OSError as error:
            raise self._failure(error, mount, cgroup, cgroup_id, action) from None
        try:
            os.write(fd, line.encode("latin-1"))
        except OSError as error:
            if error.errno in _GONE:
                raise self._failure(error, mount, cgroup, cgroup_id, action) from None
            # EACCES here is not about privileges, which open() has granted: version 1 says so of a parent's CPUs.
            code = error.errno or 0
            remedy = REMEDIES.get((knob, code), "see whether something else manages this cgroup")
            kind = Forbidden if code == errno.EPERM else Refused
            raise kind(f"{cgroup}: cannot {action}: {error.strerror}", remedy, code) from None
        finally:
            os.close(fd)

    def _undo(self, cgroup: str, cgroup_id: int, knob: Knob, texts: Mapping[str, str], refused: Refused) -> None:
        """Half a change would leave neither the old value nor the new one."""
        place = self._place(knob)
        mount = self._mount(place.controller)
        try:
            for step in place.steps(self.read_raw(cgroup, cgroup_id, knob).texts, texts):
                self._write(mount, cgroup, cgroup_id, knob, step)
        except Unavailable as error:
            reason = f"{refused.reason}, and what was there before could not be written again: {error.reason}"
            raise Refused(reason, refused.remedy, refused.code) from None

    def _failure(self, error: OSError, mount: Path, cgroup: str, cgroup_id: int, action: str) -> Exception:
        # Why opening or reading failed, judged after a second look at the directory.
        reason = f"{cgroup}: cannot {action}: {error.strerror}"
        if error.errno in _GONE:
            self._forget(mount, cgroup, cgroup_id)
            self._directory(mount, cgroup, cgroup_id)
            return Unavailable(reason, f"the kernel must offer it and {mount} must have its controller enabled there")
        return _refusal(error, reason, mount)

    def _directory(self, mount: Path, cgroup: str, cgroup_id: int) -> int:
        """Descriptor of the cgroup's directory in that hierarchy, after the path was seen to be that cgroup's."""
        if not self.alive(cgroup, cgroup_id):
            self._forget(mount, cgroup, cgroup_id)
            raise Vanished(f"{cgroup} with inode {cgroup_id} is gone")
        key = (mount, cgroup, cgroup_id)
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        try:
            fd = _walk(mount, cgroup)
        except Absent as error:
            if mount != self.hierarchy.primary:
                raise
            raise Vanished(error.reason) from None
        if mount == self.hierarchy.primary and os.fstat(fd).st_ino != cgroup_id:
            os.close(fd)
            raise Vanished(f"{cgroup} with inode {cgroup_id} is gone")
        self._open[key] = fd
        if len(self._open) > KEPT_OPEN:
            os.close(self._open.popitem(last=False)[1])
        return fd

    def _forget(self, mount: Path, cgroup: str, cgroup_id: int) -> None:
        fd = self._open.pop((mount, cgroup, cgroup_id), None)
        if fd is not None:
            os.close(fd)


def _text(directory: int, file: str) -> str:
    fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        # Every byte has a character of its own in latin-1, so that any text goes back as it came.
        return os.read(fd, _LONGEST).decode("latin-1")
    finally:
        os.close(fd)


def is_cgroup_path(text: str) -> bool:
    """Whether a text can be the path of a cgroup below a mount: absolute, printable, no empty part and no dots."""
    parts = text.split("/")[1:] if text != "/" else []
    return text.startswith("/") and text.isprintable() and not any(part in ("", ".", "..") for part in parts)


@lru_cache(maxsize=4096)
def _below(mount: Path, cgroup: str) -> Path:
    if not is_cgroup_path(cgroup):
        raise Refused(f"{cgroup!r} is not a cgroup path", "write it like /kubepods/web, without dots", errno.EINVAL)
    return mount.joinpath(*cgroup.split("/")[1:])


def _walk(mount: Path, cgroup: str) -> int:
    # One component at a time, so that no link anywhere in the path can lead out of the hierarchy.
    fd = -1
    try:
        fd = os.open(mount, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in _below(mount, cgroup).relative_to(mount).parts:
            deeper = os.open(part, _DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = deeper
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        reason = f"{cgroup}: cannot open it below {mount}: {error.strerror}"
        if error.errno in _GONE:
            raise Absent(reason, f"make the cgroup there too: mkdir -p {mount}{cgroup}") from None
        raise _refusal(error, reason, mount) from None
    return fd


def _refusal(error: OSError, reason: str, mount: Path) -> Refused:
    code = error.errno or 0
    if code == errno.EROFS:
        return Forbidden(reason, f"mount {mount} read-write", code)
    if code in (errno.EACCES, errno.EPERM):
        return Forbidden(reason, "run the agent as root", code)
    if code in (errno.ELOOP, errno.ENOTDIR):
        return Refused(reason, "name a real directory: symbolic links are not followed", code)
    if code in (errno.EMFILE, errno.ENFILE):
        return Refused(reason, "raise the limit of open files (ulimit -n)", code)
    return Refused(reason, "see the kernel's log", code)


def _effective(directory: Path) -> tuple[int, ...] | None:
    for name in EFFECTIVE_CPUS:
        try:
            return parse_cpu_list((directory / name).read_text()) or None
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            return None
    return None

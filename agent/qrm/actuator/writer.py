"""Reads and writes the knob files of cgroups, and only of the cgroup that the caller identified by its inode.
Files are opened relative to a descriptor of the directory and symbolic links are never followed. Failures have
types: `Vanished` (the cgroup was removed), `WriteForbidden` (privileges or a read-only mount), `KernelRefused`
(the value was rejected) and `Unavailable` (the file is missing or unreadable).
"""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from agent.qrm.knobs.knob_files import (
    EFFECTIVE_FILES,
    KNOB_SPECS,
    ONE_SHOT_FILES,
    REMEDIES,
    UNSUPPORTED,
    KnobCodec,
    canonical,
    codec_for_files,
    decode_texts,
    write_each_file,
)
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.cpu import parse_cpu_list
from api.interfaces import Unavailable, Vanished
from api.knobs import Knob
from api.text import quote

GONE_ERRNOS = (errno.ENOENT, errno.ENODEV)
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_TEXT_BYTES = 1 << 16
"""Longer than the text of any knob: a cpuset of 8192 CPUs with every second one is 23 KiB."""


class CgroupAbsent(Unavailable):
    """The cgroup exists, but not in the hierarchy of this knob's controller."""


class KernelRefused(Unavailable):
    """The kernel refused one operation on one file."""

    def __init__(self, reason: str, remedy: str, code: int) -> None:
        super().__init__(reason, remedy)
        self.code = code


class WriteForbidden(KernelRefused):
    """The process may not write: missing privileges, or a read-only mount."""


def read_text_at(directory: int, file: str) -> str:
    """Return the content of the file. Raises OSError."""
    fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        # latin-1 maps every byte to one character, so any content can be written back unchanged.
        return os.read(fd, _MAX_TEXT_BYTES).decode("latin-1")
    finally:
        os.close(fd)


def is_cgroup_path(text: str) -> bool:
    """Return whether the text is a cgroup path below a mount: absolute, printable, without empty parts and dots."""
    parts = text.split("/")[1:] if text != "/" else []
    return text.startswith("/") and text.isprintable() and not any(part in ("", ".", "..") for part in parts)


@lru_cache(maxsize=4096)
def cgroup_directory(mount: Path, cgroup: str) -> Path:
    """Return the directory of the cgroup. Raises KernelRefused if the path is not a cgroup path."""
    if not is_cgroup_path(cgroup):
        raise KernelRefused(
            f"{quote(cgroup)} is not a cgroup path", "write it like /kubepods/web, without dots", errno.EINVAL
        )
    return mount.joinpath(*cgroup.split("/")[1:])


def open_cgroup(mount: Path, cgroup: str) -> int:
    """Return a descriptor of the cgroup's directory. Raises CgroupAbsent and KernelRefused."""
    # One component at a time, so that no symbolic link in the path can lead out of the hierarchy.
    fd = -1
    try:
        fd = os.open(mount, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in cgroup_directory(mount, cgroup).relative_to(mount).parts:
            deeper = os.open(part, _DIRECTORY_FLAGS, dir_fd=fd)
            os.close(fd)
            fd = deeper
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        reason = f"{cgroup}: cannot open it below {mount}: {error.strerror}"
        if error.errno in GONE_ERRNOS:
            raise CgroupAbsent(reason, f"create the cgroup there too: mkdir -p {mount}{cgroup}") from None
        raise open_refusal(error, reason, mount) from None
    return fd


def open_refusal(error: OSError, reason: str, mount: Path) -> KernelRefused:
    """Return the exception for an error of open()."""
    code = error.errno or 0
    if code == errno.EROFS:
        return WriteForbidden(reason, f"mount {mount} read-write", code)
    if code in (errno.EACCES, errno.EPERM):
        return WriteForbidden(reason, "run the agent as root", code)
    if code in (errno.ELOOP, errno.ENOTDIR):
        return KernelRefused(reason, "name a real directory: symbolic links are not followed", code)
    if code in (errno.EMFILE, errno.ENFILE):
        return KernelRefused(reason, "raise the limit of open files (ulimit -n)", code)
    return KernelRefused(reason, "see the kernel's log", code)


def read_effective_list(directory: Path, names: tuple[str, ...]) -> tuple[int, ...] | None:
    """Return the list in the first of these files that exists; None if there is none or it is empty."""
    for name in names:
        try:
            return parse_cpu_list((directory / name).read_text()) or None
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            return None
    return None


MAX_OPEN_DIRECTORIES = 1024
"""Directory descriptors kept between cycles; beyond that the least recently used is closed."""
CHECKED_DIRECTORIES = 8
"""Of these, how many are checked in each cycle."""


class RawValue(msgspec.Struct, frozen=True, kw_only=True):
    """File contents of a knob: exactly what must be written to restore it."""

    directory_id: int
    """Inode of the directory in the knob's own controller; on version 1 it differs from the cpu controller's."""
    texts: Mapping[str, str]


class KnobReading(msgspec.Struct, frozen=True, kw_only=True):
    """File contents of a knob, and of the files that its value depends on."""

    raw: RawValue
    context: Mapping[str, str] = {}


class OriginalValue(msgspec.Struct, frozen=True, kw_only=True):
    """Value of one knob of one cgroup before the agent first wrote it."""

    cgroup: str
    cgroup_id: int
    knob: Knob
    raw: RawValue


class _Directory(NamedTuple):
    fd: int
    inode: int


class KnobWriter:
    """Reads and writes knobs of cgroups. Caches directory descriptors; `close` closes them."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self.hierarchy = hierarchy
        self.version = "v2" if hierarchy.mode == "v2" else "v1"
        """`v1` or `v2`: whose files the controllers have."""
        try:
            self._device = hierarchy.primary.stat().st_dev
        except OSError as error:
            raise Unavailable(
                f"{hierarchy.primary} cannot be read: {error.strerror}", "mount the cgroup file system there"
            ) from None
        self._open: OrderedDict[tuple[Path, str, int], _Directory] = OrderedDict()
        self._alive: set[tuple[str, int]] | None = None

    @contextmanager
    def one_cycle(self) -> Iterator[None]:
        """Within this context, each path is checked only once for the inode of its cgroup. This is safe: files are
        opened through the descriptor of that very directory, and are gone when the cgroup is removed."""
        self._alive = set()
        try:
            yield
        finally:
            with suppress(WriteForbidden):
                self._close_removed()
            self._alive = None

    def _close_removed(self) -> None:
        """Close descriptors of removed cgroups, the least recently used first. No cycle reads these again, and each keeps
        memory in the kernel."""
        for key in list(islice(self._open, CHECKED_DIRECTORIES)):
            _, cgroup, cgroup_id = key
            if self.alive(cgroup, cgroup_id):
                self._open.move_to_end(key)
            else:
                self._forget(*key)

    def read(self, cgroup: str, cgroup_id: int, knob: Knob) -> str:
        """Return the knob's value in canonical notation."""
        reading = self.read_with_context(cgroup, cgroup_id, knob)
        return self.decode(cgroup, knob, reading.raw, reading.context)

    def decode(self, cgroup: str, knob: Knob, raw: RawValue, context: Mapping[str, str] | None = None) -> str:
        """Return the value of these texts in canonical notation. Raises Unavailable if they have none."""
        codec = self._codec_of(cgroup, knob, raw.texts)
        texts = {**raw.texts, **context} if context else raw.texts
        try:
            return decode_texts(knob, codec, tuple(texts.items()))
        except (ValueError, KeyError):
            held = " and ".join(f"{file} holds {quote(text, 60)}" for file, text in raw.texts.items())
            raise Unavailable(
                f"{cgroup}: {held}, which is no {knob.value}", "check that a cgroup file system is mounted there"
            ) from None

    def read_raw(self, cgroup: str, cgroup_id: int, knob: Knob, directory_id: int | None = None) -> RawValue:
        """Return the knob's file contents. With `directory_id`, a directory with another inode counts as vanished."""
        return self.read_with_context(cgroup, cgroup_id, knob, directory_id).raw

    def read_with_context(
        self,
        cgroup: str,
        cgroup_id: int,
        knob: Knob,
        directory_id: int | None = None,
        unchanged: Mapping[str, str] | None = None,
    ) -> KnobReading:
        """Return the knob's file contents, and those its value depends on; `unchanged` files are not read."""
        codec = self._codec(knob, cgroup)
        mount = self._mount(codec.controller)
        try:
            raw = self._raw(mount, cgroup, cgroup_id, (*codec.files, *codec.context_files), unchanged or {})
        except CgroupAbsent as error:
            if directory_id is None:
                raise
            raise Vanished(error.reason) from None
        if directory_id not in (None, raw.directory_id):
            raise Vanished(f"{cgroup} was replaced by another cgroup below {mount}")
        texts = {file: raw.texts[file] for file in codec.files}
        # A text in an unknown format stays as it is; decoding it reports the error.
        with suppress(ValueError):
            texts = dict(codec.normalize(texts))
        context = {file: raw.texts[file] for file in codec.context_files}
        return KnobReading(raw=RawValue(directory_id=raw.directory_id, texts=texts), context=context)

    def write(
        self, cgroup: str, cgroup_id: int, knob: Knob, value: str, current: Mapping[str, str] | None = None
    ) -> frozenset[str]:
        """Set the knob to this value; see `write_raw`. Raises ValueError on an invalid value."""
        return self.write_raw(
            cgroup, cgroup_id, knob, self._codec(knob, cgroup).encode(canonical(knob, value)), current
        )

    def write_raw(
        self,
        cgroup: str,
        cgroup_id: int,
        knob: Knob,
        texts: Mapping[str, str],
        current: Mapping[str, str] | None = None,
    ) -> frozenset[str]:
        """Write these texts in an order that the kernel accepts; return the files that were written. `current` are
        the present contents, which need not be read then."""
        codec = self._codec_of(cgroup, knob, texts)
        if not set(texts) <= set(codec.files):
            raise Unavailable(
                f"{cgroup}: {knob.value} has other files here than {' and '.join(texts)}",
                "mount the cgroup hierarchies as they were when the originals were read",
            )
        mount = self._mount(codec.controller)
        context: Mapping[str, str] = {}
        if current is None and codec.steps is write_each_file and len(texts) == 1:
            current = {}
        if current is None:
            reading = self.read_with_context(cgroup, cgroup_id, knob)
            current, context = reading.raw.texts, reading.context
        try:
            steps = codec.steps({**current, **context}, texts)
        except ValueError as error:
            raise KernelRefused(f"{cgroup}: cannot set {knob.value}", str(error), errno.EINVAL) from None
        try:
            for step in steps:
                self._write(mount, cgroup, cgroup_id, knob, step)
        except KernelRefused as error:
            if len(steps) > 1:
                self._undo(cgroup, cgroup_id, knob, current, error)
            raise
        return frozenset(file for file, _ in steps)

    def texts_after_write(self, cgroup: str, knob: Knob, value: str) -> Mapping[str, str]:
        """Return the texts that the knob's files show after this value was written."""
        texts = self._codec(knob, cgroup).encode(canonical(knob, value))
        return {file: f"{text}\n" for file, text in texts.items()}

    def weights(self, cgroup: str, knob: Knob) -> tuple[int, int]:
        """Return the minimum and maximum weight that this kernel accepts."""
        return self._codec(knob, cgroup).weights

    def available(self, knob: Knob, cgroup: str) -> bool:
        """Return whether the files of this knob exist: the file system decides, not a kernel version."""
        if knob in ONE_SHOT_FILES:
            file, mount = ONE_SHOT_FILES[knob][self.version == "v2"], self.hierarchy.controller("memory")
            return file is not None and mount is not None and os.access(cgroup_directory(mount, cgroup) / file, os.F_OK)
        return any(self._has_files(codec, cgroup) for codec in self._codecs(knob))

    def read_text(self, cgroup: str, cgroup_id: int, controller: str, file: str) -> str:
        """Return the content of one file of the cgroup in that controller, such as `memory.stat`."""
        return self._raw(self._mount(controller), cgroup, cgroup_id, (file,), {}).texts[file]

    def write_one_shot(self, cgroup: str, cgroup_id: int, knob: Knob, text: str) -> None:
        """Write to the file of a one-shot knob. The call may block in the kernel."""
        file = ONE_SHOT_FILES[knob][self.version == "v2"]
        if file is None:
            raise Unavailable(f"{cgroup}: there is no {knob.value}", "see dioptase doctor")
        self._write(self._mount("memory"), cgroup, cgroup_id, knob, (file, text))

    def processes(self, cgroup: str, cgroup_id: int) -> tuple[int, ...]:
        """Return the processes of the cgroup and of all below it."""
        pids: list[int] = []
        directory = self._directory(self._mount("memory"), cgroup, cgroup_id)
        for _, _, _, directory_fd in os.fwalk(".", dir_fd=directory.fd):
            with suppress(OSError):
                pids += map(int, read_text_at(directory_fd, "cgroup.procs").split())
        return tuple(pids)

    def alive(self, cgroup: str, cgroup_id: int) -> bool:
        """Return whether the path still names the cgroup with that inode."""
        if self._alive is not None and (cgroup, cgroup_id) in self._alive:
            return True
        try:
            status = cgroup_directory(self.hierarchy.primary, cgroup).stat(follow_symlinks=False)
        except PermissionError as error:
            reason = f"{cgroup}: cannot read its directory: {error.strerror}"
            raise WriteForbidden(reason, "run the agent as root", errno.EACCES) from None
        except OSError:
            return False
        same = (status.st_ino, status.st_dev) == (cgroup_id, self._device)
        if same and self._alive is not None:
            self._alive.add((cgroup, cgroup_id))
        return same

    def write_obstacle(self, cgroups: Collection[str] = ()) -> Unavailable | None:
        """Return why this process cannot change cgroups at all, or None. Write access to the root, or to any of
        these cgroups (delegated to another user), suffices."""
        root = self.hierarchy.primary
        if os.statvfs(root).f_flag & os.ST_RDONLY:
            return Unavailable(f"{root} is mounted read-only", "mount the host's cgroup file system read-write")
        paths = (root, root / "cgroup.procs", *(cgroup_directory(root, cgroup) for cgroup in cgroups))
        if any(os.access(path, os.W_OK, effective_ids=True) for path in paths):
            return None
        return Unavailable(
            f"no permission to write below {root}", "run the agent as root, or delegate the pods' cgroups to its user"
        )

    def allowed_above(self, cgroup: str, knob: Knob = Knob.CPUSET) -> tuple[int, ...] | None:
        """Return the CPUs, or NUMA nodes with MEMS, that the parent cgroup may use; None if the kernel does not
        report them."""
        mount = self.hierarchy.controller("cpuset")
        return read_effective_list(cgroup_directory(mount, cgroup).parent, EFFECTIVE_FILES[knob]) if mount else None

    def cpu_count(self) -> int:
        """Return the number of CPUs of the whole hierarchy; the machine's without a cpuset controller."""
        mount = self.hierarchy.controller("cpuset")
        cpus = None if mount is None else read_effective_list(mount, EFFECTIVE_FILES[Knob.CPUSET])
        return len(cpus) if cpus else os.cpu_count() or 1

    def close(self) -> None:
        """Close all cached descriptors. Idempotent."""
        while self._open:
            os.close(self._open.popitem()[1].fd)

    def _codecs(self, knob: Knob) -> tuple[KnobCodec, ...]:
        row = KNOB_SPECS[knob]
        return row.v2 if self.version == "v2" else row.v1

    def _has_files(self, codec: KnobCodec, cgroup: str) -> bool:
        mount = self.hierarchy.controller(codec.controller)
        files = (*codec.files, *codec.context_files)
        return mount is not None and all(os.access(cgroup_directory(mount, cgroup) / file, os.F_OK) for file in files)

    def _codec(self, knob: Knob, cgroup: str) -> KnobCodec:
        codecs = self._codecs(knob)
        if not codecs:
            reason, remedy = UNSUPPORTED[knob, self.version]
            raise Unavailable(f"{cgroup}: there is no {knob.value}: {reason}", remedy)
        # If the kernel has none of them, reading the first reports the missing file.
        return next((codec for codec in codecs if len(codecs) > 1 and self._has_files(codec, cgroup)), codecs[0])

    def _codec_of(self, cgroup: str, knob: Knob, texts: Mapping[str, str]) -> KnobCodec:
        return codec_for_files(self._codecs(knob), tuple(texts)) or self._codec(knob, cgroup)

    def _mount(self, controller: str) -> Path:
        mount = self.hierarchy.controller(controller)
        if mount is None:
            raise Unavailable(
                f"no {controller} controller is mounted",
                f"mount it: mount -t cgroup -o {controller} none /sys/fs/cgroup/{controller}",
            )
        return mount

    def _raw(
        self, mount: Path, cgroup: str, cgroup_id: int, files: tuple[str, ...], unchanged: Mapping[str, str]
    ) -> RawValue:
        try:
            directory = self._directory(mount, cgroup, cgroup_id)
            try:
                texts = {
                    file: unchanged[file] if file in unchanged else read_text_at(directory.fd, file) for file in files
                }
            except OSError as error:
                if error.errno not in GONE_ERRNOS:
                    raise
                # The cached descriptor may belong to a directory that was replaced.
                self._forget(mount, cgroup, cgroup_id)
                directory = self._directory(mount, cgroup, cgroup_id)
                texts = {file: read_text_at(directory.fd, file) for file in files}
        except OSError as error:
            raise self._failure(error, mount, cgroup, cgroup_id, f"read {' and '.join(files)}") from None
        return RawValue(directory_id=directory.inode, texts=texts)

    def _write(self, mount: Path, cgroup: str, cgroup_id: int, knob: Knob, step: tuple[str, str]) -> None:
        file, text = step
        directory = self._directory(mount, cgroup, cgroup_id)
        # Writing an empty text would be no write at all; an empty cpuset is written as one newline.
        line = text if text.endswith("\n") else f"{text}\n"
        action = f"write {quote(text.strip())} to {file}"
        try:
            fd = os.open(file, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory.fd)
        except OSError as error:
            raise self._failure(error, mount, cgroup, cgroup_id, action) from None
        try:
            os.write(fd, line.encode("latin-1"))
        except OSError as error:
            if error.errno in GONE_ERRNOS and (knob, error.errno) not in REMEDIES:
                raise self._failure(error, mount, cgroup, cgroup_id, action) from None
            self._directory(mount, cgroup, cgroup_id)
            # EACCES is no privilege problem here, open() succeeded: version 1 refuses CPUs that the parent lacks with it.
            code = error.errno or 0
            remedy = REMEDIES.get((knob, code), "see whether something else manages this cgroup")
            kind = WriteForbidden if code == errno.EPERM else KernelRefused
            raise kind(f"{cgroup}: cannot {action}: {error.strerror}", remedy, code) from None
        finally:
            os.close(fd)

    def _undo(self, cgroup: str, cgroup_id: int, knob: Knob, texts: Mapping[str, str], refusal: KernelRefused) -> None:
        """Write the previous texts again, because a partial change is neither the old nor the new value."""
        codec = self._codec_of(cgroup, knob, texts)
        mount = self._mount(codec.controller)
        try:
            present = self.read_with_context(cgroup, cgroup_id, knob)
            for step in codec.steps({**present.raw.texts, **present.context}, texts):
                self._write(mount, cgroup, cgroup_id, knob, step)
        except Unavailable as error:
            reason = f"{refusal.reason}, and the previous value could not be written again: {error.reason}"
            raise KernelRefused(reason, refusal.remedy, refusal.code) from None

    def _failure(self, error: OSError, mount: Path, cgroup: str, cgroup_id: int, action: str) -> Exception:
        reason = f"{cgroup}: cannot {action}: {error.strerror}"
        if error.errno in GONE_ERRNOS:
            self._forget(mount, cgroup, cgroup_id)
            self._directory(mount, cgroup, cgroup_id)
            return Unavailable(
                reason, f"use a kernel that has it, and enable its controller for this cgroup below {mount}"
            )
        return open_refusal(error, reason, mount)

    def _directory(self, mount: Path, cgroup: str, cgroup_id: int) -> _Directory:
        """Return the cgroup's directory in that hierarchy, after checking that the path has the cgroup's inode."""
        if not self.alive(cgroup, cgroup_id):
            self._forget(mount, cgroup, cgroup_id)
            raise Vanished(f"{cgroup} with inode {cgroup_id} is gone")
        key = (mount, cgroup, cgroup_id)
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        try:
            fd = open_cgroup(mount, cgroup)
        except CgroupAbsent as error:
            if mount != self.hierarchy.primary:
                raise
            raise Vanished(error.reason) from None
        directory = _Directory(fd, os.fstat(fd).st_ino)
        if mount == self.hierarchy.primary and directory.inode != cgroup_id:
            os.close(fd)
            raise Vanished(f"{cgroup} with inode {cgroup_id} is gone")
        self._open[key] = directory
        if len(self._open) > MAX_OPEN_DIRECTORIES:
            os.close(self._open.popitem(last=False)[1].fd)
        return directory

    def _forget(self, mount: Path, cgroup: str, cgroup_id: int) -> None:
        if self._alive is not None:
            self._alive.discard((cgroup, cgroup_id))
        directory = self._open.pop((mount, cgroup, cgroup_id), None)
        if directory is not None:
            os.close(directory.fd)

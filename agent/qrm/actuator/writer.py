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

GONE_ERRNOS = (errno.ENOENT, errno.ENODEV)
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_TEXT_BYTES = 1 << 16
"""No knob's text is longer: a cpuset of 8192 CPUs with every second one is 23 KiB."""


class CgroupAbsent(Unavailable):
    """The cgroup exists, but not in the hierarchy of this knob's controller."""


class KernelRefused(Unavailable):
    """The kernel said no to one operation on one file."""

    def __init__(self, reason: str, remedy: str, code: int) -> None:
        super().__init__(reason, remedy)
        self.code = code


class WriteForbidden(KernelRefused):
    """Not the value but the one who writes it is refused: privileges, or a read-only mount."""


def read_text_at(directory: int, file: str) -> str:
    """What the file holds. Raises OSError."""
    fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        # Every byte has a character of its own in latin-1, so that any text goes back as it came.
        return os.read(fd, _MAX_TEXT_BYTES).decode("latin-1")
    finally:
        os.close(fd)


def is_cgroup_path(text: str) -> bool:
    """Whether a text can be the path of a cgroup below a mount: absolute, printable, no empty part and no dots."""
    parts = text.split("/")[1:] if text != "/" else []
    return text.startswith("/") and text.isprintable() and not any(part in ("", ".", "..") for part in parts)


@lru_cache(maxsize=4096)
def cgroup_directory(mount: Path, cgroup: str) -> Path:
    """Directory of the cgroup. Raises Refused where the path is none."""
    if not is_cgroup_path(cgroup):
        raise KernelRefused(
            f"{cgroup!r} is not a cgroup path", "write it like /kubepods/web, without dots", errno.EINVAL
        )
    return mount.joinpath(*cgroup.split("/")[1:])


def open_cgroup(mount: Path, cgroup: str) -> int:
    """Descriptor of the cgroup's directory. Raises Absent and Refused."""
    # One component at a time, so that no link anywhere in the path can lead out of the hierarchy.
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
            raise CgroupAbsent(reason, f"make the cgroup there too: mkdir -p {mount}{cgroup}") from None
        raise open_refusal(error, reason, mount) from None
    return fd


def open_refusal(error: OSError, reason: str, mount: Path) -> KernelRefused:
    """What such an error means when something is opened."""
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
    """The list in the first of these files that is there; None where there is none or it names nothing."""
    for name in names:
        try:
            return parse_cpu_list((directory / name).read_text()) or None
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            return None
    return None


MAX_OPEN_DIRECTORIES = 1024
"""Descriptors of directories kept for the next round; beyond that the least recently used is closed."""


class RawValue(msgspec.Struct, frozen=True, kw_only=True):
    """What the files of a knob held: exactly what must be written to put it back."""

    directory_id: int
    """Inode of the directory in the knob's own controller, which on version 1 is not the cpu controller's."""
    texts: Mapping[str, str]


class KnobReading(msgspec.Struct, frozen=True, kw_only=True):
    """A knob as it was read: what it holds, and what else its meaning depends on."""

    raw: RawValue
    beside: Mapping[str, str] = {}


class OriginalValue(msgspec.Struct, frozen=True, kw_only=True):
    """What one knob of one cgroup held before the agent first wrote it."""

    cgroup: str
    cgroup_id: int
    knob: Knob
    raw: RawValue


class _Directory(NamedTuple):
    """One that is kept open."""

    fd: int
    inode: int


class KnobWriter:
    """Reads and writes knobs of cgroups. Keeps descriptors of directories; `close` gives them back."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self.hierarchy = hierarchy
        self.version = "v2" if hierarchy.mode == "v2" else "v1"
        """`v1` or `v2`: whose files the controllers have."""
        try:
            self._device = hierarchy.primary.stat().st_dev
        except OSError as error:
            raise Unavailable(
                f"{hierarchy.primary} cannot be looked at: {error.strerror}", "mount the cgroup file system there"
            ) from None
        self._open: OrderedDict[tuple[Path, str, int], _Directory] = OrderedDict()
        self._found: set[tuple[str, int]] | None = None

    @contextmanager
    def one_cycle(self) -> Iterator[None]:
        """Within it, a path is asked once whether it still names its cgroup. Nothing else is ever touched: what is opened is
        opened through the descriptor of that very directory, and is not there any more when the cgroup is gone."""
        self._found = set()
        try:
            yield
        finally:
            self._found = None

    def read(self, cgroup: str, cgroup_id: int, knob: Knob) -> str:
        """The knob's value in canonical notation."""
        reading = self.look(cgroup, cgroup_id, knob)
        return self.decode(cgroup, knob, reading.raw, reading.beside)

    def decode(self, cgroup: str, knob: Knob, raw: RawValue, beside: Mapping[str, str] | None = None) -> str:
        """What those texts mean, in canonical notation. Raises Unavailable when they mean nothing."""
        place = self._place_of(cgroup, knob, raw.texts)
        texts = {**raw.texts, **beside} if beside else raw.texts
        try:
            return decode_texts(knob, place, tuple(texts.items()))
        except (ValueError, KeyError):
            held = " and ".join(f"{file} holds {text[:60]!r}" for file, text in raw.texts.items())
            raise Unavailable(
                f"{cgroup}: {held}, which is no {knob.value}", "see whether that file system is a real cgroup one"
            ) from None

    def read_raw(self, cgroup: str, cgroup_id: int, knob: Knob, directory_id: int | None = None) -> RawValue:
        """The knob's files as they are. With `directory_id`, a directory of another inode counts as vanished."""
        return self.look(cgroup, cgroup_id, knob, directory_id).raw

    def look(
        self,
        cgroup: str,
        cgroup_id: int,
        knob: Knob,
        directory_id: int | None = None,
        known: Mapping[str, str] | None = None,
    ) -> KnobReading:
        """The same, with what the knob's meaning depends on. Files whose texts are `known` are not read."""
        place = self._place(knob, cgroup)
        mount = self._mount(place.controller)
        try:
            raw = self._raw(mount, cgroup, cgroup_id, (*place.files, *place.context_files), known or {})
        except CgroupAbsent as error:
            if directory_id is None:
                raise
            raise Vanished(error.reason) from None
        if directory_id not in (None, raw.directory_id):
            raise Vanished(f"{cgroup} is another cgroup now below {mount}")
        texts = {file: raw.texts[file] for file in place.files}
        # What is garbage is left as it is: whoever decodes it says so.
        with suppress(ValueError):
            texts = dict(place.normalize(texts))
        beside = {file: raw.texts[file] for file in place.context_files}
        return KnobReading(raw=RawValue(directory_id=raw.directory_id, texts=texts), beside=beside)

    def write(
        self, cgroup: str, cgroup_id: int, knob: Knob, value: str, current: Mapping[str, str] | None = None
    ) -> frozenset[str]:
        """Give the knob this value; `current` and what is returned as below. Raises ValueError where it is none."""
        return self.write_raw(
            cgroup, cgroup_id, knob, self._place(knob, cgroup).encode(canonical(knob, value)), current
        )

    def write_raw(
        self,
        cgroup: str,
        cgroup_id: int,
        knob: Knob,
        texts: Mapping[str, str],
        current: Mapping[str, str] | None = None,
    ) -> frozenset[str]:
        """Put these texts into the knob's files, in an order in which the kernel can accept each write; which files were
        written. What the files hold now need not be read where `current` says it."""
        place = self._place_of(cgroup, knob, texts)
        if not set(texts) <= set(place.files):
            raise Unavailable(
                f"{cgroup}: {knob.value} has other files here than {' and '.join(texts)}",
                "do it where cgroups are mounted as they were when these texts were read",
            )
        mount = self._mount(place.controller)
        beside: Mapping[str, str] = {}
        if current is None and place.steps is write_each_file and len(texts) == 1:
            current = {}
        if current is None:
            reading = self.look(cgroup, cgroup_id, knob)
            current, beside = reading.raw.texts, reading.beside
        try:
            steps = place.steps({**current, **beside}, texts)
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

    def shown(self, cgroup: str, knob: Knob, value: str) -> Mapping[str, str]:
        """The texts that the knob's files show after this value was written."""
        texts = self._place(knob, cgroup).encode(canonical(knob, value))
        return {file: f"{text}\n" for file, text in texts.items()}

    def weights(self, cgroup: str, knob: Knob) -> tuple[int, int]:
        """The least and the most that this kernel takes for a weight."""
        return self._place(knob, cgroup).weights

    def available(self, knob: Knob, cgroup: str) -> bool:
        """Whether the files of this knob are there: asked of the file system, not of a version number."""
        if knob in ONE_SHOT_FILES:
            file, mount = ONE_SHOT_FILES[knob][self.version == "v2"], self.hierarchy.controller("memory")
            return file is not None and mount is not None and os.access(cgroup_directory(mount, cgroup) / file, os.F_OK)
        return any(self._there(place, cgroup) for place in self._places(knob))

    def read_text(self, cgroup: str, cgroup_id: int, controller: str, file: str) -> str:
        """Any other file of the cgroup, as it is."""
        return self._raw(self._mount(controller), cgroup, cgroup_id, (file,), {}).texts[file]

    def write_one_shot(self, cgroup: str, cgroup_id: int, knob: Knob, text: str) -> None:
        """Write to the file of a knob that is done, not set. May take as long as the kernel likes."""
        file = ONE_SHOT_FILES[knob][self.version == "v2"]
        if file is None:
            raise Unavailable(f"{cgroup}: there is no {knob.value}", "see dioptase doctor")
        self._write(self._mount("memory"), cgroup, cgroup_id, knob, (file, text))

    def processes(self, cgroup: str, cgroup_id: int) -> tuple[int, ...]:
        """Those of the cgroup and of all below it."""
        found: list[int] = []
        directory = self._directory(self._mount("memory"), cgroup, cgroup_id)
        for _, _, _, group in os.fwalk(".", dir_fd=directory.fd):
            with suppress(OSError):
                found += map(int, read_text_at(group, "cgroup.procs").split())
        return tuple(found)

    def alive(self, cgroup: str, cgroup_id: int) -> bool:
        """Whether the path still names the cgroup with that inode."""
        if self._found is not None and (cgroup, cgroup_id) in self._found:
            return True
        try:
            found = cgroup_directory(self.hierarchy.primary, cgroup).stat(follow_symlinks=False)
        except PermissionError as error:
            reason = f"{cgroup}: cannot look at it: {error.strerror}"
            raise WriteForbidden(reason, "run the agent as root", errno.EACCES) from None
        except OSError:
            return False
        same = (found.st_ino, found.st_dev) == (cgroup_id, self._device)
        if same and self._found is not None:
            self._found.add((cgroup, cgroup_id))
        return same

    def write_obstacle(self, cgroups: Collection[str] = ()) -> Unavailable | None:
        """Why this process cannot change cgroups at all, or None: for the banner and `dioptase doctor`.

        Without the right to write the root, whose owner may have it at the files alone, that of any of these cgroups will do.
        """
        root = self.hierarchy.primary
        if os.statvfs(root).f_flag & os.ST_RDONLY:
            return Unavailable(f"{root} is mounted read-only", "mount the host's cgroup file system read-write")
        paths = (root, root / "cgroup.procs", *(cgroup_directory(root, cgroup) for cgroup in cgroups))
        if any(os.access(path, os.W_OK, effective_ids=True) for path in paths):
            return None
        return Unavailable(
            f"no permission to write below {root}", "run the agent as root, or delegate the pods' cgroups to its user"
        )

    def ceiling(self, cgroup: str, knob: Knob = Knob.CPUSET) -> tuple[int, ...] | None:
        """CPUs, or with MEMS the NUMA nodes, that the cgroup above may use: nothing below can have more. None where the
        kernel does not tell."""
        mount = self.hierarchy.controller("cpuset")
        return (
            None
            if mount is None
            else read_effective_list(cgroup_directory(mount, cgroup).parent, EFFECTIVE_FILES[knob])
        )

    def cpu_count(self) -> int:
        """CPUs that the whole hierarchy may use; those of the machine where there is no cpuset controller."""
        mount = self.hierarchy.controller("cpuset")
        cpus = None if mount is None else read_effective_list(mount, EFFECTIVE_FILES[Knob.CPUSET])
        return len(cpus) if cpus else os.cpu_count() or 1

    def close(self) -> None:
        """Close every kept descriptor. Idempotent."""
        while self._open:
            os.close(self._open.popitem()[1].fd)

    def _places(self, knob: Knob) -> tuple[KnobCodec, ...]:
        row = KNOB_SPECS[knob]
        return row.v2 if self.version == "v2" else row.v1

    def _there(self, place: KnobCodec, cgroup: str) -> bool:
        mount = self.hierarchy.controller(place.controller)
        files = (*place.files, *place.context_files)
        return mount is not None and all(os.access(cgroup_directory(mount, cgroup) / file, os.F_OK) for file in files)

    def _place(self, knob: Knob, cgroup: str) -> KnobCodec:
        places = self._places(knob)
        if not places:
            reason, remedy = UNSUPPORTED[knob, self.version]
            raise Unavailable(f"{cgroup}: there is no {knob.value}: {reason}", remedy)
        # Where the kernel has none of them, reading the first says which file is missing.
        return next((place for place in places if len(places) > 1 and self._there(place, cgroup)), places[0])

    def _place_of(self, cgroup: str, knob: Knob, texts: Mapping[str, str]) -> KnobCodec:
        """The place that those texts were read from or are meant for."""
        return codec_for_files(self._places(knob), tuple(texts)) or self._place(knob, cgroup)

    def _mount(self, controller: str) -> Path:
        mount = self.hierarchy.controller(controller)
        if mount is None:
            raise Unavailable(
                f"no {controller} controller is mounted",
                f"mount it: mount -t cgroup -o {controller} none /sys/fs/cgroup/{controller}",
            )
        return mount

    def _raw(
        self, mount: Path, cgroup: str, cgroup_id: int, files: tuple[str, ...], known: Mapping[str, str]
    ) -> RawValue:
        try:
            directory = self._directory(mount, cgroup, cgroup_id)
            try:
                texts = {file: known[file] if file in known else read_text_at(directory.fd, file) for file in files}
            except OSError as error:
                if error.errno not in GONE_ERRNOS:
                    raise
                # The kept descriptor may be of a directory that was replaced meanwhile.
                self._forget(mount, cgroup, cgroup_id)
                directory = self._directory(mount, cgroup, cgroup_id)
                texts = {file: read_text_at(directory.fd, file) for file in files}
        except OSError as error:
            raise self._failure(error, mount, cgroup, cgroup_id, f"read {' and '.join(files)}") from None
        return RawValue(directory_id=directory.inode, texts=texts)

    def _write(self, mount: Path, cgroup: str, cgroup_id: int, knob: Knob, step: tuple[str, str]) -> None:
        file, text = step
        directory = self._directory(mount, cgroup, cgroup_id)
        # The kernel reads a line: an empty text would be no write at all, and an empty cpuset is one newline.
        line = text if text.endswith("\n") else f"{text}\n"
        action = f"write {text.strip()!r} to {file}"
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
            # EACCES here is not about privileges, which open() has granted: version 1 says so of a parent's CPUs.
            code = error.errno or 0
            remedy = REMEDIES.get((knob, code), "see whether something else manages this cgroup")
            kind = WriteForbidden if code == errno.EPERM else KernelRefused
            raise kind(f"{cgroup}: cannot {action}: {error.strerror}", remedy, code) from None
        finally:
            os.close(fd)

    def _undo(self, cgroup: str, cgroup_id: int, knob: Knob, texts: Mapping[str, str], refused: KernelRefused) -> None:
        """Half a change would leave neither the old value nor the new one."""
        place = self._place_of(cgroup, knob, texts)
        mount = self._mount(place.controller)
        try:
            now = self.look(cgroup, cgroup_id, knob)
            for step in place.steps({**now.raw.texts, **now.beside}, texts):
                self._write(mount, cgroup, cgroup_id, knob, step)
        except Unavailable as error:
            reason = f"{refused.reason}, and what was there before could not be written again: {error.reason}"
            raise KernelRefused(reason, refused.remedy, refused.code) from None

    def _failure(self, error: OSError, mount: Path, cgroup: str, cgroup_id: int, action: str) -> Exception:
        # Why opening or reading failed, judged after a second look at the directory.
        reason = f"{cgroup}: cannot {action}: {error.strerror}"
        if error.errno in GONE_ERRNOS:
            self._forget(mount, cgroup, cgroup_id)
            self._directory(mount, cgroup, cgroup_id)
            return Unavailable(reason, f"the kernel must offer it and {mount} must have its controller enabled there")
        return open_refusal(error, reason, mount)

    def _directory(self, mount: Path, cgroup: str, cgroup_id: int) -> _Directory:
        """The cgroup's directory in that hierarchy, after the path was seen to be that cgroup's."""
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
        if self._found is not None:
            self._found.discard((cgroup, cgroup_id))
        directory = self._open.pop((mount, cgroup, cgroup_id), None)
        if directory is not None:
            os.close(directory.fd)

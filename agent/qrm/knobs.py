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
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from agent.hierarchy import Hierarchy
from agent.qrm.paths import (
    GONE,
    Absent,
    Forbidden,
    Refused,
    below,
    effective,
    is_cgroup_path,
    refusal,
    text_of,
    walk,
)
from agent.qrm.places import outright
from agent.qrm.table import EFFECTIVE, LACKS, ONCE_FILES, REMEDIES, TABLE, Place, canonical, meaning, place_with
from api.knobs import Knob
from api.ports import Unavailable, Vanished

__all__ = ("Absent", "Forbidden", "KnobFiles", "Original", "RawValue", "Refused", "canonical", "is_cgroup_path")

KEPT_OPEN = 1024
"""Descriptors of directories kept for the next round; beyond that the least recently used is closed."""


class RawValue(msgspec.Struct, frozen=True, kw_only=True):
    """What the files of a knob held: exactly what must be written to put it back."""

    directory_id: int
    """Inode of the directory in the knob's own controller, which on version 1 is not the cpu controller's."""
    texts: Mapping[str, str]


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A knob as it was read: what it holds, and what else its meaning depends on."""

    raw: RawValue
    beside: Mapping[str, str] = {}


class Original(msgspec.Struct, frozen=True, kw_only=True):
    """What one knob of one cgroup held before the agent first wrote it."""

    cgroup: str
    cgroup_id: int
    knob: Knob
    raw: RawValue


class _Directory(NamedTuple):
    """One that is kept open."""

    fd: int
    inode: int


class KnobFiles:
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
    def one_round(self) -> Iterator[None]:
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
            return meaning(knob, place, tuple(texts.items()))
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
    ) -> Reading:
        """The same, with what the knob's meaning depends on. Files whose texts are `known` are not read."""
        place = self._place(knob, cgroup)
        mount = self._mount(place.controller)
        try:
            raw = self._raw(mount, cgroup, cgroup_id, (*place.files, *place.beside), known or {})
        except Absent as error:
            if directory_id is None:
                raise
            raise Vanished(error.reason) from None
        if directory_id not in (None, raw.directory_id):
            raise Vanished(f"{cgroup} is another cgroup now below {mount}")
        texts = {file: raw.texts[file] for file in place.files}
        # What is garbage is left as it is: whoever decodes it says so.
        with suppress(ValueError):
            texts = dict(place.own(texts))
        beside = {file: raw.texts[file] for file in place.beside}
        return Reading(raw=RawValue(directory_id=raw.directory_id, texts=texts), beside=beside)

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
        if current is None and place.steps is outright and len(texts) == 1:
            current = {}
        if current is None:
            reading = self.look(cgroup, cgroup_id, knob)
            current, beside = reading.raw.texts, reading.beside
        try:
            steps = place.steps({**current, **beside}, texts)
        except ValueError as error:
            raise Refused(f"{cgroup}: cannot set {knob.value}", str(error), errno.EINVAL) from None
        try:
            for step in steps:
                self._write(mount, cgroup, cgroup_id, knob, step)
        except Refused as error:
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
        if knob in ONCE_FILES:
            file, mount = ONCE_FILES[knob][self.version == "v2"], self.hierarchy.controller("memory")
            return file is not None and mount is not None and os.access(below(mount, cgroup) / file, os.F_OK)
        return any(self._there(place, cgroup) for place in self._places(knob))

    def read_text(self, cgroup: str, cgroup_id: int, controller: str, file: str) -> str:
        """Any other file of the cgroup, as it is."""
        return self._raw(self._mount(controller), cgroup, cgroup_id, (file,), {}).texts[file]

    def act(self, cgroup: str, cgroup_id: int, knob: Knob, text: str) -> None:
        """Write to the file of a knob that is done, not set. May take as long as the kernel likes."""
        file = ONCE_FILES[knob][self.version == "v2"]
        if file is None:
            raise Unavailable(f"{cgroup}: there is no {knob.value}", "see dioptase doctor")
        self._write(self._mount("memory"), cgroup, cgroup_id, knob, (file, text))

    def processes(self, cgroup: str, cgroup_id: int) -> tuple[int, ...]:
        """Those of the cgroup and of all below it."""
        found: list[int] = []
        directory = self._directory(self._mount("memory"), cgroup, cgroup_id)
        for _, _, _, group in os.fwalk(".", dir_fd=directory.fd):
            with suppress(OSError):
                found += map(int, text_of(group, "cgroup.procs").split())
        return tuple(found)

    def alive(self, cgroup: str, cgroup_id: int) -> bool:
        """Whether the path still names the cgroup with that inode."""
        if self._found is not None and (cgroup, cgroup_id) in self._found:
            return True
        try:
            found = below(self.hierarchy.primary, cgroup).stat(follow_symlinks=False)
        except PermissionError as error:
            reason = f"{cgroup}: cannot look at it: {error.strerror}"
            raise Forbidden(reason, "run the agent as root", errno.EACCES) from None
        except OSError:
            return False
        same = (found.st_ino, found.st_dev) == (cgroup_id, self._device)
        if same and self._found is not None:
            self._found.add((cgroup, cgroup_id))
        return same

    def obstacle(self, cgroups: Collection[str] = ()) -> Unavailable | None:
        """Why this process cannot change cgroups at all, or None: for the banner and `dioptase doctor`.

        Without the right to write the root, whose owner may have it at the files alone, that of any of these cgroups will do.
        """
        root = self.hierarchy.primary
        if os.statvfs(root).f_flag & os.ST_RDONLY:
            return Unavailable(f"{root} is mounted read-only", "mount the host's cgroup file system read-write")
        paths = (root, root / "cgroup.procs", *(below(root, cgroup) for cgroup in cgroups))
        if any(os.access(path, os.W_OK, effective_ids=True) for path in paths):
            return None
        return Unavailable(
            f"no permission to write below {root}", "run the agent as root, or delegate the pods' cgroups to its user"
        )

    def ceiling(self, cgroup: str, knob: Knob = Knob.CPUSET) -> tuple[int, ...] | None:
        """CPUs, or with MEMS the NUMA nodes, that the cgroup above may use: nothing below can have more. None where the
        kernel does not tell."""
        mount = self.hierarchy.controller("cpuset")
        return None if mount is None else effective(below(mount, cgroup).parent, EFFECTIVE[knob])

    def cpu_count(self) -> int:
        """CPUs that the whole hierarchy may use; those of the machine where there is no cpuset controller."""
        mount = self.hierarchy.controller("cpuset")
        cpus = None if mount is None else effective(mount, EFFECTIVE[Knob.CPUSET])
        return len(cpus) if cpus else os.cpu_count() or 1

    def close(self) -> None:
        """Close every kept descriptor. Idempotent."""
        while self._open:
            os.close(self._open.popitem()[1].fd)

    def _places(self, knob: Knob) -> tuple[Place, ...]:
        row = TABLE[knob]
        return row.v2 if self.version == "v2" else row.v1

    def _there(self, place: Place, cgroup: str) -> bool:
        mount = self.hierarchy.controller(place.controller)
        files = (*place.files, *place.beside)
        return mount is not None and all(os.access(below(mount, cgroup) / file, os.F_OK) for file in files)

    def _place(self, knob: Knob, cgroup: str) -> Place:
        places = self._places(knob)
        if not places:
            reason, remedy = LACKS[knob, self.version]
            raise Unavailable(f"{cgroup}: there is no {knob.value}: {reason}", remedy)
        # Where the kernel has none of them, reading the first says which file is missing.
        return next((place for place in places if len(places) > 1 and self._there(place, cgroup)), places[0])

    def _place_of(self, cgroup: str, knob: Knob, texts: Mapping[str, str]) -> Place:
        """The place that those texts were read from or are meant for."""
        return place_with(self._places(knob), tuple(texts)) or self._place(knob, cgroup)

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
                texts = {file: known[file] if file in known else text_of(directory.fd, file) for file in files}
            except OSError as error:
                if error.errno not in GONE:
                    raise
                # The kept descriptor may be of a directory that was replaced meanwhile.
                self._forget(mount, cgroup, cgroup_id)
                directory = self._directory(mount, cgroup, cgroup_id)
                texts = {file: text_of(directory.fd, file) for file in files}
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
            if error.errno in GONE and (knob, error.errno) not in REMEDIES:
                raise self._failure(error, mount, cgroup, cgroup_id, action) from None
            self._directory(mount, cgroup, cgroup_id)
            # EACCES here is not about privileges, which open() has granted: version 1 says so of a parent's CPUs.
            code = error.errno or 0
            remedy = REMEDIES.get((knob, code), "see whether something else manages this cgroup")
            kind = Forbidden if code == errno.EPERM else Refused
            raise kind(f"{cgroup}: cannot {action}: {error.strerror}", remedy, code) from None
        finally:
            os.close(fd)

    def _undo(self, cgroup: str, cgroup_id: int, knob: Knob, texts: Mapping[str, str], refused: Refused) -> None:
        """Half a change would leave neither the old value nor the new one."""
        place = self._place_of(cgroup, knob, texts)
        mount = self._mount(place.controller)
        try:
            now = self.look(cgroup, cgroup_id, knob)
            for step in place.steps({**now.raw.texts, **now.beside}, texts):
                self._write(mount, cgroup, cgroup_id, knob, step)
        except Unavailable as error:
            reason = f"{refused.reason}, and what was there before could not be written again: {error.reason}"
            raise Refused(reason, refused.remedy, refused.code) from None

    def _failure(self, error: OSError, mount: Path, cgroup: str, cgroup_id: int, action: str) -> Exception:
        # Why opening or reading failed, judged after a second look at the directory.
        reason = f"{cgroup}: cannot {action}: {error.strerror}"
        if error.errno in GONE:
            self._forget(mount, cgroup, cgroup_id)
            self._directory(mount, cgroup, cgroup_id)
            return Unavailable(reason, f"the kernel must offer it and {mount} must have its controller enabled there")
        return refusal(error, reason, mount)

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
            fd = walk(mount, cgroup)
        except Absent as error:
            if mount != self.hierarchy.primary:
                raise
            raise Vanished(error.reason) from None
        directory = _Directory(fd, os.fstat(fd).st_ino)
        if mount == self.hierarchy.primary and directory.inode != cgroup_id:
            os.close(fd)
            raise Vanished(f"{cgroup} with inode {cgroup_id} is gone")
        self._open[key] = directory
        if len(self._open) > KEPT_OPEN:
            os.close(self._open.popitem(last=False)[1].fd)
        return directory

    def _forget(self, mount: Path, cgroup: str, cgroup_id: int) -> None:
        if self._found is not None:
            self._found.discard((cgroup, cgroup_id))
        directory = self._open.pop((mount, cgroup, cgroup_id), None)
        if directory is not None:
            os.close(directory.fd)

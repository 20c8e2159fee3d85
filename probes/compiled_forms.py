"""Keeps compiled forms of probes in files, so that a second start compiles nothing and does not load BCC, and what the
forms read from the kernel's types, so that it does not parse them either.

A file is named by the hash of what its bytecode depends on: sources, headers, macros, the package of BCC and the running
kernel, which BCC asks for its helpers. An update of LLVM alone does not count. The directory is `DIOPTASE_CACHE_DIR`, by
default /var/cache/dioptase; an empty value means none. The directory and its files must belong to this user and be writable by
no other, because their programs run in the kernel. If a file is missing or damaged, the form is compiled again: nothing
depends on this directory. Other files in it are left alone.

The compiling child imports this module, so it imports the standard library only.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import platform
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

DEFAULT_DIRECTORY = "/var/cache/dioptase"
MAX_FILES = 128
"""Files kept, those used last: all probes of five kernels, two files for each."""
MAX_FILE_BYTES = 4 << 20
MAX_WRITE_S = 600.0
"""Age from which an unfinished file counts as left by a killed process."""
_OWN_FILES = re.compile(r"[0-9a-f]{64}")
"""Names of the compiled forms."""
_UNFINISHED_FILES = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]+")
"""Names of compiled forms while they are written."""
_UNUSABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""Errors of a file that is missing, damaged or of another format."""
_INSTRUCTION_BYTES = 8
_LOAD_64_BITS = 0x18
"""BPF_LD | BPF_IMM | BPF_DW, which takes two instructions (include/uapi/linux/bpf.h)."""
_MAP_DESCRIPTOR = 1
"""BPF_PSEUDO_MAP_FD: the number in that instruction is a map's descriptor."""


class MapSpec(NamedTuple):
    """A map to create, with the types of key and value as BCC read them from the source."""

    name: str
    key: Any
    leaf: Any
    kind: int
    key_size: int
    value_size: int
    max_entries: int
    flags: int


class FormLayout(NamedTuple):
    """What a form reads from the kernel's types: offsets of fields by macro, and the BTF id that each program attaches to."""

    macros: Mapping[str, int]
    targets: Sequence[int]


class CompiledForm(NamedTuple):
    """Maps, and bytecode by function. In the bytecode, a map is its position among `maps`."""

    maps: Sequence[MapSpec]
    programs: Mapping[str, bytes]


def replace_maps(code: bytes, numbers: Mapping[int, int]) -> bytes:
    """Return the bytecode with other numbers of maps. Raises KeyError for a map that is not among `numbers`."""
    patched, position = bytearray(code), 0
    while position < len(code):
        if code[position] != _LOAD_64_BITS:
            position += _INSTRUCTION_BYTES
            continue
        if code[position + 1] >> 4 == _MAP_DESCRIPTOR:
            number = numbers[int.from_bytes(code[position + 4 : position + 8], "little", signed=True)]
            patched[position + 4 : position + 8] = number.to_bytes(4, "little", signed=True)
        position += 2 * _INSTRUCTION_BYTES
    return bytes(patched)


def cache_directory() -> Path | None:
    """Return the directory of compiled forms; None if there is none."""
    text = os.environ.get("DIOPTASE_CACHE_DIR", DEFAULT_DIRECTORY)
    return Path(text) if text else None


def file_name(parts: Sequence[str]) -> str:
    """Return the name of the file of a form, from all that its bytecode depends on besides machine and kernel."""
    kernel = os.uname()
    key = [*parts, platform.machine(), kernel.release, kernel.version]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()


def read_form(directory: Path, name: str) -> CompiledForm | None:
    """Return a compiled form; None if there is no usable file of that name."""
    try:
        content = _read_content(directory, name)
        maps = [MapSpec(**each) for each in content["maps"]]
        return CompiledForm(maps, {key: base64.b64decode(code) for key, code in content["programs"].items()})
    except _UNUSABLE:
        return None


def read_layout(directory: Path, name: str) -> FormLayout | None:
    """Return the layout of a form; None if there is no usable file of that name."""
    try:
        content = _read_content(directory, name)
        macros = {str(macro): int(offset) for macro, offset in content["macros"].items()}
        return FormLayout(macros, [int(target) for target in content["targets"]])
    except _UNUSABLE:
        return None


def write_form(directory: Path, name: str, form: CompiledForm) -> None:
    """Keep a compiled form, and remove the files beyond MAX_FILES that were not used for longest. Raises OSError."""
    programs = {key: base64.b64encode(code).decode() for key, code in form.programs.items()}
    _write_content(directory, name, {"maps": [each._asdict() for each in form.maps], "programs": programs})


def write_layout(directory: Path, name: str, layout: FormLayout) -> None:
    """Keep the layout of a form, as `write_form` does. Raises OSError."""
    _write_content(directory, name, layout._asdict())


def _read_content(directory: Path, name: str) -> Any:
    """Return the content of a file. Raises one of _UNUSABLE."""
    with _opened_directory(directory) as folder:
        # Not waiting: opening a FIFO would wait for a writer.
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
            _check_owner(status)
            with os.fdopen(fd, "rb", closefd=False) as file:
                checksum, _, body = file.read(MAX_FILE_BYTES).partition(b"\n")
            with suppress(OSError):
                os.utime(fd)
        finally:
            os.close(fd)
    if checksum.decode() != hashlib.sha256(body).hexdigest():
        raise ValueError("the file is damaged")
    return json.loads(body)


def _write_content(directory: Path, name: str, content: Mapping[str, Any]) -> None:
    body = json.dumps(content).encode()
    # Containers that share the directory can have the same process id.
    temporary = f".{name}.{secrets.token_hex(8)}"
    with suppress(FileExistsError):
        # Not its parents: the umask would decide their mode.
        directory.mkdir(mode=0o700)
    with _opened_directory(directory) as folder:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=folder)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
        _remove_oldest(folder, time.time())


@contextmanager
def _opened_directory(directory: Path) -> Iterator[int]:
    """Open a directory that belongs to this user alone, and yield its descriptor. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_owner(os.fstat(fd))
        yield fd
    finally:
        os.close(fd)


def _check_owner(status: os.stat_result) -> None:
    # Stricter than for the state directory, which root may own as well: programs of these files run in the kernel.
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, "it belongs to another user, or others can write it")


def _remove_oldest(folder: int, now_s: float) -> None:
    """Remove the forms beyond MAX_FILES, and what killed processes have not finished."""
    forms, removed = list[tuple[float, str]](), list[str]()
    for name in os.listdir(folder):
        # Another process may have renamed or removed it since.
        with suppress(FileNotFoundError):
            if _OWN_FILES.fullmatch(name):
                forms.append((os.stat(name, dir_fd=folder).st_mtime, name))
            elif _UNFINISHED_FILES.fullmatch(name) and now_s - os.stat(name, dir_fd=folder).st_mtime > MAX_WRITE_S:
                removed.append(name)
    for name in (*removed, *(name for _, name in sorted(forms)[:-MAX_FILES])):
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)

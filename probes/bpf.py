"""Wraps bpf(2): maps, programs, links and iterators, with the layouts of include/uapi/linux/bpf.h.
Standard library only, because the compiling child uses it too.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Iterator
from typing import Any, NamedTuple

_NUMBERS = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "s390x": 351, "ppc64le": 361}

MAP_CREATE, MAP_LOOKUP_ELEM, MAP_UPDATE_ELEM, MAP_DELETE_ELEM, MAP_GET_NEXT_KEY = range(5)
PROG_LOAD, PROG_GET_NEXT_ID, PROG_GET_FD_BY_ID, OBJ_GET_INFO_BY_FD = 5, 11, 13, 15
RAW_TRACEPOINT_OPEN, MAP_LOOKUP_BATCH, LINK_CREATE, ENABLE_STATS, ITER_CREATE = 17, 24, 28, 32, 33

KPROBE, RAW_TRACEPOINT, TRACING = 2, 17, 26
"""Program types."""
TRACE_RAW_TP, TRACE_FENTRY, TRACE_FEXIT, TRACE_ITER = 23, 24, 25, 28
"""Attach types of a TRACING program: a tracepoint, entry or return of a kernel function, or an iterator over objects."""
HASH, PERCPU_HASH, PERCPU_ARRAY, LRU_PERCPU_HASH = 1, 5, 6, 10
"""Map types."""
PER_CPU = frozenset({PERCPU_HASH, PERCPU_ARRAY, LRU_PERCPU_HASH})
LOG_BYTES = 1 << 20
NAME_BYTES = 16
"""Size of the name of a program or map, including the final zero."""

_libc = ctypes.CDLL(None, use_errno=True)


class _ProgLoad(ctypes.Structure):
    _fields_ = (
        ("prog_type", ctypes.c_uint32), ("insn_cnt", ctypes.c_uint32),
        ("insns", ctypes.c_uint64), ("license", ctypes.c_uint64),
        ("log_level", ctypes.c_uint32), ("log_size", ctypes.c_uint32), ("log_buf", ctypes.c_uint64),
        ("kern_version", ctypes.c_uint32), ("prog_flags", ctypes.c_uint32), ("prog_name", ctypes.c_char * NAME_BYTES),
        ("prog_ifindex", ctypes.c_uint32), ("expected_attach_type", ctypes.c_uint32),
        ("prog_btf_fd", ctypes.c_uint32), ("func_info_rec_size", ctypes.c_uint32), ("func_info", ctypes.c_uint64),
        ("func_info_cnt", ctypes.c_uint32), ("line_info_rec_size", ctypes.c_uint32), ("line_info", ctypes.c_uint64),
        ("line_info_cnt", ctypes.c_uint32), ("attach_btf_id", ctypes.c_uint32), ("attach_prog_fd", ctypes.c_uint32),
    )  # fmt: skip


class _RawTracepoint(ctypes.Structure):
    _fields_ = (("name", ctypes.c_uint64), ("prog_fd", ctypes.c_uint32), ("pad", ctypes.c_uint32))


class _LinkCreate(ctypes.Structure):
    _fields_ = (
        ("prog_fd", ctypes.c_uint32), ("target_fd", ctypes.c_uint32),
        ("attach_type", ctypes.c_uint32), ("flags", ctypes.c_uint32),
        ("iter_info", ctypes.c_uint64), ("iter_info_len", ctypes.c_uint32),
    )  # fmt: skip


class _IterCreate(ctypes.Structure):
    _fields_ = (("link_fd", ctypes.c_uint32), ("flags", ctypes.c_uint32))


class _MapCreate(ctypes.Structure):
    _fields_ = (
        ("map_type", ctypes.c_uint32), ("key_size", ctypes.c_uint32), ("value_size", ctypes.c_uint32),
        ("max_entries", ctypes.c_uint32), ("map_flags", ctypes.c_uint32), ("inner_map_fd", ctypes.c_uint32),
        ("numa_node", ctypes.c_uint32), ("map_name", ctypes.c_char * NAME_BYTES),
    )  # fmt: skip


class _MapElem(ctypes.Structure):
    _fields_ = (
        ("map_fd", ctypes.c_uint32), ("pad", ctypes.c_uint32),
        ("key", ctypes.c_uint64), ("value", ctypes.c_uint64), ("flags", ctypes.c_uint64),
    )  # fmt: skip


class _Batch(ctypes.Structure):
    _fields_ = (
        ("in_batch", ctypes.c_uint64), ("out_batch", ctypes.c_uint64),
        ("keys", ctypes.c_uint64), ("values", ctypes.c_uint64), ("count", ctypes.c_uint32),
        ("map_fd", ctypes.c_uint32), ("elem_flags", ctypes.c_uint64), ("flags", ctypes.c_uint64),
    )  # fmt: skip


class _Info(ctypes.Structure):
    _fields_ = (("bpf_fd", ctypes.c_uint32), ("info_len", ctypes.c_uint32), ("info", ctypes.c_uint64))


class _Id(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("next_id", ctypes.c_uint32), ("open_flags", ctypes.c_uint32))


class _MapInfo(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_uint32), ("id", ctypes.c_uint32), ("key_size", ctypes.c_uint32),
        ("value_size", ctypes.c_uint32), ("max_entries", ctypes.c_uint32), ("map_flags", ctypes.c_uint32),
        ("name", ctypes.c_char * NAME_BYTES),
    )  # fmt: skip


class _ProgInfo(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_uint32), ("id", ctypes.c_uint32), ("tag", ctypes.c_uint8 * 8),
        ("jited_prog_len", ctypes.c_uint32), ("xlated_prog_len", ctypes.c_uint32),
        ("jited_prog_insns", ctypes.c_uint64), ("xlated_prog_insns", ctypes.c_uint64),
        ("load_time", ctypes.c_uint64), ("created_by_uid", ctypes.c_uint32), ("nr_map_ids", ctypes.c_uint32),
        ("map_ids", ctypes.c_uint64), ("name", ctypes.c_char * NAME_BYTES), ("ifindex", ctypes.c_uint32),
        ("gpl_compatible", ctypes.c_uint32), ("netns_dev", ctypes.c_uint64), ("netns_ino", ctypes.c_uint64),
        ("nr_jited_ksyms", ctypes.c_uint32), ("nr_jited_func_lens", ctypes.c_uint32),
        ("jited_ksyms", ctypes.c_uint64), ("jited_func_lens", ctypes.c_uint64), ("btf_id", ctypes.c_uint32),
        ("func_info_rec_size", ctypes.c_uint32), ("func_info", ctypes.c_uint64), ("nr_func_info", ctypes.c_uint32),
        ("nr_line_info", ctypes.c_uint32), ("line_info", ctypes.c_uint64), ("jited_line_info", ctypes.c_uint64),
        ("nr_jited_line_info", ctypes.c_uint32), ("line_info_rec_size", ctypes.c_uint32),
        ("jited_line_info_rec_size", ctypes.c_uint32), ("nr_prog_tags", ctypes.c_uint32),
        ("prog_tags", ctypes.c_uint64), ("run_time_ns", ctypes.c_uint64), ("run_cnt", ctypes.c_uint64),
        ("recursion_misses", ctypes.c_uint64), ("verified_insns", ctypes.c_uint32),
    )  # fmt: skip


class MapInfo(NamedTuple):
    """Properties of a map."""

    type: int
    key_size: int
    value_size: int
    max_entries: int
    flags: int


class ProgramInfo(NamedTuple):
    """Properties of a program; runs are counted only while statistics are on (`enable_stats`)."""

    id: int
    name: str
    run_time_ns: int
    run_count: int
    missed: int
    """Runs that the kernel skipped because the program was already running on that CPU."""


def call(command: int, attr: Any) -> int:
    """Call bpf(2) with a filled attribute. Raises OSError with the kernel's errno."""
    number = _NUMBERS.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"the number of bpf(2) on {platform.machine()} is not known")
    result = int(_libc.syscall(number, command, ctypes.byref(attr), ctypes.sizeof(attr)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _address(buffer: Any) -> int:
    return ctypes.addressof(buffer)


class ProgramRefused(OSError):
    """The kernel refused to load a program; `log` ends with the verifier's reason."""

    def __init__(self, code: int, log: str) -> None:
        super().__init__(code, os.strerror(code))
        self.log = log


def load_program(kind: int, code: bytes, name: str, btf_id: int = 0, attach_type: int = TRACE_RAW_TP) -> int:
    """Load a program and return its descriptor.

    `btf_id` and `attach_type` are for TRACING programs: the typedef btf_trace_NAME, the function itself with TRACE_FENTRY
    and TRACE_FEXIT, or the function bpf_iter_NAME with TRACE_ITER. Raises ProgramRefused with the verifier's log, which is
    requested only by a second attempt: writing it costs the kernel many milliseconds.
    """
    instructions, licence = ctypes.create_string_buffer(code, len(code)), ctypes.create_string_buffer(b"GPL")
    attr = _ProgLoad(
        prog_type=kind,
        insn_cnt=len(code) // 8,
        insns=_address(instructions),
        license=_address(licence),
        prog_name=name.encode(),
        expected_attach_type=attach_type if kind == TRACING else 0,
        attach_btf_id=btf_id,
    )
    try:
        return call(PROG_LOAD, attr)
    except OSError as error:
        log = ctypes.create_string_buffer(LOG_BYTES)
        attr.log_level, attr.log_size, attr.log_buf = 1, LOG_BYTES, _address(log)
        try:
            return call(PROG_LOAD, attr)
        except OSError:
            raise ProgramRefused(error.errno or 0, log.value.decode(errors="replace")) from None


def attach(program: int, tracepoint: str | None) -> int:
    """Return the descriptor of the link that runs a program at a tracepoint; the name is None for a BTF-typed program."""
    name = ctypes.create_string_buffer(tracepoint.encode()) if tracepoint else None
    return call(RAW_TRACEPOINT_OPEN, _RawTracepoint(name=_address(name) if name else 0, prog_fd=program))


def attach_iterator(program: int) -> int:
    """Return the descriptor of the link of an iterator, for `open_iterator`."""
    return call(LINK_CREATE, _LinkCreate(prog_fd=program, attach_type=TRACE_ITER))


def open_iterator(link: int) -> int:
    """Return the descriptor of one pass: reading it to its end runs the program for each current object."""
    return call(ITER_CREATE, _IterCreate(link_fd=link))


def create_map(kind: int, key_size: int, value_size: int, max_entries: int, name: str = "", flags: int = 0) -> int:
    """Create a map and return its descriptor. The kernel's name of it is cut at 15 characters."""
    attr = _MapCreate(
        map_type=kind, key_size=key_size, value_size=value_size, max_entries=max_entries, map_flags=flags,
        map_name=name.encode()[: NAME_BYTES - 1],
    )  # fmt: skip
    return call(MAP_CREATE, attr)


def map_info(fd: int) -> MapInfo:
    info = _MapInfo()
    call(OBJ_GET_INFO_BY_FD, _Info(bpf_fd=fd, info_len=ctypes.sizeof(info), info=_address(info)))
    return MapInfo(info.type, info.key_size, info.value_size, info.max_entries, info.map_flags)


def program_info(fd: int) -> ProgramInfo:
    info = _ProgInfo()
    call(OBJ_GET_INFO_BY_FD, _Info(bpf_fd=fd, info_len=ctypes.sizeof(info), info=_address(info)))
    name = bytes(info.name).decode(errors="replace")
    return ProgramInfo(info.id, name, info.run_time_ns, info.run_cnt, info.recursion_misses)


def programs() -> Iterator[ProgramInfo]:
    """Yield every loaded program (needs CAP_SYS_ADMIN), except those unloaded during the walk."""
    attr = _Id()
    while True:
        try:
            call(PROG_GET_NEXT_ID, attr)
        except FileNotFoundError:
            return
        attr.id = attr.next_id
        try:
            fd = call(PROG_GET_FD_BY_ID, _Id(id=attr.id))
        except FileNotFoundError:
            continue
        try:
            yield program_info(fd)
        finally:
            os.close(fd)


def enable_stats() -> int:
    """Return a descriptor that keeps run counts and run times of all programs on until it is closed (Linux 5.8)."""
    return call(ENABLE_STATS, ctypes.c_uint32(0))


def lookup(fd: int, key: bytes, value_size: int) -> bytes:
    """Return the value of one key, of all possible CPUs for a per-CPU map. Raises FileNotFoundError if it is missing."""
    key_buffer, value = ctypes.create_string_buffer(key, len(key)), ctypes.create_string_buffer(value_size)
    call(MAP_LOOKUP_ELEM, _MapElem(map_fd=fd, key=_address(key_buffer), value=_address(value)))
    return value.raw


def update(fd: int, key: bytes, value: bytes) -> None:
    """Set the value of one key, of all possible CPUs for a per-CPU map."""
    key_buffer, new = ctypes.create_string_buffer(key, len(key)), ctypes.create_string_buffer(value, len(value))
    call(MAP_UPDATE_ELEM, _MapElem(map_fd=fd, key=_address(key_buffer), value=_address(new)))


def next_key(fd: int, key: bytes | None, key_size: int) -> bytes | None:
    """Return the key after `key`, or the first one for None; None at the end."""
    before = ctypes.create_string_buffer(key, key_size) if key is not None else None
    after = ctypes.create_string_buffer(key_size)
    try:
        call(MAP_GET_NEXT_KEY, _MapElem(map_fd=fd, key=_address(before) if before else 0, value=_address(after)))
    except FileNotFoundError:
        return None
    return after.raw


def delete(fd: int, key: bytes) -> None:
    """Remove a key, if present."""
    key_buffer = ctypes.create_string_buffer(key, len(key))
    try:
        call(MAP_DELETE_ELEM, _MapElem(map_fd=fd, key=_address(key_buffer)))
    except FileNotFoundError:
        return


class LookupBatch(NamedTuple):
    """Result of one LOOKUP_BATCH."""

    elements: int
    last: bool
    """Whether the end of the map was reached."""


def lookup_batch(fd: int, before: bytes | None, after: Any, keys: int, values: int, count: int) -> LookupBatch:
    """Copy up to `count` elements to the addresses `keys` and `values`; `before` and `after` carry the position.

    Raises OSError: ENOSPC when a hash bucket holds more elements than `count`, EINVAL where the kernel cannot do it.
    """
    position = ctypes.create_string_buffer(before, len(before)) if before is not None else None
    attr = _Batch(
        in_batch=_address(position) if position else 0,
        out_batch=_address(after),
        keys=keys,
        values=values,
        count=count,
        map_fd=fd,
    )
    try:
        call(MAP_LOOKUP_BATCH, attr)
    except FileNotFoundError:
        return LookupBatch(attr.count, last=True)
    return LookupBatch(attr.count, last=False)

"""The perf_event_open(2) system call, as much of it as counting on a CPU needs; layouts of include/uapi/linux/perf_event.h."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from typing import NamedTuple

HARDWARE, SOFTWARE = 0, 1
"""Types of events."""
_NUMBERS = {"x86_64": 298, "aarch64": 241, "riscv64": 241, "s390x": 331, "ppc64le": 319}
_SIZE = 64
"""PERF_ATTR_SIZE_VER0: all that is used here lies within the first version of the struct."""
_TOTAL_TIMES = 1 | 2
"""PERF_FORMAT_TOTAL_TIME_ENABLED and _RUNNING."""
_PINNED = 1 << 2
_CLOSE_ON_EXEC = 1 << 3
_ANY_TASK, _NO_GROUP = -1, -1

_libc = ctypes.CDLL(None, use_errno=True)


class Event(NamedTuple):
    """What is counted, as the kernel numbers it."""

    type: int
    config: int


class _Attr(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_uint32), ("size", ctypes.c_uint32), ("config", ctypes.c_uint64),
        ("sample_period", ctypes.c_uint64), ("sample_type", ctypes.c_uint64), ("read_format", ctypes.c_uint64),
        ("flags", ctypes.c_uint64), ("rest", ctypes.c_uint8 * 16),
    )  # fmt: skip


def open_on_cpu(event: Event, cpu: int) -> int:
    """Descriptor of an event that counts whatever runs on that CPU, pinned to a counter. Raises OSError."""
    number = _NUMBERS.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"the number of perf_event_open(2) on {platform.machine()} is not known")
    attr = _Attr(type=event.type, size=_SIZE, config=event.config, read_format=_TOTAL_TIMES, flags=_PINNED)
    assert ctypes.sizeof(attr) == _SIZE
    fd = int(_libc.syscall(number, ctypes.byref(attr), _ANY_TASK, cpu, _NO_GROUP, _CLOSE_ON_EXEC))
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return fd


def count(fd: int) -> int | None:
    """How far the event has counted; None where it has no counter to be pinned to, because others hold them all."""
    read = os.read(fd, 24)
    return int.from_bytes(read[:8], sys.byteorder) if read else None

"""Wraps perf_event_open(2): counting on a CPU and attaching a program to a kernel function.
Layouts are those of include/uapi/linux/perf_event.h. Standard library only, because the compiling child uses it too.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import sys
from pathlib import Path
from typing import NamedTuple

HARDWARE, SOFTWARE = 0, 1
"""Types of events."""
_NUMBERS = {"x86_64": 298, "aarch64": 241, "riscv64": 241, "s390x": 331, "ppc64le": 319}
_SIZE = 64
"""PERF_ATTR_SIZE_VER0: the fields in use belong to the first version of the struct."""
_TOTAL_TIMES = 1 | 2
"""PERF_FORMAT_TOTAL_TIME_ENABLED and _RUNNING."""
_PINNED = 1 << 2
_CLOSE_ON_EXEC = 1 << 3
_ANY_TASK, _NO_GROUP = -1, -1
_SET_BPF, _ENABLE = 0x40042408, 0x2400
"""PERF_EVENT_IOC_SET_BPF and _ENABLE, of x86 and arm64: the architectures of `kernel_fields.KPROBE_ARGUMENT_FIELDS`."""

_libc = ctypes.CDLL(None, use_errno=True)


class PerfEvent(NamedTuple):
    """Event by its type and number in the kernel."""

    type: int
    config: int


class _Attr(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_uint32), ("size", ctypes.c_uint32), ("config", ctypes.c_uint64),
        ("sample_period", ctypes.c_uint64), ("sample_type", ctypes.c_uint64), ("read_format", ctypes.c_uint64),
        ("flags", ctypes.c_uint64), ("wakeup", ctypes.c_uint64), ("function", ctypes.c_uint64),
    )  # fmt: skip


def open_on_cpu(event: PerfEvent, cpu: int) -> int:
    """Return the descriptor of an event that counts all tasks of that CPU, pinned to a counter. Raises OSError."""
    return _open(_Attr(type=event.type, config=event.config, read_format=_TOTAL_TIMES, flags=_PINNED), cpu)


def attach_to_function(program: int, function: str, *, returning: bool, sys_root: Path = Path("/sys")) -> int:
    """Return a descriptor that runs a program at the entry or return of a kernel function, on all CPUs, while it is open.

    Raises OSError if the kernel has no kprobes (CONFIG_KPROBES) or the function cannot be probed.
    """
    source = sys_root / "bus/event_source/devices/kprobe"
    number, bit = _number(source / "type", 1 << 32), _number(source / "format/retprobe", 64, "config:")
    name = ctypes.create_string_buffer(function.encode())
    fd = _open(_Attr(type=number, config=returning << bit, function=ctypes.addressof(name)), cpu=0)
    try:
        fcntl.ioctl(fd, _SET_BPF, program)
        fcntl.ioctl(fd, _ENABLE, 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def _number(path: Path, below: int, prefix: str = "") -> int:
    """Read a number from a file of sysfs. Raises OSError, also if the number is not below `below`."""
    text = path.read_bytes().strip().removeprefix(prefix.encode())
    if not text.isdigit() or not int(text) < below:
        raise OSError(errno.EINVAL, f"{prefix}{text.decode(errors='replace')} is not supported", str(path))
    return int(text)


def _open(attr: _Attr, cpu: int) -> int:
    number = _NUMBERS.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"the number of perf_event_open(2) on {platform.machine()} is not known")
    assert ctypes.sizeof(attr) == _SIZE
    attr.size = _SIZE
    fd = int(_libc.syscall(number, ctypes.byref(attr), _ANY_TASK, cpu, _NO_GROUP, _CLOSE_ON_EXEC))
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return fd


def read_count(fd: int) -> int | None:
    """Return the event's count; None if it has no counter, because all of them are in use."""
    read = os.read(fd, 24)
    return int.from_bytes(read[:8], sys.byteorder) if read else None

"""Reads and sets the EEVDF slice of threads by sched_getattr(2) and sched_setattr(2), which Python does not offer.
From Linux 6.12 on `sched_runtime` of a SCHED_OTHER or SCHED_BATCH thread is its slice, limited to 0.1 to 100 ms; 0 selects
the default (kernel/sched/fair.c, __setparam_fair()). Threads and processes that it starts inherit it. Older kernels ignore
the field.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import threading
from typing import NamedTuple

SLICE_POLICIES = (0, 3)
"""SCHED_OTHER and SCHED_BATCH: other policies have no slice."""
DEFAULT_SLICE = 0
"""Value that gives a thread the kernel's default slice again."""
_SYSTEM_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""Numbers of sched_setattr and sched_getattr."""
_KEEP_POLICY = 0x08
"""SCHED_FLAG_KEEP_POLICY: keep policy and reset-on-fork. Utilization clamps stay as they are without a flag of theirs."""
_PROBED_SLICE_NS = 700_001


class _SchedAttr(ctypes.Structure):
    """The struct sched_attr in its first version, without utilization clamps (include/uapi/linux/sched/types.h)."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("sched_policy", ctypes.c_uint32),
        ("sched_flags", ctypes.c_uint64),
        ("sched_nice", ctypes.c_int32),
        ("sched_priority", ctypes.c_uint32),
        ("sched_runtime", ctypes.c_uint64),
        ("sched_deadline", ctypes.c_uint64),
        ("sched_period", ctypes.c_uint64),
    )


_ATTR_BYTES = ctypes.sizeof(_SchedAttr)


class ThreadScheduling(NamedTuple):
    """Scheduling attributes of one thread."""

    policy: int
    nice: int
    slice_ns: int


class SchedulerCalls:
    """The two system calls, for threads of this PID namespace."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._set, self._get = _SYSTEM_CALLS.get(platform.machine(), (-1, -1))

    def read(self, thread: int) -> ThreadScheduling | None:
        """Return the attributes of a thread, 0 is the calling one; None if it has ended."""
        attr = _SchedAttr()
        if self._libc.syscall(self._get, thread, ctypes.byref(attr), _ATTR_BYTES, 0) != 0:
            return None
        return ThreadScheduling(attr.sched_policy, attr.sched_nice, attr.sched_runtime)

    def set_slice(self, thread: int, nice: int, slice_ns: int) -> None:
        """Set the slice. `nice` is the present value, which the call would change as well. A thread that has ended or has
        become a real-time thread is left alone. Raises PermissionError: threads of another user, or with a capability
        that this process lacks, need CAP_SYS_NICE (kernel/sched/syscalls.c, user_check_sched_setscheduler();
        security/commoncap.c, cap_safe_nice())."""
        attr = _SchedAttr(size=_ATTR_BYTES, sched_flags=_KEEP_POLICY, sched_nice=nice, sched_runtime=slice_ns)
        if self._libc.syscall(self._set, thread, ctypes.byref(attr), 0) != 0:
            code = ctypes.get_errno()
            if code not in (errno.ESRCH, errno.EINVAL):
                raise PermissionError(code, os.strerror(code))

    def default_slice_ns(self) -> int | None:
        """Return the present default slice, which depends on the number of CPUs; None if the kernel ignores slices. A
        thread of this process tries it, so that nothing else changes."""
        result: list[int | None] = []
        trial = threading.Thread(target=lambda: result.append(self._try_slice()), name="slice-trial")
        trial.start()
        trial.join()
        return result[0] if result else None

    def _try_slice(self) -> int | None:
        own = self.read(0)
        if own is None or own.policy not in SLICE_POLICIES:
            return None
        slices = []
        for requested in (_PROBED_SLICE_NS, DEFAULT_SLICE):
            try:
                self.set_slice(0, own.nice, requested)
            except PermissionError:
                return None
            held = self.read(0)
            slices.append(held.slice_ns if held is not None else 0)
        return slices[1] if slices[0] == _PROBED_SLICE_NS else None

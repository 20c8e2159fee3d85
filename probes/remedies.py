"""Explains why a probe cannot be loaded: refused forms, missing rights, a killed compiler; names the remedy."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from api.interfaces import KernelFeatureAbsent, Unavailable

OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_CAPABILITIES = "run as root, or with the capabilities BPF and PERFMON (in a pod: securityContext.capabilities.add)"
REMEDIES = {
    "permission": _CAPABILITIES,
    "perf_event": f"{_CAPABILITIES}; if kernel.perf_event_paranoid is 3 or more, some kernels (Debian's 6.12) require SYS_ADMIN"
    " as well: set it to 2",
    "no_bpf": "boot a kernel with CONFIG_BPF_SYSCALL",
    "no_map": "raise the memory limit of this process's cgroup, or RLIMIT_MEMLOCK on a kernel before 5.11",
    "files": "raise the limit of open files: ulimit -n 1024",
    "btf": "boot a kernel with CONFIG_DEBUG_INFO_BTF (Linux 5.4 and later; distributions have it on)",
    "bcc": "install the distribution's package: apt-get install python3-bpfcc (Fedora, RHEL: python3-bcc);"
    " the package bcc of pip is an unrelated library",
    "refused": "use Linux 5.5 or later; without a probe, /proc/PID/schedstat gives sums",
}

CREATE_MAP = "create map"
"""How the stage of a refusal begins if a map could not be created. The child has created a small one before, so that rights
are not what it lacks."""
KERNEL_REFUSALS = ("no_bpf", "btf", "refused")
"""Kinds of refusals that only another kernel remedies."""
UNSUPPORTED_ERRNOS = (errno.ENOENT, errno.EINVAL, errno.E2BIG, errno.EOPNOTSUPP, 524)
"""Errors of the kernel for a missing field, tracepoint, program type or helper (524 is its internal ENOTSUPP). Missing
rights, lack of memory and verifier errors give others; the compiler gives 0."""


class FormRefusal(msgspec.Struct, frozen=True):
    """Why one form does not run on this machine."""

    form: str
    stage: str
    reason: str
    errno: int
    log: str
    """Tail of the log of the verifier or the compiler."""

    def __str__(self) -> str:
        lines = [line.strip() for line in self.log.splitlines() if line and not line.startswith("processed ")]
        reasons = [line for line in lines if " error: " in line][:1] or lines[-1:]
        return f"{self.form}: {self.stage}: {self.reason}" + "".join(f" ({line})" for line in reasons)


class CompilerLost(Unavailable):
    """The compiling child was killed, or timed out: another one may succeed."""


@contextlib.contextmanager
def descriptor_limit_as_unavailable() -> Iterator[None]:
    """Convert a lack of descriptors to Unavailable."""
    try:
        yield
    except OSError as error:
        if error.errno not in OUT_OF_DESCRIPTORS:
            raise
        raise Unavailable(f"a probe cannot be loaded: {error.strerror}", REMEDIES["files"]) from error


def explain_child_exit(code: int, errors: IO[bytes]) -> Unavailable:
    """Return the error of a child that ended with this status (`Popen.wait`) and standard error."""
    if code < 0:
        return CompilerLost(
            f"the compiling child was killed by signal {-code}",
            "raise the memory limit: BCC needs 200 MiB for a second while a probe is loaded; then start the agent again",
        )
    errors.seek(0)
    last_line = errors.read().decode(errors="replace").strip().splitlines()[-1:]
    advice = "check that it is the distribution's Python 3.9 or later, with its package python3-bpfcc"
    full = any(os.strerror(number) in line for number in OUT_OF_DESCRIPTORS for line in last_line)
    reason = f"the compiling child ended with status {code}" + "".join(f": {line}" for line in last_line)
    return Unavailable(reason, REMEDIES["files"] if full else advice)


def explain_refusals(
    kind: str,
    reason: str,
    refused: Sequence[FormRefusal],
    advice: str,
    lockdown: Path = Path("/sys/kernel/security/lockdown"),
) -> Unavailable:
    """Return the error of a child that refused a job, from the kind of failure and the refused forms.

    `advice` replaces the general remedy if the kernel refused every form.
    """
    if refused:
        reason += ": " + "; ".join(str(refusal) for refusal in refused)
        if all(refusal.errno == errno.EPERM and not refusal.stage.startswith(CREATE_MAP) for refusal in refused):
            kind = "permission"
        elif any(refusal.errno in OUT_OF_DESCRIPTORS for refusal in refused):
            kind = "files"
        elif any(refusal.stage.startswith(CREATE_MAP) for refusal in refused):
            kind = "no_map"
        elif any(refusal.errno == errno.EACCES and refusal.stage.startswith("attach") for refusal in refused):
            kind = "perf_event"  # the verifier reports EACCES for programs as well
    remedy = advice if kind == "refused" and advice else REMEDIES[kind]
    if kind == "permission" and lockdown.exists() and "[confidentiality]" in lockdown.read_text():
        remedy = (
            "the kernel is locked down for confidentiality, which forbids BPF to read it; boot with lockdown=integrity"
        )
    if kind in KERNEL_REFUSALS and all(refusal.errno in UNSUPPORTED_ERRNOS for refusal in refused):
        return KernelFeatureAbsent(reason, remedy)
    return Unavailable(reason, remedy)

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
    "perf_event": f"{_CAPABILITIES}; where kernel.perf_event_paranoid is 3 or more, some kernels (Debian's 6.12) want SYS_ADMIN"
    " as well: set it to 2",
    "no_bpf": "boot a kernel with CONFIG_BPF_SYSCALL",
    "no_map": "raise the memory limit of this process's cgroup, or RLIMIT_MEMLOCK on a kernel before 5.11",
    "files": "raise the limit of open files: ulimit -n 1024",
    "btf": "boot a kernel with CONFIG_DEBUG_INFO_BTF (Linux 5.4 and later; distributions have it on)",
    "bcc": "install the distribution's package: apt-get install python3-bpfcc (Fedora, RHEL: python3-bcc);"
    " the package named bcc that pip installs is something else",
    "refused": "use Linux 5.5 or later; without a probe, /proc/PID/schedstat gives sums",
}

KERNEL_REFUSALS = ("no_bpf", "btf", "refused")
"""What only another kernel remedies."""
UNSUPPORTED_ERRNOS = (errno.ENOENT, errno.EINVAL, errno.E2BIG, errno.EOPNOTSUPP, 524)
"""What a kernel says of a field, tracepoint, kind of program or helper that it does not have (524 is its ENOTSUPP). Not of
want of rights or room, nor of what its verifier holds for a mistake; the compiler says 0."""


class FormRefusal(msgspec.Struct, frozen=True):
    """Why one form does not run here."""

    form: str
    stage: str
    reason: str
    errno: int
    log: str
    """Tail of what the verifier or the compiler said."""

    def __str__(self) -> str:
        lines = [line.strip() for line in self.log.splitlines() if line and not line.startswith("processed ")]
        said = [line for line in lines if " error: " in line][:1] or lines[-1:]
        return f"{self.form}: {self.stage}: {self.reason}" + "".join(f" ({line})" for line in said)


class CompilerLost(Unavailable):
    """A child was killed, or did not end: another one may succeed."""


@contextlib.contextmanager
def descriptor_limit_as_unavailable() -> Iterator[None]:
    """Within, a lack of descriptors is Unavailable."""
    try:
        yield
    except OSError as error:
        if error.errno not in OUT_OF_DESCRIPTORS:
            raise
        raise Unavailable(f"a probe cannot be loaded: {error.strerror}", REMEDIES["files"]) from error


def explain_child_exit(code: int, errors: IO[bytes]) -> Unavailable:
    """Of a child that ended with this status, as `Popen.wait` gives it, and wrote this."""
    if code < 0:
        return CompilerLost(
            f"the compiling child was killed by signal {-code}",
            "give it memory: BCC needs 200 MiB for a second while a probe is loaded; then start again",
        )
    errors.seek(0)
    said = errors.read().decode(errors="replace").strip().splitlines()[-1:]
    advice = "check that it is the distribution's Python 3.9 or later, with its package python3-bpfcc"
    full = any(os.strerror(number) in line for number in OUT_OF_DESCRIPTORS for line in said)
    reason = f"the compiling child ended with status {code}" + "".join(f": {line}" for line in said)
    return Unavailable(reason, REMEDIES["files"] if full else advice)


def explain_refusals(
    kind: str,
    reason: str,
    refused: Sequence[FormRefusal],
    advice: str,
    lockdown: Path = Path("/sys/kernel/security/lockdown"),
) -> Unavailable:
    """Of a child that could not do its job: what kind of failure, and why each form was refused. `advice` goes before ours."""
    if refused:
        reason += ": " + "; ".join(str(refusal) for refusal in refused)
        if all(refusal.errno == errno.EPERM for refusal in refused):
            kind = "permission"
        elif any(refusal.errno in OUT_OF_DESCRIPTORS for refusal in refused):
            kind = "files"
        elif any(refusal.errno == errno.EACCES and refusal.stage.startswith("attach") for refusal in refused):
            kind = "perf_event"  # the verifier says EACCES too, of programs
    remedy = advice if kind == "refused" and advice else REMEDIES[kind]
    if kind == "permission" and lockdown.exists() and "[confidentiality]" in lockdown.read_text():
        remedy = (
            "the kernel is locked down for confidentiality, which forbids BPF to read it; boot with lockdown=integrity"
        )
    if kind in KERNEL_REFUSALS and all(refusal.errno in UNSUPPORTED_ERRNOS for refusal in refused):
        return KernelFeatureAbsent(reason, remedy)
    return Unavailable(reason, remedy)

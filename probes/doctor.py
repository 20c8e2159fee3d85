"""Checks the node's support for probes: BTF, BCC, capabilities and every probe, each finding with a remedy.
Versions are not trusted: every form of run-queue latency and every other probe is loaded and closed again.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from api.diagnostics import DoctorCheck
from api.interfaces import Unavailable
from probes import registry, runqlat
from probes.btf import VMLINUX, Btf, BtfError
from probes.loader import CHILD_PYTHON, Compiler, sharing
from probes.migrations import ONE_NODE
from probes.remedies import REMEDIES

CAPABILITY_NUMBERS = {
    "DAC_READ_SEARCH": 2,
    "NET_ADMIN": 12,
    "SYS_PTRACE": 19,
    "SYS_ADMIN": 21,
    "PERFMON": 38,
    "BPF": 39,
}
"""Numbers of include/uapi/linux/capability.h; names without CAP_, as in Kubernetes."""
_IMPLIED_BY = {"BPF": "SYS_ADMIN", "PERFMON": "SYS_ADMIN"}
"""Older, larger capabilities that include the key."""


def missing_capabilities(names: Iterable[str], proc: Path = Path("/proc")) -> tuple[str, ...]:
    """Return the capabilities that this process lacks; none if that cannot be read."""
    try:
        lines = (proc / "self/status").read_text().splitlines()
        effective = int(next(line for line in lines if line.startswith("CapEff:")).split()[1], 16)
    except (OSError, ValueError, IndexError, StopIteration):
        return ()
    return tuple(name for name in names if not _is_effective(name, effective))


def _is_effective(name: str, effective: int) -> bool:
    larger = _IMPLIED_BY.get(name, name)
    return bool(effective >> CAPABILITY_NUMBERS[name] & 1 or effective >> CAPABILITY_NUMBERS[larger] & 1)


_IMPORT_BCC = "import bcc; print(bcc.BPF and bcc.__version__)"
_TIMEOUT_S = 30.0


def probe_checks(
    *, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX, proc: Path = Path("/proc")
) -> tuple[DoctorCheck, ...]:
    """Check BTF, BCC, capabilities and every probe; each is compiled. Takes a few seconds."""
    with Compiler(child_python, cached=False) as compiler, sharing(compiler):
        return (
            _check_btf(btf),
            _check_bcc(child_python),
            *(_check_form(form, child_python, btf) for form in runqlat.FORMS),
            *(_check_probe(row, child_python, btf, proc) for row in registry.PROBES),
        )


def _check_btf(path: Path) -> DoctorCheck:
    try:
        Btf.read(path).field("task_struct", "pid")
    except BtfError as error:
        return DoctorCheck(name="kernel types (BTF)", ok=False, detail=str(error), remedy=REMEDIES["btf"])
    return DoctorCheck(name="kernel types (BTF)", ok=True, detail=str(path))


def _check_bcc(python: Path) -> DoctorCheck:
    name = "compiler (python3-bpfcc)"
    try:
        run = subprocess.run(
            [python, "-s", "-E", "-c", _IMPORT_BCC], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return DoctorCheck(name=name, ok=False, detail=f"{python} cannot be run: {error}", remedy=REMEDIES["bcc"])
    if run.returncode != 0:
        last_line = run.stderr.strip().splitlines()[-1:]
        return DoctorCheck(name=name, ok=False, detail=f"{python}: {''.join(last_line)}", remedy=REMEDIES["bcc"])
    return DoctorCheck(name=name, ok=True, detail=f"BCC {run.stdout.strip()} in {python}")


def _check_form(form: str, python: Path, btf: Path) -> DoctorCheck:
    name = f"run-queue probe, form {form}"
    try:
        source = runqlat.open_runqlat(forms=(form,), child_python=python, btf=btf)
    except Unavailable as error:
        return DoctorCheck(name=name, ok=False, detail=error.reason, remedy=error.remedy)
    source.close()
    return DoctorCheck(name=name, ok=True, detail="loads and attaches")


def _check_probe(row: registry.ProbeEntry, python: Path, btf: Path, proc: Path) -> DoctorCheck:
    """Load the probe in the best form that runs. Missing capabilities are the remedy whatever the error."""
    name, needs = f"probe {row.name}", ", ".join(row.capabilities)
    try:
        probe = row.open(child_python=python, btf=btf)
    except Unavailable as error:
        lacking = ", ".join(missing_capabilities(row.capabilities, proc))
        if row.opt_in and not lacking:  # a missing optional probe is no fault
            return DoctorCheck(name=name, ok=True, detail=f"optional: {error.reason}", remedy=error.remedy)
        remedy = (
            f"give the capabilities {lacking} ({row.name} needs {needs}), or run as root" if lacking else error.remedy
        )
        return DoctorCheck(name=name, ok=False, detail=error.reason, remedy=f"{remedy}; until then: {row.fallback}")
    probe.close()
    if probe.form == ONE_NODE:
        return DoctorCheck(
            name=name, ok=True, detail="not needed: this machine has one NUMA node, so no task moves between two"
        )
    return DoctorCheck(name=name, ok=True, detail=f"loads and attaches as {probe.form}; needs {needs}")

"""What this node can and cannot do for the probes, one finding a line; each failed one says what to do.

Nothing is concluded from versions: every form of run-queue waits and every other probe is loaded for real and closed again.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from api.checks import Check
from api.ports import Unavailable
from probes import registry, runqlat
from probes.btf import VMLINUX, Btf, BtfError
from probes.capabilities import missing
from probes.loader import CHILD_PYTHON, Compiler, sharing
from probes.migrations import ONE_NODE
from probes.remedies import REMEDIES

_IMPORT_BCC = "import bcc; print(bcc.BPF and bcc.__version__)"
_TIMEOUT_S = 30.0


def checks(*, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX, proc: Path = Path("/proc")) -> tuple[Check, ...]:
    """BTF, BCC, capabilities and every probe. Takes a few seconds."""
    with Compiler(child_python) as compiler, sharing(compiler):
        return (
            _check_btf(btf),
            _check_bcc(child_python),
            *(_check_form(form, child_python, btf) for form in runqlat.FORMS),
            *(_check_probe(row, child_python, btf, proc) for row in registry.ROWS),
        )


def _check_btf(path: Path) -> Check:
    try:
        Btf.read(path).field("task_struct", "pid")
    except BtfError as error:
        return Check(name="kernel types (BTF)", ok=False, detail=str(error), remedy=REMEDIES["btf"])
    return Check(name="kernel types (BTF)", ok=True, detail=str(path))


def _check_bcc(python: Path) -> Check:
    name = "compiler (python3-bpfcc)"
    try:
        run = subprocess.run(
            [python, "-s", "-E", "-c", _IMPORT_BCC], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(name=name, ok=False, detail=f"{python} cannot be run: {error}", remedy=REMEDIES["bcc"])
    if run.returncode != 0:
        said = run.stderr.strip().splitlines()[-1:]
        return Check(name=name, ok=False, detail=f"{python}: {''.join(said)}", remedy=REMEDIES["bcc"])
    return Check(name=name, ok=True, detail=f"BCC {run.stdout.strip()} in {python}")


def _check_form(form: str, python: Path, btf: Path) -> Check:
    name = f"run-queue probe, form {form}"
    try:
        source = runqlat.open_waits(forms=(form,), child_python=python, btf=btf)
    except Unavailable as error:
        return Check(name=name, ok=False, detail=error.reason, remedy=error.remedy)
    source.close()
    return Check(name=name, ok=True, detail="loads and attaches")


def _check_probe(row: registry.Row, python: Path, btf: Path, proc: Path) -> Check:
    """The probe in the best form that runs. Where capabilities are missing, they are the remedy whatever else failed."""
    name, needs = f"probe {row.name}", ", ".join(row.capabilities)
    try:
        probe = row.open(child_python=python, btf=btf)
    except Unavailable as error:
        lacking = ", ".join(missing(row.capabilities, proc))
        if row.asked and not lacking:  # what nobody needs to have is nothing wrong
            return Check(name=name, ok=True, detail=f"optional: {error.reason}", remedy=error.remedy)
        remedy = (
            f"give the capabilities {lacking} ({row.name} needs {needs}), or run as root" if lacking else error.remedy
        )
        return Check(name=name, ok=False, detail=error.reason, remedy=f"{remedy}; until then: {row.fallback}")
    probe.close()
    if probe.form == ONE_NODE:
        return Check(
            name=name, ok=True, detail="not needed: this machine has one NUMA node, so no task moves between two"
        )
    return Check(name=name, ok=True, detail=f"loads and attaches as {probe.form}; needs {needs}")

"""What this node can and cannot do for the probes, one finding a line; each failed one says what to do."""

from __future__ import annotations

import subprocess
from pathlib import Path

from api.checks import Check
from api.ports import Unavailable
from probes import runqlat
from probes.btf import VMLINUX, Btf, BtfError
from probes.loader import CHILD_PYTHON, REMEDIES

_IMPORT_BCC = "import bcc; print(bcc.BPF and bcc.__version__)"
_TIMEOUT_S = 30.0


def checks(*, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX) -> tuple[Check, ...]:
    """BTF, BCC, and every form of every probe, each tried for real and closed again. Takes a second or two."""
    return (
        _check_btf(btf),
        _check_bcc(child_python),
        *(_check_form(form, child_python, btf) for form in runqlat.FORMS),
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

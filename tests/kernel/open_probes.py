"""Opens probes in tests, and reads what their results are compared with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from api.interfaces import Probe, Unavailable
from probes import bpf
from probes.remedies import REMEDIES
from probes.runqlat import RunqLatencyProbe, open_runqlat
from tests.builders.waiting import until
from tests.kernel.real_cgroups import JOIN, TestCgroup, require_root

PINNED = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
"""A program that uses all the time it gets on one CPU."""
ROOT = Path(__file__).resolve().parents[2]
LAST_CPU = max(os.sched_getaffinity(0))
_MACHINE = ("permission", "no_bpf", "btf", "bcc")
"""Kinds of refusal that concern every form of a probe."""
P = TypeVar("P", bound=Probe | RunqLatencyProbe)


def started_in(group: TestCgroup, code: str, *argv: str, prefix: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start a Python program inside a cgroup, with its output as a pipe."""
    procs = ":".join(str(directory / "cgroup.procs") for directory in group.dirs)
    process = subprocess.Popen(
        [sys.executable, "-c", JOIN, procs, *prefix, sys.executable, "-c", code, *argv], stdout=subprocess.PIPE
    )
    group.processes.append(process)
    return process


@contextmanager
def opened(opener: Callable[..., P], *forms: str, lacking: str = "") -> Iterator[P]:
    """Open a probe in the first of these forms; skip the test if the machine cannot run any form, or lacks `lacking`."""
    require_root()
    try:
        source = opener(forms=forms) if forms else opener()
    except Unavailable as error:
        machine = error.remedy in {REMEDIES[kind] for kind in _MACHINE} or error.remedy.startswith("boot ")
        if machine or (lacking and lacking in error.reason):
            pytest.skip(f"probes cannot run here: {error.reason}; {error.remedy}")
        raise
    try:
        yield source
    finally:
        source.close()


def probe(*forms: str) -> AbstractContextManager[RunqLatencyProbe]:
    """Open the run-queue probe in the first of these forms, as `opened` does."""
    return opened(open_runqlat, *forms)


def probe_fixture(opener: Callable[..., P], forms: Sequence[str], *, lacking: str = "") -> Any:
    """A fixture that yields the probe in each of these forms; `lacking` as for `opened`."""

    @pytest.fixture(params=forms)
    def in_each_form(request: pytest.FixtureRequest) -> Iterator[P]:
        with opened(opener, request.param, lacking=lacking) as source:
            assert source.form == request.param
            yield source

    return in_each_form


def having(names: tuple[str, ...], *command: str) -> str:
    """Run a program with only these capabilities and return its output."""
    require_root()
    capabilities = ",".join(["-all", *(f"+{name.lower()}" for name in names)])
    argv = ["setpriv", f"--bounding-set={capabilities}", f"--inh-caps={capabilities}", sys.executable, "-c", *command]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Schedstat:
    """Growth of /proc/PID/schedstat of one process since this object was created."""

    def __init__(self, pid: int) -> None:
        self._file = Path(f"/proc/{pid}/schedstat")
        self._start = self._read()

    def _read(self) -> tuple[int, int, int]:
        ran, waited, runs = self._file.read_text().split()
        return int(ran), int(waited), int(runs)

    def growth(self) -> tuple[int, int, int]:
        """Return nanoseconds run, nanoseconds waited, and number of times on a CPU."""
        ran, waited, runs = (now - before for now, before in zip(self._read(), self._start, strict=True))
        return ran, waited, runs


def program_ids(source: RunqLatencyProbe) -> set[int]:
    """Return the kernel's ids of the probe's programs; other running probes may have the same names."""
    return {info.id for info in source.stats().values()}


def unloaded(ids: set[int]) -> bool:
    """Wait until these programs are unloaded: the kernel frees them some milliseconds after the last descriptor."""
    return until(lambda: not ids & {info.id for info in bpf.programs()})

"""Fixtures of the guest's tests: cgroups, disks, and every BPF program, built once.

Compiling is ten times slower under emulation. So each probe is opened once in each form, in two compiling children, and all
of them at the same time: then the forms see the same events, and must agree.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import pytest

from agent.sensors.cgroup.hierarchy import Hierarchy, detect_hierarchy
from api.interfaces import Unavailable
from probes.counters import open_counters
from probes.deferred_loading import COMPILE_TIMEOUT_S
from probes.loader import Compiler, sharing
from probes.registry import BY_NAME
from probes.runqlat import open_runqlat
from tests.kernel.test_counters import CLOCKS
from tests.vm.workloads import KnobWriters, knob_writers

T = TypeVar("T")


@pytest.fixture(scope="session")
def hierarchy() -> Hierarchy:
    """Hierarchy of version 2 only."""
    result = detect_hierarchy()
    assert (result.mode, result.v1) == ("v2", {})
    return result


@pytest.fixture(scope="session")
def series() -> str:
    """Series of the kernel, such as `6.1`."""
    return ".".join(os.uname().release.split(".")[:2])


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[KnobWriters]:
    """The agent's writers of knobs."""
    with knob_writers(tmp_path / "state") as writers:
        yield writers


WORKERS = 2
"""Number of compiling children."""
ONLY_FORM = {"threads": "iterator"}
"""Forms of the probes that have one only, so that none can be selected."""


def forms_of(name: str) -> tuple[str, ...]:
    """Return all forms of a probe in its order of preference."""
    if name in ONLY_FORM:
        return (ONLY_FORM[name],)
    module = "probes.runqlat" if name == "runqlat" else BY_NAME[name].open.__module__
    forms: tuple[str, ...] = sys.modules[module].FORMS
    return forms


class Programs:
    """The run-queue probe and those of the registry, by name and form. The probe of hardware counters gets software events,
    because an emulated CPU has no others."""

    def __init__(self) -> None:
        self._owned = ExitStack()
        self._compilers: SimpleQueue[Compiler] = SimpleQueue()
        for _ in range(WORKERS):
            self._compilers.put(self._owned.enter_context(Compiler(timeout_s=COMPILE_TIMEOUT_S)))
        self._opened: dict[str, dict[str, Any]] = {}
        self.refused: dict[tuple[str, str], str] = {}
        """Reason why the kernel refuses a form, by probe and form."""

    def __call__(self, name: str) -> Mapping[str, Any]:
        """Return the probe in every form that this kernel accepts."""
        self.open((name,))
        return self._opened[name]

    def open(self, names: Iterable[str]) -> None:
        """Open these probes in parallel."""
        new = [name for name in names if name not in self._opened]
        self._opened.update((name, {}) for name in new)
        with ThreadPoolExecutor(WORKERS) as workers:
            list(workers.map(self._open, *zip(*((name, form) for name in new for form in forms_of(name)), strict=True)))

    def compiled(self, load: Callable[[], T]) -> T:
        """Run `load` with a compiling child that runs already."""
        compiler = self._compilers.get()
        try:
            with sharing(compiler):
                return load()
        finally:
            self._compilers.put(compiler)

    def close(self) -> None:
        for probe in (probe for probes in self._opened.values() for probe in probes.values()):
            probe.close()
        self._owned.close()

    def _open(self, name: str, form: str) -> None:
        opener: Callable[..., Any]
        if name == "runqlat":
            opener = open_runqlat
        elif name == "counters":
            opener = partial(open_counters, events=CLOCKS)
        else:
            opener = BY_NAME[name].open
        selected = {} if name in ONLY_FORM else {"forms": (form,)}
        try:
            self._opened[name][form] = self.compiled(partial(opener, **selected))
        except Unavailable as error:
            self.refused[name, form] = error.reason


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    created = Programs()
    yield created
    created.close()

"""What the tests of the guest share: its cgroups and disks, and each BPF program built once for a module of tests.

Compiling is ten times slower under emulation. So there is one compiling child for all, and a module opens each probe in each
form once, all at the same time: then the forms have seen the same events, and must agree.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent.hierarchy import Hierarchy, detect
from api.ports import Unavailable
from probes import counters, runqlat
from probes.loader import Compiler, sharing
from probes.registry import BY_NAME
from tests.kernel.test_counters import CLOCKS


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What is marked `vm` writes where only a machine of its own may be written to."""
    if item.get_closest_marker("vm") and not os.environ.get("DIOPTASE_VM"):
        pytest.fail("this needs a machine of its own: python -m tests.vm boots one and runs it there", pytrace=False)


@pytest.fixture(scope="session")
def hierarchy() -> Hierarchy:
    """Version 2 and nothing else."""
    found = detect()
    assert (found.mode, found.v1) == ("v2", {})
    return found


@pytest.fixture(scope="session")
def series() -> str:
    """Of the kernel: `6.1`."""
    return ".".join(os.uname().release.split(".")[:2])


@pytest.fixture(scope="session")
def data_disk() -> tuple[str, Path]:
    """Number of the disk whose serial is `data`, as io.max wants it, and where its file system is."""
    disks = {(disk / "serial").read_text().strip(): disk for disk in Path("/sys/block").glob("vd*")}
    return (disks["data"] / "dev").read_text().strip(), Path("/run/data")


VARIANTS: Mapping[str, Callable[..., Any]] = {
    "runqlat": runqlat.open_waits,
    "latency": partial(runqlat.open_waits, blame=False),
    "counters": partial(counters.open_counters, events=CLOCKS),
}
"""Beside the registry: run-queue waits with and without blame, and counters with software events, because an emulated CPU has
none in hardware."""


def forms_of(name: str) -> tuple[str, ...]:
    """All that a probe has, in its order of preference."""
    module = "probes.runqlat" if name in ("runqlat", "latency") else BY_NAME[name].open.__module__
    forms: tuple[str, ...] = sys.modules[module].FORMS
    return forms


class Programs:
    """Probes of this module's tests, by name and form."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._opened: dict[str, dict[str, Any]] = {}
        self.refused: dict[tuple[str, str], str] = {}
        """Why the kernel does not take a form."""

    def __call__(self, name: str) -> Mapping[str, Any]:
        """The probe in every form that this kernel takes."""
        if name not in self._opened:
            opened = self._opened[name] = {}
            for form in forms_of(name):
                try:
                    with sharing(self._compiler):
                        opened[form] = (VARIANTS.get(name) or BY_NAME[name].open)(forms=(form,))
                except Unavailable as error:
                    self.refused[name, form] = error.reason
        return self._opened[name]

    def close(self) -> None:
        for probes in self._opened.values():
            for probe in probes.values():
                probe.close()


@pytest.fixture(scope="session")
def compiler() -> Iterator[Compiler]:
    with Compiler() as child:
        yield child


@pytest.fixture(scope="module")
def programs(compiler: Compiler) -> Iterator[Programs]:
    made = Programs(compiler)
    yield made
    made.close()

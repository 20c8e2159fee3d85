"""Katalyst's own client: built once from the module at the version in client/go.mod, run, and what it stored looked up."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parent / "client"
PORT = 9002
"""The only one that the client asks."""
MODULE = "github.com/kubewharf/katalyst-core"
BUILD_S = 1800
"""A cold build took 190 s on two busy cores, 150 s of CPU, and 490 MiB of module cache."""


def build() -> Path:
    """The program, or a skip that says what this machine lacks. Built again only when its source has changed."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("go is not installed: the stock client cannot be built")
    sources = sorted(SOURCE.iterdir())
    key = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dioptase-tests"
    program = cache / f"malachite-client-{key}"
    if not program.exists():
        cache.mkdir(parents=True, exist_ok=True)
        fetched = subprocess.run(
            [go, "mod", "download", MODULE], cwd=SOURCE, capture_output=True, text=True, check=False
        )
        if fetched.returncode:
            pytest.skip(f"the module of the stock client cannot be had: {fetched.stderr.strip()[-500:]}")
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            created = Path(scratch) / "client"
            built = subprocess.run(
                [go, "build", "-mod=readonly", "-o", str(created), "."],
                cwd=SOURCE, capture_output=True, text=True, check=False, timeout=BUILD_S,
            )  # fmt: skip
            assert built.returncode == 0, built.stderr
            created.rename(program)
    return program


class Stored:
    """The client's metric store. A metric that it does not have fails the test that asks for it."""

    def __init__(self, maps: dict[str, Any], log: str) -> None:
        self._maps, self.log = maps, log

    def node(self, name: str) -> float:
        return self._value("nodeMetricMap", name)

    def numa(self, node: int, name: str) -> float:
        return self._value("numaMetricMap", str(node), name)

    def cpu(self, cpu: int, name: str) -> float:
        return self._value("cpuMetricMap", str(cpu), name)

    def device(self, device: str, name: str) -> float:
        return self._value("deviceMetricMap", device, name)

    def network(self, interface: str, name: str) -> float:
        return self._value("networkMetricMap", interface, name)

    def container(self, uid: str, name: str) -> float:
        return self._value("podContainerMetricMap", uid, "c", name)

    def container_numa(self, uid: str, node: int, name: str) -> float:
        return self._value("podContainerNumaMetricMap", uid, "c", str(node), name)

    def cgroup(self, path: str, name: str) -> float:
        return self._value("cgroupMetricMap", path, name)

    def cgroup_numa(self, path: str, node: int, name: str) -> float:
        return self._value("cgroupNumaMetricMap", path, str(node), name)

    def text(self, name: str) -> Any:
        return self._maps["stringIndexedMetricMap"][name]

    def keys(self, *where: str) -> set[str]:
        actual: Any = self._maps
        for key in where:
            actual = actual.get(key, {})
        return set(actual)

    def count(self) -> int:
        """How many metrics there are."""

        def inside(value: Any) -> int:
            if isinstance(value, dict) and "value" not in value:
                return sum(map(inside, value.values()))
            return 1

        return inside(self._maps)

    def _value(self, *where: str) -> float:
        actual: Any = self._maps
        for key in where:
            assert key in actual, f"the client stored no {key} of {where}; it has {sorted(actual)[:40]}"
            actual = actual[key]
        return float(actual["value"])


def run(program: Path, *, pods: Sequence[str], paths: Sequence[str], rounds: int, reclaim: str) -> Stored:
    """What the client stored after so many cycles, five seconds apart."""
    argv = [str(program), "-rounds", str(rounds), "-reclaim", reclaim]
    argv += [word for pod in pods for word in ("-pod", pod)]
    argv += [word for path in paths for word in ("-path", path)]
    ran = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return Stored(json.loads(ran.stdout), ran.stderr)

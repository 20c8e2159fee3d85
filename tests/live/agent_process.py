"""Starts real agent processes and observes them from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.builders.waiting import PATIENCE_S, until

DIOPTASE = str(Path(sys.executable).with_name("dioptase"))


def pods_file(path: Path, online: str, batch: str) -> Path:
    """Write a pods file with one online and one reclaimed pod in these cgroups."""
    return write_pods(path, {online: "shared_cores", batch: "reclaimed_cores"}, ("web", "batch"))


def write_pods(path: Path, levels: Mapping[str, str], names: Sequence[str] = ()) -> Path:
    """Write a pods file with one pod per cgroup, of the given QoS level."""
    pods = [
        {"name": name, "annotations": {"katalyst.kubewharf.io/qos_level": level}, "containers": [{"cgroup": cgroup}]}
        for name, (cgroup, level) in zip(names or [f"pod-{n}" for n in range(len(levels))], levels.items(), strict=True)
    ]
    path.write_bytes(msgspec.yaml.encode({"pods": pods}))
    return path


class Agent:
    """`dioptase agent` with options, on a port of its own; killed at the end if it still runs."""

    def __init__(self, *options: str, prefix: Sequence[str] = (), env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*prefix, DIOPTASE, "agent", "--listen", "127.0.0.1:0", *options],
            stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})},
        )  # fmt: skip
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    @property
    def log(self) -> str:
        return "".join(self.lines)

    @property
    def url(self) -> str:
        """Return the agent's URL, once its log has it."""
        until(lambda: "page, API and metrics on" in self.log, lambda: f"the agent serves: {self.log}")
        result = re.search(r"http://\S+", self.log)
        assert result
        return result[0]

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S / 4) as answer:
            return str(answer.read().decode())

    def view(self) -> dict[str, Any]:
        """Return the latest cycle, at the earliest the second one, which has rates."""
        observed: dict[str, Any] = {}

        def ready() -> bool:
            try:
                observed.update(json.loads(self.get("/api/v1/view")))
            except OSError:
                return False
            return int(observed["seq"]) >= 2

        until(ready, lambda: f"a second round: {self.log}")
        return observed

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout=PATIENCE_S)

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(iter(self.process.stderr.readline, ""))

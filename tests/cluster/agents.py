"""Runs `dioptase agent` in a node, where the kubelet, the runtime and their sockets have their usual paths."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cluster.daemons import Late, wait
from tests.cluster.node import Node

ROOT = Path(__file__).resolve().parents[2]
PORT = 9109


class Agent:
    """One agent process; `end` waits until it has restored everything."""

    def __init__(self, node: Node, folder: Path, settings: dict[str, Any], *words: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.node, self.folder, self.state = node, folder, folder / "state"
        self.log = folder / "agent.log"
        kubelet = {"url": f"http://{node.address}:10255", "cgroupRoot": node.cgroup_root, **settings.get("kubelet", {})}
        self.config = folder / "settings.yaml"
        self.config.write_text(json.dumps({"probes": [], **settings, "kubelet": kubelet}))
        self._words = (
            sys.executable, "-c", "from cli.main import main; main()", "agent", "--kubelet", "--act", "on",
            "--config", self.config, "--state-dir", self.state, "--listen", f"127.0.0.1:{PORT}", *words,
        )  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process and wait for its first cycle. Raises Late with its log."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.node.words(*self._words),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT,
                env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(self.folder)},
            )  # fmt: skip
        try:
            wait("a round of the agent", lambda: self._process.poll() is not None or self.metrics(), 40)  # type: ignore[union-attr]
        except Late as error:
            raise Late(f"{error}: {self.log_tail()}") from None
        if self._process.poll() is not None:
            raise Late(f"the agent ended: {self.log_tail()}")

    def end(self) -> int:
        """Send SIGTERM and return the exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(30)

    def kill(self) -> None:
        """Kill the process, so that it restores nothing."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)

    def __enter__(self) -> Agent:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self.end()

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def ask(self, path: str) -> str:
        """Return the response of its HTTP server."""
        return self.node.run("busybox", "wget", "-q", "-O", "-", f"http://127.0.0.1:{PORT}{path}")

    def source(self, name: str) -> bool | None:
        """Return whether a source is healthy; None if there is none of that name."""
        results = [up for key, up in self.metrics().items() if key.startswith(f'dioptase_source_up{{source="{name}"')]
        return bool(results[0]) if results else None

    def metrics(self) -> dict[str, float]:
        """Return the samples of /metrics by name and labels in text format."""
        lines = (line for line in self.ask("/metrics").splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

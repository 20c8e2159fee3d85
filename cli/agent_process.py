"""Runs `dioptase agent` as a child process, observed only through its exit code, its HTTP answers and SIGTERM."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from api.interfaces import Unavailable
from cli.client import AgentClient
from demo.launch import launch_in_cgroups

AGENT_COMMAND = (sys.executable, "-P", "-c", "from cli.main import main; main(prog_name='dioptase')", "agent")
START_TIMEOUT_S = 90.0
"""Exceeds the timeout of compiling the probe, which is a minute (probes/loader.py)."""
STOP_TIMEOUT_S = 20.0
"""The agent restores every changed value before it exits."""
LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - addresses to connect to, not to bind


class AgentExited(Exception):
    """The agent has exited, or never answered."""


class AgentProcess:
    """A running `dioptase agent`; the kernel sends it SIGTERM when this process ends, however that happens."""

    def __init__(
        self,
        options: Sequence[str],
        *,
        host: str = "127.0.0.1",
        port: int,
        output: IO[bytes] | None = None,
        command: Sequence[str] = AGENT_COMMAND,
        procs: Sequence[Path] = (),
    ) -> None:
        """Start it, in the cgroups of these cgroup.procs files; without any in that of this process."""
        self.host, self.port = LOOPBACK_OF.get(host, host), port
        listen = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._process = launch_in_cgroups(
            [*command, "--listen", listen, *options], procs=procs, end_signal=signal.SIGTERM, output=output
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/"

    def ended(self) -> int | None:
        """Exit code of the agent, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait_healthy(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Return when the agent has finished a cycle or `stopped` returns true. Raises AgentExited if it exits or times out."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not stopped():
            if (code := self.ended()) is not None:
                raise AgentExited(f"the agent ended with exit code {code} while it was starting")
            if self.get("/healthz") is not None:
                return
            if time.monotonic() > deadline:
                raise AgentExited(f"the agent did not answer at {self.url}healthz within {START_TIMEOUT_S:.0f} s")
            time.sleep(0.1)

    def get(self, path: str, timeout_s: float = 2.0) -> bytes | None:
        """Return the body at that path, or None without a response of status 200."""
        try:
            return AgentClient(self.url, timeout_s).read(path)
        except Unavailable:
            return None

    def stop(self) -> int:
        """Send SIGTERM, then SIGKILL after a timeout; return the exit code. Idempotent."""
        self._process.terminate()
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that is free now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.bind((host, 0))
        port: int = sock.getsockname()[1]
        return port


def is_port_free(host: str, port: int) -> bool:
    """Whether a server could listen at this address now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError:
            return False
        return True

"""Runs `dioptase agent` as a child process, observed only through its exit code, its HTTP answers and SIGTERM."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from http.client import HTTPConnection, HTTPException
from typing import IO

from demo.launch import launch_in_cgroups

AGENT_COMMAND = (sys.executable, "-P", "-c", "from cli.main import main; main(prog_name='dioptase')", "agent")
START_TIMEOUT_S = 90.0
"""More than the minute that compiling the probe may take at most (probes/loader.py)."""
STOP_TIMEOUT_S = 20.0
"""The agent puts every changed value back before it ends."""
LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - nothing is bound here, on the contrary


class AgentExited(Exception):
    """The agent is not there any more, or never came up."""


class AgentProcess:
    """A running `dioptase agent`; it gets SIGTERM when we end, however that happens."""

    def __init__(
        self,
        options: Sequence[str],
        *,
        host: str = "127.0.0.1",
        port: int,
        output: IO[bytes] | None = None,
        command: Sequence[str] = AGENT_COMMAND,
    ) -> None:
        self.host, self.port = LOOPBACK_OF.get(host, host), port
        listen = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._process = launch_in_cgroups(
            [*command, "--listen", listen, *options], end_signal=signal.SIGTERM, output=output
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/"

    def ended(self) -> int | None:
        """Its exit code once it has ended; negative for a signal."""
        return self._process.poll()

    def wait_healthy(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Return when it has finished a round, or `stopped` says so. Raises AgentEnded when that does not come about."""
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
        """The body at that path; None where there is no good answer now."""
        connection = HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.read() if response.status == 200 else None
        except (OSError, HTTPException):
            return None
        finally:
            connection.close()

    def stop(self) -> int:
        """SIGTERM, and SIGKILL where that does not help; the exit code. Idempotent."""
        self._process.terminate()
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody has now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.bind((host, 0))
        port: int = sock.getsockname()[1]
        return port


def is_port_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError:
            return False
        return True

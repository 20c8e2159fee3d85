"""The two workloads and the client that measures one of them, started and ended together; for the demo and the benches."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from demo.counters import CLIENT_CELLS, Counters
from demo.launch import launch, python
from demo.online import bind
from demo.schedule import Schedule, Wave

US_PER_S = 1_000_000
SERVICE_US = 500
MAX_RATE = 4000.0
"""Requests a second that one client in Python sends without being late; larger nodes get dearer requests instead."""
PEAK_SHARE = 0.6
"""Of all CPUs, at the highest load that the demo and the benches ask for."""
BURNER_MIB = 16
"""Memory that the batch job requests for each of its processes, several times what they use."""
END_WITHIN_S = 5.0


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """How large the workloads are."""

    cpus: int
    service_us: int
    workers: int
    burners: int

    def rate(self, share: float) -> float:
        """Requests a second whose cost is this share of all CPUs."""
        return share * self.cpus * US_PER_S / self.service_us


def size_for(cpus: int) -> Size:
    """Workloads for a node of that many CPUs: twice as many burners as CPUs, four workers a CPU on small nodes."""
    service_us = max(SERVICE_US, round(PEAK_SHARE * cpus * US_PER_S / MAX_RATE))
    return Size(cpus=cpus, service_us=service_us, workers=max(2 * cpus, min(4 * cpus, 32)), burners=2 * cpus)


def demo_wave(size: Size) -> Wave:
    """10 to 45 % of the node within 40 s, with 4 s at 60 % shortly after the load has fallen."""
    return Wave(
        low=size.rate(0.10), high=size.rate(0.45), period_s=40, spike=size.rate(PEAK_SHARE), spike_at_s=34, spike_s=4
    )


def own_cpus() -> int:
    """CPUs that this process may use: in a container not always all of the node's."""
    return len(os.sched_getaffinity(0))


class Workloads:
    """Processes and the counters they write; `procs` are cgroup.procs files to join, none where there are no cgroups."""

    def __init__(self, size: Size, directory: Path, online: Sequence[Path] = (), batch: Sequence[Path] = ()) -> None:
        self.size = size
        self._directory = directory
        self._procs = {"online": tuple(online), "batch": tuple(batch)}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._socket: socket.socket | None = bind()
        self.port: int = self._socket.getsockname()[1]
        self.client = Counters(directory / "client.counters", CLIENT_CELLS)
        self.batch = Counters(directory / "batch.counters", size.burners)

    def start_online(self, *, pieces: int | None = None) -> None:
        """Start the service on the socket bound here, so that no request finds nobody even while it starts.

        With `pieces` its requests are so much work on memory, else so much CPU time.
        """
        assert self._socket is not None
        fd = self._socket.fileno()
        sizes = ["--workers", str(self.size.workers), "--service-us", str(self.size.service_us)]
        sizes += ["--pieces", str(pieces)] if pieces is not None else []
        command = [*python("demo.online"), "--fd", str(fd), *sizes]
        self._processes["online"] = launch(command, procs=self._procs["online"], pass_fds=[fd])
        self._socket.close()
        self._socket = None

    def start_batch(self, *, idle: bool = False, memory: bool = False) -> None:
        """Start the burners, under SCHED_IDLE if `idle`, on memory and page cache if `memory`."""
        where = ["--burners", str(self.size.burners), "--counters", str(self._directory / "batch.counters")]
        command = [*python("demo.batch"), *where, *(["--idle"] if idle else [])]
        command += ["--file", str(self._directory / "batch.data")] if memory else []
        self._processes["batch"] = launch(command, procs=self._procs["batch"])

    def start_client(
        self,
        schedule: Schedule,
        *,
        duration_s: float | None = None,
        samples: Path | None = None,
        seed: int = 1,
        warmup_s: float | None = None,
    ) -> None:
        """Start the load, in our own cgroup: the client stands for the outside world. After `warmup_s` seed counts anew."""
        command = [*python("demo.client"), "--port", str(self.port), "--seed", str(seed)]
        command += ["--schedule", msgspec.json.encode(schedule).decode()]
        command += ["--counters", str(self._directory / "client.counters")]
        command += ["--duration", str(duration_s)] if duration_s is not None else []
        command += ["--warmup", str(warmup_s)] if warmup_s is not None else []
        command += ["--samples", str(samples)] if samples is not None else []
        self._processes["client"] = launch(command)

    def process(self, name: str) -> subprocess.Popen[bytes]:
        """`online`, `batch` or `client`; KeyError where it was not started."""
        return self._processes[name]

    def has(self, name: str) -> bool:
        """Whether `online`, `batch` or `client` was started and not yet stopped."""
        return name in self._processes

    def units(self) -> int:
        """Units that the batch job has done."""
        return sum(self.batch.values())

    def ended(self) -> str | None:
        """A sentence about a process that has ended although nobody asked it to."""
        for name, process in self._processes.items():
            if (code := process.poll()) is not None:
                return f"the {name} process ended by itself with {_how(code)}"
        return None

    def has_ended(self, name: str) -> bool:
        """Whether that one was started, and has ended although nobody here asked it to."""
        return name in self._processes and self._processes[name].poll() is not None

    def forget(self, name: str) -> None:
        """Of one that has ended: as if it had never been started."""
        self._processes.pop(name).wait()

    def stop(self) -> None:
        """End every process and wait for it: SIGTERM, then SIGKILL for whoever stays. Idempotent; counters remain."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(END_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        """Stop, and let go of the counters."""
        self.stop()
        self.client.close()
        self.batch.close()


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

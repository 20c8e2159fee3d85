"""Starts and stops the online service, the batch job and the client, and serves their metrics on 127.0.0.1.
The demo and the benchmarks use it. The latency metric is a classic Prometheus histogram in seconds, from the buckets of
demo/counters.py.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec

from api.units import NS_PER_S, US_PER_S
from demo.batch import BatchWork
from demo.counters import BOUNDS_US, BUCKETS, CLIENT_CELLS, ClientCell, SharedCounters
from demo.launch import launch_in_cgroups, module_command
from demo.online import bind_service
from demo.schedule import RateWave, Schedule

LATENCY_METRIC = "demo_request_duration_seconds"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def demo_metrics_text(client: Sequence[int], units: int) -> str:
    """Return one reading of the client's cells and of the batch job's units in the text format of Prometheus."""
    return "\n".join(_lines(client, units)) + "\n"


def _lines(client: Sequence[int], units: int) -> Iterator[str]:
    yield f"# HELP {LATENCY_METRIC} Time from when a request was due to the arrival of its reply."
    yield f"# TYPE {LATENCY_METRIC} histogram"
    below = 0
    for bound_us, count in zip((*BOUNDS_US, None), client[:BUCKETS], strict=True):
        below += count
        le = "+Inf" if bound_us is None else f"{bound_us / US_PER_S:.7g}"
        yield f'{LATENCY_METRIC}_bucket{{le="{le}"}} {below}'
    yield f"{LATENCY_METRIC}_sum {client[ClientCell.SUM_NS] / NS_PER_S:.9f}"
    yield f"{LATENCY_METRIC}_count {below}"
    yield "# HELP demo_requests_lost_total Requests that got no reply within the timeout."
    yield "# TYPE demo_requests_lost_total counter"
    yield f"demo_requests_lost_total {client[ClientCell.LOST]}"
    yield "# HELP demo_batch_units_total Units of work that the batch job has done."
    yield "# TYPE demo_batch_units_total counter"
    yield f"demo_batch_units_total {units}"


REQUEST_TIMEOUT_S = 2.0
"""A client that sends no request for this long is disconnected, so that it does not delay the end of the demo."""


class _QuietServer(ThreadingHTTPServer):
    """A server whose clients may leave before they have their answer, as a scrape does after its timeout on a busy machine."""

    daemon_threads = False
    """`server_close` waits for the threads: the counters that they read are closed after it."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Print errors of this program only: the base class also prints a traceback for a client that left."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class DemoMetricsServer:
    """Serves the counters from threads of this process, until closed."""

    def __init__(self, client: SharedCounters, batch: SharedCounters) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = REQUEST_TIMEOUT_S

            def do_GET(self) -> None:
                if self.path != "/metrics":
                    self.send_error(404, "only /metrics is here")
                    return
                body = demo_metrics_text(client.values(), sum(batch.values())).encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
                """Log nothing: a line per scrape is of no use."""

        self._server = _QuietServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


SERVICE_US = 500
MAX_RATE = 4000.0
"""Requests a second that one client in Python sends without being late; on larger nodes requests cost more instead."""
PEAK_SHARE = 0.6
"""Share of all CPUs at the highest load of the demo and the benchmarks."""
BURNER_REQUEST_MIB = 16
"""Memory that the batch job requests for each of its processes, several times what they use."""
STOP_TIMEOUT_S = 5.0


class WorkloadSize(msgspec.Struct, frozen=True, kw_only=True):
    """Size of the workloads."""

    cpus: int
    service_us: int
    workers: int
    burners: int

    def rate(self, share: float) -> float:
        """Return the rate in requests a second that costs this share of all CPUs."""
        return share * self.cpus * US_PER_S / self.service_us


def size_for(cpus: int) -> WorkloadSize:
    """Return the size for a node of `cpus` CPUs: two burners per CPU, and on small nodes four workers per CPU."""
    service_us = max(SERVICE_US, round(PEAK_SHARE * cpus * US_PER_S / MAX_RATE))
    return WorkloadSize(cpus=cpus, service_us=service_us, workers=max(2 * cpus, min(4 * cpus, 32)), burners=2 * cpus)


def demo_wave(size: WorkloadSize) -> RateWave:
    """Return a wave from 10 to 45 % of the node within 40 s, with 4 s at 60 % after the load has fallen."""
    return RateWave(
        low=size.rate(0.10), high=size.rate(0.45), period_s=40, spike=size.rate(PEAK_SHARE), spike_at_s=34, spike_s=4
    )


def allowed_cpu_count() -> int:
    """Return the number of CPUs that this process may use, which in a container may be fewer than the node has."""
    return len(os.sched_getaffinity(0))


class FileReads(Enum):
    """Where the requests of the service read a file from."""

    NONE = "none"
    PAGE_CACHE = "page cache"
    DISK = "disk"


class DemoWorkloads:
    """Processes and their counters; `online` and `batch` are the cgroup.procs files to join, none without cgroups."""

    def __init__(
        self, size: WorkloadSize, directory: Path, online: Sequence[Path] = (), batch: Sequence[Path] = ()
    ) -> None:
        self.size = size
        self._directory = directory
        self._procs = {"online": tuple(online), "batch": tuple(batch)}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._socket: socket.socket | None = bind_service()
        self.port: int = self._socket.getsockname()[1]
        self.client = SharedCounters(directory / "client.counters", CLIENT_CELLS)
        self.batch = SharedCounters(directory / "batch.counters", size.burners)

    def start_online(self, *, pieces: int | None = None, reads: FileReads = FileReads.NONE) -> None:
        """Start the service on a socket that is bound already, so that requests are queued while it starts.

        With `pieces`, requests copy that many pieces of memory; otherwise they use CPU time. They read files as `reads` says.
        """
        assert self._socket is not None
        fd = self._socket.fileno()
        options = ["--workers", str(self.size.workers), "--service-us", str(self.size.service_us)]
        options += ["--pieces", str(pieces)] if pieces is not None else []
        options += ["--file", str(self._directory / "online.data")] if reads is not FileReads.NONE else []
        options += ["--direct"] if reads is FileReads.DISK else []
        command = [*module_command("demo.online"), "--fd", str(fd), *options]
        self._processes["online"] = launch_in_cgroups(command, procs=self._procs["online"], pass_fds=[fd])
        self._socket.close()
        self._socket = None

    def start_batch(self, *, idle: bool = False, kind: BatchWork = BatchWork.CPU) -> None:
        """Start the burners, under SCHED_IDLE if `idle`."""
        where = ["--burners", str(self.size.burners), "--counters", str(self._directory / "batch.counters")]
        command = [*module_command("demo.batch"), *where, "--kind", kind, *(["--idle"] if idle else [])]
        self._processes["batch"] = launch_in_cgroups(command, procs=self._procs["batch"])

    def start_client(
        self,
        schedule: Schedule,
        *,
        duration_s: float | None = None,
        samples: Path | None = None,
        seed: int = 1,
        warmup_s: float | None = None,
    ) -> None:
        """Start the load in the cgroup of this process: the client stands for the outside world.

        After `warmup_s` the seed is used again.
        """
        command = [*module_command("demo.client"), "--port", str(self.port), "--seed", str(seed)]
        command += ["--schedule", msgspec.json.encode(schedule).decode()]
        command += ["--counters", str(self._directory / "client.counters")]
        command += ["--duration", str(duration_s)] if duration_s is not None else []
        command += ["--warmup", str(warmup_s)] if warmup_s is not None else []
        command += ["--samples", str(samples)] if samples is not None else []
        self._processes["client"] = launch_in_cgroups(command)

    def process(self, name: str) -> subprocess.Popen[bytes]:
        """Return the process `online`, `batch` or `client`. Raises KeyError if it was not started."""
        return self._processes[name]

    def has(self, name: str) -> bool:
        """Return whether `online`, `batch` or `client` was started and not yet stopped."""
        return name in self._processes

    def units(self) -> int:
        """Return the units that the batch job has done."""
        return sum(self.batch.values())

    def ended(self) -> str | None:
        """Return a sentence about a process that has ended unexpectedly; None if there is none."""
        for name, process in self._processes.items():
            if (code := process.poll()) is not None:
                return f"the {name} process ended by itself with {_exit_text(code)}"
        return None

    def has_ended(self, name: str) -> bool:
        """Return whether the process was started and has ended unexpectedly."""
        return name in self._processes and self._processes[name].poll() is not None

    def forget(self, name: str) -> None:
        """Remove a process that has ended."""
        self._processes.pop(name).wait()

    def stop(self) -> None:
        """End every process and wait for it: SIGTERM, then SIGKILL for the remaining ones. Idempotent; counters remain."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        """Stop, and release the counters."""
        self.stop()
        self.client.close()
        self.batch.close()


def _exit_text(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

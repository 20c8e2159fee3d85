"""Runs the exporters that bench.peers compares as processes, scrapes them, and counts their series."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Self

import msgspec

from api.interfaces import Unavailable
from bench.machine import children_of, cpu_ns_of, memory_kib_of
from cli.agent_process import AGENT_COMMAND, free_port
from demo.launch import launch_in_cgroups

PARENT = "dioptase-bench-peers"
"""Cgroup that contains all cgroups of the benchmark."""
CADVISOR_SOURCE = Path(__file__).parent / "peers_go"
NODE_EXPORTER = "prometheus-node-exporter"
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 20.0
KUBELET_METRICS = "app,cpu,cpuLoad,disk,diskIO,memory,network,oom_event,pressure,process"


class ExporterVariant(msgspec.Struct, frozen=True):
    """One exporter with its options."""

    name: str
    what: str
    """Description of the options, for the page."""
    command: Callable[[int, Path], list[str]]
    """Makes the command line from the port to listen on and a directory of its own."""


def _watch_command(port: int, directory: Path) -> list[str]:
    files = ("--config", str(directory / "config.yaml"), "--state-dir", str(directory / "state"))
    return [*AGENT_COMMAND, "--listen", f"127.0.0.1:{port}", *files]


def _decide_command(port: int, directory: Path) -> list[str]:
    return [*_watch_command(port, directory), "--pods", str(directory / "pods.yaml")]


def _cadvisor_command(*options: str) -> Callable[[int, Path], list[str]]:
    own = ("-raw_cgroup_prefix_whitelist", f"/{PARENT}/")
    return lambda port, _: [str(build_cadvisor()), "-listen", f"127.0.0.1:{port}", *own, *options]


DIOPTASE = ExporterVariant(
    "dioptase", "watches every cgroup each second, with all probes, as an exporter", _watch_command
)
DIOPTASE_DECIDING = ExporterVariant(
    "dioptase, deciding",
    "the same, with every container in a pod, half of them online: checks run-queue latencies ten times a second, and decides "
    "once a second how much CPU is reclaimable (nothing is written)",
    _decide_command,
)
CADVISOR = ExporterVariant(
    "cAdvisor, 1 s",
    "housekeeping every second for every cgroup, as in the agent; its standard metrics",
    _cadvisor_command("-housekeeping_interval=1s", "-allow_dynamic_housekeeping=false"),
)
KUBELET = ExporterVariant(
    "cAdvisor, as in the kubelet",
    "housekeeping every 10 s, 15 s if idle; the kubelet's metrics; no events kept",
    _cadvisor_command(
        "-housekeeping_interval=10s",
        "-max_housekeeping_interval=15s",
        "-event_storage_event_limit=default=0",
        "-event_storage_age_limit=default=0",
        f"-enable_metrics={KUBELET_METRICS}",
    ),
)
NODE_EXPORTER_VARIANT = ExporterVariant(
    "node_exporter",
    "default options: the node, no cgroups",
    lambda port, _: [NODE_EXPORTER, f"--web.listen-address=127.0.0.1:{port}"],
)
EXPORTERS = {
    "dioptase": DIOPTASE,
    "deciding": DIOPTASE_DECIDING,
    "cadvisor": CADVISOR,
    "kubelet": KUBELET,
    "node": NODE_EXPORTER_VARIANT,
}


def build_cadvisor() -> Path:
    """Return cAdvisor's program, built once from the modules in `peers_go/go.mod`. Raises Unavailable if the build fails."""
    key = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(CADVISOR_SOURCE.iterdir()))).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dioptase-bench"
    program = cache / f"cadvisor-{key}"
    if program.exists():
        return program
    if (go := shutil.which("go")) is None:
        raise Unavailable("cAdvisor is not built, and go is not installed", "install Go 1.24 or later")
    cache.mkdir(parents=True, exist_ok=True)
    print("building cAdvisor, once: about a minute and a half of CPU", flush=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        built_program = Path(scratch) / "cadvisor"
        command = ["nice", "-n", "19", go, "build", "-mod=readonly", "-trimpath", "-o", str(built_program), "."]
        built = subprocess.run(command, cwd=CADVISOR_SOURCE, stderr=subprocess.PIPE, text=True, check=False)
        if built.returncode:
            reason = built.stderr.strip()[-500:]
            raise Unavailable(f"cAdvisor could not be built: {reason}", "check that Go reaches its module proxy")
        built_program.rename(program)
    return program


def missing_reason(contestant: ExporterVariant) -> Unavailable | None:
    """Return why the exporter cannot run here, or None; builds cAdvisor if it is needed."""
    if contestant is NODE_EXPORTER_VARIANT and shutil.which(NODE_EXPORTER) is None:
        return Unavailable(f"{NODE_EXPORTER} is not installed", "run deploy/install-packages bench")
    if contestant in (CADVISOR, KUBELET):
        try:
            build_cadvisor()
        except Unavailable as why:
            return why
    return None


class Scrape(msgspec.Struct, frozen=True):
    """One response."""

    ms: float
    """From the request to the last byte, including the connection."""
    body: bytes
    """The body as sent, possibly compressed."""


class ExporterProcess:
    """A running exporter; it receives SIGTERM when this process ends, however that happens."""

    def __init__(self, contestant: ExporterVariant, directory: Path) -> None:
        self.contestant, self._port = contestant, free_port()
        self._log = directory / "output"
        with self._log.open("wb") as log:
            command = contestant.command(self._port, directory)
            self._process = launch_in_cgroups(command, end_signal=signal.SIGTERM, output=log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait_until_responding(self) -> None:
        """Wait for the first response. Raises Unavailable after a timeout, or if the process exits."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                self.scrape()
            except (OSError, HTTPException):
                time.sleep(0.2)
            else:
                return
        lines = self._log.read_text(errors="replace").strip().splitlines()[-3:]
        raise Unavailable(
            f"{self.contestant.name} does not answer: {' / '.join(lines)}", "run it alone and check its output"
        )

    def scrape(self, *, gzip: bool = False) -> Scrape:
        """Request /metrics in the text format over a new connection. Raises OSError and HTTPException."""
        began = time.perf_counter_ns()
        connection = HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            connection.request("GET", "/metrics", headers={"Accept-Encoding": "gzip" if gzip else "identity"})
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise HTTPException(f"{self.contestant.name} answered {response.status}")
        return Scrape((time.perf_counter_ns() - began) / 1e6, body)

    def cpu_ns(self) -> int:
        return sum(map(cpu_ns_of, self._family()))

    def rss_mib(self) -> float:
        return sum(memory_kib_of(pid) for pid in self._family()) / 1024

    def bpf_run_ns(self) -> int:
        """Run time of its BPF programs in all tasks, while the kernel's BPF statistics were on."""
        return self._in_kernel("run_time_ns")

    def bpf_memory_mib(self) -> float:
        """Memory of its BPF programs and maps, as accounted by the kernel."""
        return self._in_kernel("memlock") / (1 << 20)

    def _in_kernel(self, name: str) -> int:
        # fdinfo of sockets and files has neither line.
        amount = 0
        for info in Path(f"/proc/{self._process.pid}/fdinfo").iterdir():
            try:
                lines = info.read_text().splitlines()
            except FileNotFoundError:  # closed in the meantime
                continue
            amount += sum(int(value) for key, _, value in (line.partition(":") for line in lines) if key == name)
        return amount

    def _family(self) -> Sequence[int]:
        return [self._process.pid, *children_of(self._process.pid)]


_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
# A quote inside a value is written \", so this cannot match within one.
_CGROUP_LABEL = re.compile(r'[{,](?:cgroup|id)="(/(?:[^"\\]|\\.)*)"')


class SeriesCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of series of one exposition in Prometheus' text format."""

    series: int
    cgroups: dict[str, int]
    """Series by the cgroup path in label `cgroup` (dioptase) or `id` (cAdvisor)."""
    buckets: dict[str, int]
    """Histogram buckets among these, by cgroup path."""
    names: dict[str, int]
    """Numbers of different metrics by cgroup path; each part of a histogram counts as one."""


def count_series(text: str) -> SeriesCounts:
    """Count the series of one exposition; other lines are ignored."""
    series = 0
    cgroups, buckets = Counter[str](), Counter[str]()
    names: dict[str, set[str]] = {}
    for line in text.split("\n"):
        if (named := _METRIC_NAME.match(line)) is None:
            continue
        series += 1
        if (label := _CGROUP_LABEL.search(line, named.end())) is None:
            continue
        path, name = label[1], named[0]
        cgroups[path] += 1
        buckets[path] += name.endswith("_bucket")
        names.setdefault(path, set()).add(name)
    return SeriesCounts(
        series=series,
        cgroups=dict(cgroups),
        buckets=dict(buckets),
        names={path: len(label) for path, label in names.items()},
    )

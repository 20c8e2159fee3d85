"""From a pod's own endpoint to the size of its pool: real answers over HTTP, real cgroups, on a topology of eight CPUs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agent.config.config import AgentConfig
from agent.loop import Loop
from agent.qrm.actuator.actuator import Actuator
from agent.qrm.actuator.writer import KnobWriter
from agent.sensors.cgroup.cgroup_reader import CgroupReader
from agent.sensors.cgroup.schedstat import SchedstatRunqLatency
from agent.sensors.node.node_reader import NodeReader
from agent.sensors.pods.pod_indicators import PodIndicatorScraper
from agent.sensors.pods.pod_spec import PodParsingContext
from agent.sensors.pods.static_pods import StaticPods
from agent.sensors.snapshot import Sensor
from api.decision import ActMode, Cycle
from tests.agent.sensors.node.test_machine import sysfs
from tests.builders.settings import parse_config
from tests.kernel.real_cgroups import cgroup, require_writable_cgroups

RAMA = b"""
intervalS: 0.5
advisor:
  policy: canonical
  reservedForAllocateCores: 0
  minShareCores: 1
  minReclaimedCores: 1
  rampUpS: 0
  fallbackCores: 1
  provision: {sharePolicies: [rama], targets: {share: {}}}
"""
PODS = """
pods:
- name: web
  annotations:
    prometheus.io/scrape: "true"
    prometheus.io/port: "{port}"
    dioptase.io/latency-metric: seconds
    dioptase.io/service-profile: '{{"targets": {{"request_p99_ms": {{"upper": {target}}}}}}}'
  containers: [{{cgroup: {path}}}]
"""


@contextmanager
def service() -> Iterator[int]:
    """A pod that has answered a hundred requests more at each scrape, each in 20 to 50 ms; its port."""
    count = 0

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal count
            count += 100
            lines = [
                f'seconds_bucket{{le="{bound}"}} {n}' for bound, n in (("0.02", 0), ("0.05", count), ("+Inf", count))
            ]
            text = "\n".join(
                ["# TYPE seconds histogram", *lines, f"seconds_sum {count * 0.03}", f"seconds_count {count}", ""]
            )
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name that it has there
            """Nothing is said on the terminal."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


class Rounds:
    """Keeps every round, and ends the loop when the share pool has been wide enough or time is over."""

    def __init__(self, wide: int, seconds: float) -> None:
        self.previous: list[Cycle] = []
        self._wide, self._deadline = wide, time.monotonic() + seconds
        self.loop: Loop | None = None

    def publish(self, finished: Cycle) -> None:
        self.previous.append(finished)
        if self.loop is not None and (share(finished) >= self._wide or time.monotonic() > self._deadline):
            self.loop.stop()


def share(finished: Cycle) -> int:
    """CPUs of the share pool in a round."""
    assert finished.advice is not None, finished.snapshot.sources
    return next(size.cpus for size in finished.advice.cpu.sizes if size.pool == "share")


@pytest.mark.parametrize(("target_ms", "seconds", "sizes"), [(10, 20.0, (1, 7)), (50, 4.0, (1, 1))])
def test_what_a_pod_says_of_its_latency_sizes_its_pool(
    target_ms: int, seconds: float, sizes: tuple[int, int], tmp_path: Path
) -> None:
    hierarchy = require_writable_cgroups()
    config: AgentConfig = parse_config(RAMA, "rama.yaml")
    tree = sysfs(tmp_path / "sys", online="0-7", cores={n: (n, 0) for n in range(8)}, nodes={0: "0-7"})
    files, rounds, indicators = (
        KnobWriter(hierarchy),
        Rounds(sizes[1] + (sizes[0] == sizes[1]), seconds),
        PodIndicatorScraper(),
    )
    with (
        service() as port,
        cgroup(hierarchy, "requests") as web,
        closing(files),
        closing(CgroupReader(hierarchy)) as cgroups,
        closing(NodeReader(Path("/proc"), Path("/sys"))) as node,
    ):
        web.start(["sleep", "60"])
        listed = tmp_path / "pods.yaml"
        listed.write_text(PODS.format(port=port, path=web.path, target=target_ms))
        sensor = Sensor(
            cgroups=cgroups, node=node, sys=tree, pods=StaticPods(listed, PodParsingContext()), indicators=indicators,
            waits=SchedstatRunqLatency(Path("/proc"), hierarchy),
        )  # fmt: skip
        loop = rounds.loop = Loop(
            config=config, sensor=sensor, actuator=Actuator(files, None, ActMode.DRY_RUN), sinks=[rounds]
        )

        async def both() -> None:
            polling = asyncio.create_task(indicators.run(loop.pods))
            await loop.run()
            polling.cancel()

        asyncio.run(both())
    assert (share(rounds.previous[0]), share(rounds.previous[-1])) == sizes
    (region,) = rounds.previous[-1].advice.cpu.regions if rounds.previous[-1].advice else ()
    (signal,) = region.signals
    # Within (20, 50] ms: 20 + 30 x 0.99.
    assert (signal.name, signal.current, signal.target) == ("request_p99_ms", pytest.approx(49.7), target_ms)
    assert region.reason.rule == "provision_rama"

"""Every query of the dashboard and the rules, answered by a real Prometheus that scrapes the demo's agent at work."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.dashboards.support import every_query, free_port, prometheus, until
from tests.kernel.support import require_writable_cgroups
from tests.live.running import DIOPTASE

pytestmark = pytest.mark.live
NOBODY = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_TIMEOUT": "1000"}
"""An exporter whose collector is not there: what is lost is counted."""
USED = 'sum(rate(dioptase_cgroup_cpu_usage_seconds_total{qos="reclaimed_cores"}[8s]))'


def test_every_query_is_answered_from_a_live_agent_under_load(prometheus_binary: str, tmp_path: Path) -> None:
    require_writable_cgroups()
    address = f"127.0.0.1:{free_port()}"
    demo = subprocess.Popen(
        [DIOPTASE, "demo", "--duration", "120", "--listen", address],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **NOBODY}, text=True,
    )  # fmt: skip
    try:
        with prometheus(prometheus_binary, address, tmp_path) as server:
            until(lambda: [value for _, value in server.query(USED) if value > 0.1])
            until(lambda: {name for name, expr in every_query() if not server.query(expr)} == set())
            assert server.value(USED) < (os.cpu_count() or 1) + 0.1
            assert server.value("sum(dioptase_decisions_total)") >= 1
        demo.send_signal(signal.SIGINT)
        said, _ = demo.communicate(timeout=30)
        assert demo.returncode == 0, said
        assert "none differs" in said
    finally:
        demo.kill()
        demo.wait()

"""Every query of the dashboard and the rules, answered by a real Prometheus that scrapes the real agent at work."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.dashboards.support import every_query, prometheus, until
from tests.kernel.support import cgroup, require_writable_cgroups
from tests.live.running import Agent, pods_file

pytestmark = pytest.mark.live
NOBODY = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_TIMEOUT": "1000"}
"""An exporter whose collector is not there: what is lost is counted."""


def test_every_query_is_answered_from_a_live_agent_under_load(prometheus_binary: str, tmp_path: Path) -> None:
    hierarchy = require_writable_cgroups()
    with cgroup(hierarchy, "queries-web") as web, cgroup(hierarchy, "queries-batch") as batch:
        web.burn()
        batch.burn(2)
        pods = pods_file(tmp_path / "pods.yaml", web.path, batch.path)
        options = ("--act", "on", "--pods", str(pods), "--state-dir", str(tmp_path / "state"))
        with Agent(*options, env=NOBODY) as agent:
            address = urlsplit(agent.url).netloc
            with prometheus(prometheus_binary, address, tmp_path) as server:
                until(lambda: server.query("count_over_time(dioptase_build_info[1m]) >= 8"))
                unanswered = {name for name, expr in every_query() if not server.query(expr)}
                assert unanswered == set()
                used = server.value('sum(rate(dioptase_cgroup_cpu_usage_seconds_total{qos="reclaimed_cores"}[8s]))')
                assert 0.1 < used < 2.1, "two burners on what one online burner leaves of this node"
                assert server.value("sum(dioptase_decisions_total)") >= 1
            assert agent.end() == 0

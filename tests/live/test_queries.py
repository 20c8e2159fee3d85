"""Every query of the dashboards and the rules, answered by a real Prometheus that scrapes the real agent at work."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from api.catalogue import BY_NAME
from tests.dashboards.support import every_query, prometheus, until
from tests.kernel.support import cgroup, require_writable_cgroups
from tests.live.running import Agent, pods_file

pytestmark = pytest.mark.live
NOBODY = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
"""An exporter whose collector is not there: what is lost is counted."""
MAY_BE_ABSENT = {
    "dioptase_node_oom_kill_timestamp_seconds": "no process was killed for memory",
    "dioptase_exporter_dropped_total": "nothing had to be left out",
    "dioptase_node_filesystem_available_bytes": "the root is no device in a container",
    "dioptase_node_filesystem_size_bytes": "the root is no device in a container",
    "dioptase_node_disk_operations_total": "no disk",
    "dioptase_node_disk_operation_seconds_total": "no disk",
    "dioptase_node_disk_busy_seconds_total": "no disk",
    "dioptase_node_disk_bytes_total": "no disk",
    "dioptase_cgroup_block_io_seconds": "no request reached a disk",
    "dioptase_cgroup_block_io_request_bytes_total": "no request reached a disk",
}
"""What a healthy machine need not have; a query of these alone may go unanswered, of everything else none may."""


def absent(expr: str, exposed: str) -> set[str]:
    """Metrics of the query that the agent does not expose."""
    asked = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bdioptase_[a-z0-9_]+", expr)}
    return {
        name
        for name in asked
        if name in BY_NAME and not re.search(rf"^{name}(_bucket|_total)?[{{ ]", exposed, re.MULTILINE)
    }


def test_every_query_is_answered_from_a_live_agent_under_load(prometheus_binary: str, tmp_path: Path) -> None:
    hierarchy = require_writable_cgroups()
    with cgroup(hierarchy, "queries-web") as web, cgroup(hierarchy, "queries-batch") as batch:
        web.burn()
        batch.burn(2)
        web.file("cpu", "cpu.cfs_quota_us").write_text("50000")
        pods = pods_file(tmp_path / "pods.yaml", web.path, batch.path)
        options = (
            "--act",
            "on",
            "--pods",
            str(pods),
            "--state-dir",
            str(tmp_path / "state"),
            "--record",
            str(tmp_path / "rec"),
        )
        with Agent(*options, env=NOBODY) as agent:
            address = urlsplit(agent.url).netloc
            with prometheus(prometheus_binary, address, tmp_path) as server:
                until(lambda: server.query("count_over_time(dioptase_build_info[1m]) >= 20"))
                exposed = agent.get("/metrics")
                unanswered = {}
                for name, expr in every_query():
                    missing = absent(expr, exposed)
                    if not server.query(expr) and not (missing and missing <= MAY_BE_ABSENT.keys()):
                        unanswered[name] = sorted(missing) or expr
                assert unanswered == {}
                used = server.value('sum(rate(dioptase_cgroup_cpu_usage_seconds_total{qos="reclaimed_cores"}[8s]))')
                assert 0.1 < used < 2.1, "two burners on what one online burner leaves of this node"
                assert server.value("sum(dioptase_decisions_total)") >= 1
            assert agent.end() == 0

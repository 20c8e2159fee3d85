"""Every query of the dashboards and the rules, answered by a real Prometheus that scrapes the demo's agent at work."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from api.metric_profiles import LATE_METRICS
from api.metrics import AGENT_METRICS_BY_NAME
from tests.dashboards.prometheus_server import every_query, free_port, prometheus, until
from tests.kernel.real_cgroups import require_writable_cgroups
from tests.live.agent_process import DIOPTASE

pytestmark = pytest.mark.live
NO_COLLECTOR = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_TIMEOUT": "1000"}
"""An exporter whose collector is not there: what is lost is counted."""
USED = 'sum(rate(dioptase_cgroup_cpu_usage_seconds_total{qos="reclaimed_cores"}[8s]))'
MAY_BE_ABSENT = {
    "dioptase_node_run_delay_seconds_total": "this kernel has no /proc/schedstat",
    "dioptase_node_oom_kill_timestamp_seconds": "no process was killed for memory",
    "dioptase_exporter_dropped_total": "nothing had to be left out",
    "dioptase_rejected_pods": "every wish for CPUs and bandwidth is fulfilled",
    "dioptase_network_capacity_mbit": "no network card here says its speed",
    "dioptase_network_promised_mbit": "no network card here says its speed",
    "dioptase_shadow_lent_cores": "the demo has no second policy",
    "dioptase_shadow_headroom_cores": "the demo has no second policy",
    "dioptase_shadow_requirement_cores": "the demo has no second policy",
    "dioptase_config_obeyed": "the demo has no cluster",
    "dioptase_api_requests_total": "the demo has no cluster",
    "dioptase_protocol_calls_total": "the demo speaks over no socket",
    "dioptase_advice_age_seconds": "the demo speaks over no socket",
    "dioptase_nri_containers_total": "the demo has no container runtime",
    "dioptase_eviction_met": "the demo has no eviction plugin",
    "dioptase_eviction_observed": "the demo has no eviction plugin",
    "dioptase_eviction_threshold": "the demo has no eviction plugin",
    "dioptase_eviction_victims_total": "the demo has no eviction plugin",
    "dioptase_eviction_kills_total": "the demo has no eviction plugin",
    "dioptase_reclaimed_evictions_total": "the demo has no eviction plugin",
    "dioptase_reclaimed_reductions_total": "no latency was above its target",
    "dioptase_region_indicator": "the demo's policy follows no indicator",
    "dioptase_region_indicator_target": "the demo's policy follows no indicator",
    "dioptase_power_action": "the demo answers no power alerts",
    "dioptase_power_cap_watts": "the demo answers no power alerts",
    "dioptase_power_evict_pods": "the demo answers no power alerts",
    "dioptase_memory_provision_bytes": "the demo takes no advice of a stock advisor",
    "dioptase_overcommit_ratio": "the demo reports no overcommitment",
    "dioptase_knob_repairs_total": "no other process wrote to a knob",
    "dioptase_forecast_cpu_peak_cores": "forecasts need two hours of history",
    "dioptase_forecast_memory_peak_bytes": "forecasts need two hours of history",
    "dioptase_forecast_memory_used_bytes": "memory of batch work is not known",
    "dioptase_forecast_cpu_shortfall_mean_cores": "no forecast has come true",
    "dioptase_forecast_cpu_shortfall_max_cores": "no forecast has come true",
    "dioptase_forecast_cpu_bias_cores": "no forecast has come true",
    "dioptase_forecast_miss_ratio": "no forecast has come true",
    "dioptase_forecast_big_miss_ratio": "no forecast has come true",
    "dioptase_reclaim_advertised_cores": "the reporter's window of two minutes is not full yet",
    "dioptase_reclaim_numa_advertised_cores": "the reporter's window of two minutes is not full yet",
    "dioptase_reclaim_memory_advertised_bytes": "the reporter's window of two minutes is not full yet",
    "dioptase_recording_writable": "the demo records nothing",
    "dioptase_recording_size_bytes": "the demo records nothing",
    "dioptase_recording_rounds_total": "the demo records nothing",
    "dioptase_recording_lost_rounds_total": "the demo records nothing",
    "dioptase_node_filesystem_available_bytes": "a container's file systems are on no device of its own",
    "dioptase_node_filesystem_size_bytes": "a container's file systems are on no device of its own",
    "dioptase_node_disk_operations_total": "no disk",
    "dioptase_node_disk_operation_seconds_total": "no disk",
    "dioptase_node_disk_busy_seconds_total": "no disk",
    "dioptase_node_disk_bytes_total": "no disk",
    "dioptase_cgroup_block_io_seconds": "no request reached a disk",
    "dioptase_cgroup_block_io_request_bytes_total": "no request reached a disk",
    "dioptase_cgroup_memory_limit_bytes": "no cgroup has a limit",
    "dioptase_cgroup_cpu_limit_cores": "no cgroup has a quota",
    "dioptase_cgroup_throttle_seconds": "no cgroup was throttled",
}
"""What a healthy machine need not have: a query of one of these may go unanswered, of everything else none may."""


MAY_BE_EMPTY = {'state!="no_risk"': "memory is not short"}
"""What a query asks for where its metric is there and a healthy machine has no such sample."""


def unanswered(ask: dict[str, str], answer: str) -> dict[str, str]:
    """Queries that must have an answer; `answer` is what the agent exposes."""

    def excused(expr: str) -> bool:
        if any(part in expr for part in MAY_BE_EMPTY):
            return True
        request = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bdioptase_[a-z0-9_]+", expr)}
        return any(
            not re.search(rf"^{name}(_bucket)?[{{ ]", answer, re.MULTILINE)
            # Series of late metrics begin when they have counted something, as those of throttles and reclaim may not have.
            for name in request & (MAY_BE_ABSENT.keys() | LATE_METRICS)
        )

    return {name: expr for name, expr in ask.items() if not excused(expr)}


def test_what_may_be_absent_is_in_the_catalogue() -> None:
    assert MAY_BE_ABSENT.keys() <= AGENT_METRICS_BY_NAME.keys()


def test_every_query_is_answered_from_a_live_agent_under_load(prometheus_binary: str, tmp_path: Path) -> None:
    require_writable_cgroups()
    address = f"127.0.0.1:{free_port()}"
    demo = subprocess.Popen(
        [DIOPTASE, "demo", "--duration", "120", "--listen", address],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **NO_COLLECTOR}, text=True,
    )  # fmt: skip
    try:
        with prometheus(prometheus_binary, address, tmp_path) as server:
            until(lambda: [value for _, value in server.query(USED) if value > 0.1])

            def missing() -> dict[str, str]:
                with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as exposed:
                    request = unanswered(dict(every_query()), exposed.read().decode())
                return {name: expr for name, expr in request.items() if not server.query(expr)}

            with suppress(AssertionError):
                until(lambda: not missing())
            assert missing() == {}
            assert server.value(USED) < (os.cpu_count() or 1) + 0.1
            assert server.value("sum(dioptase_decisions_total)") >= 1
        demo.send_signal(signal.SIGINT)
        text, _ = demo.communicate(timeout=30)
        assert demo.returncode == 0, text
        assert "none differs" in text
    finally:
        assert demo.stdout is not None
        demo.stdout.close()
        demo.kill()
        demo.wait()

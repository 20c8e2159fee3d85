"""How bench.peers counts and judges, and one real short run without cAdvisor, which takes minutes to build."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.sensors.cgroup.hierarchy import detect_hierarchy
from bench.exporter_processes import CADVISOR, DIOPTASE, EXPORTERS, KUBELET, PARENT, count_series, missing_reason
from bench.machine import BenchMachine
from bench.peers_report import GOALS_AT, ExporterRow, PeersResults, evaluate_peers_goals, markdown, peers_goal_lines
from demo.launch import ROOT
from tests.kernel.real_cgroups import require_writable_cgroups

OUR_TEXT = r"""# HELP dioptase_cgroup_cpu_usage_seconds_total CPU time.
# TYPE dioptase_cgroup_cpu_usage_seconds_total counter
dioptase_cgroup_cpu_usage_seconds_total{cgroup="/a",namespace="",pod="",container="",qos=""} 1.5
dioptase_cgroup_cpu_usage_seconds_total{cgroup="/a/b \"c\",cgroup=\"/z\"",namespace=""} 2
dioptase_cgroup_runq_wait_seconds_bucket{cgroup="/a",le="0.1"} 3
dioptase_cgroup_runq_wait_seconds_bucket{cgroup="/a",le="+Inf"} 4
dioptase_cgroup_runq_wait_seconds_count{cgroup="/a"} 4

dioptase_node_load1 0.25
"""
CADVISOR_TEXT = """# TYPE container_tasks_state gauge
container_tasks_state{id="/a",image="",name="",state="running"} 0 1795000000000
container_tasks_state{id="/a",image="",name="",state="stopped"} 0 1795000000000
container_memory_rss{container_label_app="x",id="/a",image="",name=""} 4096
machine_cpu_cores{boot_id="dbd5857b",machine_id="3d12",system_uuid=""} 2
"""


def test_every_line_that_is_no_comment_is_a_series_and_a_cgroup_has_those_with_its_path() -> None:
    series = count_series(OUR_TEXT)
    assert series.series == 6
    assert series.cgroups == {"/a": 4, r"/a/b \"c\",cgroup=\"/z\"": 1}
    assert series.buckets["/a"] == 2
    assert series.names["/a"] == 3


def test_cadvisor_names_a_cgroup_by_id_and_a_machine_is_none() -> None:
    series = count_series(CADVISOR_TEXT)
    assert series.series == 4
    assert series.cgroups == {"/a": 3}
    assert series.names == {"/a": 2}
    assert series.buckets == {"/a": 0}


@given(st.text())
def test_whatever_a_server_sends_is_counted_or_passed_over(text: str) -> None:
    series = count_series(text)
    assert sum(series.cgroups.values()) <= series.series <= text.count("\n") + 1


def row(exporter: str, *, cgroups: int = GOALS_AT, in_pods: bool = False, **given: float) -> ExporterRow:
    numbers = {
        "cpu_s": 1.75,
        "bpf_s": 0.25,
        "bpf_mib": 20.0,
        "rss_mib": 60.0,
        "scrape_ms": 100.0,
        "gzip_ms": 50.0,
        "series": 20_000,
        "cgroup_series": 100,
    }
    return msgspec.convert(
        {
            "cgroups": cgroups, "in_pods": in_pods, "exporter": exporter, "cpu_range_s": (1.5, 2.5), "scrape_kib": 4000,
            "gzip_kib": 160, "cgroup_buckets": 60, "cgroup_names": 40, **numbers, **given,
        },
        type=ExporterRow,
    )  # fmt: skip


CADVISOR_ROW = row(
    CADVISOR.name, cpu_s=10, bpf_s=0, rss_mib=120, scrape_ms=100, gzip_ms=50, series=10_000, cgroup_series=100
)
KUBELET_ROW = row(KUBELET.name, cgroup_series=101)


def goal_results(*rows: ExporterRow) -> list[str]:
    return [goal.reason for goal in evaluate_peers_goals(rows, in_pods=False)]


def test_a_goal_is_met_at_its_very_bound_and_missed_beyond_it() -> None:
    """CPU 1.75, with 0.25 in BPF, is a fifth of 10; 60 MiB of 120 and 5 us of 10 are halves; one series fewer is fewer."""
    assert goal_results(row(DIOPTASE.name), CADVISOR_ROW, KUBELET_ROW) == ["PASS"] * 6 + ["MISS"]
    beyond = row(DIOPTASE.name, cpu_s=1.76, rss_mib=64.1, scrape_ms=101, gzip_ms=50.5, cgroup_series=99)
    assert goal_results(beyond, CADVISOR_ROW, KUBELET_ROW) == ["MISS"] * 7


def test_unmeasured_values_are_not_evaluated() -> None:
    own = row(DIOPTASE.name)
    assert goal_results() == ["OPEN"] * 7
    assert goal_results(own) == ["OPEN", "OPEN", "PASS", "OPEN", "OPEN", "OPEN", "OPEN"]
    elsewhere = (row(CADVISOR.name, cgroups=100), row(CADVISOR.name, in_pods=True))
    assert goal_results(own, *elsewhere) == goal_results(own)


def test_the_page_has_a_line_for_each_row_and_each_goal_of_each_layout_with_its_ratio() -> None:
    rows = (row(DIOPTASE.name), CADVISOR_ROW, row(DIOPTASE.name, in_pods=True), row("node_exporter", cgroup_series=0))
    machine = BenchMachine(date="d", kernel="k", cpu="c", cpus=2, hypervisor=True, cgroups="v2", python="3.11")
    results = PeersResults(
        machine=machine, settings="as ever", contestants=(("x", "so"),), rows=rows, absent=("y: it is not there",)
    )
    text = markdown(results)
    own = (
        "| 1.75 | 1.50 to 2.50 | 0.25 | 60.0 | 20.0 | 100.0 | 4,000 | 50.0 | 160 | 20,000 | 5.0 | 2.5 | 100 | 40 | 40 |"
    )
    assert f"| 200 side by side | dioptase {own}" in text
    assert f"| 200 in pods | dioptase {own}" in text
    assert "| 200 side by side | node_exporter | 1.75 | 1.50 to 2.50 | 0.25 | 60.0 | 20.0 | 100.0 " in text
    assert "| 20,000 | 5.0 | 2.5 |  |  |  |" in text
    cpu = "CPU, in BPF included, at most a fifth of cAdvisor's"
    assert f"- PASS 200 side by side: {cpu}: 2.00 against 10.00 CPU s/min, ratio 0.200" in text
    assert f"- OPEN 200 in pods: {cpu}: not measured at 200 cgroups" in text
    assert len(peers_goal_lines(rows)) == 14
    assert "- Not measured: y: it is not there" in text


def test_without_go_cadvisor_is_missing_and_the_reason_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    reasons = {
        name: result.reason for name, exporter in EXPORTERS.items() if (result := missing_reason(exporter)) is not None
    }
    assert reasons == {
        "cadvisor": "cAdvisor is not built, and go is not installed",
        "kubelet": "cAdvisor is not built, and go is not installed",
        "node": "prometheus-node-exporter is not installed",
    }


@pytest.mark.kernel
def test_a_quick_run_measures_the_agent_on_containers_in_pods(tmp_path: Path) -> None:
    """Metric profile standard: at most 60 series of a container; one that sleeps has fewer than cAdvisor's 49."""
    require_writable_cgroups()
    command = [sys.executable, "-m", "bench.peers", "--quick", "--only", "dioptase", "--out", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    if "Device or resource busy" in ran.stderr:
        pytest.skip("a bench runs on this machine now")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (result,) = msgspec.json.decode((tmp_path / "peers.json").read_bytes(), type=PeersResults).rows
    assert (result.cgroups, result.in_pods, result.exporter) == (10, True, "dioptase")
    assert 15 <= result.cgroup_series < 49
    assert result.series >= 2 * 10 * result.cgroup_names, "the pods' own cgroups are exported too"
    assert 0 < result.cpu_s < 60
    assert result.gzip_kib < result.scrape_kib / 4
    mounts = {*detect_hierarchy().v1.values(), detect_hierarchy().primary}
    assert [mount for mount in mounts if (mount / PARENT).exists()] == []

"""The table of what the agent costs on a real node: numbers, ratios to the kubelet, and what was lost."""

from __future__ import annotations

from bench.cluster import ClusterPhase, ClusterRun, ProgramCost, markdown

REST = {"agent": ProgramCost(cpu_ms=30.0, rss_mib=90.0), "kubelet": ProgramCost(cpu_ms=60.0, rss_mib=60.0)}
AWAY = {"agent": ProgramCost(cpu_ms=33.0, rss_mib=91.0), "kubelet": ProgramCost(cpu_ms=75.0, rss_mib=61.0)}


def test_each_program_is_held_against_the_kubelet_at_rest() -> None:
    phases = (
        ClusterPhase(name="at rest", seconds=60.0, rounds=60, pods=100, costs=REST),
        ClusterPhase(name="API server away", seconds=59.6, rounds=58, pods=99, costs=AWAY),
    )
    lines = markdown(ClusterRun(machine="a machine", pods=100, phases=phases)).splitlines()
    assert any(line.startswith("60, 60 s. Shims") for line in lines)
    assert (
        "| program | CPU, at rest | CPU, API server away | of the kubelet's CPU | memory MiB | of the kubelet's |"
        in lines
    )
    assert "| agent | 30.0 | 33.0 | 0.50 | 90 | 1.50 |" in lines
    assert "| kubelet | 60.0 | 75.0 | 1.00 | 60 | 1.00 |" in lines
    assert lines[-1] == "- API server away: 58 rounds; 99 of 100 pods run as before."


def test_a_program_that_is_gone_in_a_phase_leaves_its_place_empty() -> None:
    phases = (
        ClusterPhase(name="at rest", seconds=60.0, rounds=60, pods=100, costs=REST),
        ClusterPhase(name="away", seconds=60.0, rounds=58, pods=100, costs={"kubelet": AWAY["kubelet"]}),
    )
    assert "| agent | 30.0 |  | 0.50 | 90 | 1.50 |" in markdown(ClusterRun(machine="m", pods=100, phases=phases))

"""The arithmetic and the shape of the benches' results, and one real run of the cheapest mode."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from api.decision import Decision, JournalEntry, Outcome, OutcomeStatus
from api.knobs import Knob, Reason
from api.snapshot import ComponentHealth
from api.text import to_json
from bench.colocation import matching_scenarios
from bench.colocation_cell import AgentActivity, CellResult, RunqLatencyQuantiles, quantile_ms
from bench.colocation_modes import CURVE_MODES, MAIN_MODES, MODES_BY_NAME, TARGETS_MS, share_pool_size
from bench.colocation_report import ColocationResults, Reaction, cell_p99, cell_units, markdown
from bench.colocation_scenarios import SCENARIOS_BY_NAME as SCENARIOS
from bench.machine import wait_until_ready
from bench.reaction import is_taking_back
from cli.agent_process import AgentExited
from demo.launch import ROOT
from demo.workloads import size_for
from exporters.view.cycle_view import build_view
from probes import registry
from tests.bench.builders import MACHINE, cell
from tests.builders.four_cpu_node import bare_cycle
from tests.builders.settings import load_config
from tests.kernel.real_cgroups import require_writable_cgroups


def repetition(mode: str, p99_ms: float, units: float, number: int) -> CellResult:
    """Return a cell of scenario `memory` with run-queue latency, and with an agent if the mode has one."""
    return msgspec.structs.replace(
        cell(mode, p99_ms, units, scenario="memory", node_use=0.9),
        round=number,
        lending=AgentActivity(1.5, 3) if mode == "ours" else None,
        waits=RunqLatencyQuantiles(0.3, 0.02, 2.25, None),
    )


RESULTS = ColocationResults(
    machine=MACHINE,
    settings="as ever",
    cells=(
        *(repetition("floor", value, 20_000, n) for n, value in enumerate((3.0, 9.0, 4.0))),
        *(repetition("ours", value, 19_000, n) for n, value in enumerate((4.2, 4.4, 4.1))),
    ),
    reactions=(
        Reaction(
            mode="ours",
            kind="steps",
            steps=5,
            taken_ms=(46.0, 52.0, 300.0),
            never=1,
            decided_ms=(40.0, 90.0),
            written_ms=(55.0, 95.0),
            triggers=("wait", "psi"),
        ),
    ),
    failures=("partition in memory, round 1: no",),
    left_out=("floor in memory, round 4",),
)


def test_the_nearest_sample_is_the_quantile() -> None:
    latencies = [n * 1_000_000 for n in range(1, 101)]
    assert [quantile_ms(latencies, q) for q in (0.5, 0.99, 0.999)] == [51, 100, 100]


@pytest.mark.parametrize(
    ("cpus", "load", "size"), [(2, 0.1, 1), (2, 0.6, 1), (16, 0.1, 2), (16, 0.4, 8), (16, 0.6, 12), (16, 0.9, 15)]
)
def test_the_share_pool_follows_katalysts_rule_and_leaves_a_cpu_to_reclaim(cpus: int, load: float, size: int) -> None:
    """The result is ceil(usage x 1.25), at least 1, at most all but one."""
    assert share_pool_size(cpus, load) == size


def test_ratios_are_between_medians_of_the_same_scenario() -> None:
    assert RESULTS.ratio("memory", "ours", "floor", cell_p99) == pytest.approx(4.2 / 4.0)
    assert RESULTS.ratio("memory", "ours", "floor", cell_units) == pytest.approx(0.95)
    assert RESULTS.ratio("memory", "ours", "alone", cell_p99) is None
    assert RESULTS.ratio("bursty", "ours", "floor", cell_p99) is None


def test_the_table_shows_medians_spread_and_what_failed() -> None:
    text = markdown(RESULTS)
    assert (
        "| ours | 0.60 | 4.20 (4.10 to 4.40) | 9.00 |  | 1.05 | 19,000 | 0.95 | 1.50 | 90.0% | 520 | 0.2% | 0 |" in text
    )
    assert "| floor | 0.60 | 4.00 (3.00 to 9.00) |" in text
    later = "later than the step"
    assert f"| ours | 5 steps | 4 | 52 ms | {later} | {later} | 1 | 2 | 65, 90 | 75, 95 | psi 1, wait 1 |" in text
    assert "| memory | ours | 0.300 | 0.020 | 2.250 |  |" in text
    assert "- partition in memory, round 1: no" in text
    assert "for which there was no time\n\n- floor in memory, round 4" in text
    assert MACHINE.line() in text


@pytest.mark.parametrize(
    ("knob", "before", "value", "status", "used"),
    [
        (Knob.QUOTA, "max 100000", "20000 100000", OutcomeStatus.APPLIED, True),
        (Knob.QUOTA, "20000 100000", "10000 100000", OutcomeStatus.APPLIED, True),
        (Knob.QUOTA, "10000 100000", "30000 100000", OutcomeStatus.APPLIED, False),
        (Knob.QUOTA, "190000 100000", "max 100000", OutcomeStatus.APPLIED, False),
        (Knob.QUOTA, "max 100000", "20000 100000", OutcomeStatus.DRY_RUN, False),
        (Knob.IDLE, "0", "1", OutcomeStatus.APPLIED, False),
    ],
)
def test_only_a_smaller_quota_that_was_written_answers_a_spike(
    knob: Knob, before: str, value: str, status: OutcomeStatus, used: bool
) -> None:
    decision = Decision(cgroup="/b", cgroup_id=1, pod="d/b", knob=knob, value=value, reason=Reason(rule="r", text="t"))
    outcome = Outcome(decision=decision, status=status, before=before)
    entry = JournalEntry(seq=1, wall_time_ns=1, cycle_seq=1, trigger="wait", policy="latency", outcome=outcome)
    assert is_taking_back(entry) is used


class Loads:
    """An agent that answers late, and whose two probes load one after the other."""

    def __init__(self, *answers: tuple[str, ...] | None) -> None:
        self.answers = list(answers)
        self.requests = 0

    def wait_healthy(self) -> None:
        assert self.requests == 0

    def get(self, path: str, timeout_s: float = 2.0) -> bytes | None:
        assert path == "/api/v1/view"
        assert timeout_s > 0
        details = self.answers[min(self.requests, len(self.answers) - 1)]
        self.requests += 1
        if details is None:
            return None
        sources = tuple(ComponentHealth(name=f"p{k}", ok=True, detail=detail) for k, detail in enumerate(details))
        return to_json(msgspec.structs.replace(build_view(bare_cycle()), sources=sources))


def test_an_agent_is_measured_once_no_probe_is_loading() -> None:
    agent = Loads(("loading", "loading"), None, ("tp_btf", "loading"), ("tp_btf", ""))
    wait_until_ready(agent)
    assert agent.requests == 4


def test_a_probe_that_never_loads_is_named() -> None:
    seconds = iter(range(0, 1000, 50))
    with pytest.raises(AgentExited, match="still not loaded after 120 s: p1"):
        wait_until_ready(Loads(("tp_btf", "loading")), clock=lambda: next(seconds))


def test_every_mode_but_the_first_has_a_batch_job_and_only_ours_and_canonical_an_agent() -> None:
    assert [name for name in CURVE_MODES if not MODES_BY_NAME[name].batch] == ["alone"]
    assert [name for name in MAIN_MODES if MODES_BY_NAME[name].agent_config is not None] == ["ours", "ours-protect"]
    assert sorted(MODES_BY_NAME[name].target_ms or 0 for name in CURVE_MODES) == [0, 0, 0, *TARGETS_MS]


def test_what_a_mode_tells_the_agent_is_what_it_says(tmp_path: Path) -> None:
    reported = {}
    for name in (*CURVE_MODES, "koordinator"):
        if (text := MODES_BY_NAME[name].agent_config) is not None:
            (tmp_path / "agent.yaml").write_text(text)
            config = load_config(tmp_path / "agent.yaml", registry.PROBE_NAMES).advisor
            reported[name] = (config.policy, config.latency.target_wait_ms)
    assert {n: t for n, (p, t) in reported.items() if p == "latency"} == {
        n: MODES_BY_NAME[n].target_ms for n in reported if n not in ("canonical", "koordinator")
    }
    assert (reported["canonical"][0], reported["koordinator"][0]) == ("canonical", "none")


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("layout", "name", "scenarios"),
    [("flat", "colocation_flat", "steady-20,memory"), ("kubelet", "colocation", "guaranteed-burstable-*-10")],
)
def test_a_quick_run_of_the_cheapest_mode_writes_its_results(
    tmp_path: Path, layout: str, name: str, scenarios: str
) -> None:
    hierarchy = require_writable_cgroups()
    command = [
        sys.executable,
        "-m",
        "bench.colocation",
        "--quick",
        "--layout",
        layout,
        "--steps",
        "0",
        "--modes",
        "alone",
    ]
    command += ["--scenarios", scenarios, "--out", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    if "another demo is running" in ran.stdout or "another run uses" in ran.stderr:
        pytest.skip("a bench runs on this machine now")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results = msgspec.json.decode((tmp_path / f"{name}.json").read_bytes(), type=ColocationResults)
    assert {(actual.mode, actual.scenario) for actual in results.cells} == {
        ("alone", scenario) for scenario in matching_scenarios(layout, scenarios)
    }
    size = size_for(results.machine.cpus)
    for actual in results.cells:
        expected = size.rate(SCENARIOS[actual.scenario].load) * actual.seconds
        assert actual.requests == pytest.approx(expected, rel=0.3)
        if actual.scenario == "steady-20":
            assert size.service_us <= actual.online_us <= size.service_us + 200
            assert actual.p50_ms >= size.service_us / 1000
        assert actual.units_per_s == 0
    assert "| alone |" in (tmp_path / f"{name}.md").read_text()
    assert not any((mount / "dioptase_bench").exists() for mount in (*hierarchy.v1.values(), hierarchy.primary))

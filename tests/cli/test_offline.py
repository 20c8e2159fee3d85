"""`dioptase replay` and `simulate` as a person runs them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

import cli.offline
from agent.config.config import AgentConfig
from agent.offline.simulation.simulator import run_simulation
from agent.offline.simulation.workloads import build_node
from api.decision import Cycle
from api.units import MIB
from cli.main import main
from cli.offline import load_policy_config
from cli.policy_scores import TIMELINE_COLUMNS
from cli.top.charts import BLOCKS
from exporters.recording.segments import pack_cycle, segment_header
from tests.builders.four_cpu_node import BATCH, WEB, busy_cycle

SAMPLE = Path(__file__).resolve().parents[2] / "demo/recording"


def recorded(directory: Path, rounds: int = 120) -> Path:
    plan = build_node(8, 1, ["bursty"], online=2, seed=3)
    created = [finished for finished, _, _ in run_simulation(plan, AgentConfig(), seconds=rounds, interval_s=1)]
    text = segment_header("0.1", "simulated", 0) + b"".join(pack_cycle(finished) for finished in created)
    (directory / "00000001.dioptase").write_bytes(text)
    return directory


def test_a_recording_is_evaluated_by_every_policy(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["replay", str(recorded(tmp_path)), "--horizon", "10", "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)["policies"]
    assert list(document) == ["latency", "canonical", "none"]
    assert {name: policy["score"]["rounds"] for name, policy in document.items()} == dict.fromkeys(document, 118)
    assert document["none"]["score"]["lent_cores"] == 8.0
    assert document["canonical"]["score"]["lent_cores"] < document["latency"]["score"]["lent_cores"] == 8.0
    assert {len(policy["lent"]) for policy in document.values()} == {60}


def test_settings_that_evict_have_a_number_of_victims(tmp_path: Path) -> None:
    """A pod above its request for two minutes would have been evicted at 1, 46 and 91 s: that counts as one pod."""
    rounds = [crowded(seq) for seq in range(1, 121)]
    text = segment_header("0.1", "simulated", 0) + b"".join(pack_cycle(finished) for finished in rounds)
    (tmp_path / "00000001.dioptase").write_bytes(text)
    policy = tmp_path / "strict.yaml"
    policy.write_text("advisor: {policy: none}\neviction: {plugins: [rss-overuse-eviction-plugin]}\n")
    done = CliRunner().invoke(main, ["replay", str(tmp_path), "--policy", str(policy), "--policy", "none", "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)["policies"]
    assert {name: policy["score"]["victims"] for name, policy in document.items()} == {str(policy): 1, "none": None}


def crowded(seq: int) -> Cycle:
    """The batch pod requests 16 MiB and holds 32."""
    finished = busy_cycle(seq)
    snapshot = finished.snapshot
    batch = msgspec.structs.replace(
        snapshot.cgroups["/batch"], memory_stat={"rss": 32 * MIB}, files_read_at_ns=snapshot.wall_time_ns
    )
    container = msgspec.structs.replace(BATCH.containers[0], memory_request_bytes=16 * MIB)
    pods = (WEB, msgspec.structs.replace(BATCH, containers=(container,)))
    cgroups = {**snapshot.cgroups, "/batch": batch}
    return msgspec.structs.replace(finished, snapshot=msgspec.structs.replace(snapshot, cgroups=cgroups, pods=pods))


def test_tables_and_lines_fit_a_terminal(tmp_path: Path) -> None:
    policy = tmp_path / "careful.yaml"
    policy.write_text("advisor: {latency: {targetWaitMs: 0.2}}\n")
    done = CliRunner(env={"COLUMNS": "80"}).invoke(
        main, ["replay", str(recorded(tmp_path)), "--policy", "latency", "--policy", str(policy)]
    )
    assert done.exit_code == 0, done.output
    assert "headroom exceeded" in done.output
    assert "reclaimable latency" in done.output
    lines = [line for line in done.stdout.splitlines() if line.startswith("reclaimable ") and line[-1] in BLOCKS]
    assert [line[:-TIMELINE_COLUMNS][-2:] for line in lines] == ["  ", "  "]


def test_recorded_latencies_are_shown_once_and_a_short_recording_is_reported() -> None:
    """148 s of the demo: too short for a horizon of 600 s, long enough for one of 30 s."""
    arguments = ["replay", str(SAMPLE), "--policy", "latency", "--policy", "canonical"]
    long, short = (CliRunner().invoke(main, [*arguments, *more]) for more in ([], ["--horizon", "30"]))
    text, values = (" ".join(done.stdout.split()) for done in (long, short))
    assert text.count("p99") == 1
    assert "online waits as recorded: p50 0.04 ms, p99 3.39 ms; they would differ" in text
    assert "these cycles last 148 s, too short to compare any headroom: try a shorter --horizon" in text
    assert "too short to compare" not in values
    assert "demand above its pool: CPU that online pods needed beyond their own pool" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--policy", "bold"], "neither one of latency, canonical, none, forecast, "),
        (["--policy", "broken.yaml"], "unknown field"),
    ],
)
def test_invalid_policies_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.yaml").write_text("advisor: {polcy: x}\n")
    done = CliRunner().invoke(main, ["replay", str(recorded(tmp_path, 3)), *arguments])
    assert done.exit_code == 2
    assert text in done.output


def test_settings_that_the_machine_cannot_hold_are_refused_as_the_agent_refuses_them(tmp_path: Path) -> None:
    """CPU 300 is on neither machine, the recorded and the simulated one."""
    policy = tmp_path / "large.yaml"
    policy.write_text("placing: {reservedCpuList: '300'}\n")
    for arguments in (["replay", str(recorded(tmp_path, 3))], ["simulate", "--cpus", "8", "--hours", "0.05"]):
        done = CliRunner().invoke(main, [*arguments, "--policy", str(policy)])
        assert done.exit_code == 2
        assert "placing.reservedCpuList: CPU 300 is not online on this node" in done.output


def test_a_recording_without_rounds_says_so(tmp_path: Path) -> None:
    (tmp_path / "00000001.dioptase").write_bytes(segment_header("0.1", "b", 0))
    done = CliRunner().invoke(main, ["replay", str(tmp_path)])
    assert (done.exit_code, "fewer than two cycles" in done.output) == (1, True)


def test_damaged_places_are_counted_and_skipped(tmp_path: Path) -> None:
    file = recorded(tmp_path) / "00000001.dioptase"
    text = bytearray(file.read_bytes())
    text[len(text) // 2] ^= 0xFF
    file.write_bytes(bytes(text))
    done = CliRunner().invoke(main, ["replay", str(tmp_path), "--policy", "none", "--json"])
    assert done.exit_code == 0
    assert "1 damaged records" in done.stderr


def test_simulations_are_the_same_again() -> None:
    arguments = ["simulate", "--cpus", "48", "--hours", "0.5", "--load", "bursty", "--load", "step", "--json"]
    first, second = (CliRunner().invoke(main, arguments) for _ in range(2))
    assert first.exit_code == 0, first.output
    assert first.stdout == second.stdout
    assert "simulating 0.5 hours (--hours), 2 times: latency, canonical\n" in first.stderr
    assert "0.5 hours, 2 times, took" in first.stderr
    canonical = json.loads(first.stdout)["policies"]["canonical"]["score"]
    assert canonical["harm_ms_per_s"] == 0


def test_a_simulation_takes_the_whole_settings_file(tmp_path: Path) -> None:
    """Not its section `advisor` alone: with an eviction plugin, victims are counted."""
    policy = tmp_path / "strict.yaml"
    policy.write_text("eviction: {plugins: [rss-overuse-eviction-plugin]}\n")
    arguments = ["simulate", "--cpus", "4", "--hours", "0.05", "--policy", str(policy), "--policy", "latency", "--json"]
    result = json.loads(CliRunner().invoke(main, arguments).stdout)["policies"]
    assert {name: policy["score"]["victims"] for name, policy in result.items()} == {str(policy): 0, "latency": None}
    assert "whose advisor section" not in CliRunner().invoke(main, ["simulate", "--help"]).output


def test_what_the_agent_runs_can_be_evaluated(tmp_path: Path) -> None:
    """With eviction plugins, which the profiles of acting agents name, victims are counted."""
    file = tmp_path / "lean.yaml"
    file.write_text("intervalS: 2\n")
    for command in (["replay", str(recorded(tmp_path, 3))], ["simulate", "--cpus", "4", "--hours", "0.05"]):
        policies = ["observe", "colocate", "katalyst", "latency", str(file)]
        arguments = [*command, "--profile", "colocate", "--json", *(f"--policy={policy}" for policy in policies)]
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 0, done.output
        victims = {name: policy["score"]["victims"] for name, policy in json.loads(done.stdout)["policies"].items()}
        assert victims == {"observe": None, "colocate": 0, "katalyst": 0, "latency": 0, str(file): 0}
    config = load_policy_config(str(file), "katalyst")
    assert (config.advisor.policy, config.interval_s, config.eviction.plugins) == ("canonical", 2.0, ("*",))


def test_a_simulation_says_how_far_it_is_where_no_terminal_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three cycles of 60 s, the first without a predecessor: a third each, and each is printed."""
    monkeypatch.setattr(cli.offline, "PROGRESS_LOG_S", 0.0)
    arguments = ["simulate", "--cpus", "8", "--hours", "0.05", "--interval", "60", "--policy", "none"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines()[1:-1] == ["none: 67%", "none: 100%"]
    assert "online wait p99" in done.stdout


def test_an_impossible_machine_is_refused() -> None:
    done = CliRunner().invoke(main, ["simulate", "--cpus", "7", "--numa", "2"])
    assert (done.exit_code, "7 CPUs cannot be divided among 2 NUMA nodes" in done.output) == (2, True)


def test_the_recording_of_the_demo_can_still_be_replayed() -> None:
    """A recording of a real machine, which README and docs use as an example."""
    assert sum(file.stat().st_size for file in SAMPLE.iterdir()) < 5 << 18
    arguments = ["replay", str(SAMPLE), "--policy", "latency", "--policy", "canonical", "--horizon", "10", "--json"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert "damaged" not in done.stderr
    output = json.loads(done.stdout)
    scores = {name: policy["score"] for name, policy in output["policies"].items()}
    assert min(score["rounds"] for score in scores.values()) >= 120
    assert scores["canonical"]["lent_cores"] < scores["latency"]["lent_cores"] <= output["node_cpus"]
    assert 0 < scores["canonical"]["batch_cores"] < scores["latency"]["batch_cores"]
    assert scores["canonical"]["short_ms_per_s"] > scores["latency"]["short_ms_per_s"] == 0

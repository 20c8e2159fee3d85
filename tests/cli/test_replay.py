"""`dioptase replay` and `simulate` as a person runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from agent.config import Config
from agent.simulation.machine import node
from agent.simulation.run import run
from cli.main import main
from exporters.recording import header, pack


def recorded(directory: Path, rounds: int = 120) -> Path:
    plan = node(8, 1, ["bursty"], online=2, seed=3)
    made = [finished for finished, _, _ in run(plan, Config(), seconds=rounds, interval_s=1)]
    text = header("0.1", "simulated", 0) + b"".join(pack(finished) for finished in made)
    (directory / "00000001.dioptase").write_bytes(text)
    return directory


def test_a_recording_is_judged_by_every_policy(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["replay", str(recorded(tmp_path)), "--horizon", "10", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["policies"]
    assert list(found) == ["latency", "canonical", "none"]
    assert {name: policy["score"]["rounds"] for name, policy in found.items()} == dict.fromkeys(found, 118)
    assert found["none"]["score"]["lent_cores"] == 8.0
    assert found["canonical"]["score"]["lent_cores"] < found["latency"]["score"]["lent_cores"] == 8.0
    assert {len(policy["lent"]) for policy in found.values()} == {60}


def test_tables_and_lines_fit_a_terminal(tmp_path: Path) -> None:
    policy = tmp_path / "careful.yaml"
    policy.write_text("advisor: {latency: {targetWaitMs: 0.2}}\n")
    done = CliRunner(env={"COLUMNS": "80"}).invoke(
        main, ["replay", str(recorded(tmp_path)), "--policy", "latency", "--policy", str(policy)]
    )
    assert done.exit_code == 0, done.output
    assert "promises missed" in done.output
    assert "lent latency" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "bold"], "neither one of latency, canonical, none, forecast, "),
        (["--policy", "broken.yaml"], "unknown field"),
    ],
)
def test_policies_that_cannot_be_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.yaml").write_text("advisor: {polcy: x}\n")
    done = CliRunner().invoke(main, ["replay", str(recorded(tmp_path, 3)), *arguments])
    assert done.exit_code == 2
    assert said in done.output


def test_a_recording_without_rounds_says_so(tmp_path: Path) -> None:
    (tmp_path / "00000001.dioptase").write_bytes(header("0.1", "b", 0))
    done = CliRunner().invoke(main, ["replay", str(tmp_path)])
    assert (done.exit_code, "fewer than two rounds" in done.output) == (1, True)


def test_damage_is_counted_and_passed_over(tmp_path: Path) -> None:
    file = recorded(tmp_path) / "00000001.dioptase"
    text = bytearray(file.read_bytes())
    text[len(text) // 2] ^= 0xFF
    file.write_bytes(bytes(text))
    done = CliRunner().invoke(main, ["replay", str(tmp_path), "--policy", "none", "--json"])
    assert done.exit_code == 0
    assert "1 damaged places" in done.stderr


def test_simulations_are_the_same_again() -> None:
    arguments = ["simulate", "--cpus", "48", "--hours", "0.5", "--load", "bursty", "--load", "step", "--json"]
    first, second = (CliRunner().invoke(main, arguments) for _ in range(2))
    assert first.exit_code == 0, first.output
    assert first.stdout == second.stdout
    canonical = json.loads(first.stdout)["policies"]["canonical"]["score"]
    assert canonical["harm_ms_per_s"] == 0


def test_a_machine_that_cannot_be_is_refused() -> None:
    done = CliRunner().invoke(main, ["simulate", "--cpus", "7", "--numa", "2"])
    assert (done.exit_code, "7 CPUs cannot be dealt out to 2 NUMA nodes" in done.output) == (2, True)

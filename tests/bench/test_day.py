"""A day in minutes, as an hour in seconds."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.day import NODES, POLICIES, DayResults, main


def test_a_short_day_is_evaluated_by_every_policy_on_every_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--hours", "0.1", "--interval", "10", "--out", str(tmp_path)]) == 0
    document = msgspec.json.decode((tmp_path / "day.json").read_bytes(), type=DayResults)
    assert [(row.node, row.policy) for row in document.rows] == [
        (node, policy) for node in NODES for policy in POLICIES
    ]
    for row in document.rows:
        assert row.score.rounds == 35, "36 of 10 s, and the first one has nothing before it"
        assert 0 < row.score.batch_cores <= row.score.reclaimable_cores <= row.node.cpus
        assert row.faster == pytest.approx(360 / row.wall_s)
    by_policy = {policy: [row.score for row in document.rows if row.policy == policy] for policy in POLICIES}
    for latency, canonical in zip(*by_policy.values(), strict=True):
        assert latency.batch_cores > canonical.batch_cores, "priority strands nothing"
        assert canonical.harm_ms_per_s == 0, "pools of their own"
    text = (tmp_path / "day.md").read_text()
    assert text.count("\n| 256 | 8 | 16 | diurnal, bursty, step, ramp | ") == len(POLICIES)
    assert "times faster" in capsys.readouterr().out

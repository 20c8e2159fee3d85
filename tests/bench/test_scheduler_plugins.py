"""The benchmark of the scheduler's plugins on a few nodes: every row is there, and its pods fit where they should."""

from __future__ import annotations

from pathlib import Path

import msgspec

from bench.scheduler_plugins import SchedulerPluginsResults, main, pods


def test_every_pod_is_filtered_and_scored(tmp_path: Path) -> None:
    assert main(["--nodes", "40", "--out", str(tmp_path)]) == 0
    results = msgspec.json.decode((tmp_path / "scheduler_plugins.json").read_bytes(), type=SchedulerPluginsResults)
    assert [(row.plugin, row.pod) for row in results.rows[:-1]] == [
        (plugin, name) for name, *_ in pods() for plugin in ("NUMA filter", "NUMA score")
    ]
    fits = {row.pod: row.fits for row in results.rows}
    assert fits["native, single NUMA node"] == 40, "of eight NUMA nodes one is always half free"
    assert fits["dynamic, numeric, exclusive, 4 NUMA nodes"] < fits["dynamic, numeric, exclusive, 1 NUMA node"] <= 40
    text = (tmp_path / "scheduler_plugins.md").read_text()
    assert text.startswith("## Scheduler plugins\n")
    assert text.count("\n| ") == len(results.rows) + 1

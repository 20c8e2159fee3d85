"""The agent sets write-back throttling of this machine's own disk, says what it cannot set, and puts everything back."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from agent.sensors.node.node_reader import NodeReader
from tests.builders.waiting import until
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups
from tests.live.agent_process import DIOPTASE, Agent, pods_file

pytestmark = pytest.mark.live
FILE = "queue/wbt_lat_usec"
OURS_US = "54321"
START_S = 40.0
"""For an agent on a busy machine to compile its probe and come to its first round."""


@pytest.fixture
def disk() -> Iterator[tuple[str, Path]]:
    """Kind and file of a disk that throttles its write-back; as it was in the end, whatever happens."""
    reader = NodeReader(Path("/proc"))
    disks = reader.read().disks
    reader.close()
    results = [
        (item.kind, Path("/sys/block", name, FILE)) for name, item in disks.items() if item.kind and item.wbt_lat_us
    ]
    if not results:
        pytest.skip("no disk of this machine throttles its write-back")
    before = results[0][1].read_text()
    yield results[0]
    results[0][1].write_text(before)


@pytest.fixture
def group() -> Iterator[TestCgroup]:
    with cgroup(require_writable_cgroups(), "node-knobs") as created:
        yield created


def started(tmp_path: Path, group: TestCgroup, kind: str, act: str) -> Agent:
    pods, config = pods_file(tmp_path / "pods.yaml", group.path, f"{group.path}-none"), tmp_path / "config.yaml"
    config.write_bytes(
        msgspec.yaml.encode(
            {"knobs": {"io": {"wbtUs": {kind: int(OURS_US)}}, "resctrl": {"enabled": True}}, "probes": []}
        )
    )
    return Agent("--act", act, "--pods", str(pods), "--config", str(config), "--state-dir", str(tmp_path / "state"))


def test_a_disk_is_set_shown_and_put_back(tmp_path: Path, group: TestCgroup, disk: tuple[str, Path]) -> None:
    kind, file = disk
    before = file.read_text()
    name = f"/sys/block/{file.parts[3]}"
    with started(tmp_path, group, kind, "on") as agent:
        until(lambda: file.read_text().strip() == OURS_US, "the disk is set", START_S)
        sources = agent.view()["sources"]
        if not Path("/sys/fs/resctrl/schemata").exists():
            (source,) = [source for source in sources if source["name"] == "resctrl-groups"]
            assert (source["ok"], "mount -t resctrl" in source["remedy"]) == (False, True)
        explained = subprocess.run(
            [DIOPTASE, "explain", name, "--url", agent.url], capture_output=True, text=True, check=True, timeout=30
        ).stdout
        assert f"wbt_lat_usec of {name} is {OURS_US}" in explained
        assert f"as configured for {kind}" in " ".join(explained.split())
        assert agent.end(signal.SIGTERM) == 0
        assert f"{name}: wbt_lat_usec {before.strip()} -> {OURS_US} (applied)" in agent.log
    assert file.read_text() == before
    assert not (tmp_path / "state/node-originals.json").exists()
    entries = [json.loads(line) for line in (tmp_path / "state/decisions.jsonl").read_text().splitlines()]
    own = [entry for entry in entries if entry["outcome"]["decision"]["knob"] == "wbt_lat_usec"]
    assert [(entry["trigger"], entry["outcome"]["decision"]["value"]) for entry in own[-1:]] == [
        ("end", before.strip())
    ]


def test_a_killed_agent_s_disk_is_put_back_by_the_next_one_that_wants_nothing_of_it(
    tmp_path: Path, group: TestCgroup, disk: tuple[str, Path]
) -> None:
    kind, file = disk
    before = file.read_text()
    with started(tmp_path, group, kind, "on") as agent:
        until(lambda: file.read_text().strip() == OURS_US, "the disk is set", START_S)
        agent.end(signal.SIGKILL)
    assert file.read_text().strip() == OURS_US
    other = "HDD" if kind != "HDD" else "SSD"
    with started(tmp_path, group, other, "on") as agent:
        until(lambda: file.read_text() == before, "the disk is put back", START_S)
        assert agent.end(signal.SIGTERM) == 0


def test_a_dry_run_writes_nothing(tmp_path: Path, group: TestCgroup, disk: tuple[str, Path]) -> None:
    kind, file = disk
    before = file.read_text()
    with started(tmp_path, group, kind, "dry-run") as agent:
        until(lambda: f"-> {OURS_US} (dry-run)" in agent.log, "the decision is logged", START_S)
        assert file.read_text() == before
        assert agent.end(signal.SIGTERM) == 0
    assert not (tmp_path / "state/node-originals.json").exists()

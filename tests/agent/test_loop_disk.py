"""The loop on a disk that does not answer: cycles go on, nothing waits for a file, and waiting writes follow at once."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from agent.config.advisor import AdvisorConfig
from agent.config.config import AgentConfig
from agent.journal.colocation_counter import ColocationCounter
from agent.journal.decisions import DecisionJournal
from agent.journal.forecast_file import ForecastFile
from agent.loop import JOURNALLED, TICK, Loop
from agent.qrm.actuator.actuator import Actuator
from agent.qrm.actuator.boot_journal import NOT_ON_DISK_YET
from agent.qrm.actuator.checkpoint import CpusetCheckpoint
from agent.qrm.actuator.state_dir import open_originals
from agent.qrm.actuator.writer import KnobWriter
from api.decision import ActMode, OutcomeStatus
from api.qos import QoSLevel
from tests.agent.advisor.builders import pod, snapshot, waits
from tests.agent.qrm.actuator.trees import Tree
from tests.agent.test_loop import Scripted, have, loop_over, running, small_snapshot
from tests.builders.held_disk import HeldDisk

NEVER = AgentConfig(interval_s=600.0)
CANONICAL = AgentConfig(advisor=AdvisorConfig(policy="canonical"))


async def test_a_cycle_follows_at_once_when_originals_are_on_disk_and_one_at_most_between_ticks() -> None:
    script = Scripted(small_snapshot)
    async with running(loop_over(script, NEVER)):
        await have(script, 1)
        for _ in range(3):
            waking = threading.Thread(target=script.wake)
            waking.start()
            waking.join()
        await have(script, 2)
    # The last cycle may be the one of the stop.
    assert [cycle.trigger for cycle in script.cycles] == [TICK, JOURNALLED]


async def test_a_cycle_for_originals_suppresses_no_alarm() -> None:
    script = Scripted(small_snapshot)
    loop = loop_over(script, NEVER)
    async with running(loop):
        await have(script, 1)
        script.wake()
        await have(script, 2)
        loop._ring("wait")
        await have(script, 3)
    assert [cycle.trigger for cycle in script.cycles] == [TICK, JOURNALLED, "wait"]


async def test_after_the_end_of_the_loop_the_disk_thread_wakes_nothing() -> None:
    script = Scripted(small_snapshot)
    async with running(loop_over(script, NEVER)):
        await have(script, 1)
    script.wake()


class SlowDiskAgent:
    """A loop with every file of the agent on a disk that answers on request, on a tree with an online and a batch pod."""

    def __init__(self, root: Path) -> None:
        self.disk, self.tree = HeldDisk(), Tree(root / "cgroup", "v2")
        self.ids = {name: self.tree.make(f"/{name}") for name in ("web", "batch")}
        state, disk = root / "state", self.disk
        self.files, self.originals = KnobWriter(self.tree.hierarchy), open_originals(state, "boot", disk)
        script: Any = self
        self.decisions = DecisionJournal(state / "decisions.jsonl", disk=disk)
        self.pods = [pod("web", QoSLevel.SHARED), pod("batch", QoSLevel.RECLAIMED)]
        self.loop = Loop(
            config=CANONICAL,
            sensor=script,
            actuator=Actuator(self.files, self.originals, ActMode.ON),
            sinks=(),
            thread_sinks=(self.decisions,),
            checkpoint=CpusetCheckpoint(state, "boot", disk),
            forecasts=ForecastFile(state, "boot", disk),
            totals=ColocationCounter(state, 7, disk),
        )

    def snapshot(self, seq: int, _now_ns: int, _wall_ns: int) -> Any:
        return snapshot(seq, self.pods, ids=self.ids, wait={"web": waits({10: seq * 100}), "batch": waits({10: seq})})

    def cpus(self) -> dict[str, str]:
        return {name: self.tree.file(f"/{name}", "cpuset.cpus").read_text().strip() for name in self.ids}


@pytest.fixture
def slow(tmp_path: Path) -> SlowDiskAgent:
    return SlowDiskAgent(tmp_path)


def test_no_cycle_waits_for_a_file_and_the_cpu_state_reaches_the_disk_before_the_originals(slow: SlowDiskAgent) -> None:
    before = slow.cpus()
    cycles = [slow.loop.run_cycle(TICK) for _ in range(20)]
    assert {source.name for cycle in cycles for source in cycle.snapshot.sources if not source.ok} == set()
    assert slow.cpus() == before
    assert {outcome.error for outcome in cycles[-1].outcomes} == {NOT_ON_DISK_YET}
    names = list(slow.disk.waiting)
    assert names.index("cpu_plugin_state") < names.index("originals.json")
    assert set(names) >= {"cpu_plugin_state", "originals.json", "colocation_state", "forecast_state"}
    slow.disk.answer()
    after = slow.loop.run_cycle(JOURNALLED)
    assert {outcome.status for outcome in after.outcomes} == {OutcomeStatus.APPLIED}
    assert slow.cpus() != before
    slow.disk.answer()
    assert len(slow.decisions.entries()) == len(after.outcomes)


def test_the_cpus_of_a_new_container_reach_the_disk_before_its_original_in_a_commit_that_was_queued_before(
    slow: SlowDiskAgent,
) -> None:
    """The disk is busy with the CPU state of the cycle before, so that the new one is queued behind the originals."""
    slow.pods.pop()
    slow.loop.run_cycle(TICK)
    slow.disk.waiting.pop("cpu_plugin_state")()
    slow.pods.append(pod("batch", QoSLevel.RECLAIMED))
    slow.loop.run_cycle(TICK)
    names = list(slow.disk.waiting)
    assert names.index("cpu_plugin_state") > names.index("originals.json")
    slow.disk.waiting["originals.json"]()
    assert slow.originals.entries()
    restarted = CpusetCheckpoint(slow.originals.path.parent, "boot").load(0)
    assert restarted is not None
    assert any(entry for uid, entry in restarted.pod_entries.items() if "batch" in uid)

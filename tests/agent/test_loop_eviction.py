"""The eviction manager in the control loop: if it fails, the cycle goes on, reports it and evicts no pod."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.components import open_evictor
from agent.config.advisor import AdvisorConfig
from agent.config.config import AgentConfig
from agent.config.eviction import EvictionConfig
from agent.eviction.runner import EvictionRunner
from agent.eviction.signals import SignalEvictor
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.decision import ActMode, Cycle
from api.eviction import EvictionEvent, EvictionEventReason
from api.snapshot import Snapshot
from tests.agent.eviction.test_runner import RSS, FakePodEvictor, over
from tests.agent.test_loop import Scripted, loop_over

CONFIG = AgentConfig(advisor=AdvisorConfig(policy="none"), eviction=EvictionConfig(plugins=(RSS,), interval_s=0.001))


def too_large(seq: int) -> Snapshot:
    """The batch pod holds twice its request, as of now."""
    return over(seq, batch=200, web=50)


def run_cycle(evictor: object) -> Cycle:
    return loop_over(Timed(too_large), CONFIG, evictor=evictor).run_cycle("tick")


class Timed(Scripted):
    """Snapshots with the current time, because the manager refuses old ones."""

    def snapshot(self, seq: int, taken_at_ns: int, wall_time_ns: int) -> Snapshot:
        runner = super().snapshot(seq, taken_at_ns, wall_time_ns)
        cgroups = {
            path: msgspec.structs.replace(sample, files_read_at_ns=wall_time_ns)
            for path, sample in runner.cgroups.items()
        }
        return msgspec.structs.replace(runner, taken_at_ns=taken_at_ns, wall_time_ns=wall_time_ns, cgroups=cgroups)


def test_a_cycle_has_thresholds_victims_and_the_outcomes_of_evictions() -> None:
    killer = FakePodEvictor()
    loop = loop_over(Timed(too_large), CONFIG, evictor=EvictionRunner(CONFIG, killer))
    first = loop.run_cycle("tick")
    assert first.evictions is not None
    assert [victim.pod for victim in first.evictions.victims] == ["default/batch"]
    assert (killer.evictions, first.kills) == ([("default/batch", None)], ())
    source = first.snapshot.sources[-1]
    assert (source.name, source.ok, source.duration_ns > 0) == ("eviction", True, True)
    killer.new_events = [EvictionEvent(pod="default/batch", reason=EvictionEventReason.SUCCEEDED, message="m", at_ns=1)]
    assert [event.reason for event in loop.run_cycle("tick").kills] == [EvictionEventReason.SUCCEEDED]
    assert killer.evictions == [("default/batch", None)]


def test_a_bug_in_the_manager_evicts_no_pod_is_reported_and_loses_no_event(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(EvictionRunner):
        def run_cycle(self, *_: object) -> Any:
            raise RuntimeError("boom")

    killer = FakePodEvictor()
    killer.new_events = [EvictionEvent(pod="default/x", reason=EvictionEventReason.FAILED, message="m", at_ns=1)]
    finished = run_cycle(Broken(CONFIG, killer))
    assert (finished.evictions, killer.evictions) == (None, [])
    assert [event.pod for event in finished.kills] == ["default/x"]
    source = finished.snapshot.sources[-1]
    assert (source.name, source.ok, source.error) == ("eviction", False, "RuntimeError: boom")
    assert "boom" in caplog.text


def test_without_a_manager_a_cycle_has_no_evictions() -> None:
    finished = run_cycle(None)
    assert (finished.evictions, finished.kills) == (None, ())
    assert all(source.name != "eviction" for source in finished.snapshot.sources)


@pytest.mark.parametrize(
    ("act", "plugins", "named", "evaluates", "kills"),
    [
        (ActMode.ON, (RSS,), False, True, True),
        (ActMode.DRY_RUN, (RSS,), False, True, False),
        (ActMode.OFF, (RSS,), False, False, False),
        (ActMode.ON, (), False, False, False),
        (ActMode.ON, (), True, True, True),
        (ActMode.OFF, (), True, False, False),
    ],
)
def test_the_mode_decides_whether_the_manager_evaluates_and_evicts(
    act: ActMode, plugins: tuple[Any, ...], named: bool, evaluates: bool, kills: bool, tmp_path: Path
) -> None:
    instances: list[object] = []

    class Watched(SignalEvictor):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            instances.append(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("agent.eviction.signals.SignalEvictor", Watched)
        config = msgspec.structs.replace(CONFIG, eviction=EvictionConfig(plugins=plugins))
        runner = open_evictor(
            config, act, Hierarchy(v1={}, v2=tmp_path), AsyncExitStack(), node="n1" if named else "", kubelet=False
        )
    assert ((runner is not None), len(instances)) == (evaluates, int(kills))


def test_the_reason_has_sizes_in_mib() -> None:
    finished = run_cycle(EvictionRunner(CONFIG, FakePodEvictor()))
    assert finished.evictions is not None
    assert finished.evictions.victims[0].reason.text.startswith(
        "Resident memory is 200.0 MiB, above 1.05 times the 100.0 MiB"
    )

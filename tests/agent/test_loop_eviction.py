"""The eviction manager in the agent's rounds: it fails alone, its failure is a source, and it evicts nobody then."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from agent.config import AdvisorConfig, Config
from agent.config.eviction import EvictionConfig
from agent.eviction.evictor import Evictor
from agent.eviction.signals import SignalKiller
from agent.hierarchy import Hierarchy
from agent.loop import Loop
from agent.optional import open_evictor
from api.decisions import Act
from api.evictions import KillEvent, KillReason
from api.samples import Snapshot
from tests.agent.eviction.test_evictor import RSS, Remembering, over
from tests.agent.test_loop import Scripted

CONFIG = Config(advisor=AdvisorConfig(policy="none"), eviction=EvictionConfig(plugins=(RSS,), interval_s=0.001))


def too_large(seq: int) -> Snapshot:
    """The batch pod holds twice its request, as of now."""
    return over(seq, batch=200, web=50)


def loop_with(evictor: object, script: Scripted) -> Loop:
    stand_in = cast(Any, script)
    return Loop(config=CONFIG, sensor=stand_in, actuator=stand_in, sinks=[stand_in], evictor=cast(Any, evictor))


class Sensed(Scripted):
    """Rounds are of now: the manager takes no old snapshot."""

    def snapshot(self, seq: int, taken_at_ns: int, wall_time_ns: int) -> Snapshot:
        found = super().snapshot(seq, taken_at_ns, wall_time_ns)
        cgroups = {
            path: msgspec.structs.replace(sample, files_read_at_ns=wall_time_ns)
            for path, sample in found.cgroups.items()
        }
        return msgspec.structs.replace(found, taken_at_ns=taken_at_ns, wall_time_ns=wall_time_ns, cgroups=cgroups)


def test_a_round_tells_thresholds_victims_and_what_became_of_them() -> None:
    killer = Remembering()
    loop = loop_with(Evictor(CONFIG, killer), Sensed(too_large))
    first = loop.turn("tick")
    assert first.evictions is not None
    assert [victim.pod for victim in first.evictions.victims] == ["default/batch"]
    assert (killer.asked, first.kills) == ([("default/batch", None)], ())
    source = first.snapshot.sources[-1]
    assert (source.name, source.ok, source.duration_ns > 0) == ("eviction", True, True)
    killer.gone = [KillEvent(pod="default/batch", reason=KillReason.SUCCEEDED, message="m", at_ns=1)]
    assert [event.reason for event in loop.turn("tick").kills] == [KillReason.SUCCEEDED]
    assert killer.asked == [("default/batch", None)]


def test_a_bug_in_the_manager_evicts_nobody_is_a_source_and_loses_no_event(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Evictor):
        def turn(self, *_: object) -> Any:
            raise RuntimeError("boom")

    killer = Remembering()
    killer.gone = [KillEvent(pod="default/x", reason=KillReason.FAILED, message="m", at_ns=1)]
    finished = loop_with(Broken(CONFIG, killer), Sensed(too_large)).turn("tick")
    assert (finished.evictions, killer.asked) == (None, [])
    assert [event.pod for event in finished.kills] == ["default/x"]
    source = finished.snapshot.sources[-1]
    assert (source.name, source.ok, source.error) == ("eviction", False, "RuntimeError: boom")
    assert "boom" in caplog.text


def test_without_a_manager_a_round_says_nothing_of_evictions() -> None:
    finished = loop_with(None, Sensed(too_large)).turn("tick")
    assert (finished.evictions, finished.kills) == (None, ())
    assert all(source.name != "eviction" for source in finished.snapshot.sources)


@pytest.mark.parametrize(
    ("act", "plugins", "told", "judges", "kills"),
    [
        (Act.ON, (RSS,), False, True, True),
        (Act.DRY_RUN, (RSS,), False, True, False),
        (Act.OFF, (RSS,), False, False, False),
        (Act.ON, (), False, False, False),
        (Act.ON, (), True, True, True),
        (Act.OFF, (), True, False, False),
    ],
)
def test_who_may_do_what(
    act: Act, plugins: tuple[Any, ...], told: bool, judges: bool, kills: bool, tmp_path: Path
) -> None:
    made: list[object] = []

    class Watched(SignalKiller):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("agent.evicting.SignalKiller", Watched)
        config = msgspec.structs.replace(CONFIG, eviction=EvictionConfig(plugins=plugins))
        found = open_evictor(
            config, act, Hierarchy(v1={}, v2=tmp_path), AsyncExitStack(), node="n1" if told else "", kubelet=False
        )
    assert ((found is not None), len(made)) == (judges, int(kills))


def test_a_size_in_mib_is_said_as_such() -> None:
    killer = Remembering()
    finished = loop_with(Evictor(CONFIG, killer), Sensed(too_large)).turn("tick")
    assert finished.evictions is not None
    assert finished.evictions.victims[0].verdict.text.startswith(
        "Resident memory is 200.0 MiB, above 1.05 times the 100.0 MiB"
    )

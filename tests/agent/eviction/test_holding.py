"""Whether who could not be asked to leave still has to, as the manager's later rounds say."""

from __future__ import annotations

import msgspec
import pytest

from agent.config.eviction import EvictionConfig
from agent.eviction.evictor import Evictor
from agent.eviction.holding import Wish, over, wished
from agent.policy import Remembered
from api.evictions import Evictions, Held, Met, Threshold, Victim
from api.knobs import Verdict
from tests.agent.eviction.builders import S, pod
from tests.agent.eviction.test_evictor import RSS, Remembering, config
from tests.agent.eviction.test_evictor import over as sizes

WHY = Verdict(rule="r", text="t")
BATCH = pod("batch")
WISH = {"default/batch": Wish(plugin=RSS, until_ns=100 * S)}


SLOW = msgspec.structs.replace(pod("slow"), grace_s=120.0)
"""Takes two minutes of its own to end."""


def found(met: Met = Met.HARD, plugin: str = RSS, **victim: object) -> Evictions:
    thresholds = (Threshold(plugin=plugin, met=met, verdict=WHY),)
    if not victim:
        return Evictions(thresholds=thresholds)
    fields = {"pod": "default/batch", "uid": "u", "scope": "", "forced": True, "grace_s": None, **victim}
    return Evictions(thresholds=thresholds, victims=(Victim(plugin=plugin, verdict=WHY, **fields),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("victim", "until_s"),
    [
        ({"grace_s": None}, 45),
        ({"grace_s": None, "uid": SLOW.uid}, 180),
        ({"grace_s": 2.0, "uid": SLOW.uid}, 10),
        ({"grace_s": 2.0}, 10),
        ({"grace_s": 60.0}, 90),
        ({"dry_run": True}, None),
        ({"notify": True}, None),
    ],
)
def test_a_wish_counts_the_pod_as_gone_for_one_and_a_half_times_its_grace(
    victim: dict[str, object], until_s: int | None
) -> None:
    kept = wished(found(**victim), {}, {}, [SLOW], 0)
    assert [wish.until_ns for wish in kept.values()] == ([] if until_s is None else [until_s * S])


@pytest.mark.parametrize(
    ("now_s", "held", "kept"), [(99, {}, True), (100, {}, False), (1000, {"default/batch": Held.BUDGET}, True)]
)
def test_a_wish_is_kept_while_the_pod_counts_as_gone_or_is_held(now_s: int, held: dict[str, Held], kept: bool) -> None:
    assert ("default/batch" in wished(Evictions(), WISH, held, (), now_s * S)) is kept


@pytest.mark.parametrize(
    ("now_s", "judged", "settings", "skipped", "why"),
    [
        (1, found(Met.HARD), {"plugins": ("oomd-pressure",)}, "", f"{RSS} does not judge any more"),
        (1, found(Met.HARD), {"plugins": ()}, "", f"{RSS} does not judge any more"),
        (100, found(Met.HARD), {}, "", None),
        (100, found(Met.SOFT), {}, "", None),
        # It counts as gone until then, so that its plugin finds nothing wrong.
        (99, found(Met.NOT_MET), {}, "", None),
        (100, found(Met.NOT_MET), {}, "", f"{RSS} finds no more trouble, or cannot tell"),
        (100, found(Met.HARD, "oomd-pressure"), {}, "", f"{RSS} finds no more trouble, or cannot tell"),
        (100, Evictions(), {}, "", f"{RSS} finds no more trouble, or cannot tell"),
        (1, found(Met.HARD), {"dry_run": (RSS,), "plugins": (RSS,)}, "", f"{RSS} runs dry by now"),
        (1, found(Met.HARD), {"skipped_annotations": ("keep",)}, "keep", "by now it is protected"),
    ],
)
def test_who_is_held_stays_once_its_plugin_finds_nothing(
    now_s: int, judged: Evictions, settings: dict[str, object], skipped: str, why: str | None
) -> None:
    batch = pod("batch", annotations={skipped: "true"} if skipped else {})
    given = EvictionConfig(**{"plugins": (RSS,), **settings})  # type: ignore[arg-type]
    names = list(over(WISH, ["default/batch"], judged, [batch], given, now_s * S))
    assert names == ([] if why is None else [("default/batch", why)])


def test_what_a_plugin_at_a_socket_wished_is_over_once_it_is_gone() -> None:
    wish = {"default/batch": Wish(plugin="theirs", until_ns=100 * S)}
    config = EvictionConfig(plugin_sockets="/run/plugins")
    there, silent, gone = found(Met.HARD, "theirs"), found(Met.NOT_MET, "theirs"), Evictions()
    assert list(over(wish, ["default/batch"], there, [BATCH], config, S)) == []
    assert list(over(wish, ["default/batch"], silent, [BATCH], config, S)) == [], "it may only be slow"
    assert list(over(wish, ["default/batch"], gone, [BATCH], config, S)) == [
        ("default/batch", "theirs does not judge any more")
    ]


def test_rounds_withdraw_a_pod_at_once_whose_plugin_is_switched_off() -> None:
    killer = Remembering()
    evictor = Evictor(config(RSS), killer)
    evictor.turn(sizes(100, batch=200, web=1), None, None, Remembered(), 100 * S)
    killer.leaving, killer.held = frozenset(), {"default/batch": Held.UNREACHABLE}
    evictor.obey(config())
    shown = evictor.turn(sizes(106, batch=200, web=1), None, None, Remembered(), 106 * S)
    assert shown.thresholds == ()
    assert killer.withdrawn == [("default/batch", f"{RSS} does not judge any more")]


def test_what_nobody_remembers_is_withdrawn() -> None:
    assert list(over({}, ["default/batch"], found(), [BATCH], EvictionConfig(), 0)) == [
        ("default/batch", "nobody knows any more what for")
    ]


def test_rounds_withdraw_a_pod_that_could_not_be_asked_once_the_trouble_is_over() -> None:
    """It is over its request at 100 s; the API server is away; from 120 s on it is not over any more, and 45 s after it was
    sent that is believed."""
    killer = Remembering()
    evictor = Evictor(config(RSS), killer)

    def turn(at_s: float, size: float) -> Evictions:
        return evictor.turn(sizes(at_s, batch=size, web=1), None, None, Remembered(), round(at_s * S))

    turn(100, 200)
    killer.leaving, killer.held = frozenset(), {"default/batch": Held.UNREACHABLE}
    shown = turn(106, 200)
    assert (shown.held, killer.withdrawn) == ({"default/batch": Held.UNREACHABLE}, [])
    for at_s in (120, 126, 132, 138, 144):
        turn(at_s, 1)
    assert killer.withdrawn == []
    turn(150, 1)
    assert killer.withdrawn == [("default/batch", f"{RSS} finds no more trouble, or cannot tell")]


def test_rounds_ask_again_while_the_trouble_lasts() -> None:
    killer = Remembering()
    evictor = Evictor(config(RSS), killer)
    for at_s in range(100, 160, 6):
        evictor.turn(sizes(at_s, batch=200, web=1), None, None, Remembered(), at_s * S)
        killer.leaving, killer.held = frozenset(), {"default/batch": Held.UNREACHABLE}
    assert killer.withdrawn == []
    assert killer.asked == [("default/batch", None)] * 2, "at 100 s, and when it was not gone 45 s later"

"""Whether who could not be asked to leave still has to, as the manager's later rounds say."""

from __future__ import annotations

import msgspec
import pytest

from agent.advisor.engine import PolicyState
from agent.config.config import AgentConfig
from agent.config.eviction import EvictionConfig
from agent.eviction.cancellation import PendingEviction, evictions_to_cancel, track_pending_evictions
from agent.eviction.runner import EvictionRunner
from agent.eviction.victims import SentEviction
from api.eviction import EvictionBlock, EvictionResult, EvictionThreshold, EvictionVictim, ThresholdMet
from api.knobs import Reason
from api.measurements import Pressure
from tests.agent.eviction.builders import GIB, MIB, S, pod, situation
from tests.agent.eviction.test_runner import RSS, Remembering, config
from tests.agent.eviction.test_runner import over as sizes

WHY = Reason(rule="r", text="t")
BATCH = pod("batch")
PENDING = {"default/batch": PendingEviction(plugin=RSS, until_ns=100 * S)}


SLOW = msgspec.structs.replace(pod("slow"), grace_s=120.0)
"""Takes two minutes of its own to end."""


def result(met: ThresholdMet = ThresholdMet.HARD, plugin: str = RSS, **victim: object) -> EvictionResult:
    thresholds = (EvictionThreshold(plugin=plugin, met=met, reason=WHY),)
    if not victim:
        return EvictionResult(thresholds=thresholds)
    fields = {"pod": "default/batch", "uid": "u", "scope": "", "forced": True, "grace_s": None, **victim}
    return EvictionResult(thresholds=thresholds, victims=(EvictionVictim(plugin=plugin, reason=WHY, **fields),))  # type: ignore[arg-type]


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
    expected = track_pending_evictions(result(**victim), {}, {}, [SLOW], 0)
    assert [pending.until_ns for pending in expected.values()] == ([] if until_s is None else [until_s * S])


@pytest.mark.parametrize(
    ("now_s", "held", "expected"),
    [(99, {}, True), (100, {}, False), (1000, {"default/batch": EvictionBlock.BUDGET}, True)],
)
def test_a_wish_is_kept_while_the_pod_counts_as_gone_or_is_held(
    now_s: int, held: dict[str, EvictionBlock], expected: bool
) -> None:
    assert ("default/batch" in track_pending_evictions(EvictionResult(), PENDING, held, (), now_s * S)) is expected


@pytest.mark.parametrize(
    ("gone", "met_thresholds", "settings", "skipped", "why"),
    [
        (True, result(ThresholdMet.HARD), {"plugins": ("oomd-pressure",)}, "", f"{RSS} is disabled"),
        (True, result(ThresholdMet.HARD), {"plugins": ()}, "", f"{RSS} is disabled"),
        (False, result(ThresholdMet.HARD), {}, "", None),
        (False, result(ThresholdMet.SOFT), {}, "", None),
        # It counted as gone, so that its plugin found nothing wrong.
        (True, result(ThresholdMet.NOT_MET), {}, "", None),
        (False, result(ThresholdMet.NOT_MET), {}, "", f"{RSS} no longer meets its threshold, or has no inputs"),
        (
            False,
            result(ThresholdMet.HARD, "oomd-pressure"),
            {},
            "",
            f"{RSS} no longer meets its threshold, or has no inputs",
        ),
        (False, EvictionResult(), {}, "", f"{RSS} no longer meets its threshold, or has no inputs"),
        (True, result(ThresholdMet.HARD), {"dry_run": (RSS,), "plugins": (RSS,)}, "", f"{RSS} now runs dry"),
        (True, result(ThresholdMet.HARD), {"skipped_annotations": ("keep",)}, "keep", "the pod is now protected"),
    ],
)
def test_who_is_held_stays_once_its_plugin_finds_nothing(
    gone: bool, met_thresholds: EvictionResult, settings: dict[str, object], skipped: str, why: str | None
) -> None:
    batch = pod("batch", annotations={skipped: "true"} if skipped else {})
    given = EvictionConfig(**{"plugins": (RSS,), **settings})  # type: ignore[arg-type]
    names = list(
        evictions_to_cancel(
            PENDING, ["default/batch"], met_thresholds, [batch], given, ["default/batch"] if gone else []
        )
    )
    assert names == ([] if why is None else [("default/batch", why)])


def test_what_a_plugin_at_a_socket_wished_is_over_once_it_is_gone() -> None:
    pending = {"default/batch": PendingEviction(plugin="theirs", until_ns=100 * S)}
    config = EvictionConfig(plugin_sockets="/run/plugins")
    there, silent, gone = result(ThresholdMet.HARD, "theirs"), result(ThresholdMet.NOT_MET, "theirs"), EvictionResult()
    held = ["default/batch"]
    assert list(evictions_to_cancel(pending, held, there, [BATCH], config, held)) == []
    assert list(evictions_to_cancel(pending, held, silent, [BATCH], config, held)) == [], "it may only be slow"
    assert list(evictions_to_cancel(pending, held, gone, [BATCH], config, held)) == [
        ("default/batch", "theirs is disabled")
    ]


def test_rounds_withdraw_a_pod_at_once_whose_plugin_is_switched_off() -> None:
    killer = Remembering()
    evictor = EvictionRunner(config(RSS), killer)
    evictor.run_cycle(sizes(100, batch=200, web=1), None, PolicyState(), 100 * S)
    killer.terminating, killer.blocked = frozenset(), {"default/batch": EvictionBlock.UNREACHABLE}
    evictor.apply_config(config())
    shown = evictor.run_cycle(sizes(106, batch=200, web=1), None, PolicyState(), 106 * S)
    assert shown.thresholds == ()
    assert killer.cancelled == [("default/batch", f"{RSS} is disabled")]


def test_what_nobody_remembers_is_withdrawn() -> None:
    assert list(evictions_to_cancel({}, ["default/batch"], result(), [BATCH], EvictionConfig(), ())) == [
        ("default/batch", "the reason of the eviction is no longer known")
    ]


def test_rounds_withdraw_a_pod_that_could_not_be_asked_once_the_trouble_is_over() -> None:
    """It is over its request at 100 s; the API server is away; from 120 s on it is not over any more, and 45 s after it was
    sent that is believed."""
    killer = Remembering()
    evictor = EvictionRunner(config(RSS), killer)

    def turn(at_s: float, size: float) -> EvictionResult:
        return evictor.run_cycle(sizes(at_s, batch=size, web=1), None, PolicyState(), round(at_s * S))

    turn(100, 200)
    killer.terminating, killer.blocked = frozenset(), {"default/batch": EvictionBlock.UNREACHABLE}
    shown = turn(106, 200)
    assert (shown.held, killer.cancelled) == ({"default/batch": EvictionBlock.UNREACHABLE}, [])
    for at_s in (120, 126, 132, 138, 144):
        turn(at_s, 1)
    assert killer.cancelled == []
    turn(150, 1)
    assert killer.cancelled == [("default/batch", f"{RSS} no longer meets its threshold, or has no inputs")]


def test_rounds_ask_again_while_the_trouble_lasts() -> None:
    killer = Remembering()
    evictor = EvictionRunner(config(RSS), killer)
    for at_s in range(100, 160, 6):
        evictor.run_cycle(sizes(at_s, batch=200, web=1), None, PolicyState(), at_s * S)
        killer.terminating, killer.blocked = frozenset(), {"default/batch": EvictionBlock.UNREACHABLE}
    assert killer.cancelled == []
    assert killer.evictions == [("default/batch", None)] * 2, "at 100 s, and when it was not gone 45 s later"


DAY = msgspec.structs.replace(pod("batch", memory=100 * MIB), grace_s=86_400.0)
OVER = f"{RSS} no longer meets its threshold, or has no inputs"


@pytest.mark.parametrize(
    ("now_s", "held", "stuck", "dry_run", "gone"),
    [
        # It was told to leave, or nobody has answered yet: for one and a half times its grace.
        (0, False, False, False, True),
        (899, False, False, False, True),
        (900, False, False, False, False),
        # Nobody answers.
        (44, True, False, False, True),
        (45, True, False, False, False),
        # A budget keeps it.
        (0, True, True, False, False),
        # Of a dry run: who is held is held for another reason.
        (899, True, True, True, True),
    ],
)
def test_who_is_held_counts_as_gone_for_no_longer_than_usual_and_who_is_kept_not_at_all(
    now_s: int, held: bool, stuck: bool, dry_run: bool, gone: bool
) -> None:
    sent = SentEviction(
        pod="default/batch", uid="u", plugin=RSS, until_ns=900 * S, held_until_ns=45 * S, dry_run=dry_run,
    )  # fmt: skip
    here = frozenset({"default/batch"})
    now = situation(now_s, held=here if held else frozenset(), stuck=here if stuck else frozenset())
    assert sent.is_excluded(now) is gone


class Rounds:
    """Of a killer that keeps a pod which takes a day to end: by a budget, or because nobody answers."""

    def __init__(self, held: EvictionBlock) -> None:
        self.killer = Remembering()
        self.held = {"default/batch": held}
        self.evictor = EvictionRunner(config(RSS), self.killer)
        self.run_cycle(100, 200)

    def run_cycle(self, at_s: int, size: int) -> list[tuple[str, str]]:
        """What is withdrawn at that time, where the pod has so many MiB of the 105 that it may have."""
        before = len(self.killer.cancelled)
        samples = {"batch": {"memory_stat": {"rss": size * MIB}, "threads": 2}}
        self.evictor.run_cycle(situation(at_s, [DAY], samples=samples).snapshot, None, PolicyState(), at_s * S)
        self.killer.terminating, self.killer.blocked = frozenset(), self.held
        self.killer.stuck = frozenset(self.held) if EvictionBlock.BUDGET in self.held.values() else frozenset()
        return self.killer.cancelled[before:]


@pytest.mark.parametrize(
    ("held", "from_s"), [(EvictionBlock.BUDGET, 105), (EvictionBlock.REFUSED, 145), (EvictionBlock.UNREACHABLE, 145)]
)
def test_a_pod_that_takes_a_day_stays_once_the_trouble_is_over(held: EvictionBlock, from_s: int) -> None:
    """Of the others here only a budget makes the killer say that it is stuck."""
    rounds = Rounds(held)
    assert next(at for at in range(105, 1200, 5) if rounds.run_cycle(at, 1)) == from_s
    assert rounds.killer.cancelled == [("default/batch", OVER)]


@pytest.mark.parametrize(("held", "evictions"), [(EvictionBlock.BUDGET, 1), (EvictionBlock.UNREACHABLE, 25)])
def test_a_pod_that_takes_a_day_is_kept_in_mind_while_the_trouble_lasts(held: EvictionBlock, evictions: int) -> None:
    rounds = Rounds(held)
    assert [at for at in range(105, 1200, 5) if rounds.run_cycle(at, 200)] == []
    assert rounds.killer.evictions == [("default/batch", None)] * evictions, (
        "at 100 s, and each 45 s of those that are not stuck"
    )
    if held is EvictionBlock.BUDGET:
        assert rounds.run_cycle(1200, 1) == [("default/batch", OVER)], "and at once when it is over"


def test_who_was_withdrawn_counts_as_here() -> None:
    """The trouble is over at 105 s and back at 110 s: the pod was sent 10 s ago, and nobody has told it to go."""
    rounds = Rounds(EvictionBlock.BUDGET)
    assert rounds.run_cycle(105, 1) == [("default/batch", OVER)]
    rounds.held, rounds.killer.blocked, rounds.killer.stuck = {}, {}, frozenset()
    rounds.run_cycle(110, 200)
    assert rounds.killer.evictions == [("default/batch", None)] * 2


@pytest.mark.parametrize(("held", "second_s"), [(EvictionBlock.BUDGET, 115), (EvictionBlock.UNREACHABLE, None)])
def test_others_leave_in_the_place_of_whom_a_budget_keeps_also_where_victims_are_waited_for(
    held: EvictionBlock, second_s: int | None
) -> None:
    """All tasks stall, which does not tell what a pod on its way out is going to free; 15 s are between two victims."""
    pods = [msgspec.structs.replace(pod(name), grace_s=86_400.0) for name in ("a", "b")]
    node = {"memory_pressure": Pressure(some_us=0, some_avg10=80, full_us=0, full_avg10=80)}
    samples = {"a": {"memory_bytes": 2 * GIB, "threads": 1}, "b": {"memory_bytes": GIB, "threads": 1}}
    killer = Remembering()
    settings = msgspec.convert({"eviction": {"plugins": ["oomd-pressure"], "oomd": {"graceS": None}}}, AgentConfig)
    evictor = EvictionRunner(settings, killer)

    def turn(at_s: int) -> None:
        snapshot_now = situation(at_s, pods, samples=samples, node=node).snapshot
        evictor.run_cycle(snapshot_now, None, PolicyState(), at_s * S)

    for at_s in range(70, 101, 5):
        turn(at_s)
    assert killer.evictions == [("default/a", None)]
    killer.terminating, killer.blocked = frozenset(), {"default/a": held}
    killer.stuck = frozenset({"default/a"}) if held is EvictionBlock.BUDGET else frozenset()
    second = None
    for at_s in range(105, 145, 5):
        turn(at_s)
        if second is None and len(killer.evictions) > 1:
            second = at_s
    assert second == second_s
    assert killer.evictions[1:2] == ([] if second_s is None else [("default/b", None)])

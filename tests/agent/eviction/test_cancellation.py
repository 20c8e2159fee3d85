"""Cancellation of blocked evictions by the results of later cycles."""

from __future__ import annotations

import msgspec
import pytest

from agent.advisor.engine import PolicyState
from agent.config.config import AgentConfig
from agent.config.eviction import EvictionConfig
from agent.eviction.runner import EvictionRunner
from agent.eviction.victims import PendingEviction, SentEviction, evictions_to_cancel, track_pending_evictions
from api.eviction import EvictionBlock, EvictionResult, EvictionThreshold, EvictionVictim, ThresholdMet
from api.knobs import Reason
from api.snapshot import Pressure
from api.units import GIB, MIB
from tests.agent.eviction.builders import S, pod, situation
from tests.agent.eviction.test_runner import RSS, FakePodEvictor, config

WHY = Reason(rule="r", text="t")
BATCH = pod("batch")
PENDING = {"default/batch": PendingEviction(plugin=RSS, until_ns=100 * S)}


SLOW = msgspec.structs.replace(pod("slow"), grace_s=120.0)
"""A pod with a grace of two minutes."""


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
def test_a_pending_eviction_lasts_for_one_and_a_half_times_the_grace(
    victim: dict[str, object], until_s: int | None
) -> None:
    expected = track_pending_evictions(result(**victim), {}, {}, [SLOW], 0)
    assert [pending.until_ns for pending in expected.values()] == ([] if until_s is None else [until_s * S])


@pytest.mark.parametrize(
    ("now_s", "held", "expected"),
    [(99, {}, True), (100, {}, False), (1000, {"default/batch": EvictionBlock.BUDGET}, True)],
)
def test_a_pending_eviction_is_retained_until_its_time_or_while_it_is_blocked(
    now_s: int, held: dict[str, EvictionBlock], expected: bool
) -> None:
    assert ("default/batch" in track_pending_evictions(EvictionResult(), PENDING, held, (), now_s * S)) is expected


@pytest.mark.parametrize(
    ("excluded", "met_thresholds", "settings", "skipped", "why"),
    [
        (True, result(ThresholdMet.HARD), {"plugins": ("oomd-pressure",)}, "", f"{RSS} is disabled"),
        (True, result(ThresholdMet.HARD), {"plugins": ()}, "", f"{RSS} is disabled"),
        (False, result(ThresholdMet.HARD), {}, "", None),
        (False, result(ThresholdMet.SOFT), {}, "", None),
        # It was excluded, so the plugin did not count it.
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
def test_a_blocked_eviction_is_cancelled_once_its_plugin_no_longer_meets_its_threshold(
    excluded: bool, met_thresholds: EvictionResult, settings: dict[str, object], skipped: str, why: str | None
) -> None:
    batch = pod("batch", annotations={skipped: "true"} if skipped else {})
    given = EvictionConfig(**{"plugins": (RSS,), **settings})  # type: ignore[arg-type]
    names = list(
        evictions_to_cancel(
            PENDING, ["default/batch"], met_thresholds, [batch], given, ["default/batch"] if excluded else []
        )
    )
    assert names == ([] if why is None else [("default/batch", why)])


def test_evictions_of_an_external_plugin_are_cancelled_once_it_has_no_findings() -> None:
    pending = {"default/batch": PendingEviction(plugin="theirs", until_ns=100 * S)}
    config = EvictionConfig(plugin_sockets="/run/plugins")
    met, not_met, absent = result(ThresholdMet.HARD, "theirs"), result(ThresholdMet.NOT_MET, "theirs"), EvictionResult()
    held = ["default/batch"]
    assert list(evictions_to_cancel(pending, held, met, [BATCH], config, held)) == []
    assert list(evictions_to_cancel(pending, held, not_met, [BATCH], config, held)) == [], "the plugin may be slow"
    assert list(evictions_to_cancel(pending, held, absent, [BATCH], config, held)) == [
        ("default/batch", "theirs is disabled")
    ]


def test_a_blocked_eviction_without_a_recorded_reason_is_cancelled() -> None:
    assert list(evictions_to_cancel({}, ["default/batch"], result(), [BATCH], EvictionConfig(), ())) == [
        ("default/batch", "the reason of the eviction is no longer known")
    ]


DAY_S = 86_400.0
OVER = f"{RSS} no longer meets its threshold, or has no inputs"


@pytest.mark.parametrize(
    ("now_s", "held", "stuck", "dry_run", "excluded"),
    [
        # The request was accepted, or is under way: for one and a half times the grace.
        (0, False, False, False, True),
        (899, False, False, False, True),
        (900, False, False, False, False),
        # The API server does not answer.
        (44, True, False, False, True),
        (45, True, False, False, False),
        # A budget blocks it.
        (0, True, True, False, False),
        # In a dry run the pod is blocked for another reason.
        (899, True, True, True, True),
    ],
)
def test_a_blocked_pod_is_excluded_for_45_s_and_one_that_a_budget_blocks_not_at_all(
    now_s: int, held: bool, stuck: bool, dry_run: bool, excluded: bool
) -> None:
    sent = SentEviction(
        pod="default/batch", uid="u", plugin=RSS, until_ns=900 * S, held_until_ns=45 * S, dry_run=dry_run,
    )  # fmt: skip
    here = frozenset({"default/batch"})
    now = situation(now_s, held=here if held else frozenset(), stuck=here if stuck else frozenset())
    assert sent.is_excluded(now) is excluded


class BlockedCycles:
    """Cycles of a runner whose evictor blocks a pod with this grace, which exceeds its request at 100 s."""

    def __init__(self, held: EvictionBlock, grace_s: float | None = DAY_S) -> None:
        self.pod_evictor = FakePodEvictor()
        self.pod = msgspec.structs.replace(pod("batch", memory=100 * MIB), grace_s=grace_s)
        self.held = {"default/batch": held}
        self.evictor = EvictionRunner(config(RSS), self.pod_evictor)
        self.run_cycle(100, 200)

    def run_cycle(self, at_s: int, size: int) -> list[tuple[str, str]]:
        """Run a cycle in which the pod uses `size` of at most 105 MiB; return what is cancelled."""
        before = len(self.pod_evictor.cancelled)
        samples = {"batch": {"memory_stat": {"rss": size * MIB}, "threads": 2}}
        snapshot = situation(at_s, [self.pod], samples=samples).snapshot
        self.latest = self.evictor.run_cycle(snapshot, None, PolicyState(), at_s * S)
        self.pod_evictor.terminating, self.pod_evictor.blocked = frozenset(), self.held
        self.pod_evictor.stuck = frozenset(self.held) if EvictionBlock.BUDGET in self.held.values() else frozenset()
        return self.pod_evictor.cancelled[before:]


@pytest.mark.parametrize(
    ("held", "from_s"), [(EvictionBlock.BUDGET, 105), (EvictionBlock.REFUSED, 145), (EvictionBlock.UNREACHABLE, 145)]
)
@pytest.mark.parametrize("grace_s", [None, DAY_S])
def test_a_blocked_eviction_is_cancelled_once_the_threshold_is_not_met(
    held: EvictionBlock, from_s: int, grace_s: float | None
) -> None:
    """Only a budget makes the pod stuck; any other one is excluded for 45 s, whatever its grace."""
    cycles = BlockedCycles(held, grace_s)
    assert next(at for at in range(105, 1200, 5) if cycles.run_cycle(at, 1)) == from_s
    assert cycles.pod_evictor.cancelled == [("default/batch", OVER)]


@pytest.mark.parametrize(("held", "evictions"), [(EvictionBlock.BUDGET, 1), (EvictionBlock.UNREACHABLE, 25)])
@pytest.mark.parametrize("grace_s", [None, DAY_S])
def test_a_blocked_eviction_stays_pending_while_the_threshold_is_met(
    held: EvictionBlock, evictions: int, grace_s: float | None
) -> None:
    cycles = BlockedCycles(held, grace_s)
    assert [at for at in range(105, 1200, 5) if cycles.run_cycle(at, 200)] == []
    assert cycles.pod_evictor.evictions == [("default/batch", None)] * evictions, (
        "at 100 s, and each 45 s of those that are not stuck"
    )
    assert cycles.latest.held == {"default/batch": held}
    if held is EvictionBlock.BUDGET:
        assert cycles.run_cycle(1200, 1) == [("default/batch", OVER)], "at once when the threshold is not met"


def test_disabling_a_plugin_cancels_its_evictions_in_the_next_cycle() -> None:
    cycles = BlockedCycles(EvictionBlock.UNREACHABLE)
    cycles.evictor.apply_config(config())
    assert cycles.run_cycle(105, 200) == [("default/batch", f"{RSS} is disabled")]


def test_a_cancelled_pod_is_no_longer_excluded() -> None:
    """The threshold is not met at 105 s and met again at 110 s, 10 s after the pod was selected first."""
    cycles = BlockedCycles(EvictionBlock.BUDGET)
    assert cycles.run_cycle(105, 1) == [("default/batch", OVER)]
    cycles.held, cycles.pod_evictor.blocked, cycles.pod_evictor.stuck = {}, {}, frozenset()
    cycles.run_cycle(110, 200)
    assert cycles.pod_evictor.evictions == [("default/batch", None)] * 2


@pytest.mark.parametrize(("held", "second_s"), [(EvictionBlock.BUDGET, 115), (EvictionBlock.UNREACHABLE, None)])
def test_another_pod_is_evicted_in_place_of_one_that_a_budget_blocks(held: EvictionBlock, second_s: int | None) -> None:
    """All tasks stall, which does not show what a terminating pod is going to free; 15 s are between two victims."""
    pods = [msgspec.structs.replace(pod(name), grace_s=86_400.0) for name in ("a", "b")]
    node = {"memory_pressure": Pressure(some_us=0, some_avg10=80, full_us=0, full_avg10=80)}
    samples = {"a": {"memory_bytes": 2 * GIB, "threads": 1}, "b": {"memory_bytes": GIB, "threads": 1}}
    pod_evictor = FakePodEvictor()
    settings = msgspec.convert({"eviction": {"plugins": ["oomd-pressure"], "oomd": {"graceS": None}}}, AgentConfig)
    evictor = EvictionRunner(settings, pod_evictor)

    def run_cycle(at_s: int) -> None:
        snapshot_now = situation(at_s, pods, samples=samples, node=node).snapshot
        evictor.run_cycle(snapshot_now, None, PolicyState(), at_s * S)

    for at_s in range(70, 101, 5):
        run_cycle(at_s)
    assert pod_evictor.evictions == [("default/a", None)]
    pod_evictor.terminating, pod_evictor.blocked = frozenset(), {"default/a": held}
    pod_evictor.stuck = frozenset({"default/a"}) if held is EvictionBlock.BUDGET else frozenset()
    second = None
    for at_s in range(105, 145, 5):
        run_cycle(at_s)
        if second is None and len(pod_evictor.evictions) > 1:
            second = at_s
    assert second == second_s
    assert pod_evictor.evictions[1:2] == ([] if second_s is None else [("default/b", None)])

"""The eviction manager: tolerance, order, burst, dry runs, conditions and protected pods."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.config.eviction import (
    DEFAULT_PLUGINS,
    PLUGIN_NAMES,
    EvictionConfig,
    FilesystemThreshold,
    KoordinatorMemoryConfig,
    ReclaimedPressureConfig,
    RootfsPressureConfig,
    RssOveruseConfig,
)
from agent.eviction import manager
from agent.eviction.eviction_inputs import EvictionInputs, RootfsUse, grace_period_s
from agent.eviction.finding import EvictionCandidate, EvictionFinding, make_threshold
from agent.eviction.manager import EvictionState, evaluate_evictions
from agent.eviction.plugins.network_eviction import NIC_ANNOTATION
from agent.eviction.victims import (
    CRITICAL_PRIORITY,
    EVICT_SCORE_ANNOTATION,
    SOFT_NOTIFY_ANNOTATION,
    EvictionProposal,
    is_protected,
    select_victims,
)
from api.advice import Headroom, PowerAction, PowerActionKind
from api.eviction import EvictionResult, EvictionThreshold, ThresholdMet
from api.knobs import Reason
from api.pod import Pod
from api.qos import Enhancements, QoSLevel
from api.quantity import format_bytes
from api.snapshot import ComponentHealth, Filesystem, Pressure
from api.units import GIB, NS_PER_S
from tests.agent.eviction.builders import HARD, NOT_MET, PAGE, SOFT, load, numa_node, pod, pressure, situation, zone

WHY = Reason(rule="r", text="t")
RECLAIMED = "reclaimed-resource-pressure-eviction-plugin"
RSS = "rss-overuse-eviction-plugin"
SYSTEM = "system-memory-pressure-eviction-plugin"
KOORDINATOR = "koordinator-memory-evict"


def config(*plugins: str, **more: Any) -> EvictionConfig:
    return EvictionConfig(plugins=plugins, **more)  # type: ignore[arg-type]


def pressed(at_s: float, pods: list[Pod], headroom_cores: float = 1.0, **more: Any) -> EvictionInputs:
    """Requests above the headroom."""
    return situation(at_s, pods, headroom=Headroom(cores=headroom_cores, reason=WHY), **more)


def play(
    rounds: list[EvictionInputs], settings: EvictionConfig, memory: EvictionState | None = None
) -> tuple[list[EvictionResult], EvictionState]:
    memory = EvictionState() if memory is None else memory
    result = []
    for each in rounds:
        evictions, memory = evaluate_evictions(each, memory, settings)
        # The state is serializable.
        memory = msgspec.json.decode(msgspec.json.encode(memory), type=EvictionState)
        result.append(evictions)
    return result, memory


def holding(size: int) -> dict[str, int]:
    """Return memory.stat of a cgroup that frees `size` bytes when it is removed."""
    return {"inactive_anon": size, "active_anon": 0, "unevictable": 0}


def replace_plugin(monkeypatch: pytest.MonkeyPatch, name: str, evaluate: Callable[..., object]) -> None:
    plugin = manager._PLUGINS[name]._replace(evaluate=evaluate)
    monkeypatch.setattr(manager, "_PLUGINS", {**manager._PLUGINS, name: plugin})


def broken(*_: object) -> object:
    raise ZeroDivisionError("of no use")


def victims(evictions: EvictionResult) -> list[str]:
    return [victim.pod.removeprefix("default/") for victim in evictions.victims]


def test_no_plugin_is_evaluated_by_default() -> None:
    (evictions,), _ = play([pressed(100, [pod("a", cores=50)])], EvictionConfig())
    assert evictions == EvictionResult()


def test_star_is_katalysts_default() -> None:
    star = config("*")
    assert [name for name in PLUGIN_NAMES if star.enabled(name)] == [
        "reclaimed-resource-pressure-eviction-plugin",
        "reclaimed-numa-resource-pressure-eviction-plugin",
        "numa-memory-pressure-eviction-plugin",
        "system-memory-pressure-eviction-plugin",
    ]
    assert config("*", RSS).enabled(RSS)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"plugins": ["rss"]}', type=EvictionConfig)


def test_the_document_lists_every_plugin_and_marks_those_of_star() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs/eviction.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| (on)? ?\|$", text, re.MULTILINE)
    assert dict(rows) == {name: "on" if name in DEFAULT_PLUGINS else "" for name in PLUGIN_NAMES}


def test_a_hard_threshold_evicts_one_pod_with_its_reason() -> None:
    """Katalyst's own case: two pods of 5000 milli-cores, a headroom of 1000."""
    (evictions,), _ = play([pressed(100, [pod("a", cores=5), pod("b", cores=5)])], config(RECLAIMED))
    (victim,) = evictions.victims
    assert (victim.pod, victim.forced, victim.grace_s, victim.dry_run) == ("default/a", True, 60, False)
    assert victim.reason.text.startswith(
        f"plugin {RECLAIMED} met threshold in scope resource.katalyst.kubewharf.io/reclaimed_millicpu, "
        "target 5000, observed 10000: "
    )


def test_evaluations_are_five_seconds_apart_and_thresholds_hold_between() -> None:
    pods = [pod("a", cores=50), pod("b", cores=60)]
    first, between, second = play([pressed(at, pods) for at in (100, 104.9, 105)], config(RECLAIMED))[0]
    assert victims(first) == ["b"]
    assert (victims(between), between.thresholds) == ([], first.thresholds)
    assert victims(second) == ["a"]


def test_a_victim_is_excluded_for_one_and_a_half_times_its_grace() -> None:
    pods = [pod("a", cores=4), pod("b", cores=4)]
    rounds = [pressed(at, pods) for at in (100, 105, 185, 190)]
    result, _ = play(rounds, config(RECLAIMED, reclaimed=ReclaimedPressureConfig(cpu_soft_threshold=900)))
    # 8 of 5, then 4 of 5; after 1.5 times its minute it still exists
    assert [victims(each) for each in result] == [["a"], [], [], ["a"]]


def test_requests_of_a_pod_under_eviction_do_not_count() -> None:
    at = pressed(100, [pod("a", cores=5), pod("b", cores=5)], terminating=frozenset({"default/b"}))
    (evictions,), _ = play([at], config(RECLAIMED))
    assert victims(evictions) == []
    assert evictions.thresholds[0].met is SOFT


@pytest.mark.parametrize(("stuck", "evicted"), [((), []), (("default/a",), ["b"])])
def test_memory_of_a_terminating_pod_counts_as_free_unless_it_is_stuck(
    stuck: tuple[str, ...], evicted: list[str]
) -> None:
    """0.9 GiB are free, 1 GiB is the threshold; `a` is going to free 0.25 GiB."""
    going = frozenset({"default/a"})
    at = free_memory(100, [pod("a"), pod("b")], free=round(0.9 * GIB))
    at = msgspec.structs.replace(at, terminating=going, stuck=frozenset(stuck))
    (evictions,), _ = play([at], config(SYSTEM))
    assert victims(evictions) == evicted


def test_a_threshold_has_to_last_for_its_tolerance() -> None:
    pods = [pod("a", cores=6)]
    settings = config(RECLAIMED, reclaimed=ReclaimedPressureConfig(tolerance_s=10))
    result, _ = play([pressed(at, pods) for at in (100, 105, 110)], settings)
    assert [victims(each) for each in result] == [[], [], ["a"]]
    assert result[1].thresholds[0].since_ns == 100 * 10**9
    # one cycle of relief, and one without inputs, restart the timer
    for gap in (pressed(105, pods, headroom_cores=9.0), situation(105, pods)):
        result, _ = play([pressed(100, pods), gap, pressed(110, pods), pressed(115, pods)], settings)
        assert [victims(each) for each in result] == [[], [], [], []]


def test_soft_thresholds_evict_one_pod_of_the_node() -> None:
    over = {"memory_stat": {"rss": 9}}
    pods = [
        pod("web", QoSLevel.SHARED, memory=1),
        pod("b", memory=1, priority=5),
        pod("a", memory=1, priority=5),
        pod("low", memory=1, priority=4),
    ]
    samples = {each.name: over for each in pods}
    rounds = [situation(at, pods, samples=samples) for at in (100, 105, 110, 115)]
    result, _ = play(rounds, config(RSS))
    assert [victims(each) for each in result] == [["low"], ["b"], ["a"], ["web"]], (
        "as ranked by the plugin, of one priority"
    )
    assert not result[0].victims[0].forced


def test_pods_that_opted_in_are_notified_instead() -> None:
    notified = pod("a", memory=1, annotations={SOFT_NOTIFY_ANNOTATION: "true"})
    at = [situation(at_s, [notified], samples={"a": {"memory_stat": {"rss": 9}}}) for at_s in (100, 105)]
    result, memory = play(at, config(RSS))
    assert [each.victims[0].notify for each in result] == [True, True]
    assert memory.sent == ()
    # a notified pod does not count against the number of victims, whatever its rank
    both = [notified, pod("b", memory=1, priority=notified.priority + 1)]
    (evictions,), _ = play(
        [situation(100, both, samples={name: {"memory_stat": {"rss": 9}} for name in "ab"})], config(RSS)
    )
    assert [(victim.pod, victim.notify) for victim in evictions.victims] == [("default/b", False), ("default/a", True)]
    # a hard threshold does not notify
    (evictions,), _ = play(
        [pressed(100, [pod("a", cores=9, annotations={SOFT_NOTIFY_ANNOTATION: "true"})])], config(RECLAIMED)
    )
    assert not evictions.victims[0].notify


def test_a_notification_starts_no_cool_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin with a cool-down of 60 s notifies one pod; the other is evicted 5 s later."""
    pods = [pod("a", annotations={SOFT_NOTIFY_ANNOTATION: "true"}), pod("b")]
    threshold = make_threshold(RSS, ThresholdMet.SOFT, "s", subject="x", value=1, observed=2, text="t", inputs={})

    def ask(at: EvictionInputs, _config: object) -> tuple[EvictionFinding, ...]:
        there = [each for each in pods if each.name == "a" or at.now_ns > 102e9]
        candidates = tuple(EvictionCandidate(pod=each, text="t") for each in there)
        return (EvictionFinding(threshold=threshold, candidates=candidates, cool_down_s=60.0),)

    replace_plugin(monkeypatch, RSS, ask)
    result, _ = play([situation(at, pods) for at in (100, 105)], config(RSS))
    assert [[(v.pod, v.notify) for v in each.victims] for each in result] == [
        [("default/a", True)], [("default/b", False), ("default/a", True)],
    ]  # fmt: skip


def test_a_soft_threshold_of_reclaimed_resources_only_notifies() -> None:
    """Twice the headroom for ten minutes: the pod that opted in is notified from five minutes on, the larger one never."""
    pods = [pod("a", cores=1.5), pod("b", cores=0.5, annotations={SOFT_NOTIFY_ANNOTATION: "true"})]
    result, memory = play([pressed(at, pods) for at in range(100, 700, 5)], config(RECLAIMED))
    notices = [(victim.pod, victim.notify) for each in result for victim in each.victims]
    assert notices == [("default/b", True)] * 60
    assert memory.sent == ()


def test_the_higher_score_leaves_first() -> None:
    pods = [
        pod(name, memory=1, annotations={EVICT_SCORE_ANNOTATION: score})
        for name, score in (("a", "1"), ("x", "nan"), ("b", "7"), ("c", "x"), ("y", "inf"))
    ]
    at = situation(100, pods, samples={name: {"memory_stat": {"rss": 9}} for name in "axbcy"})
    assert victims(play([at], config(RSS))[0][0]) == ["b"]


def test_victims_of_a_round_are_ordered_and_at_most_three() -> None:
    pods = [
        pod("online", QoSLevel.SHARED, priority=-9),
        pod("high", priority=7),
        pod("b", priority=1),
        pod("a", priority=1),
        pod("low", priority=0),
    ]
    at = situation(
        100, pods, samples={each.name: {"memory_stat": holding(GIB)} for each in pods},
        node={"meminfo": {"MemTotal": 10 * GIB, "MemAvailable": 0}},
    )  # fmt: skip
    settings = msgspec.structs.replace(config(KOORDINATOR).koordinator_memory, lower=0.2, reclaimed_only=False)
    (evictions,), _ = play([at], config(KOORDINATOR, koordinator_memory=settings))
    assert victims(evictions) == ["low", "a", "b"]
    assert evictions.waiting == ("default/high", "default/online")


def test_the_burst_takes_the_pods_that_the_plugin_ranks_first() -> None:
    """All of one priority, 6.5 GiB above the lower bound: the burst takes the three largest, whatever their names."""
    pods = [pod(name) for name in "abcde"]
    samples = {name: {"memory_stat": holding(size * GIB)} for size, name in enumerate("abcde", 1)}
    at = situation(100, pods, samples=samples, node={"meminfo": {"MemTotal": 20 * GIB, "MemAvailable": 0}})
    (evictions,), _ = play([at], config(KOORDINATOR, koordinator_memory=KoordinatorMemoryConfig(lower=0.3)))
    assert victims(evictions) == ["e", "d", "c"]
    assert evictions.waiting == ("default/b",)


def test_victims_are_in_katalysts_order() -> None:
    """Katalyst's own case in reverse, first victim first: level, priority, scope, name."""
    shapes = [
        ("shared", 60, ""), ("dedicated", 60, "memory"), ("shared", 80, "force"), ("dedicated", 60, ""),
        ("reclaimed", 100, "force"), ("reclaimed", 20, "force"), ("shared", 70, "memory"), ("shared", 100, "force"),
        ("dedicated", 80, "memory"), ("shared", 60, "cpu"), ("reclaimed", 100, ""), ("shared", 80, "cpu"),
    ]  # fmt: skip
    threshold = EvictionThreshold(plugin="p", met=HARD, value=1.0, observed=2.0, reason=WHY)
    proposals = [
        EvictionProposal(
            EvictionCandidate(
                pod=pod(f"{level}-{priority}-{kind or 'other'}", QoSLevel(f"{level}_cores"), priority=priority)
            ),
            EvictionFinding(
                threshold=threshold, direct=True, forced=kind == "force", kind="" if kind == "force" else kind
            ),
            forced=True,
            rank=0,
        )
        for level, priority, kind in shapes
    ]
    assert [victim.pod.removeprefix("default/") for victim in select_victims(proposals, config(burst=12))[0]] == [
        "reclaimed-20-force",
        "reclaimed-100-other",
        "reclaimed-100-force",
        "dedicated-60-other",
        "shared-60-other",
        "shared-60-cpu",
        "dedicated-60-memory",
        "shared-70-memory",
        "shared-80-cpu",
        "dedicated-80-memory",
        "shared-80-force",
        "shared-100-force",
    ]


def free_memory(at_s: float, pods: list[Pod], free: int = 0) -> EvictionInputs:
    node = {"meminfo": {"MemFree": free, "MemTotal": 100 * GIB}, "sysctl": {"vm.watermark_scale_factor": 100}}
    return situation(at_s, pods, samples={each.name: {"memory_bytes": GIB // 4} for each in pods}, node=node)


def test_a_plugin_cools_down_after_a_victim() -> None:
    pods = [pod(name) for name in "abcd"]
    result, _ = play([free_memory(at, pods) for at in (100, 105, 134, 140)], config(SYSTEM))
    assert [victims(each) for each in result] == [["a"], [], [], ["b"]]


def test_reasons_have_binary_units() -> None:
    (evictions,), _ = play([free_memory(100, [pod("a")], free=round(0.5 * GIB))], config(SYSTEM))
    (victim,) = evictions.victims
    assert (victim.scope, victim.subject) == ("SystemMemory", "free")
    assert (
        f"plugin {SYSTEM} met threshold in scope SystemMemory, target 1.00 GiB, observed 512.0 MiB: "
        in victim.reason.text
    )
    assert [format_bytes(value) for value in (100 * 2.0**40, 2.0**40, 2.0**40 - 2.0**30, 0.0)] == [
        "100.00 TiB",
        "1.00 TiB",
        "1023.00 GiB",
        "0.0 MiB",
    ]


def test_samples_from_before_an_eviction_select_no_second_pod() -> None:
    """Two pods use 0.75 of a NUMA node; the first is gone at once, while its samples are still in the window."""
    name = "numa-cpu-pressure-plugin"
    pods = [pod(each, QoSLevel.SHARED, numa=(0,)) for each in ("a", "b")]
    memory, sent = EvictionState(), []
    for i in range(40):
        here = [each for each in pods if each.key not in sent]
        used = {each.name: {"cpu_usage_ns": i * 5 * 6 * 10**9} for each in here}
        evictions, memory = evaluate_evictions(situation(100.0 + 5 * i, here, samples=used), memory, config(name))
        sent += [victim.pod for victim in evictions.victims]
    assert sent == ["default/a"]


def test_conditions_outlive_their_threshold_by_five_minutes() -> None:
    pods = [pod("a")]
    rounds = [free_memory(100, pods), *(free_memory(at, pods, 90 * GIB) for at in (105, 400, 401, 405))]
    rounds.insert(2, free_memory(110, pods))
    result, _ = play(rounds, config(SYSTEM))
    shown = [[(each.condition.name, each.since_ns // 10**9) for each in evictions.conditions] for evictions in result]
    assert shown == [[("MemoryPressure", 100)]] * 6
    late, _ = play([*rounds, free_memory(411, pods, 90 * GIB)], config(SYSTEM))
    assert late[-1].conditions == ()
    assert result[0].conditions[0].condition.effects == ("NoSchedule",)


@pytest.mark.parametrize(
    "after",
    [config(), config(RECLAIMED), config(SYSTEM, dry_run=(SYSTEM,)), config(SYSTEM, dry_run=("*",))],
)
def test_disabling_a_plugin_ends_its_condition_and_restarts_its_state(after: EvictionConfig) -> None:
    pods = [pod("a")]
    first, memory = evaluate_evictions(free_memory(100, pods), EvictionState(), config(SYSTEM))
    assert [each.condition.name for each in first.conditions] == ["MemoryPressure"]
    then, memory = evaluate_evictions(free_memory(105, pods), memory, after)
    assert then.conditions == ()
    assert [victim for victim in then.victims if not victim.dry_run] == []
    again, _ = evaluate_evictions(free_memory(110, pods), memory, config(SYSTEM))
    assert [each.since_ns // 10**9 for each in again.conditions] == [110]


def test_a_condition_of_an_external_plugin_outlives_its_socket_by_five_minutes() -> None:
    finding = EvictionFinding(
        threshold=make_threshold(
            "theirs", ThresholdMet.HARD, "s", value=1, observed=2, condition="TheirPressure", text="t"
        )
    )
    given = config(plugin_sockets="/run/plugins")
    first, memory = evaluate_evictions(situation(100, [pod("a")]), EvictionState(), given, (finding,))
    names = [[each.condition.name for each in first.conditions]]
    for at_s in (105, 400, 405):
        later, memory = evaluate_evictions(situation(at_s, [pod("a")]), memory, given)
        names.append([each.condition.name for each in later.conditions])
    assert names == [["TheirPressure"], ["TheirPressure"], ["TheirPressure"], []]


def test_a_dry_run_reports_its_victim_once_and_no_condition() -> None:
    """Once in 45 s, and no other pod in its place."""
    pods = [pod("a"), pod("b")]
    rounds = [free_memory(at, pods) for at in (100, 140, 150)]
    result, _ = play(rounds, config(SYSTEM, dry_run=(SYSTEM,)))
    assert [victims(each) for each in result] == [["a"], [], ["a"]]
    assert all(victim.dry_run for each in result for victim in each.victims)
    assert result[0].thresholds[0].dry_run
    assert result[0].conditions == ()


def test_a_dry_run_does_not_keep_a_real_victim() -> None:
    pods = [pod("a", cores=9)]
    over = {"a": {"memory_stat": holding(GIB)}}
    node = {"meminfo": {"MemTotal": 10 * GIB, "MemAvailable": 0}}
    rounds = [
        pressed(100, pods, headroom_cores=9.0, samples=over, node=node),
        pressed(105, pods, samples=over, node=node),
    ]
    result, _ = play(rounds, config(RECLAIMED, KOORDINATOR, dry_run=(KOORDINATOR,)))
    assert [(victim.plugin, victim.dry_run) for victim in result[0].victims] == [(KOORDINATOR, True)]
    assert (RECLAIMED, False) in [(victim.plugin, victim.dry_run) for victim in result[1].victims]


SUPPRESSION, OOMD = "cpu-pressure-suppression-plugin", "oomd-pressure"


def enduring(at_s: float, *, old: bool = False) -> EvictionInputs:
    """One pod that requests twenty times its pool; and all tasks of the node stall."""
    stalls = Pressure(some_us=0, some_avg10=99, full_us=0, full_avg10=99)
    at = situation(
        at_s, [pod("a", cores=20)], samples={"a": {"memory_bytes": GIB}}, node={"memory_pressure": stalls},
        pools={"reclaim": (0,)},
    )  # fmt: skip
    return msgspec.structs.replace(at, now_ns=at.now_ns + 31 * 10**9) if old else at


@pytest.mark.parametrize(
    ("plugin", "lasts_s"),
    [(SUPPRESSION, 305), (OOMD, 30)],  # for more than 300 s, and for 30 s
)
def test_time_without_inputs_does_not_count_as_pressure(plugin: str, lasts_s: int) -> None:
    """Pressure for one cycle, then ten minutes without inputs, in three ways, then pressure again."""
    settings = config(plugin)
    old = [enduring(at, old=True) for at in range(100, 700, 5)]
    for gap, back in ((old, 735), (old[:1], 136), ([], 700)):
        rounds = [enduring(100), *gap, *(enduring(at) for at in range(back, back + lasts_s + 5, 5))]
        result, _ = play(rounds, settings)
        assert [victims(each) for each in result] == [[]] * (len(rounds) - 1) + [["a"]]


def test_a_gap_of_an_interval_and_staleness_does_not_restart_timers() -> None:
    """Configured intervals of a minute still count; 35 s are an interval of five and staleness, 36 s are more."""
    rounds = [enduring(at) for at in range(100, 500, 60)]
    assert [victims(each) for each in play(rounds, config(SUPPRESSION, interval_s=60))[0]][-1] == ["a"]
    for step_s, leaves in ((35, True), (36, False)):
        rounds = [enduring(at) for at in range(100, 500, step_s)]
        assert any(victims(each) for each in play(rounds, config(SUPPRESSION))[0]) == leaves


def test_a_failed_plugin_loses_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(SUPPRESSION)
    _, memory = play([enduring(at) for at in range(100, 400, 5)], settings)
    assert memory.plugins.suppression.since_ns == {"default/a": 100 * 10**9}
    with monkeypatch.context() as patched:
        replace_plugin(patched, SUPPRESSION, broken)
        _, memory = play([enduring(400)], settings, memory)
    (after,), _ = play([enduring(405)], settings, memory)
    assert victims(after) == []


def test_a_power_response_selects_no_pod_twice_after_missing_inputs() -> None:
    """Two of four pods are evicted for one response; in between the snapshot is too old once."""
    answer = PowerAction(
        kind=PowerActionKind.EVICT,
        at_ns=99,
        current_watts=300,
        count=2,
        reason=Reason(rule="r", text="t", threshold=200.0),
    )
    pods = [pod(name) for name in "abcd"]
    first, old, later = (situation(at_s, pods, power=answer) for at_s in (100, 105, 142))
    rounds = [first, msgspec.structs.replace(old, now_ns=136 * 10**9), later]
    assert [victims(each) for each in play(rounds, config("node_power_pressure", burst=1))[0]] == [["a"], [], ["b"]]
    assert [victims(each) for each in play(rounds, config("node_power_pressure"))[0]] == [["a", "b"], [], []]


def test_an_old_pod_list_evicts_no_pod() -> None:
    """A listed pod may be gone, and another one may have replaced it."""
    at = pressed(100, [pod("a", cores=6)])
    old = ComponentHealth(name="pods", ok=False, error="the list of pods is 40 s old")
    unlisted = msgspec.structs.replace(at, snapshot=msgspec.structs.replace(at.snapshot, sources=(old,)))
    assert [victims(play([each], config(RECLAIMED))[0][0]) for each in (at, unlisted)] == [["a"], []]
    (evictions,), _ = play([unlisted], config(RECLAIMED))
    assert evictions.thresholds[0].reason.text.startswith("which pods are here now is not known")


def test_a_plugin_that_fails_is_shown_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_plugin(monkeypatch, SYSTEM, broken)
    (evictions,), _ = play([pressed(100, [pod("a", cores=9)])], config(RECLAIMED, SYSTEM))
    assert victims(evictions) == ["a"]
    (failed,) = [each for each in evictions.thresholds if each.plugin == SYSTEM]
    assert (failed.reason.rule, failed.met) == ("plugin_failed", NOT_MET)
    assert failed.reason.text == "This plugin failed: ZeroDivisionError: of no use"


@pytest.mark.parametrize(
    ("fields", "safe"),
    [
        ({"qos": QoSLevel.SYSTEM}, True),
        ({"priority": CRITICAL_PRIORITY}, True),
        ({"priority": CRITICAL_PRIORITY - 1}, False),
        ({"annotations": {"keep": ""}}, True),
        ({"labels": {"stay": "no"}}, True),
        ({"labels": {"keep": ""}}, False),
        ({"annotations": {"kubernetes.io/config.source": "file"}}, True),
        ({"annotations": {"kubernetes.io/config.source": "api"}}, False),
    ],
)
def test_protected_pods(fields: dict[str, Any], safe: bool) -> None:
    settings = config(RECLAIMED, skipped_annotations=("keep",), skipped_labels=("stay",))
    qos = fields.pop("qos", QoSLevel.RECLAIMED)
    assert is_protected(pod("a", qos, **fields), settings) is safe


def test_the_next_candidate_is_evicted_in_place_of_a_protected_pod() -> None:
    pods = [pod("a", cores=9, annotations={"keep": ""}), pod("b", cores=1)]
    (evictions,), _ = play([pressed(100, pods)], config(RECLAIMED, skipped_annotations=("keep",)))
    assert victims(evictions) == ["b"]


# Properties

PODS = st.builds(
    lambda number, qos, cores, priority, numa, notes: pod(
        f"p{number}", qos, cores=cores, memory=round(cores * GIB), priority=priority, numa=numa, annotations=notes,
        enhancements=Enhancements(suppression_tolerance_rate=1.0),
    ),
    st.integers(0, 30),
    st.sampled_from(list(QoSLevel)),
    st.floats(0, 64),
    st.sampled_from([-5, 0, 7, CRITICAL_PRIORITY]),
    st.sampled_from([(), (0,), (1,)]),
    st.sampled_from([{}, {"keep": ""}, {NIC_ANNOTATION: "eth0"}, {SOFT_NOTIFY_ANNOTATION: "true"}]),
)  # fmt: skip
EVERYTHING = config(
    *PLUGIN_NAMES, skipped_annotations=("keep",), rss=RssOveruseConfig(ratio=0.5),
    rootfs_pressure=RootfsPressureConfig(minimum_free=FilesystemThreshold(ratio=0.5), minimum_capacity_bytes=0),
)  # fmt: skip


def trouble(at_s: float, pods: list[Pod], share: float) -> EvictionInputs:
    """Every kind of pressure at once; `share` is the use of each pod."""
    used = round(share * 40 * GIB)
    fields = {
        "memory_bytes": used, "memory_stat": {"anon": used, **holding(used)},
        "numa_stat": {"anon": {0: used, 1: used}, "file": {0: 0, 1: 0}},
        "cpu_usage_ns": round(at_s * share * 8e9), "cpu_system_ns": round(at_s * share * 5e9),
        "load": load(share * 99), "memory_pressure": pressure(share * 99),
    }  # fmt: skip
    node = {
        "meminfo": {"MemFree": 0, "MemTotal": 128 * GIB, "MemAvailable": 0, "SwapTotal": 9, "SwapFree": 0},
        "memory_pressure": Pressure(some_us=0, some_avg10=99, full_us=0, full_avg10=99),
        "sysctl": {"vm.watermark_scale_factor": 100}, "vmstat": {"pgsteal_kswapd": round(at_s * 9e4)},
        "zones": (zone(0, 0, GIB, GIB), zone(1, PAGE, GIB, GIB)), "numa": {0: numa_node(64 * GIB), 1: numa_node(64 * GIB)},
        "filesystems": {"/": Filesystem(size_bytes=GIB, available_bytes=0, inodes=9, free_inodes=0)},
    }  # fmt: skip
    return situation(
        at_s, pods, samples={each.name: fields for each in pods}, node=node, numa=2,
        headroom=Headroom(cores=0.5, memory_bytes=1.0, cores_by_numa={0: 0.1}, reason=WHY),
        pools={"reclaim": (0, 1), "share": (2, 3)}, nics={"eth0": 0.0},
        rootfs={each.key: RootfsUse(used_bytes=used, inodes=1) for each in pods},
    )  # fmt: skip


@settings(max_examples=60)
@given(st.lists(PODS, max_size=12, unique_by=lambda each: each.name), st.lists(st.floats(0, 1), min_size=2, max_size=6))
def test_under_any_pressure_at_most_three_unprotected_pods_are_evicted(pods: list[Pod], shares: list[float]) -> None:
    rounds = [trouble(100.0 + 30 * i, pods, share) for i, share in enumerate(shares)]
    for evictions in play(rounds, EVERYTHING)[0]:
        leaving = {victim.pod for victim in evictions.victims}
        notices = sum(victim.notify for victim in evictions.victims)
        assert notices <= 1
        assert len(evictions.victims) - notices <= 3
        assert len(evictions.victims) == len(leaving)
        assert not leaving & {each.key for each in pods if is_protected(each, EVERYTHING)}
        for victim in evictions.victims:
            assert victim.reason.text
            assert victim.grace_s is None or victim.grace_s >= 0


@given(st.lists(PODS, max_size=12, unique_by=lambda each: each.name), st.booleans())
def test_without_inputs_no_pod_is_evicted(pods: list[Pod], old: bool) -> None:
    """Cycles of pressure, so that every counter is at its maximum, and then none of their inputs.

    One plugin and one reading at a time is in test_missing_inputs.
    """
    _, memory = play([trouble(100.0 + 30 * i, pods, 1.0) for i in range(6)], EVERYTHING)
    blind = [msgspec.structs.replace(trouble(280.0, pods, 1.0), now_ns=311 * 10**9)]
    if not old:
        # Samples stand for a minute at most.
        blind = [situation(at_s, pods, numa=2) for at_s in (280.0, 310.0, 340.0)]
    for at in blind:
        memory = msgspec.structs.replace(memory, sent=(), evicted_at_ns={})
        evictions, memory = evaluate_evictions(at, memory, EVERYTHING)
    assert evictions.victims == ()
    assert memory.plugins.numa_memory.rounds == {}


def test_under_every_pressure_three_pods_are_evicted() -> None:
    """The two tests above are not vacuous."""
    pods = [pod(f"p{i}", cores=8, memory=GIB, numa=(0,)) for i in range(6)]
    (first, second), _ = play([trouble(100.0, pods, 0.5), trouble(130.0, pods, 0.5)], EVERYTHING)
    assert len(first.victims) == 3
    assert {each.plugin for each in first.thresholds} == set(PLUGIN_NAMES)
    assert HARD in {each.met for each in first.thresholds}
    assert not {each.uid for each in first.victims} & {each.uid for each in second.victims}


@pytest.mark.parametrize(
    ("own_s", "plugins_s", "seconds"),
    [(None, None, 30), (120.0, None, 120), (86400.0, None, 600), (86400.0, 5.0, 5), (5.0, 700.0, 700), (0.0, None, 0)],
)
def test_a_pods_own_grace_is_bounded_and_a_plugins_is_not(
    own_s: float | None, plugins_s: float | None, seconds: float
) -> None:
    assert grace_period_s(msgspec.structs.replace(pod("a"), grace_s=own_s), plugins_s) == seconds


def test_a_pod_with_a_long_grace_is_excluded_for_as_long() -> None:
    slow = msgspec.structs.replace(pod("slow", memory=1), grace_s=120.0)
    at = situation(100, [slow], samples={"slow": {"memory_stat": {"rss": 9}}})
    _, memory = play([at], config(RSS))
    assert [each.until_ns for each in memory.sent] == [(100 + 180) * NS_PER_S]

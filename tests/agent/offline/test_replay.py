"""Replayed cycles: reclaimed CPU, misses and latency of a policy, against numbers computed by hand."""

from __future__ import annotations

import pytest

from agent.config.advisor import AdvisorConfig
from agent.config.config import AgentConfig
from agent.offline.replay import CycleFacts, PolicyOutcome, ScoreCounters, evaluate_outcome, replay_cycles
from agent.offline.simulation.simulator import run_simulation
from agent.offline.simulation.workloads import build_node
from api.advice import Headroom
from api.decision import Advice, Cycle, Pool
from api.eviction import EvictionVictim
from api.histogram import SLOT_COUNT
from api.knobs import Reason


def fact(at_s: float = 1.0, online: float = 1.0, **values: object) -> CycleFacts:
    state: dict[str, object] = {
        "interval_s": 1.0, "node_cpus": 4, "demand_cores": online + 0.5, "batch_cores": 2.0, "batch_reclaimable_cores": 4.0,
        "interference_cores": 0.2, "waits": (0,) * SLOT_COUNT,
    }  # fmt: skip
    return CycleFacts(at_s=at_s, online_cores=online, **{**state, **values})  # type: ignore[arg-type]


def advice(reclaimable: float, share: str = "0123", reclaim: str = "0123", headroom: float | None = None) -> Advice:
    return Advice(
        policy="p",
        pools=tuple(Pool(name=n, cpus=tuple(map(int, c))) for n, c in (("share", share), ("reclaim", reclaim))),
        requirement_cores=None,
        headroom=Headroom(cores=headroom, reason=Reason(rule="r", text="t")),
        reclaimable_cores=reclaimable,
        idle=True,
        action="hold",
        reason=Reason(rule="r", text="t"),
    )


@pytest.mark.parametrize(
    ("given", "built", "batch", "harm", "short"),
    [
        (fact(), advice(4.0), 2.0, 0.2, 0.0),
        (fact(), advice(1.0), 1.0, 0.1, 0.0),
        (fact(), None, 2.0, 0.2, 0.0),
        # it had all that it was lent, so it would have taken what is left of the node
        (fact(batch_reclaimable_cores=2.1), advice(4.0), 3.0, 0.3, 0.0),
        (fact(batch_reclaimable_cores=2.1), advice(2.5), 2.5, 0.25, 0.0),
        # pools of their own: no waits for batch work, but 1.5 cores wanted on one CPU
        (fact(), advice(3.0, "0", "123"), 2.0, 0.0, 0.5),
        (fact(batch_cores=0.0), advice(3.0), 0.0, 0.0, 0.0),
    ],
    ids=[
        "as it was",
        "half of it",
        "no decision",
        "more for throttled batch work",
        "and lent",
        "apart",
        "no batch work",
    ],
)
def test_expected_outcomes(given: CycleFacts, built: Advice | None, batch: float, harm: float, short: float) -> None:
    result = evaluate_outcome(given, built, 0)
    assert (result.batch_cores, result.interference_cores, result.short_cores) == pytest.approx((batch, harm, short))


def outcome_of(cores: float) -> PolicyOutcome:
    return PolicyOutcome(
        reclaimable_cores=2.0,
        headroom_cores=cores,
        action="hold",
        rule="",
        changes=1,
        batch_cores=1.0,
        interference_cores=0.5,
        short_cores=0.0,
    )


def test_headroom_is_compared_with_the_later_peak_of_online_use() -> None:
    """The headroom is 2 of 4 CPUs in every second, for 3 s each: the peak of 2.5 at 10 s misses those of 7, 8 and 9."""
    counters = ScoreCounters(horizon_s=3)
    for second in range(1, 21):
        counters.add(fact(at_s=second, online=2.5 if second == 10 else 1.0), outcome_of(2.0))
    score = counters.score()
    assert (score.missed_ratio, score.missed_cores) == (pytest.approx(3 / 17), pytest.approx(0.5))
    assert (score.rounds, score.changes, score.shrinks) == (20, 20, 0)
    assert (score.reclaimable_cores, score.headroom_cores, score.harm_ms_per_s) == (2.0, 2.0, 500.0)


def test_a_remaining_pod_counts_once_and_a_soft_eviction_not_at_all() -> None:
    """Selected every five seconds, evicted again every 45: two pods are evicted, not 48."""
    counters = ScoreCounters(horizon_s=60)
    for second in range(5, 125, 5):
        sent = [victim("a"), victim("b")] if second % 45 == 5 else []
        counters.add(
            fact(at_s=second), evaluate_outcome(fact(), advice(4.0), 0, [*sent, victim("notified", notify=True)])
        )
    assert counters.score().victims == 2


def victim(uid: str, *, notify: bool = False) -> EvictionVictim:
    why = Reason(rule="r", text="t")
    return EvictionVictim(
        pod=uid, uid=uid, plugin="p", scope="s", reason=why, forced=False, grace_s=None, notify=notify
    )


def test_means_are_over_time_not_over_cycles() -> None:
    counters = ScoreCounters(horizon_s=60)
    counters.add(fact(interval_s=9.0), outcome_of(1.0))
    counters.add(fact(at_s=10, interval_s=1.0), outcome_of(3.0))
    assert counters.score().headroom_cores == pytest.approx(1.2)


def simulated(kind: str, interval_s: float) -> list[Cycle]:
    """Return the cycles of ten minutes on eight CPUs under the default settings."""
    plan = build_node(8, 1, [kind], online=2, seed=3)
    return [cycle for cycle, _, _ in run_simulation(plan, AgentConfig(), seconds=600, interval_s=interval_s)]


def test_replay_of_the_live_policy_reproduces_it() -> None:
    """A replay of recorded cycles gives the same advice in every cycle, state included."""
    cycles = simulated("bursty", interval_s=1)
    policies = {"again": AgentConfig(), "other": AgentConfig(advisor=AdvisorConfig(policy="canonical"))}
    again = [outcomes["again"].reclaimable_cores for _, outcomes in replay_cycles(cycles, policies)]
    assert again == [cycle.advice.reclaimable_cores for cycle in cycles[1:] if cycle.advice is not None]


def test_every_boot_restarts_the_policies() -> None:
    """Time continues, and no policy keeps state of cycles with another clock."""
    cycles = simulated("diurnal", interval_s=5)
    later, sooner = cycles[100:105], cycles[:40]
    played = list(replay_cycles([*later, *sooner], {"live": AgentConfig()}))
    assert [(f.at_s, f.boot) for f, _ in played[:6]] == [(5, 0), (10, 0), (15, 0), (20, 0), (25, 1), (30, 1)]
    alone = [marks["live"] for _, marks in replay_cycles(sooner, {"live": AgentConfig()})]
    assert [marks["live"] for _, marks in played[4:]] == alone
    assert len({built.headroom_cores for built in alone}) > 30


def test_headroom_of_one_boot_is_not_compared_with_use_in_another() -> None:
    """For 3 s the headroom is 2 of 4 CPUs; 4 s later, after a reboot, 3 are used: only headroom of this boot is missed."""
    counters = ScoreCounters(horizon_s=3)
    for second in range(1, 6):
        counters.add(fact(at_s=second), outcome_of(2.0))
    for second in range(6, 12):
        counters.add(fact(at_s=second, boot=1, online=3.0 if second == 8 else 1.0), outcome_of(2.0))
    score = counters.score()
    assert (score.missed_ratio, score.missed_cores) == (pytest.approx(2 / 5), 1.0), (
        "kept: of 1, 2 and 8 s; missed: 6, 7"
    )
    assert score.rounds == 11

"""The eviction manager in rounds: what it is given to judge by, who is handed to the killer, and what is only shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import pytest

from agent.config import AdvisorConfig, Config
from agent.config.eviction import EvictionConfig
from agent.config.eviction_cpu import LoadConfig
from agent.config.headroom import ReportConfig
from agent.eviction import manager
from agent.eviction.evictor import Evictor
from api.advice import CpuAdvice, Region, RegionAdvice, RegionKind
from api.decisions import Advice, Pool
from api.evictions import KillEvent, KillReason, Met
from api.facts import NumaNode
from api.knobs import Verdict
from api.memory_advice import MemoryAdvice, MemoryCondition, MemoryEviction, MemoryPressure
from api.pods import Pod
from api.qos import QoSLevel
from api.samples import Snapshot
from tests.agent.eviction.builders import MIB, S, pod, situation

RSS, LOAD = "rss-overuse-eviction-plugin", "cpu-pressure-load-plugin"
RECLAIMED, BALANCER = "reclaimed-resource-pressure-eviction-plugin", "numa-memory-balancer"
WHY = Verdict(rule="r", text="t")
BATCH = pod("batch", memory=100 * MIB)
WEB = pod("web", QoSLevel.SHARED, memory=100 * MIB)


class Remembering:
    """A killer that kills nobody."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float | None]] = []
        self.gone: list[KillEvent] = []
        self.leaving: frozenset[str] = frozenset()

    def evict(self, pod: Pod, grace_s: float | None, reason: str) -> None:
        self.asked.append((pod.key, grace_s))
        self.leaving |= {pod.key}

    def outcomes(self) -> Sequence[KillEvent]:
        told, self.gone = self.gone, []
        return told


def over(at_s: float, **sizes: float) -> Snapshot:
    """Both pods requested 100 MiB; what they hold is given."""
    samples = {name: {"memory_stat": {"rss": round(size * MIB)}, "threads": 2} for name, size in sizes.items()}
    return situation(at_s, [BATCH, WEB], samples=samples).snapshot


def config(*plugins: str, **fields: object) -> Config:
    return msgspec.convert({"eviction": {"plugins": plugins}, **fields}, Config)


def advice(pools: Mapping[str, int], headroom_cores: float | None = None) -> Advice:
    """Pools of so many CPUs each, one after the other; `web` is in `share`."""
    placed, first = [], 0
    for name, size in pools.items():
        placed.append(Pool(name=name, cpus=tuple(range(first, first + size))))
        first += size
    region = Region(name="share", kind=RegionKind.SHARE, pool="share", numa_nodes=(0,), pods=("default/web",))
    one = RegionAdvice(region=region, policy="p", controls={}, upper_cores=8, lower_cores=1, verdict=WHY)
    return Advice(
        policy="latency", cpu=CpuAdvice(regions=(one,)), pools=tuple(placed), requirement_cores=1, lent_cores=1,
        headroom_cores=headroom_cores, idle=True, action="hold", verdict=WHY,
    )  # fmt: skip


def test_who_is_over_is_handed_to_the_killer_once_and_is_shown_as_leaving() -> None:
    killer = Remembering()
    evictor = Evictor(config(RSS), killer)
    first = evictor.turn(over(100, batch=106, web=50), None, None, {}, 100 * S)
    assert [(victim.pod, victim.dry_run) for victim in first.victims] == [("default/batch", False)]
    assert (killer.asked, first.leaving) == ([("default/batch", None)], ("default/batch",))
    # The next round: it still holds all that memory, and is on its way; nobody else has to go.
    later = evictor.turn(over(106, batch=106, web=50), None, None, {}, 106 * S)
    assert (later.victims, killer.asked) == ((), [("default/batch", None)])
    killer.gone = [KillEvent(pod="default/batch", reason=KillReason.SUCCEEDED, message="m", at_ns=1)]
    assert [event.reason for event in evictor.outcomes()] == [KillReason.SUCCEEDED]


def test_without_a_killer_everything_runs_dry() -> None:
    evictor = Evictor(config(RSS), None)
    found = evictor.turn(over(100, batch=106, web=50), None, None, {}, 100 * S)
    assert [(victim.pod, victim.dry_run) for victim in found.victims] == [("default/batch", True)]
    assert found.thresholds[0].dry_run
    assert (evictor.outcomes(), found.leaving) == ((), ())


@pytest.mark.parametrize("holds", [105.0, 0.0])
def test_who_is_not_over_stays(holds: float) -> None:
    killer = Remembering()
    Evictor(config(RSS), killer).turn(over(100, batch=holds, web=50), None, None, {}, 100 * S)
    assert killer.asked == []


def test_a_pod_without_tasks_is_no_victim_for_what_its_cgroup_still_holds() -> None:
    empty = situation(100, [BATCH], samples={"batch": {"memory_stat": {"rss": 106 * MIB}, "threads": 0}}).snapshot
    killer = Remembering()
    Evictor(config(RSS), killer).turn(empty, None, None, {}, 100 * S)
    assert killer.asked == []


def test_old_readings_evict_nobody() -> None:
    samples = {"batch": {"memory_stat": {"rss": 200 * MIB}}}
    old = situation(100, [BATCH], samples=samples, files_age_s=31).snapshot
    killer = Remembering()
    evictor = Evictor(config(RSS), killer)
    assert evictor.turn(old, None, None, {}, 100 * S).victims == ()
    fresh = situation(106, [BATCH], samples=samples, files_age_s=29).snapshot
    evictor.turn(fresh, None, None, {}, 106 * S)
    assert killer.asked == [("default/batch", None)]


def test_a_plugin_that_fails_is_a_source_that_is_down_and_evicts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> object:
        raise ZeroDivisionError("of no use")

    killer = Remembering()
    evictor = Evictor(config(RSS), killer)
    assert evictor.status(evictor.turn(over(100, batch=50, web=50), None, None, {}, 100 * S), 7).ok
    monkeypatch.setattr(manager, "_STATELESS", {**manager._STATELESS, RSS: broken})
    found = evictor.turn(over(106, batch=200, web=50), None, None, {}, 106 * S)
    status = evictor.status(found, 7)
    assert (status.name, status.ok, status.duration_ns, killer.asked) == ("eviction", False, 7, [])
    assert status.error == f"{RSS}: This plugin failed: ZeroDivisionError: of no use"


def memory_advice(*numas: int) -> MemoryAdvice:
    evictions = tuple(
        MemoryEviction(pod="default/batch", numa=numa, verdict=Verdict(rule="r", text="reads take 300 ns"))
        for numa in numas
    )
    calm = MemoryCondition(state=MemoryPressure.NO_RISK, verdict=WHY)
    return MemoryAdvice(policy="p", headroom_bytes=None, headroom_verdict=WHY, condition=calm, evictions=evictions)


def test_a_numa_node_that_the_memory_advisor_calls_crowded_loses_its_largest_pod() -> None:
    pages = {name: {"numa_stat": {"hierarchical_anon": {0: size, 1: 0}}} for name, size in (("batch", 9), ("web", 5))}
    snapshot = situation(100, [BATCH, WEB], samples=pages).snapshot
    killer = Remembering()
    evictor = Evictor(config(BALANCER), killer)
    assert evictor.turn(snapshot, None, memory_advice(), {}, 100 * S).thresholds[0].met is Met.NOT_MET
    later = msgspec.structs.replace(snapshot, taken_at_ns=106 * S, wall_time_ns=snapshot.wall_time_ns + 6 * S)
    found = evictor.turn(later, None, memory_advice(0), {}, 106 * S)
    assert [victim.verdict.text for victim in found.victims] == ["NUMA node 0: reads take 300 ns"]
    assert (found.thresholds[0].subject, found.thresholds[0].observed) == ("numa0", 9 * 4096)
    assert killer.asked == [("default/batch", None)]


@pytest.mark.parametrize(
    ("advisor", "share", "met"),
    [
        # 8 CPUs, of which reclaimed pods always keep 2; a load of 2 tasks.
        ({}, 6, Met.NOT_MET),  # a reserve is kept: only a load above the 6 CPUs would count
        ({"reservedForAllocateCores": 0}, 5, Met.NOT_MET),  # the pool can grow by one
        ({"reservedForAllocateCores": 0}, 6, Met.SOFT),  # it cannot: any load above 1 is told
        ({"reservedForAllocateCores": 0, "enableReclaim": False}, 6, Met.NOT_MET),
    ],
)
def test_a_pool_that_is_sized_by_need_is_under_pressure_once_it_cannot_grow(
    advisor: dict[str, object], share: int, met: Met
) -> None:
    snapshot = situation(100, [WEB], cpus=8).snapshot
    settings = msgspec.structs.replace(
        Config(advisor=msgspec.convert(advisor, AdvisorConfig)),
        eviction=EvictionConfig(plugins=(LOAD,), load=LoadConfig(ring_size=1)),
    )
    placed = advice({"share": share, "reclaim": 8 - share})
    found = Evictor(settings, None).turn(snapshot, placed, None, {"/web": 2.0}, 100 * S)
    assert [(each.subject, each.met) for each in found.thresholds] == [("share", met)]


def test_requests_are_held_against_what_is_advertised_and_not_against_one_round() -> None:
    """12 cores requested: two times the 6 that were found for two minutes, though now nothing is. Softly, and not at once."""
    greedy = pod("greedy", cores=12)
    settings = config(RECLAIMED, report=msgspec.to_builtins(ReportConfig()))
    evictor = Evictor(settings, None)
    seen = {}
    for at_s in range(0, 200, 10):
        snapshot = situation(at_s + 10, [greedy], cpus=16).snapshot
        found_cores = 6.0 if at_s < 190 else 0.0
        found = evictor.turn(snapshot, advice({"share": 10, "reclaim": 6}, found_cores), None, {}, (at_s + 10) * S)
        seen[at_s + 10] = found.thresholds[0]
    assert seen[10].verdict.rule == "input_missing", "no window of samples is full yet"
    assert (seen[190].met, seen[190].observed, seen[190].value) == (Met.SOFT, 12_000, 1.5 * 6000)
    assert (seen[200].met, seen[200].value) == (Met.SOFT, 1.5 * 6000)


def test_numa_nodes_that_tell_their_memory_are_part_of_what_can_be_advertised() -> None:
    node = {"numa": {0: NumaNode(meminfo={"MemTotal": 64 << 30})}, "memory_total_bytes": 64 << 30}
    evictor = Evictor(config(RECLAIMED), None)
    greedy = pod("greedy", memory=300 << 30)
    memory = msgspec.structs.replace(
        memory_advice(), headroom_bytes=float(40 << 30), headroom_by_numa={0: 40.0 * (1 << 30)}
    )
    for at_s in range(10, 200, 10):
        snapshot = situation(at_s, [greedy], cpus=16, node=node).snapshot
        found = evictor.turn(snapshot, advice({"reclaim": 6}, 6.0), memory, {}, at_s * S)
    (by_memory,) = [each for each in found.thresholds if each.scope.endswith("memory")]
    assert (by_memory.met, by_memory.value) == (Met.HARD, 5 * 40 * (1 << 30))

"""What one policy makes of a snapshot: advice, CPUs that QRM chooses, wishes for other knobs, and what is remembered. Pure.

The agent's loop, a policy in the shadow and a replay of recorded rounds all go through here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import msgspec

from agent.advisor.advise import advise
from agent.advisor.assembler import RECLAIM_POOL
from agent.advisor.forecast.outlook import Watched, look_ahead
from agent.advisor.headroom.foretold import FORECAST, foretold_memory
from agent.advisor.headroom.found import policy_of, with_memory
from agent.advisor.headroom.gather import capacity
from agent.advisor.latency import PODS_UNKNOWN
from agent.advisor.memory.advise import advise_memory
from agent.advisor.memory.gather import named, nobody_else, of_the_kubelet, situation_of
from agent.advisor.memory.state import MemoryState
from agent.advisor.reporter import ReporterMemory, report
from agent.advisor.state import Memory
from agent.config import Config
from agent.qrm.asked import Asked, AskedMemory, ask
from agent.qrm.cpu import YIELD, decide, yielding
from agent.qrm.placing.ceiling import Ceiling, below, ceiling_of, with_ceiling, without_exclusive
from agent.qrm.placing.place import place
from agent.qrm.placing.state import FALLBACK, CpuState, Placement, where_they_run, with_bindings
from agent.qrm.placing.static import not_shared
from agent.qrm.placing.whole import kept
from agent.qrm.wishes import resolve
from api.advice import Headroom, Wish
from api.decisions import Advice, Decision
from api.facts import KubeletManagers
from api.forecasts import Outlook
from api.knobs import Knob, Verdict
from api.memory_advice import MemoryAdvice
from api.node_advice import NodeAdvice
from api.samples import Snapshot

if TYPE_CHECKING:
    from agent.advisor.whole_node import NodeMemory


class Remembered(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of earlier rounds."""

    advisor: Memory = Memory()
    memory: MemoryState = MemoryState()
    reporter: ReporterMemory = ReporterMemory()
    cpus: CpuState = CpuState()
    asked: AskedMemory = AskedMemory()
    node: NodeMemory | None = None
    forecasts: Watched = Watched()
    ceiling: Ceiling | None = None


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What advisors of somebody else's say, in the place of ours; None of one that says nothing or is not trusted."""

    cpu: Advice | None = None
    memory: MemoryAdvice | None = None


def inherited(cpus: CpuState, lent_cores: float | None = None) -> Remembered:
    """What an agent that was just started knows of the one before it: the CPU that its quotas left, who has which CPUs, and
    how large the pools are. Where reclaimed pods shared those of the others, that says nothing."""
    pools = {} if cpus.overlap else cpus.pools()
    return Remembered(advisor=Memory(lent_cores=lent_cores, pools=pools), cpus=cpus)


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be, with the CPUs of the pools in the advice; advice and placement are None where the policy is `none`."""

    advice: Advice | None = None
    placement: Placement | None = None
    memory: MemoryAdvice | None = None
    named: frozenset[str] = frozenset()
    """Cgroups that are no pod's, and that the settings allow to be changed."""
    asked: Asked = Asked()
    node: NodeAdvice | None = None
    """Of the node as a whole; None where nothing of it is switched on."""
    forecasts: tuple[Outlook, ...] = ()
    ceiling: Ceiling | None = None
    reclaim_roots: tuple[str, ...] = ()
    """Cgroups above listed reclaimed pods and no other listed ones, of the whole node or of one NUMA node."""

    def decisions(self, snapshot: Snapshot, knobs: Mapping[str, Collection[Knob]]) -> tuple[Decision, ...]:
        """Every knob that something is to be said about, by the knobs that the kernel has for each cgroup: what the advice
        says of CPU comes first, and nothing that is wished for contradicts it."""
        managers = snapshot.node.kubelet
        if managers is not None and managers.cpusets and self.advice is not None and not self.advice.idle:
            # Who may run where is the kubelet's: what pools would keep apart, priority and quota have to.
            yielding_too = msgspec.structs.replace(self.advice, idle=True)
            return msgspec.structs.replace(self, advice=yielding_too, placement=None).decisions(snapshot, knobs)
        inside = below(snapshot, self.ceiling)
        taken = () if self.advice is None else decide(self.advice, inside, knobs, self.placement)
        wishes = (
            *self._together(snapshot, knobs),
            *(self.memory.wishes if self.memory is not None else ()),
            *self.asked.wishes,
        )
        found = (*taken, *resolve(wishes, snapshot, knobs, taken, self.named))
        theirs = _kubelets(managers)
        return tuple(decision for decision in found if decision.knob not in theirs) if theirs else found

    def _together(self, snapshot: Snapshot, knobs: Mapping[str, Collection[Knob]]) -> tuple[Wish, ...]:
        """Priority holds among the children of one parent: whoever is kept in a cgroup of its own has to yield with it."""
        if self.advice is None or not self.advice.idle or not self.reclaim_roots:
            return ()
        knob, value = yielding(frozenset[Knob]().union(*knobs.values()))
        return tuple(
            Wish(cgroup=root, knob=knob, value=value, verdict=YIELD)
            for root in self.reclaim_roots
            if not of_the_kubelet(root) and nobody_else(snapshot, root)
        )


def _kubelets(managers: KubeletManagers | None) -> frozenset[Knob]:
    """Knobs that the kubelet writes itself, and again and again."""
    if managers is None or not (managers.cpusets or managers.mems):
        return frozenset()
    return frozenset({Knob.CPUSET, Knob.MEMS} if managers.cpusets else {Knob.MEMS})


_NOBODY = Told()
UNLISTED = Headroom(
    verdict=Verdict(rule=PODS_UNKNOWN, text="The list of pods is not up to date: nothing new is promised.")
)
"""Found where nobody knows who is here: what was promised before stands for a while and then goes down, by the reporter."""


def judge(
    snapshot: Snapshot, config: Config, known: Remembered, now_ns: int, told: Told = _NOBODY
) -> tuple[Judged, Remembered]:
    """One round; `now_ns` is CLOCK_MONOTONIC. What others say is carried out; ours goes on learning beside it."""
    # Whom QRM bound to NUMA nodes, the advisor provides for there.
    whole = msgspec.structs.replace(snapshot, pods=with_bindings(snapshot.pods, known.cpus))
    # CPUs that no pod may have are nobody's need and nobody's to lend; memory and power are the whole node's.
    ceiling = ceiling_of(whole, known.ceiling)
    snapshot = without_exclusive(below(whole, ceiling))
    previous = known.advisor.previous
    watched = look_ahead(previous, snapshot, known.forecasts, config.forecast, now_ns)
    before = msgspec.structs.replace(known.advisor, forecasts=watched.outlooks)
    provided_for = msgspec.structs.replace(snapshot, pods=where_they_run(kept(snapshot.pods, known.cpus), known.cpus))
    before = msgspec.structs.replace(before, refused=_refused(snapshot, provided_for))
    advice, advisor = advise(provided_for, config.advisor, before, now_ns, config.inference)
    advisor = msgspec.structs.replace(advisor, previous=snapshot)
    advice = advice and (told.cpu or advice)
    advice, advisor, placement, cpus = _placed(advice, advisor, snapshot, known.cpus, config, now_ns)
    advice = _with_ceiling(advice, ceiling, whole)
    situation = situation_of(whole, advisor, config, now_ns)
    memory, remembered = advise_memory(situation, known.memory, config.memory)
    if policy_of(config.advisor) == FORECAST:
        memory = foretold_memory(memory, watched.outlooks, whole, config)
    memory = _measured(told.memory, memory)
    reporter = known.reporter
    if advice is not None and advice.headroom is not None:
        found = _found(advice.headroom, memory, config) if whole.pods_known else UNLISTED
        lends = config.advisor.enable_reclaim
        advertised, reporter = report(found, capacity(snapshot), reporter, config.report, now_ns, enable_reclaim=lends)
        advice = msgspec.structs.replace(advice, headroom=found, advertised=advertised)
        advisor = msgspec.structs.replace(advisor, advertised_by_numa=advertised.cores_by_numa)
    # Only where the advisor's policy is `none` may cpusets be suppressed: nothing is placed then.
    excluded = not_shared(snapshot, config.placing) if config.knobs.suppress.policy == "cpuset" else ()
    asked, asked_memory = ask(below(whole, ceiling), previous, config.knobs, known.asked, excluded)
    if advice is not None:
        # A pod is shown with one reason, and to be without the CPUs that it asks for is the graver one.
        rejected = {**asked.bandwidth.rejected, **advice.rejected}
        advice = msgspec.structs.replace(advice, cards=asked.bandwidth.cards, rejected=rejected)
    node, node_memory = _node(whole, advisor, config, known, now_ns)
    judged = Judged(
        advice=advice,
        placement=placement,
        memory=memory,
        named=named(situation, config.memory),
        asked=asked,
        node=node,
        forecasts=watched.outlooks,
        ceiling=ceiling,
        reclaim_roots=situation.roots,
    )
    return judged, Remembered(
        advisor=advisor,
        memory=remembered,
        reporter=reporter,
        cpus=cpus,
        asked=asked_memory,
        node=node_memory,
        forecasts=watched,
        ceiling=ceiling,
    )


def _found(headroom: Headroom, memory: MemoryAdvice, config: Config) -> Headroom:
    """What can be promised of both."""
    return with_memory(headroom, memory.headroom_bytes, memory.headroom_by_numa, config.advisor)


def _refused(snapshot: Snapshot, provided_for: Snapshot) -> frozenset[str]:
    """Pods that do not run as what they ask for, by key."""
    both = zip(snapshot.pods, provided_for.pods, strict=True)
    return frozenset(mine.key for mine, its in both if mine.qos is not its.qos)


def _with_ceiling(advice: Advice | None, ceiling: Ceiling | None, whole: Snapshot) -> Advice | None:
    """The same, and where CPUs are nobody's to give, that they are."""
    if advice is None:
        return None
    return msgspec.structs.replace(advice, verdict=with_ceiling(advice.verdict, ceiling, len(whole.topology.cpus)))


def _measured(told: MemoryAdvice | None, ours: MemoryAdvice) -> MemoryAdvice:
    """What somebody else's advisor says, if any, and how short memory is, which it does not say."""
    if told is None:
        return ours
    return msgspec.structs.replace(told, condition=ours.condition, numa_conditions=ours.numa_conditions)


def _placed(
    advice: Advice | None, advisor: Memory, snapshot: Snapshot, known: CpuState, config: Config, now_ns: int
) -> tuple[Advice | None, Memory, Placement | None, CpuState]:
    """The same advice with the CPUs of the pools; without CPUs there is none."""
    if advice is None or not snapshot.topology.cpus:
        return None, advisor, None, known
    by_numa = {} if advice.headroom is None else advice.headroom.cores_by_numa
    known = msgspec.structs.replace(known, numa_headroom=by_numa)
    placement, cpus = place(advice.cpu.sizes, snapshot.pods, snapshot.topology, known, config.placing, now_ns)
    # `fallback` is no pool of its own: it is all that are not reclaimed pods'.
    pools = tuple(pool for pool in placement.pools if pool.name != FALLBACK)
    advisor = msgspec.structs.replace(advisor, pools={pool.name: pool.cpus for pool in pools}, cpus=placement.cpus)
    lent = float(sum(len(pool.cpus) for pool in pools if pool.name == RECLAIM_POOL))
    # Where pools are asked for that do not fit together, less is there to be lent than their sizes leave.
    lent = advice.lent_cores if advice.idle else min(advice.lent_cores, lent)
    advice = msgspec.structs.replace(advice, pools=pools, lent_cores=lent, rejected=placement.rejected)
    return advice, advisor, placement, cpus


def _node(
    snapshot: Snapshot, advisor: Memory, config: Config, known: Remembered, now_ns: int
) -> tuple[NodeAdvice | None, NodeMemory | None]:
    if not (config.power.enable or config.overcommit.enable):
        return None, None
    from agent.advisor.whole_node import NodeMemory, advise_node  # noqa: PLC0415 - few nodes ask for it

    return advise_node(snapshot, known.advisor.previous, advisor, config, known.node or NodeMemory(), now_ns)

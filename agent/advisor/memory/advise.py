"""One round of memory advice: a situation and what is remembered in; a promise, conditions and wishes out, with reasons."""

from __future__ import annotations

from agent.advisor.memory.cache_reaper import reap
from agent.advisor.memory.dying import reclaim_dying
from agent.advisor.memory.guard import guard
from agent.advisor.memory.headroom import promise
from agent.advisor.memory.offload import offload
from agent.advisor.memory.pressure import node_condition, numa_conditions
from agent.advisor.memory.situation import Situation
from agent.advisor.memory.state import MemoryState
from agent.config.memory import MemoryConfig
from api.advice import UNBOUND
from api.memory_advice import MemoryAdvice


def advise_memory(situation: Situation, memory: MemoryState, config: MemoryConfig) -> tuple[MemoryAdvice, MemoryState]:
    """What reclaimed pods can be promised of the node's memory, how short it is, and what cgroups should do about it.

    Never raises on what is missing: that part then asks for nothing, and its verdict says what it lacks.
    """
    promised = promise(situation, config, memory.headroom_bytes)
    node, by_numa = node_condition(situation, config), numa_conditions(situation, config)
    guarded = guard(situation, config, memory.guard_bytes)
    reaped = reap(situation, config, {UNBOUND: node, **by_numa}, memory)
    offloads = offload(situation, config, memory, reaped.busy)
    dying = reclaim_dying(situation, config, memory.dying_ns)
    advice = MemoryAdvice(
        policy=config.policy,
        headroom_bytes=promised.bytes,
        headroom_by_numa=promised.by_numa,
        headroom_verdict=promised.verdict,
        condition=node,
        numa_conditions=by_numa,
        wishes=(*guarded.wishes, *reaped.wishes, *offloads.wishes, *dying.wishes),
        verdicts=(guarded.verdict, reaped.verdict, *offloads.verdicts, *dying.verdicts),
    )
    return advice, MemoryState(
        headroom_bytes=memory.headroom_bytes if promised.bytes is None else promised.bytes,
        guard_bytes=guarded.bytes,
        asked=reaped.asked,
        offloaded=offloads.past,
        swap=offloads.swap,
        dying_ns=dying.at_ns,
    )

"""The eviction manager at work in the agent's rounds: what it remembers, and the killer that carries out its answer."""

from __future__ import annotations

from collections.abc import Mapping

from agent.config.eviction import EvictionConfig
from agent.eviction.killer import Killer, carry_out
from agent.eviction.manager import judge
from agent.eviction.situation import Situation
from agent.eviction.state import EvictionMemory
from api.decisions import Advice
from api.evictions import Evictions, KillEvent
from api.node_advice import PowerAction
from api.samples import Snapshot


class Evictor:
    """Judges every round; who has to leave is asked to only where there is a killer."""

    def __init__(self, config: EvictionConfig, killer: Killer | None) -> None:
        self._config, self._killer = config, killer
        self._memory = EvictionMemory()

    def turn(
        self,
        snapshot: Snapshot,
        advice: Advice | None,
        loads: Mapping[str, float],
        now_ns: int,
        power: PowerAction | None = None,
    ) -> tuple[Evictions, tuple[KillEvent, ...]]:
        """Who has to leave now, and what became of those who had to before."""
        kills = () if self._killer is None else tuple(self._killer.outcomes())
        situation = Situation(
            snapshot=snapshot,
            now_ns=now_ns,
            headroom=None if advice is None else advice.headroom,
            advice=None if advice is None else advice.cpu,
            pools={} if advice is None else {pool.name: pool.cpus for pool in advice.pools},
            loads=loads,
            power=power,
            leaving=frozenset() if self._killer is None else self._killer.leaving,
            stale_s=self._config.stale_s,
        )
        found, self._memory = judge(situation, self._memory, self._config)
        if self._killer is not None:
            carry_out(found, snapshot.pods, self._killer)
        return found, kills

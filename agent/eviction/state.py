"""What the eviction manager and its plugins remember from round to round: a frozen value that goes in and comes out."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent.eviction.koordinator import CpuEvictMemory
from agent.eviction.load import LoadMemory
from agent.eviction.network import NetworkMemory
from agent.eviction.numa_cpu import NumaCpuMemory
from agent.eviction.numa_memory import NumaMemory
from agent.eviction.numa_sys import NumaSysMemory
from agent.eviction.oomd import OomdMemory
from agent.eviction.power import PowerEvictMemory
from agent.eviction.situation import Situation
from agent.eviction.suppression import SuppressionMemory
from agent.eviction.system_memory import SystemMemory
from api.evictions import Evictions, Shown


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that was told to leave, or would have been in a dry run."""

    pod: str
    uid: str
    plugin: str
    until_ns: int
    """It counts as gone until then."""
    held_until_ns: int
    """The same of one that could not be told yet: what it would take to end does not run."""
    dry_run: bool

    def gone(self, situation: Situation) -> bool:
        """Whether it counts as gone now. Whom a budget or a refusal keeps never does: others leave in its place. Who cannot be
        asked because nobody answers does for a while, or others would leave with it once somebody does."""
        if self.dry_run or self.pod not in situation.held:
            return situation.now_ns < self.until_ns
        return self.pod not in situation.stuck and situation.now_ns < self.held_until_ns


class Plugins(msgspec.Struct, frozen=True, kw_only=True):
    """Each plugin's own; a plugin that does not judge forgets, be it off, failing or without a recent snapshot."""

    numa_memory: NumaMemory = NumaMemory()
    system_memory: SystemMemory = SystemMemory()
    network: NetworkMemory = NetworkMemory()
    load: LoadMemory = LoadMemory()
    suppression: SuppressionMemory = SuppressionMemory()
    numa_cpu: NumaCpuMemory = NumaCpuMemory()
    numa_sys: NumaSysMemory = NumaSysMemory()
    koordinator_cpu: CpuEvictMemory = CpuEvictMemory()
    oomd: OomdMemory = OomdMemory()
    power: PowerEvictMemory = PowerEvictMemory()


class EvictionMemory(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of the past; the default is a fresh start."""

    judged_at_ns: int | None = None
    latest: Evictions = Evictions()
    """What was judged then: between two rounds it stands."""
    met_since_ns: Mapping[str, int] = {}
    """By plugin, scope, subject and how far it is met."""
    conditions: Mapping[str, Shown] = {}
    """By name; those of dry runs are not among them."""
    sent: tuple[Sent, ...] = ()
    evicted_at_ns: Mapping[str, int] = {}
    """By plugin: its latest victim."""
    plugins: Plugins = Plugins()

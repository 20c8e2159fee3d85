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
from agent.eviction.suppression import SuppressionMemory
from agent.eviction.system_memory import SystemMemory
from api.evictions import Evictions, Shown


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that was told to leave, or would have been in a dry run: it counts as gone until then."""

    pod: str
    uid: str
    plugin: str
    until_ns: int
    dry_run: bool


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

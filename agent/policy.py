"""What one policy makes of a snapshot: the advisor's advice, the CPUs that QRM chooses for it, and what both remember. Pure.

The agent's loop, a policy in the shadow and a replay of recorded rounds all go through here.
"""

from __future__ import annotations

import msgspec

from agent.advisor.advise import advise
from agent.advisor.state import Memory
from agent.config import AdvisorConfig
from agent.config.qrm import CpuPlacementConfig
from agent.qrm.placing.place import place
from agent.qrm.placing.state import FALLBACK, CpuState, Placement, with_bindings
from api.decisions import Advice
from api.samples import Snapshot


class Remembered(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of earlier rounds."""

    advisor: Memory = Memory()
    cpus: CpuState = CpuState()


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be, with the CPUs of the pools in the advice; both None where the policy is `none`."""

    advice: Advice | None = None
    placement: Placement | None = None


def judge(
    snapshot: Snapshot, advisor: AdvisorConfig, placing: CpuPlacementConfig, known: Remembered, now_ns: int
) -> tuple[Judged, Remembered]:
    """One round; `now_ns` is CLOCK_MONOTONIC."""
    # Whom QRM bound to NUMA nodes, the advisor provides for there.
    snapshot = msgspec.structs.replace(snapshot, pods=with_bindings(snapshot.pods, known.cpus))
    advice, memory = advise(snapshot, advisor, known.advisor, now_ns)
    if advice is None or not snapshot.topology.cpus:
        return Judged(), Remembered(advisor=memory, cpus=known.cpus)
    placement, cpus = place(advice.cpu.sizes, snapshot.pods, snapshot.topology, known.cpus, placing, now_ns)
    # `fallback` is no pool of its own: it is all that are not reclaimed pods'.
    pools = tuple(pool for pool in placement.pools if pool.name != FALLBACK)
    memory = msgspec.structs.replace(memory, pools={pool.name: pool.cpus for pool in pools}, cpus=placement.cpus)
    judged = Judged(advice=msgspec.structs.replace(advice, pools=pools), placement=placement)
    return judged, Remembered(advisor=memory, cpus=cpus)

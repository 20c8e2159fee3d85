"""Evaluates memory advice for one cycle: headroom, pressure, limits, cache drops and offloading.
A missing input disables only the part that needs it; the reason names the input.
"""

from __future__ import annotations

import msgspec

from agent.advisor.advisor_state import AdvisorState
from agent.advisor.headroom.reclaim_exclusion import reclaimable_nodes
from agent.advisor.memory.cache_reaper import is_dying_parent, reap_cache, reclaim_dying_cgroups
from agent.advisor.memory.memory_guard import limit_reclaimed_memory, node_condition, numa_conditions
from agent.advisor.memory.memory_headroom import compute_memory_headroom
from agent.advisor.memory.memory_inputs import MemoryAdvisorState, MemoryInputs, ReclaimRoot
from agent.advisor.memory.memory_offloading import offload_memory
from agent.advisor.pod_usage import reclaimed_cgroups
from agent.config.config import AgentConfig
from agent.config.memory import MemoryConfig, OffloadingLayerConfig
from api.advice import NOT_NUMA_BOUND, MemoryAdvice
from api.pod import Pod
from api.qos import QoSLevel
from api.snapshot import Snapshot


def build_memory_inputs(snapshot: Snapshot, advisor: AdvisorState, config: AgentConfig, now_ns: int) -> MemoryInputs:
    """Return the inputs of this cycle; `advisor` is the state after this cycle's CPU advice."""
    root = _reclaim_root(snapshot, config.memory.reclaim_root)
    numa_roots = {numa: f"{root}-{numa}" for numa in snapshot.topology.numa_nodes} if root else {}
    return MemoryInputs(
        snapshot=snapshot,
        now_ns=now_ns,
        root=ReclaimRoot(path=root, members=tuple(reclaimed_cgroups(snapshot))),
        numa_roots={numa: path for numa, path in numa_roots.items() if _reclaim_root(snapshot, path)},
        enable_reclaim=config.advisor.enable_reclaim,
        not_reclaimable=frozenset(pod.key for pod in snapshot.pods if not pod.profile.reclaimable),
        profiles={pod.key: _profile_settings(pod) for pod in snapshot.pods if pod.profile.memory_offloading},
        ramping=frozenset(path for path, demand in advisor.containers.items() if demand.ramping),
        forbidden_numa=tuple(reclaimable_nodes(snapshot, advisor, config.advisor).refused),
    )


def _profile_settings(pod: Pod) -> OffloadingLayerConfig:
    """Offloading settings of its service profile, which was validated when the pod was parsed."""
    return msgspec.convert(pod.profile.memory_offloading, OffloadingLayerConfig)


def writable_cgroups(inputs: MemoryInputs, config: MemoryConfig) -> frozenset[str]:
    """Return the cgroups outside of containers that the settings allow to change, including currently missing ones."""
    snapshot, root = inputs.snapshot, config.reclaim_root.rstrip("/")
    configured = {root, *(f"{root}-{numa}" for numa in snapshot.topology.numa_nodes)} if root else set()
    roots = {*inputs.roots, *(configured - snapshot.cgroups.keys())}
    dying = (path for path in snapshot.cgroups if is_dying_parent(path, config)) if config.offloading.dying else ()
    return frozenset(roots.union(config.offloading.cgroups, dying))


def _reclaim_root(snapshot: Snapshot, path: str) -> str:
    """The cgroup, if it exists and contains no pod that is not reclaimed: its limit would apply to that pod too."""
    path = path.rstrip("/")
    others = (c.cgroup for pod in snapshot.pods if pod.qos is not QoSLevel.RECLAIMED for c in pod.containers)
    is_exclusive = not any(f"{cgroup}/".startswith(f"{path}/") for cgroup in others)
    return path if path in snapshot.cgroups and is_exclusive else ""


def advise_memory(
    inputs: MemoryInputs, state: MemoryAdvisorState, config: MemoryConfig
) -> tuple[MemoryAdvice, MemoryAdvisorState]:
    """Return headroom, memory pressure and knob requests, and the state for the next cycle.

    A missing input never raises: the part that needs it requests nothing, and its reason names the input.
    """
    headroom = compute_memory_headroom(inputs, config, state.headroom_bytes)
    node, by_numa = node_condition(inputs, config), numa_conditions(inputs, config)
    guard = limit_reclaimed_memory(inputs, config, state.guard_bytes)
    reap = reap_cache(inputs, config, {NOT_NUMA_BOUND: node, **by_numa}, state)
    offloads = offload_memory(inputs, config, state, reap.busy)
    dying = reclaim_dying_cgroups(inputs, config, state.dying_ns)
    advice = MemoryAdvice(
        policy=config.policy,
        headroom_bytes=headroom.bytes,
        headroom_by_numa=headroom.by_numa,
        headroom_reason=headroom.reason,
        condition=node,
        numa_conditions=by_numa,
        knob_requests=(*guard.knob_requests, *reap.knob_requests, *offloads.knob_requests, *dying.knob_requests),
        reasons=(guard.reason, reap.reason, *offloads.reasons, *dying.reasons),
    )
    return advice, MemoryAdvisorState(
        headroom_bytes=state.headroom_bytes if headroom.bytes is None else headroom.bytes,
        guard_bytes=guard.bytes,
        cache_drops=reap.cache_drops,
        offloaded=offloads.past,
        swap=offloads.swap,
        dying_ns=dying.at_ns,
    )

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
from agent.config.config import AgentConfig
from agent.config.memory import MemoryConfig, OffloadingLayerConfig
from api.advice import NOT_NUMA_BOUND, MemoryAdvice
from api.pod import Pod
from api.qos import QoSLevel
from api.snapshot import Snapshot


def build_memory_inputs(snapshot: Snapshot, advisor: AdvisorState, config: AgentConfig, now_ns: int) -> MemoryInputs:
    """What is known in this round; `advisor` is what CPU advice remembers after it."""
    root = _reclaim_root(snapshot, config.memory.reclaim_root)
    found = {numa: f"{root}-{numa}" for numa in snapshot.topology.numa_nodes} if root else {}
    members = tuple(c.cgroup for pod in snapshot.pods if pod.qos is QoSLevel.RECLAIMED for c in pod.containers)
    return MemoryInputs(
        snapshot=snapshot,
        now_ns=now_ns,
        root=ReclaimRoot(path=root, members=members),
        numa_roots={numa: path for numa, path in found.items() if _reclaim_root(snapshot, path)},
        enable_reclaim=config.advisor.enable_reclaim,
        not_reclaimable=frozenset(pod.key for pod in snapshot.pods if not pod.profile.reclaimable),
        profiles={pod.key: _profile_settings(pod) for pod in snapshot.pods if pod.profile.memory_offloading},
        ramping=frozenset(path for path, known in advisor.containers.items() if known.ramping),
        forbidden_numa=tuple(reclaimable_nodes(snapshot, advisor, config.advisor).refused),
    )


def _profile_settings(pod: Pod) -> OffloadingLayerConfig:
    """What its service profile says of offloading; it was checked where the pod came in."""
    return msgspec.convert(pod.profile.memory_offloading, OffloadingLayerConfig)


def writable_cgroups(inputs: MemoryInputs, config: MemoryConfig) -> frozenset[str]:
    """Cgroups that are no container's and that the settings allow to be changed; also where they cannot be seen now."""
    snapshot, root = inputs.snapshot, config.reclaim_root.rstrip("/")
    asked = {root, *(f"{root}-{numa}" for numa in snapshot.topology.numa_nodes)} if root else set()
    roots = {*inputs.roots, *(asked - snapshot.cgroups.keys())}
    dying = (path for path in snapshot.cgroups if is_dying_parent(path, config)) if config.offloading.dying else ()
    return frozenset(roots.union(config.offloading.cgroups, dying))


def _reclaim_root(snapshot: Snapshot, path: str) -> str:
    """That cgroup, where it is there and no pod is in it that is not reclaimed: its limit would be theirs too."""
    path = path.rstrip("/")
    if path not in snapshot.cgroups or any(_is_below(pod, path) for pod in snapshot.pods if _is_not_reclaimed(pod)):
        return ""
    return path


def _is_not_reclaimed(pod: Pod) -> bool:
    return pod.qos is not QoSLevel.RECLAIMED


def _is_below(pod: Pod, path: str) -> bool:
    return any(container.cgroup == path or container.cgroup.startswith(f"{path}/") for container in pod.containers)


def advise_memory(
    inputs: MemoryInputs, memory: MemoryAdvisorState, config: MemoryConfig
) -> tuple[MemoryAdvice, MemoryAdvisorState]:
    """What reclaimed pods can be promised of the node's memory, how short it is, and what cgroups should do about it.

    Never raises on what is missing: that part then asks for nothing, and its verdict says what it lacks.
    """
    promised = compute_memory_headroom(inputs, config, memory.headroom_bytes)
    node, by_numa = node_condition(inputs, config), numa_conditions(inputs, config)
    guarded = limit_reclaimed_memory(inputs, config, memory.guard_bytes)
    reaped = reap_cache(inputs, config, {NOT_NUMA_BOUND: node, **by_numa}, memory)
    offloads = offload_memory(inputs, config, memory, reaped.busy)
    dying = reclaim_dying_cgroups(inputs, config, memory.dying_ns)
    advice = MemoryAdvice(
        policy=config.policy,
        headroom_bytes=promised.bytes,
        headroom_by_numa=promised.by_numa,
        headroom_reason=promised.reason,
        condition=node,
        numa_conditions=by_numa,
        knob_requests=(*guarded.knob_requests, *reaped.knob_requests, *offloads.knob_requests, *dying.knob_requests),
        reasons=(guarded.reason, reaped.reason, *offloads.reasons, *dying.reasons),
    )
    return advice, MemoryAdvisorState(
        headroom_bytes=memory.headroom_bytes if promised.bytes is None else promised.bytes,
        guard_bytes=guarded.bytes,
        asked=reaped.asked,
        offloaded=offloads.past,
        swap=offloads.swap,
        dying_ns=dying.at_ns,
    )

"""What of a node is not lent, because there are pods that lend nothing: NUMA nodes, and what those pods requested. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from agent.advisor.estimation import lends, numa_part, pod_cores
from agent.advisor.headroom.exclusion import Lendable, lendable
from agent.advisor.headroom.gather import tenants
from agent.advisor.state import Memory
from agent.config import AdvisorConfig
from api.cpus import Topology
from api.pods import Pod
from api.samples import Snapshot


def lent_nodes(snapshot: Snapshot, memory: Memory, config: AdvisorConfig) -> Lendable:
    """NUMA nodes that may be lent, by where the pods are that keep others away."""
    disabled = config.provision.disable_reclaim_share_pools
    asked = disabled or any(not pod.profile.lends for pod in snapshot.pods)
    return lendable(snapshot.topology, tenants(snapshot, memory.cpus) if asked else (), disabled)


def lendable_cores(snapshot: Snapshot, where: Lendable, memory: Memory, config: AdvisorConfig) -> float | None:
    """CPU that may be lent at most: of the NUMA nodes that may be, all but what pods requested that lend nothing.

    None where every pod lends. Where pods are whose place is not known, it is no more than before.
    """
    if all(lends(pod, config) for pod in snapshot.pods if pod.qos.online):
        return None
    sizes = node_cpus(snapshot.topology)

    def requested(pod: Pod) -> float:
        return 0.0 if lends(pod, config) else pod_cores(pod, snapshot, memory.containers, config, reclaimable=False)

    kept = on_numa(snapshot, memory, requested)
    most = sum(max(sizes[numa] - kept[numa], 0.0) for numa in where.numa_nodes)
    return min(most, memory.lent_cores) if where.unknown and memory.lent_cores is not None else most


def idle_cores(snapshot: Snapshot, memory: Memory, config: AdvisorConfig) -> float:
    """CPU that pods which lend nothing requested and do not use; what is not measured is idle."""
    idle = 0.0
    for pod in snapshot.pods:
        if pod.qos.online and not lends(pod, config):
            known = (memory.containers.get(container.cgroup) for container in pod.containers)
            used = sum(one.usage_cores or 0.0 for one in known if one is not None)
            idle += max(pod_cores(pod, snapshot, memory.containers, config, reclaimable=False) - used, 0.0)
    return idle


def on_numa(snapshot: Snapshot, memory: Memory, cores_of: Callable[[Pod], float]) -> dict[int, float]:
    """Cores of the online pods by NUMA node: as a bound pod's CPUs are spread; of one that is bound to none, of all alike."""
    sizes = node_cpus(snapshot.topology)
    numa_of = {cpu.id: cpu.numa for cpu in snapshot.topology.cpus}
    found, anywhere = dict.fromkeys(sizes, 0.0), 0.0
    for pod in snapshot.pods:
        if not pod.qos.online:
            continue
        cores = cores_of(pod)
        bound = [numa for numa in pod.bound_numa if numa in sizes]
        if not bound:
            anywhere += cores
            continue
        assigned = Counter(numa_of.get(cpu) for c in pod.containers for cpu in memory.cpus.get(c.cgroup, ()))
        at = {numa: assigned[numa] for numa in bound}
        for numa in bound:
            found[numa] += cores * numa_part(numa, bound, at)
    share = anywhere / sum(sizes.values()) if sizes else 0.0
    return {numa: cores + share * sizes[numa] for numa, cores in found.items()}


def node_cpus(topology: Topology) -> dict[int, int]:
    """Number of CPUs by NUMA node."""
    return dict(sorted(Counter(cpu.numa for cpu in topology.cpus).items()))

"""Plugin reclaimed-numa-resource-pressure-eviction-plugin: requests on a NUMA node exceed a multiple of its headroom.
It is pure.
"""

from __future__ import annotations

from agent.config.eviction import ReclaimedPressureConfig
from agent.eviction.eviction_inputs import EvictionInputs, reclaimed_pods
from agent.eviction.finding import EvictionFinding, missing_input_finding, not_met_finding
from agent.eviction.plugins.reclaimed_resource_pressure import CPU, MEMORY, evaluate_resource

NAME = "reclaimed-numa-resource-pressure-eviction-plugin"


def evaluate_reclaimed_numa(inputs: EvictionInputs, config: ReclaimedPressureConfig) -> tuple[EvictionFinding, ...]:
    """Return the findings of the reclaimed pods that are bound to a NUMA node, against the headroom there."""
    pods, headroom = [pod for pod in reclaimed_pods(inputs.running_pods) if pod.bound_numa], inputs.headroom
    if not pods:
        return (not_met_finding(NAME, "no_bound_pods", "No reclaimed pod is bound to a NUMA node."),)
    if headroom is None:
        return (missing_input_finding(NAME, "The headroom of reclaimed pods by NUMA node"),)
    findings = []
    for node in sorted({node for pod in pods for node in pod.bound_numa}):
        here = [pod for pod in pods if node in pod.bound_numa]
        cores, memory = headroom.cores_by_numa.get(node), headroom.memory_by_numa.get(node)
        findings.append(evaluate_resource(NAME, f"zone{node}|{CPU}", CPU, here, cores, config))
        findings.append(evaluate_resource(NAME, f"zone{node}|{MEMORY}", MEMORY, here, memory, config))
    return tuple(findings)

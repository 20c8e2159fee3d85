"""Annotations of the CustomNodeResource with which Katalyst's controller and scheduler overcommit the node. Pure.
The controller copies the ratios to the Node as realtime ratios, which bound those of its NodeOvercommitConfig.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from api.advice import OvercommitAdvice
from api.decision import Cycle
from api.overcommit import CPU_MANAGER_KEY, CPU_RATIO_KEY, GUARANTEED_CPUS_KEY, MEMORY_MANAGER_KEY, MEMORY_RATIO_KEY
from api.pod import Pod
from api.snapshot import KubeletManagers

NO_MANAGER, STATIC_MANAGER = "none", "static"


def overcommit_annotations(cycle: Cycle) -> Mapping[str, str]:
    """Return the ratios, the kubelet's managers and the CPUs that they pin; empty without advice."""
    advice = None if cycle.node is None else cycle.node.overcommit
    if advice is None:
        return {}
    return _annotations(advice, cycle.snapshot.node.kubelet, cycle.snapshot.pods)


def _annotations(advice: OvercommitAdvice, managers: KubeletManagers | None, pods: Sequence[Pod]) -> dict[str, str]:
    # A manager that is not known counts as static: then less is overcommitted.
    static_cpus = managers is not None and managers.cpu != NO_MANAGER
    static_memory = managers is not None and managers.memory != NO_MANAGER
    return {
        CPU_RATIO_KEY: f"{advice.cpu_ratio:.2f}",
        MEMORY_RATIO_KEY: f"{advice.memory_ratio:.2f}",
        CPU_MANAGER_KEY: STATIC_MANAGER if static_cpus else NO_MANAGER,
        # The kubelet's own names, as its scheduler plugin compares them: `Static` and `None`.
        MEMORY_MANAGER_KEY: (STATIC_MANAGER if static_memory else NO_MANAGER).capitalize(),
        GUARANTEED_CPUS_KEY: str(sum(map(guaranteed_cpus, pods)) if static_cpus else 0),
    }


def guaranteed_cpus(pod: Pod) -> int:
    """Return the CPUs that the kubelet's static policy pins for a pod: the whole-numbered requests of a Guaranteed pod."""
    for container in pod.containers:
        limits = (container.cpu_limit_cores, container.memory_limit_bytes)
        requests = (container.cpu_request_cores, container.memory_request_bytes)
        if None in limits or limits != requests:
            return 0
    requested = [container.cpu_request_cores or 0.0 for container in pod.containers]
    return sum(int(cores) for cores in requested if cores == int(cores))

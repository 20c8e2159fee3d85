"""Measures the CPU use of the system. As in Koordinator, the system is everything but online and reclaimed pods:
daemons, the kubelet, the container runtime, a control plane outside of pods, containers of no listed pod, and system
pods. Its use is the busy time of each CPU (/proc/stat) minus the CPU time of the cgroups of all listed online and
reclaimed containers, from the same frozen snapshot.
"""

from __future__ import annotations

from agent.advisor.advisor_state import SystemUse
from agent.advisor.cpu_estimate import USAGE_WINDOW_S, exponential_average
from api.qos import QoSLevel
from api.rates import Rates
from api.snapshot import Snapshot
from api.units import NS_PER_S

MAX_SKIPPED_S = 30.0
"""Maximum time for which intervals in which a container starts or ends are skipped. The CPU time of such a container is
unknown and would count as the system's, so that the end of each batch job would look like a burst. If containers start or
end for longer, such an interval counts after all: a use that is too high harms no online pod."""


def update_system_use(
    previous: Snapshot | None, snapshot: Snapshot, change: Rates | None, before: SystemUse | None
) -> SystemUse | None:
    """Return the use averaged over five seconds, as the use of pods is; `before` if this interval is not measured.

    Only the CPUs of the snapshot's topology count: a process on a CPU that pods may not use takes no CPU time from pods.
    """
    if previous is None or change is None or "/" not in snapshot.cgroups:
        return before
    busy = [change.node.per_cpu_busy_ratio.get(cpu) for cpu in snapshot.topology.ids]
    if None in busy:
        return before
    now_ns, used, is_complete = snapshot.taken_at_ns, 0.0, True
    for path in _pod_cgroups(previous) | _pod_cgroups(snapshot):
        rate = change.cgroups.get(path)
        if rate is not None and rate.cpu_cores is not None:
            used += rate.cpu_cores
        elif path in previous.cgroups or path in snapshot.cgroups:
            is_complete = False
    if not is_complete and before is not None and now_ns - before.measured_ns < MAX_SKIPPED_S * NS_PER_S:
        return before
    cores = sum(ratio for ratio in busy if ratio is not None) - used
    seconds = change.node.interval_ns / NS_PER_S
    average = exponential_average(None if before is None else before.average_cores, cores, seconds, USAGE_WINDOW_S)
    return SystemUse(average_cores=average, measured_ns=now_ns)


def _pod_cgroups(snapshot: Snapshot) -> set[str]:
    """Return the cgroups of online and reclaimed containers. System pods are part of the system, because no other estimate
    contains them."""
    pods = (pod for pod in snapshot.pods if pod.qos.online or pod.qos is QoSLevel.RECLAIMED)
    return {container.cgroup for pod in pods for container in pod.containers}

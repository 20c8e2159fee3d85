"""A node as a kubelet lays it out: every container in the cgroup of its pod, beside a pause container, below its QoS class.

The containers are ordinary: quota, memory limit, TCP connections, one disk, four aggressors; neither throttled nor in
reclaim. Pause containers do nothing.
"""

from __future__ import annotations

import msgspec

from api.decision import Cycle
from api.pod import Pod
from api.snapshot import Blame, CgroupSample, Durations, ReclaimLatency, RunqLatency, SocketTraffic
from tests.builders.four_cpu_node import MS
from tests.builders.full_node import full_cycle
from tests.builders.pods import reclaimed, shared

CLASSES = ("/kubepods", "/kubepods/burstable", "/kubepods/besteffort")
AGGRESSORS = 4
NOTHING = Durations(sum_ns=0, count=0, slots=(0,) * 27)


def pod_cgroup(index: int) -> str:
    return f"/kubepods/{'besteffort' if index % 2 else 'burstable'}/pod{index:03}"


def container_cgroup(index: int) -> str:
    return f"{pod_cgroup(index)}/container"


def _pod(index: int) -> Pod:
    pod = (reclaimed if index % 2 else shared)(f"p{index:03}")
    (container,) = pod.containers
    return msgspec.structs.replace(
        pod, containers=(msgspec.structs.replace(container, cgroup=container_cgroup(index)),)
    )


def ordinary_container(sample: CgroupSample, index: int, seconds: int) -> CgroupSample:
    """Return the sample of a container that uses its CPU, disk and network without trouble."""
    net = SocketTraffic(
        tcp_sent_bytes=3000 * seconds, tcp_received_bytes=2000 * seconds, tcp_sent_packets=3 * seconds,
        tcp_received_packets=2 * seconds, udp_sent_bytes=0, udp_received_bytes=0, udp_sent_packets=0,
        udp_received_packets=0, tcp_retransmits=0,
    )  # fmt: skip
    by_cgroup = {container_cgroup(index + other): 10 * MS * seconds for other in range(1, AGGRESSORS + 1)}
    stat = {name: value for name, value in sample.memory_stat.items() if not name.startswith("workingset")}
    return msgspec.structs.replace(
        sample,
        throttled_periods=0,
        throttled_ns=0,
        throttles=NOTHING,
        reclaim=ReclaimLatency(direct=NOTHING, limit=NOTHING, reclaimed_pages=0, kswapd_wakeups=0),
        memory_stat=stat,
        blame=Blame(by_cgroup=by_cgroup, throttled_ns=0, higher_class_ns=0, other_ns=0),
        net=net,
    )


def _unused(sample: CgroupSample) -> CgroupSample:
    """Return the sample of a cgroup in which nothing happens, with the same files and probes."""
    return msgspec.structs.replace(
        ordinary_container(sample, 0, 0),
        periods=0,
        blame=Blame(by_cgroup={}, throttled_ns=0, higher_class_ns=0, other_ns=0),
        wait=RunqLatency(sum_ns=0, count=0, slots=(0,) * 27),
        block_io={},
        io={},
    )


def kubelet_cycle(seq: int, containers: int) -> Cycle:
    """Return a cycle of a node with so many pods of one container each, beside the services of the system."""
    finished = full_cycle(seq)
    web, root = finished.snapshot.cgroups["/web"], finished.snapshot.cgroups["/"]
    samples = {"/": root}
    for number, path in enumerate((*CLASSES, "/system.slice", "/system.slice/kubelet.service")):
        samples[path] = msgspec.structs.replace(ordinary_container(web, 0, seq), path=path, id=5000 + number)
    for index in range(containers):
        for number, path in enumerate((pod_cgroup(index), f"{pod_cgroup(index)}/pause")):
            samples[path] = msgspec.structs.replace(_unused(web), path=path, id=10_000 + 10 * index + number)
        path = container_cgroup(index)
        sample = ordinary_container(web, index, seq)
        samples[path] = msgspec.structs.replace(sample, path=path, id=10_002 + 10 * index)
    pods = tuple(_pod(index) for index in range(containers))
    snapshot = msgspec.structs.replace(finished.snapshot, cgroups=samples, pods=pods)
    changed = msgspec.structs.replace(finished, snapshot=snapshot, previous=None)
    changed.share_evaluated_latency({container_cgroup(index): web.wait for index in range(0, containers, 2)})
    return changed

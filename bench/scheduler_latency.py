"""Measures the scheduler extender on a simulated cluster: time of filter and score, memory of its state, and its start.
Objects are JSON as the API server sends them, decoded and applied by the extender's own code; there is no network.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from bench.machine import this_machine
from controller.scheduler.cluster_state import ClusterState
from controller.scheduler.extender import Extender
from controller.scheduler.extender_messages import ExtenderArgs
from controller.scheduler.scheduler_kinds import SchedulerCnr, SchedulerNode
from controller.scheduler.scheduler_process import build_chain
from controller.scheduler.scheduler_settings import SchedulerConfig
from controller.scheduler.scheduling_pod import ScheduledPod

RESULT = Path(__file__).parent / "results/scheduler_latency.md"
GIB = 1 << 30
RESOURCES = 5
"""Resources of a node in the state: reclaimed CPU and memory, native CPU and memory, and what is measured."""
TEXT = """## Scheduler extender

{machine}. `python -m bench.scheduler_latency`: {nodes:,} nodes with 8 zones each, {pods:,} pods, a quarter of them
reclaimed, all in memory; {rounds:,} requests for a reclaimed pod with the names of all nodes.

| what | CPU time: median | p99 | worst | elapsed: median | p99 |
|---|---:|---:|---:|---:|---:|
{rows}

| what | value |
|---|---:|
| start: CPU time to decode and apply all objects, without the network | {start_s:.1f} s |
| arrays over nodes | {arrays_mib:.1f} MiB, {bytes_each:.0f} bytes for each (node, resource) |
| resident memory of the process with every object | {rss_mib:.0f} MiB |

- *filter* and *score* are the functions of all plugins on arrays; *verbs* also decode the request and encode the response with
  the names of all nodes. Requests are serial, as kube-scheduler sends them.
- CPU time is that of the thread. Elapsed time is longer where other programs of the machine have the CPUs.
- Zones are in the objects, but the state has none: NodeResourceTopology is not part of this measurement.
"""


def node_documents(count: int, randomness: random.Random) -> Iterator[tuple[str, bytes, bytes]]:
    """Yield name, Node and CustomNodeResource of each node as JSON."""
    zone = {"resources": {"allocatable": {"cpu": "8", "memory": "32Gi"}}, "allocations": [{"consumer": "a/b/c"}] * 4}
    sockets = [
        # Numbers of NUMA nodes are unique on a node, as the kernel's are.
        {
            "type": "Socket",
            "name": str(n),
            "children": [{"type": "Numa", "name": str(4 * n + m), **zone} for m in range(4)],
        }
        for n in range(2)
    ]
    for number in range(count):
        name = f"node-{number:05d}.example.internal"
        node = {
            "metadata": {"name": name, "labels": {f"label{i}": "v" for i in range(20)}},
            "status": {
                "allocatable": {"cpu": "64", "memory": "256Gi"},
                "images": [{"names": ["image" * 20]}] * 50,
            },
        }
        usage = {"cpu": f"{randomness.randint(5, 50)}", "memory": f"{randomness.randint(20, 200)}Gi"}
        usage["dioptase.io/runq_latency_p99"] = f"{randomness.randint(100, 20_000)}u"
        cnr = {
            "metadata": {"name": name},
            "status": {
                "resources": {
                    "allocatable": {RECLAIMED_CPU: str(randomness.randint(0, 40_000)), RECLAIMED_MEMORY: "96Gi"}
                },
                "topologyZone": sockets,
                "nodeMetricStatus": {"updateTime": "2027-01-15T08:00:00Z", "nodeMetric": {"genericUsage": usage}},
            },
        }
        yield name, msgspec.json.encode(node), msgspec.json.encode(cnr)


def pod_documents(count: int, names: list[str], randomness: random.Random) -> Iterator[bytes]:
    """Yield bound pods as JSON, a quarter of them reclaimed."""
    environment = [{"name": f"VARIABLE_{i}", "value": "value" * 4} for i in range(20)]
    for number in range(count):
        reclaimed = number % 4 == 0
        amounts = (
            {RECLAIMED_CPU: str(randomness.choice((250, 500, 1000))), RECLAIMED_MEMORY: "512Mi"}
            if reclaimed
            else {"cpu": randomness.choice(("250m", "500m", "1")), "memory": "1Gi"}
        )
        level = "reclaimed_cores" if reclaimed else "shared_cores"
        pod = {
            "metadata": {
                "name": f"workload-{number % 997}-{number:06d}",
                "namespace": f"team-{number % 50}",
                "uid": f"00000000-0000-0000-0000-{number:012d}",
                "resourceVersion": str(number),
                "labels": {f"label{i}": "value" for i in range(8)},
                "annotations": {"katalyst.kubewharf.io/qos_level": level, "other": "text" * 30},
            },
            "spec": {
                "nodeName": names[number % len(names)],
                "containers": [
                    {"name": "main", "env": environment, "resources": {"requests": amounts, "limits": amounts}}
                ],
            },
            "status": {"phase": "Running"},
        }
        yield msgspec.json.encode(pod)


def fill(state: ClusterState, nodes: int, pods: int) -> tuple[list[str], dict[str, Any], float]:
    """Apply all objects; return the names, the objects that an informer stores, and the seconds of decoding and applying."""
    randomness, stored, spent_s = random.Random(1), dict[str, Any](), 0.0
    names = []
    for name, node_text, cnr_text in node_documents(nodes, randomness):
        names.append(name)
        began_s = time.thread_time()
        node = msgspec.json.decode(node_text, type=SchedulerNode)
        cnr = msgspec.json.decode(cnr_text, type=SchedulerCnr)
        state.apply_node(name, node)
        state.apply_cnr(name, cnr)
        stored[f"node {name}"], stored[f"cnr {name}"] = node, cnr
        spent_s += time.thread_time() - began_s
    for text in pod_documents(pods, names, randomness):
        began_s = time.thread_time()
        pod = msgspec.json.decode(text, type=ScheduledPod)
        state.apply_pod(None, pod, None)
        stored[pod.metadata.uid] = pod
        spent_s += time.thread_time() - began_s
    return names, stored, spent_s


def measure(call: Callable[[], object], rounds: int) -> tuple[list[float], list[float]]:
    """Return sorted durations in milliseconds: CPU time and elapsed time."""
    spent, elapsed = [], []
    for _ in range(rounds):
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        call()
        spent.append((time.thread_time() - began_cpu_s) * 1000)
        elapsed.append((time.perf_counter() - began_s) * 1000)
    return sorted(spent), sorted(elapsed)


def resident_mib() -> float:
    """Return the resident memory of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def main() -> None:
    """Measure, and write the section of the results page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--pods", type=int, default=150_000)
    parser.add_argument("--rounds", type=int, default=1000)
    options = parser.parse_args()
    state = ClusterState()
    names, stored, start_s = fill(state, options.nodes, options.pods)
    gc.collect()
    gc.freeze()  # as the process does after the first lists
    extender = Extender(state, build_chain(SchedulerConfig()))
    amounts = {RECLAIMED_CPU: "1k", RECLAIMED_MEMORY: "512Mi"}
    annotations = {"katalyst.kubewharf.io/qos_level": "reclaimed_cores"}
    pod = {
        "metadata": {"name": "new", "namespace": "team", "uid": "new", "annotations": annotations},
        "spec": {"containers": [{"name": "main", "resources": {"requests": amounts, "limits": amounts}}]},
    }
    body = msgspec.json.encode({"Pod": pod, "NodeNames": names})
    args, now_s = msgspec.json.decode(body, type=ExtenderArgs), 1_800_000_020.0
    decoder, encoder = msgspec.json.Decoder(ExtenderArgs), msgspec.json.Encoder()
    calls: dict[str, Callable[[], object]] = {
        "filter": lambda: extender.filter(args, now_s),
        "score": lambda: extender.prioritize(args, now_s),
        "filter and score": lambda: (extender.filter(args, now_s), extender.prioritize(args, now_s)),
        "both verbs": lambda: (
            encoder.encode(extender.filter(decoder.decode(body), now_s)),
            encoder.encode(extender.prioritize(decoder.decode(body), now_s)),
        ),
    }
    rows = []
    for what, call in calls.items():
        measure(call, 20)
        spent, elapsed = measure(call, options.rounds)
        middle, high = options.rounds // 2, int(options.rounds * 0.99)
        values = (spent[middle], spent[high], spent[-1], elapsed[middle], elapsed[high])
        rows.append(f"| {what} | " + " | ".join(f"{value:.2f} ms" for value in values) + " |")
    arrays = state.nodes.size_bytes
    text = TEXT.format(
        machine=this_machine("-").line().replace(", cgroups -", ""), nodes=options.nodes, pods=len(stored) - 2 * len(names),
        rounds=options.rounds, rows="\n".join(rows), start_s=start_s, arrays_mib=arrays / (1 << 20),
        bytes_each=arrays / len(names) / RESOURCES, rss_mib=resident_mib(),
    )  # fmt: skip
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()

"""Measures a real kube-scheduler with the extender and a stock one without, on the same simulated nodes: pods bound a second,
time from creation to binding, and CPU time of each program. The API server is real; the nodes are objects without kubelets.
"""

from __future__ import annotations

import http.client
import json
import shutil
import ssl
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from api.units import NS_PER_MS
from bench.machine import (
    bench_parser,
    cpu_ns_of,
    end_cleanly_on_sigterm,
    markdown_table,
    report_faults,
    this_machine,
    write_results,
)
from tests.cluster.binaries import Missing
from tests.cluster.cluster import Cluster, create_cluster
from tests.cluster.control_plane import API_SERVER
from tests.cluster.daemons import Late, wait
from tests.cluster.katalyst import CNRS
from tests.cluster.names import CONTROL
from tests.cluster.programs import CODE
from tests.cluster.schedulers import NAMESPACE, SCHEDULER_NAME, ExtendedScheduler
from tests.cluster.server import JSON, MERGE

GOAL_PODS_PER_S = 200
STOCK_NAME = "stock-scheduler"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
NODE_MILLICPU, POD_MILLICPU = 16_000, 100
SENDERS = 8
"""Threads that create objects, each with one connection."""


class ThroughputRow(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one scheduler with one way of creating the pods."""

    scheduler: str
    pods: int
    created_per_s: float
    """0 if all pods existed before the scheduler started."""
    bound_per_s: float
    p50_ms: float
    """Time from the request that creates a pod to the event that it is bound; of existing pods from the first such event."""
    p99_ms: float
    cpu_ms: Mapping[str, float]
    """CPU time for each pod, by program."""
    overfilled_nodes: int


class ThroughputRun(msgspec.Struct, frozen=True, kw_only=True):
    """Results of both schedulers."""

    machine: str
    nodes: int
    rate: float
    rows: Sequence[ThroughputRow]


class ObjectSender:
    """Sends requests to the API server over connections that stay open, one of each thread."""

    def __init__(self, cluster: Cluster) -> None:
        self._address, pki = urlsplit(cluster.names.server), cluster.control.authority
        self._context = ssl.create_default_context(cafile=str(pki.certificate("ca")))
        self._context.load_cert_chain(pki.certificate("admin"), pki.key("admin"))
        self._local = threading.local()

    def connect(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(
            str(self._address.hostname), self._address.port, context=self._context, timeout=60
        )

    def send(self, method: str, path: str, body: Any, kind: str = JSON) -> None:
        """Raises OSError if the API server refuses the request."""
        if not hasattr(self._local, "connection"):
            self._local.connection = self.connect()
        self._local.connection.request(method, path, json.dumps(body), {"Content-Type": kind})
        answer = self._local.connection.getresponse()
        content = answer.read()
        if answer.status >= 300:
            raise OSError(f"{method} {path}: {answer.status} {content[:300]!r}")


class _WatchedMetadata(msgspec.Struct):
    name: str


class _WatchedSpec(msgspec.Struct):
    node: str = msgspec.field(name="nodeName", default="")


class _WatchedPod(msgspec.Struct):
    metadata: _WatchedMetadata
    spec: _WatchedSpec


class _PodEvent(msgspec.Struct):
    type: str
    object: _WatchedPod


class BindingTimes:
    """The time at which each pod was first seen with a node, from a watch of the pods."""

    def __init__(self, sender: ObjectSender) -> None:
        self._by_pod: dict[str, float] = {}
        self._sender = sender
        threading.Thread(target=self._run, daemon=True).start()

    def of(self, prefix: str) -> dict[str, float]:
        """Return the times of the pods whose names begin so."""
        return {name: at for name, at in tuple(self._by_pod.items()) if name.startswith(f"{prefix}-")}

    def _run(self) -> None:
        decoder = msgspec.json.Decoder(_PodEvent)
        connection = self._sender.connect()
        connection.timeout = 3600
        connection.request("GET", f"{PODS}?watch=true&timeoutSeconds=3600")
        answer = connection.getresponse()
        while line := answer.readline():
            event = decoder.decode(line)
            if event.object.spec.node and event.type != "DELETED":
                self._by_pod.setdefault(event.object.metadata.name, time.monotonic())


def create_nodes(sender: ObjectSender, nodes: int) -> None:
    """Create Nodes that offer reclaimed resources to a stock scheduler, and CustomNodeResources that offer the same."""
    offers = {RECLAIMED_CPU: str(NODE_MILLICPU), RECLAIMED_MEMORY: str(64 << 30)}
    amounts = {"cpu": "64", "memory": "256Gi", "pods": "500", **offers}
    cnr = {"apiVersion": "node.katalyst.kubewharf.io/v1alpha1", "kind": "CustomNodeResource"}

    def create(number: int) -> None:
        name = f"node-{number:05d}"
        metadata = {"name": name, "labels": {"kubernetes.io/hostname": name}}
        status = {"allocatable": amounts, "capacity": amounts}
        sender.send("POST", "/api/v1/nodes", {"metadata": metadata, "status": status})
        sender.send("POST", CNRS, {**cnr, "metadata": {"name": name}})
        reported = {"status": {"resources": {"allocatable": offers, "capacity": offers}}}
        sender.send("PATCH", f"{CNRS}/{name}/status", reported, MERGE)

    with ThreadPoolExecutor(SENDERS) as pool:
        list(pool.map(create, range(nodes)))


def create_pods(sender: ObjectSender, prefix: str, scheduler: str, pods: int, rate: float) -> dict[str, float]:
    """Create reclaimed pods, `rate` a second or as fast as possible with 0; return the time of each request."""
    amounts = {RECLAIMED_CPU: str(POD_MILLICPU), RECLAIMED_MEMORY: str(64 << 20)}
    spec = {
        "schedulerName": scheduler, "automountServiceAccountToken": False, "tolerations": [{"operator": "Exists"}],
        "containers": [{"name": "main", "image": "none", "resources": {"requests": amounts, "limits": amounts}}],
    }  # fmt: skip
    level = {"katalyst.kubewharf.io/qos_level": "reclaimed_cores"}
    began_s, sent = time.monotonic(), dict[str, float]()

    def create(number: int) -> None:
        if rate:
            time.sleep(max(0.0, began_s + number / rate - time.monotonic()))
        name = f"{prefix}-{number:05d}"
        sent[name] = time.monotonic()
        sender.send("POST", PODS, {"metadata": {"name": name, "annotations": level}, "spec": spec})

    with ThreadPoolExecutor(SENDERS) as pool:
        list(pool.map(create, range(pods)))
    return sent


def overfilled_nodes(cluster: Cluster) -> int:
    """Count the nodes whose pods request more than they offer, from the API server's data."""
    pods = cluster.server.ask("GET", PODS, seconds=120)["items"]
    requested = Counter(pod["spec"].get("nodeName", "") for pod in pods)
    return sum(count * POD_MILLICPU > NODE_MILLICPU for node, count in requested.items() if node)


class SchedulerTrial:
    """One scheduler under load: start it, create pods, wait until all are bound, and delete them."""

    def __init__(
        self,
        cluster: Cluster,
        sender: ObjectSender,
        times: BindingTimes,
        scheduler: str,
        pids: Mapping[str, Callable[[], int | None]],
    ) -> None:
        self._cluster, self._sender, self._times = cluster, sender, times
        self._scheduler, self._pids, self._runs = scheduler, pids, 0

    def run(self, pods: int, rate: float, start: Callable[[], None] | None = None) -> ThroughputRow:
        """Return the row. With `start` the scheduler begins after all pods exist. Raises Late."""
        self._runs += 1
        prefix = f"{self._scheduler}-{self._runs}"
        sent, before = dict[str, float](), self._cpu_ns()
        if start is None:
            sent = create_pods(self._sender, prefix, self._scheduler, pods, rate)
        else:
            create_pods(self._sender, prefix, self._scheduler, pods, 0)
            before = self._cpu_ns()
            start()
        wait(f"{pods} pods are bound", lambda: len(self._times.of(prefix)) == pods, 60 + pods / 10)
        after, bound = self._cpu_ns(), self._times.of(prefix)
        first, last = min(sent.values(), default=min(bound.values())), max(bound.values())
        delays = [(at - sent.get(name, first)) * 1000 for name, at in bound.items()]
        row = ThroughputRow(
            scheduler=self._scheduler, pods=pods, bound_per_s=pods / (last - first),
            created_per_s=(len(sent) - 1) / (max(sent.values()) - first) if sent else 0.0,
            p50_ms=statistics.median(delays), p99_ms=statistics.quantiles(delays, n=100)[98],
            cpu_ms={name: (ns - before.get(name, 0)) / NS_PER_MS / pods for name, ns in after.items()},
            overfilled_nodes=overfilled_nodes(self._cluster),
        )  # fmt: skip
        self._cluster.server.ask("DELETE", PODS, {"gracePeriodSeconds": 0}, seconds=120)
        wait("no pods", lambda: not self._cluster.server.ask("GET", f"{PODS}?limit=1")["items"], 120)
        return row

    def _cpu_ns(self) -> dict[str, int]:
        running = {name: pid() for name, pid in self._pids.items()}
        return {name: cpu_ns_of(pid) for name, pid in running.items() if pid is not None}


def start_stock(cluster: Cluster, folder: Path) -> None:
    """Start a stock kube-scheduler with its default plugins; its client may send more than the default of 50 requests a second,
    which would otherwise be its limit."""
    config = {
        "apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False}, "profiles": [{"schedulerName": STOCK_NAME}],
        "clientConnection": {"kubeconfig": str(cluster.kubeconfig), "qps": 5000, "burst": 5000},
    }  # fmt: skip
    file = folder / "stock-scheduler.json"
    file.write_text(json.dumps(config))
    words = (cluster.programs["kube-scheduler"], f"--config={file}", "--bind-address=127.0.0.1", "--secure-port=0")
    cluster.daemons.start(STOCK_NAME, cluster.names.space(CONTROL), words)


def measure(nodes: int, pods: int, rate: float) -> ThroughputRun:
    """Create a cluster without controllers, measure one scheduler after the other, and remove it. Raises Missing and Late."""
    folder = Path(tempfile.mkdtemp(prefix="dioptase-bench-"))
    cluster = create_cluster(0)
    try:
        cluster.kubectl("apply", "--server-side", "-f", CODE / "deploy/crds")
        cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", CODE / "deploy/crds")
        sender = ObjectSender(cluster)
        create_nodes(sender, nodes)
        extended = ExtendedScheduler(cluster, folder)
        sender.send("POST", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", {"metadata": {"name": "default"}})
        times, daemons = BindingTimes(sender), cluster.daemons
        programs = {"API server": lambda: daemons.pid(API_SERVER), "etcd": lambda: daemons.pid("etcd")}
        extended_trial = SchedulerTrial(
            cluster, sender, times, SCHEDULER_NAME,
            {**programs, "kube-scheduler": lambda: daemons.pid(SCHEDULER_NAME), "extender": lambda: extended.extender.pid},
        )  # fmt: skip
        extended.begin()
        extended_trial.run(min(pods, 200), rate)  # connections are open, and caches filled
        rows = [extended_trial.run(pods, rate)]
        daemons.end(SCHEDULER_NAME)
        rows.append(extended_trial.run(pods, 0, lambda: daemons.again(SCHEDULER_NAME)))
        extended.end()
        stock_trial = SchedulerTrial(
            cluster, sender, times, STOCK_NAME, {**programs, "kube-scheduler": lambda: daemons.pid(STOCK_NAME)}
        )
        start_stock(cluster, folder)
        stock_trial.run(min(pods, 200), rate)
        rows.append(stock_trial.run(pods, rate))
        daemons.end(STOCK_NAME)
        rows.append(stock_trial.run(pods, 0, lambda: daemons.again(STOCK_NAME)))
        daemons.end(STOCK_NAME)
        return ThroughputRun(machine=this_machine("not used").line(), nodes=nodes, rate=rate, rows=rows)
    finally:
        cluster.release()
        shutil.rmtree(folder)


def markdown(run: ThroughputRun) -> str:
    """Render the section of RESULTS.md."""
    heads = ["scheduler", "pods", "created a second", "bound a second", "p50, ms", "p99, ms", "overfilled nodes"]
    programs = list(dict.fromkeys(name for row in run.rows for name in row.cpu_ms))
    rows = [
        [
            row.scheduler, str(row.pods), f"{row.created_per_s:.0f}" if row.created_per_s else "existed",
            f"{row.bound_per_s:.0f}", f"{row.p50_ms:.0f}", f"{row.p99_ms:.0f}", str(row.overfilled_nodes),
            *(f"{row.cpu_ms[name]:.2f}" if name in row.cpu_ms else "" for name in programs),
        ]
        for row in run.rows
    ]  # fmt: skip
    paced, existing, _, stock_existing = run.rows
    verdict = "met" if paced.bound_per_s >= GOAL_PODS_PER_S * 0.99 else "missed"
    if verdict == "missed" and paced.bound_per_s >= paced.created_per_s * 0.99:
        verdict = "not tested, because fewer were created"
    bound, created = f"{paced.bound_per_s:.0f}", f"{paced.created_per_s:.0f}"
    ratio = stock_existing.bound_per_s / existing.bound_per_s
    text = [
        "## Scheduler throughput",
        "",
        f"{run.machine}. `python -m bench.scheduler_throughput`: a real API server",
        f"and kube-scheduler with {run.nodes:,} Nodes and CustomNodeResources. `{SCHEDULER_NAME}` is kube-scheduler with the",
        f"extender, as the chart configures both; `{STOCK_NAME}` is kube-scheduler alone, which places the same pods by the",
        "Nodes' extended resources (NodeResourcesFit). All programs and the client that creates the pods share this machine.",
        "",
        *markdown_table([*heads, *(f"CPU of {name}, ms a pod" for name in programs)], rows),
        "",
        f"- Goal: {GOAL_PODS_PER_S} pods a second with the extender: {verdict}, {bound} of {created} created a second.",
        f"- Of pods that exist when it starts, the stock scheduler binds {ratio:.1f} times as many a second.",
        "- The time of a pod is from the request that creates it to the event that it has a node; of existing pods from the",
        "  first such event.",
        "- The stock scheduler evaluates a part of the nodes (percentageOfNodesToScore), with the extender all of them.",
    ]
    return "\n".join(text) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser("scheduler_throughput", __doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=4000, help="in each of the four runs")
    parser.add_argument("--rate", type=float, default=GOAL_PODS_PER_S, help="pods created a second")
    args = parser.parse_args(argv)
    end_cleanly_on_sigterm()
    try:
        run = measure(args.nodes, args.pods, args.rate)
    except (Missing, Late, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    print(markdown(run))
    write_results(args.out, "scheduler_throughput", markdown(run), run)
    return report_faults([f"nodes were overfilled by {row.scheduler}" for row in run.rows if row.overfilled_nodes])


if __name__ == "__main__":
    sys.exit(main())

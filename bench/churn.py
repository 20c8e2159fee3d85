"""Disturbs a real node with the chart installed: pods come and go, the API server is away, the disk is slow or full, the agent
is killed, replaced and upgraded. It reports the response times of an online service in each phase, evictions, growth, and
what is left behind.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import quantiles
from typing import Any

import msgspec

from bench.machine import (
    bench_parser,
    end_cleanly_on_sigterm,
    markdown_table,
    memory_kib_of,
    report_faults,
    this_machine,
    write_results,
)
from bench.node_disk import NodeDisk
from bench.response_times import PERIOD_MS, WORK_MS, ResponseTimes
from tests.cluster import audit
from tests.cluster.binaries import Missing
from tests.cluster.cgroups import hierarchies, knobs_of_pods
from tests.cluster.cluster import Cluster, Failed, create_cluster
from tests.cluster.control_plane import API_SERVER
from tests.cluster.daemons import Late, wait
from tests.cluster.image_and_chart import CHART, IMAGE, TAG, helm, image_archive
from tests.cluster.objects import IDLING, a_pod
from tests.cluster.pods import Pod, run
from tests.cluster.server import MERGE, Refused

SYSTEM, WORK = "dioptase-system", "churn"
PODS = f"/api/v1/namespaces/{WORK}/pods"
STATE = "/var/lib/dioptase"
BURN = "while :; do :; done"
MOST_GROWTH_MIB, MOST_GROWTH_FDS = 6.0, 32
"""Limits of growth from the end of the first round to the end of the last; new pods need some memory for their history."""
MIB_PER_CGROUP, FDS_PER_CGROUP = 0.2, 24
"""Growth that is allowed for each cgroup that this machine has more."""
MOST_PODS = 8
"""Pods that come and go, alive at once."""
OUTAGE_WRITES_PER_S = 1
PHASE_S = 20.0
ALONE, STOCK, AT_REST, CHURN = "no batch work", "batch work, no agent", "batch work and agent", "pods come and go"


class PhaseTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of disturbance over all rounds."""

    name: str
    seconds: float
    pods: int
    """Pods created meanwhile."""
    requests: int
    p50_ms: float
    p99_ms: float
    max_ms: float


class ProcessSize(msgspec.Struct, frozen=True, kw_only=True):
    """A process at the end of a round."""

    rss_mib: float
    descriptors: int
    cgroups: int
    """Cgroups of this machine, also those of others: the agent watches all of them."""


class ChurnRun(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one run."""

    machine: str
    rounds: int
    phases: tuple[PhaseTimes, ...]
    sizes: Mapping[str, tuple[ProcessSize, ...]]
    """Agent and controller at the end of each round."""
    evictions: int
    restarts: int
    """Processes of agent and controller that ended without being killed or replaced."""
    left: tuple[str, ...]
    """Files of the node's cgroups, and of the state directory, that are not as they were before the installation."""

    def faults(self) -> list[str]:
        """Return the reasons of a failure; empty if the run passed."""
        results = [f"left after the end: {text}" for text in self.left]
        if self.evictions:
            results.append(f"{self.evictions} pods were evicted without pressure")
        if self.restarts:
            results.append(f"{self.restarts} processes were restarted")
        for name, (first, *_, last) in ((name, sizes) for name, sizes in self.sizes.items() if len(sizes) > 1):
            more = max(last.cgroups - first.cgroups, 0)
            if last.rss_mib - first.rss_mib > MOST_GROWTH_MIB + more * MIB_PER_CGROUP:
                results.append(f"{name}: memory grew by {last.rss_mib - first.rss_mib:.1f} MiB")
            if last.descriptors - first.descriptors > MOST_GROWTH_FDS + more * FDS_PER_CGROUP:
                results.append(f"{name}: {last.descriptors - first.descriptors} more descriptors are open")
        return results


class PodChurn:
    """Creates pods of random kinds, changes annotations of living ones, and deletes the oldest."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster, self._random = cluster, random.Random(seed)
        self._numbers, self._alive = itertools.count(), list[str]()
        self.created = 0

    def step(self) -> None:
        """Create one pod, annotate one and delete one; an API server that is away is left alone."""
        with suppress(OSError, Refused):
            name = f"pod{next(self._numbers)}"
            self._cluster.server.ask("POST", PODS, self._pod(name))
            self._alive.append(name)
            self.created += 1
            if len(self._alive) > MOST_PODS:
                self._delete(self._alive.pop(0))
            annotations = {"metadata": {"annotations": self._annotations()}}
            self._cluster.server.ask("PATCH", f"{PODS}/{self._random.choice(self._alive)}", annotations, MERGE)

    def end(self) -> None:
        """Delete what is left."""
        while self._alive:
            self._delete(self._alive.pop())

    def _delete(self, name: str) -> None:
        with suppress(Refused):
            self._cluster.server.ask("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 0})

    def _pod(self, name: str) -> dict[str, Any]:
        commands = (BURN, IDLING, "exit 1", "exit 0", f"timeout 2 sh -c '{BURN}'; exec sleep 60")
        level = self._random.choice(("reclaimed_cores", "reclaimed_cores", "shared_cores", "unknown", ""))
        pod = a_pod(name, level, IDLING if level == "shared_cores" else self._random.choice(commands))
        pod["spec"]["nodeName"] = self._cluster.nodes[0].name
        pod["metadata"]["annotations"] |= self._annotations()
        return pod

    def _annotations(self) -> dict[str, str]:
        """Return annotations of which some are wrong, huge, or need a right that this namespace does not have."""
        prefix = "katalyst.kubewharf.io"
        kinds: tuple[dict[str, str], ...] = (
            {},
            {f"{prefix}/cpu_enhancement": '{"cpuset_pool": "mine"}'},
            {f"{prefix}/cpu_enhancement": "{" * 1000},
            {f"{prefix}/memory_enhancement": '{"numa_binding": "true", "numa_exclusive": "true"}'},
            {f"{prefix}/memory_enhancement": '{"numa_ids": "' + "0-8191," * 20_000 + '"}'},
            {"dioptase.io/service-profile": "\x1b[31m{}\n" * 100},
            {f"example.com/note-{number}": "x" * 100 for number in range(200)},
        )
        return self._random.choice(kinds)


class Chart:
    """The chart on the node of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._values = cluster, cluster.names.run / "churn.json"
        settings = {"kubelet": {"cgroupRoot": cluster.nodes[0].cgroup_root}, "report": {"periodS": 1, "windowS": 3}}
        image = {"repository": IMAGE, "tag": TAG, "pullPolicy": "Never"}
        self._values.write_text(json.dumps({"image": image, "agent": {"settings": settings}}))

    def upgrade(self, *sets: str) -> None:
        """Install or upgrade, and wait until the pods are ready."""
        words = [word for item in sets for word in ("--set", item)]
        self._helm("upgrade", "--install", "dioptase", CHART, "--create-namespace", "--values", self._values, *words)
        self._settle()

    def roll_back(self) -> None:
        self._helm("rollback", "dioptase", "1")
        self._settle()

    def uninstall(self) -> None:
        self._helm("uninstall", "dioptase", "--wait", "--timeout=240s")

    def processes(self) -> dict[str, int]:
        """Return the pids of agent and controller."""
        items = self._cluster.server.ask("GET", f"/api/v1/namespaces/{SYSTEM}/pods")["items"]
        result: dict[str, int] = {}
        for pod in items:
            component = pod["metadata"]["labels"].get("app.kubernetes.io/component", "")
            statuses = pod["status"].get("containerStatuses", [])
            if component in ("agent", "controller") and statuses and statuses[0]["ready"]:
                container = statuses[0]["containerID"].rpartition("/")[2]
                files = [path for top in hierarchies() for path in top.glob(f"**/{container}/cgroup.procs")]
                pids = sorted(int(pid) for file in files for pid in file.read_text().split())
                result.setdefault(component, pids[0])
        return result

    def _settle(self) -> None:
        for what in ("daemonset/dioptase-agent", "deployment/dioptase-controller"):
            self._cluster.kubectl("--namespace", SYSTEM, "rollout", "status", "--timeout=180s", what)

    def _helm(self, *words: object) -> None:
        helm(self._cluster, "--namespace", SYSTEM, *words)


class PhaseRecorder:
    """Intervals of the phases, and the pods created in them."""

    def __init__(self, churn: PodChurn, times: ResponseTimes) -> None:
        self._churn, self._times = churn, times
        self._intervals: dict[str, list[tuple[float, float, int]]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin_s, created = time.monotonic(), self._churn.created
        yield
        end_s = time.monotonic()
        self._intervals.setdefault(name, []).append((begin_s, end_s, self._churn.created - created))
        print(f"{name}: {end_s - begin_s:.0f} s", flush=True)

    def results(self) -> tuple[PhaseTimes, ...]:
        return tuple(self._result(name, intervals) for name, intervals in self._intervals.items())

    def _result(self, name: str, intervals: Sequence[tuple[float, float, int]]) -> PhaseTimes:
        values = [ms for begin_s, end_s, _ in intervals for ms in self._times.between(begin_s, end_s)]
        percentiles = quantiles(values, n=100)
        return PhaseTimes(
            name=name,
            seconds=sum(end_s - begin_s for begin_s, end_s, _ in intervals),
            pods=sum(pods for *_, pods in intervals),
            requests=len(values),
            p50_ms=percentiles[49],
            p99_ms=percentiles[98],
            max_ms=max(values),
        )


class DisturbedRounds:
    """Disturbances of an installed chart, the same in each round.

    Processes are killed and replaced after the last round only, because a new process hides growth.
    """

    def __init__(
        self, cluster: Cluster, chart: Chart, disk: NodeDisk, churn: PodChurn, recorder: PhaseRecorder
    ) -> None:
        self._cluster, self._chart, self._disk = cluster, chart, disk
        self._churn, self._recorder = churn, recorder
        self.sizes: dict[str, list[ProcessSize]] = {}
        self.restarts = 0

    def run(self, rounds: int) -> None:
        """Run the rounds, and measure the processes at the end of each."""
        before = self._chart.processes()
        for number in range(1, rounds + 1):
            print(f"round {number} of {rounds}", flush=True)
            self._disturb()
            after = self._chart.processes()
            self.restarts += sum(pid != before.get(name) for name, pid in after.items()) + len(before.keys() - after)
            before = after
            for name, pid in after.items():
                self.sizes.setdefault(name, []).append(_size(pid))
        self._replace()

    def _disturb(self) -> None:
        with self._recorder.phase(CHURN):
            self._churn_for(3 * PHASE_S)
        with self._recorder.phase("disk slow"), self._disk.slow(OUTAGE_WRITES_PER_S):
            self._churn_for(PHASE_S)
        with self._recorder.phase("disk full"), self._disk.full():
            self._churn_for(PHASE_S)
        with self._recorder.phase("API server away"):
            self._cluster.daemons.end(API_SERVER)
            time.sleep(PHASE_S)
            self._cluster.daemons.again(API_SERVER)
            self._cluster.control.ready()
        for program in ("kubelet", "containerd"):
            with self._recorder.phase(f"{program} away"):
                self._cluster.daemons.end(f"{self._cluster.nodes[0].name}-{program}")
                time.sleep(PHASE_S / 2)
                self._cluster.daemons.again(f"{self._cluster.nodes[0].name}-{program}")
                self._churn_for(PHASE_S / 2)

    def _replace(self) -> None:
        with self._recorder.phase("agent killed"):
            os.kill(self._chart.processes()["agent"], signal.SIGKILL)
            self._churn_for(PHASE_S)
        wait("the agent's next container", lambda: "agent" in self._chart.processes(), 120)
        with self._recorder.phase("upgrade"):
            self._chart.upgrade("agent.settings.intervalS=2")
        with self._recorder.phase("rollback"):
            self._chart.roll_back()

    def _churn_for(self, seconds: float, pause_s: float = 2.0) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self._churn.step()
            time.sleep(pause_s)


def _size(pid: int) -> ProcessSize:
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    cgroups = sum(1 for _ in Path("/sys/fs/cgroup/cpu").glob("**/"))
    return ProcessSize(rss_mib=memory_kib_of(pid) / 1024, descriptors=descriptors, cgroups=cgroups)


def measure(rounds: int, seed: int) -> ChurnRun:
    """Create a cluster, disturb it, and remove it. Raises Missing, Late, Failed and OSError."""
    image = image_archive()
    cluster = create_cluster(1)
    try:
        cluster.nodes[0].load(image)
        for name in (SYSTEM, WORK):
            labels = {"pod-security.kubernetes.io/enforce": "privileged"}
            cluster.server.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}})
        account = f"/api/v1/namespaces/{WORK}/serviceaccounts/default"
        wait("the service account", lambda: cluster.server.ask("GET", account), 60)
        disk = NodeDisk(cluster.nodes[0], STATE)
        try:
            return _measure_on(cluster, disk, rounds, seed)
        finally:
            disk.close()
    finally:
        cluster.release()


def _measure_on(cluster: Cluster, disk: NodeDisk, rounds: int, seed: int) -> ChurnRun:
    requests = {"requests": {"cpu": "500m", "memory": "64Mi"}}
    web = run(cluster, WORK, "web", "shared_cores", resources=requests)
    _await_class_weight(web)
    before = knobs_of_pods(cluster.nodes[0].cgroup_root)
    churn, chart, times = PodChurn(cluster, seed), Chart(cluster), ResponseTimes(web, cluster.names.run / "times")
    recorder = PhaseRecorder(churn, times)
    try:
        with recorder.phase(ALONE):
            time.sleep(PHASE_S)
        batch = [run(cluster, WORK, f"batch{number}", "reclaimed_cores", BURN) for number in range(2)]
        with recorder.phase(STOCK):
            time.sleep(PHASE_S)
        chart.upgrade()
        time.sleep(PHASE_S)  # probes are compiled and loaded
        with recorder.phase(AT_REST):
            time.sleep(PHASE_S)
        disturbed = DisturbedRounds(cluster, chart, disk, churn, recorder)
        disturbed.run(rounds)
        churn.end()
        left = _left(cluster, chart, batch, before, web)
    finally:
        times.close()
    account = f"{SYSTEM}/dioptase-agent"
    return ChurnRun(
        machine=this_machine("v1").line(),
        rounds=rounds,
        phases=recorder.results(),
        sizes={name: tuple(sizes) for name, sizes in disturbed.sizes.items()},
        evictions=sum(each.request.resource == "pods/eviction" for each in audit.entries(cluster.names.run, account)),
        restarts=disturbed.restarts,
        left=left,
    )


def _await_class_weight(web: Pod) -> None:
    """Wait until the class has the weight of its only pod.

    The kubelet writes it by the requests in the class once a minute (pkg/kubelet/cm/qos_container_manager_linux.go).
    """
    shares = web.cgroups()[0].parent / "cpu.shares"
    wait("the weight of the class", lambda: shares.read_text() == "512\n", 120)


def _left(cluster: Cluster, chart: Chart, batch: Sequence[Pod], before: Mapping[str, str], web: Pod) -> tuple[str, ...]:
    """End everything, and return what differs from the time before the installation."""
    for pod in batch:
        cluster.server.ask("DELETE", pod.path, {"gracePeriodSeconds": 0})
    chart.uninstall()
    wait("one pod", lambda: len(cluster.server.ask("GET", PODS)["items"]) == 1, 120)
    _await_class_weight(web)
    after = knobs_of_pods(cluster.nodes[0].cgroup_root)
    changed = [
        f"{path}: {after[path].strip()}, before {text.strip()}"
        for path, text in before.items()
        if after.get(path, text) != text
    ]
    names = cluster.nodes[0].run("ls", STATE).split()
    return (*changed, *(f"{STATE}/{name}" for name in names if name in ("originals.json", "handover.json")))


def markdown(result: ChurnRun) -> str:
    """Render the section of bench/RESULTS.md."""
    out = [
        "## Churn",
        "",
        f"{result.machine}.",
        "`python -m bench.churn`: a stock kubelet 1.33 and containerd 2, the chart with its defaults, two batch pods that take",
        f"all CPU they get, and an online service ({WORK_MS} ms of CPU every {PERIOD_MS} ms). {result.rounds} rounds of",
        "disturbances, with pods of random kinds and wrong annotations.",
        f"{result.evictions} pods were evicted, {result.restarts} processes of agent or controller ended by themselves,",
        f"{len(result.left)} values were left after the uninstallation.",
        "",
    ]
    heads = ("phase", "s", "pods created", "requests", "p50 ms", "p99 ms", "max ms")
    rows = [
        (
            x.name,
            f"{x.seconds:.0f}",
            f"{x.pods}",
            f"{x.requests}",
            f"{x.p50_ms:.2f}",
            f"{x.p99_ms:.1f}",
            f"{x.max_ms:.0f}",
        )
        for x in result.phases
    ]
    out += [*markdown_table(heads, rows), ""]
    sizes = [
        (name, *(f"{size.rss_mib:.1f} MiB, {size.descriptors}, {size.cgroups}" for size in (each[0], each[-1])))
        for name, each in result.sizes.items()
    ]
    heads_of_sizes = (
        "process",
        "memory, descriptors, cgroups of the machine: after the first round",
        f"after round {result.rounds}",
    )
    return "\n".join([*out, *markdown_table(heads_of_sizes, sizes), ""])


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser("churn", __doc__)
    parser.add_argument("--rounds", type=int, default=6, help="of all disturbances, about three minutes each")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    end_cleanly_on_sigterm()
    try:
        result = measure(args.rounds, args.seed)
    except (Missing, Late, Failed, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    print(markdown(result))
    write_results(args.out, "churn", markdown(result), result)
    return report_faults(result.faults())


if __name__ == "__main__":
    sys.exit(main())

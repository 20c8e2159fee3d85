"""Measures the agent's cost on a real node with a hundred pods, compared with the kubelet and containerd.
In a second phase the API server is stopped.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from agent.sensors.cgroup.hierarchy import detect_hierarchy
from api.units import NS_PER_MS
from bench.machine import (
    bench_parser,
    cpu_ns_of,
    end_cleanly_on_sigterm,
    markdown_table,
    memory_kib_of,
    report_faults,
    this_machine,
    write_results,
)
from tests.cluster.binaries import Missing
from tests.cluster.cluster import Cluster, create_cluster
from tests.cluster.control_plane import API_SERVER
from tests.cluster.daemons import Late, wait
from tests.cluster.objects import a_pod
from tests.cluster.programs import CODE, Agent, Controller
from tests.cluster.service_accounts import Account

PODS = "/api/v1/namespaces/default/pods"
LEVELS = ("shared_cores", "reclaimed_cores")
KIB_PER_MIB = 1024


class ProgramCost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of one program, or the sum of several of a kind."""

    cpu_ms: float
    """Milliseconds a second."""
    rss_mib: float


class ClusterPhase(msgspec.Struct, frozen=True, kw_only=True):
    """Costs within one phase of the run."""

    name: str
    seconds: float
    rounds: int
    pods: int
    """Pods that still run at its end, without a restart."""
    costs: Mapping[str, ProgramCost]


class ClusterRun(msgspec.Struct, frozen=True, kw_only=True):
    """Results of all phases."""

    machine: str
    pods: int
    phases: Sequence[ClusterPhase]


def measure(pods: int, seconds: float, outage_s: float) -> ClusterRun:
    """Create a cluster, measure its phases, and remove it. Raises Missing and Late."""
    folder = Path(tempfile.mkdtemp(prefix="dioptase-bench-"))
    cluster = create_cluster(1)
    try:
        cluster.kubectl("apply", "--server-side", "-f", CODE / "deploy/crds")
        cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", CODE / "deploy/crds")
        _create_pods(cluster, pods)
        controller = Controller(cluster, Account(cluster, "dioptase-controller", "default", folder), folder)
        account = Account(cluster, "dioptase-agent", "default", folder)
        agent = Agent(cluster, cluster.nodes[0], account, folder, options=("--act", "on"))
        controller.begin()
        agent.begin()
        agent.wait("the pods", lambda: len(agent.view()["containers"]) == pods)
        time.sleep(10)  # probes are loaded, and new pods get their first values
        phases = [_phase("at rest", cluster, agent, controller, seconds)]
        if outage_s:
            cluster.daemons.end(API_SERVER)
            phases.append(_phase("API server away", cluster, agent, controller, outage_s))
            cluster.daemons.again(API_SERVER)
            cluster.control.ready()
            phases.append(_phase("and back", cluster, agent, controller, min(seconds, 20.0)))
        agent.end()
        return ClusterRun(machine=this_machine(detect_hierarchy().mode).line(), pods=pods, phases=phases)
    finally:
        cluster.release()
        shutil.rmtree(folder)


def _create_pods(cluster: Cluster, pods: int) -> None:
    """So many pods, running."""
    for number in range(pods):
        pod = a_pod(f"pod{number:03}", LEVELS[number % 2])
        pod["spec"]["containers"][0]["command"] = ["sleep", "infinity"]
        pod["spec"]["terminationGracePeriodSeconds"] = 0
        cluster.server.ask("POST", PODS, pod)
    wait(f"{pods} pods", lambda: _running_pods(cluster) == pods, 240)


def _running_pods(cluster: Cluster) -> int:
    """Count the pods whose containers are ready and were never restarted."""
    pods = cluster.server.ask("GET", PODS)["items"]
    statuses = [pod["status"].get("containerStatuses", []) for pod in pods]
    return sum(bool(each) and all(item["ready"] and not item["restartCount"] for item in each) for each in statuses)


def _phase(name: str, cluster: Cluster, agent: Agent, controller: Controller, seconds: float) -> ClusterPhase:
    began, seq, before = time.monotonic(), agent.view()["seq"], _costs_so_far(cluster, agent, controller)
    time.sleep(seconds)
    after, passed = _costs_so_far(cluster, agent, controller), time.monotonic() - began
    costs = {
        program: ProgramCost(
            cpu_ms=(cpu - before.get(program, (cpu, 0))[0]) / NS_PER_MS / passed, rss_mib=kib / KIB_PER_MIB
        )
        for program, (cpu, kib) in after.items()
    }
    pods = _running_pods(cluster) if cluster.daemons.pid(API_SERVER) is not None else len(agent.view()["containers"])
    return ClusterPhase(name=name, seconds=passed, rounds=agent.view()["seq"] - seq, pods=pods, costs=costs)


def _costs_so_far(cluster: Cluster, agent: Agent, controller: Controller) -> dict[str, tuple[int, int]]:
    """CPU time in ns and memory in KiB so far, by program."""
    daemons = cluster.daemons
    pids: dict[str, Sequence[int | None]] = {
        "agent": [agent.pid],
        "controller": [controller.pid],
        "kubelet": [daemons.pid("node1-kubelet")],
        "containerd": [daemons.pid("node1-containerd")],
        "containerd's shims": _shim_pids(cluster),
        "kube-proxy": [daemons.pid("node1-proxy")],
        "API server": [daemons.pid(API_SERVER)],
    }
    spent = {}
    for name, those in pids.items():
        running = [pid for pid in those if pid is not None]
        if running:
            spent[name] = (sum(map(cpu_ns_of, running)), sum(map(memory_kib_of, running)))
    return spent


def _shim_pids(cluster: Cluster) -> list[int]:
    """Return the pids of the shims of this node, one per pod; those of other nodes are in other mount namespaces."""
    space = cluster.daemons.pid("node1")
    assert space is not None
    mine = Path(f"/proc/{space}/ns/mnt").stat().st_ino
    results = []
    for process in Path("/proc").iterdir():
        try:
            if (
                process.name.isdigit()
                and (process / "comm").read_text().startswith("containerd-shim")
                and (process / "ns/mnt").stat().st_ino == mine
            ):
                results.append(int(process.name))
        except OSError:
            continue
    return results


def markdown(run: ClusterRun) -> str:
    """Render the section of RESULTS.md."""
    first, names = run.phases[0].costs, [each.name for each in run.phases]
    kubelet = first["kubelet"]
    heads = ["program", *(f"CPU, {name}" for name in names), "of the kubelet's CPU", "memory MiB", "of the kubelet's"]
    text = [
        "## On a real node",
        "",
        f"{run.machine}. `python -m bench.cluster`: a stock",
        f"kubelet 1.33 and containerd 2 with {run.pods} pods, half online and half reclaimed, all idle; the agent with",
        "`--kubelet --node --act on` and its default settings. CPU is ms for each second, memory is resident; phases of",
        f"{', '.join(f'{each.seconds:.0f}' for each in run.phases)} s. Shims are one",
        "process for each pod.",
        "",
    ]
    rows = []
    for program, cost in first.items():
        cpus = [f"{each.costs[program].cpu_ms:.1f}" if program in each.costs else "" for each in run.phases]
        ratios = [cost.cpu_ms / kubelet.cpu_ms, cost.rss_mib / kubelet.rss_mib]
        rows.append([program, *cpus, f"{ratios[0]:.2f}", f"{cost.rss_mib:.0f}", f"{ratios[1]:.2f}"])
    text += [*markdown_table(heads, rows), ""]
    text += [
        f"- {phase.name}: {phase.rounds} rounds; {phase.pods} of {run.pods} pods run as before." for phase in run.phases
    ]
    return "\n".join(text) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser("cluster", __doc__)
    parser.add_argument("--pods", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the first phase")
    parser.add_argument("--away", type=float, default=60.0, help="seconds without API server; 0 skips this phase")
    args = parser.parse_args(argv)
    end_cleanly_on_sigterm()
    try:
        run = measure(args.pods, args.seconds, args.away)
    except (Missing, Late, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    print(markdown(run))
    write_results(args.out, "cluster", markdown(run), run)
    return report_faults([f"pods were lost: {each.name}" for each in run.phases if each.pods != run.pods])


if __name__ == "__main__":
    sys.exit(main())

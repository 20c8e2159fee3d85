"""Measures filter and score of the scheduler's NUMA and overcommitment plugins, each pod on all nodes at once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.machine import BenchMachine, bench_parser, markdown_table, this_machine, write_results
from controller.scheduler.aligned_arrays import RATIO_ONE
from controller.scheduler.node_overcommitment import CpuDemand, OvercommittedNodes, filter_overcommitted
from controller.scheduler.numa_topology import (
    PluginPolicy,
    ScoringStrategy,
    TopologyPod,
    TopologyPolicy,
    TopologyRules,
    ZoneState,
    filter_topology,
    score_topology,
)

NODES, ZONES, RESOURCES = 5000, 8, 4
SEED = 20_261_127
ROUNDS, WARM_UP_ROUNDS = 100, 5
GOAL_MS = 5.0
"""Goal for the filter of a pod that fits into one NUMA node."""
GIB = 1 << 30
ZONE = (16_000, 64 * GIB, 4, 1000)
"""CPU in milli-CPUs, memory in bytes, GPUs, and another device."""
HALF_ZONE, TWO_ZONES, FOUR_ZONES = (8000, 32 * GIB, 1, 10), (24_000, 96 * GIB, 0, 0), (56_000, 200 * GIB, 0, 0)
"""Requests that need this many NUMA nodes."""


class PluginRow(msgspec.Struct, frozen=True, kw_only=True):
    """CPU time of one plugin for one pod on all nodes, in milliseconds."""

    plugin: str
    pod: str
    fits: int
    """Number of nodes on which the pod fits."""
    p50_ms: float
    p99_ms: float


class SchedulerPluginsResults(msgspec.Struct, frozen=True, kw_only=True):
    """All results of one run."""

    machine: BenchMachine
    nodes: int
    rows: tuple[PluginRow, ...]


def measure(function: Callable[[], NDArray[np.generic]]) -> tuple[float, float, int]:
    """Return the median and the 99th percentile of the CPU time in ms, and the number of elements of the result that are not 0.

    CPU time of the process, numpy's threads included, depends less on other work on this machine than the duration.
    """
    durations = []
    for _ in range(ROUNDS + WARM_UP_ROUNDS):
        began = time.process_time_ns()
        result = function()
        durations.append((time.process_time_ns() - began) / 1e6)
    p50, p99 = np.quantile(durations[WARM_UP_ROUNDS:], (0.5, 0.99)).tolist()
    return p50, p99, int(np.count_nonzero(result))


def generate_zones(nodes: int, policy: TopologyPolicy) -> ZoneState:
    """Return nodes of two sockets; about 60 % of the zones are partly allocated, and 5 % of the nodes have an assumed pod."""
    random = np.random.default_rng(SEED)
    shape = (nodes, ZONES, RESOURCES)
    capacity = np.broadcast_to(np.array(ZONE, np.int64), shape).copy()
    used = random.random((nodes, ZONES, 1)) * (random.random((nodes, ZONES, 1)) < 0.6)
    assumed = np.zeros(shape, np.int64)
    assumed[random.random(nodes) < 0.05] = (2000, 4 * GIB, 0, 0)
    sockets = np.broadcast_to(np.arange(ZONES) // (ZONES // 2), (nodes, ZONES)).copy()
    return ZoneState(
        capacity=capacity, allocatable=capacity, allocated=(capacity * used).astype(np.int64), assumed=assumed,
        zones=np.ones((nodes, ZONES), np.bool_), sockets=sockets, reported=np.ones((nodes, RESOURCES), np.bool_),
        policies=np.full(nodes, policy, np.int64), pod_level=np.zeros(nodes, np.bool_),
    )  # fmt: skip


def pods() -> Iterator[tuple[str, PluginPolicy, TopologyPolicy, TopologyPod]]:
    """Yield name, plugin policy, policy of the nodes, and pod."""

    def pod(*containers: tuple[int, ...], exclusive: bool = False) -> TopologyPod:
        requests = np.array(containers, np.int64)
        return TopologyPod(
            containers=requests, effective=requests.sum(axis=0), guaranteed=True, whole_cpus=True, dedicated=True,
            binding=True, exclusive=exclusive,
        )  # fmt: skip

    native, dynamic = PluginPolicy.NATIVE, PluginPolicy.DYNAMIC
    yield "native, single NUMA node", native, TopologyPolicy.SINGLE, pod(HALF_ZONE)
    yield "native, single NUMA node, 2 containers", native, TopologyPolicy.SINGLE, pod(HALF_ZONE, HALF_ZONE)
    yield "native, restricted, 1 NUMA node", native, TopologyPolicy.RESTRICTED, pod(HALF_ZONE)
    yield "native, restricted, 2 NUMA nodes", native, TopologyPolicy.RESTRICTED, pod(TWO_ZONES)
    yield "native, restricted, 4 NUMA nodes", native, TopologyPolicy.RESTRICTED, pod(FOUR_ZONES)
    yield "dynamic, single NUMA node", dynamic, TopologyPolicy.SINGLE, pod(HALF_ZONE)
    yield "dynamic, numeric, binding", dynamic, TopologyPolicy.NUMERIC, pod(HALF_ZONE)
    yield "dynamic, numeric, exclusive, 1 NUMA node", dynamic, TopologyPolicy.NUMERIC, pod(HALF_ZONE, exclusive=True)
    yield "dynamic, numeric, exclusive, 2 NUMA nodes", dynamic, TopologyPolicy.NUMERIC, pod(TWO_ZONES, exclusive=True)
    yield "dynamic, numeric, exclusive, 4 NUMA nodes", dynamic, TopologyPolicy.NUMERIC, pod(FOUR_ZONES, exclusive=True)


def measure_topology(nodes: int) -> Iterator[PluginRow]:
    aligned = np.array([True, True, False, False])
    for name, plugin, policy, pod in pods():
        state = generate_zones(nodes, policy)
        rules = TopologyRules(
            plugin=plugin, aligned=aligned, required=aligned, weights=np.ones(RESOURCES, np.int64),
            strategy=ScoringStrategy.MOST,
        )  # fmt: skip
        p50, p99, fits = measure(lambda state=state, pod=pod, rules=rules: filter_topology(state, pod, rules))  # type: ignore[misc]
        yield PluginRow(plugin="NUMA filter", pod=name, fits=fits, p50_ms=p50, p99_ms=p99)
        p50, p99, _ = measure(lambda state=state, pod=pod, rules=rules: score_topology(state, pod, rules))  # type: ignore[misc]
        yield PluginRow(plugin="NUMA score", pod=name, fits=fits, p50_ms=p50, p99_ms=p99)


def measure_overcommitment(nodes: int) -> Iterator[PluginRow]:
    random = np.random.default_rng(SEED)
    guaranteed = random.integers(0, 32, nodes) * 1000
    state = OvercommittedNodes(
        allocatable_m=np.full(nodes, 128_000), guaranteed_m=guaranteed,
        requested_m=guaranteed + random.integers(0, 250_000, nodes),
        cpu_ratio_ppm=np.full(nodes, 2 * RATIO_ONE), memory_ratio_ppm=np.full(nodes, RATIO_ONE),
        static_cpu=random.random(nodes) < 0.5, static_memory=np.zeros(nodes, np.bool_),
    )  # fmt: skip
    p50, p99, rejected = measure(lambda: filter_overcommitted(state, CpuDemand(8000, 8)))
    yield PluginRow(plugin="overcommitment filter", pod="Guaranteed", fits=nodes - rejected, p50_ms=p50, p99_ms=p99)


def markdown(results: SchedulerPluginsResults) -> str:
    """Return the section of RESULTS.md."""
    one_zone = [row for row in results.rows if row.plugin == "NUMA filter" and row.pod == "dynamic, single NUMA node"]
    met = "met" if one_zone[0].p50_ms <= GOAL_MS else "missed"
    rows = [(row.plugin, row.pod, str(row.fits), f"{row.p50_ms:.2f}", f"{row.p99_ms:.2f}") for row in results.rows]
    heads = ("plugin", "pod", "nodes where it fits", "p50 ms", "p99 ms")
    return "\n".join(
        [
            "## Scheduler plugins",
            "",
            results.machine.line(),
            "",
            f"One pod on {results.nodes} nodes with {ZONES} NUMA nodes and {RESOURCES} resources each, {ROUNDS} rounds.",
            "Milliseconds are CPU time, which depends less on other work on this machine.",
            "The extender adds HTTP and the names of the nodes.",
            "",
            f"Goal: filter of a dedicated pod that fits into one NUMA node, p50 <= {GOAL_MS:g} ms: {met}.",
            "",
            *markdown_table(heads, rows, text_columns=2),
            "",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the table; a missed goal does not fail the benchmark."""
    parser = bench_parser("scheduler_plugins", __doc__)
    parser.add_argument("--nodes", type=int, default=NODES)
    args = parser.parse_args(argv)
    rows = []
    for source in (measure_topology, measure_overcommitment):
        for row in source(args.nodes):
            rows.append(row)
            print(
                f"{row.plugin:22} {row.pod:42} fits {row.fits:5}  p50 {row.p50_ms:6.2f} ms  p99 {row.p99_ms:6.2f} ms",
                flush=True,
            )
    results = SchedulerPluginsResults(machine=this_machine("not used"), nodes=args.nodes, rows=tuple(rows))
    write_results(args.out, "scheduler_plugins", markdown(results), results)
    return 0


if __name__ == "__main__":
    sys.exit(main())

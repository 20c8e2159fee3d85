"""Whether memory should move off a NUMA node, and where to: Katalyst's NUMA memory balancer.

The node that answers slowest is relieved when it is slow enough (grace, force), or much slower than its nearest neighbour.
Where its bandwidth is not the highest, its latency comes from elsewhere: without force nothing is done then, with force the
busiest node is relieved. Nothing moves to where it came from a short while ago, nor again to where it would not go.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from agent.advisor.memory.situation import NumaLoad, Situation, Unknown, elapsed
from agent.advisor.memory.state import Move
from agent.config.memory import BalancerConfig

_HIGH, _MEDIUM = 0.8, 0.5
"""Parts of the highest bandwidth."""
_OWN_DISTANCE = 10


class Level(StrEnum):
    """How much it takes."""

    GRACE = "grace"
    FORCE = "force"


class Thresholds(NamedTuple):
    """Read latencies in ns."""

    grace: float
    force: float
    gap: float


class Node(NamedTuple):
    """A NUMA node as a destination."""

    id: int
    load: NumaLoad
    distance: int


class Plan(NamedTuple):
    """Where memory should move from and to, the best first."""

    level: Level
    source: int
    destinations: tuple[int, ...]
    by_bandwidth: bool
    text: str


def thresholds(config: BalancerConfig, codename: str) -> Thresholds:
    """On AMD the latency is that of a miss of L3, which is another scale."""
    grace, force, gap = (500.0, 600.0, 400.0) if codename.startswith("AMD") else (70.0, 80.0, 40.0)
    return Thresholds(config.grace_latency_ns or grace, config.force_latency_ns or force, config.grace_gap_ns or gap)


def plan(situation: Situation, config: BalancerConfig, moves: Sequence[Move]) -> Plan | None:
    """What should move; None where nothing has to. No destination where something has to, but cannot. Raises Unknown."""
    loads = _loads(situation)
    slowest = max(loads, key=lambda numa: (loads[numa].read_latency_ns, -numa))
    busiest = max(loads, key=lambda numa: (loads[numa].bandwidth_bytes, -numa))
    if not loads[slowest].read_latency_ns or not loads[busiest].bandwidth_bytes:
        raise Unknown("latency and bandwidth of any NUMA node")
    limits = thresholds(config, situation.snapshot.node.machine.codename)
    near = ordered(situation, loads, slowest)
    level = _level(loads[slowest].read_latency_ns, near, limits, config.max_grace_distance)
    if level is None or not near:
        return None
    part = loads[slowest].bandwidth_bytes / loads[busiest].bandwidth_bytes
    source, by_bandwidth, goals = slowest, False, near
    if slowest != busiest and part <= _HIGH:
        if level is Level.GRACE:
            return None
        source, by_bandwidth = busiest, True
        if part > _MEDIUM:
            goals = sorted(ordered(situation, loads, source), key=lambda node: node.load.bandwidth_bytes)[:1]
        else:  # it is slow with little traffic: the latency is not that of its own memory
            goals = [Node(slowest, loads[slowest], _OWN_DISTANCE)]
    goals = better(goals, loads[source], level, config, by_bandwidth=by_bandwidth)
    kept = tuple(node.id for node in goals if not _barred(source, node.id, moves, situation.now_ns, config))
    text = (
        f"NUMA node {slowest} reads in {loads[slowest].read_latency_ns:g} ns ({level}: {limits.grace:g} and {limits.force:g})"
        f" at {part:.0%} of the highest bandwidth: memory should leave node {source}"
    )
    return Plan(level, source, kept, by_bandwidth, text)


def ordered(situation: Situation, loads: dict[int, NumaLoad], source: int) -> list[Node]:
    """The other nodes, the nearest first, of those the fastest. Raises Unknown."""
    found = situation.snapshot.node.numa.get(source)
    if found is None or not found.distances:
        raise Unknown(f"distances of NUMA node {source}")
    nodes = [Node(numa, loads[numa], far) for numa, far in found.distances.items() if numa in loads and numa != source]
    return sorted(nodes, key=lambda node: (node.distance, node.load.read_latency_ns, node.id))


def better(
    nodes: Sequence[Node], source: NumaLoad, level: Level, config: BalancerConfig, *, by_bandwidth: bool
) -> list[Node]:
    """Those that are better off than the source by the part that their distance asks for."""
    kept = []
    for node in nodes:
        near = node.distance <= config.max_grace_distance
        if level is Level.GRACE and not near:
            continue
        factor = 1 + (config.grace_gap_ratio if near else config.force_gap_ratio)
        if by_bandwidth:
            enough = node.load.bandwidth_bytes * factor <= source.bandwidth_bytes
        else:
            enough = node.load.read_latency_ns * factor <= source.read_latency_ns
        if enough:
            kept.append(node)
    return kept


def _loads(situation: Situation) -> dict[int, NumaLoad]:
    nodes = situation.snapshot.topology.numa_nodes if situation.share_numa is None else situation.share_numa
    missing = [str(numa) for numa in nodes if numa not in situation.loads]
    if missing or not nodes:
        raise Unknown(
            f"latency and bandwidth of NUMA node {', '.join(missing)}" if missing else "the share pool's nodes"
        )
    return {numa: situation.loads[numa] for numa in nodes}


def _level(latency: float, near: Sequence[Node], limits: Thresholds, max_distance: int) -> Level | None:
    if latency > limits.force:
        return Level.FORCE
    if latency > limits.grace:
        return Level.GRACE
    if near and near[0].distance <= max_distance and latency - near[0].load.read_latency_ns > limits.gap:
        return Level.GRACE
    return None


def _barred(source: int, goal: int, moves: Sequence[Move], now_ns: int, config: BalancerConfig) -> bool:
    """Whether memory came from there a short while ago, or would not go there."""
    for move in moves:
        if elapsed(now_ns, move.at_ns, config.ping_pong_s):
            continue
        if move.source == goal and source in move.destinations:
            return True
        if move.succeeded is False and move.source == source and goal in move.destinations:
            return True
    return False

"""Filters and scores nodes by the free resources of their NUMA nodes (Katalyst's plugin NodeResourceTopology). Pure.

A zone is a NUMA node. The caller gives the zones of all nodes as arrays [node, zone, resource] (`ZoneState`), the settings
(`TopologyRules`) and the pod (`TopologyPod`):
- amounts are integers in one unit per resource (CPU in milli-CPUs, memory in bytes), below 2^53. Zones are in the order of
  their numbers. Nodes with fewer zones are padded; `zones` masks the padding.
- `allocated` are the allocations of the CustomNodeResource; with the dynamic policy only those of dedicated pods.
- `assumed` is charged to every zone of the node until the CustomNodeResource names the pod's zones: a pod may get any of them.
  `assumed_charge` returns the amounts to add at the binding. Retain them, and subtract the same amounts when the pod appears in
  the allocations, when its binding fails or when the pod is deleted.
- nodes without a CustomNodeResource have the policy NONE, which accepts every pod.

The kubelet (pkg/kubelet/cm/topologymanager) and Katalyst's kubelet choose sets of zones by their capacity: a set is preferred
if it has the smallest number of zones whose capacity holds the request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum, IntEnum
from functools import cache
from itertools import combinations
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float64]
BoolArray: TypeAlias = NDArray[np.bool_]
MAX_SCORE = 100
ZONE_STEP = 12
"""Points of LeastNUMANodes for each zone after the first: the kubelet manages at most 8 zones, and 100 / 8 is 12."""


class TopologyPolicy(IntEnum):
    """How the kubelet of a node aligns resources."""

    NONE = 0
    SINGLE = 1
    """All resources in one zone."""
    RESTRICTED = 2
    """All resources in one preferred set of zones, or the pod is rejected."""
    BEST_EFFORT = 3
    """As RESTRICTED, but no pod is rejected."""
    NUMERIC = 4
    """The aligned resources in one preferred set of zones; the others anywhere on the node."""


POLICY_NAMES: Mapping[str, TopologyPolicy] = {
    "SingleNUMANode": TopologyPolicy.SINGLE,
    "Restricted": TopologyPolicy.RESTRICTED,
    "BestEffort": TopologyPolicy.BEST_EFFORT,
    "Numeric": TopologyPolicy.NUMERIC,
}
"""Beginnings of `status.topologyPolicy`, followed by PodLevel or ContainerLevel."""


class PluginPolicy(Enum):
    """Which managers allocate resources on the nodes."""

    NATIVE = "native"
    """The kubelet's managers: Guaranteed pods with whole CPUs are aligned."""
    DYNAMIC = "dynamic"
    """Katalyst's QRM: dedicated_cores pods with numa_binding are aligned."""


class ScoringStrategy(Enum):
    """Which nodes are preferred."""

    MOST = "MostAllocated"
    LEAST = "LeastAllocated"
    BALANCED = "BalancedAllocation"
    LEAST_ZONES = "LeastNUMANodes"


class ZoneState(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Zones of N nodes with at most Z zones each and R resources."""

    capacity: IntArray
    """Capacity, [N, Z, R]."""
    allocatable: IntArray
    """Allocatable amounts, [N, Z, R]."""
    allocated: IntArray
    """Allocations of the CustomNodeResource, [N, Z, R]."""
    assumed: IntArray
    """Charges of assumed pods, [N, Z, R]."""
    zones: BoolArray
    """[N, Z]: whether the zone exists."""
    sockets: IntArray
    """[N, Z]: number of the zone's socket; ignored for padding."""
    reported: BoolArray
    """[N, R]: whether zones of the node report the resource. Otherwise the node offers it as a whole, and it is not aligned."""
    policies: IntArray
    """[N]: TopologyPolicy."""
    pod_level: BoolArray
    """[N]: whether the policy aligns the pod as a whole instead of each container."""


class TopologyRules(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Settings of the plugin (NodeResourceTopologyArgs)."""

    plugin: PluginPolicy
    aligned: BoolArray
    """[R]: alignedResources; with the native policy, and with SINGLE, every reported resource is aligned."""
    required: BoolArray
    """[R]: resources, such as CPU and memory, that zones of a node have to report; without them no zone fits."""
    weights: IntArray
    """[R]: weights of the score, at least 1."""
    strategy: ScoringStrategy


class TopologyPod(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Requests of one pod, in the units of ZoneState."""

    containers: IntArray
    """[C, R]: each container in the order of its start, without init containers. The dynamic policy evaluates `main` only,
    because sidecars run where the main container runs."""
    effective: IntArray
    """[R]: the pod as a whole: the larger one of all containers and each init container, plus overhead."""
    main: int = 0
    guaranteed: bool = False
    """Whether the Kubernetes QoS class is Guaranteed."""
    whole_cpus: bool = False
    """Whether every container requests whole CPUs."""
    dedicated: bool = False
    """Whether the QoS level is dedicated_cores."""
    binding: bool = False
    """Enhancement numa_binding: without `exclusive` one zone."""
    exclusive: bool = False
    """Enhancement numa_exclusive: zones without any other pod; the dynamic policy only."""


class _PolicyGroup(msgspec.Struct, frozen=True, eq=False):
    """Nodes with the same policy and level."""

    nodes: IntArray | slice
    policy: TopologyPolicy
    pod_level: bool


class _Placement(msgspec.Struct, frozen=True, eq=False):
    """Result for some nodes and one request."""

    fits: BoolArray
    """Whether the request fits, [n]."""
    zones: BoolArray
    """[n, Z]: the first set of zones that fits, in the kubelet's order; none where nothing fits."""
    score: IntArray
    """[n]: smallest score of the sets that fit; 0 where nothing fits."""


class _Request(msgspec.Struct, frozen=True, eq=False):
    """One request on some nodes with the same policy."""

    amounts: IntArray
    """Requested amounts, [R]."""
    counts: BoolArray
    """[n, R]: resources that have to be in the chosen zones."""
    summed: BoolArray
    """[n, R]: resources that only the node as a whole has to have."""
    available: IntArray
    """Free amounts, [n, Z, R]."""
    idle: BoolArray
    """[n, Z]: zones that the pod may use, without padding."""
    socket_bound: bool
    max_zones: int
    scored: bool
    """Whether the score is needed: the filter does without."""


def parse_topology_policy(text: str) -> tuple[TopologyPolicy, bool]:
    """Parse `status.topologyPolicy` into the policy and whether it aligns the pod as a whole; NONE for any other text."""
    for name, policy in POLICY_NAMES.items():
        for level in ("ContainerLevel", "PodLevel"):
            if text == f"{name}{level}":
                return policy, level == "PodLevel"
    return TopologyPolicy.NONE, False


def is_aligned(pod: TopologyPod, rules: TopologyRules) -> bool:
    """Return whether nodes align the pod. Others pass the filter and score MAX_SCORE everywhere."""
    if rules.plugin is PluginPolicy.NATIVE:
        return pod.guaranteed and pod.whole_cpus
    return pod.dedicated and pod.binding


def filter_topology(state: ZoneState, pod: TopologyPod, rules: TopologyRules) -> BoolArray:
    """Return for each node whether its zones can hold the pod."""
    fits = np.ones(len(state.policies), np.bool_)
    if is_aligned(pod, rules):
        for group in _policy_groups(state, rules):
            if group.policy is not TopologyPolicy.BEST_EFFORT:
                fits[group.nodes] = _place_pod(state, pod, rules, group, scored=False)[0]
    return fits


def score_topology(state: ZoneState, pod: TopologyPod, rules: TopologyRules) -> IntArray:
    """Return a score from 0 to MAX_SCORE for each node: the mean over the containers of the smallest score of the sets of zones
    that fit. Nodes that do not align score 0.

    Katalyst takes the smallest score above 0, and so ignores zones that fit exactly.
    """
    if not is_aligned(pod, rules):
        return np.full(len(state.policies), MAX_SCORE, np.int64)
    scores = np.zeros(len(state.policies), np.int64)
    for group in _policy_groups(state, rules):
        fits, score = _place_pod(state, pod, rules, group, scored=True)
        scores[group.nodes] = np.where(fits, score, 0)
    return scores


def assumed_charge(allocatable: IntArray, pod: TopologyPod, rules: TopologyRules) -> IntArray:
    """Return [Z, R], what an assumed pod occupies of the zones of its node, whose `allocatable` is [Z, R].

    It is the whole request in every zone, and all of the zone for an exclusive pod.
    """
    if not is_aligned(pod, rules):
        return np.zeros_like(allocatable)
    if pod.exclusive and rules.plugin is PluginPolicy.DYNAMIC:
        return allocatable.copy()
    return np.broadcast_to(pod.effective, allocatable.shape).copy()


def explain_topology(
    state: ZoneState, pod: TopologyPod, rules: TopologyRules, node: int, names: tuple[str, ...]
) -> str:
    """Return why the zones of a node cannot hold the pod, with the largest free amounts of a zone; empty if they can.

    `names` are the resources.
    """
    row = _select_nodes(state, slice(node, node + 1))
    if filter_topology(row, pod, rules)[0]:
        return ""
    policy = TopologyPolicy(int(row.policies[0]))
    free = np.where(row.zones[0][:, None], _available(row)[0], 0)
    requested = pod.effective if row.pod_level[0] else _requests(pod, rules, pod_level=False).max(axis=0)
    texts = [
        f"{names[index]}: requested {requested[index]}, largest free {free[:, index].max()} in a NUMA node,"
        f" {free[:, index].sum()} in all"
        for index in np.flatnonzero(requested)
    ]
    exclusive = f", {int(_idle(row)[0].sum())} NUMA nodes without pods" if pod.exclusive else ""
    return (
        f"no set of NUMA nodes fits (policy {policy.name.lower()}{exclusive}): {'; '.join(texts)}; reduce the request"
    )


def _policy_groups(state: ZoneState, rules: TopologyRules) -> Iterator[_PolicyGroup]:
    """Yield the nodes of each policy and level that aligns pods. A stock kubelet has no NUMERIC policy."""
    codes = state.policies * 2 + state.pod_level
    present = np.unique(codes)
    for code in present.tolist():
        policy = TopologyPolicy(code // 2)
        native_numeric = policy is TopologyPolicy.NUMERIC and rules.plugin is PluginPolicy.NATIVE
        if policy is not TopologyPolicy.NONE and not native_numeric:
            # One policy for all nodes is the usual case, and a slice copies nothing.
            nodes = slice(None) if len(present) == 1 else np.flatnonzero(codes == code)
            yield _PolicyGroup(nodes, policy, bool(code % 2))


def _select_nodes(state: ZoneState, nodes: IntArray | slice) -> ZoneState:
    return ZoneState(**{field: getattr(state, field)[nodes] for field in ZoneState.__struct_fields__})


def _available(state: ZoneState) -> IntArray:
    return np.asarray(np.maximum(state.allocatable - state.allocated - state.assumed, 0), np.int64)


def _idle(state: ZoneState) -> BoolArray:
    """Return [N, Z], zones in which no pod has, or may get, resources."""
    idle = state.zones.copy()
    # Reductions over the short last axis are several times slower than this loop.
    for index in range(state.allocated.shape[2]):
        idle &= (state.allocated[:, :, index] | state.assumed[:, :, index]) == 0
    return idle


def _requests(pod: TopologyPod, rules: TopologyRules, *, pod_level: bool) -> IntArray:
    """Return [C, R], the requests that are placed one after another."""
    if pod_level:
        return pod.effective[None, :]
    dynamic = rules.plugin is PluginPolicy.DYNAMIC
    return pod.containers[pod.main : pod.main + 1] if dynamic else pod.containers


def _place_pod(
    state: ZoneState, pod: TopologyPod, rules: TopologyRules, group: _PolicyGroup, *, scored: bool
) -> tuple[BoolArray, IntArray]:
    """Return whether the pod fits on the nodes of a group, and its score if it is needed."""
    selected, policy = _select_nodes(state, group.nodes), group.policy
    dynamic = rules.plugin is PluginPolicy.DYNAMIC
    exclusive = pod.exclusive and dynamic
    requests = _requests(pod, rules, pod_level=group.pod_level)
    free = _available(selected)
    usable = _idle(selected) if exclusive else selected.zones
    fits, total = np.ones(len(selected.policies), np.bool_), np.zeros(len(selected.policies), np.int64)
    for number, amounts in enumerate(requests):
        requested = (amounts > 0) & (selected.reported | rules.required)
        partly = policy is TopologyPolicy.NUMERIC
        request = _Request(
            amounts=amounts,
            counts=requested & rules.aligned if partly else requested,
            summed=requested & ~rules.aligned if partly else np.zeros_like(requested),
            available=free,
            idle=usable,
            socket_bound=dynamic and partly,
            scored=scored,
            max_zones=1 if policy is TopologyPolicy.SINGLE or (dynamic and not exclusive) else state.zones.shape[1],
        )
        placement = _place(selected, request, rules, policy)
        fits &= placement.fits
        total += placement.score
        if number + 1 < len(requests):
            free = _subtract(request, placement.zones)
    return fits, total // max(len(requests), 1)


def _place(state: ZoneState, request: _Request, rules: TopologyRules, policy: TopologyPolicy) -> _Placement:
    """Place one request. Sets with equally many zones are tried together: 8 zones have 70 sets of four, but 255 in all."""
    needed, usable = _needed_zones(state, request, policy), request.idle.sum(axis=1)
    nodes, zone_count = state.zones.shape
    result = _Placement(np.zeros(nodes, np.bool_), np.zeros((nodes, zone_count), np.bool_), np.zeros(nodes, np.int64))
    totals = (
        np.asarray(np.where(state.zones[:, :, None], request.available, 0).sum(axis=1))
        if request.summed.any()
        else None
    )
    for count in range(1, min(request.max_zones, zone_count) + 1):
        # A best-effort kubelet takes more zones than preferred, if the preferred ones are full.
        chosen = needed == count
        if policy is TopologyPolicy.BEST_EFFORT:
            chosen = (needed > 0) & (needed <= count) & ~result.fits
        # For an exclusive pod, this excludes most nodes of a busy cluster.
        rows = np.flatnonzero(chosen & (usable >= count))
        if len(rows):
            _place_in_sets(state, request, rules, rows, count, result)
    if totals is not None:
        short = (request.summed & (totals < request.amounts)).any(axis=1)
        result.fits[short] = False
        result.score[short] = 0
        result.zones[short] = False
    return result


def _needed_zones(state: ZoneState, request: _Request, policy: TopologyPolicy) -> IntArray:
    """Return the preferred number of zones of each node; 0 where no number is preferred or the capacity does not suffice."""
    nodes, zone_count = state.zones.shape
    if policy is TopologyPolicy.SINGLE:
        return np.ones(nodes, np.int64)
    largest, smallest = np.ones(nodes, np.int64), np.full(nodes, zone_count + 1, np.int64)
    for index in np.flatnonzero(request.amounts).tolist():
        counts = request.counts[:, index]
        offered = np.where(state.zones, state.capacity[:, :, index], 0)
        needed = np.ones(nodes, np.int64)
        short = offered.max(axis=1) < request.amounts[index]
        if short.any():
            sums = np.cumsum(-np.sort(-offered[short], axis=1), axis=1)
            needed[short] += (sums < request.amounts[index]).sum(axis=1)
        np.maximum(largest, needed, out=largest, where=counts)
        np.minimum(smallest, needed, out=smallest, where=counts)
    impossible = largest > zone_count
    if policy is TopologyPolicy.RESTRICTED:
        # The kubelet prefers only equal sets of all resources (policy.go, mergePermutation).
        impossible |= smallest < largest
    return np.where(impossible, 0, largest)


@cache
def _sets(zone_count: int, count: int) -> IntArray:
    """Return [M, count], the members of each set of `count` zones, sets with the lowest numbers first."""
    return np.array(list(combinations(range(zone_count), count)), np.int64)


def _place_in_sets(
    state: ZoneState, request: _Request, rules: TopologyRules, rows: IntArray, count: int, result: _Placement
) -> None:
    """Try all sets of `count` zones on the nodes `rows`, and store what fits in `result`.

    Arrays are [M, n] here, one row per set: sums over few zones of all nodes are several times faster than a matrix product.
    """
    nodes, zone_count = state.zones.shape
    sets = _sets(zone_count, count)
    where: IntArray | slice = slice(None) if len(rows) == nodes else rows
    usable = np.ascontiguousarray(request.idle[where].T)
    fits = usable[sets[:, 0]]
    for members in sets.T[1:]:
        fits &= usable[members]
    if request.socket_bound and count > 1:
        fits &= ~_crosses_sockets(state, where, sets)
    sums: dict[int, IntArray] = {}
    for index in np.flatnonzero(request.amounts).tolist():
        available = np.ascontiguousarray(request.available[where, :, index].T)
        sums[index] = available[sets[:, 0]]
        for members in sets.T[1:]:
            sums[index] += available[members]
        counts = request.counts[where, index]
        fits &= (sums[index] >= request.amounts[index]) | ~counts
    any_fit = np.asarray(fits.any(axis=0), np.bool_)
    chosen = np.zeros((len(any_fit), zone_count), np.bool_)
    np.put_along_axis(chosen, sets[fits.argmax(axis=0)], values=True, axis=1)
    result.fits[where] = any_fit
    result.zones[where] = chosen & any_fit[:, None]
    if request.scored:
        score = _score(request, rules, where, sums, count)
        result.score[where] = np.where(any_fit, np.where(fits, score, MAX_SCORE + 1).min(axis=0), 0)


def _crosses_sockets(state: ZoneState, where: IntArray | slice, sets: IntArray) -> BoolArray:
    """Return [M, n], sets that span sockets although one socket has enough zones. Zones are evenly spread over sockets."""
    zones, sockets = state.zones[where], state.sockets[where]
    by_zone = np.ascontiguousarray(sockets.T)
    spans = np.zeros((len(sets), len(zones)), np.bool_)
    for members in sets.T[1:]:
        spans |= by_zone[members] != by_zone[sets[:, 0]]
    sockets_of_node = np.zeros(len(zones), np.int64)
    for socket in np.unique(sockets[zones]).tolist():
        sockets_of_node += ((sockets == socket) & zones).any(axis=1)
    per_socket = zones.sum(axis=1) // np.maximum(sockets_of_node, 1)
    return np.asarray(spans & (sets.shape[1] <= per_socket), np.bool_)


def _score(
    request: _Request, rules: TopologyRules, where: IntArray | slice, sums: Mapping[int, IntArray], count: int
) -> FloatArray:
    """Return the score of each set of zones, [M, n] or [1, 1] if it is the same for all. With the dynamic policy only aligned
    resources count, because others may be elsewhere."""
    if rules.strategy is ScoringStrategy.LEAST_ZONES:
        return np.full((1, 1), max(MAX_SCORE - (count - 1) * ZONE_STEP, 0), np.float64)
    dynamic = rules.plugin is PluginPolicy.DYNAMIC
    indices = [index for index in sums if rules.aligned[index] or not dynamic]
    if not indices:
        return np.zeros((1, 1))
    counts = {index: request.counts[where, index] for index in indices}
    percents = {
        index: float(request.amounts[index] * MAX_SCORE) / np.maximum(sums[index], request.amounts[index])
        for index in indices
    }
    if rules.strategy is ScoringStrategy.BALANCED:
        return _balance(list(percents.values()), list(counts.values()))
    weighted, weights = np.zeros((1, 1)), np.zeros(1)
    for index, percent in percents.items():
        if rules.strategy is ScoringStrategy.LEAST:
            np.subtract(MAX_SCORE, percent, out=percent)
        # 1e-9: a third of 300 is 100, not 99.
        np.floor(np.add(percent, 1e-9, out=percent), out=percent)
        weight = rules.weights[index] * counts[index]
        weighted = weighted + np.multiply(percent, weight, out=percent)
        weights = weights + weight
    return np.asarray(np.floor_divide(weighted, np.maximum(weights, 1)), np.float64)


def _balance(percents: list[FloatArray], counts: list[BoolArray]) -> FloatArray:
    """Return (1 - sample variance of the used shares) x MAX_SCORE; a single resource is balanced."""
    number = np.sum(counts, axis=0)
    mean = sum(percent * used for percent, used in zip(percents, counts, strict=True)) / np.maximum(number, 1)
    squares = sum((percent - mean) ** 2 * used for percent, used in zip(percents, counts, strict=True))
    score = np.floor(MAX_SCORE - squares / np.maximum(number - 1, 1) / MAX_SCORE + 1e-9)
    return np.asarray(np.where(number == 0, 0, score), np.float64)


def _subtract(request: _Request, zones: BoolArray) -> IntArray:
    """Return the free amounts for the next container: the request is subtracted from the chosen zones, low numbers first."""
    free = request.available.copy()
    left = np.where(request.counts, request.amounts, 0)
    anywhere = np.where(request.summed, request.amounts, 0)
    for zone in range(zones.shape[1]):
        part = np.minimum(free[:, zone], np.where(zones[:, zone, None], left, 0) + anywhere)
        free[:, zone] -= part
        from_left = np.where(zones[:, zone, None], np.minimum(part, left), 0)
        left, anywhere = left - from_left, anywhere - (part - from_left)
    return np.asarray(free, np.int64)

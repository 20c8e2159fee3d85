"""Nodes and pods of a cluster in rows: what is lent and used, what online pods wait for it, who could not be asked. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from api.cpus import parse_cpu_list
from api.quantities import parse_quantity
from cli import words
from cli.fleet.asking import Told
from cli.fleet.lines import Cell, table
from exporters.cgroup_view import ContainerView
from exporters.view import View

MOST_NAMED = 3
"""Of one kind of trouble in a row."""
RECLAIMED = "reclaimed_cores"
ONLINE = ("shared_cores", "dedicated_cores")


class NodeRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node; what is None is not known. Units: cores, microseconds, ratios."""

    node: str
    pod: str = ""
    problem: str = ""
    """Why nothing is known,"""
    remedy: str = ""
    """and what helps."""
    cpus: int | None = None
    allocatable_cores: float | None = None
    """What the kubelet gives to pods."""
    busy_cores: float | None = None
    lent_cores: float | None = None
    used_cores: float | None = None
    """By reclaimed pods."""
    advertised_cores: float | None = None
    """Promised to reclaimed pods in all."""
    harm_ms: float | None = None
    """Milliseconds a second that online tasks waited while reclaimed pods had the CPU."""
    wait_p99_us: float | None = None
    """Of the online container that waits longest,"""
    wait_pod: str = ""
    """and whose it is."""
    pools: dict[str, int] = {}
    """CPUs of each pool; pools may overlap."""
    act: str = ""
    action: str = ""
    reason: str = ""
    conditions: tuple[str, ...] = ()
    """What the node is short of, as its taints say,"""
    leaving: tuple[str, ...] = ()
    """the pods that were asked to leave for it and are still here,"""
    held: dict[str, str] = {}
    """and those that have to and stay for now, with why."""
    failed: tuple[str, ...] = ()
    """Sources that gave nothing."""


class PodRow(msgspec.Struct, frozen=True, kw_only=True):
    """One container of a managed pod."""

    node: str
    pod: str
    container: str
    qos: str
    cpu_cores: float | None
    throttled_ratio: float | None
    wait_p50_us: float | None
    wait_p99_us: float | None
    latency_p99_ms: float | None
    memory_bytes: int | None
    harm_ms: float | None


def node_row(told: Told[View]) -> NodeRow:
    """One node's, whether it answered or not."""
    member, view = told.member, told.answer
    allocatable = _cores(member.allocatable_cpu)
    if view is None:
        return NodeRow(
            node=member.node, pod=member.pod, problem=told.problem, remedy=told.remedy, allocatable_cores=allocatable
        )
    waits = [(c.wait.p99_us, c.pod) for c in view.containers if _online(c) and c.wait and c.wait.p99_us is not None]
    worst = max(waits, default=(None, ""))
    advertised, evictions = view.advertised or view.headroom, view.evictions
    return NodeRow(
        node=member.node,
        pod=member.pod,
        cpus=view.node_cpus,
        allocatable_cores=allocatable,
        busy_cores=view.busy_cores,
        lent_cores=view.lent_cores,
        used_cores=view.reclaimed_cores,
        advertised_cores=None if advertised is None else advertised.cores,
        harm_ms=_sum(harm(c, view) for c in view.containers),
        wait_p99_us=worst[0],
        wait_pod=worst[1],
        pools={name: _count(cpus) for name, cpus in view.pools.items()},
        act=view.act,
        action=view.action,
        reason=view.reason,
        conditions=() if evictions is None else tuple(each.name for each in evictions.conditions),
        leaving=() if evictions is None else evictions.leaving,
        held={} if evictions is None else dict(evictions.held),
        failed=tuple(source.name for source in view.sources if not source.ok),
    )


def pod_rows(told: Told[View], names: Sequence[str] = ()) -> list[PodRow]:
    """The managed pods of one node, or those of these names."""
    view = told.answer
    if view is None:
        return []
    return [
        PodRow(
            node=told.member.node,
            pod=c.pod,
            container=c.container,
            qos=c.qos,
            cpu_cores=c.cpu_cores,
            throttled_ratio=c.throttled_ratio,
            wait_p50_us=c.wait.p50_us if c.wait else None,
            wait_p99_us=c.wait.p99_us if c.wait else None,
            latency_p99_ms=c.latency.p99_ms if c.latency else None,
            memory_bytes=c.memory_bytes,
            harm_ms=harm(c, view),
        )
        for c in view.containers
        if not names or c.pod in names or c.pod.partition("/")[2] in names
    ]


def harm(container: ContainerView, view: View) -> float | None:
    """Milliseconds a second that an online container's tasks waited for a CPU that reclaimed pods had; None of others, and
    where nobody knows who had it. Of many culprits only the worst are told apart."""
    if not _online(container) or container.blame is None:
        return None
    batch = [c.cgroup for c in view.containers if c.qos == RECLAIMED]
    return sum(
        ms for culprit, ms in container.blame.culprits if any((culprit + "/").startswith(path + "/") for path in batch)
    )


NODE_SORTS: dict[str, Callable[[NodeRow], tuple[Any, ...]]] = {
    "name": lambda row: (row.node,),
    "cpu": lambda row: (-(row.busy_cores or 0), row.node),
    "lent": lambda row: (-(row.lent_cores or 0), row.node),
    "wait": lambda row: (-(row.wait_p99_us or 0), row.node),
    "harm": lambda row: (-(row.harm_ms or 0), row.node),
}
"""The largest first; what is not known counts as nothing."""
POD_SORTS: dict[str, Callable[[PodRow], tuple[Any, ...]]] = {
    "name": lambda row: (row.node, row.pod, row.container),
    "cpu": lambda row: (-(row.cpu_cores or 0), row.node, row.pod),
    "memory": lambda row: (-(row.memory_bytes or 0), row.node, row.pod),
    "wait": lambda row: (-(row.wait_p99_us or 0), row.node, row.pod),
    "harm": lambda row: (-(row.harm_ms or 0), row.node, row.pod),
}


def nodes_text(rows: Sequence[NodeRow]) -> list[str]:
    """The table of nodes; their sum where there are several."""
    right = "cpus alloc busy lent used promised harm wait".upper().split()
    heads = [Cell("NODE"), *(Cell(head, right=True) for head in right), Cell("POOLS"), Cell("STATUS")]
    body = [_node_cells(row) for row in rows]
    if len(rows) > 1:
        body.append(_total(rows))
    return table(heads, body)


def _node_cells(row: NodeRow) -> list[str]:
    return [
        words.clean(row.node),
        words.integer(row.cpus),
        words.cores(row.allocatable_cores),
        *map(words.cores, (row.busy_cores, row.lent_cores, row.used_cores, row.advertised_cores)),
        _ms(row.harm_ms),
        words.duration(row.wait_p99_us),
        pools_text(row.pools),
        status(row),
    ]


def status(row: NodeRow) -> str:
    """What the agent does, or why it cannot be asked."""
    if row.problem:
        return f"✕ {words.clean(row.problem)}"
    held = sorted(f"{pod} ({why})" for pod, why in row.held.items())
    troubles = ((row.conditions, ""), (row.leaving, "leaving: "), (held, "has to leave: "), (row.failed, "without "))
    said = [f"✕ {label}{words.clean(_few(names))}" for names, label in troubles if names]
    return words.join([words.join([words.clean(row.act), words.clean(row.action) or "no advice"], ", "), *said])


def _few(names: Sequence[str]) -> str:
    return ", ".join([*names[:MOST_NAMED], *([f"{len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else [])])


def _total(rows: Sequence[NodeRow]) -> list[str]:
    silent = sum(bool(row.problem) for row in rows)
    sums = [_sum(values) for values in zip(
        *((row.busy_cores, row.lent_cores, row.used_cores, row.advertised_cores) for row in rows), strict=True
    )]  # fmt: skip
    waits = [row.wait_p99_us for row in rows if row.wait_p99_us is not None]
    return [
        f"{len(rows)} nodes",
        words.integer(_sum(row.cpus for row in rows)),
        words.cores(_sum(row.allocatable_cores for row in rows)),
        *map(words.cores, sums),
        _ms(_sum(row.harm_ms for row in rows)),
        words.duration(max(waits, default=None)),
        "",
        f"✕ {silent} not known" if silent else "all known",
    ]


def pods_text(rows: Sequence[PodRow]) -> list[str]:
    """The table of pods."""
    left, right = (
        ("NODE", "POD", "CONTAINER", "QOS"),
        ("CPU", "THROTTLED", "WAIT P50", "P99", "LATENCY", "HARM", "MEMORY"),
    )
    heads = [*(Cell(head) for head in left), *(Cell(head, right=True) for head in right)]
    return table(
        heads,
        [
            [
                *map(words.clean, (row.node, row.pod, row.container, row.qos.removesuffix("_cores"))),
                words.cores(row.cpu_cores),
                words.percent(row.throttled_ratio),
                words.duration(row.wait_p50_us),
                words.duration(row.wait_p99_us),
                words.milliseconds(row.latency_p99_ms),
                _ms(row.harm_ms),
                words.size(row.memory_bytes),
            ]
            for row in rows
        ],
    )


def pools_text(pools: dict[str, int]) -> str:
    """`reclaim 4, share 6`."""
    return ", ".join(f"{words.clean(name)} {cpus}" for name, cpus in sorted(pools.items())) or words.NONE


def _online(container: ContainerView) -> bool:
    return container.qos in ONLINE


def _ms(value: float | None) -> str:
    return words.NONE if value is None else f"{words.figures(value)} ms/s"


def _sum(values: Iterable[float | None]) -> float | None:
    """Of those that are known; None where none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _count(cpus: str) -> int:
    try:
        return len(parse_cpu_list(cpus))
    except ValueError:
        return 0


def _cores(quantity: str) -> float | None:
    try:
        return float(parse_quantity(quantity)) if quantity else None
    except ValueError:
        return None

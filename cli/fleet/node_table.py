"""Tables of a cluster's nodes and pods: reclaimable and used CPU, run-queue latency, interference. Pure.
Units: cores, microseconds, milliseconds per second, ratios; None where unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from api.cpu import parse_cpu_list
from api.quantity import parse_quantity
from api.text import printable
from cli import formats
from cli.colocation_report import NS_PER_HOUR
from cli.fleet.api_server import AgentReply
from cli.tables import TableHeading, format_table
from cli.top.charts import is_online, is_reclaimed
from exporters.view.cycle_view import ContainerView, View

MAX_NAMES_PER_PROBLEM = 3
"""Maximum number of names of one kind of problem in a row."""


class NodeRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node; None stands for unknown. Units: cores, microseconds, ratios."""

    node: str
    pod: str = ""
    problem: str = ""
    """Why the node's data is missing."""
    remedy: str = ""
    """What to do about the problem."""
    cpus: int | None = None
    allocatable_cores: float | None = None
    """Allocatable CPU that the kubelet reports."""
    busy_cores: float | None = None
    reclaimable_cores: float | None = msgspec.field(default=None, name="lent_cores")
    used_cores: float | None = None
    """CPU used by reclaimed pods."""
    used_core_hours: float | None = None
    """CPU time of reclaimed pods in hours of one CPU, since the first agent ran on the node."""
    advertised_cores: float | None = None
    """Headroom that the node reports for all reclaimed pods together."""
    harm_ms: float | None = None
    """Milliseconds a second that online tasks waited while reclaimed pods had the CPU."""
    wait_p99_us: float | None = None
    """The highest p99 run-queue latency of the node's online containers."""
    wait_pod: str = ""
    """Pod with the highest p99 run-queue latency."""
    pools: dict[str, int] = {}
    """Number of CPUs per pool; pools may overlap."""
    act: str = ""
    action: str = ""
    reason: str = ""
    conditions: tuple[str, ...] = ()
    """Conditions of the eviction plugins, which the node's taints repeat."""
    terminating: tuple[str, ...] = msgspec.field(default=(), name="leaving")
    """Pods that were evicted and still run."""
    held: dict[str, str] = {}
    """Pods whose eviction is blocked, with the reason."""
    failed: tuple[str, ...] = ()
    """Sources that failed."""


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


def node_row(reply: AgentReply[View]) -> NodeRow:
    """Return the row of a node, also of one that did not answer."""
    member, view = reply.member, reply.answer
    allocatable = _parse_cores(member.allocatable_cpu)
    if view is None:
        return NodeRow(
            node=member.node, pod=member.pod, problem=reply.problem, remedy=reply.remedy, allocatable_cores=allocatable
        )
    waits = [(c.wait.p99_us, c.pod) for c in view.containers if is_online(c) and c.wait and c.wait.p99_us is not None]
    worst = max(waits, default=(None, ""))
    advertised, evictions = view.reported_headroom or view.headroom, view.evictions
    return NodeRow(
        node=member.node,
        pod=member.pod,
        cpus=view.node_cpus,
        allocatable_cores=allocatable,
        busy_cores=view.busy_cores,
        reclaimable_cores=view.reclaimable_cores,
        used_cores=view.reclaimed_cores,
        used_core_hours=None if view.totals is None else view.totals.used_ns / NS_PER_HOUR,
        advertised_cores=None if advertised is None else advertised.cores,
        harm_ms=view.interference_ms
        if view.interference_ms is not None
        else _sum_known(interference_ms(c, view) for c in view.containers),
        wait_p99_us=worst[0],
        wait_pod=worst[1],
        pools={name: _cpu_count(cpus) for name, cpus in view.pools.items()},
        act=view.act,
        action=view.action,
        reason=view.reason,
        conditions=() if evictions is None else tuple(each.name for each in evictions.conditions),
        terminating=() if evictions is None else evictions.terminating,
        held={} if evictions is None else dict(evictions.held),
        failed=tuple(source.name for source in view.sources if not source.ok),
    )


def pod_rows(reply: AgentReply[View], names: Sequence[str] = ()) -> list[PodRow]:
    """Return the managed pods of one node, or only those of these names."""
    view = reply.answer
    if view is None:
        return []
    return [
        PodRow(
            node=reply.member.node,
            pod=c.pod,
            container=c.container,
            qos=c.qos,
            cpu_cores=c.cpu_cores,
            throttled_ratio=c.throttled_ratio,
            wait_p50_us=c.wait.p50_us if c.wait else None,
            wait_p99_us=c.wait.p99_us if c.wait else None,
            latency_p99_ms=c.latency.p99_ms if c.latency else None,
            memory_bytes=c.memory_bytes,
            harm_ms=interference_ms(c, view),
        )
        for c in view.containers
        if not names or c.pod in names or c.pod.partition("/")[2] in names
    ]


def interference_ms(container: ContainerView, view: View) -> float | None:
    """Milliseconds a second that an online container's tasks waited for a CPU held by reclaimed pods. None for other
    containers, and without blame data. The view lists only the worst aggressors; others do not count."""
    if not is_online(container) or container.blame is None:
        return None
    batch = [c.cgroup for c in view.containers if is_reclaimed(c)]
    return sum(
        ms
        for aggressor, ms in container.blame.culprits
        if any((aggressor + "/").startswith(path + "/") for path in batch)
    )


NODE_SORTS: dict[str, Callable[[NodeRow], tuple[Any, ...]]] = {
    "name": lambda row: (row.node,),
    "cpu": lambda row: (-(row.busy_cores or 0), row.node),
    "lent": lambda row: (-(row.reclaimable_cores or 0), row.node),
    "wait": lambda row: (-(row.wait_p99_us or 0), row.node),
    "harm": lambda row: (-(row.harm_ms or 0), row.node),
}
"""Sort keys: largest first; unknown counts as 0."""
POD_SORTS: dict[str, Callable[[PodRow], tuple[Any, ...]]] = {
    "name": lambda row: (row.node, row.pod, row.container),
    "cpu": lambda row: (-(row.cpu_cores or 0), row.node, row.pod),
    "memory": lambda row: (-(row.memory_bytes or 0), row.node, row.pod),
    "wait": lambda row: (-(row.wait_p99_us or 0), row.node, row.pod),
    "harm": lambda row: (-(row.harm_ms or 0), row.node, row.pod),
}


def node_table(rows: Sequence[NodeRow]) -> list[str]:
    """Return the table of nodes, with a total line for several nodes."""
    right = "cpus alloc busy lent used core-hours headroom harm wait".upper().split()
    heads = [
        TableHeading("NODE"),
        *(TableHeading(head, right=True) for head in right),
        TableHeading("POOLS"),
        TableHeading("STATUS"),
    ]
    body = [_node_cells(row) for row in rows]
    if len(rows) > 1:
        body.append(_total_cells(rows))
    return format_table(heads, body)


def _node_cells(row: NodeRow) -> list[str]:
    return [
        printable(row.node),
        formats.integer(row.cpus),
        formats.cores(row.allocatable_cores),
        *map(formats.cores, _core_amounts(row)),
        _ms_per_s(row.harm_ms),
        formats.duration(row.wait_p99_us),
        pools_text(row.pools),
        node_status(row),
    ]


def _core_amounts(row: NodeRow) -> tuple[float | None, ...]:
    return row.busy_cores, row.reclaimable_cores, row.used_cores, row.used_core_hours, row.advertised_cores


def node_status(row: NodeRow) -> str:
    """Describe what the agent does, or why it cannot be reached."""
    if row.problem:
        return f"✕ {printable(row.problem)}"
    held = sorted(f"{pod} ({reason})" for pod, reason in row.held.items())
    problems = (
        (row.conditions, ""),
        (row.terminating, "terminating: "),
        (held, "eviction blocked: "),
        (row.failed, "without "),
    )
    texts = [f"✕ {label}{printable(_first_names(names))}" for names, label in problems if names]
    return formats.join([formats.join([printable(row.act), printable(row.action) or "no advice"], ", "), *texts])


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(
        [
            *names[:MAX_NAMES_PER_PROBLEM],
            *([f"{len(names) - MAX_NAMES_PER_PROBLEM} more"] if len(names) > MAX_NAMES_PER_PROBLEM else []),
        ]
    )


def _total_cells(rows: Sequence[NodeRow]) -> list[str]:
    unknown = sum(bool(row.problem) for row in rows)
    sums = [_sum_known(values) for values in zip(*map(_core_amounts, rows), strict=True)]
    waits = [row.wait_p99_us for row in rows if row.wait_p99_us is not None]
    return [
        f"{len(rows)} nodes",
        formats.integer(_sum_known(row.cpus for row in rows)),
        formats.cores(_sum_known(row.allocatable_cores for row in rows)),
        *map(formats.cores, sums),
        _ms_per_s(_sum_known(row.harm_ms for row in rows)),
        formats.duration(max(waits, default=None)),
        "",
        f"✕ {unknown} unknown" if unknown else "all answered",
    ]


def pod_table(rows: Sequence[PodRow]) -> list[str]:
    """Return the table of pods."""
    left, right = (
        ("NODE", "POD", "CONTAINER", "QOS"),
        ("CPU", "THROTTLED", "WAIT P50", "P99", "LATENCY", "HARM", "MEMORY"),
    )
    heads = [*(TableHeading(head) for head in left), *(TableHeading(head, right=True) for head in right)]
    return format_table(
        heads,
        [
            [
                *map(printable, (row.node, row.pod, row.container, row.qos.removesuffix("_cores"))),
                formats.cores(row.cpu_cores),
                formats.percent(row.throttled_ratio),
                formats.duration(row.wait_p50_us),
                formats.duration(row.wait_p99_us),
                formats.milliseconds(row.latency_p99_ms),
                _ms_per_s(row.harm_ms),
                formats.size(row.memory_bytes),
            ]
            for row in rows
        ],
    )


def pools_text(pools: dict[str, int]) -> str:
    """Format pool sizes: `reclaim 4, share 6`."""
    return ", ".join(f"{printable(name)} {cpus}" for name, cpus in sorted(pools.items())) or formats.ABSENT


def _ms_per_s(value: float | None) -> str:
    return formats.ABSENT if value is None else f"{formats.figures(value)} ms/s"


def _sum_known(values: Iterable[float | None]) -> float | None:
    """Sum the values that are known; None if there are none."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) if numbers else None


def _cpu_count(cpus: str) -> int:
    try:
        return len(parse_cpu_list(cpus))
    except ValueError:
        return 0


def _parse_cores(quantity: str) -> float | None:
    try:
        return float(parse_quantity(quantity)) if quantity else None
    except ValueError:
        return None

"""Tables of a cluster's nodes and pods: reclaimable and used CPU, run-queue latency, interference. Pure.
Units: cores, bytes, microseconds, milliseconds per second, ratios; None where unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from rich.cells import cell_len

from api.cpu import parse_cpu_list
from api.quantity import parse_quantity
from api.text import printable
from cli import formats
from cli.colocation_report import NS_PER_HOUR
from cli.fleet.api_server import AgentReply
from cli.fleet.reclaimed_nodes import ReclaimedNode
from cli.tables import TableHeading, format_node_names, format_table, wrap_text
from cli.top.charts import is_online, is_reclaimed
from exporters.view.cycle_view import ContainerView, View, evaluated_p99_us

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
    """The highest p99 run-queue latency of the node's online containers since the previous cycle, own throttling excluded: the
    number that policies compare with their target."""
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
    reclaimed: ReclaimedNode | None = None
    """What the API server has about reclaimed pods of the node; None if it could not be read."""

    @property
    def headroom_cores(self) -> float | None:
        """CPU that reclaimed pods may request in total: what the scheduler reads, or else what the agent reports."""
        offered = None if self.reclaimed is None else self.reclaimed.allocatable_cores
        return self.advertised_cores if offered is None else offered


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


def node_row(reply: AgentReply[View], reclaimed: Mapping[str, ReclaimedNode] | None = None) -> NodeRow:
    """Return the row of a node, also of one that did not answer. `reclaimed` is by node."""
    member, view = reply.member, reply.answer
    allocatable = _parse_cores(member.allocatable_cpu)
    of_api = (reclaimed or {}).get(member.node)
    if view is None:
        return NodeRow(
            node=member.node,
            pod=member.pod,
            problem=reply.problem,
            remedy=reply.remedy,
            allocatable_cores=allocatable,
            used_cores=None if of_api is None else of_api.used_cores,
            reclaimed=of_api,
        )
    waits = [(p99, c.pod) for c in view.containers if is_online(c) and (p99 := evaluated_p99_us(c)) is not None]
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
        reclaimed=of_api,
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
            wait_p50_us=None if (wait := c.evaluated_wait or c.wait) is None else wait.p50_us,
            wait_p99_us=evaluated_p99_us(c),
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


class NodeColumn(NamedTuple):
    """A column of the table of nodes. On a narrow terminal the columns of the lowest importance are left out first."""

    heading: TableHeading
    importance: int
    cell: Callable[[NodeRow], str]
    total: Callable[[Sequence[NodeRow]], str]


def node_table(rows: Sequence[NodeRow], width: int | None = None) -> list[str]:
    """Return the table of nodes, with a total line for several nodes, and the problems of nodes below it. Columns that do not
    fit into `width` cells are left out; None is no limit."""
    columns = list(NODE_COLUMNS)
    while True:
        body = [[column.cell(row) for column in columns] for row in rows]
        if len(rows) > 1:
            body.append([column.total(rows) for column in columns])
        lines = format_table([column.heading for column in columns], body)
        least = min(columns, key=lambda column: column.importance)
        if width is None or least.importance >= ALWAYS or max(map(cell_len, lines)) <= width:
            return [*lines, *_problem_lines(rows, width)]
        columns.remove(least)


def _problem_lines(rows: Sequence[NodeRow], width: int | None) -> list[str]:
    """Return a text for each set of problems, with its nodes, wrapped to `width` cells."""
    nodes: dict[str, list[str]] = {}
    for row in rows:
        if text := problem_text(row):
            nodes.setdefault(text, []).append(printable(row.node))
    texts = [f"✕ {format_node_names(names, 0)}: {text}" for text, names in nodes.items()]
    return texts if width is None else [line for text in texts for line in wrap_text(text, width, "  ")]


def problem_text(row: NodeRow) -> str:
    """Describe why the data of a node is missing, or what is wrong on it; empty if nothing is."""
    if row.problem:
        return printable(row.problem)
    held = sorted(f"{pod} ({reason})" for pod, reason in row.held.items())
    problems = (
        (row.conditions, ""),
        (row.terminating, "terminating: "),
        (held, "eviction blocked: "),
        (row.failed, "without "),
    )
    return formats.join([f"{label}{printable(_first_names(names))}" for names, label in problems if names])


def node_status(row: NodeRow) -> str:
    """Describe what the agent does; a mark stands for a problem, which a line below the table names."""
    if row.problem:
        return "✕ no data"
    text = formats.join([printable(row.act), printable(row.action) or "no advice"], ", ")
    return f"✕ {text}" if problem_text(row) else text


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(
        [
            *names[:MAX_NAMES_PER_PROBLEM],
            *([f"{len(names) - MAX_NAMES_PER_PROBLEM} more"] if len(names) > MAX_NAMES_PER_PROBLEM else []),
        ]
    )


def _status_total(rows: Sequence[NodeRow]) -> str:
    unknown = sum(bool(row.problem) for row in rows)
    return f"✕ {unknown} unknown" if unknown else "all answered"


def _harm_percent(row: NodeRow) -> str:
    return formats.percent(None if row.reclaimed is None else row.reclaimed.harm_share)


def _max_known(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _sum_column(
    heading: str, importance: int, value: Callable[[NodeRow], float | None], text: Callable[[float | None], str]
) -> NodeColumn:
    """Return a column of numbers whose total is the sum of those that are known."""
    return NodeColumn(
        TableHeading(heading, right=True),
        importance,
        lambda row: text(value(row)),
        lambda rows: text(_sum_known(map(value, rows))),
    )


def _of_reclaimed(name: str) -> Callable[[NodeRow], float | None]:
    return lambda row: None if row.reclaimed is None else getattr(row.reclaimed, name)


def _ms_per_s(value: float | None) -> str:
    return formats.ABSENT if value is None else f"{formats.figures(value)} ms/s"


def _size(value: float | None) -> str:
    return formats.size(None if value is None else round(value))


ALWAYS = 100
"""Importance of columns that no terminal is too narrow for."""
NODE_COLUMNS = (
    NodeColumn(TableHeading("NODE"), ALWAYS, lambda row: printable(row.node), lambda rows: f"{len(rows)} nodes"),
    _sum_column("CPUS", 3, lambda row: row.cpus, formats.integer),
    _sum_column("ALLOC", 1, lambda row: row.allocatable_cores, formats.cores),
    _sum_column("BUSY", 6, lambda row: row.busy_cores, formats.cores),
    _sum_column("LENT", 9, lambda row: row.reclaimable_cores, formats.cores),
    _sum_column("USED", 9, lambda row: row.used_cores, formats.cores),
    _sum_column("CORE-HOURS", 2, lambda row: row.used_core_hours, formats.cores),
    _sum_column("HEADROOM", 9, lambda row: row.headroom_cores, formats.cores),
    _sum_column("REQ", 8, _of_reclaimed("requested_cores"), formats.cores),
    _sum_column("MEMORY", 5, _of_reclaimed("allocatable_bytes"), _size),
    _sum_column("MEM-REQ", 4, _of_reclaimed("requested_bytes"), _size),
    _sum_column("PODS", 8, _of_reclaimed("pods"), formats.integer),
    NodeColumn(
        TableHeading("HARM%", right=True),
        8,
        _harm_percent,
        lambda rows: formats.percent(_max_known(map(_of_reclaimed("harm_share"), rows))),
    ),
    _sum_column("HARM", 7, lambda row: row.harm_ms, _ms_per_s),
    NodeColumn(
        TableHeading("WAIT", right=True),
        8,
        lambda row: formats.duration(row.wait_p99_us),
        lambda rows: formats.duration(_max_known(row.wait_p99_us for row in rows)),
    ),
    NodeColumn(TableHeading("POOLS"), 0, lambda row: pools_text(row.pools), lambda _rows: ""),
    NodeColumn(TableHeading("STATUS"), ALWAYS, node_status, _status_total),
)


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

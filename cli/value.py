"""The `dioptase value` command: gain and cost of colocation on this node since the first agent ran on it."""

from __future__ import annotations

import click

from api.interfaces import Unavailable
from api.text import to_json
from cli.client import AgentClient
from cli.colocation_report import NodeTotals, node_report
from cli.options import exit_unavailable, url_option


@click.command()
@url_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; times are in nanoseconds.")
def value(url: str, *, as_json: bool) -> None:
    """Show gain and cost of colocation on this node: core-hours lent to reclaimed pods and used by them, run-queue latency of
    online pods with and without batch work, CPU reductions and evictions of reclaimed pods.

    The totals begin with the first agent on the node and continue when an agent restarts. To see one day or one week, use
    Prometheus: docs/operations.md has the queries.
    """
    try:
        view = AgentClient(url, timeout_s=5).view()
    except Unavailable as error:
        exit_unavailable("value", error)
    report = NodeTotals(node=view.node_name, act=view.act, totals=view.totals)
    for line in [to_json(report).decode()] if as_json else node_report(report):
        click.echo(line)

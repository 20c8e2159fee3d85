"""The `dioptase value` command: what colocation gained and cost on this node since the first agent ran on it."""

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
    """Show the CPU that reclaimed pods could use and used in core-hours, the run-queue latency of online pods with and without
    batch work, what was taken back, and what is not known.

    Totals continue when the agent restarts. Use Prometheus for a day or a week: docs/operations.md has the queries.
    """
    try:
        view = AgentClient(url, timeout_s=5).view()
    except Unavailable as error:
        exit_unavailable("value", error)
    report = NodeTotals(node=view.node_name, act=view.act, totals=view.totals)
    for line in [to_json(report).decode()] if as_json else node_report(report):
        click.echo(line)

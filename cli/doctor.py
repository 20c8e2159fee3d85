"""`dioptase doctor`: what this node can and cannot do, each with the remedy."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent import doctor as node
from agent.qrm.originals import default_state_dir
from probes import doctor as kernel

LONGEST_LINE = 10_000


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON list instead of a table.")
@click.option(
    "--state-dir", type=click.Path(path_type=Path), default=default_state_dir, help="The agent's state directory."
)
def doctor(*, as_json: bool, state_dir: Path) -> None:
    """Say what this node can and cannot do, each with the remedy. Exit status 1 if something is missing."""
    checks = (*node.checks(state_dir), *kernel.checks())
    if as_json:
        click.echo(msgspec.json.encode(checks))
    else:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("", "what", "found", "remedy"):
            table.add_column(column, overflow="fold")
        for check in checks:
            mark = Text("ok", "green") if check.ok else Text("no", "bold red")
            table.add_row(mark, check.name, Text(check.detail), Text(check.remedy))
        _print(table)
        missing = sum(not check.ok for check in checks)
        click.echo(f"\n{missing} of {len(checks)} missing" if missing else f"\nall {len(checks)} there")
    sys.exit(0 if all(check.ok for check in checks) else 1)


def _print(table: Table) -> None:
    """In a file or a pipe a row is a line, however long; a terminal breaks it."""
    console = Console()
    if console.is_terminal:
        console.print(table)
        return
    console.width = LONGEST_LINE
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())

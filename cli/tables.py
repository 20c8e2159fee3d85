"""Tables with sentences in them, printed for whoever reads: a person at a terminal, or a program."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table

LONGEST_LINE = 10_000


def print_table(table: Table) -> None:
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

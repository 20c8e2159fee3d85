"""Prints tables: kubectl-style columns, and rich tables whose rows stay on one line in a file or pipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import click
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

MAX_LINE_WIDTH = 10_000


def print_table(table: Table) -> None:
    """In a file or a pipe a row is a line, however long; a terminal breaks it."""
    console = Console()
    if console.is_terminal:
        console.print(table)
        return
    console.width = MAX_LINE_WIDTH
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


COLUMN_GAP = "  "
MAX_NAMED_NODES = 4


class TableHeading(NamedTuple):
    """Heading of a column; numbers stand at its right."""

    text: str
    right: bool = False


def format_table(heads: Sequence[TableHeading], rows: Sequence[Sequence[str]]) -> list[str]:
    """Heading and rows."""
    widths = [
        max(cell_len(text) for text in column) for column in zip([head.text for head in heads], *rows, strict=True)
    ]

    def line(cells: Iterable[str]) -> str:
        padded = [
            " " * (width - cell_len(cell)) + cell if head.right else cell + " " * (width - cell_len(cell))
            for cell, head, width in zip(cells, heads, widths, strict=True)
        ]
        return COLUMN_GAP.join(padded).rstrip()

    return [line(head.text for head in heads), *(line(row) for row in rows)]


def format_node_names(names: Sequence[str], node_count: int) -> str:
    """Which nodes something holds on: `all 12 nodes`, `node1, node2`, `node1, node2, node3 and 9 more`."""
    if len(names) == node_count and node_count > 1:
        return f"all {node_count} nodes"
    if len(names) <= MAX_NAMED_NODES:
        return ", ".join(names)
    return f"{', '.join(names[: MAX_NAMED_NODES - 1])} and {len(names) - MAX_NAMED_NODES + 1} more"

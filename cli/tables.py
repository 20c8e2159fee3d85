"""Prints tables: kubectl-style columns, and rich tables whose rows stay on one line in a file or pipe."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import click
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from api.text import printable

MAX_LINE_WIDTH = 10_000


def print_table(table: Table) -> None:
    """Print a table. A terminal wraps rows; in a file or a pipe each row is one line."""
    console = Console()
    if console.is_terminal:
        console.print(table)
        return
    console.width = MAX_LINE_WIDTH
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def terminal_width() -> int | None:
    """Return the width of the terminal in cells; None if the output goes to a file or a pipe, where no line is too long."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def check_table(columns: Sequence[str], rows: Iterable[tuple[bool, Sequence[str]]]) -> Table:
    """A table of checks, each with its result and its cells; the last cell is the remedy. A mark stands in front: `no` for a
    failed check, `-` for an optional feature that is missing, `ok` otherwise."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", *columns):
        table.add_column(column, overflow="fold")
    for ok, cells in rows:
        mark = Text("no", "bold red") if not ok else Text("-", "dim") if cells[-1] else Text("ok", "green")
        # Names and messages come from objects of the cluster too.
        table.add_row(mark, *(Text("\n".join(map(printable, cell.split("\n")))) for cell in cells))
    return table


COLUMN_GAP = "  "
MAX_NAMED_NODES = 4


class TableHeading(NamedTuple):
    """Heading of a column; columns of numbers are right-aligned."""

    text: str
    right: bool = False


def format_table(heads: Sequence[TableHeading], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the heading and the rows as aligned lines."""
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


def wrap_text(text: str, width: int, indent: str = "") -> list[str]:
    """Return the text in lines of at most `width` cells; all but the first begin with `indent`. Names stay in one line."""
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False) or [""]


def format_node_names(names: Sequence[str], node_count: int) -> str:
    """Summarize node names: `all 12 nodes`, `node1, node2`, `node1, node2, node3 and 9 more`."""
    if len(names) == node_count and node_count > 1:
        return f"all {node_count} nodes"
    if len(names) <= MAX_NAMED_NODES:
        return ", ".join(names)
    return f"{', '.join(names[: MAX_NAMED_NODES - 1])} and {len(names) - MAX_NAMED_NODES + 1} more"

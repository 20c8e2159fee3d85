"""Tables as kubectl prints them: columns apart by spaces, as wide as their content, a row on one line however long. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.cells import cell_len

GAP = "  "
MOST_NAMED = 4


class Cell(NamedTuple):
    """Heading of a column; numbers stand at its right."""

    text: str
    right: bool = False


def table(heads: Sequence[Cell], rows: Sequence[Sequence[str]]) -> list[str]:
    """Heading and rows."""
    widths = [
        max(cell_len(text) for text in column) for column in zip([head.text for head in heads], *rows, strict=True)
    ]

    def line(cells: Iterable[str]) -> str:
        padded = [
            " " * (width - cell_len(cell)) + cell if head.right else cell + " " * (width - cell_len(cell))
            for cell, head, width in zip(cells, heads, widths, strict=True)
        ]
        return GAP.join(padded).rstrip()

    return [line(head.text for head in heads), *(line(row) for row in rows)]


def named(names: Sequence[str], of: int) -> str:
    """Which nodes something holds on: `all 12 nodes`, `node1, node2`, `node1, node2, node3 and 9 more`."""
    if len(names) == of and of > 1:
        return f"all {of} nodes"
    if len(names) <= MOST_NAMED:
        return ", ".join(names)
    return f"{', '.join(names[: MOST_NAMED - 1])} and {len(names) - MOST_NAMED + 1} more"

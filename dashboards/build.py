"""Writes every Grafana dashboard from typed code: `python -m dashboards.build`. A test keeps the JSON fresh.
Needs the development dependency grafana-foundation-sdk.
"""

from __future__ import annotations

from pathlib import Path

from dashboards import agent, colocation, decisions, fleet, memory, node, overview, workload, worth
from dashboards.panels import Board

HERE = Path(__file__).parent


def boards() -> tuple[Board, ...]:
    """Every dashboard, the first look first."""
    return (
        overview.board(),
        fleet.board(),
        worth.board(),
        colocation.board(),
        workload.board(),
        node.board(),
        memory.board(),
        decisions.board(),
        agent.board(),
    )


def path_of(board: Board) -> Path:
    return HERE / f"{board.name}.json"


if __name__ == "__main__":
    for board in boards():
        path_of(board).write_text(board.json())

"""What is answered instead of what was asked for."""

from __future__ import annotations

import msgspec


class Problem(msgspec.Struct, frozen=True):
    """Body of every answer that is not 200."""

    error: str
    remedy: str


class Refused(Exception):
    """A request that gets a Problem instead of what it asked for."""

    def __init__(self, status: int, error: str, remedy: str) -> None:
        super().__init__(error)
        self.status = status
        self.problem = Problem(error, remedy)

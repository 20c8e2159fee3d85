"""What can be promised to reclaimed pods, and what the node advertises of it, in words: label and text of each part. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from api.advice import Headroom
from cli import words
from cli.verdicts import verdict_text


def promised_text(headroom: Headroom | None, advertised: Headroom | None) -> Iterator[tuple[str, str]]:
    """Amounts with their reasons."""
    cores = words.cores(None if headroom is None else headroom.cores)
    yield "headroom", f"{cores} cores can be promised to reclaimed pods in all, what they use now included"
    if headroom is not None:
        yield from _by_numa(headroom)
        yield from verdict_text(headroom.verdict)
    if advertised is not None:
        yield "advertised", f"{_amounts(advertised.cores, advertised.memory_bytes)} by the node, to whoever schedules"
        yield from _by_numa(advertised)
        yield from verdict_text(advertised.verdict)


def _by_numa(amounts: Headroom) -> Iterator[tuple[str, str]]:
    cores, memory = amounts.cores_by_numa, amounts.memory_by_numa
    if len(cores) > 1:
        parts = (f"NUMA node {numa} {_amounts(cores[numa], memory.get(numa))}" for numa in sorted(cores))
        yield "", "; ".join(parts)


def _amounts(cores: float | None, memory: float | None) -> str:
    return f"{words.cores(cores)} cores and {'memory not known' if memory is None else words.size(round(memory))}"

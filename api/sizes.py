"""Sizes of pools that are to fit: the advisor makes them, and QRM makes do where they do not fit what it has. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Name = TypeVar("Name", str, tuple[str, int])
"""A pool, or a pool and its NUMA node."""


def in_proportion(sizes: Mapping[Name, int], target: int) -> dict[Name, int] | None:
    """Sizes in the same proportion whose sum is the target, none below 1; None where the target is less than their number.
    What is given is 1 at least.

    All are rounded up first; then the one that is largest for its original size gives one back, until they fit: of equals
    the larger, then the first by name. That is Katalyst's regulation of pool sizes.
    """
    total = sum(sizes.values())
    if total == target:
        return dict(sizes)
    if target < len(sizes):
        return None
    result = {name: -(-size * target // total) for name, size in sizes.items()}
    excess = sum(result.values()) - target
    for _ in range(max(excess, 0)):
        name = max(
            (name for name in sorted(result) if result[name] > 1),
            key=lambda name: (result[name] / sizes[name], result[name]),
        )
        result[name] -= 1
    return result

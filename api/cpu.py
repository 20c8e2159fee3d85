"""CPU lists in the kernel's syntax (`0-3,8`), and the topology of a node's online CPUs."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from api.text import quote

MAX_CPU = 8191
"""Highest CPU number accepted. NR_CPUS of the largest distribution kernels is 8192, so a higher number is a mistake."""
_MAX_DIGITS = 9


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Parse a kernel CPU list such as `0-3,8` into sorted, distinct CPU numbers; empty text is the empty set.

    Overlapping ranges are merged before they are expanded: the time grows with the length of the text, not with the sum of
    the ranges, because the text may be a pod's annotation. Raises ValueError that quotes the start of the invalid part.
    """
    ranges: list[tuple[int, int]] = []
    for part in filter(None, (piece.strip() for piece in text.strip().split(","))):
        first, dash, last = part.partition("-")
        if not (first.isascii() and first.isdigit()) or (dash and not (last.isascii() and last.isdigit())):
            raise ValueError(f"CPU list {quote(text)}: {quote(part)} is neither a number nor a range like 0-3")
        # Converting a number takes the square of its length, and fails beyond 4300 digits.
        is_short = max(len(first), len(last)) <= _MAX_DIGITS
        low, high = (int(first), int(last) if dash else int(first)) if is_short else (0, MAX_CPU + 1)
        if high < low or high > MAX_CPU:
            raise ValueError(f"CPU list {quote(text)}: range {quote(part)} is backwards or beyond CPU {MAX_CPU}")
        ranges.append((low, high))
    cpus: list[int] = []
    for low, high in sorted(set(ranges)):
        cpus.extend(range(max(low, cpus[-1] + 1 if cpus else 0), high + 1))
    return tuple(cpus)


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Format CPUs as the kernel's shortest list, `0-3,8`; the inverse of `parse_cpu_list`."""
    ranges: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """One online logical CPU and its place in the topology."""

    id: int
    core: int
    socket: int
    numa: int
    l3: int = 0
    """Number of the L3 cache that this CPU shares (cache/index3/id); 0 if the machine does not report it."""


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """The online CPUs of a node, in order of id."""

    cpus: tuple[Cpu, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(cpu.id for cpu in self.cpus)

    @property
    def numa_nodes(self) -> tuple[int, ...]:
        return tuple(sorted({cpu.numa for cpu in self.cpus}))

    @property
    def smt(self) -> bool:
        """Whether at least one physical core has two or more online logical CPUs."""
        return len({(cpu.socket, cpu.core) for cpu in self.cpus}) < len(self.cpus)

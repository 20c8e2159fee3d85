"""CPU lists in the kernel's syntax (`0-3,8`), and the topology of a node's online CPUs."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

MAX_CPU = 8191
"""NR_CPUS of the largest distribution kernels is 8192; a list that names more is a mistake, not a machine."""


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """CPU numbers of a kernel list such as `0-3,8` (sorted, without repeats; empty text is the empty set).

    Raises ValueError that quotes the part it could not read.
    """
    cpus: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.strip().split(","))):
        first, dash, last = part.partition("-")
        if not (first.isascii() and first.isdigit()) or (dash and not (last.isascii() and last.isdigit())):
            raise ValueError(f"CPU list {text!r}: {part!r} is neither a number nor a range like 0-3")
        low, high = int(first), int(last) if dash else int(first)
        if high < low or high > MAX_CPU:
            raise ValueError(f"CPU list {text!r}: range {part!r} is backwards or beyond CPU {MAX_CPU}")
        cpus.update(range(low, high + 1))
    return tuple(sorted(cpus))


def format_cpu_list(cpus: Iterable[int]) -> str:
    """The kernel's shortest list for these CPUs: `0-3,8`; the inverse of `parse_cpu_list`."""
    ranges: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """One online logical CPU and where it sits."""

    id: int
    core: int
    socket: int
    numa: int
    l3: int = 0
    """Number of the cache that it shares with its neighbours (cache/index3/id); 0 where the machine does not say."""


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
        """Whether some physical core carries more than one online logical CPU."""
        return len({(cpu.socket, cpu.core) for cpu in self.cpus}) < len(self.cpus)

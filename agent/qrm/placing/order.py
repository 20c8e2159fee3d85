"""In which order cpusets are written, so that the kernel accepts each write and nobody shares CPUs of his own for long.

As Koordinator's suppression does it: first the upper cgroups are widened, from the top down, to what they had and will have;
then the lower ones get their new CPUs, those first that only give some up; at last the upper ones are narrowed, from the
bottom up. Nothing is ever empty and no cgroup has a CPU that the one above has not.
"""

from __future__ import annotations

from collections.abc import Mapping

Cpus = frozenset[int]


def steps(before: Mapping[str, Cpus], after: Mapping[str, Cpus]) -> tuple[tuple[str, Cpus], ...]:
    """Writes that lead from one to the other, by path of the cgroup; none of what is so already.

    Of a cgroup that is not in `before` nothing is known. Within `after` each cgroup has to be inside the one above it.
    """
    above = _above(after)
    now = {path: before.get(path, frozenset()) for path in after}
    writes: list[tuple[str, Cpus]] = []

    def write(path: str, cpus: Cpus) -> None:
        if now[path] != cpus:
            writes.append((path, cpus))
            now[path] = cpus

    for path in sorted(above, key=lambda path: (_depth(path), path)):
        write(path, now[path] | after[path])
    for path in sorted(
        after, key=lambda path: (path in above, path not in above and not after[path] <= now[path], -_depth(path), path)
    ):
        write(path, after[path])
    return tuple(writes)


def _above(paths: Mapping[str, Cpus]) -> frozenset[str]:
    """Those that others are below of."""
    found = set()
    for path in paths:
        upper = path.rpartition("/")[0]
        while upper:
            if upper in paths:
                found.add(upper)
            upper = upper.rpartition("/")[0]
    return frozenset(found | ({"/"} & paths.keys() if len(paths) > 1 else set()))


def _depth(path: str) -> int:
    return path.rstrip("/").count("/")

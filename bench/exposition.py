"""What an exposition comes to: how many series, and how many of them are about each cgroup."""

from __future__ import annotations

import re
from collections import Counter

import msgspec

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
# A quote inside a value is written \", so this cannot match within one.
_CGROUP = re.compile(r'[{,](?:cgroup|id)="(/(?:[^"\\]|\\.)*)"')


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Series of one exposition, in Prometheus' text format: every line that is no comment."""

    series: int
    cgroups: dict[str, int]
    """Of them, those of each cgroup: labelled `cgroup` as here, or `id` as in cAdvisor, with its path."""
    buckets: dict[str, int]
    """Of those again, the buckets of histograms."""
    names: dict[str, int]
    """How many different metrics there are of each cgroup; the parts of a histogram count one each."""


def count(text: str) -> Counts:
    """Read one exposition. A line that is none is not counted."""
    series = 0
    cgroups, buckets = Counter[str](), Counter[str]()
    names: dict[str, set[str]] = {}
    for line in text.split("\n"):
        if (named := _NAME.match(line)) is None:
            continue
        series += 1
        if (found := _CGROUP.search(line, named.end())) is None:
            continue
        path, name = found[1], named[0]
        cgroups[path] += 1
        buckets[path] += name.endswith("_bucket")
        names.setdefault(path, set()).add(name)
    return Counts(
        series=series,
        cgroups=dict(cgroups),
        buckets=dict(buckets),
        names={path: len(found) for path, found in names.items()},
    )

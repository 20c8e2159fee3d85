"""Malachite's documents of a history as a client reads them, for the tests of their numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from api.snapshot import CgroupSample, Snapshot
from exporters.malachite import cgroup_v1, cgroup_v2
from exporters.malachite.cgroup_documents import CgroupLayout, SubtreeSums, cgroup_inputs
from exporters.malachite.history import MalachiteHistory
from exporters.malachite.server import DOCUMENTS
from exporters.malachite.wire import success_body
from tests.exporters.malachite.machine import V1, snapshot

TEN_SECONDS = range(1, 11)


def document(name: str, observed: MalachiteHistory) -> dict[str, Any]:
    assert observed.latest is not None
    decoded = json.loads(success_body(DOCUMENTS[name](observed.latest, observed)))
    assert list(decoded) == ["status", "data"]
    assert decoded["status"] == 0
    return dict(decoded["data"])


def cgroup(path: str, observed: MalachiteHistory, layout: CgroupLayout = V1) -> dict[str, Any]:
    assert observed.latest is not None
    groups = cgroup_v1.v1_groups if layout.version == "V1" else cgroup_v2.v2_groups
    sample = observed.latest.cgroups[path]
    created = groups(cgroup_inputs(sample, observed.latest, observed, SubtreeSums(observed.latest, observed), layout))
    return dict(json.loads(success_body(created))["data"])


def observe(
    seconds: Iterable[int], change: Callable[[int, Snapshot], Snapshot], layout: CgroupLayout = V1
) -> MalachiteHistory:
    """A history of the snapshots of these seconds, each after `change(second, snapshot)`."""
    observed = MalachiteHistory()
    for second in seconds:
        observed = observed.after(change(second, snapshot(second, layout)))
    return observed


def with_node(base: Snapshot, **fields: Any) -> Snapshot:
    """The snapshot with other fields of the node."""
    return msgspec.structs.replace(base, node=msgspec.structs.replace(base.node, **fields))


def with_cgroups(base: Snapshot, *samples: CgroupSample) -> Snapshot:
    """The snapshot with these cgroups added or replaced."""
    return msgspec.structs.replace(base, cgroups={**base.cgroups, **{sample.path: sample for sample in samples}})


def changed(**fields: Any) -> MalachiteHistory:
    """A history of one snapshot with other fields of the node."""
    return observe((1,), lambda _second, base: with_node(base, **fields))

"""Malachite's documents of a history as a client reads them, for the tests of their numbers."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from api.snapshot import NodeSample
from exporters.malachite import cgroup_v1, cgroup_v2
from exporters.malachite.cgroup_documents import CgroupLayout, SubtreeSums, cgroup_inputs
from exporters.malachite.history import MalachiteHistory
from exporters.malachite.server import DOCUMENTS
from exporters.malachite.wire import success_body
from tests.exporters.malachite.machine import V1, snapshot

TEN_SECONDS = range(1, 11)


def document(name: str, seen: MalachiteHistory) -> dict[str, Any]:
    assert seen.latest is not None
    decoded = json.loads(success_body(DOCUMENTS[name](seen.latest, seen)))
    assert list(decoded) == ["status", "data"]
    assert decoded["status"] == 0
    return dict(decoded["data"])


def cgroup(path: str, seen: MalachiteHistory, layout: CgroupLayout = V1) -> dict[str, Any]:
    assert seen.latest is not None
    groups = cgroup_v1.v1_groups if layout.version == "V1" else cgroup_v2.v2_groups
    sample = seen.latest.cgroups[path]
    made = groups(cgroup_inputs(sample, seen.latest, seen, SubtreeSums(seen.latest, seen), layout))
    return dict(json.loads(success_body(made))["data"])


def changed(node: NodeSample | None = None, **fields: Any) -> MalachiteHistory:
    """A history of one snapshot whose node, or fields of it, are others."""
    seen = MalachiteHistory()
    base = snapshot(1)
    node = msgspec.structs.replace(base.node, **fields) if node is None else node
    seen.add(msgspec.structs.replace(base, node=node))
    return seen

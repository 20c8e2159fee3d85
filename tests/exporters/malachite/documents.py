"""Malachite's documents of a history as a client reads them, for the tests of their numbers."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from api.samples import NodeSample
from exporters.malachite import cgroup_v1, cgroup_v2
from exporters.malachite.cgroups import Layout, view
from exporters.malachite.past import History
from exporters.malachite.server import DOCUMENTS
from exporters.malachite.subtree import Subtree
from exporters.malachite.wire import envelope
from tests.exporters.malachite.machine import (
    V1,
    snapshot,
)

TEN_SECONDS = range(1, 11)


def document(name: str, seen: History) -> dict[str, Any]:
    assert seen.latest is not None
    decoded = json.loads(envelope(DOCUMENTS[name](seen.latest, seen)))
    assert list(decoded) == ["status", "data"]
    assert decoded["status"] == 0
    return dict(decoded["data"])


def cgroup(path: str, seen: History, layout: Layout = V1) -> dict[str, Any]:
    assert seen.latest is not None
    groups = cgroup_v1.groups if layout.version == "V1" else cgroup_v2.groups
    sample = seen.latest.cgroups[path]
    made = groups(view(sample, seen.latest, seen, Subtree(seen.latest, seen), layout))
    return dict(json.loads(envelope(made))["data"])


def changed(node: NodeSample | None = None, **fields: Any) -> History:
    """A history of one snapshot whose node, or fields of it, are others."""
    seen = History()
    base = snapshot(1)
    node = msgspec.structs.replace(base.node, **fields) if node is None else node
    seen.add(msgspec.structs.replace(base, node=node))
    return seen

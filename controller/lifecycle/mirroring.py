"""Computes labels and owner references of CustomNodeResource and CustomNodeConfig from their node. Pure."""

from __future__ import annotations

from collections.abc import Container, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from kube.objects import KubeObject, KubeOwnerReference, PartialObjectMetadata


class LabelMirroring(StrEnum):
    """How the labels of the node get there."""

    MERGED = "merged"
    """CustomNodeResource: others may have labels of their own there."""
    REPLACED = "replaced"
    """CustomNodeConfig: selectors of configurations are held against these labels, so they are the node's and no others."""


class MirrorPatch(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be written of one object."""

    apply: Mapping[str, Any]
    """By server-side apply: what this once said and says no longer goes, what others said stays."""
    drop: tuple[str, ...] = ()
    """Labels that have to go, whoever wrote them."""


def plan_mirror(
    node: PartialObjectMetadata, found: PartialObjectMetadata | None, labels_mode: LabelMirroring, *, applied: bool
) -> MirrorPatch | None:
    """None where everything is as it should be. `applied`: this process has applied this node's labels before, and they have
    not changed since; before, labels that the node has lost cannot be told from others' here, only by the API server."""
    owner = KubeOwnerReference(
        api_version="v1",
        kind="Node",
        name=node.metadata.name,
        uid=node.metadata.uid,
        controller=True,
        block_owner_deletion=True,
    )
    labels = dict(node.metadata.labels)
    drop: tuple[str, ...] = ()
    if found is not None:
        has = found.metadata.labels
        if labels_mode is LabelMirroring.REPLACED:
            drop = tuple(sorted(key for key in has if key not in labels))
        current = (
            all(has.get(key) == value for key, value in labels.items()) and owner in found.metadata.owner_references
        )
        if current and applied and not drop:
            return None
    body = {"metadata": {"labels": labels, "ownerReferences": [msgspec.to_builtins(owner)]}}
    return MirrorPatch(apply=body, drop=drop)


def find_orphans(nodes: Container[str], found: Mapping[str, KubeObject]) -> list[str]:
    """Objects without a node. Whether it is really gone is asked of the API server before one is deleted."""
    return sorted(key for key in found if key not in nodes)

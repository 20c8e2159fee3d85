"""Computes labels and owner references of CustomNodeResource and CustomNodeConfig from their node."""

from __future__ import annotations

from collections.abc import Container, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from kube.objects import KubeObject, KubeOwnerReference, PartialObjectMetadata


class LabelMirroring(StrEnum):
    """How an object's labels follow those of the node."""

    MERGED = "merged"
    """CustomNodeResource: other writers may add labels."""
    REPLACED = "replaced"
    """CustomNodeConfig: configuration selectors match these labels, so they must equal the node's."""


class MirrorPatch(msgspec.Struct, frozen=True, kw_only=True):
    """Changes to one object."""

    apply: Mapping[str, Any]
    """Body for server-side apply: labels that the node has lost are removed, labels of other writers stay."""
    removed_labels: tuple[str, ...] = ()
    """Labels to remove, by any writer."""


def plan_mirror(
    node: PartialObjectMetadata, current: PartialObjectMetadata | None, labels_mode: LabelMirroring, *, applied: bool
) -> MirrorPatch | None:
    """Compute the changes to an object; None if there are none.

    `applied`: this process has already applied the node's current labels. Otherwise only the API server can tell labels
    that the node has lost from those of other writers, so the object is applied again.
    """
    owner = KubeOwnerReference(
        api_version="v1",
        kind="Node",
        name=node.metadata.name,
        uid=node.metadata.uid,
        controller=True,
        block_owner_deletion=True,
    )
    labels = dict(node.metadata.labels)
    removed: tuple[str, ...] = ()
    if current is not None:
        existing = current.metadata.labels
        if labels_mode is LabelMirroring.REPLACED:
            removed = tuple(sorted(key for key in existing if key not in labels))
        complete = all(existing.get(key) == value for key, value in labels.items())
        if complete and owner in current.metadata.owner_references and applied and not removed:
            return None
    body = {"metadata": {"labels": labels, "ownerReferences": [msgspec.to_builtins(owner)]}}
    return MirrorPatch(apply=body, removed_labels=removed)


def find_orphans(nodes: Container[str], objects: Mapping[str, KubeObject]) -> list[str]:
    """Objects without a node in the informer's copy. The API server confirms it before an object is deleted."""
    return sorted(key for key in objects if key not in nodes)

"""A kind as the CustomResourceDefinition (apiextensions.k8s.io/v1) that makes an API server serve it. Pure."""

from __future__ import annotations

from typing import Any

from api.crds.kinds import Kind, Version
from api.crds.schema import Docs, schema_of


def definition(kind: Kind, docs: Docs) -> dict[str, Any]:
    """The whole object; `docs` is what its fields are described with."""
    names: dict[str, Any] = {
        "kind": kind.kind,
        "listKind": f"{kind.kind}List",
        "plural": kind.plural,
        "singular": kind.kind.lower(),
    }
    if kind.short_name:
        names["shortNames"] = [kind.short_name]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": kind.name},
        "spec": {
            "group": kind.group,
            "names": names,
            "scope": kind.scope,
            "versions": [_version(version, version is kind.versions[-1], docs) for version in kind.versions],
        },
    }


def _version(version: Version, stored: bool, docs: Docs) -> dict[str, Any]:
    subresources: dict[str, Any] = {"status": {}}
    if version.scale:
        subresources["scale"] = {
            "specReplicasPath": version.scale.spec_replicas,
            "statusReplicasPath": version.scale.status_replicas,
            "labelSelectorPath": version.scale.selector,
        }
    columns = [{"name": column.name, "type": column.type, "jsonPath": column.path} for column in version.columns]
    return {
        "name": version.name,
        "served": True,
        "storage": stored,
        "subresources": subresources,
        **({"additionalPrinterColumns": columns} if columns else {}),
        "schema": {"openAPIV3Schema": schema_of(version.type, docs)},
    }

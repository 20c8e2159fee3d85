"""API paths, which contain names from untrusted objects, keys and timestamps."""

from __future__ import annotations

import msgspec
import pytest

from kube.objects import (
    KubeMetadata,
    PartialObjectMetadata,
    ResourceType,
    format_timestamp,
    key_of,
    parse_timestamp,
)
from kube.watch import ObjectStore, parse_watch_event

PODS = ResourceType("", "v1", "pods", "Pod", PartialObjectMetadata, namespaced=True)
NODES = ResourceType("", "v1", "nodes", "Node", PartialObjectMetadata)
KCC = ResourceType(
    "config.katalyst.kubewharf.io",
    "v1alpha1",
    "katalystcustomconfigs",
    "KatalystCustomConfig",
    PartialObjectMetadata,
    namespaced=True,
)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (PODS.path("shop/web"), "/api/v1/namespaces/shop/pods/web"),
        (PODS.path("shop/web", "eviction"), "/api/v1/namespaces/shop/pods/web/eviction"),
        (PODS.collection(), "/api/v1/pods"),
        (PODS.collection("shop"), "/api/v1/namespaces/shop/pods"),
        (NODES.path("node-1"), "/api/v1/nodes/node-1"),
        (NODES.path("a b?c"), "/api/v1/nodes/a%20b%3Fc"),
        (KCC.path("a/b"), "/apis/config.katalyst.kubewharf.io/v1alpha1/namespaces/a/katalystcustomconfigs/b"),
    ],
)
def test_paths(path: str, expected: str) -> None:
    assert path == expected


@pytest.mark.parametrize(
    "key", ["web", "a/b/c", "shop/", "/web", "shop/..", "../web", "shop/a%2fb", "shop/" + "a" * 254]
)
def test_a_key_that_would_be_another_path_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=r"invalid key|cannot be part of a path"):
        PODS.path(key)


@pytest.mark.parametrize(
    ("resource", "field"),
    [
        (ResourceType("../..", "v1", "pods", "", PartialObjectMetadata), "group"),
        (ResourceType("", "v1/../..", "pods", "", PartialObjectMetadata), "version"),
        (ResourceType("", "", "pods", "", PartialObjectMetadata), "version"),
        (ResourceType("", "v1", "pods/eviction", "", PartialObjectMetadata), "resource"),
        (ResourceType("", "v1", "Pods", "", PartialObjectMetadata), "resource"),
        (ResourceType("", "v1", "", "", PartialObjectMetadata), "resource"),
    ],
)
def test_an_invalid_resource_is_rejected_by_field(resource: ResourceType[PartialObjectMetadata], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        resource.collection()


class Sparse(msgspec.Struct, frozen=True, rename="camel"):
    """Metadata whose absent fields are None."""

    name: str | None = None
    namespace: str | None = None
    resource_version: str | None = None


class Kind(msgspec.Struct, frozen=True):
    """An object with such metadata."""

    metadata: Sparse


def test_metadata_fields_may_be_none() -> None:
    store: ObjectStore[Kind] = ObjectStore()
    assert key_of(Sparse(name="n1")) == "n1"
    assert key_of(Sparse()) == ""
    kinds = ResourceType("", "v1", "kinds", "Kind", Kind)
    event = parse_watch_event(b'{"type":"ADDED","object":{"metadata":{"name":"a","resourceVersion":"3"}}}', kinds)
    assert event.object is not None
    assert store.put(event.key, event.object) is not None
    assert store.put(event.key, event.object) is None


def test_keys_and_names() -> None:
    assert key_of(KubeMetadata(name="web", namespace="shop")) == "shop/web"
    assert key_of(KubeMetadata(name="node-1")) == "node-1"
    assert (PODS.gvr, PODS.api_version) == ("pods.v1", "v1")
    assert KCC.gvr == "katalystcustomconfigs.v1alpha1.config.katalyst.kubewharf.io"


def test_timestamps() -> None:
    assert parse_timestamp("2026-01-31T09:30:00Z") == 1769851800
    assert parse_timestamp("2026-01-31T10:30:00.250000+01:00") == 1769851800.25
    assert format_timestamp(1769851800.25) == "2026-01-31T09:30:00Z"
    assert format_timestamp(1769851800.25, micro=True) == "2026-01-31T09:30:00.250000Z"


@pytest.mark.parametrize("text", ["", "now", "2026-01-31", "2026-01-31T09:30:00", "2026-13-01T00:00:00Z"])
def test_an_invalid_timestamp_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="time"):
        parse_timestamp(text)

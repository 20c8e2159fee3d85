"""Resource types, metadata and keys of API objects, and RFC 3339 timestamps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Generic, Protocol, TypeVar
from urllib import parse

import msgspec

from api.text import quote

_GROUP_OR_PLURAL = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_MAX_NAME_LETTERS = 253


class NamedMetadata(Protocol):
    """Metadata that the client needs; None is equivalent to empty."""

    @property
    def name(self) -> str | None: ...
    @property
    def namespace(self) -> str | None: ...
    @property
    def uid(self) -> str | None: ...
    @property
    def resource_version(self) -> str | None: ...


class KubeObject(Protocol):
    """Any struct with `metadata`."""

    @property
    def metadata(self) -> NamedMetadata: ...


class Toleration(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, gc=False):
    """Toleration of a pod or of a pod template."""

    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""

    def matches(self, key: str, value: str, effect: str) -> bool:
        """Whether it tolerates a taint, as ToleratesTaint of k8s.io/api/core/v1/toleration.go: an empty key with Exists matches
        all keys, an empty effect all effects."""
        if self.effect not in ("", effect) or self.key not in ("", key):
            return False
        if self.operator == "Exists":
            return True
        return self.operator in ("", "Equal") and self.key == key and self.value == value


class KubeOwnerReference(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Owner of this object, with which it is garbage-collected."""

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool = False
    block_owner_deletion: bool = False


class KubeMetadata(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Metadata that readers use; the API server has more."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str | None = None
    """RFC 3339 in UTC; `parse_timestamp` converts it to seconds."""
    deletion_timestamp: str | None = None
    """Set while finalizers retain the object, or while a pod's processes terminate."""
    deletion_grace_period_seconds: int | None = None
    """Termination grace period that a deleted pod was given."""
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    finalizers: tuple[str, ...] = ()
    owner_references: tuple[KubeOwnerReference, ...] = ()


class PartialObjectMetadata(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Object of which only the metadata is requested."""

    metadata: KubeMetadata = KubeMetadata()


class TaintsSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Taints as raw mappings, so that unknown fields of other owners' taints survive a rewrite."""

    taints: tuple[Mapping[str, Any], ...] = ()


class TaintedObject(PartialObjectMetadata, frozen=True, kw_only=True):
    """A Node or CustomNodeResource, decoded only as far as writers of taints need it."""

    spec: TaintsSpec = TaintsSpec()


class UnstructuredObject(PartialObjectMetadata, frozen=True, kw_only=True):
    """Object of a kind that is determined at run time."""

    spec: Mapping[str, Any] = {}
    status: Mapping[str, Any] = {}


T = TypeVar("T", bound=KubeObject)


class ResourceType(msgspec.Struct, Generic[T], frozen=True):
    """Kind of objects: its place in the API, and the struct that its objects are decoded into."""

    group: str
    """Empty for the core group."""
    version: str
    plural: str
    kind: str
    type: type[T]
    namespaced: bool = False

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def gvr(self) -> str:
        """Name in messages and labels: `pods.v1`, `leases.v1.coordination.k8s.io`."""
        return ".".join(part for part in (self.plural, self.version, self.group) if part)

    def collection(self, namespace: str = "") -> str:
        """Path of all objects, or of those in one namespace. Raises ValueError for an invalid path segment."""
        for what, text in (("group", self.group), ("version", self.version), ("resource", self.plural)):
            if not _GROUP_OR_PLURAL.fullmatch(text) and (text or what != "group"):
                raise ValueError(
                    f"{what}: {quote(text)} is invalid; write it in lower case, as `kubectl api-resources` does"
                )
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        within = f"/namespaces/{_path_segment(namespace, 'namespace')}" if namespace else ""
        return f"{root}{within}/{self.plural}"

    def path(self, key: str, subresource: str = "") -> str:
        """Path of one object. Raises ValueError for a key that is invalid for this resource."""
        namespace, separator, name = key.rpartition("/")
        if bool(separator) != self.namespaced or (separator and not namespace):
            form = "namespace/name" if self.namespaced else "a name without namespace"
            raise ValueError(f"{self.plural}: {quote(key)} is an invalid key; write {form}")
        tail = f"/{subresource}" if subresource else ""
        return f"{self.collection(namespace)}/{_path_segment(name, 'name')}{tail}"


LEASE_METADATA = ResourceType("coordination.k8s.io", "v1", "leases", "Lease", PartialObjectMetadata, namespaced=True)
"""Leases without their spec, for annotations of a Lease."""


def key_of(metadata: NamedMetadata) -> str:
    """Key of an object: `namespace/name`, or the name alone without a namespace."""
    return f"{metadata.namespace}/{metadata.name}" if metadata.namespace else metadata.name or ""


def _path_segment(text: str, what: str) -> str:
    # The API server rejects these as names; in a URL they would address another path.
    if not text or text in (".", "..") or "/" in text or "%" in text or len(text) > _MAX_NAME_LETTERS:
        raise ValueError(f"{what}: {quote(text)} cannot be part of a path")
    return parse.quote(text, safe="")


def parse_timestamp(text: str) -> float:
    """Convert RFC 3339 to seconds since the epoch. Raises ValueError for an invalid time or a missing zone."""
    try:
        parsed = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise ValueError(f"{quote(text, 60)} is no time such as 2026-01-31T09:30:00Z") from None
    if parsed.tzinfo is None:
        raise ValueError(f"{quote(text, 60)} has no time zone; end it with Z")
    return parsed.timestamp()


def format_timestamp(at_s: float, *, micro: bool = False) -> str:
    """Format seconds since the epoch as RFC 3339; `micro` adds microseconds as in leases."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ" if micro else "%Y-%m-%dT%H:%M:%SZ")

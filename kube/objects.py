"""Where objects of the API server are found, and what all of them have in common."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import quote

import msgspec

_GROUP_OR_PLURAL = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_LONGEST_NAME = 253


class Named(Protocol):
    """What every object's metadata tells the client; None is as good as empty."""

    @property
    def name(self) -> str | None: ...
    @property
    def namespace(self) -> str | None: ...
    @property
    def uid(self) -> str | None: ...
    @property
    def resource_version(self) -> str | None: ...


class Object(Protocol):
    """Whatever the API server keeps; any struct with `metadata` is one."""

    @property
    def metadata(self) -> Named: ...


class Owner(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A reference to the object that this one is deleted with."""

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool = False
    block_owner_deletion: bool = False


class Meta(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The metadata that readers look at; the API server keeps more."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str | None = None
    """RFC 3339, in UTC; `moment` makes seconds of it."""
    deletion_timestamp: str | None = None
    """Set while finalizers keep the object, or a pod's processes end."""
    deletion_grace_period_seconds: int | None = None
    """What a pod was given for that."""
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    finalizers: tuple[str, ...] = ()
    owner_references: tuple[Owner, ...] = ()


class Bare(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """An object of which only the metadata is wanted."""

    metadata: Meta = Meta()


class Dynamic(Bare, frozen=True, kw_only=True):
    """An object of a kind that is known only when the program runs."""

    spec: Mapping[str, Any] = {}
    status: Mapping[str, Any] = {}


T = TypeVar("T", bound=Object)


class Resource(msgspec.Struct, Generic[T], frozen=True):
    """One kind of objects: its place in the API, and the struct that its objects are decoded into."""

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
        """For people and labels: `pods.v1`, `leases.v1.coordination.k8s.io`."""
        return ".".join(part for part in (self.plural, self.version, self.group) if part)

    def collection(self, namespace: str = "") -> str:
        """Path of all of them, or of those in one namespace. Raises ValueError for what is no segment of a path."""
        for what, text in (("group", self.group), ("version", self.version), ("resource", self.plural)):
            if not _GROUP_OR_PLURAL.fullmatch(text) and (text or what != "group"):
                raise ValueError(
                    f"{what}: {text!r:.80} is none; write it in lower case, as `kubectl api-resources` does"
                )
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        within = f"/namespaces/{_segment(namespace, 'namespace')}" if namespace else ""
        return f"{root}{within}/{self.plural}"

    def path(self, key: str, subresource: str = "") -> str:
        """Path of one object by its key. Raises ValueError for a key that cannot be one of this resource."""
        namespace, separator, name = key.rpartition("/")
        if bool(separator) != self.namespaced or (separator and not namespace):
            wanted = "namespace/name" if self.namespaced else "a name without namespace"
            raise ValueError(f"{self.plural}: {key!r:.80} is no key of one; write {wanted}")
        tail = f"/{subresource}" if subresource else ""
        return f"{self.collection(namespace)}/{_segment(name, 'name')}{tail}"


def key_of(metadata: Named) -> str:
    """`namespace/name`, or the name alone where there is no namespace."""
    return f"{metadata.namespace}/{metadata.name}" if metadata.namespace else metadata.name or ""


def _segment(text: str, what: str) -> str:
    # What the API server itself refuses as a name: it would be another path.
    if not text or text in (".", "..") or "/" in text or "%" in text or len(text) > _LONGEST_NAME:
        raise ValueError(f"{what}: {text!r:.80} cannot be part of a path")
    return quote(text, safe="")

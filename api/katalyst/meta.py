"""Base structs of the custom resources: object metadata, conditions, quantities, and schema keywords.
Times, durations and quantities stay text: what is read is written back unchanged.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

QUANTITY_PATTERN = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?([0-9]+\.?[0-9]*|\.[0-9]+))?$"
PERCENT_PATTERN = r"^(100|[1-9]?[0-9])%$"


def schema_keywords(**keywords: Any) -> Meta:
    """Keywords of the schema that decoding does not look at; `_` stands for `-`."""
    return Meta(extra_json_schema={name.replace("_", "-"): value for name, value in keywords.items()})


def schema_default(value: Any) -> Meta:
    """What the API server fills in where an object says nothing."""
    return schema_keywords(default=value)


def keyed_by(field: str) -> Meta:
    """A list whose elements are merged by this field, which each has to say once."""
    return schema_keywords(x_kubernetes_list_type="map", x_kubernetes_list_map_keys=[field])


ATOMIC_LIST = schema_keywords(x_kubernetes_list_type="atomic")
ATOMIC_MAP = schema_keywords(x_kubernetes_map_type="atomic")
OPEN_SCHEMA = schema_keywords(x_kubernetes_preserve_unknown_fields=True)
"""Anything may be in it, and stays in it: there is no schema for what is below."""

Int32: TypeAlias = Annotated[int, schema_keywords(format="int32")]
Int64: TypeAlias = Annotated[int, schema_keywords(format="int64")]
Count: TypeAlias = Annotated[int, Meta(ge=0)]
Count64: TypeAlias = Annotated[int, Meta(ge=0), schema_keywords(format="int64")]
Positive: TypeAlias = Annotated[int, Meta(ge=1)]
Positive64: TypeAlias = Annotated[int, Meta(ge=1), schema_keywords(format="int64")]
Percent: TypeAlias = Annotated[int, Meta(ge=0, le=100)]
Factor: TypeAlias = Annotated[float, Meta(ge=0)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Time: TypeAlias = Annotated[str, schema_keywords(format="date-time")]
"""RFC 3339, such as `2026-01-31T12:00:00Z`."""
Duration: TypeAlias = str
"""As Go writes it: `90s`, `1h30m`."""
Quantity: TypeAlias = Annotated[str, Meta(pattern=QUANTITY_PATTERN)] | int
"""`500m`, `1Gi` or a whole number; api.quantity says which number it stands for."""
ResourceList: TypeAlias = dict[str, Quantity]
"""Resource name to how much of it."""
CountOrPercent: TypeAlias = Annotated[str, Meta(pattern=PERCENT_PATTERN)] | int
"""`3` or `20%`."""
IntOrText: TypeAlias = str | int
"""The same, unchecked by the API server."""
Extension: TypeAlias = Annotated[dict[str, Any], OPEN_SCHEMA]
"""An object whose shape somebody else defines."""


class KatalystStruct(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Anything inside of an object. A name that is not simply camelCase is given with the field."""


class OwnerReference(KatalystStruct, frozen=True, kw_only=True):
    """The object that this one is deleted with."""

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool | None = None
    block_owner_deletion: bool | None = None


class ObjectMeta(KatalystStruct, frozen=True, kw_only=True):
    """What every object has. The server's book-keeping of field managers is not read: it is as large as the object itself."""

    name: str | None = None
    generate_name: str | None = None
    namespace: str | None = None
    uid: str | None = None
    resource_version: str | None = None
    generation: int | None = None
    creation_timestamp: Time | None = None
    deletion_timestamp: Time | None = None
    deletion_grace_period_seconds: int | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    finalizers: tuple[str, ...] | None = None
    owner_references: tuple[OwnerReference, ...] | None = None


class CustomResource(KatalystStruct, frozen=True, kw_only=True):
    """What a kind adds `spec` and `status` to."""

    api_version: str
    kind: str
    metadata: ObjectMeta


class ResourceCondition(KatalystStruct, frozen=True, kw_only=True):
    """One thing that holds of an object, or does not, and since when."""

    type: str
    status: str
    """True, False or Unknown."""
    last_transition_time: Time | None = None
    reason: str | None = None
    message: str | None = None


class TargetReference(KatalystStruct, frozen=True, kw_only=True):
    """The workload that an object is about, in its own namespace."""

    api_version: str | None = None
    kind: str
    name: str

"""Base structs of the custom resources: object metadata, conditions, quantities, and schema keywords.
Times, durations and quantities stay text: what is read is written back unchanged.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

QUANTITY_PATTERN = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?([0-9]+\.?[0-9]*|\.[0-9]+))?$"
PERCENT_PATTERN = r"^(100|[1-9]?[0-9])%$"


def schema_keywords(**keywords: Any) -> Meta:
    """Schema keywords that msgspec ignores when decoding; `_` stands for `-`."""
    return Meta(extra_json_schema={name.replace("_", "-"): value for name, value in keywords.items()})


def schema_default(value: Any) -> Meta:
    """Default that the API server sets if a field is missing."""
    return schema_keywords(default=value)


def keyed_by(field: str) -> Meta:
    """List whose elements are merged by this required, unique field."""
    return schema_keywords(x_kubernetes_list_type="map", x_kubernetes_list_map_keys=[field])


ATOMIC_LIST = schema_keywords(x_kubernetes_list_type="atomic")
ATOMIC_MAP = schema_keywords(x_kubernetes_map_type="atomic")
OPEN_SCHEMA = schema_keywords(x_kubernetes_preserve_unknown_fields=True)
"""Accept and preserve any content; there is no schema below this field."""

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
"""Go duration: `90s`, `1h30m`."""
Quantity: TypeAlias = Annotated[str, Meta(pattern=QUANTITY_PATTERN)] | int
"""`500m`, `1Gi` or an integer; converted by api.quantity."""
ResourceList: TypeAlias = dict[str, Quantity]
"""Amounts by resource name."""
CountOrPercent: TypeAlias = Annotated[str, Meta(pattern=PERCENT_PATTERN)] | int
"""A number or a percentage: `3` or `20%`."""
IntOrText: TypeAlias = str | int
"""A number or a percentage that the API server does not validate."""
Extension: TypeAlias = Annotated[dict[str, Any], OPEN_SCHEMA]
"""Object whose schema an extension defines."""


class KatalystStruct(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Base of all structs in the objects. Names that are not plain camelCase are given with the field."""


class OwnerReference(KatalystStruct, frozen=True, kw_only=True):
    """Owner of this object, with which it is garbage-collected."""

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool | None = None
    block_owner_deletion: bool | None = None


class ObjectMeta(KatalystStruct, frozen=True, kw_only=True):
    """Metadata of an object. managedFields is not read: it can be as large as the object itself."""

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
    """Base of the kinds, which add `spec` and `status`."""

    api_version: str
    kind: str
    metadata: ObjectMeta


class ResourceCondition(KatalystStruct, frozen=True, kw_only=True):
    """Condition of an object."""

    type: str
    status: str
    """True, False or Unknown."""
    last_transition_time: Time | None = None
    reason: str | None = None
    message: str | None = None


class TargetReference(KatalystStruct, frozen=True, kw_only=True):
    """Workload in the same namespace that the object refers to."""

    api_version: str | None = None
    kind: str
    name: str

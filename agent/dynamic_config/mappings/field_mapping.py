"""Defines field mappings: one field of a Katalyst object, the settings it stands for, and the unit conversions. Pure. A
mapping's field is a path below the object's `config`; a setting's path is a tuple of names in the settings file.
Conversions raise ValueError without the field's name, which the caller adds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import ceil
from typing import Any, NamedTuple

from api.quantity import convert_quantity, parse_duration_s
from api.text import quote
from api.units import MIB

_MAX_BYTES = 1 << 62
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)%", re.ASCII)
_MOUNT = re.compile(r"/sys/fs/cgroup(?:/(?:memory|cpu|cpu,cpuacct|cpuset))?(?=/)", re.ASCII)


def identity(value: Any) -> Any:
    """Return the value: texts, booleans and numbers with the same unit."""
    return value


def to_cores(value: Any) -> float:
    """Convert a quantity of CPU: `500m` is half a core."""
    return float(convert_quantity(value))


def to_whole_cores(value: Any) -> int:
    """Convert a quantity of CPU to whole cores, rounded up so that a reserve is never smaller than requested."""
    return ceil(to_cores(value))


def to_byte_count(value: Any) -> int:
    """Convert a quantity of bytes, or a plain number."""
    if isinstance(value, float):
        return _check_bytes(value)
    return _check_bytes(convert_quantity(value))


def to_mebibytes(value: Any) -> int:
    """Convert a quantity of bytes to MiB, rounded up."""
    return -(-to_byte_count(value) // MIB)


def to_ratio(value: Any) -> float:
    """Convert a part of one that is written as a quantity: `0.1`, `100m`."""
    return float(convert_quantity(value))


def to_seconds(value: Any) -> float:
    """Convert a duration in Go's notation."""
    return parse_duration_s(value)


def to_grace_s(value: Any) -> float | None:
    """Convert a grace period in seconds; a negative one means the pod's own."""
    return None if value < 0 else float(value)


def to_threshold(value: Any) -> Mapping[str, Any]:
    """Convert `10Gi`, `1000` or `10%` to the settings' number or ratio; an empty text switches the threshold off."""
    if not value:
        return {}
    if match := _PERCENT.fullmatch(value):
        return {"ratio": float(match[1]) / 100}
    return {"number": to_byte_count(value)}


def to_cgroup_path(value: str) -> str:
    """Convert a path with its mount point to the path below it, which is the same on every hierarchy."""
    path = _MOUNT.sub("", value, count=1)
    if not path.startswith("/") or path == "/":
        raise ValueError(f"{quote(value)} is not a cgroup path such as /sys/fs/cgroup/kubepods/besteffort")
    return path.rstrip("/")


def _check_bytes(value: Any) -> int:
    if not value <= _MAX_BYTES:
        raise ValueError("is more than 2^62 bytes; lower it")
    return int(value)


SettingPath = tuple[str, ...]
SettingValues = Iterator[tuple[SettingPath, Any]]
PLUGINS_PATH: SettingPath = ("eviction", "plugins")
"""A path below it names one plugin and holds true or false, so that a switch leaves other plugins alone."""


class FieldMapping(NamedTuple):
    """`put` yields settings of the field's value; its ValueError is reported with the field's path."""

    field: str
    settings: tuple[str, ...]
    """The settings it may set, for documentation."""
    put: Callable[[Any], Iterable[tuple[SettingPath, Any]]]


class UnusedField(NamedTuple):
    """A field, or everything below it, without effect, and why."""

    field: str
    why: str


def setting_path(text: str) -> SettingPath:
    """Return the path of a setting as docs/settings.md writes it."""
    return tuple(text.split("."))


def map_field(field: str, *settings: str, unit: Callable[[Any], Any] = identity) -> FieldMapping:
    """Map one value to one or several settings."""

    def put(value: Any) -> SettingValues:
        converted = unit(value)
        for setting in settings:
            yield setting_path(setting), converted

    return FieldMapping(field, settings, put)


def map_plugin_switch(field: str, plugin: str) -> FieldMapping:
    """Map a boolean to whether an eviction plugin runs."""

    def put(value: Any) -> SettingValues:
        yield (*PLUGINS_PATH, plugin), bool(value)

    return FieldMapping(field, ("eviction.plugins",), put)


def map_resources(field: str, cpu: str, memory: str) -> FieldMapping:
    """Map a map of resource names to numbers; Katalyst's names of reclaimed resources count as CPU and memory."""

    def put(value: Mapping[str, Any]) -> SettingValues:
        settings = {"cpu": cpu, "reclaimed_millicpu": cpu, "memory": memory, "reclaimed_memory": memory}
        for name, number in value.items():
            if setting := settings.get(name.rpartition("/")[2]):
                yield setting_path(setting), number

    return FieldMapping(field, (cpu, memory), put)


def map_fields(
    parent: str, *rows: FieldMapping | tuple[str, str] | tuple[str, str, Callable[[Any], Any]]
) -> tuple[FieldMapping, ...]:
    """Map fields below `parent`. A row has the field, its settings separated by blanks, and the conversion if there is one."""
    mappings = (
        row if isinstance(row, FieldMapping) else map_field(row[0], *row[1].split(), unit=(*row[2:], identity)[0])
        for row in rows
    )
    return tuple(mapping._replace(field=f"{parent}.{mapping.field}") for mapping in mappings)


def unused_fields(parent: str, *rows: tuple[str, str]) -> tuple[UnusedField, ...]:
    """Return fields below `parent` without effect, each with the reason."""
    return tuple(UnusedField(f"{parent}.{field}", reason) for field, reason in rows)


def get_field(document: Any, field: str) -> Any:
    """Return the value at a path of names; None without one."""
    for name in field.split("."):
        if not isinstance(document, Mapping):
            return None
        document = document.get(name)
    return document

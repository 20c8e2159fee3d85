"""Defines field mappings: one field of a Katalyst object, the settings it stands for, and the unit conversions. Pure.
A mapping's field is a path below the object's `config`; a setting's path is a tuple of names in the settings file.
Conversions raise ValueError without the field's name, which the caller adds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import ceil
from typing import Any, NamedTuple

from api.quantity import convert_quantity, parse_duration_s

MIB = 1 << 20
_MAX_BYTES = 1 << 62
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)%", re.ASCII)
_MOUNT = re.compile(r"/sys/fs/cgroup(?:/(?:memory|cpu|cpu,cpuacct|cpuset))?(?=/)", re.ASCII)


def identity(value: Any) -> Any:
    """As it is: text, truth, and numbers that are the same in both."""
    return value


def to_cores(value: Any) -> float:
    """A quantity of CPU: `500m` is half a core."""
    return float(convert_quantity(value))


def to_whole_cores(value: Any) -> int:
    """The same, rounded up: what is kept is never less than what was asked for."""
    return ceil(to_cores(value))


def to_byte_count(value: Any) -> int:
    """A quantity of bytes, or a plain number of them."""
    if isinstance(value, float):
        return _check_bytes(value)
    return _check_bytes(convert_quantity(value))


def to_mebibytes(value: Any) -> int:
    """A quantity of bytes in MiB, rounded up."""
    return -(-to_byte_count(value) // MIB)


def to_ratio(value: Any) -> float:
    """A part of one that is written as a quantity: `0.1`, `100m`."""
    return float(convert_quantity(value))


def to_seconds(value: Any) -> float:
    """A duration as Go writes it."""
    return parse_duration_s(value)


def to_grace_s(value: Any) -> float | None:
    """Seconds that a victim has; below zero it has what its own pod says."""
    return None if value < 0 else float(value)


def to_threshold(value: Any) -> Mapping[str, Any]:
    """`10Gi`, `1000` or `10%`, as the settings write the two; nothing of an empty text, which switches the threshold off."""
    if not value:
        return {}
    if found := _PERCENT.fullmatch(value):
        return {"ratio": float(found[1]) / 100}
    return {"number": to_byte_count(value)}


def to_cgroup_path(value: str) -> str:
    """A path with its mount point as the path below it, which is the same whatever the hierarchy is."""
    path = _MOUNT.sub("", value, count=1)
    if not path.startswith("/") or path == "/":
        raise ValueError(f"{value!r:.80} is no cgroup's path such as /sys/fs/cgroup/kubepods/besteffort")
    return path.rstrip("/")


def _check_bytes(value: Any) -> int:
    if not value <= _MAX_BYTES:
        raise ValueError("more bytes than any machine has; lower it")
    return int(value)


SettingPath = tuple[str, ...]
SettingValues = Iterator[tuple[SettingPath, Any]]
PLUGINS_PATH: SettingPath = ("eviction", "plugins")
"""A path below it names one plugin and has true or false: who decides on one says nothing of the others."""


class FieldMapping(NamedTuple):
    """`put` makes settings of the field's value; what it raises (ValueError) is said with the field's path."""

    field: str
    settings: tuple[str, ...]
    """For people: which it may set."""
    put: Callable[[Any], Iterable[tuple[SettingPath, Any]]]


class UnusedField(NamedTuple):
    """A field, or all below it, that nothing here obeys, and why."""

    field: str
    why: str


def setting_path(text: str) -> SettingPath:
    """Of a setting as docs/settings.md writes it."""
    return tuple(text.split("."))


def map_field(field: str, *settings: str, unit: Callable[[Any], Any] = identity) -> FieldMapping:
    """One value, for one setting or for several."""

    def put(value: Any) -> SettingValues:
        found = unit(value)
        for setting in settings:
            yield setting_path(setting), found

    return FieldMapping(field, settings, put)


def map_plugin_switch(field: str, plugin: str) -> FieldMapping:
    """Whether an eviction plugin judges."""

    def put(value: Any) -> SettingValues:
        yield (*PLUGINS_PATH, plugin), bool(value)

    return FieldMapping(field, ("eviction.plugins",), put)


def map_resources(field: str, cpu: tuple[str, ...], memory: tuple[str, ...]) -> FieldMapping:
    """A map of resource names to numbers; Katalyst's own names of what is lent count as CPU and memory."""

    def put(value: Mapping[str, Any]) -> SettingValues:
        for name, number in value.items():
            word = name.rpartition("/")[2]
            for setting in {"cpu": cpu, "reclaimed_millicpu": cpu, "memory": memory, "reclaimed_memory": memory}.get(
                word, ()
            ):
                yield setting_path(setting), number

    return FieldMapping(field, (*cpu, *memory), put)


def get_field(document: Any, field: str) -> Any:
    """What is at a path of names; None where there is nothing."""
    for name in field.split("."):
        if not isinstance(document, Mapping):
            return None
        document = document.get(name)
    return document

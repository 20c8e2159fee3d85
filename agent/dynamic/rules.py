"""What a rule of the translation is: one field of Katalyst's, the settings that it stands for, and the values in their units.

Paths of settings are tuples of the names in the settings file. A rule's field is a path below the object's `config`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from agent.dynamic.values import same

Path = tuple[str, ...]
Put = Iterator[tuple[Path, Any]]
PLUGINS: Path = ("eviction", "plugins")
"""A path below it names one plugin and has true or false: who decides on one says nothing of the others."""


class Rule(NamedTuple):
    """`put` makes settings of the field's value; what it raises (ValueError) is said with the field's path."""

    field: str
    settings: tuple[str, ...]
    """For people: which it may set."""
    put: Callable[[Any], Iterable[tuple[Path, Any]]]


class Unused(NamedTuple):
    """A field, or all below it, that nothing here obeys, and why."""

    field: str
    why: str


def path(text: str) -> Path:
    """Of a setting as docs/settings.md writes it."""
    return tuple(text.split("."))


def to(field: str, *settings: str, unit: Callable[[Any], Any] = same) -> Rule:
    """One value, for one setting or for several."""

    def put(value: Any) -> Put:
        found = unit(value)
        for setting in settings:
            yield path(setting), found

    return Rule(field, settings, put)


def switch(field: str, plugin: str) -> Rule:
    """Whether an eviction plugin judges."""

    def put(value: Any) -> Put:
        yield (*PLUGINS, plugin), bool(value)

    return Rule(field, ("eviction.plugins",), put)


def resources(field: str, cpu: tuple[str, ...], memory: tuple[str, ...]) -> Rule:
    """A map of resource names to numbers; Katalyst's own names of what is lent count as CPU and memory."""

    def put(value: Mapping[str, Any]) -> Put:
        for name, number in value.items():
            word = name.rpartition("/")[2]
            for setting in {"cpu": cpu, "reclaimed_millicpu": cpu, "memory": memory, "reclaimed_memory": memory}.get(
                word, ()
            ):
                yield path(setting), number

    return Rule(field, (*cpu, *memory), put)


def dig(document: Any, field: str) -> Any:
    """What is at a path of names; None where there is nothing."""
    for name in field.split("."):
        if not isinstance(document, Mapping):
            return None
        document = document.get(name)
    return document

"""Settings of all nodes side by side: one line where all agree, a line for each value where they differ. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from api.configuration import Configuration, ObeyedObject, Setting
from cli import words
from cli.config import below, object_text, source_text
from cli.fleet.asking import Told
from cli.fleet.lines import named

Origin = tuple[str, str, str, str]
"""Kind, object, content and field."""


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """One value of a setting, where it came from, and the nodes that have it."""

    value: str
    source: str
    object: str
    hash: str
    field: str
    since_wall_ns: int | None
    """Of the first of these nodes."""
    nodes: tuple[str, ...]


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One setting of all nodes."""

    name: str
    differs: bool
    """Whether its value is not the same on all of them; it may come from different places."""
    values: tuple[Value, ...]


class Obeyed(msgspec.Struct, frozen=True, kw_only=True):
    """One object as one content that nodes were told, and how it is taken there."""

    object: ObeyedObject
    nodes: tuple[str, ...]


class Silent(msgspec.Struct, frozen=True, kw_only=True):
    """A node of which nothing is known, or that hears nothing new from the cluster."""

    node: str
    problem: str


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a cluster's nodes."""

    settings: tuple[Compared, ...]
    objects: tuple[Obeyed, ...]
    silent: tuple[Silent, ...]
    nodes: tuple[str, ...]
    """Those that answered."""


def compare(told: Sequence[Told[Configuration]], names: Sequence[str] = (), *, differing: bool = False) -> Fleet:
    """The settings below these names, or all; only those that differ, where that is asked for."""
    answers = [(one.member.node, one.answer) for one in told if one.answer is not None]
    by_name: dict[str, list[tuple[str, Setting]]] = {}
    for node, answer in answers:
        for setting in answer.settings:
            if not names or any(below(setting.name, name) for name in names):
                by_name.setdefault(setting.name, []).append((node, setting))
    found = [_compared(name, seen, len(answers)) for name, seen in by_name.items()]
    return Fleet(
        settings=tuple(one for one in found if one.differs or not differing),
        objects=() if names else _objects(answers),
        silent=tuple(Silent(node=one.member.node, problem=problem) for one in told if (problem := _problem(one))),
        nodes=tuple(node for node, _ in answers),
    )


def _problem(told: Told[Configuration]) -> str:
    if told.answer is None:
        return told.problem
    return f"nothing new is heard: {told.answer.problem}" if told.answer.problem else ""


def _compared(name: str, seen: Sequence[tuple[str, Setting]], nodes: int) -> Compared:
    groups: dict[tuple[str, Origin], list[tuple[str, Setting]]] = {}
    for node, one in seen:
        groups.setdefault((one.value, (one.source, one.object, one.hash, one.field)), []).append((node, one))
    values = [
        Value(
            value=value, source=origin[0], object=origin[1], hash=origin[2], field=origin[3],
            since_wall_ns=having[0][1].since_wall_ns, nodes=tuple(node for node, _ in having),
        )
        for (value, origin), having in sorted(groups.items(), key=lambda group: -len(group[1]))
    ]  # fmt: skip
    # An agent of another version may not have a setting at all.
    return Compared(
        name=name, differs=len({one.value for one in values}) > 1 or len(seen) < nodes, values=tuple(values)
    )


def _objects(answers: Sequence[tuple[str, Configuration]]) -> tuple[Obeyed, ...]:
    groups: dict[tuple[str, ...], list[tuple[str, ObeyedObject]]] = {}
    for node, answer in answers:
        for one in answer.objects:
            groups.setdefault((one.kind, one.object, one.hash, one.problem, *one.unused), []).append((node, one))
    return tuple(
        Obeyed(object=_latest([one for _, one in having]), nodes=tuple(node for node, _ in having))
        for _, having in sorted(groups.items())
    )


def _latest(same: Sequence[ObeyedObject]) -> ObeyedObject:
    """The object since all of them have obeyed it."""
    return max(same, key=lambda one: one.since_wall_ns or 0)


def text(fleet: Fleet, now_ns: int, *, differing: bool = False) -> Iterator[str]:
    """For people."""
    width = max((len(one.name) for one in fleet.settings), default=0)
    of = len(fleet.nodes)
    if differing and of and not fleet.settings:
        yield f"no setting differs: {of} {'node has' if of == 1 else 'nodes have'} answered"
    for one in fleet.settings:
        if len(one.values) == 1 and not one.differs:
            yield f"{one.name.ljust(width)}  {words.clean(one.values[0].value)}  {_source(one.name, one.values[0], now_ns)}"
            continue
        yield f"{one.name.ljust(width)}  {'differs' if one.differs else 'the same, of different origin'}:"
        for value in one.values:
            nodes = named([words.clean(node) for node in value.nodes], of)
            yield f"  {words.clean(value.value)}  {_source(one.name, value, now_ns)}  on {nodes}"
    for obeyed in fleet.objects:
        for i, line in enumerate(object_text(obeyed.object, now_ns)):
            yield line if i else f"{line}  on {named([words.clean(node) for node in obeyed.nodes], of)}"
    for silent in fleet.silent:
        yield f"✕ {words.clean(silent.node)}: {words.clean(silent.problem)}"


def _source(name: str, value: Value, now_ns: int) -> str:
    return source_text(
        Setting(
            name=name, value=value.value, source=value.source, object=value.object, hash=value.hash, field=value.field,
            since_wall_ns=value.since_wall_ns if len(value.nodes) == 1 else None,
        ),
        now_ns,
    )  # fmt: skip

"""Compares the settings of all nodes: one line where all agree, one line per value where they differ. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from api.diagnostics import AppliedConfigObject, EffectiveConfiguration, EffectiveSetting
from cli import formats
from cli.config import config_object_text, is_below, setting_source_text
from cli.fleet.api_server import AgentReply
from cli.tables import format_node_names

SettingOrigin = tuple[str, str, str, str]
"""Kind, object, content and field."""


class FleetSettingValue(msgspec.Struct, frozen=True, kw_only=True):
    """One value of a setting, where it came from, and the nodes that have it."""

    value: str
    source: str
    object: str
    hash: str
    field: str
    since_wall_ns: int | None
    """Of the first of these nodes."""
    nodes: tuple[str, ...]


class SettingComparison(msgspec.Struct, frozen=True, kw_only=True):
    """One setting of all nodes."""

    name: str
    differs: bool
    """Whether its value is not the same on all of them; it may come from different places."""
    values: tuple[FleetSettingValue, ...]


class FleetAppliedObject(msgspec.Struct, frozen=True, kw_only=True):
    """One object as one content that nodes were told, and how it is taken there."""

    object: AppliedConfigObject
    nodes: tuple[str, ...]


class UnreachableNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of which nothing is known, or that hears nothing new from the cluster."""

    node: str
    problem: str


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a cluster's nodes."""

    settings: tuple[SettingComparison, ...]
    objects: tuple[FleetAppliedObject, ...]
    silent: tuple[UnreachableNode, ...]
    nodes: tuple[str, ...]
    """Those that answered."""


def compare_settings(
    replies: Sequence[AgentReply[EffectiveConfiguration]], names: Sequence[str] = (), *, differing: bool = False
) -> FleetSettings:
    """The settings below these names, or all; only those that differ, where that is asked for."""
    answers = [(one.member.node, one.answer) for one in replies if one.answer is not None]
    by_name: dict[str, list[tuple[str, EffectiveSetting]]] = {}
    for node, answer in answers:
        for setting in answer.settings:
            if not names or any(is_below(setting.name, name) for name in names):
                by_name.setdefault(setting.name, []).append((node, setting))
    found = [_compare_setting(name, seen, len(answers)) for name, seen in by_name.items()]
    return FleetSettings(
        settings=tuple(one for one in found if one.differs or not differing),
        objects=() if names else _applied_objects(answers),
        silent=tuple(
            UnreachableNode(node=one.member.node, problem=problem) for one in replies if (problem := _node_problem(one))
        ),
        nodes=tuple(node for node, _ in answers),
    )


def _node_problem(told: AgentReply[EffectiveConfiguration]) -> str:
    if told.answer is None:
        return told.problem
    return f"nothing new is heard: {told.answer.problem}" if told.answer.problem else ""


def _compare_setting(name: str, seen: Sequence[tuple[str, EffectiveSetting]], nodes: int) -> SettingComparison:
    groups: dict[tuple[str, SettingOrigin], list[tuple[str, EffectiveSetting]]] = {}
    for node, one in seen:
        groups.setdefault((one.value, (one.source, one.object, one.hash, one.field)), []).append((node, one))
    values = [
        FleetSettingValue(
            value=value, source=origin[0], object=origin[1], hash=origin[2], field=origin[3],
            since_wall_ns=having[0][1].since_wall_ns, nodes=tuple(node for node, _ in having),
        )
        for (value, origin), having in sorted(groups.items(), key=lambda group: -len(group[1]))
    ]  # fmt: skip
    # An agent of another version may not have a setting at all.
    return SettingComparison(
        name=name, differs=len({one.value for one in values}) > 1 or len(seen) < nodes, values=tuple(values)
    )


def _applied_objects(answers: Sequence[tuple[str, EffectiveConfiguration]]) -> tuple[FleetAppliedObject, ...]:
    groups: dict[tuple[str, ...], list[tuple[str, AppliedConfigObject]]] = {}
    for node, answer in answers:
        for one in answer.objects:
            groups.setdefault((one.kind, one.object, one.hash, one.problem, *one.unused), []).append((node, one))
    return tuple(
        FleetAppliedObject(object=_latest_applied([one for _, one in having]), nodes=tuple(node for node, _ in having))
        for _, having in sorted(groups.items())
    )


def _latest_applied(same: Sequence[AppliedConfigObject]) -> AppliedConfigObject:
    """The object since all of them have obeyed it."""
    return max(same, key=lambda one: one.since_wall_ns or 0)


def settings_lines(fleet: FleetSettings, now_ns: int, *, differing: bool = False) -> Iterator[str]:
    """For people."""
    width = max((len(one.name) for one in fleet.settings), default=0)
    of = len(fleet.nodes)
    if differing and of and not fleet.settings:
        yield f"no setting differs: {of} {'node has' if of == 1 else 'nodes have'} answered"
    for one in fleet.settings:
        if len(one.values) == 1 and not one.differs:
            yield f"{one.name.ljust(width)}  {formats.printable(one.values[0].value)}  {_source_text(one.name, one.values[0], now_ns)}"
            continue
        yield f"{one.name.ljust(width)}  {'differs' if one.differs else 'the same, of different origin'}:"
        for value in one.values:
            nodes = format_node_names([formats.printable(node) for node in value.nodes], of)
            yield f"  {formats.printable(value.value)}  {_source_text(one.name, value, now_ns)}  on {nodes}"
    for obeyed in fleet.objects:
        for i, line in enumerate(config_object_text(obeyed.object, now_ns)):
            yield (
                line if i else f"{line}  on {format_node_names([formats.printable(node) for node in obeyed.nodes], of)}"
            )
    for silent in fleet.silent:
        yield f"✕ {formats.printable(silent.node)}: {formats.printable(silent.problem)}"


def _source_text(name: str, value: FleetSettingValue, now_ns: int) -> str:
    return setting_source_text(
        EffectiveSetting(
            name=name, value=value.value, source=value.source, object=value.object, hash=value.hash, field=value.field,
            since_wall_ns=value.since_wall_ns if len(value.nodes) == 1 else None,
        ),
        now_ns,
    )  # fmt: skip

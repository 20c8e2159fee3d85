"""Compares the settings of all nodes: one line where all agree, one line per value where they differ. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from api.diagnostics import AppliedConfigObject, EffectiveConfiguration, EffectiveSetting
from api.text import printable
from cli.config import config_object_text, is_below, setting_source_text
from cli.fleet.api_server import AgentReply
from cli.tables import format_node_names

SettingOrigin = tuple[str, str, str, str]
"""Kind, object name, content hash and field of the source of a setting."""


class FleetSettingValue(msgspec.Struct, frozen=True, kw_only=True):
    """One value of a setting, its source, and the nodes that have it."""

    value: str
    source: str
    object: str
    hash: str
    field: str
    since_wall_ns: int | None
    """Time since the first of these nodes has the value, in nanoseconds since the epoch."""
    nodes: tuple[str, ...]


class SettingComparison(msgspec.Struct, frozen=True, kw_only=True):
    """One setting on all nodes."""

    name: str
    differs: bool
    """Whether nodes have different values, or some lack the setting; sources may differ in any case."""
    values: tuple[FleetSettingValue, ...]


class FleetAppliedObject(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration object with one content, as a group of nodes applies it."""

    object: AppliedConfigObject
    nodes: tuple[str, ...]


class UnreachableNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node that did not answer, or that receives no changes from the cluster."""

    node: str
    problem: str


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of all nodes of a cluster."""

    settings: tuple[SettingComparison, ...]
    objects: tuple[FleetAppliedObject, ...]
    silent: tuple[UnreachableNode, ...]
    nodes: tuple[str, ...]
    """Nodes that answered."""


def compare_settings(
    replies: Sequence[AgentReply[EffectiveConfiguration]], names: Sequence[str] = (), *, differing: bool = False
) -> FleetSettings:
    """Group the nodes by the value of each setting below these names, or of all settings; optionally only differing ones."""
    answers = [(reply.member.node, reply.answer) for reply in replies if reply.answer is not None]
    by_name: dict[str, list[tuple[str, EffectiveSetting]]] = {}
    for node, answer in answers:
        for setting in answer.settings:
            if not names or any(is_below(setting.name, name) for name in names):
                by_name.setdefault(setting.name, []).append((node, setting))
    comparisons = [_compare_setting(name, values, len(answers)) for name, values in by_name.items()]
    return FleetSettings(
        settings=tuple(comparison for comparison in comparisons if comparison.differs or not differing),
        objects=() if names else _applied_objects(answers),
        silent=tuple(
            UnreachableNode(node=reply.member.node, problem=problem)
            for reply in replies
            if (problem := _node_problem(reply))
        ),
        nodes=tuple(node for node, _ in answers),
    )


def _node_problem(reply: AgentReply[EffectiveConfiguration]) -> str:
    if reply.answer is None:
        return reply.problem
    return f"no changes are received: {reply.answer.problem}" if reply.answer.problem else ""


def _compare_setting(name: str, settings: Sequence[tuple[str, EffectiveSetting]], nodes: int) -> SettingComparison:
    groups: dict[tuple[str, SettingOrigin], list[tuple[str, EffectiveSetting]]] = {}
    for node, setting in settings:
        groups.setdefault((setting.value, (setting.source, setting.object, setting.hash, setting.field)), []).append(
            (node, setting)
        )
    values = [
        FleetSettingValue(
            value=value, source=origin[0], object=origin[1], hash=origin[2], field=origin[3],
            since_wall_ns=members[0][1].since_wall_ns, nodes=tuple(node for node, _ in members),
        )
        for (value, origin), members in sorted(groups.items(), key=lambda group: -len(group[1]))
    ]  # fmt: skip
    # An agent of another version may lack a setting.
    return SettingComparison(
        name=name, differs=len({value.value for value in values}) > 1 or len(settings) < nodes, values=tuple(values)
    )


def _applied_objects(answers: Sequence[tuple[str, EffectiveConfiguration]]) -> tuple[FleetAppliedObject, ...]:
    groups: dict[tuple[str, ...], list[tuple[str, AppliedConfigObject]]] = {}
    for node, answer in answers:
        for applied in answer.objects:
            groups.setdefault(
                (applied.kind, applied.object, applied.hash, applied.problem, *applied.unused), []
            ).append((node, applied))
    return tuple(
        FleetAppliedObject(
            object=_latest_applied([applied for _, applied in members]), nodes=tuple(node for node, _ in members)
        )
        for _, members in sorted(groups.items())
    )


def _latest_applied(objects: Sequence[AppliedConfigObject]) -> AppliedConfigObject:
    """Return the object with the latest time: since then all of these nodes apply it."""
    return max(objects, key=lambda applied: applied.since_wall_ns or 0)


def settings_lines(fleet: FleetSettings, now_ns: int, *, differing: bool = False) -> Iterator[str]:
    """Yield the settings as text."""
    width = max((len(comparison.name) for comparison in fleet.settings), default=0)
    count = len(fleet.nodes)
    if differing and count and not fleet.settings:
        yield f"no setting differs: {count} {'node' if count == 1 else 'nodes'} answered"
    for comparison in fleet.settings:
        if len(comparison.values) == 1 and not comparison.differs:
            value = comparison.values[0]
            source = _source_text(comparison.name, value, now_ns)
            yield f"{comparison.name.ljust(width)}  {printable(value.value)}  {source}"
            continue
        yield f"{comparison.name.ljust(width)}  {'differs' if comparison.differs else 'the same from different sources'}:"
        for value in comparison.values:
            nodes = format_node_names([printable(node) for node in value.nodes], count)
            yield f"  {printable(value.value)}  {_source_text(comparison.name, value, now_ns)}  on {nodes}"
    for applied in fleet.objects:
        for i, line in enumerate(config_object_text(applied.object, now_ns)):
            yield (line if i else f"{line}  on {format_node_names([printable(node) for node in applied.nodes], count)}")
    for silent in fleet.silent:
        yield f"✕ {printable(silent.node)}: {printable(silent.problem)}"


def _source_text(name: str, value: FleetSettingValue, now_ns: int) -> str:
    return setting_source_text(
        EffectiveSetting(
            name=name, value=value.value, source=value.source, object=value.object, hash=value.hash, field=value.field,
            since_wall_ns=value.since_wall_ns if len(value.nodes) == 1 else None,
        ),
        now_ns,
    )  # fmt: skip

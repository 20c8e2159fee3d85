"""Merges configuration objects over the settings file, field by field: object, then file, then default.
An object that does not validate together with the others is rejected as a whole, and the version applied before
stays.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from agent.config.config import AgentConfig
from agent.config.eviction import DEFAULT_PLUGINS, PLUGIN_NAMES
from agent.config.loader import ConfigError, NodeCheck, build_config
from agent.dynamic_config.mappings.field_mapping import PLUGINS_PATH, SettingPath
from agent.dynamic_config.translate import CONFIG_KINDS, DynamicConfigRefused, Translation, translate_object


class ConfigObject(msgspec.Struct, frozen=True, kw_only=True):
    """One object that this node is to obey, as it was fetched."""

    resource: str
    """Plural name of its kind."""
    key: str
    """`namespace/name`, or the name alone."""
    hash: str
    """Of its content, as CustomNodeConfig says it."""
    since_wall_ns: int
    """CLOCK_REALTIME when it was fetched."""
    body: Mapping[str, Any]
    """Its `spec` and `status`."""

    def same(self, other: ConfigObject | None) -> bool:
        """Whether it is the same content of the same object."""
        return other is not None and (self.resource, self.key, self.hash) == (other.resource, other.key, other.hash)


class SettingOrigin(NamedTuple):
    """Who says what a setting is."""

    object: ConfigObject
    field: str


class ResolvedConfig(NamedTuple):
    """What is in force."""

    config: AgentConfig
    obeyed: Mapping[str, ConfigObject]
    """By resource."""
    problems: Mapping[str, str]
    """Of those that were wanted and cannot be obeyed, by resource."""
    origins: Mapping[SettingPath, SettingOrigin]
    unused: Mapping[str, tuple[str, ...]]
    """Fields that nothing here obeys, by resource."""


def resolve_config(
    file: AgentConfig, applied: Mapping[str, ConfigObject], desired: Mapping[str, ConfigObject], check_node: NodeCheck
) -> ResolvedConfig:
    """The settings that come of the file and of these objects. `before` were obeyed until now; those that nobody wants any
    longer are not obeyed any longer. Never raises for what an object says; the file alone must hold."""
    accepted: dict[str, ConfigObject] = {}
    problems: dict[str, str] = {}
    kept = {resource: old for resource, old in applied.items() if resource in desired}
    try:
        _build_resolved(file, kept, check_node)
        accepted = dict(kept)
    except DynamicConfigRefused:
        # Another file, or another machine, than when they were obeyed: one after the other, as far as they go.
        for resource, old in kept.items():
            problems |= _try_object(file, accepted, resource, old, check_node)
    for resource in CONFIG_KINDS:
        new = desired.get(resource)
        if new is not None and not new.same(accepted.get(resource)):
            problems.pop(resource, None)
            problems |= _try_object(file, accepted, resource, new, check_node)
    config, translations = _build_resolved(file, accepted, check_node)
    origins = {
        path: SettingOrigin(accepted[resource], value.field)
        for resource, translation in translations.items()
        for path, value in translation.settings.items()
    }
    return ResolvedConfig(
        config, accepted, problems, origins, {name: each.unused for name, each in translations.items()}
    )


def _try_object(
    file: AgentConfig, accepted: dict[str, ConfigObject], resource: str, new: ConfigObject, fits: NodeCheck
) -> dict[str, str]:
    """Accept the object if it can be obeyed together with the others; else why it cannot."""
    try:
        _build_resolved(file, {**accepted, resource: new}, fits)
    except DynamicConfigRefused as error:
        return {resource: str(error)}
    accepted[resource] = new
    return {}


def _build_resolved(
    file: AgentConfig, objects: Mapping[str, ConfigObject], fits: NodeCheck
) -> tuple[AgentConfig, dict[str, Translation]]:
    """Raises Refused, with the object's field where one is to blame."""
    # In the order of the grammars, so that it never depends on who came first.
    translations = {
        name: translate_object(grammar, objects[name].body) for name, grammar in CONFIG_KINDS.items() if name in objects
    }
    if not any(each.settings for each in translations.values()):
        return file, translations
    document = merge_document(msgspec.to_builtins(file), translations)
    try:
        config = build_config(document, "")
    except ConfigError as error:
        raise DynamicConfigRefused(_with_object_field(str(error).removeprefix(": "), translations)) from None
    if problem := fits(config):
        raise DynamicConfigRefused(_with_object_field(problem, translations))
    return config, translations


def merge_document(document: Mapping[str, Any], translations: Mapping[str, Translation]) -> dict[str, Any]:
    """A settings document with these on top. Maps are merged by key, and plugins one by one; lists are replaced."""
    whole: dict[str, Any] = copy.deepcopy(dict(document))
    switches: dict[str, bool] = {}
    for translation in translations.values():
        for path, (value, _) in translation.settings.items():
            if path[: len(PLUGINS_PATH)] == PLUGINS_PATH:
                switches[path[-1]] = value
                continue
            at = whole
            for name in path[:-1]:
                if not at.get(name):
                    at[name] = {}
                at = at[name]
            # Its own: the next path may lead into it, and translations are kept.
            at[path[-1]] = copy.deepcopy(value)
    eviction = whole["eviction"]
    if switches:
        eviction["plugins"] = _switch_plugins(eviction["plugins"], switches)
    named = set(eviction["plugins"])
    if "*" in named:
        named |= DEFAULT_PLUGINS
    # A plugin that does not judge makes nobody leave, in a dry run or not: one object is for nodes with other plugins too.
    others = bool(eviction["pluginSockets"])
    eviction["dryRun"] = [
        name for name in eviction["dryRun"] if name == "*" or name in named or (others and name not in PLUGIN_NAMES)
    ]
    return whole


def _switch_plugins(plugins: list[str], switches: Mapping[str, bool]) -> list[str]:
    on = {name for name in PLUGIN_NAMES if name in plugins or ("*" in plugins and name in DEFAULT_PLUGINS)}
    on |= {name for name, wanted in switches.items() if wanted}
    on -= {name for name, wanted in switches.items() if not wanted}
    return [name for name in PLUGIN_NAMES if name in on]


def _with_object_field(problem: str, translations: Mapping[str, Translation]) -> str:
    """The same with the object's own field, where a setting that it names is the object's."""
    named = problem.partition(":")[0]
    for resource, translation in translations.items():
        for path, value in translation.settings.items():
            setting = ".".join(path)
            if setting == named or setting.startswith(f"{named}.") or named.startswith(f"{setting}."):
                return f"{'.'.join((*CONFIG_KINDS[resource].root, value.field))}: as the setting {problem}"
    return f"with the settings of this node: {problem}"

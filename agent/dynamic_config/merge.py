"""Merges configuration objects over the settings file, field by field: object, then file, then default. An object that
does not validate together with the others is rejected as a whole, and the version applied before stays."""

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
    """One object for this node, as it was fetched."""

    resource: str
    """Plural name of its kind."""
    key: str
    """Key of the object: `namespace/name`, or the name alone."""
    hash: str
    """Hash of its content in CustomNodeConfig."""
    since_wall_ns: int
    """CLOCK_REALTIME when it was fetched."""
    body: Mapping[str, Any]
    """Its `spec` and `status`."""

    def same(self, other: ConfigObject | None) -> bool:
        """Return whether it is the same content of the same object."""
        return other is not None and (self.resource, self.key, self.hash) == (other.resource, other.key, other.hash)


class SettingOrigin(NamedTuple):
    """The object and field that set a setting."""

    object: ConfigObject
    field: str


class ResolvedConfig(NamedTuple):
    """Effective settings and where they come from."""

    config: AgentConfig
    applied: Mapping[str, ConfigObject]
    """Applied objects, by resource."""
    problems: Mapping[str, str]
    """Why desired objects were rejected, by resource."""
    origins: Mapping[SettingPath, SettingOrigin]
    unused: Mapping[str, tuple[str, ...]]
    """Fields without effect, by resource."""


def resolve_config(
    file: AgentConfig, applied: Mapping[str, ConfigObject], desired: Mapping[str, ConfigObject], check_node: NodeCheck
) -> ResolvedConfig:
    """Return the settings of the file and the desired objects.

    `applied` are the objects in force until now, whose version stays if the desired one is rejected. Never raises for
    what an object says; the file alone must be valid.
    """
    accepted: dict[str, ConfigObject] = {}
    problems: dict[str, str] = {}
    retained = {resource: previous for resource, previous in applied.items() if resource in desired}
    try:
        _build_resolved(file, retained, check_node)
        accepted = dict(retained)
    except DynamicConfigRefused:
        # The file or the machine changed since they were applied: accept them one by one, as far as they are valid.
        for resource, previous in retained.items():
            problems |= _try_object(file, accepted, resource, previous, check_node)
    for resource in CONFIG_KINDS:
        candidate = desired.get(resource)
        if candidate is not None and not candidate.same(accepted.get(resource)):
            problems.pop(resource, None)
            problems |= _try_object(file, accepted, resource, candidate, check_node)
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
    file: AgentConfig, accepted: dict[str, ConfigObject], resource: str, candidate: ConfigObject, check_node: NodeCheck
) -> dict[str, str]:
    """Accept the object if it is valid together with the others; else return why it is not."""
    try:
        _build_resolved(file, {**accepted, resource: candidate}, check_node)
    except DynamicConfigRefused as error:
        return {resource: str(error)}
    accepted[resource] = candidate
    return {}


def _build_resolved(
    file: AgentConfig, objects: Mapping[str, ConfigObject], check_node: NodeCheck
) -> tuple[AgentConfig, dict[str, Translation]]:
    """Return settings and translations. Raises DynamicConfigRefused, with the object's field if one is the cause."""
    # In the order of CONFIG_KINDS, so that the result does not depend on the order of arrival.
    translations = {
        name: translate_object(kind, objects[name].body) for name, kind in CONFIG_KINDS.items() if name in objects
    }
    if not any(each.settings for each in translations.values()):
        return file, translations
    document = merge_document(msgspec.to_builtins(file), translations)
    try:
        config = build_config(document, "")
    except ConfigError as error:
        raise DynamicConfigRefused(_with_object_field(str(error).removeprefix(": "), translations)) from None
    if problem := check_node(config):
        raise DynamicConfigRefused(_with_object_field(problem, translations))
    return config, translations


def merge_document(document: Mapping[str, Any], translations: Mapping[str, Translation]) -> dict[str, Any]:
    """Merge translations into a settings document. Maps are merged by key, plugins one by one; lists are replaced."""
    merged: dict[str, Any] = copy.deepcopy(dict(document))
    switches: dict[str, bool] = {}
    for translation in translations.values():
        for path, (value, _) in translation.settings.items():
            if path[: len(PLUGINS_PATH)] == PLUGINS_PATH:
                switches[path[-1]] = value
                continue
            section = merged
            for name in path[:-1]:
                if not section.get(name):
                    section[name] = {}
                section = section[name]
            # Copy: the next path may lead into the value, and translations are kept.
            section[path[-1]] = copy.deepcopy(value)
    eviction = merged["eviction"]
    if switches:
        eviction["plugins"] = _switch_plugins(eviction["plugins"], switches)
    running = set(eviction["plugins"])
    if "*" in running:
        running |= DEFAULT_PLUGINS
    # Drop plugins that do not run here: one object also serves nodes with other plugins.
    has_external_plugins = bool(eviction["pluginSockets"])
    eviction["dryRun"] = [
        name
        for name in eviction["dryRun"]
        if name == "*" or name in running or (has_external_plugins and name not in PLUGIN_NAMES)
    ]
    return merged


def _switch_plugins(plugins: list[str], switches: Mapping[str, bool]) -> list[str]:
    on = {name for name in PLUGIN_NAMES if name in plugins or ("*" in plugins and name in DEFAULT_PLUGINS)}
    on |= {name for name, enabled in switches.items() if enabled}
    on -= {name for name, enabled in switches.items() if not enabled}
    return [name for name in PLUGIN_NAMES if name in on]


def _with_object_field(problem: str, translations: Mapping[str, Translation]) -> str:
    """Prefix a problem with the object's own field, if an object set the setting that it names."""
    setting_named = problem.partition(":")[0]
    for resource, translation in translations.items():
        for path, value in translation.settings.items():
            setting = ".".join(path)
            if (
                setting == setting_named
                or setting.startswith(f"{setting_named}.")
                or setting_named.startswith(f"{setting}.")
            ):
                return f"{'.'.join((*CONFIG_KINDS[resource].root, value.field))}: as the setting {problem}"
    return f"with the settings of this node: {problem}"

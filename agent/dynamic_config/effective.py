"""Lists every setting with its effective value, its source and since when it holds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from agent.config.config import AgentConfig
from agent.config.loader import SettingDocuments
from agent.dynamic_config.mappings.field_mapping import SettingPath
from agent.dynamic_config.merge import ConfigObject, ResolvedConfig, SettingOrigin
from agent.dynamic_config.translate import CONFIG_KINDS
from api.diagnostics import AppliedConfigObject, EffectiveConfiguration, EffectiveSetting

_PLAIN_SCALAR = re.compile(r"[A-Za-z_/.][\w/.-]*( [A-Za-z][\w/.-]*)*", re.ASCII)
_YAML_KEYWORDS = frozenset(("true", "false", "null", "yes", "no", "on", "off"))
"""Words that YAML reads as something else than text."""


def format_flow_yaml(value: object) -> str:
    """Return a value as YAML of one line."""
    if isinstance(value, msgspec.Struct):
        value = {key: item for key, item in _encoded_fields(value) if item != _field_default(type(value), key)}
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{format_flow_yaml(key)}: {format_flow_yaml(item)}' for key, item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(format_flow_yaml, value))}]"
    if isinstance(value, str):
        return (
            str(value) if _PLAIN_SCALAR.fullmatch(value) and value.lower() not in _YAML_KEYWORDS else json.dumps(value)
        )
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value)


def _encoded_fields(value: msgspec.Struct) -> Iterator[tuple[str, object]]:
    for field in msgspec.structs.fields(value):
        yield field.encode_name, getattr(value, field.name)


def _field_default(kind: type[msgspec.Struct], key: str) -> object:
    field = next(field for field in msgspec.structs.fields(kind) if field.encode_name == key)
    return field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default


def effective_configuration(
    resolved: ResolvedConfig,
    documents: SettingDocuments,
    started_wall_ns: int,
    desired: Mapping[str, ConfigObject] | None = None,
) -> EffectiveConfiguration:
    """Return every setting with its source, and all objects. `documents` are the settings of the node by source, in
    force since `started_wall_ns`."""
    return EffectiveConfiguration(
        settings=tuple(
            _setting(path, value, resolved.origins, documents, started_wall_ns)
            for path, value in setting_leaves(resolved.config)
        ),
        objects=tuple(_applied_objects(resolved, desired or {})),
    )


def setting_leaves(config: AgentConfig) -> Iterator[tuple[SettingPath, Any]]:
    """Yield every setting that is no section, in the order of docs/settings.md."""
    yield from _section_leaves(config, ())


def _section_leaves(section: msgspec.Struct, above: SettingPath) -> Iterator[tuple[SettingPath, Any]]:
    inner = []
    for field in msgspec.structs.fields(type(section)):
        value, path = getattr(section, field.name), (*above, field.encode_name)
        if isinstance(value, msgspec.Struct):
            inner.append((value, path))
        else:
            yield path, value
    for value, path in inner:
        yield from _section_leaves(value, path)


def _setting(
    path: SettingPath,
    value: Any,
    origins: Mapping[SettingPath, SettingOrigin],
    documents: SettingDocuments,
    started_wall_ns: int,
) -> EffectiveSetting:
    name, shown = ".".join(path), "unset" if value is None else format_flow_yaml(msgspec.to_builtins(value))
    # Maps and the list of plugins are merged by key: name the latest object. An amount (`10%`) is set as a whole.
    origins_of_path = [origin for key, origin in origins.items() if key[: len(path)] == path or path[: len(key)] == key]
    if origins_of_path:
        latest = max(origins_of_path, key=lambda origin: origin.object.since_wall_ns)
        return EffectiveSetting(
            name=name,
            value=shown,
            source=CONFIG_KINDS[latest.object.resource].kind,
            object=latest.object.key,
            hash=latest.object.hash,
            field=".".join((*CONFIG_KINDS[latest.object.resource].root, latest.field)),
            since_wall_ns=latest.object.since_wall_ns,
        )
    for source, document in documents.items():
        if _is_set(document, path):
            return EffectiveSetting(name=name, value=shown, source=source, since_wall_ns=started_wall_ns)
    return EffectiveSetting(name=name, value=shown, source="default")


def _is_set(document: Any, path: SettingPath) -> bool:
    for name in path:
        if not isinstance(document, Mapping) or name not in document:
            return False
        document = document[name]
    return True


def _applied_objects(resolved: ResolvedConfig, desired: Mapping[str, ConfigObject]) -> Iterator[AppliedConfigObject]:
    for resource, kind in CONFIG_KINDS.items():
        applied = resolved.applied.get(resource)
        if applied is not None:
            yield AppliedConfigObject(
                kind=kind.kind,
                object=applied.key,
                hash=applied.hash,
                since_wall_ns=applied.since_wall_ns,
                unused=resolved.unused.get(resource, ()),
            )
        if problem := resolved.problems.get(resource):
            rejected = desired.get(resource)
            yield AppliedConfigObject(
                kind=kind.kind,
                object="" if rejected is None else rejected.key,
                hash="" if rejected is None else rejected.hash,
                problem=problem,
            )

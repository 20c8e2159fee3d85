"""Every setting with its value, where it came from and since when. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from agent.config import Config
from agent.dynamic.overlay import Object, Origin, Settled
from agent.dynamic.rules import Path
from agent.dynamic.translate import GRAMMARS
from agent.reference import flow
from api.configuration import Configuration, ObeyedObject, Setting


def configuration(
    settled: Settled, file: Mapping[str, Any], started_wall_ns: int, wanted: Mapping[str, Object] | None = None
) -> Configuration:
    """All of it. `file` is what the settings file itself says, in force since `started_wall_ns`."""
    return Configuration(
        settings=tuple(
            _setting(path, value, settled.origins, file, started_wall_ns) for path, value in leaves(settled.config)
        ),
        objects=tuple(_objects(settled, wanted or {})),
    )


def leaves(config: Config) -> Iterator[tuple[Path, Any]]:
    """Every setting that is no section, in the order of docs/settings.md."""
    yield from _leaves(config, ())


def _leaves(section: msgspec.Struct, above: Path) -> Iterator[tuple[Path, Any]]:
    inner = []
    for field in msgspec.structs.fields(type(section)):
        value, path = getattr(section, field.name), (*above, field.encode_name)
        if isinstance(value, msgspec.Struct):
            inner.append((value, path))
        else:
            yield path, value
    for value, path in inner:
        yield from _leaves(value, path)


def _setting(
    path: Path, value: Any, origins: Mapping[Path, Origin], file: Mapping[str, Any], started_wall_ns: int
) -> Setting:
    name, shown = ".".join(path), "unset" if value is None else flow(msgspec.to_builtins(value))
    # Maps, and the list of plugins, are put together key by key: who came last is named. An amount (`10%`) is set as a whole.
    said = [one for key, one in origins.items() if key[: len(path)] == path or path[: len(key)] == key]
    if said:
        latest = max(said, key=lambda one: one.object.since_wall_ns)
        return Setting(
            name=name,
            value=shown,
            source=GRAMMARS[latest.object.resource].kind,
            object=latest.object.key,
            hash=latest.object.hash,
            field=".".join((*GRAMMARS[latest.object.resource].root, latest.field)),
            since_wall_ns=latest.object.since_wall_ns,
        )
    if _says(file, path):
        return Setting(name=name, value=shown, source="file", since_wall_ns=started_wall_ns)
    return Setting(name=name, value=shown, source="default")


def _says(file: Any, path: Path) -> bool:
    for name in path:
        if not isinstance(file, Mapping) or name not in file:
            return False
        file = file[name]
    return True


def _objects(settled: Settled, wanted: Mapping[str, Object]) -> Iterator[ObeyedObject]:
    for resource, grammar in GRAMMARS.items():
        obeyed = settled.obeyed.get(resource)
        if obeyed is not None:
            yield ObeyedObject(
                kind=grammar.kind,
                object=obeyed.key,
                hash=obeyed.hash,
                since_wall_ns=obeyed.since_wall_ns,
                unused=settled.unused.get(resource, ()),
            )
        if problem := settled.problems.get(resource):
            refused = wanted.get(resource)
            yield ObeyedObject(
                kind=grammar.kind,
                object="" if refused is None else refused.key,
                hash="" if refused is None else refused.hash,
                problem=problem,
            )

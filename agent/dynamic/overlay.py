"""Objects of the cluster laid over the settings file: object, then file, then default, field by field. Pure.

What came last is tried together with what is obeyed already. Where that cannot hold, what was obeyed before stands, as a
whole: half of an object would be a configuration that nobody wrote.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from agent.config import Config
from agent.config.eviction import NAMES, USUAL
from agent.dynamic.rules import PLUGINS, Path
from agent.dynamic.translate import GRAMMARS, Refused, Translation, translate
from agent.settings import ConfigError, built

Fits = Callable[[Config], str]
"""The first setting that this node cannot hold; empty where all can be held (agent.fitting.misfit)."""


class Object(msgspec.Struct, frozen=True, kw_only=True):
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

    def same(self, other: Object | None) -> bool:
        """Whether it is the same content of the same object."""
        return other is not None and (self.resource, self.key, self.hash) == (other.resource, other.key, other.hash)


class Origin(NamedTuple):
    """Who says what a setting is."""

    object: Object
    field: str


class Settled(NamedTuple):
    """What is in force."""

    config: Config
    obeyed: Mapping[str, Object]
    """By resource."""
    problems: Mapping[str, str]
    """Of those that were wanted and cannot be obeyed, by resource."""
    origins: Mapping[Path, Origin]
    unused: Mapping[str, tuple[str, ...]]
    """Fields that nothing here obeys, by resource."""


def settle(file: Config, before: Mapping[str, Object], wanted: Mapping[str, Object], fits: Fits) -> Settled:
    """The settings that come of the file and of these objects. `before` were obeyed until now; those that nobody wants any
    longer are not obeyed any longer. Never raises for what an object says; the file alone must hold."""
    accepted: dict[str, Object] = {}
    problems: dict[str, str] = {}
    kept = {resource: old for resource, old in before.items() if resource in wanted}
    try:
        _built(file, kept, fits)
        accepted = dict(kept)
    except Refused:
        # Another file, or another machine, than when they were obeyed: one after the other, as far as they go.
        for resource, old in kept.items():
            problems |= _tried(file, accepted, resource, old, fits)
    for resource in GRAMMARS:
        new = wanted.get(resource)
        if new is not None and not new.same(accepted.get(resource)):
            problems.pop(resource, None)
            problems |= _tried(file, accepted, resource, new, fits)
    config, translations = _built(file, accepted, fits)
    origins = {
        path: Origin(accepted[resource], value.field)
        for resource, translation in translations.items()
        for path, value in translation.settings.items()
    }
    return Settled(config, accepted, problems, origins, {name: each.unused for name, each in translations.items()})


def _tried(file: Config, accepted: dict[str, Object], resource: str, new: Object, fits: Fits) -> dict[str, str]:
    """Accept the object if it can be obeyed together with the others; else why it cannot."""
    try:
        _built(file, {**accepted, resource: new}, fits)
    except Refused as error:
        return {resource: str(error)}
    accepted[resource] = new
    return {}


def _built(file: Config, objects: Mapping[str, Object], fits: Fits) -> tuple[Config, dict[str, Translation]]:
    """Raises Refused, with the object's field where one is to blame."""
    # In the order of the grammars, so that it never depends on who came first.
    translations = {
        name: translate(grammar, objects[name].body) for name, grammar in GRAMMARS.items() if name in objects
    }
    if not any(each.settings for each in translations.values()):
        return file, translations
    document = merged(msgspec.to_builtins(file), translations)
    try:
        config = built(document, "")
    except ConfigError as error:
        raise Refused(_blamed(str(error).removeprefix(": "), translations)) from None
    if problem := fits(config):
        raise Refused(_blamed(problem, translations))
    return config, translations


def merged(document: Mapping[str, Any], translations: Mapping[str, Translation]) -> dict[str, Any]:
    """A settings document with these on top. Maps are merged by key, and plugins one by one; lists are replaced."""
    whole: dict[str, Any] = copy.deepcopy(dict(document))
    switches: dict[str, bool] = {}
    for translation in translations.values():
        for path, (value, _) in translation.settings.items():
            if path[: len(PLUGINS)] == PLUGINS:
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
        eviction["plugins"] = _switched(eviction["plugins"], switches)
    named = set(eviction["plugins"])
    if "*" in named:
        named |= USUAL
    # A plugin that does not judge makes nobody leave, in a dry run or not: one object is for nodes with other plugins too.
    others = bool(eviction["pluginSockets"])
    eviction["dryRun"] = [
        name for name in eviction["dryRun"] if name == "*" or name in named or (others and name not in NAMES)
    ]
    return whole


def _switched(plugins: list[str], switches: Mapping[str, bool]) -> list[str]:
    on = {name for name in NAMES if name in plugins or ("*" in plugins and name in USUAL)}
    on |= {name for name, wanted in switches.items() if wanted}
    on -= {name for name, wanted in switches.items() if not wanted}
    return [name for name in NAMES if name in on]


def _blamed(problem: str, translations: Mapping[str, Translation]) -> str:
    """The same with the object's own field, where a setting that it names is the object's."""
    named = problem.partition(":")[0]
    for resource, translation in translations.items():
        for path, value in translation.settings.items():
            setting = ".".join(path)
            if setting == named or setting.startswith(f"{named}.") or named.startswith(f"{setting}."):
                return f"{'.'.join((*GRAMMARS[resource].root, value.field))}: as the setting {problem}"
    return f"with the settings of this node: {problem}"

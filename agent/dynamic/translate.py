"""One object of the cluster's configuration as settings, or why it cannot be obeyed. Pure.

What is said comes from the API server, which checks it against the CRD, unless somebody's CRD is older or looser: nothing is
taken on trust here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args

import msgspec

from agent.complaints import complaint
from agent.dynamic import adminqos, eviction, offloading, others
from agent.dynamic.rules import Path, Rule, Unused, dig
from api.crds.adminqos import AdminQoSConfig
from api.crds.configs import AuthConfig, MemoryBandwidthConfig, PowerManagementConfig, StrategyGroupStatus
from api.crds.irqtuning import IRQTuningConfig
from api.crds.offloading import OffloadingConfig

GROUP, VERSION = "config.katalyst.kubewharf.io", "v1alpha1"
_OF_STATUS = frozenset(
    ("targetNodes", "canaryNodes", "updatedTargetNodes", "updatedNodes", "currentHash", "collisionCount",
     "observedGeneration", "conditions")
)  # fmt: skip
"""How far a rollout is; no configuration."""
LONGEST, MOST, IN_ALL = 4096, 4096, 8192
"""Characters of a text, entries of a list or map, and of all of them together. What is obeyed is in memory, on disk and on the
page of every node, and is made sense of between two rounds."""


class Refused(ValueError):
    """An object that cannot be obeyed; the message names the field and the remedy."""


class Value(NamedTuple):
    """What one setting is to be, and the field that says so."""

    value: Any
    field: str


class Translation(NamedTuple):
    """`settings` by path; `unused` are fields that nothing here obeys, with the reason."""

    settings: Mapping[Path, Value]
    unused: tuple[str, ...]


class Grammar(NamedTuple):
    """How objects of one kind are read."""

    kind: str
    root: tuple[str, ...]
    """Where in the object the configuration is."""
    type: type[msgspec.Struct]
    rules: tuple[Rule, ...] = ()
    unused: tuple[Unused, ...] = ()
    all_unused: str = ""
    """Why nothing of it is obeyed, where nothing is; such objects need not be fetched."""


_CONFIG = ("spec", "config")
GRAMMARS: Mapping[str, Grammar] = {
    f"{each.kind.lower()}s": each
    for each in (
        Grammar(
            "AdminQoSConfiguration", _CONFIG, AdminQoSConfig,
            (*adminqos.RULES, *eviction.RULES), (*adminqos.UNUSED, *eviction.UNUSED),
        ),
        Grammar("TransparentMemoryOffloadingConfiguration", _CONFIG, OffloadingConfig, offloading.RULES),
        Grammar("StrategyGroup", ("status",), StrategyGroupStatus, others.STRATEGY_RULES),
        Grammar(
            "PowerManagementConfiguration", _CONFIG, PowerManagementConfig, others.POWER_RULES, others.POWER_UNUSED
        ),
        Grammar("AuthConfiguration", _CONFIG, AuthConfig, all_unused=others.AUTH_UNUSED),
        Grammar("IRQTuningConfiguration", _CONFIG, IRQTuningConfig, all_unused=others.IRQ_UNUSED),
        Grammar("MemoryBandwidthConfiguration", _CONFIG, MemoryBandwidthConfig, all_unused=others.BANDWIDTH_UNUSED),
    )
}  # fmt: skip
"""By the name of the resource. The order is that of precedence: where two kinds set one setting, the later one counts."""


def translate(grammar: Grammar, body: Any) -> Translation:
    """The settings that an object says. `body` is the whole object as decoded JSON. Raises Refused."""
    said, where = body, ".".join(grammar.root)
    for name in grammar.root:
        said = said.get(name) if isinstance(said, Mapping) else None
    _measure(said, where)
    config = _typed(grammar, said, where)
    settings: dict[Path, Value] = {}
    for rule in grammar.rules:
        found = dig(config, rule.field)
        if found is None:
            continue
        try:
            settings |= {path: Value(value, rule.field) for path, value in rule.put(found)}
        except ValueError as error:
            raise Refused(f"{where}.{rule.field}: {error}") from None
    return Translation(settings, tuple(_unused(grammar, config, said)))


def _measure(said: Any, where: str) -> None:
    """Raises Refused for what is out of proportion, wherever in the object, known or not."""
    left, entries = [(said, where)], 0
    while left:
        part, path = left.pop()
        if isinstance(part, str) and len(part) > LONGEST:
            raise Refused(f"{path}: has {len(part)} characters, and at most {LONGEST} are taken: shorten it")
        if isinstance(part, Mapping | list | tuple) and len(part) > MOST:
            raise Refused(f"{path}: has {len(part)} entries, and at most {MOST} are taken: leave some out")
        entries += len(part) if isinstance(part, Mapping | list | tuple) else 0
        if entries > IN_ALL:
            raise Refused(f"{where}: has more than {IN_ALL} entries in its lists and maps together: leave some out")
        if isinstance(part, Mapping):
            left += [(value, f"{path}.{name:.60}") for name, value in part.items()]
        elif isinstance(part, list | tuple):
            left += [(value, f"{path}[{number}]") for number, value in enumerate(part)]


def _typed(grammar: Grammar, said: Any, where: str) -> Mapping[str, Any]:
    """The configuration as its type has it: numbers that were written as 3.0 are whole, and what is null is absent."""
    if said is None:
        return {}
    try:
        typed = msgspec.convert(said, grammar.type)
    except msgspec.ValidationError as error:
        found = complaint(error, said, grammar.type)
        raise Refused(f"{where}: {found[11:]}" if found.startswith("top level: ") else f"{where}.{found}") from None
    builtins: Mapping[str, Any] = msgspec.to_builtins(typed)
    return builtins


def _unused(grammar: Grammar, config: Mapping[str, Any], raw: Any) -> Iterator[str]:
    if grammar.all_unused:
        yield f"all of it: {grammar.all_unused}"
        return
    told: set[str] = set()
    for each in grammar.unused:
        # A field's own reason goes before that of the whole section.
        if dig(config, each.field) is not None and not any(field.startswith(each.field) for field in told):
            told.add(each.field)
            yield f"{each.field}: {each.why}"
    if grammar.kind == "StrategyGroup":
        yield from (
            f"enabledStrategies: {each}" for each in others.unknown_strategies(config.get("enabledStrategies") or ())
        )
    yield from (
        f"{path}: no such field is known here" for path in _unknown(raw, grammar.type) if path not in _OF_STATUS
    )


def _unknown(document: Any, kind: Any, path: str = "") -> Iterator[str]:
    """Names that the type does not have: of a newer Katalyst's, or mistakes that a loose CRD let through."""
    struct = next((part for part in (kind, *get_args(kind)) if hasattr(part, "__struct_fields__")), None)
    if struct is None or not isinstance(document, Mapping):
        return
    fields = {each.encode_name: each.type for each in msgspec.structs.fields(struct)}
    for name, value in document.items():
        below = f"{path}.{name:.60}".lstrip(".")
        if name in fields:
            yield from _unknown(value, fields[name], below)
        elif value is not None:
            yield below

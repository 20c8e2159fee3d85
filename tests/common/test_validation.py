"""Every place of every type that people write: what is wrong there is said of that place, and of no other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import EnumType
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import pytest

from agent.config.config import AgentConfig
from agent.dynamic_config.translate import CONFIG_KINDS
from common.validation import describe_validation_error
from controller.settings import ControllerConfig

DEEPEST = 12


def a_good(kind: Any) -> Any:
    """The least that is one."""
    origin, args = get_origin(kind), get_args(kind)
    if hasattr(kind, "__struct_fields__"):
        return {field.encode_name: a_good(field.type) for field in msgspec.structs.fields(kind) if field.required}
    if origin in (Union, UnionType):
        return a_good(args[0])
    if origin is Literal:
        return args[0]
    if isinstance(kind, EnumType):
        return next(iter(kind)).value
    if origin is tuple and args[-1] is not Ellipsis:
        return [a_good(part) for part in args]
    candidates = (True, 1, 0.5, "x", "1Gi", "10%", "08:00", [], {}, *([[a_good(args[0])]] if origin is tuple else ()))
    return next(each for each in candidates if fits(each, kind))


def fits(value: object, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def misfits(kind: Any, depth: int = 0) -> Iterator[tuple[Any, str]]:
    """Documents that are wrong in one place, and that place: in lists and maps it is in the second item."""
    origin, args = get_origin(kind), get_args(kind)
    if depth > DEEPEST or kind is Any:
        return
    if origin is Annotated:
        yield from misfits(args[0], depth)
    elif origin in (Union, UnionType):
        for part in args:
            yield from (misfit for misfit in misfits(part, depth) if misfit[1])
        wrongs: tuple[Any, ...] = ([], 5)
        yield next(each for each in wrongs if not fits(each, kind)), ""
    else:
        yield from inside(kind, depth + 1)
        plain = not hasattr(kind, "__struct_fields__") and origin in (None, Literal)
        yield ([] if plain else 5), ""


def inside(kind: Any, depth: int) -> Iterator[tuple[Any, str]]:
    origin, args = get_origin(kind), get_args(kind)
    if hasattr(kind, "__struct_fields__"):
        good = a_good(kind)
        for field in msgspec.structs.fields(kind):
            for document, place in misfits(field.type, depth):
                yield {**good, field.encode_name: document}, f".{field.encode_name}{place}"
    elif origin is tuple:
        rest = [] if args[-1] is Ellipsis else [a_good(part) for part in args[2:]]
        for document, place in misfits(args[0], depth):
            yield [a_good(args[0]), document, *rest], f"[1]{place}"
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        keys = [each for each in (a_good(args[0]), *get_args(args[0]), "two") if fits(each, args[0])]
        for document, place in misfits(args[1], depth):
            yield {keys[0]: a_good(args[1]), keys[-1]: document}, f".{keys[-1]}{place}"


@pytest.mark.parametrize(
    "kind",
    [AgentConfig, ControllerConfig, *(each.type for each in CONFIG_KINDS.values())],
    ids=lambda kind: kind.__module__,
)
def test_what_is_wrong_is_said_of_the_very_place(kind: Any) -> None:
    places = 0
    for document, place in misfits(kind):
        with pytest.raises(msgspec.ValidationError) as raised:
            msgspec.convert(document, kind)
        description = describe_validation_error(raised.value, document, kind)
        assert description.startswith(f"{place.lstrip('.') or 'top level'}: Expected "), (description, document)
        places += 1
    assert places >= len(msgspec.structs.fields(kind))

"""YAML that a person wrote, made safe to decode: bounded in size, depth and number of parts, and meaning one thing only.

PyYAML silently keeps the last of two equal keys, and shares what an alias names so that ten lines can stand for a
billion values. Here both are refused, with the line, before anything is built. The one door to PyYAML's own interface;
values are decoded by msgspec.yaml.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

LARGEST_BYTES = 1 << 20
DEEPEST = 32
MOST_PARTS = 50_000
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class DocumentError(ValueError):
    """The text is not one plain YAML document; the message has the line and the remedy, not the file's name."""


def check(text: str) -> None:
    """Raise DocumentError unless the text is one YAML document without aliases or repeated keys, of bounded size."""
    if len(text) > LARGEST_BYTES:
        raise DocumentError(f"larger than {LARGEST_BYTES} bytes: split it, or see whether this is the right file")
    try:
        _check_events(yaml.parse(text, Loader=_LOADER))
    except yaml.MarkedYAMLError as error:
        raise DocumentError(f"{_line(error.problem_mark)}not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise DocumentError(f"not YAML: {' '.join(str(error).split())}") from None
    except UnicodeEncodeError as error:
        raise DocumentError(f"not text: {error.reason}") from None
    except RecursionError:
        raise DocumentError(f"nested deeper than {DEEPEST} levels") from None


def _check_events(events: Iterator[Any]) -> None:
    documents = 0
    stack: list[_Level] = []
    for parts, event in enumerate(events):
        where = _line(event.start_mark)
        if parts > MOST_PARTS:
            raise DocumentError(f"{where}more than {MOST_PARTS} parts: split it, or see whether this is the right file")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise DocumentError(f"{where}anchors and aliases (& and *) are not taken: write the values out")
        if getattr(event, "tag", None):
            raise DocumentError(f"{where}tags such as !!int are not taken: write the plain value")
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise DocumentError(f"{where}a second document begins: keep only one, without ---")
        if isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            stack.pop()
        elif isinstance(event, yaml.NodeEvent):
            if stack:
                stack[-1].see(event, where)
            if isinstance(event, yaml.CollectionStartEvent):
                stack.append(_Level(isinstance(event, yaml.MappingStartEvent)))
                if len(stack) > DEEPEST:
                    raise DocumentError(f"{where}nested deeper than {DEEPEST} levels")


class _Level:
    # One open mapping or list; in a mapping, nodes are keys and values by turns.
    __slots__ = ("_keys", "_mapping", "_nodes")

    def __init__(self, mapping: bool) -> None:
        self._mapping, self._nodes = mapping, 0
        self._keys: set[str] = set()

    def see(self, event: Any, where: str) -> None:
        is_key = self._mapping and self._nodes % 2 == 0
        self._nodes += 1
        if not is_key:
            return
        if not isinstance(event, yaml.ScalarEvent):
            raise DocumentError(f"{where}a key must be a plain word")
        if event.value in self._keys:
            raise DocumentError(f"{where}key {event.value[:80]!r} is there twice: remove one")
        self._keys.add(event.value)


def _line(mark: Any) -> str:
    return f"line {mark.line + 1}: " if mark is not None else ""

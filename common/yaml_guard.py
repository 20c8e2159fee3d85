"""Checks that YAML text is one plain document of bounded size and depth before msgspec decodes it.
PyYAML keeps the last of two equal keys and expands aliases; both are rejected with the line number. The only importer
of yaml.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from api.text import quote

MAX_DOCUMENT_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_EVENTS = 50_000
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class YamlDocumentError(ValueError):
    """The text is not one plain YAML document; the message has line and remedy, but not the name of the file."""


def check_yaml(text: str) -> None:
    """Raise YamlDocumentError unless the text is one bounded YAML document without aliases or repeated keys."""
    if len(text) > MAX_DOCUMENT_BYTES:
        raise YamlDocumentError(
            f"larger than {MAX_DOCUMENT_BYTES} bytes: split it, or check whether this is the right file"
        )
    try:
        _check_events(yaml.parse(text, Loader=_LOADER))
    except yaml.MarkedYAMLError as error:
        raise YamlDocumentError(
            f"{_line_prefix(error.problem_mark)}not YAML: {error.problem or error.context}"
        ) from None
    except yaml.YAMLError as error:
        raise YamlDocumentError(f"not YAML: {' '.join(str(error).split())}") from None
    except UnicodeEncodeError as error:
        raise YamlDocumentError(f"not text: {error.reason}") from None
    except RecursionError:
        raise YamlDocumentError(f"nested deeper than {MAX_DEPTH} levels") from None


def _check_events(events: Iterator[Any]) -> None:
    documents = 0
    stack: list[_OpenCollection] = []
    for parts, event in enumerate(events):
        where = _line_prefix(event.start_mark)
        if parts > MAX_EVENTS:
            raise YamlDocumentError(
                f"{where}more than {MAX_EVENTS} parts: split it, or check whether this is the right file"
            )
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise YamlDocumentError(f"{where}anchors and aliases (& and *) are not supported: write the values out")
        if getattr(event, "tag", None):
            raise YamlDocumentError(f"{where}tags such as !!int are not supported: write the plain value")
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise YamlDocumentError(f"{where}a second document begins: keep only one, without ---")
        if isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            stack.pop()
        elif isinstance(event, yaml.NodeEvent):
            if stack:
                stack[-1].see(event, where)
            if isinstance(event, yaml.CollectionStartEvent):
                stack.append(_OpenCollection(isinstance(event, yaml.MappingStartEvent)))
                if len(stack) > MAX_DEPTH:
                    raise YamlDocumentError(f"{where}nested deeper than {MAX_DEPTH} levels")


class _OpenCollection:
    # Open mapping or list; the nodes of a mapping alternate between keys and values.
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
            raise YamlDocumentError(f"{where}a key must be a plain word")
        if event.value in self._keys:
            raise YamlDocumentError(f"{where}key {quote(event.value)} occurs twice: remove one")
        self._keys.add(event.value)


def _line_prefix(mark: Any) -> str:
    return f"line {mark.line + 1}: " if mark is not None else ""

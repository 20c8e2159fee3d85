"""Parses label selectors in kubectl's syntax, matches them against labels and detects overlap."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from api.text import quote

IN, NOT_IN, EXISTS, ABSENT = "in", "notin", "exists", "!"
_MAX_SELECTOR_LETTERS = 4096
_NAME = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(rf"(?:[a-z0-9](?:[-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_NAME}")
_VALUE = re.compile(rf"(?:{_NAME})?")
_TERM = re.compile(
    r"""\s* (?: (?P<absent>!)\s*(?P<not>[^\s!=,()<>]+)
        | (?P<key>[^\s!=,()<>]+) \s*
          (?: (?P<equal>==|=|!=) \s* (?P<value>[^\s!=,()<>]*)
            | (?P<set>in|notin) \s* \( (?P<values>[^()]*) \)
          )?
        ) \s* (?:,|$)""",
    re.VERBOSE,
)


def is_label_key(text: str) -> bool:
    """Return whether a label or an annotation may have this key."""
    return _KEY.fullmatch(text) is not None


def is_label_value(text: str) -> bool:
    """Return whether a label may have this value."""
    return _VALUE.fullmatch(text) is not None


class LabelRequirement(msgspec.Struct, frozen=True):
    """Requirement on one label. `=` and `!=` are stored as `in` and `notin` with one value."""

    key: str
    operator: str
    values: frozenset[str] = frozenset()

    def matches_value(self, value: str | None) -> bool:
        """Whether the label may have this value, None if it is not set. A missing label satisfies `notin`."""
        if self.operator == EXISTS:
            return value is not None
        if self.operator == ABSENT:
            return value is None
        return (value in self.values) == (self.operator == IN)


class LabelSelectorSet(msgspec.Struct, frozen=True):
    """Label selector; all requirements have to match."""

    requirements: tuple[LabelRequirement, ...] = ()

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(requirement.key for requirement in self.requirements)

    def matches(self, labels: Mapping[str, str]) -> bool:
        return all(requirement.matches_value(labels.get(requirement.key)) for requirement in self.requirements)

    def for_key(self, key: str) -> list[LabelRequirement]:
        return [requirement for requirement in self.requirements if requirement.key == key]


def parse_selector(text: str) -> LabelSelectorSet:
    """Parse `a=b,c!=d,e in (f,g),h notin (i),j,!k`. Raises ValueError that quotes the text from the error on."""
    if len(text) > _MAX_SELECTOR_LETTERS:
        raise ValueError(f"the selector has {len(text)} characters; at most {_MAX_SELECTOR_LETTERS} are allowed")
    requirements: list[LabelRequirement] = []
    at = 0
    while at < len(text) and not (text[at:].isspace() and not requirements):
        match = _TERM.match(text, at)
        if match is None or match.end() == at:
            raise ValueError(
                f"{quote(text[at:], 60)} is no part of a selector; write a=b, a!=b, a in (b,c), a notin (b), a or !a"
            )
        requirements.append(_requirement(match))
        at = match.end()
    if text.rstrip().endswith(","):
        raise ValueError(f"{quote(text, 60)} ends with a comma; remove it")
    return LabelSelectorSet(tuple(requirements))


def selectors_overlap(first: LabelSelectorSet, second: LabelSelectorSet) -> bool:
    """Whether a node can match both selectors.

    Labels are independent of each other, so it can if every label has a value, or its absence, that both accept. All
    values that neither selector names behave alike, so one of them is tested.
    """
    for key in first.keys | second.keys:
        requirements = first.for_key(key) + second.for_key(key)
        values = {value for requirement in requirements for value in requirement.values}
        candidates: Iterable[str | None] = (*values, _unused_value(values), None)
        if not any(all(requirement.matches_value(value) for requirement in requirements) for value in candidates):
            return False
    return True


def _unused_value(values: set[str]) -> str:
    value = "other"
    while value in values:
        value += "-other"
    return value


def _requirement(match: re.Match[str]) -> LabelRequirement:
    key = match["not"] or match["key"]
    if not _KEY.fullmatch(key):
        raise ValueError(f"{quote(key, 60)} is no label key")
    if match["absent"]:
        return LabelRequirement(key, ABSENT)
    if match["set"]:
        values = frozenset(value.strip() for value in match["values"].split(","))
    elif match["equal"]:
        values = frozenset({match["value"]})
    else:
        return LabelRequirement(key, EXISTS)
    for value in values:
        if not _VALUE.fullmatch(value):
            raise ValueError(f"{key}: {quote(value, 60)} is no label value")
    return LabelRequirement(key, NOT_IN if match["equal"] == "!=" or match["set"] == "notin" else IN, values)

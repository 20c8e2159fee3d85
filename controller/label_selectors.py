"""Parses label selectors in kubectl's syntax, matches them against labels and detects overlap. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

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


class LabelRequirement(msgspec.Struct, frozen=True):
    """What one label must be. `values` are of `in` and `notin`, which `=` and `!=` are written as."""

    key: str
    operator: str
    values: frozenset[str] = frozenset()

    def matches_value(self, value: str | None) -> bool:
        """Whether the label may have this value; None where it is not set. Who has no label has none of the values."""
        if self.operator == EXISTS:
            return value is not None
        if self.operator == ABSENT:
            return value is None
        return (value in self.values) == (self.operator == IN)


class LabelSelectorSet(msgspec.Struct, frozen=True):
    """All of these."""

    requirements: tuple[LabelRequirement, ...] = ()

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(requirement.key for requirement in self.requirements)

    def matches(self, labels: Mapping[str, str]) -> bool:
        return all(requirement.matches_value(labels.get(requirement.key)) for requirement in self.requirements)

    def of(self, key: str) -> list[LabelRequirement]:
        return [requirement for requirement in self.requirements if requirement.key == key]


def parse_selector(text: str) -> LabelSelectorSet:
    """`a=b,c!=d,e in (f,g),h notin (i),j,!k`. Raises ValueError that shows where it ends to be one."""
    if len(text) > _MAX_SELECTOR_LETTERS:
        raise ValueError(f"a selector of {len(text)} letters; {_MAX_SELECTOR_LETTERS} are the most")
    requirements: list[LabelRequirement] = []
    at = 0
    while at < len(text) and not (text[at:].isspace() and not requirements):
        found = _TERM.match(text, at)
        if found is None or found.end() == at:
            raise ValueError(
                f"{text[at:]!r:.60} is no part of a selector; write a=b, a!=b, a in (b,c), a notin (b), a or !a"
            )
        requirements.append(_requirement(found))
        at = found.end()
    if text.rstrip().endswith(","):
        raise ValueError(f"{text!r:.60} ends with a comma; remove it")
    return LabelSelectorSet(tuple(requirements))


def selectors_overlap(one: LabelSelectorSet, other: LabelSelectorSet) -> bool:
    """Whether there can be a node that both match, whatever else it has.

    Labels do not depend on each other, so there is one when for each label there is a value, or its absence, that both take.
    Values that nobody names are all alike: one of them stands for all.
    """
    for key in one.keys | other.keys:
        requirements = one.of(key) + other.of(key)
        named = {value for requirement in requirements for value in requirement.values}
        candidates: Iterable[str | None] = (*named, _unused_value(named), None)
        if not any(all(requirement.matches_value(value) for requirement in requirements) for value in candidates):
            return False
    return True


def _unused_value(named: set[str]) -> str:
    value = "other"
    while value in named:
        value += "-other"
    return value


def _requirement(found: re.Match[str]) -> LabelRequirement:
    key = found["not"] or found["key"]
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key!r:.60} is no label key")
    if found["absent"]:
        return LabelRequirement(key, ABSENT)
    if found["set"]:
        values = frozenset(value.strip() for value in found["values"].split(","))
    elif found["equal"]:
        values = frozenset({found["value"]})
    else:
        return LabelRequirement(key, EXISTS)
    for value in values:
        if not _VALUE.fullmatch(value):
            raise ValueError(f"{key}: {value!r:.60} is no label value")
    return LabelRequirement(key, NOT_IN if found["equal"] == "!=" or found["set"] == "notin" else IN, values)

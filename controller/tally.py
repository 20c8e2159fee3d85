"""Numbers that the controllers keep for whoever watches them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from api.controller_catalogue import CONTROLLER_BY_NAME

Labels = tuple[str, ...]


class Tally:
    """Values by metric and labels, in the order of the catalogue's row. Written in the loop, and read there."""

    def __init__(self) -> None:
        self._values: dict[str, dict[Labels, float]] = {name: {} for name in CONTROLLER_BY_NAME}

    def count(self, name: str, *labels: str) -> None:
        """One more."""
        values = self._values[name]
        values[labels] = values.get(labels, 0) + 1

    def set(self, name: str, values: Iterable[tuple[Labels, float]], within: Labels = ()) -> None:
        """These are all values of a gauge, or all that begin with those labels: what is gone is no longer shown."""
        kept = {key: value for key, value in self._values[name].items() if within and key[: len(within)] != within}
        self._values[name] = kept | dict(values)

    def values(self, name: str) -> Mapping[Labels, float]:
        return self._values[name]

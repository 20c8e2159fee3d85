"""What is known of one resource: objects by key and by index, and what each list or event changed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Generic

import msgspec

from kube.objects import T

Index = Callable[[T], str]


class Change(msgspec.Struct, Generic[T], frozen=True):
    """One object was one thing and is another; None where there was or is none. `uid` tells a new one of the same name."""

    key: str
    old: T | None
    new: T | None


def followed(known: T | None, written: T) -> bool:
    """Whether what is known of an object is an earlier version of that very object. Versions are numbers that grow."""
    if known is None or known.metadata.uid != written.metadata.uid:
        return False
    before, after = known.metadata.resource_version or "", written.metadata.resource_version or ""
    return not (before.isdecimal() and after.isdecimal()) or int(before) < int(after)


class Store(Mapping[str, T]):
    """Objects by key. An index, where there is one, names the group of each object: pods by their node."""

    def __init__(self, index: Index[T] | None = None) -> None:
        self._objects: dict[str, T] = {}
        self._groups: dict[str, dict[str, None]] = {}
        self._index = index

    def __getitem__(self, key: str) -> T:
        return self._objects[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._objects)

    def __len__(self) -> int:
        return len(self._objects)

    def group(self, name: str) -> list[T]:
        """The objects that the index puts there."""
        return [self._objects[key] for key in self._groups.get(name, ())]

    def replace(self, listed: Mapping[str, T], keep: Collection[str] = ()) -> list[Change[T]]:
        """Everything as a list had it. What is gone since the last look is told as well, however it went; what has the same
        version is no change. Objects in `keep` are there and could not be read: they stay as they were."""
        gone = [key for key in self._objects if key not in listed and key not in keep]
        changes = [change for key in gone if (change := self.drop(key))]
        return changes + [change for key, new in listed.items() if (change := self.put(key, new))]

    def put(self, key: str, new: T) -> Change[T] | None:
        """None where that version is known already."""
        old = self._objects.get(key)
        version = new.metadata.resource_version
        if old is not None and version and old.metadata.resource_version == version:
            return None
        self._forget(key, old)
        self._objects[key] = new
        if self._index is not None and (group := self._index(new)):
            self._groups.setdefault(group, {})[key] = None
        return Change(key, old, new)

    def drop(self, key: str) -> Change[T] | None:
        """None where it was not known."""
        old = self._objects.pop(key, None)
        self._forget(key, old)
        return None if old is None else Change(key, old, None)

    def _forget(self, key: str, old: T | None) -> None:
        if old is None or self._index is None:
            return
        group = self._index(old)
        if members := self._groups.get(group):
            members.pop(key, None)
            if not members:
                del self._groups[group]

"""Tells what the agent itself left in a knob from what somebody else has put there since.

Only in memory: an agent that was just started cannot know who wrote a value that is not the original, and keeps the
original that it found in the journal. Nobody else's are also the two changes that the kernel makes by itself: cpu.idle
pins the weight and resets it afterwards, and version 1 takes CPUs and NUMA nodes that went offline out of every cpuset.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from agent.qrm.knobs import KnobFiles, Original
from agent.qrm.restore import LISTS, Key, is_idle, key_of
from agent.qrm.table import DEFAULT_WEIGHT
from api.cpus import parse_cpu_list
from api.knobs import Knob
from api.ports import Unavailable, Vanished


class Hands:
    """What the files of each knob held when the agent had last written it."""

    def __init__(self) -> None:
        self._left: dict[Key, Mapping[str, str]] = {}

    def forget(self, keys: Collection[Key]) -> None:
        """Whatever these hold now, nobody can say whose it is."""
        for key in keys:
            self._left.pop(key, None)

    def keep_only(self, keys: Collection[Key]) -> None:
        """Remember nothing of knobs that the agent has no original of."""
        self.forget(self._left.keys() - set(keys))

    def note(self, entry: Original, texts: Mapping[str, str]) -> None:
        """These texts are the agent's own, in a knob whose original is `entry`."""
        self._left[key_of(entry)] = texts

    def knows(self, entry: Original) -> bool:
        """Whether the agent has written that knob since it was started."""
        return key_of(entry) in self._left

    def left(self, key: Key) -> Mapping[str, str] | None:
        """What the agent left there, if it has written it since it was started."""
        return self._left.get(key)

    def is_foreign(self, entry: Original, now: Original, files: KnobFiles) -> bool:
        """Whether somebody else wrote what the knob holds now: neither its original nor what the agent left there."""
        left = self._left.get(key_of(entry))
        if left is None or now.raw.texts in (left, entry.raw.texts):
            return False
        if now.knob is Knob.WEIGHT:
            return not is_idle(now, files)
        if now.knob in LISTS:
            return not _offline(left[now.knob.value], now, files)
        return True


def weight_after_idle(files: KnobFiles, cgroup: str) -> Mapping[str, str]:
    """What the kernel puts into the weight's file when a group stops being idle."""
    return files.shown(cgroup, Knob.WEIGHT, str(DEFAULT_WEIGHT))


def _offline(left: str, now: Original, files: KnobFiles) -> bool:
    """Whether the kernel alone makes that cpuset of the agent's one: without what is not there any more."""
    try:
        there = files.ceiling(now.cgroup, now.knob)
        has = parse_cpu_list(files.decode(now.cgroup, now.knob, now.raw))
        return there is not None and set(has) == set(parse_cpu_list(left)) & set(there)
    except (Unavailable, Vanished, ValueError):
        return False

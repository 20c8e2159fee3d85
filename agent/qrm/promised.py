"""What containers were made with before any round knew of them: what was promised is theirs, and no round gives it away."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from agent.qrm.placing.state import Allocation, CpuState

LONGEST_S = 60.0
"""So long after it was made a promise waits for the next round."""
MOST = 4096


class _Promise(NamedTuple):
    at_s: float
    entries: Mapping[str, Allocation]
    """By name of the container."""


class Promised:
    """Made from any thread, for the one that judges rounds. From then on it is in the state, and held as what is there is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[str, _Promise] = {}

    def make(self, uid: str, entries: Mapping[str, Allocation], now_s: float) -> None:
        """What the containers of this pod have."""
        with self._lock:
            self._made = {pod: made for pod, made in self._made.items() if now_s - made.at_s < LONGEST_S}
            if entries and (uid in self._made or len(self._made) < MOST):
                before = self._made[uid].entries if uid in self._made else {}
                self._made[uid] = _Promise(now_s, {**entries, **before})

    def kept(self, state: CpuState) -> CpuState:
        """The state with what was promised and is not in it yet: a container that has a place keeps that one."""
        with self._lock:
            made = dict(self._made)
        return _with(state, made) if made else state

    def taken(self, state: CpuState) -> None:
        """This state, which was `kept`, is known to everybody from now on."""
        with self._lock:
            self._made = {
                uid: made for uid, made in self._made.items() if not made.entries.keys() <= state.pod(uid).keys()
            }


def _with(state: CpuState, made: Mapping[str, _Promise]) -> CpuState:
    entries = dict(state.pod_entries)
    for uid, promise in made.items():
        if not promise.entries.keys() <= state.pod(uid).keys():
            entries[uid] = {**promise.entries, **state.pod(uid)}
    return msgspec.structs.replace(state, pod_entries=entries)

"""Whose turn it is, among nodes that all want something done to them. Pure; time is an argument."""

from __future__ import annotations

from collections.abc import Sequence

from kube.pace import Bucket

AGAIN_S = 60.0
"""A node that was emptied, or could not be tainted, is looked at again: a disruption budget may let more go by then."""


class Turns:
    """Of one action. A node that was tried a moment ago, whatever came of it, must not take the turns of all others."""

    def __init__(self) -> None:
        self._tried_s: dict[str, float] = {}

    def pick(self, nodes: Sequence[str], now_s: float, bucket: Bucket | None = None) -> list[str]:
        """As many as the rate allows, in the order given. Nodes that no longer want it are forgotten."""
        self._tried_s = {node: at_s for node, at_s in self._tried_s.items() if node in nodes}
        picked = []
        for node in nodes:
            if now_s - self._tried_s.get(node, now_s - AGAIN_S) < AGAIN_S:
                continue
            if bucket is not None and not bucket.take(now_s):
                break
            self._tried_s[node] = now_s
            picked.append(node)
        return picked

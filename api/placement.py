"""Explanation of a pod's placement: the result of each plugin of the scheduler extender for each node. Exchanged as JSON."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

PLACEMENT_SCORE_KEY = "dioptase.io/placement-score"
"""Annotation of a pod that the extender bound: score of its node at that time, 0 to 100."""


def placement_score(annotations: Mapping[str, str]) -> float | None:
    """Return the score in the annotations of a pod; None if it is missing or invalid, because owners of pods may change it."""
    try:
        score = float(annotations.get(PLACEMENT_SCORE_KEY, ""))
    except ValueError:
        return None
    return score if 0 <= score <= 100 else None


class PluginVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one plugin for a pod on a node."""

    plugin: str
    rejection: str = ""
    """Why the node is rejected; empty if it passes."""
    numbers: str = ""
    """The numbers from which the result follows, as a sentence."""
    score: float | None = None
    """Score from 0 to 100; None if the plugin does not score this pod."""
    weight: float = 0.0


class NodePlacement(msgspec.Struct, frozen=True, kw_only=True):
    """Evaluation of one node."""

    node: str
    fits: bool
    score: float
    """Weighted mean of the scores, 0 to 100."""
    verdicts: tuple[PluginVerdict, ...]


class PlacementExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Evaluation of one pod on the nodes of a cluster, by the functions that place it."""

    pod: str
    level: str
    node: str = ""
    """Node of the pod, empty while it is pending. Its evaluation does not count the pod itself."""
    assumed: bool = False
    """Whether the pod is being bound to a node."""
    problem: str = ""
    """Why the pod cannot be evaluated."""
    gang: str = ""
    """State of the pod's gang as a sentence; empty without one."""
    node_count: int = 0
    fitting: int = 0
    rejections: Mapping[str, int] = {}
    """Number of nodes by the reason of their rejection."""
    nodes: tuple[NodePlacement, ...] = ()
    """The pod's own node, then nodes that fit, the best score first, then rejected nodes. A large cluster has more nodes than
    are listed."""

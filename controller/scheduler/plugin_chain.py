"""The plugins of the scheduler, run one after another over all candidate nodes at once. Pure.
A plugin is an object with pure functions over arrays: another one is added to the list in `build_chain` of scheduler_process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from controller.scheduler.node_arrays import BoolArray, FloatArray, NodeArrays
from controller.scheduler.scheduling_pod import SchedulingPod

Rows = NDArray[np.intp]
ReasonNumbers = NDArray[np.int16]
"""For each row 0 if the node passes, else the number of the reason, from 1 on, in the plugin's `reasons`."""
MAX_SCORE = 100.0


class RejectionReason(NamedTuple):
    """Why a plugin rejects a node, in kube-scheduler's style, which counts equal texts of many nodes."""

    message: str
    preemptible: bool
    """Whether the node may fit after pods with a lower priority are removed."""


class NodePlugin(Protocol):
    """One plugin. `rows` selects the candidate nodes in `nodes`; `now_s` is the time in seconds since the epoch."""

    @property
    def name(self) -> str: ...
    @property
    def weight(self) -> float:
        """Weight of the score; 0 for a plugin that only filters."""
        ...

    @property
    def reasons(self) -> Sequence[RejectionReason]: ...
    def filter(self, pod: SchedulingPod, nodes: NodeArrays, rows: Rows, now_s: float) -> ReasonNumbers | None:
        """Return the reason number of each row; None if every node passes."""
        ...

    def score(self, pod: SchedulingPod, nodes: NodeArrays, rows: Rows, now_s: float) -> FloatArray | None:
        """Return the score of each row, 0 to 100; None if the plugin does not score this pod."""
        ...

    def describe(self, pod: SchedulingPod, nodes: NodeArrays, row: int, now_s: float) -> str:
        """Return the numbers that decide about filter and score of one node, as a sentence for people."""
        ...


class FilterOutcome(NamedTuple):
    """Result of all filters for the candidate rows."""

    passes: BoolArray
    plugins: ReasonNumbers
    """For a rejected row the index of the first plugin that rejected it."""
    reasons: ReasonNumbers
    """For a rejected row the number of the reason within that plugin."""


class PluginChain:
    """All plugins in their order. The first plugin that rejects a node gives the reason."""

    def __init__(self, plugins: Sequence[NodePlugin]) -> None:
        self.plugins = tuple(plugins)

    def filter(self, pod: SchedulingPod, nodes: NodeArrays, rows: Rows, now_s: float) -> FilterOutcome:
        """Run every filter on all rows; the outcome has the first rejection of each row."""
        numbers = np.zeros(len(rows), np.int16)
        sources = np.zeros(len(rows), np.int16)
        for index, plugin in enumerate(self.plugins):
            rejected = plugin.filter(pod, nodes, rows, now_s)
            if rejected is None:
                continue
            first = (numbers == 0) & (rejected != 0)
            numbers[first], sources[first] = rejected[first], index
        return FilterOutcome(numbers == 0, sources, numbers)

    def score(self, pod: SchedulingPod, nodes: NodeArrays, rows: Rows, now_s: float) -> FloatArray:
        """Return the weighted mean of the plugins' scores, 0 to 100; plugins that do not score this pod are left out."""
        total, weights = np.zeros(len(rows)), 0.0
        for plugin in self.plugins:
            if plugin.weight <= 0 or (scores := plugin.score(pod, nodes, rows, now_s)) is None:
                continue
            total += plugin.weight * scores
            weights += plugin.weight
        return total / weights if weights else total

    def reason(self, outcome: FilterOutcome, index: int) -> RejectionReason:
        """Return why a candidate was rejected, by its position among the rows."""
        plugin = self.plugins[int(outcome.plugins[index])]
        return plugin.reasons[int(outcome.reasons[index]) - 1]

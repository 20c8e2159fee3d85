"""Arrays over the nodes of the cluster, one row for each node, on which the plugins of the scheduler compute. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from controller.scheduler.aligned_arrays import AlignedArrays
from controller.scheduler.scheduler_kinds import CnrTaint

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
CPU_COLUMN, MEMORY_COLUMN = 0, 1
"""Columns of arrays with two resources: CPU in thousandths, memory in bytes."""
FIRST_ROWS = 64
_ZERO_COLUMNS = {
    "allocatable": (np.int64, 2),
    "requested": (np.int64, 2),
    "requested_nonzero": (np.int64, 2),
    "native_allocatable": (np.int64, 2),
    "native_requested": (np.int64, 2),
    "unmeasured": (np.float64, 2),
    "has_node": (np.bool_, 0),
    "has_cnr": (np.bool_, 0),
    "taint_set": (np.int32, 0),
    "aligned_slot": (np.int32, 0),
}
"""Columns that are 0 for a row that no node uses, with their type and width; width 0 is one number."""
HARM_INDICATORS = ("runq_latency_p99_s", "cpu_pressure", "memory_pressure", "reclaimed_interference")
_UNKNOWN_COLUMNS = {"usage": 2, "usage_percentile": 2, "reported_at_s": 0, "harm": len(HARM_INDICATORS)}
"""Columns of float64 that are NaN until a report has them."""


class NodeArrays:
    """The state of all nodes. Rows without a node have an empty name; `rows_of` selects rows by name.

    Written by ClusterState only; plugins read it.
    """

    allocatable: IntArray
    """Reclaimed resources that the CustomNodeResource offers, (rows, 2)."""
    requested: IntArray
    """Reclaimed resources of pods with this node, assumed pods included, (rows, 2)."""
    requested_nonzero: IntArray
    """The same with default amounts for containers that request nothing, for scores, (rows, 2)."""
    native_allocatable: IntArray
    """The Node's allocatable cpu and memory without overcommitment, which measured usage is compared with, (rows, 2)."""
    native_requested: IntArray
    """Requests of cpu and memory of pods with this node, (rows, 2)."""
    usage: FloatArray
    """Measured usage of the node in millicores and bytes; NaN if it is not reported, (rows, 2)."""
    usage_percentile: FloatArray
    """Percentile of the usage in the latest reports; NaN without reports, (rows, 2)."""
    reported_at_s: FloatArray
    """Time of the measurement, in seconds since the epoch; NaN if there is none, (rows,)."""
    unmeasured: FloatArray
    """Estimated load of pods that started after the measurement or shortly before it, (rows, 2)."""
    harm: FloatArray
    """HARM_INDICATORS as the agent reports them, smoothed; NaN if it does not, (rows, 4)."""
    has_node: BoolArray
    has_cnr: BoolArray
    taint_set: NDArray[np.int32]
    """Number of the node's set of taints in `taint_sets`."""
    aligned_slot: NDArray[np.int32]
    """Number of the node's slot in `aligned`; 0 for a node that neither aligns nor pins anything."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.aligned = AlignedArrays()
        self.taint_sets: list[tuple[CnrTaint, ...]] = [()]
        self._row_by_name: dict[str, int] = {}
        self._free: list[int] = []
        self._taint_numbers: dict[tuple[CnrTaint, ...], int] = {(): 0}
        for name, (kind, width) in _ZERO_COLUMNS.items():
            setattr(self, name, np.zeros((FIRST_ROWS, width) if width else FIRST_ROWS, dtype=kind))
        for name, width in _UNKNOWN_COLUMNS.items():
            setattr(self, name, np.full((FIRST_ROWS, width) if width else FIRST_ROWS, np.nan))

    def __len__(self) -> int:
        """Number of nodes."""
        return len(self._row_by_name)

    @property
    def size_bytes(self) -> int:
        """Memory of the arrays."""
        columns = sum(int(getattr(self, name).nbytes) for name in (*_ZERO_COLUMNS, *_UNKNOWN_COLUMNS))
        return columns + self.aligned.size_bytes

    def row(self, name: str) -> int | None:
        """Return the row of a node; None if nothing is known of it."""
        return self._row_by_name.get(name)

    def rows_of(self, names: list[str]) -> NDArray[np.intp]:
        """Return the row of each name, -1 for an unknown one."""
        find = self._row_by_name.get
        return np.fromiter((find(name, -1) for name in names), np.intp, len(names))

    def all_names(self) -> list[str]:
        """Return the names of all nodes, sorted."""
        return sorted(self._row_by_name)

    def add_row(self, name: str) -> int:
        """Return the row of a node, a new one if it has none."""
        if (row := self._row_by_name.get(name)) is not None:
            return row
        if self._free:
            row = self._free.pop()
            self.names[row] = name
        else:
            row = len(self.names)
            self.names.append(name)
            if row >= len(self.has_node):
                self._grow()
        self._row_by_name[name] = row
        return row

    def remove_row(self, row: int) -> None:
        """Clear a row and give it to the next new node."""
        del self._row_by_name[self.names[row]]
        self.names[row] = ""
        self._free.append(row)
        for name in _ZERO_COLUMNS:
            getattr(self, name)[row] = 0
        for name in _UNKNOWN_COLUMNS:
            getattr(self, name)[row] = np.nan

    def set_taints(self, row: int, taints: tuple[CnrTaint, ...]) -> None:
        """Set the taints of a node. Equal sets share a number, so that a filter matches each set with a pod only once."""
        if (number := self._taint_numbers.get(taints)) is None:
            number = self._taint_numbers[taints] = len(self.taint_sets)
            self.taint_sets.append(taints)
            if number > 2 * len(self.names) + FIRST_ROWS:
                self._drop_unused_taint_sets(taints)
                number = self._taint_numbers[taints]
        self.taint_set[row] = number

    def _drop_unused_taint_sets(self, new: tuple[CnrTaint, ...]) -> None:
        # Values of taints may be unique, such as times; without this, every change would stay in memory.
        used = dict.fromkeys(((), *(self.taint_sets[number] for number in self.taint_set), new))
        numbers = {taints: number for number, taints in enumerate(used)}
        self.taint_set[:] = [numbers[self.taint_sets[number]] for number in self.taint_set]
        self.taint_sets, self._taint_numbers = list(used), numbers

    def _grow(self) -> None:
        for name in _ZERO_COLUMNS:
            old = getattr(self, name)
            setattr(self, name, np.concatenate((old, np.zeros_like(old))))
        for name in _UNKNOWN_COLUMNS:
            old = getattr(self, name)
            setattr(self, name, np.concatenate((old, np.full_like(old, np.nan))))

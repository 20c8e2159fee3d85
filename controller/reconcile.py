"""Reconcile loop over a work queue, and the values of the controllers' metrics.
A rejection by the API server or an unexpected exception retries the key later.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from api.metrics import CONTROLLER_METRICS_BY_NAME
from kube.errors import ApiError, ApiUnreachable
from kube.work_queue import K, WorkQueue

LabelValues = tuple[str, ...]
DURATION_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Upper bounds of the buckets of histograms, up to the time that kube-scheduler waits for its extender."""


class MetricValues:
    """Metric values by name and label values, in the label order of the catalogue. Used on the event loop only."""

    def __init__(self) -> None:
        self._values: dict[str, dict[LabelValues, float]] = {name: {} for name in CONTROLLER_METRICS_BY_NAME}
        histograms = (metric.name for metric in CONTROLLER_METRICS_BY_NAME.values() if metric.kind == "histogram")
        self._buckets: dict[str, dict[LabelValues, list[int]]] = {name: {} for name in histograms}

    def count(self, name: str, *labels: str) -> None:
        """Increment a counter."""
        self.add(name, 1, *labels)

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Increase a counter."""
        values = self._values[name]
        values[labels] = values.get(labels, 0) + amount

    def set(self, name: str, values: Iterable[tuple[LabelValues, float]], within: LabelValues = ()) -> None:
        """Replace all values of a gauge, or those whose label values start with `within`, so that vanished ones disappear."""
        other = {key: value for key, value in self._values[name].items() if within and key[: len(within)] != within}
        self._values[name] = other | dict(values)

    def values(self, name: str) -> Mapping[LabelValues, float]:
        return self._values[name]

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Count a value in a histogram."""
        counts = self._buckets[name].setdefault(labels, [0] * (len(DURATION_BOUNDS_S) + 1))
        counts[bisect_left(DURATION_BOUNDS_S, value)] += 1
        self.add(name, value, *labels)

    def bucket_counts(self, name: str) -> Mapping[LabelValues, Sequence[int]]:
        """Return of a histogram by label values how many values each bucket has, the last one those above all bounds. `values`
        has the sums."""
        return self._buckets[name]


log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")
RECONCILES_METRIC = "dioptase_controller_reconciles_total"


async def reconcile_queue(
    name: str, queue: WorkQueue[K], reconcile: Callable[[K], Awaitable[None]], metrics: MetricValues
) -> None:
    """Reconcile keys until cancelled. Keys that fail, by a rejection or by a bug, are retried."""
    while True:
        key = await queue.take()
        try:
            await reconcile(key)
        except (ApiError, ApiUnreachable) as error:
            wait_s = queue.failed(key)
            metrics.count(RECONCILES_METRIC, name, "retried")
            # After a conflict, the newer object arrives by the watch.
            level = logging.DEBUG if isinstance(error, ApiError) and error.conflict else logging.WARNING
            log.log(level, "%s: %s: %s; retried in %.1f s", name, key, error, wait_s)
        except Exception:
            queue.failed(key)
            metrics.count(RECONCILES_METRIC, name, "failed")
            log.exception("%s: %s", name, key)
        else:
            queue.done(key)
            metrics.count(RECONCILES_METRIC, name, "done")


async def run_all(requests: Iterable[Awaitable[object]]) -> None:
    """Await all requests one after another, then raise the first error.

    An object that cannot be written, for example because its schema became stricter, must not block the others.
    """
    first_error: ApiError | ApiUnreachable | None = None
    for request in requests:
        try:
            await request
        except (ApiError, ApiUnreachable) as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error


async def ignore_missing(request: Awaitable[ResultT]) -> ResultT | None:
    """Return the response, or None if the object no longer exists."""
    try:
        return await request
    except ApiError as error:
        if not error.missing:
            raise
        return None

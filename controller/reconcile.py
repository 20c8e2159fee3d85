"""Reconcile loop over a work queue, and the values of the controllers' metrics.
A refusal of the API server or an unexpected exception retries the key later.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

from api.metrics import CONTROLLER_METRICS_BY_NAME
from kube.errors import ApiError, ApiUnreachable
from kube.work_queue import K, WorkQueue

LabelValues = tuple[str, ...]


class MetricValues:
    """Values by metric and labels, in the order of the catalogue's row. Written in the loop, and read there."""

    def __init__(self) -> None:
        self._values: dict[str, dict[LabelValues, float]] = {name: {} for name in CONTROLLER_METRICS_BY_NAME}

    def count(self, name: str, *labels: str) -> None:
        """One more."""
        values = self._values[name]
        values[labels] = values.get(labels, 0) + 1

    def set(self, name: str, values: Iterable[tuple[LabelValues, float]], within: LabelValues = ()) -> None:
        """These are all values of a gauge, or all that begin with those labels: what is gone is no longer shown."""
        kept = {key: value for key, value in self._values[name].items() if within and key[: len(within)] != within}
        self._values[name] = kept | dict(values)

    def values(self, name: str) -> Mapping[LabelValues, float]:
        return self._values[name]


log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")
RECONCILES_METRIC = "dioptase_controller_reconciles_total"


async def reconcile_queue(
    name: str, queue: WorkQueue[K], look: Callable[[K], Awaitable[None]], tally: MetricValues
) -> None:
    """Until cancelled. What the API server refuses is looked at again later; so is what a bug of ours stopped."""
    while True:
        key = await queue.take()
        try:
            await look(key)
        except (ApiError, ApiUnreachable) as error:
            wait_s = queue.failed(key)
            tally.count(RECONCILES_METRIC, name, "retried")
            # Somebody else wrote first: the newer object is on its way.
            level = logging.DEBUG if isinstance(error, ApiError) and error.conflict else logging.WARNING
            log.log(level, "%s: %s: %s; again in %.1f s", name, key, error, wait_s)
        except Exception:
            queue.failed(key)
            tally.count(RECONCILES_METRIC, name, "failed")
            log.exception("%s: %s", name, key)
        else:
            queue.done(key)
            tally.count(RECONCILES_METRIC, name, "done")


async def run_all(asked: Iterable[Awaitable[object]]) -> None:
    """One after another, all of them; then the first refusal is raised. An object that can no longer be written, as when its
    definition has become stricter, must not keep the others from it."""
    refused: ApiError | ApiUnreachable | None = None
    for one in asked:
        try:
            await one
        except (ApiError, ApiUnreachable) as error:
            refused = refused or error
    if refused is not None:
        raise refused


async def ignore_missing(asked: Awaitable[ResultT]) -> ResultT | None:
    """The answer; None where the object has gone meanwhile, which settles it."""
    try:
        return await asked
    except ApiError as error:
        if not error.missing:
            raise
        return None

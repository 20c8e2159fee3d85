"""Take keys from a queue and look at them, whatever comes of it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from controller.tally import Tally
from kube.errors import ApiError, Unreachable
from kube.queue import K, WorkQueue

log = logging.getLogger(__name__)
R = TypeVar("R")
RECONCILES = "dioptase_controller_reconciles_total"


async def work(name: str, queue: WorkQueue[K], look: Callable[[K], Awaitable[None]], tally: Tally) -> None:
    """Until cancelled. What the API server refuses is looked at again later; so is what a bug of ours stopped."""
    while True:
        key = await queue.take()
        try:
            await look(key)
        except (ApiError, Unreachable) as error:
            wait_s = queue.failed(key)
            tally.count(RECONCILES, name, "retried")
            # Somebody else wrote first: the newer object is on its way.
            level = logging.DEBUG if isinstance(error, ApiError) and error.conflict else logging.WARNING
            log.log(level, "%s: %s: %s; again in %.1f s", name, key, error, wait_s)
        except Exception:
            queue.failed(key)
            tally.count(RECONCILES, name, "failed")
            log.exception("%s: %s", name, key)
        else:
            queue.done(key)
            tally.count(RECONCILES, name, "done")


async def each(asked: Iterable[Awaitable[object]]) -> None:
    """One after another, all of them; then the first refusal is raised. An object that can no longer be written, as when its
    definition has become stricter, must not keep the others from it."""
    refused: ApiError | Unreachable | None = None
    for one in asked:
        try:
            await one
        except (ApiError, Unreachable) as error:
            refused = refused or error
    if refused is not None:
        raise refused


async def settled(asked: Awaitable[R]) -> R | None:
    """The answer; None where the object has gone meanwhile, which settles it."""
    try:
        return await asked
    except ApiError as error:
        if not error.missing:
            raise
        return None

"""Authorizes bearer tokens of cluster accounts by reviews of the API server, cached for a minute.
An allowed token stays valid for ten minutes while the API server is unreachable. Reviews wait for each other in the order of
`ReviewQueue`, so that a client that guesses tokens delays no other. Health paths need no token and return only their status.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from api.interfaces import Unavailable
from common.http.review_queue import ReviewQueue, token_prefix

ALLOWED_CACHE_S, DENIED_CACHE_S, ALLOWED_FALLBACK_S = 60.0, 10.0, 600.0
"""Validity of a positive result, of a negative one, and of a positive one while reviews fail."""
REVIEW_TIMEOUT_S = 5.0
"""Limit for a review with its wait in the queue, below a scrape's timeout of 10 s."""
MAX_CACHED_REVIEWS = 256
MAX_TOKEN_LETTERS = 16 << 10
"""Limit for a token; those of service accounts have one or two thousand characters."""
HEALTHZ_PATH, READYZ_PATH = "/healthz", "/readyz"
HEALTH_PATHS = (HEALTHZ_PATH, READYZ_PATH)
METRICS_PATH, URL_PREFIX, STATIC_PREFIX = "/metrics", "/dioptase", "/static/"
PROXIED_AUTHORIZATION_HEADER = "X-Dioptase-Authorization"
"""Used if there is no Authorization header, because the API server's proxy consumes that one and does not forward it."""
K = TypeVar("K")
V = TypeVar("V")
ReviewFunction = Callable[[str, str], Awaitable[bool | None]]
"""Whether the account of a token may get a path; None for an unknown token. Raises Unavailable without a result."""
HttpRefusal = tuple[int, str, str]
"""HTTP status, problem and remedy."""


class ReviewDropped(Exception):
    """Too many reviews wait, and this one would have waited longest."""


class _PendingReview:
    """A review that waits or runs."""

    def __init__(self, token: str, path: str, connection: str) -> None:
        self.token, self.path, self._connection = token, path, connection
        self.requests = 0
        """Requests that wait for the result."""
        self.result: asyncio.Future[bool | None] = asyncio.get_running_loop().create_future()

    def sources(self) -> tuple[str, str]:
        """Return what the review is charged to."""
        return f"connection {self._connection}", f"prefix {token_prefix(self.token)}"


class TokenReviewer:
    """Reviews tokens and caches the results."""

    def __init__(self, review: ReviewFunction, clock: Callable[[], float] = time.monotonic) -> None:
        self._review, self._clock = review, clock
        self._salt = secrets.token_bytes(16)
        self._allowed: OrderedDict[bytes, tuple[float, bool | None]] = OrderedDict()
        self._denied: OrderedDict[bytes, tuple[float, bool | None]] = OrderedDict()
        """Time and result of reviews by token and path. Separate from the allowed ones, so that a client that requests many
        forbidden paths does not displace them."""
        self._reviews: dict[bytes, _PendingReview] = {}
        self._queue = ReviewQueue[bytes](clock)
        self._timer: asyncio.TimerHandle | None = None

    async def refusal(self, authorization: str, path: str, connection: str) -> HttpRefusal | None:
        """Why a request with this Authorization header is rejected; None if it is authorized.

        `connection` names the connection of the request.
        """
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token or len(token) > MAX_TOKEN_LETTERS or not token.isascii():
            return 401, "a token is required", "send `Authorization: Bearer TOKEN` of an account of the cluster"
        path = authorization_path(path)
        key = hashlib.blake2b(f"{token}\0{path}".encode(), key=self._salt, digest_size=32).digest()
        reviewed_at, allowed = self._cached(key)
        age_s = self._clock() - reviewed_at
        if age_s >= (ALLOWED_CACHE_S if allowed else DENIED_CACHE_S):
            fallback = bool(allowed) and age_s < ALLOWED_FALLBACK_S
            try:
                review = _PendingReview(token, path, connection)
                allowed = await self._review_once(key, review, is_known=fallback)
            except Unavailable as error:
                if not fallback:
                    return 503, f"the token cannot be reviewed: {error.reason}", error.remedy
            except ReviewDropped:
                if not fallback:
                    return 429, "too many token reviews are waiting", "send the request again in 5 seconds"
        if allowed is None:
            return 401, "the API server does not know this token", "create a new one: kubectl create token ACCOUNT"
        if not allowed:
            return (
                403,
                f"this account may not get {path}",
                f"grant it `get` of the nonResourceURL {path} by a ClusterRole",
            )
        return None

    def _cached(self, key: bytes) -> tuple[float, bool | None]:
        for results in (self._allowed, self._denied):
            if key in results:
                results.move_to_end(key)
                return results[key]
        return float("-inf"), None

    async def _review_once(self, key: bytes, review: _PendingReview, *, is_known: bool) -> bool | None:
        """Share one review among all requests that wait for it; one that runs continues if they are cancelled."""
        pending = self._reviews.get(key)
        if pending is None:
            pending = self._reviews[key] = review
            dropped = self._queue.add(key, *review.sources(), is_known=is_known)
            if dropped is not None:
                self._reviews.pop(dropped).result.set_exception(ReviewDropped)
            self._begin_due()
        pending.requests += 1
        try:
            async with asyncio.timeout(REVIEW_TIMEOUT_S):
                return await asyncio.shield(pending.result)
        except TimeoutError:
            raise Unavailable(f"no response within {REVIEW_TIMEOUT_S:g} s", "check the API server") from None
        finally:
            pending.requests -= 1
            if not pending.requests and self._queue.discard(key):
                del self._reviews[key]

    def _begin_due(self) -> None:
        """Begin the reviews that may begin now, and come back when the next one may."""
        while (key := self._queue.take()) is not None:
            review = self._reviews[key]
            task = asyncio.ensure_future(self._review(review.token, review.path))
            task.add_done_callback(partial(self._finish, key))
        pause_s = self._queue.pause_s()
        if pause_s and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._resume)

    def _resume(self) -> None:
        self._timer = None
        self._begin_due()

    def _finish(self, key: bytes, task: asyncio.Future[bool | None]) -> None:
        review = self._reviews.pop(key)
        is_answered = not task.cancelled() and task.exception() is None
        self._queue.finish(key, *review.sources(), wrong=is_answered and task.result() is None)
        if is_answered:
            self._store_result(key, task.result())
            review.result.set_result(task.result())
        else:
            error = None if task.cancelled() else task.exception()
            review.result.set_exception(error or Unavailable("the review was cancelled", "send the request again"))
            review.result.exception()  # every request that waited may have gone
        self._begin_due()

    def _store_result(self, key: bytes, allowed: bool | None) -> None:
        results, other = (self._allowed, self._denied) if allowed else (self._denied, self._allowed)
        other.pop(key, None)
        _cache_result(results, key, (self._clock(), allowed))


def authorization_path(path: str) -> str:
    """The nonResourceURL that an account must be allowed to get.

    All paths but /metrics get a prefix of their own, because every account of a cluster may get /api and below (ClusterRole
    system:discovery). The page's static files share one URL: they contain nothing about the node, and a browser requests
    twenty of them at once.
    """
    if path == METRICS_PATH:
        return path
    return f"{URL_PREFIX}{STATIC_PREFIX if path.startswith(STATIC_PREFIX) else path}"


def _cache_result(cache: OrderedDict[K, V], key: K, value: V) -> None:
    cache[key] = value
    cache.move_to_end(key)
    while len(cache) > MAX_CACHED_REVIEWS:
        cache.popitem(last=False)

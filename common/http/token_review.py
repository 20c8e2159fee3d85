"""Authorizes bearer tokens of cluster accounts by reviews of the API server, cached for a minute.
An allowed token stays valid for ten minutes while the API server is unreachable. A client address has one review at a
time and is blocked for a second after a wrong token. Health paths need no token and return only their status.
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

ALLOWED_CACHE_S, DENIED_CACHE_S, ALLOWED_FALLBACK_S = 60.0, 10.0, 600.0
"""Validity of a positive result, of a negative one, and of a positive one while reviews fail."""
WRONG_TOKEN_PAUSE_S = 1.0
"""Time after a wrong token during which further tokens of that address are rejected."""
REVIEW_TIMEOUT_S = 5.0
"""Limit for a review, below a scrape's timeout of 10 s."""
MAX_CACHED_REVIEWS = 256
MAX_PENDING_REVIEWS = 16
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


class TokenReviewer:
    """Reviews tokens and caches the results."""

    def __init__(self, review: ReviewFunction, clock: Callable[[], float] = time.monotonic) -> None:
        self._review, self._clock = review, clock
        self._salt = secrets.token_bytes(16)
        self._allowed: OrderedDict[bytes, tuple[float, bool | None]] = OrderedDict()
        self._denied: OrderedDict[bytes, tuple[float, bool | None]] = OrderedDict()
        """Time and result of reviews by token and path. Separate from the allowed ones, so that a client that requests many
        forbidden paths does not displace them."""
        self._reviews: dict[bytes, asyncio.Future[bool | None]] = {}
        self._addresses: set[str] = set()
        self._blocked_until: OrderedDict[str, float] = OrderedDict()

    async def refusal(self, authorization: str, path: str, address: str) -> HttpRefusal | None:
        """Why a request with this Authorization header is rejected; None if it is authorized."""
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
            if not fallback and self._too_many(key, address):
                return (
                    429,
                    "too many token reviews are pending, or another one of this address",
                    "send the request again in 5 seconds",
                )
            try:
                allowed = await self._review_once(key, token, path, address)
            except Unavailable as error:
                if not fallback:
                    return 503, f"the token cannot be reviewed: {error.reason}", error.remedy
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

    def _too_many(self, key: bytes, address: str) -> bool:
        if key in self._reviews:
            return False
        blocked = self._clock() < self._blocked_until.get(address, 0.0)
        return blocked or address in self._addresses or len(self._reviews) >= MAX_PENDING_REVIEWS

    async def _review_once(self, key: bytes, token: str, path: str, address: str) -> bool | None:
        """Share one review among all requests that wait for it; it continues if they are cancelled."""
        task = self._reviews.get(key)
        if task is None:
            task = asyncio.ensure_future(self._review(token, path))
            self._reviews[key] = task
            self._addresses.add(address)
            task.add_done_callback(partial(self._store_result, key, address))
        try:
            return await asyncio.wait_for(asyncio.shield(task), REVIEW_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable(f"no response within {REVIEW_TIMEOUT_S:g} s", "check the API server") from None

    def _store_result(self, key: bytes, address: str, task: asyncio.Future[bool | None]) -> None:
        del self._reviews[key]
        self._addresses.discard(address)
        if task.cancelled() or task.exception() is not None:
            return
        now, allowed = self._clock(), task.result()
        results, other = (self._allowed, self._denied) if allowed else (self._denied, self._allowed)
        other.pop(key, None)
        _cache_result(results, key, (now, allowed))
        if allowed is None:
            _cache_result(self._blocked_until, address, now + WRONG_TOKEN_PAUSE_S)


def authorization_path(path: str) -> str:
    """The nonResourceURL that an account must be allowed to get.

    All paths but /metrics get a prefix of their own, because every account of a cluster may get /api and below (ClusterRole
    system:discovery). The page's static files share one URL: they contain nothing about the node, and a browser requests
    twenty of them at once, while an address may have only one pending review.
    """
    if path == METRICS_PATH:
        return path
    return f"{URL_PREFIX}{STATIC_PREFIX if path.startswith(STATIC_PREFIX) else path}"


def _cache_result(cache: OrderedDict[K, V], key: K, value: V) -> None:
    cache[key] = value
    cache.move_to_end(key)
    while len(cache) > MAX_CACHED_REVIEWS:
        cache.popitem(last=False)

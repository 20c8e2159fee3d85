"""Authorizes bearer tokens of cluster accounts by reviews of the API server, cached for a minute.
An allowed token stays valid for ten minutes while the API server is unreachable. An address has one review at a
time and waits a second after a wrong token. Health paths need no token and return only their status.
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
"""How long a good answer is believed, and a bad one, and a good one while nobody can be asked."""
WRONG_TOKEN_PAUSE_S = 1.0
"""From one wrong token of an address to its next question."""
REVIEW_TIMEOUT_S = 5.0
"""How long a question may take: a scrape has ten seconds."""
MAX_CACHED_REVIEWS = 256
MAX_PENDING_REVIEWS = 16
MAX_TOKEN_LETTERS = 16 << 10
"""Letters of a token; those of accounts have one or two thousand."""
HEALTHZ_PATH, READYZ_PATH = "/healthz", "/readyz"
HEALTH_PATHS = (HEALTHZ_PATH, READYZ_PATH)
METRICS_PATH, URL_PREFIX, STATIC_PREFIX = "/metrics", "/dioptase", "/static/"
PROXIED_AUTHORIZATION_HEADER = "X-Dioptase-Authorization"
"""Taken where there is no Authorization: the API server's proxy takes that one for itself and does not pass it on."""
K = TypeVar("K")
V = TypeVar("V")
ReviewFunction = Callable[[str, str], Awaitable[bool | None]]
"""Whether the account of a token may get a path; None: it is nobody's token. Raises Unavailable where nobody can say."""
HttpRefusal = tuple[int, str, str]
"""HTTP's status, what is wrong, and the remedy."""


class TokenReviewer:
    """What was found out about tokens."""

    def __init__(self, review: ReviewFunction, clock: Callable[[], float] = time.monotonic) -> None:
        self._review, self._clock = review, clock
        self._salt = secrets.token_bytes(16)
        self._good: OrderedDict[bytes, tuple[float, bool | None]] = OrderedDict()
        self._bad: OrderedDict[bytes, tuple[float, bool | None]] = OrderedDict()
        """By token and path: when it was found out, and what. Apart, so that who may nothing and asks for a thousand paths has
        no good one forgotten."""
        self._asking: dict[bytes, asyncio.Future[bool | None]] = {}
        self._addresses: set[str] = set()
        self._wrong: OrderedDict[str, float] = OrderedDict()

    async def refusal(self, authorization: str, path: str, address: str) -> HttpRefusal | None:
        """Why a request with this Authorization header is not served; None: it is."""
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token or len(token) > MAX_TOKEN_LETTERS or not token.isascii():
            return (
                401,
                "this program asks for a token",
                "send `Authorization: Bearer TOKEN` of an account of the cluster",
            )
        path = authorization_path(path)
        key = hashlib.blake2b(f"{token}\0{path}".encode(), key=self._salt, digest_size=32).digest()
        at, allowed = self._remembered(key)
        age_s = self._clock() - at
        if age_s >= (ALLOWED_CACHE_S if allowed else DENIED_CACHE_S):
            good = bool(allowed) and age_s < ALLOWED_FALLBACK_S
            if not good and self._too_many(key, address):
                return (
                    429,
                    "too many tokens wait to be reviewed, or another one of this address",
                    "ask again in 5 seconds",
                )
            try:
                allowed = await self._asked(key, token, path, address)
            except Unavailable as error:
                if not good:
                    return 503, f"nobody can say whose token this is: {error.reason}", error.remedy
        if allowed is None:
            return 401, "the API server does not know this token", "take a new one: kubectl create token ACCOUNT"
        if not allowed:
            return (
                403,
                f"this account may not get {path}",
                f"grant it `get` of the nonResourceURL {path} by a ClusterRole",
            )
        return None

    def _remembered(self, key: bytes) -> tuple[float, bool | None]:
        """What is used is forgotten last."""
        for answers in (self._good, self._bad):
            if key in answers:
                answers.move_to_end(key)
                return answers[key]
        return float("-inf"), None

    def _too_many(self, key: bytes, address: str) -> bool:
        if key in self._asking:
            return False
        paused = self._clock() < self._wrong.get(address, 0.0)
        return paused or address in self._addresses or len(self._asking) >= MAX_PENDING_REVIEWS

    async def _asked(self, key: bytes, token: str, path: str, address: str) -> bool | None:
        """Asked once, whoever waits for it; it goes on when they leave."""
        task = self._asking.get(key)
        if task is None:
            task = asyncio.ensure_future(self._review(token, path))
            self._asking[key] = task
            self._addresses.add(address)
            task.add_done_callback(partial(self._answered, key, address))
        try:
            return await asyncio.wait_for(asyncio.shield(task), REVIEW_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable(f"no answer within {REVIEW_TIMEOUT_S:g} s", "look at the API server") from None

    def _answered(self, key: bytes, address: str, task: asyncio.Future[bool | None]) -> None:
        del self._asking[key]
        self._addresses.discard(address)
        if task.cancelled() or task.exception() is not None:
            return
        now, allowed = self._clock(), task.result()
        kept, other = (self._good, self._bad) if allowed else (self._bad, self._good)
        other.pop(key, None)
        _cache_result(kept, key, (now, allowed))
        if allowed is None:
            _cache_result(self._wrong, address, now + WRONG_TOKEN_PAUSE_S)


def authorization_path(path: str) -> str:
    """The URL that an account must be allowed to get: below one of our own, but for metrics, since every account of a cluster
    may get what begins with /api there (its role system:discovery). The page's files are one: they tell nothing of the node,
    and a browser wants twenty of them at once, where an address has one question under way."""
    if path == METRICS_PATH:
        return path
    return f"{URL_PREFIX}{STATIC_PREFIX if path.startswith(STATIC_PREFIX) else path}"


def _cache_result(kept: OrderedDict[K, V], key: K, value: V) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > MAX_CACHED_REVIEWS:
        kept.popitem(last=False)

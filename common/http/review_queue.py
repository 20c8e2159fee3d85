"""Orders reviews of tokens, so that a client that guesses tokens delays no other client.
Requests that come through the API server's proxy share one address, so reviews are ordered by other keys: the connection, and
the part of the token that names its account (the prefix). A review waits longer the more wrong tokens its connection or prefix
sent recently. If too many reviews wait, the one that would wait longest is refused. All clients together may send a limited
number of wrong tokens per second; valid tokens have no limit. Pure, but for the clock.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

import msgspec

from common.backoff import TokenBucket

MAX_RUNNING = 16
"""Reviews in progress at the API server."""
MAX_WAITING = 128
"""Reviews that wait, more than the connections of a port."""
WRONG_TOKENS_PER_S, WRONG_TOKEN_BURST = 32.0, 64.0
"""Bound for wrong tokens of all clients. A right token waits for those before it: MAX_CONNECTIONS of common.http.listener
with one each take two seconds, less than REVIEW_TIMEOUT_S of common.http.token_review."""
WRONG_TOKEN_DELAY_S, MAX_DELAY_S = 0.1, 1.0
"""Time by which a review is delayed for each wrong token of its connection or prefix, and the maximum of this delay."""
MEMORY_S = 60.0
"""Time for which a wrong token counts."""
MAX_SOURCES = 1024
PREFIX_CHARS = 16
"""Characters that are the prefix of a token without parts."""
_AT_ONCE_S = float("-inf")
K = TypeVar("K", bound=Hashable)


class _WrongTokens(msgspec.Struct):
    count: int
    latest_s: float


class WaitingReview(NamedTuple):
    """Position of a review: the time at which it is due, then the order of arrival."""

    due_s: float
    number: int


class ReviewQueue(Generic[K]):
    """Reviews by their key, in the order in which they are to run."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[K, WaitingReview] = {}
        self._running: set[K] = set()
        self._numbers = itertools.count()
        self._wrong: OrderedDict[str, _WrongTokens] = OrderedDict()
        self._bucket = TokenBucket(WRONG_TOKENS_PER_S, WRONG_TOKEN_BURST, clock())
        self._blocked_until_s = float("-inf")

    def add(self, key: K, *sources: str, is_known: bool = False) -> K | None:
        """Add a review of these sources; return the one that is dropped for it, which may be itself.

        A known token was valid before, so it is no guess: its review goes first and is not delayed.
        """
        delay_s = min(WRONG_TOKEN_DELAY_S * max(map(self._wrong_count, sources), default=0), MAX_DELAY_S)
        due_s = _AT_ONCE_S if is_known else self._clock() + delay_s
        self._waiting[key] = WaitingReview(due_s, next(self._numbers))
        if len(self._waiting) <= MAX_WAITING:
            return None
        dropped = max(self._waiting, key=self._waiting.__getitem__)
        del self._waiting[dropped]
        return dropped

    def take(self) -> K | None:
        """Return the next review to begin; None if none may begin now."""
        if not self._waiting or len(self._running) >= MAX_RUNNING:
            return None
        key = min(self._waiting, key=self._waiting.__getitem__)
        if self.pause_s() > 0 and self._waiting[key].due_s != _AT_ONCE_S:
            return None
        del self._waiting[key]
        self._running.add(key)
        return key

    def discard(self, key: K) -> bool:
        """Remove a review that does not run yet; return whether it was there."""
        return self._waiting.pop(key, None) is not None

    def pause_s(self) -> float:
        """Return the seconds until a review may begin after too many wrong tokens."""
        return max(self._blocked_until_s - self._clock(), 0.0)

    def finish(self, key: K, *sources: str, wrong: bool) -> None:
        """Record the end of a review, and whether its token was wrong."""
        self._running.discard(key)
        if not wrong:
            return
        now_s = self._clock()
        self._blocked_until_s = now_s + self._bucket.reserve(now_s)
        for source in sources:
            count = self._wrong_count(source)
            self._wrong[source] = _WrongTokens(count + 1, now_s)
            self._wrong.move_to_end(source)
        while len(self._wrong) > MAX_SOURCES:
            self._wrong.popitem(last=False)

    def _wrong_count(self, source: str) -> int:
        wrong = self._wrong.get(source)
        return 0 if wrong is None or self._clock() - wrong.latest_s > MEMORY_S else wrong.count


def token_prefix(token: str) -> str:
    """Return a digest of the part of a token that names its account.

    Of a JSON Web Token this is all but the signature, so that guesses of signatures for one account are one source.
    """
    named, dot, _signature = token.rpartition(".")
    return hashlib.blake2b((named if dot else token[:PREFIX_CHARS]).encode(), digest_size=16).hexdigest()

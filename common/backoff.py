"""Exponential backoff and token bucket; the time is an argument."""

from __future__ import annotations

import msgspec


class Backoff(msgspec.Struct, frozen=True):
    """Delays that double from `first_s` up to `max_s`."""

    first_s: float
    max_s: float

    def wait_s(self, failures: int, jitter: float = 0.0) -> float:
        """Delay after this many consecutive failures; 0 after none.

        `jitter` in [0, 1) lengthens it by up to half, so that many clients do not retry at the same time.
        """
        if failures <= 0:
            return 0.0
        doublings = min(failures - 1, 64)
        return min(self.first_s * 2.0**doublings, self.max_s) * (1 + jitter / 2)


class TokenBucket:
    """Token bucket with a rate above 0."""

    def __init__(self, rate_per_s: float, max_tokens: float, now_s: float) -> None:
        self._rate_per_s, self._max_tokens = rate_per_s, max_tokens
        self._tokens, self._filled_at_s = max_tokens, now_s

    def take(self, now_s: float) -> bool:
        """Take a token; False if there is none."""
        self._fill(now_s)
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def reserve(self, now_s: float) -> float:
        """Take a token in advance and return the seconds until it is available."""
        self._fill(now_s)
        self._tokens -= 1
        return max(0.0, -self._tokens / self._rate_per_s)

    def _fill(self, now_s: float) -> None:
        # A clock that went backwards must neither add nor remove tokens.
        elapsed_s = max(0.0, now_s - self._filled_at_s)
        self._tokens = min(self._max_tokens, self._tokens + elapsed_s * self._rate_per_s)
        self._filled_at_s = max(self._filled_at_s, now_s)

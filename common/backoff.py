"""Exponential backoff and token bucket. Pure: the time is an argument."""

from __future__ import annotations

import msgspec


class Backoff(msgspec.Struct, frozen=True):
    """Waits that double from `first_s` up to `most_s`."""

    first_s: float
    max_s: float

    def wait_s(self, failures: int, jitter: float = 0.0) -> float:
        """After so many failures in a row; `jitter` in [0, 1) makes it up to half as long again, so that not everybody
        comes back at once. 0 after none."""
        if failures <= 0:
            return 0.0
        doublings = min(failures - 1, 64)
        return min(self.first_s * 2.0**doublings, self.max_s) * (1 + jitter / 2)


class TokenBucket:
    """Tokens that come at a rate above 0 and are kept up to a number."""

    def __init__(self, rate_per_s: float, max_tokens: float, now_s: float) -> None:
        self._rate_per_s, self._most = rate_per_s, max_tokens
        self._tokens, self._at_s = max_tokens, now_s

    def take(self, now_s: float) -> bool:
        """Whether there was a token; it is gone then."""
        self._fill(now_s)
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def reserve(self, now_s: float) -> float:
        """Take a token that may not be there yet: seconds until it is."""
        self._fill(now_s)
        self._tokens -= 1
        return max(0.0, -self._tokens / self._rate_per_s)

    def _fill(self, now_s: float) -> None:
        # A clock that went back gives nothing and takes nothing.
        passed_s = max(0.0, now_s - self._at_s)
        self._tokens = min(self._most, self._tokens + passed_s * self._rate_per_s)
        self._at_s = max(self._at_s, now_s)

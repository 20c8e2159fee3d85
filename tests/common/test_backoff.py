"""Waits that grow, and so many tokens a second."""

from __future__ import annotations

import pytest

from common.backoff import Backoff, TokenBucket


@pytest.mark.parametrize(
    ("failures", "jitter", "wait_s"),
    [(0, 0.9, 0), (1, 0, 0.5), (2, 0, 1), (5, 0, 8), (6, 0, 10), (10**9, 0, 10), (1, 0.5, 0.625), (6, 0.5, 12.5)],
)
def test_backoff(failures: int, jitter: float, wait_s: float) -> None:
    assert Backoff(first_s=0.5, max_s=10).wait_s(failures, jitter) == wait_s


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(0.2, 1, 0)
    assert [bucket.take(at) for at in (0, 1, 4.9, 5, 5.1, 100, 100.1)] == [True, False, False, True, False, True, False]


def test_a_clock_that_goes_back_gives_nothing_twice() -> None:
    bucket = TokenBucket(1, 1, 100)
    assert [bucket.take(at) for at in (100, 50, 100, 101)] == [True, False, False, True]


def test_reserved_tokens_are_paid_for_in_order() -> None:
    bucket = TokenBucket(10, 2, 0)
    assert [bucket.reserve(0) for _ in range(4)] == pytest.approx([0, 0, 0.1, 0.2])
    assert bucket.reserve(1) == 0

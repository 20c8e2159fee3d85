"""The order of token reviews while other clients guess tokens, with a clock that the test sets."""

from __future__ import annotations

import pytest

from common.http.review_queue import (
    MAX_RUNNING,
    MAX_SOURCES,
    MAX_WAITING,
    MEMORY_S,
    WRONG_TOKEN_BURST,
    WRONG_TOKENS_PER_S,
    ReviewQueue,
    token_prefix,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def guess(queue: ReviewQueue[str], key: str, *sources: str) -> None:
    """Review a wrong token."""
    queue.add(key, *sources)
    assert queue.take() == key
    queue.finish(key, *sources, wrong=True)


def test_reviews_run_in_the_order_of_arrival_and_not_too_many_at_once() -> None:
    queue = ReviewQueue[str](Clock())
    for number in range(MAX_RUNNING + 2):
        assert queue.add(f"r{number}", f"connection {number}") is None
    assert [queue.take() for _ in range(MAX_RUNNING + 1)] == [*(f"r{number}" for number in range(MAX_RUNNING)), None]
    queue.finish("r3", wrong=False)
    assert queue.take() == f"r{MAX_RUNNING}"


@pytest.mark.parametrize("shared", ["connection 1", "prefix p"])
def test_a_new_token_goes_before_those_of_a_connection_or_prefix_that_guesses(shared: str) -> None:
    clock = Clock()
    queue = ReviewQueue[str](clock)
    for number in range(5):
        guess(queue, f"g{number}", shared)
    queue.add("guess", shared, "other")
    clock.now += 0.3
    queue.add("good", "connection 2", "prefix q")
    assert [queue.take(), queue.take()] == ["good", "guess"]


def test_a_guesser_is_delayed_by_a_second_at_most_and_forgotten_after_a_minute() -> None:
    clock = Clock()
    queue = ReviewQueue[str](clock)
    for number in range(50):
        guess(queue, f"g{number}", "connection 1")
    queue.add("guess", "connection 1")
    clock.now += 1.1
    queue.add("late", "connection 2")
    assert queue.take() == "guess", "a good token behind the guesser's connection waits no longer than that"
    assert queue.take() == "late"
    clock.now += MEMORY_S
    queue.add("guess", "connection 1")
    queue.add("next", "connection 2")
    assert queue.take() == "guess"


def test_wrong_tokens_are_bounded_for_all_clients_and_right_ones_are_not() -> None:
    clock = Clock()
    queue = ReviewQueue[str](clock)
    served = 0
    for _ in range(200):  # ten seconds
        for number in range(20):
            queue.add(f"g{number}", f"connection {served}")
            if (key := queue.take()) is not None:
                served += 1
                queue.finish(key, wrong=True)
            else:
                queue.discard(f"g{number}")
        clock.now += 0.05
    assert served == pytest.approx(WRONG_TOKEN_BURST + 10 * WRONG_TOKENS_PER_S, abs=8)
    clock.now += 10
    for number in range(1000):
        queue.add(f"r{number}")
        assert queue.take() == f"r{number}"
        queue.finish(f"r{number}", wrong=False)


def test_a_known_token_is_not_paused() -> None:
    queue = ReviewQueue[str](Clock())
    for number in range(int(WRONG_TOKEN_BURST) + 3):
        queue.add(f"g{number}")
        queue.take()
        queue.finish(f"g{number}", wrong=True)
    queue.add("new")
    assert queue.take() is None
    assert queue.pause_s() > 0
    queue.add("known", is_known=True)
    assert queue.take() == "known"


def test_the_review_that_would_wait_longest_is_dropped() -> None:
    queue = ReviewQueue[str](Clock())
    guess(queue, "g", "connection 1")
    for number in range(MAX_WAITING - 1):
        queue.add(f"r{number}", f"connection {number + 2}")
    assert queue.add("guess", "connection 1") is None
    assert queue.add("good", "connection 9999") == "guess"
    assert queue.add("guess", "connection 1") == "guess", "itself"
    assert queue.discard("good")
    assert not queue.discard("good")


def test_what_is_remembered_is_bounded() -> None:
    clock = Clock()
    queue = ReviewQueue[str](clock)
    for number in range(2 * MAX_SOURCES):
        clock.now += 1
        guess(queue, f"g{number}", f"connection {number}")
    assert len(queue._wrong) == MAX_SOURCES


def test_a_prefix_is_all_but_the_signature() -> None:
    assert token_prefix("head.body.one") == token_prefix("head.body.two") != token_prefix("head.else.one")
    assert token_prefix("0123456789abcdef-1") == token_prefix("0123456789abcdef-2") != token_prefix("1123456789abcdef")
    assert "head" not in token_prefix("head.body.one")

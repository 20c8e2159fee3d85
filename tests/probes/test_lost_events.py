"""When losses are a problem; that probes count theirs is in tests/kernel."""

from __future__ import annotations

from probes.lost_events import RECENT_S, LostEventCounter


class Clock:
    """Stands where the test puts it, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def reason(losses: LostEventCounter) -> str | None:
    problem = losses.problem("waits were lost", "wait less")
    assert problem is None or problem.remedy == "wait less"
    return problem and problem.reason


def test_losses_are_a_problem_until_a_minute_after_they_grew_last_and_stay_a_number() -> None:
    clock = Clock()
    losses = LostEventCounter(clock)
    losses.update(0)
    assert reason(losses) is None
    losses.update(5)
    clock.now += RECENT_S - 1
    losses.update(5)
    assert reason(losses) == "5 waits were lost"
    clock.now += 1
    assert reason(losses) is None, "the minute is over, although nothing was read since"
    losses.update(5)
    assert (reason(losses), losses.total) == (None, 5)
    losses.update(6)
    assert reason(losses) == "6 waits were lost", "since the probe was opened"


def test_a_loss_every_few_seconds_is_one_problem_and_no_flicker() -> None:
    clock = Clock()
    losses, listings = LostEventCounter(clock), [{1: "/"} for _ in range(300)]
    observed = []
    for second, listing in enumerate(listings):
        clock.now += 1
        losses.grew_since_listing(second // 7, listing)
        observed.append(reason(losses) is not None)
    assert observed == [False] * 7 + [True] * 293


def test_losses_count_for_the_whole_interval_between_two_listings_and_then_no_more() -> None:
    losses, listings = LostEventCounter(), [{1: "/"}, {1: "/"}, {1: "/"}, {1: "/"}]
    assert not losses.grew_since_listing(0, listings[0])
    assert losses.grew_since_listing(5, listings[0]), "lost since the listing"
    assert losses.grew_since_listing(5, listings[0]), "a read in between does not forget that"
    assert losses.grew_since_listing(5, listings[1]), "the interval that ends here has lost 5"
    assert losses.grew_since_listing(5, listings[1])
    assert not losses.grew_since_listing(5, listings[2]), "nothing was lost between these two"
    assert losses.grew_since_listing(6, listings[3])
    assert losses.total == 6

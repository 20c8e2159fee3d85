"""Who leads, as a rule of lease and time; and several candidates, with clocks of their own, that obey it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kube.leader import LEASE_S, RENEW_S, Lease, LeaseSpec, Move, Seen, claim, move
from kube.objects import Meta


def lease(holder: str | None, version: str = "7", duration: int | None = LEASE_S, transitions: int | None = 2) -> Lease:
    spec = LeaseSpec(holder_identity=holder, lease_duration_seconds=duration, lease_transitions=transitions)
    return Lease(metadata=Meta(name="l", resource_version=version), spec=spec)


@pytest.mark.parametrize(
    ("seen", "now_s", "expected"),
    [
        (Seen(None, 0), 0, Move.CREATE),
        (Seen(lease("me"), 0), 0, Move.RENEW),
        (Seen(lease("me"), 0), 900, Move.RENEW),
        (Seen(lease("other"), 100), 100, Move.WAIT),
        (Seen(lease("other"), 100), 114.9, Move.WAIT),
        (Seen(lease("other"), 100), 115, Move.TAKE),
        (Seen(lease("other", duration=60), 100), 159, Move.WAIT),
        (Seen(lease("other", duration=60), 100), 160, Move.TAKE),
        (Seen(lease("other", duration=None), 100), 115, Move.TAKE),
        (Seen(lease("other", duration=1), 100), 101, Move.TAKE),
        (Seen(lease(""), 100), 100, Move.TAKE),  # given back
        (Seen(lease(None), 100), 100, Move.TAKE),
    ],
)
def test_the_rule(seen: Seen, now_s: float, expected: Move) -> None:
    assert move(seen, "me", now_s) is expected


def test_a_lease_is_as_old_as_its_version() -> None:
    first = Seen(None, 0).look(lease("other", "7"), 100)
    assert first.look(lease("other", "7"), 110).since_s == 100
    assert first.look(lease("other", "8"), 110).since_s == 110
    assert first.look(None, 120) == Seen(None, 120)


def test_claims_swap_on_the_version_that_was_seen() -> None:
    at_s = 1769851800.25
    taken = claim(Seen(lease("other"), 0), "me", at_s)
    moment = "2026-01-31T09:30:00.250000Z"
    assert taken == {
        "metadata": {"resourceVersion": "7"},
        "spec": {
            "holderIdentity": "me", "leaseDurationSeconds": 15, "renewTime": moment, "acquireTime": moment,
            "leaseTransitions": 3,
        },
    }  # fmt: skip
    assert claim(Seen(lease("me"), 0), "me", at_s)["spec"].keys() == {
        "holderIdentity",
        "leaseDurationSeconds",
        "renewTime",
    }
    assert claim(Seen(None, 0), "me", at_s)["metadata"] == {}
    assert claim(Seen(None, 0), "me", at_s)["spec"]["leaseTransitions"] == 0


class Candidate:
    """What `Election` does, without its tasks: looks and writes, and stops by itself when it could not renew."""

    def __init__(self, name: str, skew_s: float) -> None:
        self.name, self.skew_s = name, skew_s
        self.seen = Seen(None, 0)
        self.leads_until: float | None = None

    def leads(self, now_s: float) -> bool:
        return self.leads_until is not None and now_s < self.leads_until

    def step(self, kept: list[Lease | None], now_s: float, write_is_lost: bool) -> None:
        self.seen = self.seen.look(kept[0], now_s + self.skew_s)
        if move(self.seen, self.name, now_s + self.skew_s) is Move.WAIT:
            self.leads_until = None
            return
        # A compare-and-swap on what was seen a moment ago always goes through here.
        version = str(int(kept[0].metadata.resource_version) + 1 if kept[0] else 1)
        spec = msgspec.convert(claim(self.seen, self.name, now_s)["spec"], LeaseSpec)
        kept[0] = Lease(metadata=Meta(resource_version=version), spec=spec)
        if not write_is_lost:
            self.seen = self.seen.look(kept[0], now_s + self.skew_s)
            self.leads_until = now_s + RENEW_S


STEPS = st.lists(st.tuples(st.integers(0, 2), st.floats(0, 20), st.booleans()), max_size=60)


@given(STEPS, st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3))
def test_there_are_never_two_leaders_whatever_clocks_and_networks_do(
    steps: list[tuple[int, float, bool]], skews: list[float]
) -> None:
    kept: list[Lease | None] = [None]
    candidates = [Candidate(name, skew) for name, skew in zip("abc", skews, strict=True)]
    now_s = 0.0
    for who, passed_s, write_is_lost in steps:
        now_s += passed_s
        candidates[who].step(kept, now_s, write_is_lost)
        assert sum(candidate.leads(now_s) for candidate in candidates) <= 1

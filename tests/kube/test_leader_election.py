"""The rule of leader election, and several candidates with different clocks that follow it."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from kube import leader_election
from kube.leader_election import (
    LEASE_S,
    RENEW_S,
    LeaderElection,
    Lease,
    LeaseAction,
    LeaseSpec,
    ObservedLease,
    lease_patch,
    next_lease_action,
)
from kube.objects import KubeMetadata
from tests.builders.api_server import FakeApiServer, client_of, status_response


def lease(holder: str | None, version: str = "7", duration: int | None = LEASE_S, transitions: int | None = 2) -> Lease:
    spec = LeaseSpec(holder_identity=holder, lease_duration_seconds=duration, lease_transitions=transitions)
    return Lease(metadata=KubeMetadata(name="l", resource_version=version), spec=spec)


@pytest.mark.parametrize(
    ("observed", "now_s", "expected"),
    [
        (ObservedLease(None, 0), 0, LeaseAction.CREATE),
        (ObservedLease(lease("me"), 0), 0, LeaseAction.RENEW),
        (ObservedLease(lease("me"), 0), 900, LeaseAction.RENEW),
        (ObservedLease(lease("other"), 100), 100, LeaseAction.WAIT),
        (ObservedLease(lease("other"), 100), 114.9, LeaseAction.WAIT),
        (ObservedLease(lease("other"), 100), 115, LeaseAction.TAKE),
        (ObservedLease(lease("other", duration=60), 100), 159, LeaseAction.WAIT),
        (ObservedLease(lease("other", duration=60), 100), 160, LeaseAction.TAKE),
        (ObservedLease(lease("other", duration=None), 100), 115, LeaseAction.TAKE),
        (ObservedLease(lease("other", duration=1), 100), 101, LeaseAction.TAKE),
        (ObservedLease(lease(""), 100), 100, LeaseAction.TAKE),  # released
        (ObservedLease(lease(None), 100), 100, LeaseAction.TAKE),
    ],
)
def test_the_next_action_on_a_lease(observed: ObservedLease, now_s: float, expected: LeaseAction) -> None:
    assert next_lease_action(observed, "me", now_s) is expected


def test_a_lease_is_as_old_as_its_version() -> None:
    first = ObservedLease(None, 0).look(lease("other", "7"), 100)
    assert first.look(lease("other", "7"), 110).since_s == 100
    assert first.look(lease("other", "8"), 110).since_s == 110
    assert first.look(None, 120) == ObservedLease(None, 120)


def test_patches_of_a_lease_carry_the_observed_version() -> None:
    at_s = 1769851800.25
    acquired = lease_patch(ObservedLease(lease("other"), 0), "me", at_s)
    moment = "2026-01-31T09:30:00.250000Z"
    assert acquired == {
        "metadata": {"resourceVersion": "7"},
        "spec": {
            "holderIdentity": "me", "leaseDurationSeconds": 15, "renewTime": moment, "acquireTime": moment,
            "leaseTransitions": 3,
        },
    }  # fmt: skip
    assert lease_patch(ObservedLease(lease("me"), 0), "me", at_s)["spec"].keys() == {
        "holderIdentity",
        "leaseDurationSeconds",
        "renewTime",
    }
    assert lease_patch(ObservedLease(None, 0), "me", at_s)["metadata"] == {}
    assert lease_patch(ObservedLease(None, 0), "me", at_s)["spec"]["leaseTransitions"] == 0


class Candidate:
    """LeaderElection without its tasks: it reads and writes the lease, and stops when it could not renew it."""

    def __init__(self, name: str, skew_s: float) -> None:
        self.name, self.skew_s = name, skew_s
        self.observed = ObservedLease(None, 0)
        self.leads_until: float | None = None

    def leads(self, now_s: float) -> bool:
        return self.leads_until is not None and now_s < self.leads_until

    def step(self, stored: list[Lease | None], now_s: float, write_is_lost: bool) -> None:
        self.observed = self.observed.look(stored[0], now_s + self.skew_s)
        if next_lease_action(self.observed, self.name, now_s + self.skew_s) is LeaseAction.WAIT:
            self.leads_until = None
            return
        # Nothing writes between the observation and this write, so the compare-and-swap succeeds.
        version = str(int(stored[0].metadata.resource_version) + 1 if stored[0] else 1)
        spec = msgspec.convert(lease_patch(self.observed, self.name, now_s)["spec"], LeaseSpec)
        stored[0] = Lease(metadata=KubeMetadata(resource_version=version), spec=spec)
        if not write_is_lost:
            self.observed = self.observed.look(stored[0], now_s + self.skew_s)
            self.leads_until = now_s + RENEW_S


STEPS = st.lists(st.tuples(st.integers(0, 2), st.floats(0, 20), st.booleans()), max_size=60)


@given(STEPS, st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3))
def test_there_are_never_two_leaders_for_any_clocks_and_lost_writes(
    steps: list[tuple[int, float, bool]], skews: list[float]
) -> None:
    stored: list[Lease | None] = [None]
    candidates = [Candidate(name, skew) for name, skew in zip("abc", skews, strict=True)]
    now_s = 0.0
    for index, passed_s, write_is_lost in steps:
        now_s += passed_s
        candidates[index].step(stored, now_s, write_is_lost)
        assert sum(candidate.leads(now_s) for candidate in candidates) <= 1


@pytest.mark.parametrize("trouble", ["cut", "silent", "refused", "taken"])
async def test_work_has_ended_when_the_lease_could_not_be_renewed(
    monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """There is no lease, it is created, and from then on every request fails in one way."""
    monkeypatch.setattr(leader_election, "RENEW_S", 0.4)
    monkeypatch.setattr(leader_election, "RETRY_S", 0.1)
    made_at = 0.0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal made_at
        if request.method == "POST":
            made_at = time.monotonic()
            return status_response(
                201, '{"metadata":{"name":"l","resourceVersion":"1"},"spec":{"holderIdentity":"me"}}'
            )
        if not made_at:
            return status_response(404, '{"code":404,"reason":"NotFound","details":{"name":"l"}}')
        if trouble == "refused":
            return status_response(403, '{"code":403,"reason":"Forbidden"}')
        if trouble == "taken":
            return status_response(
                200, '{"metadata":{"name":"l","resourceVersion":"2"},"spec":{"holderIdentity":"other"}}'
            )
        if trouble == "silent":
            await asyncio.sleep(60)
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    ended_at = 0.0

    async def work() -> None:
        nonlocal ended_at
        try:
            await asyncio.sleep(60)
        finally:
            ended_at = time.monotonic()

    async with client_of(handler) as client:
        election = LeaderElection(client, "kat/l", "me")
        await asyncio.wait_for(election.lead(work), 5)
    assert not election.leading
    least_s = 0.0 if trouble == "taken" else 0.4
    assert least_s <= ended_at - made_at < LEASE_S


async def test_an_exception_of_the_work_is_raised_and_the_lease_is_released() -> None:
    async def work() -> None:
        raise ZeroDivisionError

    server = FakeApiServer()
    async with server.client() as client:
        with pytest.raises(ZeroDivisionError):
            await LeaderElection(client, "kat/l", "me").lead(work)
    assert [request.method for request in server.requests] == ["GET", "POST", "PATCH"]
    assert server.writes[-1].body == {
        "metadata": {"resourceVersion": "2"},
        "spec": {"holderIdentity": "", "leaseDurationSeconds": 1},
    }

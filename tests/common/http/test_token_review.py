"""Bearer tokens of cluster accounts: authorization, caching, and the cost of guessing."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import bcrypt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.journal.decisions import DecisionJournal
from api.interfaces import Unavailable
from common.http.token_review import (
    ALLOWED_CACHE_S,
    ALLOWED_FALLBACK_S,
    DENIED_CACHE_S,
    MAX_CACHED_REVIEWS,
    MAX_PENDING_REVIEWS,
    MAX_TOKEN_LETTERS,
    WRONG_TOKEN_PAUSE_S,
    TokenReviewer,
)
from common.http.web_config import WebConfig
from common.yaml_guard import check_yaml
from exporters.page.web_server import AgentWebServer
from tests.builders.four_cpu_node import busy_cycle

HERE, THERE = "192.0.2.1", "192.0.2.2"


class ApiServer:
    """Allows `good` to get /metrics and denies `poor` everything; counts reviews, and can be down or slow."""

    def __init__(self) -> None:
        self.reviews: list[tuple[str, str]] = []
        self.down = False
        self.answers = asyncio.Event()
        self.answers.set()

    async def __call__(self, token: str, path: str) -> bool | None:
        self.reviews.append((token, path))
        await self.answers.wait()
        if self.down:
            raise Unavailable("the API server is not there: refused", "look at the API server")
        return {"good": path == "/metrics", "poor": False}.get(token)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def status(tokens: TokenReviewer, token: str, path: str = "/metrics", address: str = HERE) -> int:
    refusal = await tokens.refusal(f"Bearer {token}", path, address)
    return 200 if refusal is None else refusal[0]


@pytest.mark.parametrize(
    ("authorization", "path", "expected"),
    [
        ("Bearer good", "/metrics", None),
        ("bearer  good ", "/metrics", None),
        ("Bearer good", "/api/v1/view", 403),
        ("Bearer poor", "/metrics", 403),
        ("Bearer unknown", "/metrics", 401),
        ("Basic good", "/metrics", 401),
        ("Bearer", "/metrics", 401),
        ("Bearer gööd", "/metrics", 401),
        (f"Bearer {'a' * (MAX_TOKEN_LETTERS + 1)}", "/metrics", 401),
        ("", "/metrics", 401),
    ],
)
async def test_authorization(authorization: str, path: str, expected: int | None) -> None:
    refusal = await TokenReviewer(ApiServer()).refusal(authorization, path, HERE)
    assert (None if refusal is None else refusal[0]) == expected


async def test_answers_are_remembered_for_as_long_as_they_say() -> None:
    server, clock = ApiServer(), Clock()
    tokens = TokenReviewer(server, clock)
    for _ in range(3):
        assert await status(tokens, "good") == 200
    clock.now += ALLOWED_CACHE_S - 0.1
    assert await status(tokens, "good") == 200
    assert len(server.reviews) == 1
    clock.now += 0.2
    assert await status(tokens, "good") == 200
    assert await status(tokens, "poor") == 403
    clock.now += DENIED_CACHE_S - 0.1
    assert await status(tokens, "poor") == 403
    assert len(server.reviews) == 3
    clock.now += 0.2
    assert await status(tokens, "poor") == 403
    assert len(server.reviews) == 4


async def test_an_allowed_token_stays_valid_for_ten_minutes_without_api_server() -> None:
    server, clock = ApiServer(), Clock()
    tokens = TokenReviewer(server, clock)
    assert await status(tokens, "good") == 200
    server.down = True
    clock.now += ALLOWED_FALLBACK_S - 1
    assert await status(tokens, "good") == 200
    assert await status(tokens, "good", "/metrics", THERE) == 200
    clock.now += 2
    refusal = await tokens.refusal("Bearer good", "/metrics", HERE)
    assert refusal == (
        503,
        "the token cannot be reviewed: the API server is not there: refused",
        "look at the API server",
    )
    server.down = False
    assert await status(tokens, "good") == 200


async def test_a_server_that_says_nothing_keeps_no_known_scraper_waiting_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("common.http.token_review.REVIEW_TIMEOUT_S", 0.05)
    server, clock = ApiServer(), Clock()
    tokens = TokenReviewer(server, clock)
    assert await status(tokens, "good") == 200
    server.answers.clear()
    clock.now += ALLOWED_CACHE_S
    assert await status(tokens, "good") == 200
    assert await status(tokens, "poor", address=THERE) == 503
    # Both reviews are pending until the responses arrive.
    server.answers.set()
    await asyncio.sleep(0.01)
    assert await status(tokens, "poor") == 403
    assert len(server.reviews) == 3


async def test_a_token_that_was_taken_away_is_good_for_a_minute_at_most() -> None:
    server, clock = ApiServer(), Clock()
    answers: list[bool | None] = [True, None]

    async def review(token: str, path: str) -> bool | None:
        server.reviews.append((token, path))
        return answers.pop(0)

    tokens = TokenReviewer(review, clock)
    assert await status(tokens, "good") == 200
    clock.now += ALLOWED_CACHE_S
    assert await status(tokens, "good") == 401


async def test_an_address_with_wrong_tokens_gets_one_review_a_second_and_blocks_no_other() -> None:
    server, clock = ApiServer(), Clock()
    tokens = TokenReviewer(server, clock)
    assert await status(tokens, "good") == 200
    assert [await status(tokens, f"guess{n}") for n in range(5)] == [401, 429, 429, 429, 429]
    assert await status(tokens, "guess0") == 401
    assert await status(tokens, "other", address=THERE) == 401
    assert await status(tokens, "good") == 200
    # Nor one that is known and may not: that was no guess.
    clock.now += WRONG_TOKEN_PAUSE_S
    assert await status(tokens, "poor") == 403
    assert await status(tokens, "good", "/other") == 403
    server.reviews = server.reviews[:-2]
    # Behind the same address, as behind a proxy, one that is known and due for a review is not held up.
    clock.now += ALLOWED_CACHE_S
    assert await status(tokens, "guess5") == 401
    assert await status(tokens, "good") == 200
    clock.now += WRONG_TOKEN_PAUSE_S
    assert await status(tokens, "guess6") == 401
    assert len(server.reviews) == 6


async def test_the_files_of_the_page_are_one_question() -> None:
    paths: list[str] = []

    async def review(_token: str, path: str) -> bool:
        paths.append(path)
        await asyncio.sleep(0.01)
        return True

    tokens = TokenReviewer(review)
    static_paths = [f"/static/{name}.js" for name in "abcdefgh"]
    assert await asyncio.gather(*(status(tokens, "good", path) for path in static_paths)) == [200] * 8
    assert paths == ["/dioptase/static/"]
    # Paths with data of the node are reviewed separately.
    assert await asyncio.gather(*(status(tokens, "good", f"/api/v1/{name}") for name in ("view", "config"))) == [
        200,
        429,
    ]


async def test_pending_reviews_are_limited_and_shared() -> None:
    server = ApiServer()
    server.answers.clear()
    tokens = TokenReviewer(server)
    asking = [asyncio.create_task(status(tokens, f"t{n}", address=f"192.0.2.{n}")) for n in range(MAX_PENDING_REVIEWS)]
    same = asyncio.create_task(status(tokens, "t0", address=THERE))
    await asyncio.sleep(0)
    assert await status(tokens, "late", address="198.51.100.1") == 429
    # The first request is cancelled; the second one waits for the same review.
    asking[0].cancel()
    server.answers.set()
    assert await same == 401
    assert await asyncio.gather(*asking[1:]) == [401] * (MAX_PENDING_REVIEWS - 1)
    assert len(server.reviews) == MAX_PENDING_REVIEWS


async def test_denied_requests_do_not_displace_allowed_results() -> None:
    server, clock = ApiServer(), Clock()
    tokens = TokenReviewer(server, clock)
    assert await status(tokens, "good") == 200
    for number in range(MAX_CACHED_REVIEWS + 1):
        assert await status(tokens, "poor", f"/{number}", THERE) == 403
    server.down = True
    clock.now += ALLOWED_CACHE_S
    assert await status(tokens, "good") == 200, "as before the API server became unreachable"


async def test_what_is_remembered_is_bounded() -> None:
    server, clock = ApiServer(), Clock()
    tokens = TokenReviewer(server, clock)
    for number in range(MAX_CACHED_REVIEWS + 1):
        await status(tokens, f"t{number}", address=f"host{number}")
    assert await status(tokens, "t1", address="new") == 401
    assert len(server.reviews) == MAX_CACHED_REVIEWS + 1
    assert await status(tokens, "t0", address="newer") == 401
    assert len(server.reviews) == MAX_CACHED_REVIEWS + 2


@pytest.fixture
async def url() -> AsyncIterator[str]:
    server = AgentWebServer(journal=DecisionJournal(None), version="1", tokens=TokenReviewer(ApiServer()))
    port = await server.start("127.0.0.1", 0)
    server.publish(busy_cycle(1))
    yield f"http://127.0.0.1:{port}"
    await server.stop()


@pytest.mark.parametrize(
    ("path", "headers", "code", "body"),
    [
        ("/metrics", {"Authorization": "Bearer good"}, 200, "dioptase_"),
        ("/metrics", {"X-Dioptase-Authorization": "Bearer good"}, 200, "dioptase_"),
        ("/metrics", {}, 401, "send `Authorization: Bearer TOKEN`"),
        ("/metrics", {"Authorization": "Bearer poor"}, 403, "may not get /metrics"),
        ("/", {}, 401, "token"),
        ("/api/v1/snapshot", {"Authorization": "Bearer good"}, 403, "may not get /dioptase/api/v1/snapshot"),
        ("/healthz", {}, 200, "ok\n"),
        ("/readyz", {}, 200, "ok\n"),
        ("/healthz/", {}, 401, "token"),
        ("/healthz", {"Authorization": "Bearer unknown"}, 401, "does not know this token"),
    ],
)
async def test_the_server_asks_for_tokens_but_for_health(
    url: str, path: str, headers: dict[str, str], code: int, body: str
) -> None:
    async with aiohttp.ClientSession() as session, session.get(url + path, headers=headers) as answer:
        assert answer.status == code
        authorization = await answer.text()
        assert authorization == body if body == "ok\n" else body in authorization
        assert answer.headers.get("WWW-Authenticate") == ('Bearer realm="dioptase"' if code == 401 else None)


async def test_health_without_token_returns_only_the_status() -> None:
    server = AgentWebServer(journal=DecisionJournal(None), version="1", tokens=TokenReviewer(ApiServer()))
    port = await server.start("127.0.0.1", 0)
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/readyz") as answer:
        assert (answer.status, await answer.text()) == (503, "not ok\n")
    await server.stop()


async def test_with_passwords_too_either_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "web.yml"
    path.write_text(f"basic_auth_users:\n  me: {bcrypt.hashpw(b'secret', bcrypt.gensalt(4)).decode()}\n")
    server = AgentWebServer(
        journal=DecisionJournal(None),
        version="1",
        web_config=WebConfig(path, check_yaml),
        tokens=TokenReviewer(ApiServer()),
    )
    port = await server.start("127.0.0.1", 0)
    server.publish(busy_cycle(1))
    authorization = {
        "Bearer good": 200,
        "bearer unknown": 401,
        f"Basic {base64.b64encode(b'me:secret').decode()}": 200,
        f"basic {base64.b64encode(b'me:wrong').decode()}": 401,
        "Basic": 401,
    }
    async with aiohttp.ClientSession() as session:
        responses = {}
        for header in authorization:
            async with session.get(f"http://127.0.0.1:{port}/metrics", headers={"Authorization": header}) as answer:
                responses[header] = answer.status
    await server.stop()
    assert responses == authorization


@given(authorization=st.text(max_size=200))
async def test_any_header_gets_a_response(authorization: str) -> None:
    refusal = await TokenReviewer(ApiServer()).refusal(authorization, "/metrics", HERE)
    assert refusal is None or refusal[0] in (401, 403)
    assert (refusal is None) == (
        authorization.partition(" ")[0].lower() == "bearer" and authorization.partition(" ")[2].strip() == "good"
    )

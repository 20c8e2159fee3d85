"""Bearer tokens of cluster accounts: authorization, caching, and clients that guess tokens."""

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
from common.http.review_queue import MAX_RUNNING, MAX_WAITING, WRONG_TOKEN_BURST
from common.http.token_review import (
    ALLOWED_CACHE_S,
    ALLOWED_FALLBACK_S,
    DENIED_CACHE_S,
    MAX_CACHED_REVIEWS,
    MAX_TOKEN_LETTERS,
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


async def test_a_good_token_is_never_refused_by_a_client_that_guesses() -> None:
    """All requests through the API server's proxy have one address, and its connections serve every client."""
    server = ApiServer()
    tokens = TokenReviewer(server)
    guesses: list[int] = []

    async def guess(number: int) -> None:
        """Send new tokens of new accounts over ever new connections: the guesser that is hardest to tell apart."""
        for attempt in range(1000):
            guesses.append(await status(tokens, f"{number}.{attempt}.x", address=f"{HERE}:{number}.{attempt}"))

    guessing = [asyncio.create_task(guess(number)) for number in range(40)]
    await asyncio.sleep(0.05)
    for connection in (f"{HERE}:40000", f"{HERE}:1.1"):  # the second has sent wrong tokens before
        assert await status(tokens, "good", address=connection) == 200
        tokens._allowed.clear()
    for task in guessing:
        task.cancel()
    await asyncio.gather(*guessing, return_exceptions=True)
    assert set(guesses) == {401}


async def test_a_known_token_is_not_delayed_by_clients_that_guess() -> None:
    server, clock = ApiServer(), Clock()
    tokens = TokenReviewer(server, clock)
    assert await status(tokens, "good") == 200
    guessing = [asyncio.create_task(status(tokens, f"guess{number}")) for number in range(100)]
    await asyncio.sleep(0)
    clock.now += ALLOWED_CACHE_S
    assert await status(tokens, "good") == 200
    position = [token for token, _path in server.reviews].index("good", 1)
    assert position <= 1 + WRONG_TOKEN_BURST + MAX_RUNNING, "before the guesses that are paused"
    for task in guessing:
        task.cancel()
    await asyncio.gather(*guessing, return_exceptions=True)
    assert not tokens._reviews, "nothing waits for a client that has gone"


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
        200,
    ]
    assert paths == ["/dioptase/static/", "/dioptase/api/v1/view", "/dioptase/api/v1/config"]


async def test_pending_reviews_are_limited_and_shared() -> None:
    server = ApiServer()
    server.answers.clear()
    tokens = TokenReviewer(server)
    asking = [asyncio.create_task(status(tokens, f"t{n}", address=f"192.0.2.{n}")) for n in range(MAX_RUNNING + 1)]
    same = asyncio.create_task(status(tokens, "t0", address=THERE))
    await asyncio.sleep(0.01)
    assert len(server.reviews) == MAX_RUNNING, "the last one waits"
    # The first request is cancelled; the second one waits for the same review.
    asking[0].cancel()
    server.answers.set()
    assert await same == 401
    assert await asyncio.gather(*asking[1:]) == [401] * MAX_RUNNING
    assert len(server.reviews) == MAX_RUNNING + 1


async def test_too_many_waiting_reviews_drop_that_of_the_client_that_guesses() -> None:
    server = ApiServer()
    tokens = TokenReviewer(server)
    assert await status(tokens, "wrong", address=THERE) == 401
    server.answers.clear()
    count = MAX_RUNNING + MAX_WAITING - 1
    asking = [asyncio.create_task(status(tokens, f"t{n}", address=f"192.0.2.{n}")) for n in range(count)]
    guess = asyncio.create_task(status(tokens, "guess", address=THERE))
    good = asyncio.create_task(status(tokens, "good", address="192.0.2.250"))
    assert await guess == 429
    for task in asking:
        task.cancel()
    server.answers.set()
    assert await good == 200
    await asyncio.gather(*asking, return_exceptions=True)


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
        await status(tokens, "poor", f"/{number}")
    assert await status(tokens, "poor", "/1") == 403
    assert len(server.reviews) == MAX_CACHED_REVIEWS + 1
    assert await status(tokens, "poor", "/0") == 403
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


async def test_paths_that_are_not_served_are_one_review() -> None:
    """One account without any right caused two thousand reviews per second in the agent's name, by paths of its own."""
    api_server = ApiServer()
    server = AgentWebServer(journal=DecisionJournal(None), version="1", tokens=TokenReviewer(api_server))
    port = await server.start("127.0.0.1", 0)
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer poor"}) as session:
        for path in ("/1", "/2", "/api/v1/3", "/static/4/5", "/metrics/6", "/"):
            async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
                assert answer.status == 403
        async with session.post(f"http://127.0.0.1:{port}/metrics") as answer:
            assert answer.status == 403
    assert api_server.reviews == [("poor", "/dioptase/")]
    await server.stop()


async def test_a_new_token_and_health_are_answered_despite_a_guesser_at_the_same_address(url: str) -> None:
    statuses: list[int] = []

    async def guess(number: int) -> None:
        async with aiohttp.ClientSession() as session:
            for attempt in range(1000):
                headers = {"Authorization": f"Bearer {number}.{attempt}.x"}
                async with session.get(f"{url}/metrics", headers=headers) as answer:
                    statuses.append(answer.status)

    guessing = [asyncio.create_task(guess(number)) for number in range(30)]
    while len(statuses) < 60:
        await asyncio.sleep(0.01)
    for path, headers in (("/metrics", {"Authorization": "Bearer good"}), ("/healthz", {}), ("/readyz", {})):
        async with aiohttp.ClientSession() as session, session.get(url + path, headers=headers) as answer:
            assert answer.status == 200
    for task in guessing:
        task.cancel()
    await asyncio.gather(*guessing, return_exceptions=True)
    assert set(statuses) == {401}


async def test_paths_that_are_not_served_cost_one_review() -> None:
    """Each review is two requests to the API server, and an account without rights could cause any number."""
    api_server = ApiServer()
    server = AgentWebServer(journal=DecisionJournal(None), version="1", tokens=TokenReviewer(api_server))
    port = await server.start("127.0.0.1", 0)
    headers = {"Authorization": "Bearer poor"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for number in range(50):
            async with session.get(f"http://127.0.0.1:{port}/api/v1/{number}") as answer:
                assert answer.status == 403
    await server.stop()
    assert len(api_server.reviews) == 1


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

"""The server with TLS and passwords: what it lets in, what it refuses to start with, and that it follows its files."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import bcrypt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.journal.decisions import DecisionJournal
from api.interfaces import Unavailable
from cli.client import AgentClient
from common.http import passwords, web_config
from common.http.passwords import PasswordChecker, TooManyChecks
from common.http.web_config import MAX_FILE_BYTES, WebConfig, WebSecurity
from common.yaml_guard import check_yaml
from exporters.page.web_server import AgentWebServer
from tests.builders.four_cpu_node import busy_cycle
from tests.builders.waiting import until_async
from tests.exporters.certificates import Authority

SECRET = "correct horse"
SALT = b"abcdefghijklmnopqrstuu"
"""One, because names of tests have what it gives, and workers of pytest must call them alike."""
HASHED = bcrypt.hashpw(SECRET.encode(), b"$2b$04$" + SALT).decode()
SLOW = bcrypt.hashpw(SECRET.encode(), b"$2b$10$" + SALT).decode()
HERE = "192.0.2.1"
YAML = "tls_server_config:\n {}[]-&*!'\"basic_auth_users$2b"
USERS = f"basic_auth_users:\n  prometheus: {HASHED}\n"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    authority = Authority(tmp_path_factory.mktemp("ca"))
    authority.issue("server")
    authority.issue("client")
    return authority


@pytest.fixture
def web(tmp_path: Path, authority: Authority) -> Callable[[str], WebConfig]:
    """Write the web configuration file next to the certificates that it names, and read it."""
    for file in authority.directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())

    def write(text: str) -> WebConfig:
        path = tmp_path / "web.yml"
        path.write_text(text)
        return WebConfig(path, check_yaml)

    return write


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[WebConfig | None], object]]:
    servers: list[AgentWebServer] = []

    async def start(config: WebConfig | None) -> int:
        server = AgentWebServer(journal=DecisionJournal(None), version="1", web_config=config)
        servers.append(server)
        port = await server.start("127.0.0.1", 0)
        server.publish(busy_cycle(2))
        return port

    yield start
    for server in servers:
        await server.stop()


def trusting(authority: Authority, *, certificate: str = "") -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.certificate))
    if certificate:
        context.load_cert_chain(authority.directory / f"{certificate}.crt", authority.directory / f"{certificate}.key")
    return context


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


async def get(url: str, *, tls: ssl.SSLContext | bool = True, user: str = "", password: str = "") -> tuple[int, str]:
    headers = {"Authorization": basic(user, password)} if user else {}
    async with aiohttp.ClientSession() as session, session.get(url, ssl=tls, headers=headers) as answer:
        return answer.status, await answer.text()


TLS = "tls_server_config: {cert_file: server.crt, key_file: server.key}\n"


async def test_metrics_over_tls_with_a_trusted_authority(web, serve, authority) -> None:
    port = await serve(web(TLS))
    status, text = await get(f"https://localhost:{port}/metrics", tls=trusting(authority))
    assert status == 200
    assert "dioptase_reclaim_lent_cores 2.5" in text
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await get(f"https://localhost:{port}/metrics")
    with pytest.raises(aiohttp.ClientError):
        await get(f"http://localhost:{port}/metrics")


async def test_a_client_without_a_certificate_is_refused_where_one_is_required(web, serve, authority) -> None:
    mutual = "client_auth_type: RequireAndVerifyClientCert, client_ca_file: ca.crt, min_version: TLS13"
    port = await serve(web(TLS.replace("}", f", {mutual}}}")))
    url = f"https://localhost:{port}/healthz"
    assert (await get(url, tls=trusting(authority, certificate="client")))[0] == 200
    with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
        await get(url, tls=trusting(authority))
    old = trusting(authority, certificate="client")
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(aiohttp.ClientError):
        await get(url, tls=old)


@pytest.mark.parametrize(
    "path", ["/", "/metrics", "/healthz", "/api/v1/view", "/api/v1/history", "/static/app.js", "/nothing"]
)
async def test_nothing_is_served_without_the_password(web, serve, path: str) -> None:
    port = await serve(web(USERS))
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as answer:
        assert answer.status == 401
        assert answer.headers["WWW-Authenticate"].startswith('Basic realm="dioptase"')
        assert (await answer.json())["error"] == "this agent requires a user and a password"
    status, _ = await get(f"http://127.0.0.1:{port}{path}", user="prometheus", password=SECRET)
    assert status == (404 if path == "/nothing" else 200)


@pytest.mark.parametrize(
    "header",
    ["", "Basic", "Basic !!!", "Bearer abc", "Basic " + base64.b64encode(b"prometheus").decode(),
     *("Basic " + base64.b64encode(text).decode() for text in (
         b"prometheus:wrong", b"nobody:correct horse", b":correct horse", b"prometheus:", b"prometheus:correct horse\0",
         b"\xff:correct horse", b"prometheus:" + b"x" * 5000))],
)  # fmt: skip
async def test_what_is_no_right_password_is_refused(header: str) -> None:
    checker = PasswordChecker({"prometheus": HASHED})
    assert await checker.authenticates(header, HERE) is False
    assert await checker.authenticates(header, HERE) is False


@pytest.mark.parametrize("prefix", ["$2a$", "$2b$", "$2y$"])
async def test_every_usual_spelling_of_bcrypt_is_taken(prefix: str) -> None:
    checker = PasswordChecker({"größe": HASHED.replace("$2b$", prefix)})
    given = base64.b64encode(f"größe:{SECRET}".encode()).decode()
    assert await checker.authenticates(f"basic {given}", HERE) is True


def counted(checker: PasswordChecker) -> list[bytes]:
    """Passwords that bcrypt checks from now on."""
    checks: list[bytes] = []
    real = checker._check
    checker._check = lambda password, hashed: bool(checks.append(password)) or real(password, hashed)
    return checks


async def test_a_right_password_is_checked_once_however_many_wrong_ones_come_in_between() -> None:
    checker = PasswordChecker({"prometheus": HASHED})
    checks = counted(checker)
    right = basic("prometheus", SECRET)
    for _ in range(5):
        assert await checker.authenticates(right, HERE)
    assert checks == [SECRET.encode()]
    for i in range(passwords.MAX_CACHED_RESULTS + 20):
        assert not await checker.authenticates(basic("prometheus", str(i)), "192.0.2.66")
    assert await checker.authenticates(right, HERE)
    assert checks.count(SECRET.encode()) == 1
    assert {answer: len(cached) for answer, cached in checker._results.items()} == {
        True: 1,
        False: passwords.MAX_CACHED_RESULTS,
    }


async def test_guessers_wait_for_one_another_and_the_rest_is_turned_away() -> None:
    checker = PasswordChecker({"prometheus": SLOW})
    guesses = [
        checker.authenticates(basic("prometheus", str(i)), f"192.0.2.{i}")
        for i in range(passwords.MAX_PENDING_CHECKS + 5)
    ]
    answers = await asyncio.gather(*guesses, return_exceptions=True)
    assert answers.count(False) == passwords.MAX_PENDING_CHECKS
    assert sum(isinstance(answer, TooManyChecks) for answer in answers) == 5


async def test_a_new_scraper_is_served_while_another_address_guesses_passwords() -> None:
    checker = PasswordChecker({"prometheus": SLOW})
    checks = counted(checker)
    guesses = [checker.authenticates(basic("prometheus", str(i)), "192.0.2.66") for i in range(200)]
    *guessed, admitted = await asyncio.gather(
        *guesses, checker.authenticates(basic("prometheus", SECRET), HERE), return_exceptions=True
    )
    assert admitted is True
    assert checks == [b"0", SECRET.encode()], "behind one guess, not behind 200"
    assert sum(isinstance(answer, TooManyChecks) for answer in guessed) == 199


async def test_one_password_that_comes_several_times_at_once_is_one_check() -> None:
    """As when a browser opens the page."""
    checker = PasswordChecker({"prometheus": HASHED})
    checks = counted(checker)
    answers = await asyncio.gather(*(checker.authenticates(basic("prometheus", SECRET), HERE) for _ in range(6)))
    assert (answers, checks) == ([True] * 6, [SECRET.encode()])


async def test_checks_that_end_with_the_checker_are_to_come_again() -> None:
    checker = PasswordChecker({"prometheus": SLOW})
    guesses = [asyncio.create_task(checker.authenticates(basic("a", "b"), f"192.0.2.{i}")) for i in range(2)]
    guesses.append(asyncio.create_task(checker.authenticates(basic("prometheus", SECRET), HERE)))
    await asyncio.sleep(0)
    checker.close()
    *_, cancelled = await asyncio.gather(*guesses, return_exceptions=True)
    assert isinstance(cancelled, TooManyChecks)


async def test_excess_checks_are_rejected_with_retry_after(web, serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passwords, "MAX_PENDING_CHECKS", 0)
    url, headers = f"http://127.0.0.1:{await serve(web(USERS))}/metrics", {"Authorization": basic("prometheus", SECRET)}
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (429, "5")
        assert (await answer.json())["remedy"] == "retry after 5 seconds"


async def test_passwords_wait_for_no_other_work() -> None:
    """Scrapes and files are rendered in a few threads, and a busy one of those is no reason to keep a scraper out."""
    release = threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    busy = asyncio.create_task(asyncio.to_thread(release.wait, 20))
    try:
        assert await asyncio.wait_for(PasswordChecker({"a": HASHED}).authenticates(basic("a", SECRET), HERE), 10)
    finally:
        release.set()
        await busy


async def test_an_unknown_user_takes_as_long_as_an_existing_one() -> None:
    checker = PasswordChecker({"prometheus": HASHED})
    hashes: list[bytes] = []
    real = checker._check
    checker._check = lambda password, hashed: bool(hashes.append(hashed)) or real(password, hashed)
    assert not await checker.authenticates(basic("nobody", SECRET), HERE)
    assert hashes == [HASHED.encode()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tls_server_config: {cert_file: server.crt}", "tls_server_config: Object missing required field `key_file`"),
        ("http_server_config: {http2: false}", "top level: Object contains unknown field `http_server_config`"),
        (TLS.replace("}", ", cipher_suites: [x]}"), "tls_server_config: Object contains unknown field `cipher_suites`"),
        (TLS.replace("}", ", min_version: TLS10}"), "min_version: Invalid enum value 'TLS10', choose from TLS12, TLS13"),
        (TLS.replace("}", ", client_auth_type: RequireAnyClientCert}"), "Invalid enum value 'RequireAnyClientCert'"),
        (TLS.replace("}", ", client_auth_type: RequireAndVerifyClientCert}"), "client_ca_file is missing"),
        (TLS.replace("}", ", client_ca_file: ca.crt}"), "client_auth_type admits every client"),
        (TLS.replace("server.key", "client.key"), "are no certificate and its key: "),
        (TLS.replace("server.key", "gone.key"), "gone.key: cannot be used: No such file or directory"),
        (TLS.replace("server.crt", "web.yml"), "are no certificate and its key: "),
        ("basic_auth_users: {a: secret}", "basic_auth_users: a: not a bcrypt hash; make one with htpasswd"),
        (f"basic_auth_users: {{'a:b': {HASHED}}}", "'a:b' is no user name"),
        (f"basic_auth_users: {{a: {HASHED.replace('$04$', '$31$')}}}", "a cost of 31; use 4 to 16"),
        (f"basic_auth_users:\n  a: {HASHED}\n  a: {HASHED}\n", "line 3: key 'a' occurs twice"),
        ("basic_auth_users: [", "not YAML"),
        ("- 1", "top level: Expected `object`, got `array`"),
        ("[]", "top level: Expected `object`, got `array`"),
        ("false", "top level: Expected `object`, got `bool`"),
        ("", "it is empty; to use neither TLS nor passwords, write {}"),
        ("# users:\n", "it is empty"),
        ("null", "it is empty"),
        ("basic_auth_users:\n", "basic_auth_users: it is empty; to disable it, write `basic_auth_users: {}`"),
        (f"tls_server_config:\n{USERS}", "tls_server_config: it is empty"),
        ("{}" + " " * MAX_FILE_BYTES, "has more than 1048576 bytes"),
    ],
)  # fmt: skip
def test_an_invalid_file_is_rejected_by_field(web, text: str, message: str) -> None:
    with pytest.raises(Unavailable) as refused:
        web(text).load()
    assert message in refused.value.reason
    assert refused.value.remedy


@pytest.mark.prometheus
def test_what_is_taken_here_prometheus_takes_too(web, promtool: str, tmp_path: Path) -> None:
    mutual = "client_auth_type: RequireAndVerifyClientCert, client_ca_file: ca.crt, min_version: TLS13"
    secured = web(TLS.replace("}", f", {mutual}}}") + USERS).load()
    assert secured.tls is not None
    assert secured.tls.verify_mode is ssl.CERT_REQUIRED
    checked = subprocess.run(
        [promtool, "check", "web-config", str(tmp_path / "web.yml")], capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stderr


def test_braces_alone_ask_for_nothing_and_a_missing_file_is_refused(web, tmp_path: Path) -> None:
    for text in ("{}", "basic_auth_users: {}\ntls_server_config: {}\n"):
        nothing = web(text).load()
        assert (nothing.tls, nothing.users) == (None, {})
    with pytest.raises(Unavailable, match=r"none\.yml: cannot be used: No such file or directory"):
        WebConfig(tmp_path / "none.yml", check_yaml).load()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty"),
        (TLS, "basic_auth_users is in effect, but missing now; to disable it, write `basic_auth_users: {}`"),
        (USERS, "tls_server_config is in effect, but missing now"),
        (TLS + "basic_auth_users:\n", "basic_auth_users: it is empty"),
        ("tls_server_config:\n" + USERS, "tls_server_config: it is empty"),
    ],
)
def test_protection_is_not_lost_by_accident(web, tmp_path: Path, text: str, message: str) -> None:
    """The file may be read while it is being written."""
    config = web(TLS + USERS)
    config.load()
    (tmp_path / "web.yml").write_text(text)
    with pytest.raises(Unavailable) as refused:
        config.load()
    assert message in refused.value.reason


@pytest.mark.parametrize(
    ("text", "encrypted", "users"),
    [("{}", False, 0), (TLS + "basic_auth_users: {}\n", True, 0), ("tls_server_config: {}\n" + USERS, False, 1)],
)
def test_protection_goes_by_braces(web, tmp_path: Path, text: str, encrypted: bool, users: int) -> None:
    config = web(TLS + USERS)
    config.load()
    (tmp_path / "web.yml").write_text(text)
    for _ in range(2):
        loaded = config.load()
        assert (loaded.tls is not None, len(loaded.users)) == (encrypted, users)


@pytest.mark.parametrize("name", ["web.yml", "server.crt", "server.key"])
def test_a_pipe_is_refused_and_not_waited_for(web, tmp_path: Path, name: str) -> None:
    config = web(TLS)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(Unavailable, match=f"{name}: cannot be used: not a regular file"):
        config.load()


@given(st.one_of(st.binary(max_size=200), st.text(alphabet=YAML, max_size=80).map(str.encode)))
@settings(deadline=None, max_examples=300)
def test_garbage_is_refused_with_a_remedy_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, text: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "garbage.yml"
    path.write_bytes(text)
    loaded, reason = WebSecurity(), str(path)
    try:
        loaded = WebConfig(path, check_yaml).load()
    except Unavailable as refused:
        reason = refused.reason
    assert loaded == WebSecurity()
    assert reason.startswith(str(path))


@given(st.text(st.characters(), max_size=60))
@settings(deadline=None, max_examples=300)
def test_no_text_of_a_header_breaks_the_check(header: str) -> None:
    async def responds() -> bool:
        return await PasswordChecker({"prometheus": HASHED}).authenticates(header, HERE)

    assert asyncio.run(responds()) is False


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.05)


async def test_new_users_and_certificates_are_taken_without_a_connection_lost(
    web, serve, authority, tmp_path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(web_config, "POLL_INTERVAL_S", 0.02)
    port = await serve(web(TLS))
    url = f"https://localhost:{port}/healthz"
    other = Authority(tmp_path, "other-ca")
    certificate, key = other.issue("next")
    before = trusting(authority)  # a connection is used again under the same context alone
    async with aiohttp.ClientSession() as session:
        async with session.get(url, ssl=before) as answer:
            await answer.read()
        for path, name in ((certificate, "server.crt"), (key, "server.key")):
            path.replace(tmp_path / name)

        async def renewed() -> bool:
            try:
                return (await get(url, tls=trusting(other)))[0] == 200
            except aiohttp.ClientConnectorCertificateError:
                return False

        await until(renewed)
        async with session.get(url, ssl=before) as answer:
            assert answer.status == 200, "the connection that was open goes on"
    with caplog.at_level(logging.INFO):
        web(TLS + USERS)

        async def responds() -> bool:
            return (await get(url, tls=trusting(other)))[0] == 401

        await until(responds)
        web(TLS + "basic_auth_users: {a: b}\n")
        await until_async(lambda: "the web configuration was not changed" in caplog.text)
    assert (await get(url, tls=trusting(other), user="prometheus", password=SECRET))[0] == 200


async def test_a_configuration_that_is_rejected_is_reported_once_and_the_next_one_applied(
    web, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(web_config, "POLL_INTERVAL_S", 0.02)
    config = web("{}")
    config.load()
    applied: list[bool] = []

    async def apply(secured: WebSecurity) -> None:
        if secured.users:
            raise Unavailable("no passwords here", "remove them")
        applied.append(secured.tls is not None)

    following = asyncio.create_task(config.follow(apply))
    web(USERS)
    await until_async(lambda: "the web configuration was not changed: no passwords here: remove them" in caplog.text)
    await asyncio.sleep(0.1)
    assert (caplog.text.count("no passwords here"), applied) == (1, [])
    web(TLS + "basic_auth_users: {}\n")
    await until_async(lambda: applied == [True])
    following.cancel()


async def test_the_command_line_comes_in_with_the_user_of_its_url(web, serve) -> None:
    port = await serve(web(USERS))
    secret = SECRET.replace(" ", "%20")
    client = AgentClient(f"http://prometheus:{secret}@127.0.0.1:{port}")
    assert (await asyncio.to_thread(client.view)).seq == 2
    assert client.url == f"http://127.0.0.1:{port}", "what is shown has no password in it"
    with pytest.raises(Unavailable, match="requires a user and a password"):
        await asyncio.to_thread(AgentClient(f"http://127.0.0.1:{port}").view)

"""What `top` and `explain` say where the agent asks for TLS or a password and did not get it: each with what really helps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import bcrypt
import pytest

from api.interfaces import Unavailable
from cli.client import AgentClient
from common.http.token_review import TokenReviewer
from common.http.web_config import WebConfig
from common.yaml_guard import check_yaml
from tests.builders import colocation_run
from tests.builders.agent_server import AgentServer
from tests.exporters.certificates import Authority


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[AgentServer, Path]]:
    """An agent with a certificate of an authority of its own and one user, and that authority's certificate."""
    authority = Authority(tmp_path_factory.mktemp("ca"))
    authority.issue("server")
    file = authority.directory / "web.yml"
    hashed = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
    file.write_text(
        f"tls_server_config: {{cert_file: server.crt, key_file: server.key}}\nbasic_auth_users: {{me: {hashed}}}\n"
    )
    agent = AgentServer(web_config=WebConfig(file, check_yaml))
    agent.show(colocation_run.simulate_run(3).rounds)
    yield agent, authority.certificate
    agent.close()


def refusal(url: str) -> Unavailable:
    with pytest.raises(Unavailable) as caught:
        AgentClient(url).view()
    return caught.value


def test_an_unknown_authority(secured: tuple[AgentServer, Path]) -> None:
    result = refusal(f"https://me:secret@localhost:{secured[0].port}")
    assert "does not answer: " in result.reason
    assert "certificate verify failed" in result.reason.lower()
    assert "SSL_CERT_FILE=" in result.remedy
    assert "kubectl dioptase" in result.remedy


def test_a_user_and_a_password_that_are_missing_or_wrong(
    secured: tuple[AgentServer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, authority = secured
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    for user in ("", "me:wrong@"):
        result = refusal(f"https://{user}localhost:{agent.port}")
        assert "requires a user and a password" in result.reason
        assert result.remedy == f"--url https://USER:PASSWORD@localhost:{agent.port}"
    assert AgentClient(f"https://me:secret@localhost:{agent.port}").view().seq == 4


def test_plain_http_where_tls_is_spoken(secured: tuple[AgentServer, Path]) -> None:
    result = refusal(f"http://localhost:{secured[0].port}")
    assert f"if it has a --web-config with a certificate, use https://localhost:{secured[0].port}" in result.remedy
    assert "kubectl dioptase" in result.remedy, "as in the pod of an agent that the chart installed"


def test_a_token_that_it_does_not_have() -> None:
    async def reject(_token: str, _path: str) -> bool | None:
        return None

    agent = AgentServer(tokens=TokenReviewer(reject))
    result = refusal(agent.url)
    agent.close()
    assert result.reason == f"http://127.0.0.1:{agent.port} requires the token of a service account"
    assert "kubectl dioptase" in result.remedy


def test_tls_where_plain_http_is_spoken() -> None:
    agent = AgentServer()
    result = refusal(f"https://127.0.0.1:{agent.port}")
    agent.close()
    assert f"use http://127.0.0.1:{agent.port}" in result.remedy

"""Programs that log in for a kubeconfig's user: real ones, well-behaved and not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from api.interfaces import Unavailable
from common.yaml_guard import check_yaml
from kube.client import KubeClient
from kube.credentials import LOGIN_RETRY_S, ApiAccess, ApiCredentials, CredentialData, IssuedCredentials
from kube.kubeconfig import load_kubeconfig_access
from tests.exporters.certificates import Authority
from tests.kube.test_client import serving, status_response
from tests.kube.test_kubeconfig import document, written

V1, V1BETA1 = "client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1"


def printing(folder: Path, said: str, *, status: int = 0) -> Path:
    """A program that notes how it was called, and prints that."""
    program = folder / "login"
    seen = "[sys.argv[1:], os.environ['KUBERNETES_EXEC_INFO'], os.environ.get('EXTRA')]"
    note = f"print(json.dumps({seen}), file=open({str(folder / 'calls')!r}, 'a'))"
    program.write_text(f"#!{sys.executable}\nimport json, os, sys\n{note}\nprint({said!r})\nsys.exit({status})\n")
    program.chmod(0o755)
    return program


def calls(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def credential(version: str = V1, **status: str) -> str:
    return json.dumps({"apiVersion": version, "kind": "ExecCredential", "spec": {}, "status": status})


def plugin(**other: object) -> dict[str, object]:
    return {"command": "./login", "apiVersion": V1, "interactiveMode": "Never", **other}


def access(folder: Path, wanted: dict[str, object], cluster: object = None) -> ApiAccess:
    file = written(folder / "config", document(cluster, user={"exec": wanted}))
    return load_kubeconfig_access([file], check_yaml, logins=True)


def test_its_token_is_sent_and_it_is_run_once(tmp_path: Path) -> None:
    printing(tmp_path, credential(token="abc"))
    found = access(tmp_path, plugin(args=["get", "x"], env=[{"name": "EXTRA", "value": "1"}]))
    assert not (tmp_path / "calls").exists(), "nobody was asked yet"
    assert [found.token(), found.token()] == ["abc", "abc"]
    ((words, told, extra),) = calls(tmp_path)
    assert (words, extra) == (["get", "x"], "1")
    assert json.loads(told) == {"apiVersion": V1, "kind": "ExecCredential", "spec": {"interactive": False}}


def test_it_is_told_of_the_cluster_where_it_wants_to_know(tmp_path: Path) -> None:
    printing(tmp_path, credential(V1BETA1, token="abc"))
    cluster = {
        "server": "https://10.0.0.1:6443", "tls-server-name": "kubernetes", "insecure-skip-tls-verify": True,
        "extensions": [{"name": "client.authentication.k8s.io/exec", "extension": {"audience": "me"}}],
    }  # fmt: skip
    access(tmp_path, {"command": "./login", "apiVersion": V1BETA1, "provideClusterInfo": True}, cluster).token()
    assert json.loads(calls(tmp_path)[0][1])["spec"]["cluster"] == {
        **cluster, "config": {"audience": "me"},
    }  # fmt: skip


def test_a_certificate_of_it_is_shown(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path).issue("me")
    printing(tmp_path, credential(clientCertificateData=certificate.read_text(), clientKeyData=key.read_text()))
    found = access(tmp_path, plugin())
    assert found.token() == ""
    first = found.context()
    assert first is not None
    assert found.context() is first, "connections are kept by it"


def test_what_ends_is_asked_for_again(tmp_path: Path) -> None:
    printing(tmp_path, credential(token="abc", expirationTimestamp="2001-01-01T00:00:00Z"))
    found = access(tmp_path, plugin())
    found.token()
    found.token()
    assert len(calls(tmp_path)) == 2
    printing(tmp_path, credential(token="new", expirationTimestamp="2101-01-01T00:00:00Z"))
    assert [found.token(), found.token()] == ["new", "new"]
    assert len(calls(tmp_path)) == 3


def test_refused_credentials_are_asked_for_again_but_not_at_once() -> None:
    given, now = [], [100.0]

    def login() -> IssuedCredentials:
        given.append(f"t{len(given)}")
        return IssuedCredentials(token=CredentialData(data=given[-1].encode()))

    found = ApiAccess("https://10.0.0.1", ApiCredentials(), clock=lambda: now[0], login=login)
    assert found.token() == "t0"
    found.refused()
    assert found.token() == "t0", "it is fresh: another would be the same"
    now[0] += LOGIN_RETRY_S
    found.refused()
    found.refused()
    assert found.token() == "t1"


async def test_requests_carry_it(tmp_path: Path) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return status_response(200, request.headers["Authorization"])

    printing(tmp_path, credential(token="abc"))
    async with serving(handler) as server, KubeClient(access(tmp_path, plugin(), {"server": server}), "test") as client:
        assert (await client.raw("/x", "x")).body == b"Bearer abc"
        assert (await client.raw("/x", "x")).body == b"Bearer abc"
    assert len(calls(tmp_path)) == 1


@pytest.mark.parametrize(
    ("said", "status", "complaint"),
    [
        ("", 0, "failed to decode"),
        ("[" * 100_000, 0, "recursion"),
        ("{}", 0, "missing key 'apiVersion'"),
        (credential(V1BETA1, token="abc"), 0, "does not match"),
        (credential(), 0, "neither a token nor a certificate"),
        (credential(clientKeyData="x"), 0, "nor a certificate with its key"),
        (credential(token="abc", expirationTimestamp="tomorrow"), 0, "'tomorrow' is no time"),
        (credential(token="abc"), 3, "process returned 3"),
    ],
)
def test_what_it_should_not_do_is_said(tmp_path: Path, said: str, status: int, complaint: str) -> None:
    printing(tmp_path, said, status=status)
    with pytest.raises(Unavailable, match=complaint) as caught:
        access(tmp_path, plugin()).token()
    assert "abc" not in str(caught.value), "secrets stay secrets"


def test_a_token_that_cannot_be_sent_is_no_token(tmp_path: Path) -> None:
    printing(tmp_path, credential(token="a\r\nX-Evil: 1"))
    with pytest.raises(Unavailable, match="no token"):
        access(tmp_path, plugin()).token()


@pytest.mark.parametrize("wanted", [{"apiVersion": V1}, {"command": "x"}, {"command": 7, "apiVersion": V1}, [7]])
def test_an_exec_section_that_cannot_run_is_refused_by_its_field(tmp_path: Path, wanted: Any) -> None:
    with pytest.raises(Unavailable, match=r"users\[me\]\.user\.exec: "):
        access(tmp_path, wanted).token()


def test_a_missing_program_has_the_install_hint_as_remedy(tmp_path: Path) -> None:
    found = access(tmp_path, plugin(command="no-such-login", installHint="get it from\n  the shop"))
    with pytest.raises(Unavailable, match="no-such-login") as caught:
        found.token()
    assert caught.value.remedy == "get it from the shop"

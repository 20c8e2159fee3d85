"""Exec plugins of a kubeconfig, run by the `kubernetes` package: when they run, what is used of their answer, and failures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from api.interfaces import Unavailable
from common.yaml_guard import check_yaml
from kube.client import KubeClient
from kube.credentials import LOGIN_RETRY_S, ApiAccess, ApiCredentials, CredentialData, IssuedCredentials
from kube.kubeconfig import load_kubeconfig_access
from tests.builders.api_server import FakeApiServer, serving
from tests.exporters.certificates import Authority
from tests.kube.test_kubeconfig import document, written

V1 = "client.authentication.k8s.io/v1"


def write_plugin(folder: Path, output: str, *, status: int = 0) -> None:
    """Write a program that records how it was called, and prints the output."""
    program = folder / "login"
    call = "[sys.argv[1:], os.environ['KUBERNETES_EXEC_INFO'], os.environ.get('EXTRA')]"
    record = f"print(json.dumps({call}), file=open({str(folder / 'calls')!r}, 'a'))"
    program.write_text(f"#!{sys.executable}\nimport json, os, sys\n{record}\nprint({output!r})\nsys.exit({status})\n")
    program.chmod(0o755)


def calls(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def credential(**status: str) -> str:
    return json.dumps({"apiVersion": V1, "kind": "ExecCredential", "spec": {}, "status": status})


def plugin(**other: object) -> dict[str, object]:
    return {"command": "./login", "apiVersion": V1, "interactiveMode": "Never", **other}


def access(folder: Path, section: object, cluster: object = None) -> ApiAccess:
    file = written(folder / "config", document(cluster, user={"exec": section}))
    return load_kubeconfig_access([file], check_yaml, logins=True)


async def test_the_plugin_runs_before_the_first_request_and_once(tmp_path: Path) -> None:
    write_plugin(tmp_path, credential(token="abc"))
    server = FakeApiServer({"/x/y": {"metadata": {}}})
    section = plugin(args=["get", "x"], env=[{"name": "EXTRA", "value": "1"}], provideClusterInfo=True)
    async with serving(server) as url, KubeClient(access(tmp_path, section, {"server": url}), "test") as client:
        assert not (tmp_path / "calls").exists()
        for _ in range(2):
            assert (await client.raw("/x/y", "x")).status == 200
    assert [request.headers["Authorization"] for request in server.requests] == ["Bearer abc"] * 2
    ((arguments, info, extra),) = calls(tmp_path)
    assert (arguments, extra) == (["get", "x"], "1")
    assert json.loads(info)["spec"]["cluster"] == {"server": url}


def test_an_issued_certificate_is_used_for_tls(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path).issue("me")
    write_plugin(tmp_path, credential(clientCertificateData=certificate.read_text(), clientKeyData=key.read_text()))
    source = access(tmp_path, plugin())
    assert source.token() == ""
    context = source.context()
    assert context is not None
    assert source.context() is context, "a new context would close all connections"


def test_expired_credentials_are_issued_again(tmp_path: Path) -> None:
    write_plugin(tmp_path, credential(token="abc", expirationTimestamp="2001-01-01T00:00:00Z"))
    source = access(tmp_path, plugin())
    source.token()
    source.token()
    assert len(calls(tmp_path)) == 2
    write_plugin(tmp_path, credential(token="new", expirationTimestamp="2101-01-01T00:00:00Z"))
    assert [source.token(), source.token()] == ["new", "new"]
    assert len(calls(tmp_path)) == 3


def test_refused_credentials_are_issued_again_but_not_at_once() -> None:
    tokens, now = [], [100.0]

    def login() -> IssuedCredentials:
        tokens.append(f"t{len(tokens)}")
        return IssuedCredentials(token=CredentialData(data=tokens[-1].encode()))

    source = ApiAccess("https://10.0.0.1", ApiCredentials(), clock=lambda: now[0], login=login)
    assert source.token() == "t0"
    source.refused()
    assert source.token() == "t0", "it is fresh: a new login would return the same"
    now[0] += LOGIN_RETRY_S
    source.refused()
    source.refused()
    assert source.token() == "t1"


@pytest.mark.parametrize(
    ("output", "status", "problem"),
    [
        ("", 0, "failed to decode"),
        ("[" * 100_000, 0, "recursion"),
        (credential(), 0, "neither a token nor a certificate"),
        (credential(clientKeyData="x"), 0, "nor a certificate with its key"),
        (credential(token="abc", expirationTimestamp="tomorrow"), 0, "'tomorrow' is no time"),
        (credential(token="abc"), 3, "process returned 3"),
        (credential(token="a\r\nX-Evil: 1"), 0, "no token"),
    ],
)
def test_an_invalid_answer_is_refused_without_its_secrets(
    tmp_path: Path, output: str, status: int, problem: str
) -> None:
    write_plugin(tmp_path, output, status=status)
    with pytest.raises(Unavailable, match=problem) as caught:
        access(tmp_path, plugin()).token()
    assert "abc" not in str(caught.value)


@pytest.mark.parametrize("section", [{"apiVersion": V1}, {"command": 7, "apiVersion": V1}, [7]])
def test_an_exec_section_that_cannot_run_is_refused_by_its_field(tmp_path: Path, section: object) -> None:
    with pytest.raises(Unavailable, match=r"users\[me\]\.user\.exec: "):
        access(tmp_path, section).token()


def test_a_missing_program_has_the_install_hint_as_remedy(tmp_path: Path) -> None:
    source = access(tmp_path, plugin(command="no-such-login", installHint="get it from\n  the shop"))
    with pytest.raises(Unavailable, match="no-such-login") as caught:
        source.token()
    assert caught.value.remedy == "get it from the shop"

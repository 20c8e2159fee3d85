"""The API server and credentials from kubeconfig files and service accounts, and rotation of credentials."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.interfaces import Unavailable
from common.yaml_guard import check_yaml
from kube.credentials import FILE_CHECK_INTERVAL_S, ApiAccess, ApiCredentials, CredentialData, temporary_pem_file
from kube.kubeconfig import default_kubeconfig_path, load_access, load_in_cluster_access, load_kubeconfig_access
from tests.exporters.certificates import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


def document(cluster: object = None, user: object = None, **other: object) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "main",
        "contexts": [{"name": "main", "context": {"cluster": "lab", "user": "me", "namespace": "team"}}],
        "clusters": [{"name": "lab", "cluster": cluster or {"server": "https://10.0.0.1:6443/"}}],
        "users": [{"name": "me", "user": user or {"token": "abc"}}],
        "preferences": {},
        **other,
    }


def written(path: Path, content: object) -> Path:
    path.write_bytes(msgspec.yaml.encode(content))
    return path


def test_a_kubeconfig_as_kubectl_writes_it(tmp_path: Path, authority: Authority) -> None:
    certificate, key = authority.issue("me")
    cluster = {
        "server": "https://10.0.0.1:6443/",
        "certificate-authority-data": base64.b64encode(authority.certificate.read_bytes()).decode(),
        "tls-server-name": "kubernetes",
        "extensions": [{"name": "x", "extension": {}}],
    }
    shutil.copy(certificate, tmp_path / "me.crt")
    user = {"client-certificate": "me.crt", "client-key-data": base64.b64encode(key.read_bytes()).decode()}
    access = load_kubeconfig_access([written(tmp_path / "config", document(cluster, user))], check_yaml)
    assert (access.server, access.namespace, access.server_name) == ("https://10.0.0.1:6443", "team", "kubernetes")
    context = access.context()
    assert context is not None
    assert [certificate["subject"] for certificate in context.get_ca_certs()] == [((("commonName", "ca"),),)]
    assert access.token() == ""


def test_without_files_in_memory_a_key_is_in_a_file_that_is_removed() -> None:
    with temporary_pem_file(b"key") as path:
        file = Path(path)
        assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"key", 0o600)
    assert not file.exists()


@pytest.mark.parametrize(
    ("environment", "path"),
    [
        ({"HOME": "/home/me", "USERPROFILE": "/other"}, "/home/me/.kube/config"),
        ({"USERPROFILE": "/users/me"}, "/users/me/.kube/config"),
        ({}, "/root/.kube/config"),
    ],
)
def test_the_default_kubeconfig_is_in_the_home_directory(environment: dict[str, str], path: str) -> None:
    assert str(default_kubeconfig_path(environment)) == path


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (document({"server": "10.0.0.1"}), "clusters[lab].cluster.server: '10.0.0.1' is not an address"),
        (document({"server": "https://h:99999"}), "clusters[lab].cluster.server"),
        (document({"server": "https://h", "proxy-url": "socks5://p"}), "clusters[lab].cluster.proxy-url: 'socks5://p' is not"),
        (
            document({"server": "https://h", "certificate-authority-data": "%%"}),
            "clusters[lab].cluster.certificate-authority-data: is not base64",
        ),
        (
            document({"server": "https://h", "certificate-authority-data": "aGVsbG8="}),
            "clusters[lab].cluster.certificate-authority-data: has no certificates",
        ),
        (
            document({"server": "https://h", "certificate-authority": "nowhere.crt"}),
            "nowhere.crt: cannot be read: No such file or directory",
        ),
        (
            document(
                {"server": "https://h", "certificate-authority": "a.crt", "insecure-skip-tls-verify": True}
            ),
            "insecure-skip-tls-verify: contradicts certificate-authority",
        ),
        (document(user={"client-key": "a.key"}), "users[me].user.client-certificate: is missing"),
        (document(user={"exec": {"command": "aws"}}), "users[me].user.exec: is set"),
        (document(user={"auth-provider": {"name": "gcp"}}), "users[me].user.auth-provider: is set"),
        (document(user={"username": "admin", "password": "x"}), "users[me].user.username: is set"),
        (document(clusters=[]), "clusters[lab]: is not there"),
        (document(users=None), "users[me]: is not there"),
        (document(**{"current-context": "other"}), "contexts[other]: is not there"),
        (document(**{"current-context": ""}), "current-context: is not set"),
        ({}, "current-context: is not set"),
        ([], "not a kubeconfig: TypeError"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_an_invalid_kubeconfig_is_refused_by_file_and_field(tmp_path: Path, content: object, problem: str) -> None:
    path = written(tmp_path / "config", content)
    with pytest.raises(Unavailable) as caught:
        load_kubeconfig_access([path], check_yaml)
    assert problem in caught.value.reason
    assert str(tmp_path) in caught.value.reason
    assert caught.value.remedy


@pytest.mark.parametrize("text", ["a: 1\na: 2", "a: &x 1", "{", "\x00", "- " * 60_000], ids=range(5))
def test_text_that_is_not_one_plain_yaml_document_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config").write_text(text)
    with pytest.raises(Unavailable, match="config: "):
        load_kubeconfig_access([tmp_path / "config"], check_yaml)


def test_impersonation_and_proxy_are_passed_to_the_client(tmp_path: Path) -> None:
    user = {"token": "x", "as": "jane", "as-uid": "7", "as-groups": ["a", "b"], "as-user-extra": {"scopes/x": ["view"]}}
    path = written(tmp_path / "config", document({"server": "https://h", "proxy-url": "http://proxy:3128"}, user))
    access = load_kubeconfig_access([path], check_yaml)
    assert access.proxy == "http://proxy:3128"
    assert access.headers == (
        ("Impersonate-User", "jane"), ("Impersonate-Uid", "7"), ("Impersonate-Group", "a"), ("Impersonate-Group", "b"),
        ("Impersonate-Extra-scopes%2Fx", "view"),
    )  # fmt: skip


def id_token(expires_s: int) -> str:
    parts = [{"alg": "none"}, {"exp": expires_s}, {}]
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)


def test_a_valid_oidc_token_of_kubectl_is_sent(tmp_path: Path) -> None:
    token = id_token(4_000_000_000)
    provider = {"name": "oidc", "config": {"id-token": token, "idp-issuer-url": "https://issuer"}}
    path = written(tmp_path / "config", document(user={"auth-provider": provider}))
    access = load_kubeconfig_access([path], check_yaml, logins=True)
    assert access.token() == token


def test_the_remedy_lists_the_contexts(tmp_path: Path) -> None:
    path = written(tmp_path / "config", document(**{"current-context": "mian"}))
    with pytest.raises(Unavailable) as caught:
        load_kubeconfig_access([path], check_yaml)
    assert caught.value.remedy == "choose from main"


def test_of_several_files_the_first_that_has_a_name_wins(tmp_path: Path) -> None:
    first = written(tmp_path / "one", {"clusters": [{"name": "lab", "cluster": {"server": "https://first"}}]})
    second = written(tmp_path / "two", document({"server": "https://second"}))
    environment = {"KUBECONFIG": f"{first}:{tmp_path / 'missing'}:{second}"}
    access = load_access(environment, check_yaml)
    assert (access.server, access.token()) == ("https://first", "abc")
    with pytest.raises(Unavailable, match="missing: cannot be read"):
        load_access({"KUBECONFIG": str(tmp_path / "missing")}, check_yaml)


def account(root: Path, authority: Authority) -> Path:
    root.mkdir()
    (root / "token").write_text("first\n")
    (root / "namespace").write_text("katalyst-system")
    shutil.copy(authority.certificate, root / "ca.crt")
    return root


@pytest.mark.parametrize(
    ("host", "server"), [("10.96.0.1", "https://10.96.0.1:443"), ("fd00::1", "https://[fd00::1]:443")]
)
def test_a_pods_own_account(tmp_path: Path, authority: Authority, host: str, server: str) -> None:
    environment = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": "443"}
    access = load_in_cluster_access(environment, account(tmp_path / "sa", authority))
    assert (access.server, access.namespace, access.token()) == (server, "katalyst-system", "first")


def test_without_token_the_remedy_is_the_pods_spec(tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as caught:
        load_access({"KUBERNETES_SERVICE_HOST": "h"}, check_yaml, tmp_path)
    assert caught.value.remedy == "set automountServiceAccountToken: true in the pod's spec"


def test_without_any_configuration_the_remedy_names_kubeconfig(tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as caught:
        load_access({"HOME": str(tmp_path)}, check_yaml)
    assert "KUBECONFIG" in caught.value.remedy


def test_a_token_file_is_followed_and_a_bad_new_one_leaves_the_last_good_one(tmp_path: Path) -> None:
    now = [0.0]
    path = tmp_path / "token"
    path.write_text("one")
    access = ApiAccess("https://h", ApiCredentials(token=CredentialData(path=path)), clock=lambda: now[0])
    assert access.token() == "one"
    path.write_text("second")
    assert access.token() == "one", "files are looked at now and then"
    now[0] += FILE_CHECK_INTERVAL_S
    assert access.token() == "second"
    path.write_text("")
    now[0] += FILE_CHECK_INTERVAL_S
    assert access.token() == "second"
    path.write_text("third-one")
    access.refused()
    assert access.token() == "third-one", "at once after the server did not know us"


@pytest.mark.parametrize("text", ["", "a b", "a\nb: c", "\x00", "ü"])
def test_a_token_that_would_be_another_header_is_not_sent(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text)
    access = ApiAccess(
        "https://h", ApiCredentials(token=CredentialData(path=tmp_path / "token", field="users[me].user.tokenFile"))
    )
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"users\[me\].user.tokenFile: .*token: "):
            access.token()


def test_certificates_are_followed(tmp_path: Path, authority: Authority) -> None:
    now = [0.0]
    bundle = tmp_path / "ca.crt"
    shutil.copy(authority.certificate, bundle)
    access = ApiAccess("https://h", ApiCredentials(authority=CredentialData(path=bundle)), clock=lambda: now[0])
    first = access.context()
    assert access.context() is first
    now[0] += FILE_CHECK_INTERVAL_S
    assert access.context() is first, "nothing changed"
    bundle.write_text("half a certif")
    now[0] += FILE_CHECK_INTERVAL_S
    assert access.context() is first, "it is being written"
    other = Authority(tmp_path, "other")
    bundle.write_bytes(authority.certificate.read_bytes() + other.certificate.read_bytes())
    now[0] += FILE_CHECK_INTERVAL_S
    second = access.context()
    assert second is not None
    assert second is not first
    assert len(second.get_ca_certs()) == 2


def test_a_key_of_another_certificate_is_named(tmp_path: Path, authority: Authority) -> None:
    certificate, _ = authority.issue("one")
    _, key = authority.issue("two")
    user = {"client-certificate": str(certificate), "client-key": str(key)}
    with pytest.raises(Unavailable, match=r"client-certificate: .*one\.crt and .*client-key: .*key values mismatch"):
        load_kubeconfig_access([written(tmp_path / "config", document(user=user))], check_yaml)


WORDS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(max_size=8),
    st.sampled_from(["lab", "me", "main", "https://h", "http://[", "aGk="]),
)
FIELDS = st.sampled_from([
    "server", "certificate-authority-data", "insecure-skip-tls-verify", "tls-server-name", "token", "tokenFile",
    "client-certificate-data", "client-key-data", "exec", "as",
])  # fmt: skip
PARTS = st.dictionaries(FIELDS, WORDS, max_size=4)


@given(PARTS, PARTS, WORDS)
def test_any_kubeconfig_gives_access_or_an_error_with_its_file(
    tmp_path_factory: pytest.TempPathFactory, cluster: dict[str, object], user: dict[str, object], current: object
) -> None:
    content = document({"server": "https://h", **cluster}, user, **{"current-context": current})
    path = written(tmp_path_factory.getbasetemp() / "any", content)
    problem = ""
    try:
        load_kubeconfig_access([path], check_yaml)
    except Unavailable as error:
        problem = f"{error.reason}; {error.remedy}"
    assert not problem or str(path) in problem or "tokenFile" in problem

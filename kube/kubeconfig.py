"""Finds API server and credentials from the pod's service account or from kubeconfig files.
An unsupported field is refused by its path with a remedy; it is never ignored.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from api.interfaces import Unavailable
from kube.credentials import ApiAccess, ApiCredentials, CredentialData
from kube.exec_login import EXEC_API_GROUP, ExecLogin, ExecPlugin

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MAX_KUBECONFIG_BYTES = 1 << 20
_UNSUPPORTED_FIELDS = {
    "exec": "only commands of a person run programs that log in, for they block; make a token with `kubectl create token` and "
    "write it as token",
    "auth-provider": "such logins ended with Kubernetes 1.26; write a token or a client certificate",
    "username": "passwords ended with Kubernetes 1.19; write a token or a client certificate",
    "as": "impersonation is not done; write the credentials of the one to act as",
    "proxy-url": "proxies are not used; remove it where the API server can be reached directly",
}


class _Kebab(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    pass


class _Extension(msgspec.Struct, frozen=True, kw_only=True):
    name: str = ""
    extension: Any = None


class _Cluster(_Kebab, frozen=True, kw_only=True):
    server: str = ""
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    insecure_skip_tls_verify: bool = False
    tls_server_name: str = ""
    proxy_url: str = ""
    extensions: tuple[_Extension, ...] | None = ()


class _KubeconfigUser(_Kebab, frozen=True, kw_only=True):
    token: str = ""
    token_file: str = msgspec.field(default="", name="tokenFile")
    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = ""
    exec: ExecPlugin | None = None
    auth_provider: Any = None
    username: str = ""
    as_: str = msgspec.field(default="", name="as")


class _Context(_Kebab, frozen=True, kw_only=True):
    cluster: str = ""
    user: str = ""
    namespace: str = ""


class _NamedCluster(_Kebab, frozen=True, kw_only=True):
    name: str
    cluster: _Cluster = _Cluster()


class _NamedUser(_Kebab, frozen=True, kw_only=True):
    name: str
    user: _KubeconfigUser | None = None


class _NamedContext(_Kebab, frozen=True, kw_only=True):
    name: str
    context: _Context = _Context()


class _Kubeconfig(_Kebab, frozen=True, kw_only=True):
    current_context: str = ""
    clusters: tuple[_NamedCluster, ...] | None = ()
    users: tuple[_NamedUser, ...] | None = ()
    contexts: tuple[_NamedContext, ...] | None = ()


def load_access(
    environment: Mapping[str, str], check: Callable[[str], None], service_account: Path = SERVICE_ACCOUNT
) -> ApiAccess:
    """As kubectl finds it, but for a pod's own account, which comes before `~/.kube/config`. Raises Unavailable.

    `check` raises ValueError where a text is not one plain YAML document.
    """
    if listed := environment.get("KUBECONFIG", ""):
        return load_kubeconfig_access([Path(part) for part in listed.split(os.pathsep) if part], check)
    if environment.get("KUBERNETES_SERVICE_HOST"):
        return load_in_cluster_access(environment, service_account)
    home = default_kubeconfig_path(environment)
    if home.exists():
        return load_kubeconfig_access([home], check)
    raise Unavailable(
        f"no API server is known: KUBECONFIG is not set, this is no pod, and there is no {home}",
        "set KUBECONFIG to a kubeconfig file, or run in a pod that has a service account",
    )


def default_kubeconfig_path(environment: Mapping[str, str]) -> Path:
    """Where kubectl looks where it was told nothing; on Windows HOME has another name."""
    return Path(environment.get("HOME") or environment.get("USERPROFILE") or "/root") / ".kube/config"


def load_in_cluster_access(environment: Mapping[str, str], service_account: Path = SERVICE_ACCOUNT) -> ApiAccess:
    """By the service account of the pod that this runs in; its token and authority are followed while they rotate."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not port.isascii() or not port.isdigit():
        raise Unavailable(
            f"KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are {host!r:.80} and {port!r:.80}",
            "run in a pod, or set KUBECONFIG to a kubeconfig file",
        )
    token, authority = service_account / "token", service_account / "ca.crt"
    for path in (token, authority):
        if not path.exists():
            raise Unavailable(f"{path} is not there", "set automountServiceAccountToken: true in the pod's spec")
    server = f"https://{f'[{host}]' if ':' in host else host}:{port}"
    credentials = ApiCredentials(authority=CredentialData(path=authority), token=CredentialData(path=token))
    access = ApiAccess(server, credentials, _namespace(service_account / "namespace"))
    access.context()
    return access


def load_kubeconfig_access(
    paths: Iterable[Path], check: Callable[[str], None], context: str = "", *, logins: bool = False
) -> ApiAccess:
    """By kubeconfig files; the first that sets a current context or has a name wins. Raises Unavailable naming the field.

    With `logins` the programs are run that log in, which may ask whoever sits at the terminal.
    """
    clusters: dict[str, tuple[Path, _Cluster]] = {}
    users: dict[str, tuple[Path, _KubeconfigUser]] = {}
    contexts: dict[str, tuple[Path, _Context]] = {}
    current, seen = context, list(paths)
    there = [path for path in seen if len(seen) == 1 or path.exists()]  # kubectl too passes over those that are missing
    for path in there:
        file = _read_kubeconfig(path, check)
        current = current or file.current_context
        for cluster in file.clusters or ():
            clusters.setdefault(cluster.name, (path, cluster.cluster))
        for one in file.users or ():
            users.setdefault(one.name, (path, one.user or _KubeconfigUser()))
        for named in file.contexts or ():
            contexts.setdefault(named.name, (path, named.context))
    shown = os.pathsep.join(map(str, there or seen))
    if not current:
        raise _invalid_field(shown, "current-context", "is not set", _list_choices(contexts))
    if current not in contexts:
        raise _invalid_field(shown, f"contexts[{current}]", "is not there", _list_choices(contexts))
    path, chosen = contexts[current]
    where = f"contexts[{current}].context"
    if chosen.cluster not in clusters:
        raise _invalid_field(
            str(path), f"{where}.cluster", f"names {chosen.cluster!r}, which is not there", _list_choices(clusters)
        )
    if chosen.user and chosen.user not in users:
        raise _invalid_field(
            str(path), f"{where}.user", f"names {chosen.user!r}, which is not there", _list_choices(users)
        )
    user = users.get(chosen.user, (path, _KubeconfigUser()))
    return _access(chosen, clusters[chosen.cluster], user, logins=logins)


def _access(
    context: _Context, of_cluster: tuple[Path, _Cluster], of_user: tuple[Path, _KubeconfigUser], *, logins: bool
) -> ApiAccess:
    path, cluster = of_cluster
    where = f"clusters[{context.cluster}].cluster"
    _refuse_unsupported(path, where, {"proxy-url": cluster.proxy_url})
    try:
        parts = urlsplit(cluster.server)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
    except ValueError:
        usable = False
    if not usable:
        raise _invalid_field(
            str(path), f"{where}.server", f"{cluster.server!r:.80} is no address", "write https://HOST:PORT"
        )
    authority = _material(path, where, "certificate-authority", cluster)
    if authority is not None and cluster.insecure_skip_tls_verify:
        raise _invalid_field(
            str(path), f"{where}.insecure-skip-tls-verify", "contradicts certificate-authority", "remove one"
        )
    user_path, user = of_user
    mine = f"users[{context.user}].user"
    _refuse_unsupported(
        user_path,
        mine,
        {
            "exec": not logins and user.exec,
            "auth-provider": user.auth_provider,
            "username": user.username,
            "as": user.as_,
        },
    )
    certificate = _material(user_path, mine, "client-certificate", user)
    key = _material(user_path, mine, "client-key", user)
    if (certificate is None) != (key is None):
        lacking = "client-key" if key is None else "client-certificate"
        raise _invalid_field(
            str(user_path), f"{mine}.{lacking}", "is missing beside the other of the two", "write both"
        )
    token = (
        CredentialData(path=user_path.parent / user.token_file, field=f"{user_path}: {mine}.tokenFile")
        if user.token_file
        else None
    )
    if token is None and user.token:
        token = CredentialData(data=user.token.encode(), field=f"{user_path}: {mine}.token")
    credentials = ApiCredentials(
        authority=authority,
        certificate=certificate,
        key=key,
        token=token,
        verify=not cluster.insecure_skip_tls_verify,
        server_name=cluster.tls_server_name,
    )
    login = None
    if user.exec is not None:
        if certificate is not None or token is not None:
            raise _invalid_field(str(user_path), f"{mine}.exec", "stands beside a token or a certificate", "remove one")
        login = ExecLogin(
            user.exec, user_path.parent, f"{user_path}: {mine}.exec", _exec_cluster_info(cluster, authority)
        )
    access = ApiAccess(cluster.server.rstrip("/"), credentials, context.namespace or "default", login=login)
    if login is None:
        access.context()
    return access


def _exec_cluster_info(cluster: _Cluster, authority: CredentialData | None) -> dict[str, Any]:
    """What a program that logs in may be told of the cluster, as client-go has it."""
    known: dict[str, Any] = {"server": cluster.server}
    if cluster.tls_server_name:
        known["tls-server-name"] = cluster.tls_server_name
    if cluster.insecure_skip_tls_verify:
        known["insecure-skip-tls-verify"] = True
    if authority is not None:
        known["certificate-authority-data"] = base64.b64encode(authority.read()).decode()
    config = next((one.extension for one in cluster.extensions or () if one.name == f"{EXEC_API_GROUP}/exec"), None)
    return known if config is None else {**known, "config": config}


def _read_kubeconfig(path: Path, check: Callable[[str], None]) -> _Kubeconfig:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_KUBECONFIG_BYTES + 1)
    except OSError as error:
        raise Unavailable(f"{path}: cannot be read: {error.strerror}", "set KUBECONFIG to a file that can") from error
    try:
        if len(text) > MAX_KUBECONFIG_BYTES:
            raise ValueError(f"larger than {MAX_KUBECONFIG_BYTES} bytes")
        decoded = text.decode()
        check(decoded)
        return msgspec.convert({} if (content := msgspec.yaml.decode(decoded)) is None else content, _Kubeconfig)
    except ValueError as error:  # msgspec's own are ones
        said = str(error).replace("`", "")
        raise Unavailable(f"{path}: {said}", "correct it, or see `kubectl config view`") from error


def _material(path: Path, where: str, name: str, holder: _Cluster | _KubeconfigUser) -> CredentialData | None:
    """What a pair of fields such as `client-key` and `client-key-data` gives; the data counts more, as for kubectl."""
    attribute = name.replace("-", "_")
    data, file = getattr(holder, f"{attribute}_data"), getattr(holder, attribute)
    if data:
        field = f"{where}.{name}-data"
        try:
            return CredentialData(data=base64.b64decode(data, validate=True), field=f"{path}: {field}")
        except (binascii.Error, ValueError):
            raise _invalid_field(str(path), field, "is no base64", "write the PEM file through `base64 -w0`") from None
    return CredentialData(path=path.parent / file, field=f"{path}: {where}.{name}") if file else None


def _refuse_unsupported(path: Path, where: str, set_: Mapping[str, Any]) -> None:
    for field, value in set_.items():
        if value:
            raise _invalid_field(str(path), f"{where}.{field}", "is set", _UNSUPPORTED_FIELDS[field])


def _invalid_field(path: str, field: str, what: str, remedy: str) -> Unavailable:
    return Unavailable(f"{path}: {field}: {what}", remedy)


def _list_choices(names: Iterable[str]) -> str:
    listed = ", ".join(sorted(names))
    return f"choose from {listed}" if listed else "the file has none; see `kubectl config view`"


def _namespace(path: Path) -> str:
    try:
        return path.read_text().strip() or "default"
    except (OSError, UnicodeDecodeError):
        return "default"

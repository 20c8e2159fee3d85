"""Finds the API server and credentials: the pod's service account, or kubeconfig files as kubectl reads them.

The official `kubernetes` package merges kubeconfig files, chooses the context, runs exec plugins and refreshes OIDC tokens. It
costs 34 MiB and a quarter of a second to import, so a process with a service account never loads it.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib import parse
from urllib.parse import urlsplit

from api.interfaces import Unavailable
from api.text import printable, quote
from kube.credentials import ApiAccess, ApiCredentials, CredentialData, IssuedCredentials
from kube.objects import parse_timestamp

if TYPE_CHECKING:
    from kubernetes.config.kube_config import ConfigNode, KubeConfigMerger

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MAX_KUBECONFIG_BYTES = 1 << 20
_UNSUPPORTED = {"username": "write a token or a client certificate: Kubernetes 1.19 removed passwords"}
_LOGINS = dict.fromkeys(
    ("exec", "auth-provider"), "write a token from `kubectl create token`: a login can prompt and would block a daemon"
)


def load_access(
    environment: Mapping[str, str], check: Callable[[str], None], service_account: Path = SERVICE_ACCOUNT
) -> ApiAccess:
    """Access by KUBECONFIG, else by the pod's service account, else by `~/.kube/config`. Raises Unavailable.

    `check` raises ValueError if a text is not one plain YAML document.
    """
    if listed := environment.get("KUBECONFIG", ""):
        return load_kubeconfig_access([Path(part) for part in listed.split(os.pathsep) if part], check)
    if environment.get("KUBERNETES_SERVICE_HOST"):
        return load_in_cluster_access(environment, service_account)
    home = default_kubeconfig_path(environment)
    if home.exists():
        return load_kubeconfig_access([home], check)
    raise Unavailable(
        f"no API server is configured: KUBECONFIG is not set, this is not a pod, and {home} does not exist",
        "set KUBECONFIG to a kubeconfig file, or run in a pod with a service account",
    )


def default_kubeconfig_path(environment: Mapping[str, str]) -> Path:
    """Path of the kubeconfig that kubectl reads if no other is named; Windows calls HOME USERPROFILE."""
    return Path(environment.get("HOME") or environment.get("USERPROFILE") or "/root") / ".kube/config"


def load_in_cluster_access(environment: Mapping[str, str], service_account: Path = SERVICE_ACCOUNT) -> ApiAccess:
    """Access by the pod's service account; its token and CA certificate are read again when the kubelet rotates them."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not port.isascii() or not port.isdigit():
        raise Unavailable(
            f"KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are {quote(host)} and {quote(port)}",
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
    """Access by kubeconfig files, merged as kubectl does: the first file that sets a name wins. Raises Unavailable.

    With `logins`, exec plugins and OIDC refreshes run: they can prompt on the terminal and block.
    """
    from kubernetes.config import ConfigException  # noqa: PLC0415 - 34 MiB
    from kubernetes.config.kube_config import KubeConfigMerger  # noqa: PLC0415 - 34 MiB

    listed = list(paths)
    present = [path for path in listed if len(listed) == 1 or path.exists()]
    for path in present:
        _check_file(path, check)
    where = os.pathsep.join(map(str, present or listed))
    try:
        return _access(KubeConfigMerger(where), context, logins=logins)
    except (ConfigException, AttributeError, LookupError, TypeError, ValueError, OSError) as error:
        # The package reports a wrong type in a kubeconfig by whatever exception the access raises.
        reason = str(error).removeprefix("Invalid kube-config file. ")
        raise Unavailable(
            f"{where}: not a kubeconfig: {type(error).__name__}: {reason}",
            "correct the file; `kubectl config view` shows it",
        ) from error


def _check_file(path: Path, check: Callable[[str], None]) -> None:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_KUBECONFIG_BYTES + 1)
        if len(text) > MAX_KUBECONFIG_BYTES:
            raise ValueError(f"larger than {MAX_KUBECONFIG_BYTES} bytes")
        check(text.decode())
    except OSError as error:
        raise Unavailable(f"{path}: cannot be read: {error.strerror}", "name a readable file in KUBECONFIG") from error
    except ValueError as error:
        raise Unavailable(f"{path}: {error}", "correct the file; `kubectl config view` shows it") from error


class _Entry(NamedTuple):
    """One context, cluster or user of a kubeconfig."""

    fields: Mapping[str, Any]
    folder: Path
    """Directory of the file: paths in the entry are relative to it."""
    label: str
    """File and path of the entry, for messages: the entry itself can hold secrets."""
    node: ConfigNode | None = None

    def refusal(self, field: str, problem: str, remedy: str) -> Unavailable:
        return Unavailable(f"{self.label}.{field}: {problem}", remedy)


def _entry(config: ConfigNode, kind: str, name: object) -> _Entry:
    for node in config.value[kind]:
        if node.value["name"] == name:
            return _Entry(
                node.value[kind[:-1]], Path(node.path).parent, f"{node.path}: {kind}[{name}].{kind[:-1]}", node
            )
    names = ", ".join(sorted(str(node.value["name"]) for node in config.value[kind]))
    remedy = f"choose from {names}" if names else "add one, or compare `kubectl config view`"
    raise Unavailable(f"{config.path}: {kind}[{printable(str(name), 80)}]: is not there", remedy)


def _access(merger: KubeConfigMerger, context: str, *, logins: bool) -> ApiAccess:
    config = merger.config
    # kubectl takes the first current-context of several files, KubeConfigMerger the last.
    current = context or next(
        (name for file in merger.config_files.values() if (name := file.get("current-context"))), ""
    )
    if not current:
        names = ", ".join(sorted(str(node.value["name"]) for node in config.value["contexts"]))
        raise Unavailable(
            f"{config.path}: current-context: is not set", f"choose from {names}" if names else "add a context"
        )
    chosen = _entry(config, "contexts", current)
    cluster = _entry(config, "clusters", chosen.fields["cluster"])
    user = _entry(config, "users", chosen.fields["user"]) if chosen.fields.get("user") else _Entry({}, Path(), "")
    for name, remedy in (_UNSUPPORTED if logins else {**_UNSUPPORTED, **_LOGINS}).items():
        if user.fields.get(name):
            raise user.refusal(name, "is set", remedy)
    login: Callable[[], IssuedCredentials] | None = None
    if user.fields.get("exec"):
        login = partial(_run_exec_plugin, user, cluster)
    elif user.fields.get("auth-provider"):
        login = partial(_refresh_oidc, merger, current, user)
    access = ApiAccess(
        _address(cluster, "server"),
        _credentials(cluster, user),
        str(chosen.fields.get("namespace") or "default"),
        login=login,
    )
    if login is None:
        access.context()
    return access


def _address(cluster: _Entry, name: str) -> str:
    text = str(cluster.fields[name]).rstrip("/")
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
    except ValueError:
        usable = False
    if not usable:
        raise cluster.refusal(name, f"{quote(text)} is not an address", "write https://HOST:PORT")
    return text


def _credentials(cluster: _Entry, user: _Entry) -> ApiCredentials:
    insecure = bool(cluster.fields.get("insecure-skip-tls-verify"))
    token = user.fields.get("token")
    file = user.fields.get("tokenFile")
    credentials = ApiCredentials(
        authority=_material(cluster, "certificate-authority"),
        certificate=_material(user, "client-certificate"),
        key=_material(user, "client-key"),
        token=CredentialData(path=user.folder / file, field=f"{user.label}.tokenFile")
        if file
        else CredentialData(data=str(token).encode(), field=f"{user.label}.token")
        if token
        else None,
        verify=not insecure,
        server_name=str(cluster.fields.get("tls-server-name") or ""),
        proxy=_address(cluster, "proxy-url") if cluster.fields.get("proxy-url") else None,
        headers=tuple(_impersonation(user.fields)),
    )
    if credentials.authority is not None and insecure:
        raise cluster.refusal("insecure-skip-tls-verify", "contradicts certificate-authority", "remove one")
    if (credentials.certificate is None) != (credentials.key is None):
        missing = "client-key" if credentials.key is None else "client-certificate"
        raise user.refusal(missing, "is missing", "write both client-certificate and client-key")
    return credentials


def _material(entry: _Entry, name: str) -> CredentialData | None:
    """Value of a pair of fields such as `client-key` and `client-key-data`; kubectl prefers the data."""
    if data := entry.fields.get(f"{name}-data"):
        try:
            return CredentialData(data=base64.b64decode(data, validate=True), field=f"{entry.label}.{name}-data")
        except ValueError:
            raise entry.refusal(f"{name}-data", "is not base64", "encode the PEM file with `base64 -w0`") from None
    file = entry.fields.get(name)
    return CredentialData(path=entry.folder / file, field=f"{entry.label}.{name}") if file else None


def _impersonation(user: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Request headers of impersonation; the package does not read these fields (client-go tools/clientcmd does)."""
    if user.get("as"):
        yield "Impersonate-User", str(user["as"])
    if user.get("as-uid"):
        yield "Impersonate-Uid", str(user["as-uid"])
    for group in user.get("as-groups") or ():
        yield "Impersonate-Group", str(group)
    for key, values in (user.get("as-user-extra") or {}).items():
        for value in values:
            yield f"Impersonate-Extra-{parse.quote(key, safe='')}", str(value)


def _run_exec_plugin(user: _Entry, cluster: _Entry) -> IssuedCredentials:
    from kubernetes.config import ConfigException  # noqa: PLC0415 - 34 MiB
    from kubernetes.config.exec_provider import ExecProvider  # noqa: PLC0415 - 34 MiB

    assert user.node is not None
    assert cluster.node is not None
    plugin, label = user.node["user"]["exec"], f"{user.label}.exec"
    try:
        status = ExecProvider(plugin, str(user.folder), cluster.node["cluster"]).run()
        token, certificate, key, expires = (
            status.get(name) for name in ("token", "clientCertificateData", "clientKeyData", "expirationTimestamp")
        )
        if bool(certificate) != bool(key) or not (token or certificate):
            raise ValueError("the plugin returned neither a token nor a certificate with its key")
        return IssuedCredentials(
            token=_issued(token, label),
            certificate=_issued(certificate, label),
            key=_issued(key, label),
            expires_wall_s=parse_timestamp(expires) if expires else None,
        )
    except (ConfigException, AttributeError, RecursionError, TypeError, ValueError, OSError) as error:
        # On a terminal ExecProvider passes the plugin's stderr through, and a failed plugin raises AttributeError there.
        reason = "the plugin failed; its own message is above" if isinstance(error, AttributeError) else error
        hint = " ".join(str(plugin.safe_get("installHint") or "").split())
        raise Unavailable(f"{label}: {reason}", hint or "run the command of the plugin by hand") from None


def _issued(text: str | None, label: str) -> CredentialData | None:
    return CredentialData(data=text.encode(), field=label) if text else None


def _refresh_oidc(merger: KubeConfigMerger, context: str, user: _Entry) -> IssuedCredentials:
    from kubernetes.client import Configuration  # noqa: PLC0415 - 34 MiB
    from kubernetes.config.kube_config import KubeConfigLoader  # noqa: PLC0415 - 34 MiB

    settings = Configuration()
    # The persister writes a refreshed token into the file, as kubectl does: an identity provider can accept each only once.
    loader = KubeConfigLoader(merger.config, context, config_base_path=None, config_persister=merger.save_changes)
    loader.load_and_set(settings)
    token = settings.api_key.get("BearerToken", "").removeprefix("Bearer ")
    if not token:
        raise user.refusal("auth-provider", "the login returned no token", "log in with kubectl, and try again")
    return IssuedCredentials(token=_issued(token, f"{user.label}.auth-provider"))


def _namespace(path: Path) -> str:
    try:
        return path.read_text().strip() or "default"
    except (OSError, UnicodeDecodeError):
        return "default"

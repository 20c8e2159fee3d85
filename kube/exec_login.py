"""Runs client-go credential plugins of a kubeconfig user (ExecCredential v1 and v1beta1).
The program blocks the caller and may prompt on the terminal, so only commands that a person started may use one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from api.interfaces import Unavailable
from kube.credentials import CredentialData, IssuedCredentials
from kube.objects import parse_timestamp

EXEC_API_GROUP = "client.authentication.k8s.io"
EXEC_API_VERSIONS = (f"{EXEC_API_GROUP}/v1", f"{EXEC_API_GROUP}/v1beta1")
LOGIN_TIMEOUT_S = 300.0
"""A person may have to log in with a browser."""
MAX_OUTPUT_BYTES = 1 << 20
EXEC_INFO_VARIABLE = "KUBERNETES_EXEC_INFO"


class _Variable(msgspec.Struct, frozen=True):
    name: str
    value: str


class ExecPlugin(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """`users[].user.exec` of a kubeconfig."""

    command: str = ""
    args: tuple[str, ...] | None = ()
    env: tuple[_Variable, ...] | None = ()
    api_version: str = ""
    install_hint: str = ""
    provide_cluster_info: bool = False
    interactive_mode: str = ""
    """Never, IfAvailable or Always; v1 wants it said."""


class _ExecCredentialStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    token: str | None = None
    client_certificate_data: str | None = None
    client_key_data: str | None = None
    expiration_timestamp: str | None = None


class _ExecCredential(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    api_version: str
    kind: str
    status: _ExecCredentialStatus | None = None


class ExecLogin:
    """One such program, ready to be run. Raises Unavailable where it is written wrongly, naming the field."""

    def __init__(self, plugin: ExecPlugin, folder: Path, field: str, cluster: Mapping[str, Any]) -> None:
        """`folder` is the kubeconfig's, `field` its name for people, `cluster` what may be told of the API server."""
        self._plugin, self._field = plugin, field
        self._cluster = cluster if plugin.provide_cluster_info else None
        if not plugin.command:
            raise Unavailable(f"{field}.command: is missing", "name the program that logs in")
        if plugin.api_version not in EXEC_API_VERSIONS:
            raise Unavailable(
                f"{field}.apiVersion: {plugin.api_version!r:.80} is not known", f"write {EXEC_API_VERSIONS[0]}"
            )
        self._mode = plugin.interactive_mode or ("IfAvailable" if plugin.api_version != EXEC_API_VERSIONS[0] else "")
        if self._mode not in ("Never", "IfAvailable", "Always"):
            raise Unavailable(
                f"{field}.interactiveMode: {self._mode!r:.80} is none", "write Never, IfAvailable or Always"
            )
        # A path is relative to the file, a name is looked for on PATH.
        self._command = str(folder / plugin.command) if os.sep in plugin.command else plugin.command

    def __call__(self) -> IssuedCredentials:
        """Run it. Raises Unavailable with what it said, and with the kubeconfig's own hint where it is not there."""
        plugin, terminal = self._plugin, bool(sys.stdin and sys.stdin.isatty())
        if self._mode == "Always" and not terminal:
            raise Unavailable(f"{self._field}: {plugin.command} wants a terminal", "run this in one")
        ask = terminal and self._mode != "Never"
        spec = {"interactive": ask} | ({} if self._cluster is None else {"cluster": self._cluster})
        told = {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": spec}
        environment = os.environ | {each.name: each.value for each in plugin.env or ()}
        environment[EXEC_INFO_VARIABLE] = msgspec.json.encode(told).decode()
        program = shutil.which(self._command, path=environment.get("PATH"))
        if program is None:
            hint = " ".join(plugin.install_hint.split()) or "install it, or correct the name"
            raise Unavailable(f"{self._field}.command: there is no program {self._command}", hint)
        try:
            # What it complains of goes where ours goes: it may be a question to a person.
            done = subprocess.run(
                [program, *(plugin.args or ())], env=environment, stdout=subprocess.PIPE, check=False,
                stdin=None if ask else subprocess.DEVNULL, timeout=LOGIN_TIMEOUT_S,
            )  # fmt: skip
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise Unavailable(f"{self._field}: {plugin.command} could not be run: {said}", "run it by hand") from error
        if done.returncode:
            raise Unavailable(
                f"{self._field}: {plugin.command} ended with status {done.returncode}", "run it by hand: it says why"
            )
        return self._read(done.stdout)

    def _read(self, said: bytes) -> IssuedCredentials:
        """What it printed, never shown: it is a secret."""
        where, remedy = f"{self._field}: {self._plugin.command}", "see what it prints"
        try:
            if len(said) > MAX_OUTPUT_BYTES:
                raise ValueError(f"more than {MAX_OUTPUT_BYTES} bytes")
            credential = msgspec.json.decode(said, type=_ExecCredential)
        except (ValueError, RecursionError) as error:  # msgspec's own are ones
            raise Unavailable(f"{where} printed no ExecCredential: {error}", remedy) from None
        if (credential.kind, credential.api_version) != ("ExecCredential", self._plugin.api_version):
            shown = f"{credential.kind} of {credential.api_version}"
            raise Unavailable(f"{where} printed {shown!r:.120}, not what {self._field}.apiVersion says", remedy)
        status = credential.status or _ExecCredentialStatus()
        if bool(status.client_certificate_data) != bool(status.client_key_data):
            raise Unavailable(f"{where} gave one of certificate and key", "it has to give both or none")
        if not status.token and not status.client_certificate_data:
            raise Unavailable(f"{where} gave neither a token nor a certificate", remedy)
        return IssuedCredentials(
            token=self._material("token", status.token),
            certificate=self._material("clientCertificateData", status.client_certificate_data),
            key=self._material("clientKeyData", status.client_key_data),
            expires_wall_s=self._ends(status.expiration_timestamp),
        )

    def _material(self, name: str, text: str | None) -> CredentialData | None:
        return CredentialData(data=text.encode(), field=f"{self._plugin.command}: status.{name}") if text else None

    def _ends(self, text: str | None) -> float | None:
        if not text:
            return None
        try:
            return parse_timestamp(text)
        except ValueError as error:
            raise Unavailable(
                f"{self._field}: {self._plugin.command}: expirationTimestamp: {error}", "mend it"
            ) from None

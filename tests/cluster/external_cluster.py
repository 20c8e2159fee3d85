"""An existing cluster, found by KUBECONFIG: used like a cluster of the tests, but never disturbed."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.binaries import Missing, obtain
from tests.cluster.cluster import CONSENT, Failed, printed
from tests.cluster.server import Refused, Server

_FILES = {
    "authority": ("cluster", "certificate-authority-data"),
    "certificate": ("user", "client-certificate-data"),
    "key": ("user", "client-key-data"),
}


class ExternalCluster:
    """The cluster of KUBECONFIG, which tests may change if it has the namespace CONSENT. Raises Missing otherwise."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self.kubeconfig, self._folder = kubeconfig, folder
        self._kubectl = str(obtain(("kubectl",))["kubectl"])
        self.server = self._server()
        try:
            self.server.ask("GET", f"/api/v1/namespaces/{CONSENT}")
        except Refused as error:
            raise Missing(
                f"KUBECONFIG is {kubeconfig}, and its cluster does not say that tests may change it ({error}): "
                f"unset KUBECONFIG to have a cluster made here, or kubectl create namespace {CONSENT}"
            ) from None

    def kubectl(self, *words: object, text: str | None = None) -> str:
        """Return the output of kubectl. Raises Failed."""
        settings: Mapping[str, str] = {**os.environ, "KUBECONFIG": str(self.kubeconfig)}
        return printed([self._kubectl, *map(str, words)], settings, text)

    def _server(self) -> Server:
        try:
            document = json.loads(self.kubectl("config", "view", "--raw", "--flatten", "--minify", "--output=json"))
        except Failed as error:
            raise Missing(f"KUBECONFIG: {error}") from None
        parts = {"cluster": document["clusters"][0]["cluster"], "user": document["users"][0]["user"]}
        files = {}
        for name, (part, field) in _FILES.items():
            if field not in parts[part]:
                raise Missing(f"KUBECONFIG: {part}: tests ask with {field}, which {self.kubeconfig} does not have")
            files[name] = self._folder / name
            files[name].write_bytes(base64.b64decode(parts[part][field]))
        return Server(parts["cluster"]["server"], files["authority"], files["certificate"], files["key"])

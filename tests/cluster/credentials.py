"""Credentials of a cluster: one authority, a certificate for each client, and kubeconfig files."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.cluster.names import API_SERVICE, CONTROL, Names

_DAYS = "30"
_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc")


class Authority:
    """The cluster's certificate authority and the certificates that it signed, in a folder of its own."""

    def __init__(self, names: Names) -> None:
        self._names, self.folder = names, names.run / "pki"

    def create(self) -> None:
        """Create the authority, the control plane's certificates, and the key of service account tokens."""
        self.folder.mkdir(parents=True)
        _openssl("req", "-x509", *_EC, "-keyout", str(self.key("ca")), "-out", str(self.certificate("ca")),
                 "-days", _DAYS, "-subj", "/CN=dioptase-test-cluster")  # fmt: skip
        address = self._names.address(CONTROL)
        self.issue("apiserver", "/CN=kube-apiserver", f"IP:{address},IP:{API_SERVICE},DNS:kubernetes.default.svc")
        self.issue("admin", "/O=system:masters/CN=admin")
        self.issue("front-proxy", "/CN=front-proxy")
        _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(self.key("accounts")))

    def issue(self, name: str, subject: str, alternatives: str = "") -> None:
        """Create a key and a certificate for both servers and clients."""
        request, extensions = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        extensions.write_text(
            "extendedKeyUsage=serverAuth,clientAuth\n" + (f"subjectAltName={alternatives}\n" if alternatives else "")
        )
        _openssl("req", *_EC, "-keyout", str(self.key(name)), "-out", str(request), "-subj", subject)
        signer = ("-CA", str(self.certificate("ca")), "-CAkey", str(self.key("ca")), "-CAcreateserial")
        _openssl("x509", "-req", "-in", str(request), *signer, "-days", _DAYS, "-out", str(self.certificate(name)),
                 "-extfile", str(extensions))  # fmt: skip

    def certificate(self, name: str) -> Path:
        return self.folder / f"{name}.crt"

    def key(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def kubeconfig(self, name: str, path: Path | None = None) -> Path:
        """Write a kubeconfig for this user; JSON is valid YAML."""
        path = path or self._names.run / f"{name}.kubeconfig"
        item = f"dioptase-{self._names.number}"
        cluster = {"server": self._names.server, "certificate-authority": str(self.certificate("ca"))}
        user = {"client-certificate": str(self.certificate(name)), "client-key": str(self.key(name))}
        text = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": item,
            "clusters": [{"name": item, "cluster": cluster}],
            "users": [{"name": item, "user": user}],
            "contexts": [{"name": item, "context": {"cluster": item, "user": item}}],
        }
        path.write_text(json.dumps(text))
        return path


def _openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)

"""A certificate authority of our own, for tests of TLS: made by openssl, valid for a day, for 127.0.0.1 and localhost."""

from __future__ import annotations

import subprocess
from pathlib import Path


class Authority:
    """Signs certificates into a directory."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self.directory = directory
        self.certificate = directory / f"{name}.crt"
        self.key = directory / f"{name}.key"
        self._openssl("req", "-x509", *_new(self.key), "-out", str(self.certificate), "-days", "1",
                      "-subj", f"/CN={name}", "-addext", "keyUsage=critical,keyCertSign,cRLSign")  # fmt: skip

    def issue(self, name: str) -> tuple[Path, Path]:
        """Certificate and key."""
        certificate, key, request = (self.directory / f"{name}.{kind}" for kind in ("crt", "key", "csr"))
        extensions = self.directory / f"{name}.ext"
        extensions.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
        self._openssl("req", *_new(key), "-out", str(request), "-subj", f"/CN={name}")
        self._openssl("x509", "-req", "-in", str(request), "-CA", str(self.certificate), "-CAkey", str(self.key),
                      "-CAcreateserial", "-out", str(certificate), "-days", "1", "-extfile", str(extensions))  # fmt: skip
        return certificate, key

    @staticmethod
    def _openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True)


def _new(key: Path) -> tuple[str, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc", "-keyout", str(key))

"""Image archives as of `docker save`, and their content."""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path

from deploy.sbom import DOCUMENT, DPKG_STATUS

_DISTRIBUTION = re.compile(r"(?:opt|usr/local)/.*/([^/]+)-([^/-]+)\.dist-info/METADATA")
_PACKAGE = re.compile(
    r"^Package: (\S+)\n(?:\S.*\n)*?Status: install ok installed\n(?:.*\n)*?Version: (\S+)$", re.MULTILINE
)


def write_archive(path: Path, document: bytes) -> None:
    """Write an image of two layers, the second of which has this bill of materials."""
    with tarfile.open(path, "w") as image:
        layers = {"one.tar": ("etc/hostname", b"x"), "two.tar": (DOCUMENT, document)}
        for layer, (name, content) in layers.items():
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as tar:
                _add(tar, name, content)
            _add(image, layer, inner.getvalue())
        _add(image, "manifest.json", json.dumps([{"Layers": [*layers]}]).encode())


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def read_installed(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return versions by name of the Debian packages and the Python distributions in the layers of an image, without the code
    under test: by patterns in dpkg's status, and by the names of directories."""
    packages: dict[str, str] = {}
    distributions: dict[str, str] = {}
    with tarfile.open(path) as image:
        (image_manifest,) = json.loads(image.extractfile("manifest.json").read())  # type: ignore[union-attr]
        for layer in image_manifest["Layers"]:
            with tarfile.open(fileobj=image.extractfile(layer)) as tar:
                for name in tar.getnames():
                    if match := _DISTRIBUTION.fullmatch(name.removeprefix("./")):
                        distributions[match[1].lower().replace("_", "-")] = match[2]
                    if name.removeprefix("./") == DPKG_STATUS:
                        text = tar.extractfile(name).read().decode()  # type: ignore[union-attr]
                        packages = dict(_PACKAGE.findall(text))
    return packages, distributions

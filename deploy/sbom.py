"""Writes the bill of materials of a root file system: a CycloneDX document of Debian packages and Python distributions.

    python3 deploy/sbom.py ROOT                   the document of what is installed below ROOT
    python3 deploy/sbom.py --archive ARCHIVE      the document inside an image, an archive as of `docker save`

It lists what is installed, by dpkg's status and the metadata of distributions, not what was requested. The build of the
image runs this file with the interpreter of the image, so it uses the standard library only. The same content gives the
same document.
"""

from __future__ import annotations

import email.parser
import json
import sys
import tarfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

DOCUMENT = "usr/share/doc/dioptase/sbom.cdx.json"
"""Path of the document in the image."""
DPKG_STATUS = "var/lib/dpkg/status"
DISTRIBUTIONS = ("opt", "usr/local")
"""Directories below which Python distributions are searched; those of Debian are packages of dpkg."""
SPEC_VERSION = "1.6"
_NAMESPACE = uuid.UUID("5f2b1a6e-3a83-4a53-9a7e-6c3a0d1c9a55")
Component = dict[str, Any]


def bill_of_materials(root: Path) -> dict[str, Any]:
    """Return the CycloneDX document of a root file system. Raises OSError without dpkg's status."""
    release = _os_release((root / "etc/os-release").read_text())
    distribution = f"{release.get('ID', 'debian')}-{release.get('VERSION_ID', '')}"
    components = [
        _operating_system(release),
        *sorted(_debian_packages((root / DPKG_STATUS).read_text(), distribution), key=_reference),
        *sorted(_python_distributions(root), key=_reference),
    ]
    serial = uuid.uuid5(_NAMESPACE, json.dumps(components, sort_keys=True))
    own = next((each for each in components if each["name"] == "dioptase"), {"version": "unknown"})
    return {
        "bomFormat": "CycloneDX",
        "specVersion": SPEC_VERSION,
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": "dioptase", "version": own["version"]}},
        "components": components,
    }


def _reference(component: Component) -> str:
    return str(component["bom-ref"])


def _os_release(text: str) -> Mapping[str, str]:
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name: value.strip('"') for name, _, value in pairs}


def _operating_system(release: Mapping[str, str]) -> Component:
    name, version = release.get("ID", "debian"), release.get("VERSION_ID", "")
    return {
        "type": "operating-system",
        "bom-ref": f"os:{name}-{version}",
        "name": name,
        "version": version,
        "description": release.get("VERSION_CODENAME", ""),
    }


def _debian_packages(status: str, distribution: str) -> Iterator[Component]:
    """Yield the installed packages of dpkg's status file (deb-control(5), one paragraph per package)."""
    for paragraph in status.split("\n\n"):
        fields = email.parser.HeaderParser().parsestr(paragraph.strip())
        if fields.get("Status", "").split() != ["install", "ok", "installed"]:
            continue
        name, version, arch = fields["Package"], fields["Version"], fields["Architecture"]
        # `Source: NAME (VERSION)`, only where it differs from the package: advisories name sources.
        source, _, source_version = (fields.get("Source") or name).partition(" ")
        upstream = f"{source}@{source_version.strip('()') or version}"
        qualifiers = f"arch={arch}&distro={quote(distribution)}&upstream={quote(upstream, safe='')}"
        yield _library(name, version, f"pkg:deb/debian/{quote(name)}@{quote(version, safe='')}?{qualifiers}")


def _python_distributions(root: Path) -> Iterator[Component]:
    """Yield the Python distributions below DISTRIBUTIONS (core metadata, PEP 566)."""
    for directory in DISTRIBUTIONS:
        for path in (root / directory).rglob("*.dist-info/METADATA"):
            fields = email.parser.HeaderParser().parsestr(path.read_text())
            # Names of a purl of PyPI are lower case, with hyphens (purl-spec, PURL-TYPES).
            name = fields["Name"].lower().replace("_", "-")
            component = _library(
                fields["Name"], fields["Version"], f"pkg:pypi/{quote(name)}@{quote(fields['Version'], safe='')}"
            )
            if expression := fields.get("License-Expression"):
                component["licenses"] = [{"expression": expression}]
            yield component


def _library(name: str, version: str, purl: str) -> Component:
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def read_from_archive(archive: Path) -> bytes:
    """Return the document inside an image. Raises KeyError if it has none."""
    with tarfile.open(archive) as image:
        (image_manifest,) = json.loads(_read(image, "manifest.json"))
        for name in reversed(image_manifest["Layers"]):
            with tarfile.open(fileobj=image.extractfile(name)) as layer:
                if DOCUMENT in layer.getnames():
                    return _read(layer, DOCUMENT)
    raise KeyError(f"{archive}: no layer has {DOCUMENT}; build the image again with deploy/image")


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.extractfile(name)
    assert member is not None, f"{name} is no file"
    return member.read()


def main(arguments: list[str]) -> int:
    match arguments:
        case ["--archive", archive]:
            sys.stdout.write(read_from_archive(Path(archive)).decode())
        case [root]:
            json.dump(bill_of_materials(Path(root)), sys.stdout, indent=1)
            sys.stdout.write("\n")
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

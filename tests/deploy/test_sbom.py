"""The bill of materials lists what is installed below a root, in CycloneDX's form; the same content gives the same document."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import sbom
from tests.deploy.image_archives import write_archive

SCRIPT = Path(sbom.__file__)
STATUS = """Package: libc6
Status: install ok installed
Architecture: amd64
Source: glibc
Version: 2.36-9+deb12u10
Description: GNU C Library: Shared libraries
 Contains the standard libraries.

Package: login
Status: install ok installed
Architecture: amd64
Source: shadow (1:4.13)
Version: 1:4.13+dfsg1-1+b1

Package: removed
Status: deinstall ok config-files
Architecture: amd64
Version: 1
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {
        "etc/os-release": 'ID=debian\nVERSION_ID="12"\nVERSION_CODENAME=bookworm\n',
        sbom.DPKG_STATUS: STATUS,
        "opt/dioptase/lib/python3.11/site-packages/dioptase-0.1.0.dist-info/METADATA": "Name: dioptase\nVersion: 0.1.0\n",
        "opt/dioptase/lib/python3.11/site-packages/a_b-2.0.dist-info/METADATA": (
            "Name: A_b\nVersion: 2.0+local\nLicense-Expression: MIT\n\nVersion: 3 says the description\n"
        ),
        # Of a Debian package.
        "usr/lib/python3/dist-packages/bcc-0.26.dist-info/METADATA": "Name: bcc\nVersion: 0.26\n",
    }
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "root"


def test_installed_packages_and_distributions_are_listed_and_no_others(root: Path) -> None:
    document = sbom.bill_of_materials(root)
    assert (document["bomFormat"], document["specVersion"], document["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", document["serialNumber"])
    assert document["metadata"]["component"] == {"type": "container", "name": "dioptase", "version": "0.1.0"}
    assert [each.get("purl", each["bom-ref"]) for each in document["components"]] == [
        "os:debian-12",
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u10?arch=amd64&distro=debian-12&upstream=glibc%402.36-9%2Bdeb12u10",
        "pkg:deb/debian/login@1%3A4.13%2Bdfsg1-1%2Bb1?arch=amd64&distro=debian-12&upstream=shadow%401%3A4.13",
        "pkg:pypi/a-b@2.0%2Blocal",
        "pkg:pypi/dioptase@0.1.0",
    ]
    assert document["components"][3]["licenses"] == [{"expression": "MIT"}]
    references = [each["bom-ref"] for each in document["components"]]
    assert len({*references}) == len(references), "CycloneDX requires unique references"


def test_the_same_content_gives_the_same_document_and_other_content_another(root: Path) -> None:
    first = sbom.bill_of_materials(root)
    assert sbom.bill_of_materials(root) == first
    status = root / sbom.DPKG_STATUS
    status.write_text(status.read_text().replace("deb12u10", "deb12u11"))
    assert sbom.bill_of_materials(root)["serialNumber"] != first["serialNumber"]


def test_the_program_needs_the_standard_library_alone(root: Path) -> None:
    """The image has no other library while it is built: `-S` leaves out site-packages, `-I` the environment."""
    done = subprocess.run([sys.executable, "-I", "-S", SCRIPT, root], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == sbom.bill_of_materials(root)


def test_the_document_is_read_from_the_last_layer_of_an_archive(tmp_path: Path) -> None:
    write_archive(tmp_path / "image.tar", b'{"bomFormat": "CycloneDX"}')
    words = [sys.executable, SCRIPT, "--archive", tmp_path / "image.tar"]
    assert subprocess.run(words, check=True, capture_output=True).stdout == b'{"bomFormat": "CycloneDX"}'


def test_an_image_without_a_document_is_an_error_that_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_archive(tmp_path / "image.tar", b"{}")
    monkeypatch.setattr(sbom, "DOCUMENT", "usr/share/other")
    with pytest.raises(KeyError, match="build the image again with deploy/image"):
        sbom.read_from_archive(tmp_path / "image.tar")

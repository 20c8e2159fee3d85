"""The bill of materials of the real image is complete, and has no known vulnerability that an update would fix."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from deploy import sbom
from deploy.vulnerabilities import (
    debian_security_versions,
    find_vulnerabilities,
    load_records,
    materials,
    pending_updates,
)
from tests.cluster.binaries import Missing
from tests.cluster.image_and_chart import image_archive
from tests.deploy.image_archives import read_installed

pytestmark = pytest.mark.vulnerabilities
DATABASES = "DIOPTASE_VULNERABILITY_DATABASES"
"""Environment variable with files, directories or URLs of records of OSV, separated by spaces."""


@pytest.fixture(scope="module")
def archive() -> Path:
    try:
        return image_archive()
    except Missing as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def document(archive: Path) -> Any:
    return json.loads(sbom.read_from_archive(archive))


def test_every_package_and_distribution_of_the_image_is_listed(archive: Path, document: Any) -> None:
    packages, distributions = read_installed(archive)
    listed = [each for each in document["components"] if "purl" in each]
    debian = {each["name"]: each["version"] for each in listed if each["purl"].startswith("pkg:deb/")}
    python = {
        each["name"].lower().replace("_", "-"): each["version"]
        for each in listed
        if each["purl"].startswith("pkg:pypi/")
    }
    assert debian == packages
    assert python == distributions
    assert len(debian) > 80
    assert {"dioptase", "aiohttp", "grpcio"} <= python.keys()
    assert not {"pip", "setuptools"} & python.keys(), "what it is built with is no part of it"
    assert archive.with_suffix(".cdx.json").read_bytes() == sbom.read_from_archive(archive)


def test_no_update_of_debians_security_suite_is_pending(document: Any) -> None:
    (codename,) = (each["description"] for each in document["components"] if each["type"] == "operating-system")
    available = debian_security_versions(codename)
    if not available:
        pytest.skip(
            f"apt has no list of {codename}-security: apt-get update, on a machine with that suite in its sources"
        )
    pending = pending_updates(document, available)
    assert list(map(str, pending)) == [], "make the base again: rm ~/.cache/dioptase/image/root-*"


def test_no_known_vulnerability_has_a_fix(document: Any) -> None:
    locations = os.environ.get(DATABASES, "").split()
    if not locations:
        pytest.skip(f"no database: set {DATABASES} to files, directories or URLs of OSV records (docs/supply-chain.md)")
    findings = [
        finding
        for location in locations
        for finding in find_vulnerabilities(materials(document), load_records(location))
    ]
    for finding in findings:
        print(f"{'FAIL' if finding.fails() else 'note'} {finding}")
    assert [str(finding) for finding in findings if finding.fails()] == []

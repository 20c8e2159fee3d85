"""Known vulnerabilities are found by ranges and listed versions, merged by alias, and fail if an update fixes a severe one."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from deploy import vulnerabilities
from deploy.vulnerabilities import (
    Material,
    VulnerabilityFinding,
    cvss3_score,
    find_vulnerabilities,
    load_records,
    materials,
)

DOCUMENT = {
    "components": [
        {"type": "operating-system", "name": "debian", "version": "12", "description": "bookworm"},
        {
            "type": "library",
            "name": "libc6",
            "version": "2.36-9+deb12u9",
            "purl": "pkg:deb/debian/libc6@2.36-9%2Bdeb12u9?arch=amd64&distro=debian-12&upstream=glibc%402.36-9%2Bdeb12u9",
        },
        {"type": "library", "name": "A_b", "version": "2.0", "purl": "pkg:pypi/a-b@2.0"},
    ]
}
GLIBC, PYTHON = Material("Debian:12", "glibc", "2.36-9+deb12u9", "libc6"), Material("PyPI", "a-b", "2.0", "a-b")
HIGH, LOW = "CVSS:3.1/AV:N/AC:L/PR:N/UI:N/S:U/C:H/I:H/A:H", "CVSS:3.1/AV:L/AC:H/PR:H/UI:R/S:U/C:L/I:N/A:N"


def record(
    identity: str, *events: dict[str, str], ecosystem: str = "PyPI", name: str = "a_B", **more: Any
) -> dict[str, Any]:
    ranges = [{"type": "ECOSYSTEM", "events": list(events)}]
    return {"id": identity, "affected": [{"package": {"ecosystem": ecosystem, "name": name}, "ranges": ranges}], **more}


def severity(vector: str) -> list[dict[str, str]]:
    return [{"type": "CVSS_V3", "score": vector}]


def test_packages_have_the_names_that_advisories_use() -> None:
    assert materials(DOCUMENT) == [GLIBC, PYTHON]


@pytest.mark.parametrize(
    ("events", "fixed"),
    [
        (({"introduced": "0"}, {"fixed": "2.1"}), "2.1"),
        (({"introduced": "0"}, {"fixed": "2.0"}), None),
        (({"introduced": "0"}, {"fixed": "2.0rc1"}), None),
        (({"introduced": "2.0"},), ""),
        (({"introduced": "2.0.post1"},), None),
        (({"introduced": "0"}, {"fixed": "1.5"}, {"introduced": "1.9"}, {"fixed": "2.10"}), "2.10"),
        (({"introduced": "0"}, {"last_affected": "2.0"}), ""),
        (({"introduced": "0"}, {"last_affected": "1.9"}), None),
    ],
)
def test_a_version_is_affected_between_introduction_and_fix(
    events: tuple[dict[str, str], ...], fixed: str | None
) -> None:
    findings = find_vulnerabilities([PYTHON], [record("GHSA-1", *events)])
    assert [finding.fixed for finding in findings] == ([] if fixed is None else [fixed])


def test_versions_of_debian_are_compared_as_dpkg_does() -> None:
    older = record("DSA-1", {"introduced": "0"}, {"fixed": "2.36-9+deb12u10"}, ecosystem="Debian:12", name="glibc")
    same = record("DSA-2", {"introduced": "0"}, {"fixed": "2.36-9+deb12u9"}, ecosystem="Debian:12", name="glibc")
    other = record("DSA-3", {"introduced": "0"}, {"fixed": "2.36-9+deb12u10"}, ecosystem="Debian:11", name="glibc")
    assert [finding.identities for finding in find_vulnerabilities([GLIBC], [older, same, other])] == [("DSA-1",)]


def test_listed_versions_count_and_withdrawn_records_do_not() -> None:
    listed = {
        "id": "PYSEC-1",
        "affected": [{"package": {"ecosystem": "PyPI", "name": "A-B"}, "versions": ["1.9", "2.0"]}],
    }
    assert [finding.fixed for finding in find_vulnerabilities([PYTHON], [listed])] == [""]
    assert find_vulnerabilities([PYTHON], [{**listed, "withdrawn": "2026-01-01T00:00:00Z"}]) == []


def test_records_of_one_vulnerability_are_one_finding_with_the_greatest_score() -> None:
    scored = record(
        "GHSA-1", {"introduced": "0"}, {"fixed": "2.1"}, aliases=["CVE-1", "PYSEC-1"], severity=severity(LOW)
    )
    unscored = record("PYSEC-1", {"introduced": "0"}, aliases=["CVE-1", "GHSA-1"])
    (finding,) = find_vulnerabilities([PYTHON], [unscored, scored])
    assert finding == VulnerabilityFinding(PYTHON, ("CVE-1", "GHSA-1", "PYSEC-1"), 1.8, "2.1")
    assert not finding.fails()


@pytest.mark.parametrize(
    ("score", "fixed", "fails"),
    [(7.0, "2.1", True), (6.9, "2.1", False), (None, "2.1", True), (9.8, "", False), (None, "", False)],
)
def test_only_what_an_update_fixes_fails(score: float | None, fixed: str, fails: bool) -> None:
    assert VulnerabilityFinding(PYTHON, ("CVE-1",), score, fixed).fails() is fails


@pytest.mark.parametrize(
    ("vector", "score"),
    [
        (HIGH, 9.8),
        ("CVSS:3.1/AV:N/AC:L/PR:N/UI:R/S:C/C:L/I:L/A:N", 6.1),
        ("CVSS:3.1/AV:L/AC:L/PR:L/UI:N/S:U/C:H/I:N/A:N", 5.5),
        ("CVSS:3.0/AV:N/AC:L/PR:N/UI:N/S:C/C:H/I:H/A:H", 10.0),
        ("CVSS:3.1/AV:N/AC:H/PR:N/UI:N/S:U/C:H/I:H/A:H", 8.1),
        (LOW, 1.8),
        ("CVSS:3.1/AV:N/AC:L/PR:N/UI:N/S:U/C:N/I:N/A:N", 0.0),
    ],
)
def test_base_scores_are_those_of_the_specification(vector: str, score: float) -> None:
    """Published scores of CVE-2021-44228 and others; FIRST's calculator gives the same."""
    assert cvss3_score(vector) == score


def test_a_label_counts_where_there_is_no_vector() -> None:
    labelled = record("GHSA-1", {"introduced": "0"}, {"fixed": "3"}, database_specific={"severity": "HIGH"})
    assert [finding.score for finding in find_vulnerabilities([PYTHON], [labelled])] == [8.9]


def test_a_database_is_a_file_a_list_a_directory_or_an_archive(tmp_path: Path) -> None:
    first, second = record("A", {"introduced": "0"}), record("B", {"introduced": "0"})
    (tmp_path / "records").mkdir()
    (tmp_path / "records/a.json").write_text(json.dumps(first))
    (tmp_path / "records/b.json").write_text(json.dumps([second]))
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.write(tmp_path / "records/a.json", "a.json")
        archive.write(tmp_path / "records/b.json", "b.json")
    for location in ("records", "all.zip"):
        assert list(load_records(str(tmp_path / location))) == [first, second]
    assert list(load_records((tmp_path / "all.zip").as_uri())) == [first, second]
    (tmp_path / "text").write_text("<html>")
    with pytest.raises(ValueError, match="Expecting value"):
        list(load_records(str(tmp_path / "text")))


def test_a_newer_version_in_the_security_suite_is_a_pending_update() -> None:
    newer = vulnerabilities.pending_updates(DOCUMENT, {"libc6": "2.36-9+deb12u10", "A_b": "3"})
    assert [(each.material.package, each.fixed, each.fails()) for each in newer] == [("libc6", "2.36-9+deb12u10", True)]
    assert vulnerabilities.pending_updates(DOCUMENT, {"libc6": "2.36-9+deb12u9"}) == []


def test_the_program_fails_for_severe_vulnerabilities_and_prints_what_it_did_not_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document, database = tmp_path / "sbom.json", tmp_path / "osv.json"
    elsewhere = [*DOCUMENT["components"][1:], {**DOCUMENT["components"][0], "description": "none"}]
    document.write_text(json.dumps({"components": elsewhere}))
    database.write_text(json.dumps([record("GHSA-1", {"introduced": "0"}, {"fixed": "2.1"}, severity=severity(HIGH))]))
    assert vulnerabilities.main([str(document), str(database)]) == 1
    output = capsys.readouterr().out
    assert "FAIL a-b 2.0: GHSA-1 (CVSS 9.8); update to 2.1\n" in output
    assert "not compared with Debian's security suite: apt has no list of none-security (apt-get update)\n" in output
    assert "3 components, 1 findings, 1 to fix now (CVSS 7 and above)\n" in output
    assert vulnerabilities.main([str(document)]) == 0
    assert "not compared with a database of OSV: none is named\n" in capsys.readouterr().out

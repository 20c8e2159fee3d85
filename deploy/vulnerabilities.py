"""Compares a bill of materials with databases of known vulnerabilities, and fails for those that an update would fix.

    python -m deploy.vulnerabilities SBOM [DATABASE ...]

SBOM is a CycloneDX document of deploy/sbom.py. A DATABASE is a file, a directory or a URL with records in the format of
OSV (a JSON file of one record or of a list, or a ZIP of such files, such as OSV's all.zip of an ecosystem). Debian's
packages are also compared with the security suite of which apt has the lists on this machine.

A vulnerability without a fixed version is printed and does not fail, because no update could remove it.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from packaging.version import InvalidVersion, Version

THRESHOLD = 7.0
"""CVSS base score from which on a vulnerability with a fix fails: "high" (CVSS v3.1, section 5)."""
MAX_DATABASE_BYTES = 1 << 30
DOWNLOAD_TIMEOUT_S = 120
LABELS = {"LOW": 3.9, "MODERATE": 6.9, "MEDIUM": 6.9, "HIGH": 8.9, "CRITICAL": 10.0}
"""Highest score of each severity label that a record may have in place of a vector."""
Record = Mapping[str, Any]


class Material(NamedTuple):
    """One package of a bill of materials, by the name that advisories use: Debian's of the source package."""

    ecosystem: str
    name: str
    version: str
    package: str


class VulnerabilityFinding(NamedTuple):
    """A known vulnerability of an installed package."""

    material: Material
    identities: tuple[str, ...]
    score: float | None
    """CVSS base score; None if no record has one."""
    fixed: str
    """Version with the fix; empty if there is none."""

    def fails(self, threshold: float = THRESHOLD) -> bool:
        """Return whether an update fixes it and it is severe; an unknown severity counts as severe."""
        return bool(self.fixed) and (self.score is None or self.score >= threshold)

    def __str__(self) -> str:
        score = "severity unknown" if self.score is None else f"CVSS {self.score:.1f}"
        remedy = f"update to {self.fixed}" if self.fixed else "no fixed version"
        return f"{self.material.package} {self.material.version}: {', '.join(self.identities)} ({score}); {remedy}"


def materials(document: Record) -> list[Material]:
    """Return the packages of a CycloneDX document."""
    return [item for each in document["components"] if (item := _material(each.get("purl", ""))) is not None]


def _material(purl: str) -> Material | None:
    head, _, query = purl.partition("?")
    kind, _, rest = head.removeprefix("pkg:").partition("/")
    name, _, version = map(unquote, rest.partition("@"))
    if kind == "pypi":
        return Material("PyPI", name, version, name)
    if kind != "deb":
        return None
    qualifiers = dict(pair.split("=", 1) for pair in query.split("&") if pair)
    source, _, source_version = unquote(qualifiers["upstream"]).partition("@")
    release = unquote(qualifiers["distro"]).rpartition("-")[2]
    return Material(f"Debian:{release}", source, source_version, name.rpartition("/")[2])


def load_records(location: str) -> Iterator[Record]:
    """Yield the records of a database. Raises OSError, and ValueError if it is no database."""
    if "://" in location:
        with urllib.request.urlopen(location, timeout=DOWNLOAD_TIMEOUT_S) as answer:  # noqa: S310 - named by the caller
            content = answer.read(MAX_DATABASE_BYTES + 1)
        if len(content) > MAX_DATABASE_BYTES:
            raise ValueError(f"{location}: more than {MAX_DATABASE_BYTES >> 20} MiB")
        yield from _records(content)
        return
    path = Path(location)
    for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
        yield from _records(file.read_bytes())


def _records(content: bytes) -> Iterator[Record]:
    if content.startswith(b"PK"):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for name in archive.namelist():
                yield from _records(archive.read(name))
        return
    decoded = json.loads(content)
    yield from decoded if isinstance(decoded, list) else [decoded]


def find_vulnerabilities(installed: Sequence[Material], records: Iterable[Record]) -> list[VulnerabilityFinding]:
    """Return the vulnerabilities of these packages; records that are aliases of each other are one."""
    by_name: dict[tuple[str, str], list[Material]] = {}
    for material in installed:
        by_name.setdefault((material.ecosystem, material.name), []).append(material)
    merged: dict[tuple[Material, str], VulnerabilityFinding] = {}
    for record in records:
        if "withdrawn" in record:
            continue
        for affected in record.get("affected", ()):
            package = affected.get("package", {})
            name = str(package.get("name", ""))
            name = name.lower().replace("_", "-") if package.get("ecosystem") == "PyPI" else name
            for material in by_name.get((str(package.get("ecosystem")), name), ()):
                fixed = _fixed_version(material, affected)
                if fixed is not None:
                    _merge(merged, record, affected, material, fixed)
    return sorted(merged.values(), key=lambda each: (each.material, each.identities))


def _merge(
    merged: dict[tuple[Material, str], VulnerabilityFinding], record: Record, affected: Record, material: Material, fixed: str
) -> None:  # fmt: skip
    identities = {str(record["id"]), *record.get("aliases", ()), *record.get("upstream", ())}
    key = material, min(identities)
    score, earlier = score_of(record, affected), merged.get(key)
    if earlier is not None:
        identities |= {*earlier.identities}
        score = max((each for each in (score, earlier.score) if each is not None), default=None)
        fixed = fixed or earlier.fixed
    merged[key] = VulnerabilityFinding(material, tuple(sorted(identities)), score, fixed)


def _fixed_version(material: Material, affected: Record) -> str | None:
    """Return the version with the fix, empty if there is none; None if this version is not affected.

    The algorithm is that of the OSV schema, section "Evaluation".
    """
    is_older = _comparison(material.ecosystem)
    for each in affected.get("ranges", ()):
        if each.get("type") not in ("ECOSYSTEM", "SEMVER"):
            continue
        introduced = False
        for event in each.get("events", ()):
            if (start := event.get("introduced")) is not None:
                introduced = start == "0" or not is_older(material.version, start)
            elif introduced and (end := event.get("fixed")) is not None:
                if is_older(material.version, end):
                    return str(end)
                introduced = False
            elif introduced and (last := event.get("last_affected")) is not None:
                introduced = not is_older(last, material.version)
        if introduced:
            return ""
    return "" if material.version in affected.get("versions", ()) else None


def _comparison(ecosystem: str) -> Callable[[str, str], bool]:
    return debian_is_older if ecosystem.startswith("Debian") else _python_is_older


def _python_is_older(version: str, other: str) -> bool:
    try:
        return Version(version) < Version(other)
    except InvalidVersion:
        # A version from before PEP 440; records of such packages list the affected versions.
        return False


def debian_is_older(version: str, other: str) -> bool:
    """Return whether a version of Debian is older than another one, as dpkg compares them."""
    return subprocess.run(["dpkg", "--compare-versions", version, "lt", other], check=False).returncode == 0


def score_of(record: Record, affected: Record) -> float | None:
    """Return the greatest CVSS base score of a record, from its vectors or its label; None if it has neither."""
    vectors = [*record.get("severity", ()), *affected.get("severity", ())]
    scores = [cvss3_score(each["score"]) for each in vectors if each.get("type") == "CVSS_V3"]
    label = str(record.get("database_specific", {}).get("severity", "")).upper()
    return max(scores, default=LABELS.get(label))


_WEIGHTS: Mapping[str, Mapping[str, float]] = {
    "AV": {"N": 0.85, "A": 0.62, "L": 0.55, "P": 0.2},
    "AC": {"L": 0.77, "H": 0.44},
    "UI": {"N": 0.85, "R": 0.62},
    "C": {"H": 0.56, "L": 0.22, "N": 0.0},
    "I": {"H": 0.56, "L": 0.22, "N": 0.0},
    "A": {"H": 0.56, "L": 0.22, "N": 0.0},
}
_PRIVILEGES = {"U": {"N": 0.85, "L": 0.62, "H": 0.27}, "C": {"N": 0.85, "L": 0.68, "H": 0.5}}


def cvss3_score(vector: str) -> float:
    """Return the base score of a vector of CVSS 3 (CVSS v3.1 specification, section 7.1). Raises KeyError if one is missing."""
    metrics = dict(part.split(":", 1) for part in vector.split("/"))
    weight = {name: values[metrics[name]] for name, values in _WEIGHTS.items()}
    changed = metrics["S"] == "C"
    iss = 1 - (1 - weight["C"]) * (1 - weight["I"]) * (1 - weight["A"])
    impact = 7.52 * (iss - 0.029) - 3.25 * (iss - 0.02) ** 15 if changed else 6.42 * iss
    if impact <= 0:
        return 0.0
    privileges = _PRIVILEGES[metrics["S"]][metrics["PR"]]
    exploitability = 8.22 * weight["AV"] * weight["AC"] * privileges * weight["UI"]
    # Appendix A: rounded up to a tenth, in integers because of binary fractions.
    scaled = round(min(1.08 * (impact + exploitability) if changed else impact + exploitability, 10.0) * 100_000)
    return scaled / 100_000 if scaled % 10_000 == 0 else (scaled // 10_000 + 1) / 10


def debian_security_versions(codename: str) -> dict[str, str]:
    """Return the version of each package in Debian's security suite, by apt's lists on this machine; empty if it has none."""
    words = [
        "apt-get",
        "indextargets",
        "--format",
        "$(FILENAME)",
        "Created-By: Packages",
        f"Codename: {codename}-security",
    ]
    try:
        files = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return {}
    versions: dict[str, str] = {}
    for file in files:
        # apt keeps the lists compressed by whatever the mirror and the configuration say.
        cat = ["/usr/lib/apt/apt-helper", "cat-file", file]
        text = subprocess.run(cat, check=True, capture_output=True, text=True).stdout
        for paragraph in text.split("\n\n"):
            fields = dict(
                line.split(": ", 1) for line in paragraph.splitlines() if line.startswith(("Package: ", "Version: "))
            )
            name, version = fields.get("Package", ""), fields.get("Version", "")
            if name and (name not in versions or debian_is_older(versions[name], version)):
                versions[name] = version
    return versions


def pending_updates(document: Record, available: Mapping[str, str]) -> list[VulnerabilityFinding]:
    """Return the installed Debian packages for which the security suite has a newer version."""
    pending = []
    for component in document["components"]:
        material = _material(component.get("purl", ""))
        newer = available.get(str(component["name"]), "")
        if material is None or not material.ecosystem.startswith("Debian") or not newer:
            continue
        if debian_is_older(component["version"], newer):
            shown = material._replace(version=component["version"])
            pending.append(VulnerabilityFinding(shown, ("Debian security update",), None, newer))
    return pending


def main(arguments: list[str]) -> int:
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    document = json.loads(Path(arguments[0]).read_bytes())
    codename = next(
        (str(each.get("description", "")) for each in document["components"] if each["type"] == "operating-system"), ""
    )
    available = debian_security_versions(codename)
    if not available:
        print(f"not compared with Debian's security suite: apt has no list of {codename}-security (apt-get update)")
    findings = pending_updates(document, available)
    for location in arguments[1:]:
        findings += find_vulnerabilities(materials(document), load_records(location))
    if len(arguments) == 1:
        print("not compared with a database of OSV: none is named")
    for finding in findings:
        print(f"{'FAIL' if finding.fails() else 'note'} {finding}")
    failed = sum(finding.fails() for finding in findings)
    print(
        f"{len(document['components'])} components, {len(findings)} findings, "
        f"{failed} to fix now (CVSS {THRESHOLD:g} and above)"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

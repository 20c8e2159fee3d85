"""The document custom-resources.md lists every kind as the table in the code does."""

from __future__ import annotations

from pathlib import Path

from api.katalyst.kinds import KATALYST_DOMAIN, KATALYST_KINDS

DOCUMENT = Path(__file__).parents[3] / "docs/custom-resources.md"


def test_the_document_has_every_kind() -> None:
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in DOCUMENT.read_text().splitlines()]
    documented = [tuple(row[:5]) for row in rows if len(row) == 6 and row[3] != "---"][1:]
    versions = [", ".join(version.name for version in kind.versions) for kind in KATALYST_KINDS]
    groups = [kind.group.removesuffix(f".{KATALYST_DOMAIN}") for kind in KATALYST_KINDS]
    assert documented == [
        (kind.kind, group, version, kind.short_name, kind.scope)
        for kind, group, version in zip(KATALYST_KINDS, groups, versions, strict=True)
    ]

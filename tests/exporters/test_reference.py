"""docs/metrics.md says what the catalogue says."""

from __future__ import annotations

from pathlib import Path

from api.catalogue import CATALOGUE
from exporters.reference import reference

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_document_is_fresh() -> None:
    assert DOCUMENT.read_text() == reference(), "run: python -m exporters.reference docs/metrics.md"


def test_every_metric_is_in_it_once() -> None:
    text = reference()
    assert [text.count(f"| `{metric.name}`<br>") for metric in CATALOGUE] == [1] * len(CATALOGUE)

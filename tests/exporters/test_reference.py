"""docs/metrics.md says what the catalogue says."""

from __future__ import annotations

from pathlib import Path

from api.catalogue import CATALOGUE, CGROUP_LABELS
from exporters.reference import reference

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_document_is_fresh() -> None:
    assert DOCUMENT.read_text() == reference(), "run: python -m exporters.reference docs/metrics.md"


def test_every_metric_is_in_it_once() -> None:
    text = reference()
    assert [text.count(f"| `{metric.name}`<br>") for metric in CATALOGUE] == [1] * len(CATALOGUE)


def test_every_row_about_cgroups_says_whether_those_below_are_in_it() -> None:
    """But for what is set for a cgroup, or done to it by its own quota."""
    silent = {
        metric.name.removeprefix("dioptase_cgroup_")
        for metric in CATALOGUE
        if metric.labels[: len(CGROUP_LABELS)] == CGROUP_LABELS
        and "below" not in metric.help
        and "own quota" not in metric.help
    }
    assert silent == {"cpu_weight", "cpu_idle", "cpuset_cpus"}

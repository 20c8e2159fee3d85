"""The document metrics.md matches the catalogue."""

from __future__ import annotations

from pathlib import Path

from api.metrics import AGENT_METRICS, CGROUP_LABELS
from tools.metrics_reference import metrics_reference

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_document_is_fresh() -> None:
    assert DOCUMENT.read_text() == metrics_reference(), "run: python -m tools.metrics_reference docs/metrics.md"


def test_every_metric_is_in_it_once() -> None:
    text = metrics_reference()
    assert [text.count(f"| `{metric.name}`<br>") for metric in AGENT_METRICS] == [1] * len(AGENT_METRICS)


def test_every_cgroup_metric_says_whether_it_includes_descendants() -> None:
    """Except settings of a cgroup, and throttling by its own quota."""
    silent = {
        metric.name.removeprefix("dioptase_cgroup_")
        for metric in AGENT_METRICS
        if metric.labels[: len(CGROUP_LABELS)] == CGROUP_LABELS
        and "descendants" not in metric.help
        and "own quota" not in metric.help
    }
    assert silent == {"cpu_weight", "cpu_idle", "cpuset_cpus"}

"""The text that a scraper gets: golden, clean by promtool, and the same numbers as the library's own writer gives."""

from __future__ import annotations

import gzip
import math
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as LibraryMetric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.registry import Collector

from api.metrics import AGENT_METRICS_BY_NAME
from api.pod import Container
from api.text import encodable
from exporters.prometheus.exposition import OPENMETRICS, TEXT, PrometheusExporter, negotiate_format, render_lines
from exporters.prometheus.families import MetricsState, metric_families
from exporters.prometheus.metric_family import MetricDistribution, MetricFamily, MetricPoint
from tests.builders.four_cpu_node import busy_cycle
from tests.builders.full_node import RICH_ABOUT, full_cycle

GOLDEN = Path(__file__).parents[2] / "golden" / "exposition.txt"
HOSTILE = ('quote"', "back\\slash", "new\nline", '{le="1"} 5 # EOF', "größe ☃", " \t", "a\\nb", "\x7f\x01", "=,}")
Parsed = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str, parse: Callable[[str], Iterator[LibraryMetric]] = parse_text) -> Parsed:
    actual: Parsed = {}
    for family in parse(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in actual
            actual[key] = sample.value
    return actual


def text_of(observed: MetricsState) -> str:
    return "".join(render_lines(metric_families(observed), openmetrics=False))


class Oracle(Collector):
    """The same families through the library's own types and writer."""

    def __init__(self, shown: list[MetricFamily]) -> None:
        self.shown = shown

    def collect(self) -> Iterator[LibraryMetric]:
        for family in self.shown:
            row = family.metric
            metric = LibraryMetric(
                row.name.removesuffix("_total") if row.kind == "counter" else row.name, row.help, row.kind
            )
            for point in family.points:
                metric.add_sample(row.name, dict(zip(row.labels, point.labels, strict=True)), point.value)
            for d in family.distributions:
                labels = dict(zip(row.labels, d.labels, strict=True))
                for bound, count in zip((*d.bounds_s, math.inf), d.cumulative, strict=True):
                    le = "+Inf" if bound == math.inf else str(bound)
                    metric.add_sample(f"{row.name}_bucket", labels | {"le": le}, count)
                metric.add_sample(f"{row.name}_count", labels, d.cumulative[-1])
                metric.add_sample(f"{row.name}_sum", labels, d.sum_s)
            yield metric


def test_golden(golden: Callable[[str, str], None]) -> None:
    golden("exposition.txt", text_of(MetricsState(version="1.2.3").after(full_cycle(2), RICH_ABOUT)))


@pytest.mark.prometheus
def test_promtool_finds_nothing_to_complain_about(promtool: str) -> None:
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=GOLDEN.read_bytes(), capture_output=True, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_numbers_come_back_from_the_golden_text() -> None:
    numbers = parsed(GOLDEN.read_text())
    web = {"cgroup": "/web", "namespace": "default", "pod": "web", "container": "web", "qos": "shared_cores"}
    wait = "dioptase_cgroup_runq_wait_seconds"
    assert numbers[f"{wait}_bucket", frozenset((web | {"le": "8e-06"}).items())] == 180
    assert numbers[f"{wait}_bucket", frozenset((web | {"le": "0.000128"}).items())] == 198
    assert numbers[f"{wait}_bucket", frozenset((web | {"le": "+Inf"}).items())] == 200
    assert numbers[f"{wait}_count", frozenset(web.items())] == 200
    assert numbers[f"{wait}_sum", frozenset(web.items())] == pytest.approx(0.036512)
    assert numbers["dioptase_cgroup_cpu_usage_seconds_total", frozenset(web.items())] == 3.0
    assert numbers["dioptase_indicator_latency_seconds_bucket", frozenset(
        {"namespace": "default", "pod": "web", "le": "0.05"}.items())] == 396  # fmt: skip


@pytest.mark.parametrize("hostile", HOSTILE)
def test_any_label_value_and_cgroup_name_survives_both_formats(hostile: str) -> None:
    finished = full_cycle(2)
    pods = tuple(msgspec.structs.replace(pod, name=hostile + pod.name) for pod in finished.snapshot.pods)
    web = msgspec.structs.replace(finished.snapshot.cgroups["/web"], path=f"/{hostile}")
    cgroups = {**finished.snapshot.cgroups, web.path: web}
    snapshot = msgspec.structs.replace(finished.snapshot, cgroups=cgroups, pods=pods)
    observed = MetricsState(version=hostile).after(msgspec.structs.replace(finished, snapshot=snapshot))

    registry = CollectorRegistry()
    registry.register(Oracle(list(metric_families(observed))))
    expected = parsed(generate_latest(registry).decode())
    assert parsed(text_of(observed)) == expected
    openmetrics = "".join(render_lines(metric_families(observed), openmetrics=True)) + "# EOF\n"
    assert parsed(openmetrics, parse_openmetrics) == expected
    unowned = {"cgroup": f"/{hostile}", "namespace": "", "pod": "", "container": "", "qos": ""}
    assert expected["dioptase_cgroup_threads", frozenset(unowned.items())] == 8


@given(path=st.text(st.characters(), max_size=30), name=st.text(st.characters(), max_size=30))
@settings(deadline=None, max_examples=150)
def test_any_text_in_a_name_comes_back_from_both_formats(path: str, name: str) -> None:
    finished = busy_cycle(2)
    web = msgspec.structs.replace(finished.snapshot.cgroups["/web"], path=f"/{path}")
    containers = (Container(name=name, cgroup=f"/{path}"),)
    pods = (msgspec.structs.replace(finished.snapshot.pods[0], name=name, containers=containers),)
    snapshot = msgspec.structs.replace(finished.snapshot, cgroups={f"/{path}": web}, pods=pods, indicators={})
    observed = MetricsState(version="1").after(msgspec.structs.replace(finished, snapshot=snapshot))
    labels = {"cgroup": encodable(f"/{path}"), "namespace": "default", "pod": encodable(name),
              "container": encodable(name), "qos": "shared_cores"}  # fmt: skip
    openmetrics = "".join(render_lines(metric_families(observed), openmetrics=True)) + "# EOF\n"
    for back in (parsed(text_of(observed)), parsed(openmetrics, parse_openmetrics)):
        assert back["dioptase_cgroup_threads", frozenset(labels.items())] == 8


def test_exemplars_are_in_openmetrics_alone_and_below_128_characters() -> None:
    observed = MetricsState(version="1").after(full_cycle(2), RICH_ABOUT)
    assert " # {" not in text_of(observed)
    openmetrics = "".join(render_lines(metric_families(observed), openmetrics=True)) + "# EOF\n"
    actual = {
        (sample.name, sample.labels.get("pod"), sample.labels.get("le")): sample.exemplar
        for family in parse_openmetrics(openmetrics)
        for sample in family.samples
        if sample.exemplar
    }
    worst = actual["dioptase_cgroup_runq_wait_seconds_bucket", "web", "0.016384"]
    assert (worst.value, float(worst.timestamp)) == (0.016384, 1_700_000_002.0)
    assert set(worst.labels) == {"trace_id", "span_id", "round"}
    assert sum(len(key) + len(value) for key, value in worst.labels.items()) < 128
    assert actual["dioptase_rounds_total", None, None].labels["round"] == "2"
    assert {name for name, _, _ in actual} == {
        "dioptase_cgroup_runq_wait_seconds_bucket", "dioptase_decisions_total", "dioptase_knob_repairs_total",
        "dioptase_rounds_total",
    }  # fmt: skip


def test_numbers_that_are_not_finite_are_spelled_as_prometheus_reads_them() -> None:
    row = AGENT_METRICS_BY_NAME["dioptase_pool_cpus"]
    values = {"nan": math.nan, "plus": math.inf, "minus": -math.inf, "tiny": 5e-324, "large": 2**63}
    family = MetricFamily(row, points=tuple(MetricPoint((), (name,), value) for name, value in values.items()))
    back = parsed("".join(render_lines(iter([family]), openmetrics=False)))
    for name, value in values.items():
        assert back["dioptase_pool_cpus", frozenset({("pool", name)})] == pytest.approx(value, nan_ok=True)


def test_a_histogram_without_labels_or_bounds_is_well_formed() -> None:
    row = msgspec.structs.replace(AGENT_METRICS_BY_NAME["dioptase_indicator_latency_seconds"], labels=())
    family = MetricFamily(row, distributions=(MetricDistribution((), (), (), (3,), 1.5),))
    back = parsed("".join(render_lines(iter([family]), openmetrics=True)) + "# EOF\n", parse_openmetrics)
    assert back[f"{row.name}_bucket", frozenset({("le", "+Inf")})] == 3
    assert back[f"{row.name}_count", frozenset()] == 3
    assert back[f"{row.name}_sum", frozenset()] == 1.5


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("text/html,application/xhtml+xml,*/*;q=0.8", TEXT),
        ("text/plain;version=0.0.4", TEXT),
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", OPENMETRICS),
        ("text/plain;q=0.5, Application/OpenMetrics-Text; version=0.0.1", OPENMETRICS),
        ("application/openmetrics-text;version=rubbish", OPENMETRICS),
        ("application/openmetrics-text;q=0", TEXT),
        ("application/openmetrics-text; q=0.000, */*", TEXT),
        ("application/openmetrics-text;q=0.4,text/plain;q=0.5", TEXT),
        ("application/openmetrics-text;q=0.4,text/plain;q=0.3,*/*;q=0.9", OPENMETRICS),
        ("application/openmetrics-text;q=0.1,*/*;q=0.5", TEXT),
        (
            "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0,*/*;q=0.2",
            OPENMETRICS,
        ),
        ("application/openmetrics-text;q=half,text/plain;q=nan", OPENMETRICS),
    ],
)
def test_the_scraper_chooses_the_format(accept: str, content_type: str) -> None:
    assert negotiate_format(accept) == content_type


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_a_scrape_has_the_cycle_and_this_process_and_is_rendered_once_a_cycle(accept: str) -> None:
    exposition = PrometheusExporter("1.2.3")
    exposition.publish(busy_cycle(2))
    packed, content_type = exposition.render(accept)
    assert exposition.render(accept)[0] is packed
    parse = parse_openmetrics if content_type == OPENMETRICS else parse_text
    numbers = parsed(gzip.decompress(packed).decode(), parse)
    assert numbers["dioptase_snapshot_timestamp_seconds", frozenset()] == 1_700_000_002
    assert numbers["process_resident_memory_bytes", frozenset()] > 2**20
    assert numbers["process_cpu_seconds_total", frozenset()] > 0

    exposition.publish(busy_cycle(3))
    fresh, _ = exposition.render(accept)
    numbers = parsed(gzip.decompress(fresh).decode(), parse)
    assert numbers["dioptase_snapshot_timestamp_seconds", frozenset()] == 1_700_000_003
    assert numbers["dioptase_rounds_total", frozenset({("trigger", "tick"), ("action", "grow")})] == 2

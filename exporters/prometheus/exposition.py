"""Renders the latest cycle as Prometheus text or OpenMetrics, by what the scraper accepts.
Only this module of the exporters imports prometheus_client, which reports this process (`process_*`). Our own
families are written here, because the library's writer costs 13 to 20 us per line, this one 1.1 us with compression.
Histograms are classic: neither text format supports native ones. Only OpenMetrics has exemplars, on counters and buckets.
"""

from __future__ import annotations

import contextlib
import math
import threading
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS_1_0
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from api.decision import Cycle
from api.metrics import CGROUP_LABELS, Metric
from api.units import NS_PER_S
from exporters.prometheus.families import AgentInfo, MetricsState, metric_families
from exporters.prometheus.late_series import LateSeries
from exporters.prometheus.metric_family import Exemplar, Labels, MetricDistribution, MetricFamily, MetricNumber

TEXT, OPENMETRICS = CONTENT_TYPE_PLAIN_0_0_4, OPENMETRICS_1_0
MAX_JOINED_PIECES = 64
"""Number of lines or histograms that are joined before compression: at most 300 kB of text in memory."""


class PrometheusExporter:
    """Sink of cycles, source of scrapes. Each format is rendered once per cycle, for any number of scrapers."""

    def __init__(self, version: str, about: Callable[[], AgentInfo] = AgentInfo) -> None:
        self._state = MetricsState(version=version)
        self._about = about
        self._process = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._process)
        self._rendering = threading.Lock()
        self._rendered: dict[str, tuple[MetricsState, bytes]] = {}
        self._late = LateSeries()

    @property
    def state(self) -> MetricsState:
        return self._state

    def publish(self, finished: Cycle) -> None:
        self._state = self._state.after(finished, self._about())

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return the body in gzip and the content type. A new cycle takes milliseconds of CPU: call it off the event loop."""
        content_type = negotiate_format(accept)
        with self._rendering:
            state, (rendered, packed) = self._state, self._rendered.get(content_type, (None, b""))
            if rendered is not state:
                packed = self._pack(state, openmetrics=content_type == OPENMETRICS)
                self._rendered[content_type] = (state, packed)
        return packed, content_type

    def _pack(self, state: MetricsState, *, openmetrics: bool) -> bytes:
        """Compress while writing: the text of a full node is several MiB, and its pieces take far more."""
        gzip = zlib.compressobj(1, wbits=zlib.MAX_WBITS | 16)
        text = render_lines(metric_families(state, self._late), openmetrics=openmetrics)
        packed = [
            gzip.compress("".join(pieces).encode())
            for pieces in iter(lambda: tuple(islice(text, MAX_JOINED_PIECES)), ())
        ]
        if openmetrics:
            process: bytes = generate_openmetrics(self._process)  # type: ignore[no-untyped-call]
        else:
            process = generate_latest(self._process)
        return b"".join((*packed, gzip.compress(process), gzip.flush()))


def negotiate_format(accept: str) -> str:
    """Return OpenMetrics 1.0 if the client accepts any version of it and does not prefer plain text, else plain text."""
    qualities: dict[str, float] = {}
    for offered in accept.lower().split(","):
        name, *parameters = (part.strip() for part in offered.split(";"))
        qualities[name] = max(qualities.get(name, 0.0), _quality(parameters))
    openmetrics = qualities.get("application/openmetrics-text", 0.0)
    text = next((qualities[name] for name in ("text/plain", "text/*", "*/*") if name in qualities), 0.0)
    return OPENMETRICS if openmetrics > 0 and openmetrics >= text else TEXT


def _quality(parameters: list[str]) -> float:
    """Return the quality value of a media type, 1.0 by default."""
    for parameter in parameters:
        if parameter.startswith("q="):
            with contextlib.suppress(ValueError):
                return float(parameter[2:])
    return 1.0


def render_lines(shown: Iterator[MetricFamily], *, openmetrics: bool) -> Iterator[str]:
    """Yield the text of the families in pieces of whole lines, without the closing line of OpenMetrics."""
    owners: dict[Labels, str] = {}
    for family in shown:
        metric = family.metric
        texts = _LabelTexts(metric, owners)
        yield from _header(metric, openmetrics)
        name = metric.name
        for owner, own, value, exemplar in family.points:
            labels = texts.of(owner, own)
            closing = _exemplar(exemplar) if openmetrics and exemplar and metric.kind == "counter" else ""
            braced = f"{{{labels}}}" if labels else ""
            yield f"{name}{braced} {_number_text(value)}{closing}\n"
        for distribution in family.distributions:
            yield _histogram(name, texts.of(distribution.owner, distribution.own), distribution, openmetrics)


class _LabelTexts:
    """Labels of one metric as text, each set of values formatted once: owners per scrape, own labels per metric."""

    def __init__(self, metric: Metric, owners: dict[Labels, str]) -> None:
        self._shared = metric.labels[: len(CGROUP_LABELS)] == CGROUP_LABELS
        self._names = metric.labels[len(CGROUP_LABELS) :] if self._shared else metric.labels
        self._owners = owners
        self._owns: dict[Labels, str] = {}

    def of(self, owner: Labels, own: Labels) -> str:
        text = self._owns.get(own)
        if text is None:
            text = _label_text(self._names, own)
            if self._shared and own:
                text = f",{text}"
            self._owns[own] = text
        if not self._shared:
            return text
        prefix = self._owners.get(owner)
        if prefix is None:
            prefix = self._owners[owner] = _label_text(CGROUP_LABELS, owner)
        return prefix + text


def _header(metric: Metric, openmetrics: bool) -> Iterator[str]:
    name = metric.name.removesuffix("_total") if openmetrics and metric.kind == "counter" else metric.name
    text = metric.help.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {name} {_escape_label(metric.help) if openmetrics else text}\n# TYPE {name} {metric.kind}\n"
    if openmetrics and metric.unit:
        yield f"# UNIT {name} {metric.unit}\n"


def _histogram(name: str, labels: str, distribution: MetricDistribution, openmetrics: bool) -> str:
    bounds = _le_labels(distribution.bounds_s)
    bucket = f"{name}_bucket{{{labels},le=" if labels else f"{name}_bucket{{le="
    written = [f"{bucket}{bound}{count}" for bound, count in zip(bounds, distribution.cumulative, strict=True)]
    if openmetrics:
        for place, exemplar in distribution.exemplars.items():
            written[place] += _exemplar(exemplar)
    closing = f"{{{labels}}}" if labels else ""
    written.append(f"{name}_count{closing} {distribution.cumulative[-1]}")
    written.append(f"{name}_sum{closing} {_number_text(distribution.sum_s)}\n")
    return "\n".join(written)


def _exemplar(exemplar: Exemplar) -> str:
    labels = ",".join(f'{name}="{_escape_label(value)}"' for name, value in exemplar.labels)
    return f" # {{{labels}}} {_number_text(exemplar.value)} {exemplar.at_ns / NS_PER_S:.3f}"


@lru_cache(maxsize=64)
def _le_labels(bounds_s: tuple[float, ...]) -> tuple[str, ...]:
    return (*(f'"{float(bound)!r}"}} ' for bound in bounds_s), '"+Inf"} ')


def _label_text(names: tuple[str, ...], values: Labels) -> str:
    return ",".join(f'{name}="{_escape_label(value)}"' for name, value in zip(names, values, strict=True))


def _escape_label(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number_text(value: MetricNumber) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"

"""Prometheus and OpenMetrics exposition of the controller; one of the importers of prometheus_client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from api.metrics import CONTROLLER_METRICS
from api.metrics import Metric as CatalogueMetric
from controller.reconcile import DURATION_BOUNDS_S, LabelValues, MetricValues
from kube.client import KubeClient
from kube.informer import Informer
from kube.work_queue import WorkQueue


class ControllerExposition(Collector):
    """Collector of `/metrics`: the metric values, and counts of the client, the informers and the queues."""

    def __init__(self, metrics: MetricValues, client: KubeClient, refresh: Callable[[], None] | None = None) -> None:
        """`refresh` sets gauges before they are collected."""
        self._metrics, self._client, self._refresh_gauges = metrics, client, refresh
        self._informers: Iterable[Informer[Any]] = ()
        self._permanent: Iterable[Informer[Any]] = ()
        self._queues: Mapping[str, WorkQueue[Any]] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def watch(self, informers: Iterable[Informer[Any]], queues: Mapping[str, WorkQueue[Any]]) -> None:
        """Export these informers and queues from now on; they change with leadership."""
        self._informers, self._queues = informers, queues

    def watch_always(self, informers: Iterable[Informer[Any]]) -> None:
        """Export these informers too, whether this replica leads or not."""
        self._permanent = informers

    def render(self, accept: str, now_s: float) -> tuple[bytes, str]:
        """Return body and content type; `now_s` is monotonic. Call it on the event loop, where the values change."""
        self._refresh(now_s)
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families; called by prometheus_client."""
        for row in CONTROLLER_METRICS:
            values = self._metrics.values(row.name)
            if not values:
                continue
            if row.kind == "histogram":
                yield self._histogram(row)
                continue
            # Both classes accept the full name, or the name without _total as in OpenMetrics.
            kind = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
            family = kind(row.name, row.help, labels=row.labels)
            for labels, value in sorted(values.items()):
                family.add_metric(labels, value)
            yield family

    def _histogram(self, row: CatalogueMetric) -> HistogramMetricFamily:
        family, sums = HistogramMetricFamily(row.name, row.help, labels=row.labels), self._metrics.values(row.name)
        bounds = [*map(str, DURATION_BOUNDS_S), "+Inf"]
        for labels, counts in sorted(self._metrics.bucket_counts(row.name).items()):
            family.add_metric(labels, list(zip(bounds, accumulate(counts), strict=True)), sums[labels])
        return family

    def _refresh(self, now_s: float) -> None:
        if self._refresh_gauges is not None:
            self._refresh_gauges()
        values: dict[str, list[tuple[LabelValues, float]]] = {name: [] for name in _INFORMER_METRICS}
        # Several informers may watch one resource with different selectors; their values are added.
        informers_by_gvr: dict[str, list[Informer[Any]]] = {}
        for informer in (*self._informers, *self._permanent):
            informers_by_gvr.setdefault(informer.resource.gvr, []).append(informer)
        for gvr, informers in informers_by_gvr.items():
            ages = [age for informer in informers if (age := informer.age_s(now_s)) is not None]
            objects, unreadable, relists, max_age = _INFORMER_METRICS
            values[objects].append(((gvr,), sum(len(informer.store) for informer in informers)))
            values[unreadable].append(((gvr,), sum(len(informer.problems) for informer in informers)))
            values[relists].append(((gvr,), sum(informer.relists for informer in informers)))
            values[max_age].extend([((gvr,), max(ages))] if ages else [])
        for name, samples in values.items():
            self._metrics.set(name, samples)
        self._metrics.set(
            "dioptase_controller_queue_length", [((name,), len(queue)) for name, queue in self._queues.items()]
        )
        self._metrics.set("dioptase_controller_api_requests_total", self._client.requests.items())


_INFORMER_METRICS = (
    "dioptase_controller_watched_objects",
    "dioptase_controller_unreadable_objects",
    "dioptase_controller_relists_total",
    "dioptase_controller_watch_age_seconds",
)

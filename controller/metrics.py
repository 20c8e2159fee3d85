"""Prometheus and OpenMetrics exposition of the controller; one of the importers of prometheus_client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from api.metrics import CONTROLLER_METRICS
from controller.reconcile import LabelValues, MetricValues
from kube.client import KubeClient
from kube.informer import Informer
from kube.work_queue import WorkQueue


class ControllerExposition(Collector):
    """What `/metrics` shows: the tally, and what client, informers and queues know of themselves."""

    def __init__(self, tally: MetricValues, client: KubeClient) -> None:
        self._tally, self._client = tally, client
        self._informers: Iterable[Informer[Any]] = ()
        self._queues: Mapping[str, WorkQueue[Any]] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def watch(self, informers: Iterable[Informer[Any]], queues: Mapping[str, WorkQueue[Any]]) -> None:
        """Show these from now on: they come and go with leading."""
        self._informers, self._queues = informers, queues

    def render(self, accept: str, now_s: float) -> tuple[bytes, str]:
        """Body and content type; `now_s` by the monotonic clock. To be called in the loop, where the numbers change."""
        self._refresh(now_s)
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """For the library."""
        for row in CONTROLLER_METRICS:
            values = self._tally.values(row.name)
            if not values:
                continue
            # Both kinds take the complete name, or the stem that OpenMetrics has.
            kind = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
            family = kind(row.name, row.help, labels=row.labels)
            for labels, value in sorted(values.items()):
                family.add_metric(labels, value)
            yield family

    def _refresh(self, now_s: float) -> None:
        seen: dict[str, list[tuple[LabelValues, float]]] = {name: [] for name in _INFORMER_METRICS}
        # Several may watch one resource, as those of several agents' pods do: together they are one row.
        together: dict[str, list[Informer[Any]]] = {}
        for informer in self._informers:
            together.setdefault(informer.resource.gvr, []).append(informer)
        for gvr, ones in together.items():
            ages = [age for one in ones if (age := one.age_s(now_s)) is not None]
            objects, unreadable, relists, oldest = _INFORMER_METRICS
            seen[objects].append(((gvr,), sum(len(one.store) for one in ones)))
            seen[unreadable].append(((gvr,), sum(len(one.problems) for one in ones)))
            seen[relists].append(((gvr,), sum(one.relists for one in ones)))
            seen[oldest].extend([((gvr,), max(ages))] if ages else [])
        for name, values in seen.items():
            self._tally.set(name, values)
        self._tally.set(
            "dioptase_controller_queue_length", [((name,), len(queue)) for name, queue in self._queues.items()]
        )
        self._tally.set("dioptase_controller_api_requests_total", self._client.requests.items())


_INFORMER_METRICS = (
    "dioptase_controller_watched_objects",
    "dioptase_controller_unreadable_objects",
    "dioptase_controller_relists_total",
    "dioptase_controller_watch_age_seconds",
)

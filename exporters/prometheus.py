"""The newest round as Prometheus text or OpenMetrics, by what the scraper accepts; the only door to prometheus_client.

The library negotiates the format and reports this process (`process_*`). Our own families are written here: the
library's writer escapes names and sorts labels anew on every line, which costs 110 to 170 ms of CPU for 200 cgroups
(8,600 lines), where building the labels once per cgroup takes a tenth of it. Tests hold both writers side by side.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable, Iterator
from itertools import islice

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS_1_0
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from api.catalogue import WAIT_BOUNDS_S, Metric
from api.decisions import Round
from exporters.families import About, Distribution, Family, Number, Observed, families

TEXT, OPENMETRICS = CONTENT_TYPE_PLAIN_0_0_4, OPENMETRICS_1_0
LINES_AT_ONCE = 256


class Exposition:
    """Sink of rounds, source of scrapes. Each format is rendered once a round, however many scrapers ask."""

    def __init__(self, version: str, about: Callable[[], About] = About) -> None:
        self._observed = Observed(version=version)
        self._about = about
        self._process = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._process)
        self._rendering = threading.Lock()
        self._rendered: dict[str, tuple[Observed, bytes]] = {}

    @property
    def observed(self) -> Observed:
        return self._observed

    def publish(self, finished: Round) -> None:
        self._observed = self._observed.after(finished, self._about())

    def render(self, accept: str) -> tuple[bytes, str]:
        """Body in gzip and content type. Takes milliseconds of CPU when the round is new: call it off the event loop."""
        content_type = negotiate(accept)
        with self._rendering:
            observed, (seen, packed) = self._observed, self._rendered.get(content_type, (None, b""))
            if seen is not observed:
                packed = self._pack(observed, openmetrics=content_type == OPENMETRICS)
                self._rendered[content_type] = (observed, packed)
        return packed, content_type

    def _pack(self, observed: Observed, *, openmetrics: bool) -> bytes:
        """Compressed as it is written: the text of a full node is a MiB, and ten while it is in pieces; this is 40 kB."""
        gzip = zlib.compressobj(1, wbits=zlib.MAX_WBITS | 16)
        text = lines(families(observed), openmetrics=openmetrics)
        packed = [
            gzip.compress("".join(piece).encode()) for piece in iter(lambda: tuple(islice(text, LINES_AT_ONCE)), ())
        ]
        if openmetrics:
            process: bytes = generate_openmetrics(self._process)  # type: ignore[no-untyped-call]
        else:
            process = generate_latest(self._process)
        return b"".join((*packed, gzip.compress(process), gzip.flush()))


def negotiate(accept: str) -> str:
    """OpenMetrics 1.0 for whoever names it in any version, the classic text for everyone else."""
    names = {part.partition(";")[0].strip().lower() for part in accept.split(",")}
    return OPENMETRICS if "application/openmetrics-text" in names else TEXT


def lines(shown: Iterator[Family], *, openmetrics: bool) -> Iterator[str]:
    """The text of these families, line by line, without OpenMetrics' closing line."""
    for family in shown:
        metric = family.metric
        yield from _header(metric, openmetrics)
        for point in family.points:
            labels = _labels(metric.labels, point.labels)
            yield (
                f"{metric.name}{{{labels}}} {_number(point.value)}\n"
                if labels
                else f"{metric.name} {_number(point.value)}\n"
            )
        for distribution in family.distributions:
            yield from _histogram(metric, distribution)


def _header(metric: Metric, openmetrics: bool) -> Iterator[str]:
    name = metric.name.removesuffix("_total") if openmetrics and metric.kind == "counter" else metric.name
    text = metric.help.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {name} {_escape(metric.help) if openmetrics else text}\n# TYPE {name} {metric.kind}\n"
    if openmetrics and metric.unit:
        yield f"# UNIT {name} {metric.unit}\n"


def _histogram(metric: Metric, distribution: Distribution) -> Iterator[str]:
    labels = _labels(metric.labels, distribution.labels)
    bucket = f"{metric.name}_bucket{{{labels},le=" if labels else f"{metric.name}_bucket{{le="
    bounds = WAIT_LE if distribution.bounds_s is WAIT_BOUNDS_S else _le(distribution.bounds_s)
    for bound, count in zip(bounds, distribution.cumulative, strict=True):
        yield f"{bucket}{bound}}} {count}\n"
    closing = f"{{{labels}}}" if labels else ""
    yield f"{metric.name}_count{closing} {distribution.cumulative[-1]}\n"
    yield f"{metric.name}_sum{closing} {_number(distribution.sum_s)}\n"


def _le(bounds_s: tuple[float, ...]) -> tuple[str, ...]:
    return (*(f'"{float(bound)!r}"' for bound in bounds_s), '"+Inf"')


def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    return ",".join(f'{name}="{_escape(value)}"' for name, value in zip(names, values, strict=True))


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: Number) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


WAIT_LE = _le(WAIT_BOUNDS_S)

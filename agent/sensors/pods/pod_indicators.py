"""Scrapes the latency histogram that a pod publishes on its own Prometheus endpoint. Runs outside of the cycles: a slow
or hostile endpoint costs only its own pod's indicator. Answers are parsed in a thread of their own and are limited in
time and size; redirects and compression are not followed."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from api.pod import Pod
from api.snapshot import RequestLatency
from api.text import printable, quote

log = logging.getLogger(__name__)
SCRAPE_KEY, PORT_KEY, PATH_KEY = "prometheus.io/scrape", "prometheus.io/port", "prometheus.io/path"
LATENCY_METRIC_KEY = "dioptase.io/latency-metric"
INTERVAL_S, TIMEOUT_S, MAX_BYTES = 0.5, 0.5, 1 << 20
"""Two scrapes a second, so that every cycle has an answer that is newer than the previous cycle's."""
MAX_HISTOGRAM_CHARS = 128 << 10
"""Limit of the lines of the histogram: some 1,500 ordinary ones, 20 ms to parse. The other lines cost next to nothing."""
MAX_COUNT = 1 << 63
MAX_TARGET_CHARS = 1024
"""Characters of the path and of the metric name in a pod's annotations, which every scrape sends or looks for."""
# Compression is neither requested nor decoded: a small answer must not become a large one.
_HEADERS = {"Accept": "text/plain;version=0.0.4", "Accept-Encoding": "identity"}


class InvalidIndicator(ValueError):
    """The endpoint's answer lacks the histogram of the pod's annotation."""


def scrape_target(pod: Pod) -> tuple[str, str] | None:
    """Return URL and metric of a pod with the annotations, else None. The host is always the pod's own address.

    Raises InvalidIndicator if the annotations are invalid or the address is unknown.
    """
    metric, port = pod.annotations.get(LATENCY_METRIC_KEY), pod.annotations.get(PORT_KEY, "")
    if pod.annotations.get(SCRAPE_KEY) != "true" or metric is None:
        return None
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise InvalidIndicator(f"annotation {PORT_KEY}: {quote(port)} is not a port; write a number from 1 to 65535")
    path = pod.annotations.get(PATH_KEY, "/metrics")
    for key, text in ((PATH_KEY, path), (LATENCY_METRIC_KEY, metric)):
        if len(text) > MAX_TARGET_CHARS:
            raise InvalidIndicator(
                f"annotation {key}: has {len(text)} characters, more than {MAX_TARGET_CHARS}; shorten it"
            )
    if not path.startswith("/"):
        raise InvalidIndicator(f"annotation {PATH_KEY}: {quote(path)} does not start with a slash; begin it with one")
    if pod.address is None:
        raise InvalidIndicator(
            "its IP address is unknown; wait until the kubelet reports it, soon after the pod starts"
        )
    host = f"[{pod.address}]" if ":" in pod.address else pod.address
    return f"http://{host}:{port}{path}", metric


def parse_histogram(text: str, metric: str, sampled_at_ns: int) -> RequestLatency:
    """Return the sum of all series of the classic histogram with that name. Raises InvalidIndicator without a valid
    one."""
    series: dict[frozenset[tuple[str, str]], dict[float, float]] = {}
    total_s = 0.0
    for name, labels, value in _samples(text, metric):
        if name == f"{metric}_bucket":
            bound = _bound(labels.pop("le", ""))
            series.setdefault(frozenset(labels.items()), {})[bound] = value
        elif name == f"{metric}_sum":
            total_s += value
    bounds = {tuple(sorted(buckets)) for buckets in series.values()}
    if len(bounds) > 1:
        raise InvalidIndicator(
            f"the series of {metric} have different buckets and cannot be added up; give all the same"
        )
    shared = bounds.pop() if bounds else ()
    counts = [sum(buckets[bound] for buckets in series.values()) for bound in shared]
    finite = all(0 <= count < MAX_COUNT for count in counts) and math.isfinite(total_s)
    if len(shared) < 2 or shared[-1] != math.inf or not finite or any(a > b for a, b in pairwise(counts)):
        raise InvalidIndicator(
            f"no histogram {metric} with cumulative buckets up to +Inf; see annotation {LATENCY_METRIC_KEY}"
        )
    return RequestLatency(
        bounds_s=shared[:-1],
        buckets=tuple(int(count) for count in counts),
        sum_s=total_s,
        sampled_at_ns=sampled_at_ns,
    )


def _samples(text: str, metric: str) -> list[tuple[str, dict[str, str], float]]:
    prefixes = (metric, f"# TYPE {metric} ")
    lines = [line for line in text.split("\n") if line.startswith(prefixes)]
    length = sum(map(len, lines))
    if length > MAX_HISTOGRAM_CHARS:
        remedy = "publish fewer or shorter labels"
        raise InvalidIndicator(f"{metric} has {length} characters, more than {MAX_HISTOGRAM_CHARS}; {remedy}")
    try:
        return [
            (sample.name, dict(sample.labels), sample.value)
            for family in text_string_to_metric_families("\n".join(lines) + "\n")
            if family.name == metric
            for sample in family.samples
        ]
    except Exception as error:  # noqa: BLE001 - the parser raises whatever its string handling meets
        raise InvalidIndicator(f"not a Prometheus exposition: {printable(str(error), 200)}") from None


def _bound(text: str) -> float:
    try:
        bound = float(text)
    except ValueError:
        bound = math.nan
    if math.isnan(bound):
        raise InvalidIndicator(f"bucket bound le={quote(text, 40)} is not a number")
    return bound


class PodIndicatorScraper:
    """Scrapes the pods' endpoints in the background; `latest` returns the last answers."""

    def __init__(self) -> None:
        self._latest: dict[str, RequestLatency] = {}
        self._errors: dict[str, str] = {}
        self._parser = ThreadPoolExecutor(1, "indicators")

    def latest(self) -> Mapping[str, RequestLatency]:
        """Return the last answer of each scraped pod, by pod key."""
        return dict(self._latest)

    def errors(self) -> Mapping[str, str]:
        """Return why a pod's last answer is old or missing, by pod key."""
        return dict(self._errors)

    async def run(self, pods_of: Callable[[], tuple[Pod, ...]]) -> None:
        """Scrape every pod every INTERVAL_S until cancelled."""
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=_HEADERS,
            auto_decompress=False,
        ) as session:
            while True:
                pods = pods_of()
                await asyncio.gather(*(self._scrape(session, pod) for pod in pods), asyncio.sleep(INTERVAL_S))
                self._forget_others({pod.key for pod in pods if LATENCY_METRIC_KEY in pod.annotations})

    def _forget_others(self, keys: set[str]) -> None:
        self._latest = {key: value for key, value in self._latest.items() if key in keys}
        self._errors = {key: value for key, value in self._errors.items() if key in keys}

    async def _scrape(self, session: aiohttp.ClientSession, pod: Pod) -> None:
        try:
            target = scrape_target(pod)
            if target is None:
                return
            url, metric = target
            text = await _fetch(session, url)
            parsing = partial(parse_histogram, text, metric, time.monotonic_ns())
            self._latest[pod.key] = await asyncio.get_running_loop().run_in_executor(self._parser, parsing)
            self._errors.pop(pod.key, None)
        except TimeoutError:
            self._errors[pod.key] = f"no answer within {TIMEOUT_S} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._errors[pod.key] = str(error) or type(error).__name__
        except Exception as error:
            # One pod's answer must not end the polling of all others.
            self._errors[pod.key] = f"{type(error).__name__}: {error}"
            log.exception("scraping the latency of %s failed", pod.key)


async def _fetch(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(url, allow_redirects=False) as response:
        if response.status != 200:
            raise InvalidIndicator(f"{url} answered with status {response.status}")
        if encoding := response.headers.get("Content-Encoding", "identity").strip().lower().replace("identity", ""):
            raise InvalidIndicator(f"{url} answered in encoding {quote(encoding, 40)}, which was not requested")
        body = bytearray()
        while len(body) <= MAX_BYTES and (piece := await response.content.read(MAX_BYTES + 1 - len(body))):
            body += piece
    if len(body) > MAX_BYTES:
        raise InvalidIndicator(f"{url} answered with more than {MAX_BYTES} bytes")
    return body.decode(errors="replace")

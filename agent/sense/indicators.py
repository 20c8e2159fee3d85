"""What pods say of themselves: the latency histogram that a pod publishes on its own Prometheus endpoint.

Asked beside the rounds and never within them: a slow or hostile endpoint costs its pod's numbers and
nothing else. A round sees the last answer and when it was given.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

import aiohttp
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from api.pods import Pod
from api.samples import Indicator

SCRAPE, PORT, PATH = "prometheus.io/scrape", "prometheus.io/port", "prometheus.io/path"
LATENCY_METRIC = "dioptase.io/latency-metric"
INTERVAL_S, TIMEOUT_S, MAX_BYTES = 0.5, 0.5, 1 << 20
"""Asked twice a second, so that every round has an answer that is newer than the previous round's."""


class Garbage(ValueError):
    """The endpoint answered, but not with the histogram that the pod's annotation names."""


def target(pod: Pod) -> tuple[str, str] | None:
    """URL and metric of a pod that wants to be asked, or None. Raises Garbage where its annotations contradict."""
    metric, port = pod.annotations.get(LATENCY_METRIC), pod.annotations.get(PORT, "")
    if pod.annotations.get(SCRAPE) != "true" or metric is None:
        return None
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise Garbage(f"annotation {PORT}: {port!r} is not a port; write a number from 1 to 65535")
    path = pod.annotations.get(PATH, "/metrics")
    if not path.startswith("/"):
        raise Garbage(f"annotation {PATH}: {path!r} does not start with a slash")
    return f"http://127.0.0.1:{port}{path}", metric


def parse(text: str, metric: str, sampled_at_ns: int) -> Indicator:
    """The classic histogram of that name, its series added up. Raises Garbage where there is none that holds."""
    try:
        families: Iterable[Metric] = [f for f in text_string_to_metric_families(text) if f.name == metric]
    except Exception as error:  # noqa: BLE001 - the parser raises whatever its string handling meets
        raise Garbage(f"not a Prometheus exposition: {error}") from None
    buckets: dict[float, float] = {}
    total = 0.0
    for sample in (sample for family in families for sample in family.samples):
        if sample.name == f"{metric}_bucket":
            try:
                bound = float(sample.labels.get("le", "nan"))
            except ValueError:
                bound = math.nan
            buckets[bound] = buckets.get(bound, 0.0) + sample.value
        elif sample.name == f"{metric}_sum":
            total += sample.value
    bounds = sorted(bound for bound in buckets if not math.isnan(bound))
    counts = [buckets[bound] for bound in bounds]
    whole = all(math.isfinite(count) and count >= 0 for count in counts) and math.isfinite(total)
    if len(bounds) < 2 or bounds[-1] != math.inf or not whole or any(a > b for a, b in pairwise(counts)):
        raise Garbage(f"no histogram {metric} with cumulative buckets up to +Inf")
    return Indicator(
        bounds_s=tuple(bounds[:-1]),
        buckets=tuple(int(count) for count in counts),
        sum_s=total,
        sampled_at_ns=sampled_at_ns,
    )


class Indicators:
    """Polls the pods' endpoints in the background; `latest` is what they answered last."""

    def __init__(self) -> None:
        self._latest: dict[str, Indicator] = {}
        self._errors: dict[str, str] = {}

    def latest(self) -> Mapping[str, Indicator]:
        """The last answer of each pod that is still asked, by pod key."""
        return dict(self._latest)

    def errors(self) -> Mapping[str, str]:
        """Why a pod's last answer is old or missing, by pod key."""
        return dict(self._errors)

    async def run(self, pods_of: Callable[[], tuple[Pod, ...]]) -> None:
        """Ask every pod every INTERVAL_S until cancelled."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as session:
            while True:
                pods = pods_of()
                await asyncio.gather(*(self._ask(session, pod) for pod in pods), asyncio.sleep(INTERVAL_S))
                present = {pod.key for pod in pods}
                self._latest = {key: value for key, value in self._latest.items() if key in present}
                self._errors = {key: value for key, value in self._errors.items() if key in present}

    async def _ask(self, session: aiohttp.ClientSession, pod: Pod) -> None:
        try:
            wanted = target(pod)
            if wanted is None:
                return
            url, metric = wanted
            async with session.get(url, allow_redirects=False) as response:
                body = await response.content.read(MAX_BYTES + 1)
                # read() may return early with what has arrived: go on until the end or the bound.
                while len(body) <= MAX_BYTES and not response.content.at_eof():
                    body += await response.content.read(MAX_BYTES + 1 - len(body))
            if response.status != 200:
                raise Garbage(f"{url} answered with status {response.status}")
            if len(body) > MAX_BYTES:
                raise Garbage(f"{url} answered with more than {MAX_BYTES} bytes")
            text = body.decode(errors="replace")
            self._latest[pod.key] = await asyncio.to_thread(parse, text, metric, time.monotonic_ns())
            self._errors.pop(pod.key, None)
        except (aiohttp.ClientError, OSError, TimeoutError, Garbage) as error:
            self._errors[pod.key] = str(error) or type(error).__name__

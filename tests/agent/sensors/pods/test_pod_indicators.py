"""Pods' own latency: what is read from a real endpoint, and what hostile ones cannot do."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from agent.sensors.pods.pod_indicators import InvalidIndicator, PodIndicatorScraper, parse_histogram, scrape_target
from api.pod import Pod
from api.qos import QoSLevel

GOOD = """# TYPE lat_seconds histogram
lat_seconds_bucket{path="/a",le="0.1"} 3
lat_seconds_bucket{path="/a",le="+Inf"} 4
lat_seconds_sum{path="/a"} 0.9
lat_seconds_count{path="/a"} 4
lat_seconds_bucket{path="/b",le="0.1"} 10
lat_seconds_bucket{path="/b",le="+Inf"} 10
lat_seconds_sum{path="/b"} 0.5
lat_seconds_count{path="/b"} 10
"""


def pod(port: int | str, **extra: str) -> Pod:
    annotations = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(port),
        "dioptase.io/latency-metric": "lat_seconds",
        **{key.replace("_", "/", 1): value for key, value in extra.items()},
    }
    return Pod(
        uid="u",
        namespace="n",
        name="web",
        qos=QoSLevel.SHARED,
        containers=(),
        annotations=annotations,
        address="127.0.0.1",
    )


def test_series_of_one_histogram_are_added_up() -> None:
    indicator = parse_histogram(GOOD, "lat_seconds", 7)
    assert indicator.bounds_s == (0.1,)
    assert indicator.buckets == (13, 14)
    assert indicator.sum_s == pytest.approx(1.4)
    assert indicator.sampled_at_ns == 7


@pytest.mark.parametrize(
    "text",
    [
        "",
        "lat_seconds 3\n",
        GOOD.replace("+Inf", "5"),
        GOOD.replace('le="+Inf"} 4', 'le="+Inf"} NaN'),
        GOOD.replace('le="0.1"} 3', 'le="0.1"} 300'),
        GOOD.replace('le="0.1"', 'le="soon"').replace("+Inf", "later"),
        GOOD.replace('path="/b",le="0.1"', 'path="/b",le="0.2"'),
        GOOD.replace('le="+Inf"} 4', 'le="+Inf"} 1e300'),
        GOOD.replace("0.9", "NaN"),
        GOOD.replace("histogram", "counter"),
        GOOD + "".join(f'lat_seconds_bucket{{path="/{i}",le="0.1"}} 1\n' for i in range(2000)),
        "lat_seconds_bucket{le=",
    ],
)
def test_what_is_no_histogram_is_refused(text: str) -> None:
    with pytest.raises(InvalidIndicator):
        parse_histogram(text, "lat_seconds", 0)


def test_a_histogram_with_absurdly_many_labels_is_refused_before_it_is_parsed() -> None:
    labels = ",".join(f'l{number}="x"' for number in range(50))
    text = "".join(f'lat_seconds_bucket{{{labels},le="{bound}"}} 1\n' for bound in range(1900))
    with pytest.raises(InvalidIndicator, match="characters, more than 131072; publish fewer or shorter labels"):
        parse_histogram(text, "lat_seconds", 0)


@given(st.text(max_size=200))
def test_any_text_is_an_indicator_or_garbage(text: str) -> None:
    with pytest.raises(InvalidIndicator):
        parse_histogram(text, "lat_seconds", 0)


@pytest.mark.parametrize("port", ["", "0", "65536", "http", "-1", "9" * 5000, "\u0663"])
def test_a_port_that_is_none_names_the_annotation(port: str) -> None:
    with pytest.raises(InvalidIndicator, match=r"prometheus\.io/port"):
        scrape_target(pod(port))


@pytest.mark.parametrize("key", ["prometheus.io_path", "dioptase.io_latency-metric"])
def test_a_target_that_is_too_long_names_the_annotation(key: str) -> None:
    with pytest.raises(InvalidIndicator) as refused:
        scrape_target(pod(9000, **{key: "/" + "x" * 1024}))
    assert str(refused.value) == f"annotation {key.replace('_', '/')}: has 1025 characters, more than 1024; shorten it"


@pytest.mark.parametrize("port", ["8080", "metrics", ""])
def test_annotations_that_are_meant_for_prometheus_alone_are_none_of_ours(port: str) -> None:
    annotations = {"prometheus.io/scrape": "true", "prometheus.io/port": port}
    requests = Pod(uid="u", namespace="n", name="x", qos=QoSLevel.SHARED, containers=(), annotations=annotations)
    assert scrape_target(requests) is None


def test_a_pod_without_annotations_is_not_scraped() -> None:
    assert scrape_target(Pod(uid="u", namespace="n", name="x", qos=QoSLevel.SHARED, containers=())) is None


@pytest.mark.parametrize(
    ("address", "url"),
    [("10.88.0.7", "http://10.88.0.7:8080/stats"), ("fd00::7", "http://[fd00::7]:8080/stats")],
)
def test_a_pod_is_scraped_at_its_own_address(address: str, url: str) -> None:
    requests = msgspec.structs.replace(pod(8080, **{"prometheus.io_path": "/stats"}), address=address)
    assert scrape_target(requests) == (url, "lat_seconds")


async def test_a_pod_with_its_own_network_is_never_scraped_on_loopback() -> None:
    """Its annotations name any port and path: that would be a way to every service that listens to the node alone."""
    requests = []

    async def secret(request: web.Request) -> web.Response:
        requests.append(request.path)
        return web.Response(text=GOOD)

    async with endpoint(secret) as port:
        elsewhere = await ask(port, lambda i: bool(i.errors()), "127.0.0.2")
        unknown = await ask(port, lambda i: bool(i.errors()), None)
    assert (requests, elsewhere.latest(), unknown.latest()) == ([], {}, {})
    assert "its IP address is unknown" in unknown.errors()["n/web"]


@asynccontextmanager
async def endpoint(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_get("/{tail:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def ask(
    port: int, until: Callable[[PodIndicatorScraper], bool], address: str | None = "127.0.0.1"
) -> PodIndicatorScraper:
    indicators = PodIndicatorScraper()
    requests = msgspec.structs.replace(pod(port), address=address)
    task = asyncio.create_task(indicators.run(lambda: (requests,)))
    try:
        async with asyncio.timeout(10):
            while not until(indicators):
                await asyncio.sleep(0.02)
    finally:
        task.cancel()
    return indicators


async def test_a_live_endpoint_is_read() -> None:
    async def good(_request: web.Request) -> web.Response:
        return web.Response(text=GOOD)

    async with endpoint(good) as port:
        indicators = await ask(port, lambda i: bool(i.latest()))
    assert indicators.latest()["n/web"].buckets == (13, 14)
    assert indicators.errors() == {}


async def test_it_waits_for_no_scrape_of_the_agent() -> None:
    """Which are rendered in the loop's own threads, and anybody may ask for any number of them."""

    async def good(_request: web.Request) -> web.Response:
        return web.Response(text=GOOD)

    release = threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    scrape = asyncio.create_task(asyncio.to_thread(release.wait, 20))
    try:
        async with endpoint(good) as port:
            assert (await ask(port, lambda i: bool(i.latest()))).errors() == {}
    finally:
        release.set()
        await scrape


async def test_huge_slow_redirecting_and_failing_endpoints_are_errors_of_their_pod() -> None:
    async def huge(_request: web.Request) -> web.Response:
        return web.Response(text="x" * (2 << 20))

    async def slow(_request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    async def elsewhere(_request: web.Request) -> web.Response:
        raise web.HTTPFound("http://127.0.0.1:1/")

    async def broken(_request: web.Request) -> web.Response:
        return web.Response(body=b"\xff\x00lat_seconds")

    async def bomb(_request: web.Request) -> web.Response:
        """1 MiB of zeros in a kilobyte; a larger one would only slow this test down."""
        return web.Response(body=gzip.compress(bytes(1 << 20)), headers={"Content-Encoding": "gzip"})

    async def cut(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(GOOD.encode())
        assert request.transport is not None
        request.transport.close()
        return response

    observed = {}
    for name, handler in (
        ("huge", huge), ("slow", slow), ("elsewhere", elsewhere), ("broken", broken), ("bomb", bomb), ("cut", cut),
    ):  # fmt: skip
        async with endpoint(handler) as port:
            indicators = await ask(port, lambda i: bool(i.errors()))
        assert indicators.latest() == {}
        observed[name] = indicators.errors()["n/web"]
    assert "more than 1048576 bytes" in observed["huge"]
    assert "status 302" in observed["elsewhere"]
    assert "no histogram lat_seconds" in observed["broken"]
    assert "no answer within 0.5 s" in observed["slow"]
    assert "encoding 'gzip'" in observed["bomb"]
    assert "payload" in observed["cut"].lower()


async def test_an_old_answer_keeps_its_time_and_leaves_with_its_annotation() -> None:
    answers = [GOOD]

    async def once(_request: web.Request) -> web.Response:
        return web.Response(text=answers.pop() if answers else "")

    pods = [pod(0)]
    indicators = PodIndicatorScraper()
    async with endpoint(once) as port, asyncio.timeout(15):
        pods[:] = [pod(port)]
        task = asyncio.create_task(indicators.run(lambda: tuple(pods)))
        while not indicators.latest():
            await asyncio.sleep(0.02)
        first = indicators.latest()["n/web"]
        while not indicators.errors():
            await asyncio.sleep(0.02)
        assert indicators.latest()["n/web"] is first, "the time of the last good answer stays what it was"
        pods[:] = [msgspec.structs.replace(pods[0], annotations={})]
        while indicators.latest():
            await asyncio.sleep(0.02)
        assert indicators.errors() == {}
        task.cancel()


async def test_a_refused_connection_is_an_error_of_the_pod() -> None:
    indicators = await ask(1, lambda i: bool(i.errors()))
    assert indicators.latest() == {}

"""The client against services whose latency is known: a thread of this process that answers when the test says."""

from __future__ import annotations

import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from api.units import NS_PER_S
from demo.client import LoadClient
from demo.counters import BUCKETS, CLIENT_CELLS, ClientCell, SharedCounters, bucket_of
from demo.schedule import ConstantRate, arrivals


@contextmanager
def service(delay_s: Callable[[int], float]) -> Iterator[int]:
    """Answers request k (counted from 0) after sleeping `delay_s(k)`, one request at a time; negative: never."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    sock.settimeout(0.05)
    ended = threading.Event()

    def serve() -> None:
        count = 0
        while not ended.is_set():
            try:
                request, client = sock.recvfrom(16)
            except TimeoutError:
                continue
            wait = delay_s(count)
            count += 1
            if wait >= 0:
                time.sleep(wait)
                sock.sendto(request, client)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield sock.getsockname()[1]
    finally:
        ended.set()
        thread.join()
        sock.close()


def drive(
    tmp_path: Path, port: int, rate: float, duration_s: float, timeout_s: float = 5.0
) -> tuple[list[int], list[tuple[int, int]]]:
    """The client's cells and its (due, latency) pairs after a run at a constant rate."""
    counters, samples = SharedCounters(tmp_path / "client", CLIENT_CELLS), array("Q")
    client = LoadClient(port, counters, timeout_s, samples)
    client.run(arrivals(ConstantRate(rate=rate), 5), duration_s)
    client.close()
    values = counters.values()
    counters.close()
    return values, list(zip(samples[::2], samples[1::2], strict=True))


def test_every_answer_is_counted_once_with_at_least_the_delay_it_had(tmp_path: Path) -> None:
    with service(lambda _: 0.02) as port:
        values, samples = drive(tmp_path, port, rate=20, duration_s=1)
    assert values[ClientCell.SENT] == values[ClientCell.ANSWERED] == sum(values[:BUCKETS]) == len(samples) > 5
    assert (values[ClientCell.LOST], values[ClientCell.LATE]) == (0, 0)
    assert min(latency for _, latency in samples) >= 0.02 * NS_PER_S
    assert sum(values[: bucket_of(20_000_000)]) == 0
    assert values[ClientCell.SUM_NS] == sum(latency for _, latency in samples)


def test_a_stall_is_charged_to_every_request_that_was_due_in_it(tmp_path: Path) -> None:
    """No coordinated omission: the service sleeps 0.5 s on one request; those behind it waited too, though not for it."""
    with service(lambda k: 0.5 if k == 10 else 0.0) as port:
        values, samples = drive(tmp_path, port, rate=100, duration_s=1.5)
    assert values[ClientCell.SENT] == values[ClientCell.ANSWERED]
    stalled_due, stalled_latency = samples[10]
    end = stalled_due + stalled_latency
    behind = [(due, latency) for due, latency in samples[11:] if due < end]
    assert len(behind) > 20
    assert all(due + latency >= end for due, latency in behind)
    assert stalled_latency >= 0.5 * NS_PER_S


def test_requests_without_an_answer_are_lost_and_in_the_histogram_with_their_age(tmp_path: Path) -> None:
    with service(lambda k: -1 if k % 2 else 0.0) as port:
        values, samples = drive(tmp_path, port, rate=50, duration_s=1, timeout_s=0.3)
    sent = values[ClientCell.SENT]
    assert values[ClientCell.LOST] == sent // 2
    assert values[ClientCell.ANSWERED] == sent - sent // 2
    assert sum(values[:BUCKETS]) == len(samples) == sent
    assert sum(latency >= 0.3 * NS_PER_S for _, latency in samples) >= sent // 2
    assert sum(values[bucket_of(300_000_000) :]) >= sent // 2


def test_an_answer_after_the_timeout_stays_lost_and_is_counted_as_late(tmp_path: Path) -> None:
    with service(lambda k: 0.6 if k == 0 else 0.0) as port:
        values, _ = drive(tmp_path, port, rate=20, duration_s=1.5, timeout_s=0.2)
    assert values[ClientCell.LATE] > 0
    assert values[ClientCell.LATE] <= values[ClientCell.LOST]
    assert values[ClientCell.ANSWERED] + values[ClientCell.LOST] == values[ClientCell.SENT] == sum(values[:BUCKETS])


def test_a_service_that_is_gone_loses_everything_and_stops_nothing(tmp_path: Path) -> None:
    with service(lambda _: 0.0) as port:
        pass
    values, _ = drive(tmp_path, port, rate=50, duration_s=0.5, timeout_s=0.1)
    assert values[ClientCell.SENT] == values[ClientCell.LOST] == sum(values[:BUCKETS]) > 5

"""Runs the demo's online service: workers that answer UDP requests, each costing a fixed CPU time.
With --pieces a request copies pieces of a table larger than a core's caches, so cache and bandwidth pressure makes it
more expensive.
"""

from __future__ import annotations

import argparse
import mmap
import random
import socket
import sys
import time
from collections.abc import Callable

from demo.launch import supervise

REQUEST_BYTES = 8
RECEIVE_BUFFER = 4 << 20
"""Room for about 5,000 waiting requests; without root the kernel grants at most net.core.rmem_max."""
SO_RCVBUFFORCE = 33
TABLE_BYTES, PIECE_BYTES = 4 << 20, 1 << 10
RANDOM_OFFSETS = 4096
CALIBRATIONS, CALIBRATED_PIECES = 20, 8192


def bind_service(port: int = 0) -> socket.socket:
    """Return the service's socket on 127.0.0.1 (port 0: any free one), with the deepest queue that the kernel grants."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    deepen_receive_queue(sock)
    sock.bind(("127.0.0.1", port))
    return sock


def deepen_receive_queue(sock: socket.socket) -> None:
    """Give a socket a deep receive queue: beyond net.core.rmem_max with CAP_NET_ADMIN, up to it without."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER)
    except PermissionError:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)


def cpu_time_request(service_us: int) -> Callable[[], None]:
    """Return a request that costs `service_us` microseconds of CPU time."""
    cost_ns = service_us * 1000

    def request() -> None:
        end = time.thread_time_ns() + cost_ns
        while time.thread_time_ns() < end:
            pass

    return request


def memory_request(table: mmap.mmap, pieces: int) -> Callable[[], None]:
    """Return a request that copies `pieces` pieces of the table; each continues where the previous one ended."""
    rng = random.Random(1)
    places = [rng.randrange(0, TABLE_BYTES - PIECE_BYTES) for _ in range(RANDOM_OFFSETS)]
    source, target = memoryview(table), memoryview(bytearray(PIECE_BYTES))
    at = 0

    def request() -> None:
        nonlocal at
        for number in range(at, at + pieces):
            place = places[number % RANDOM_OFFSETS]
            target[:] = source[place : place + PIECE_BYTES]
        at += pieces

    return request


def make_table() -> mmap.mmap:
    """Return the table that all workers share, with every page allocated."""
    table = mmap.mmap(-1, TABLE_BYTES)
    table.write(b"t" * TABLE_BYTES)
    return table


def pieces_for(service_us: int) -> int:
    """Return the number of pieces that cost `service_us` of CPU time on this machine: the median of several measurements.

    The machine should be idle meanwhile.
    """
    request = memory_request(make_table(), CALIBRATED_PIECES)
    costs = []
    for _ in range(CALIBRATIONS):
        began = time.thread_time_ns()
        request()
        costs.append(time.thread_time_ns() - began)
    return max(1, round(service_us * 1000 * CALIBRATED_PIECES / sorted(costs)[CALIBRATIONS // 2]))


def work(sock: socket.socket, request: Callable[[], None]) -> None:
    """Answer requests until killed."""
    while True:
        text, client = sock.recvfrom(REQUEST_BYTES)
        request()
        sock.sendto(text, client)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--port", type=int, help="UDP port on 127.0.0.1")
    where.add_argument("--fd", type=int, help="descriptor of a bound UDP socket")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--service-us", type=int, default=500, help="CPU time of one request")
    parser.add_argument("--pieces", type=int, help="copy so many pieces of a table instead, whatever that costs")
    args = parser.parse_args()
    sock = bind_service(args.port) if args.fd is None else socket.socket(fileno=args.fd)
    request = cpu_time_request(args.service_us) if args.pieces is None else memory_request(make_table(), args.pieces)
    return supervise(args.workers, lambda _: work(sock, request))


if __name__ == "__main__":
    sys.exit(main())

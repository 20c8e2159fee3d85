"""Runs the demo's online service: workers that answer UDP requests, each costing a fixed CPU time.
With --pieces a request copies pieces of a table larger than a core's caches, so cache and bandwidth pressure makes it
more expensive. With --file it also reads a file, from the page cache or, with --direct, from the disk.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from demo.launch import supervise

REQUEST_BYTES = 8
RECEIVE_BUFFER = 4 << 20
"""Room for about 5,000 waiting requests; without root the kernel grants at most net.core.rmem_max."""
SO_RCVBUFFORCE = 33
TABLE_BYTES, PIECE_BYTES = 4 << 20, 1 << 10
RANDOM_OFFSETS = 4096
BLOCK_BYTES, FILE_BLOCKS, CACHED_READS = 4096, 16384, 16
"""A file of 64 MiB. Sixteen reads from the page cache cost some 20 us."""
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


def file_request(file: Path, request: Callable[[], None], *, direct: bool) -> Callable[[], None]:
    """Return a request that first reads blocks of the file at random places: one block from the disk, past the page cache, if
    `direct`, else CACHED_READS of them from the page cache. Raises OSError if the file system has no direct I/O."""
    descriptor = os.open(file, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    block, rng = mmap.mmap(-1, BLOCK_BYTES), random.Random(os.getpid())

    def read_and_request() -> None:
        for _ in range(1 if direct else CACHED_READS):
            os.preadv(descriptor, [block], rng.randrange(FILE_BLOCKS) * BLOCK_BYTES)
        request()

    return read_and_request


def fill_file(file: Path) -> None:
    """Create the file that requests read, on the disk."""
    with file.open("wb") as output:
        output.write(b"f" * (FILE_BLOCKS * BLOCK_BYTES))
        output.flush()
        os.fsync(output.fileno())


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
    parser.add_argument("--file", type=Path, help="also read this file, which is made, in each request")
    parser.add_argument("--direct", action="store_true", help="read it from the disk, past the page cache")
    args = parser.parse_args()
    sock = bind_service(args.port) if args.fd is None else socket.socket(fileno=args.fd)
    request = cpu_time_request(args.service_us) if args.pieces is None else memory_request(make_table(), args.pieces)
    if args.file is not None:
        fill_file(args.file)
    return supervise(
        args.workers,
        lambda _: work(sock, request if args.file is None else file_request(args.file, request, direct=args.direct)),
    )


if __name__ == "__main__":
    sys.exit(main())

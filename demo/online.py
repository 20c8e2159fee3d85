"""The online service: worker processes that answer UDP requests, each costing a fixed amount of CPU time.

A request is 8 bytes that the reply carries back. The cost is measured in the worker's own CPU time, so the service's CPU
use is rate x (cost + a few tens of microseconds for the socket calls), whoever preempts it: a number that the agent's can
be held against.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time

from demo.process import supervise

REQUEST_BYTES = 8
RECEIVE_BUFFER = 4 << 20
"""Room for about 5,000 waiting requests; the kernel grants less where net.core.rmem_max says so and we are not root."""
SO_RCVBUFFORCE = 33


def bind(port: int = 0) -> socket.socket:
    """The service's socket on 127.0.0.1 (port 0: any free one), with the deepest queue that the kernel grants."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    deepen(sock)
    sock.bind(("127.0.0.1", port))
    return sock


def deepen(sock: socket.socket) -> None:
    """Give a socket the deep receive queue: beyond net.core.rmem_max where we may, up to it where not."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER)
    except PermissionError:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)


def work(sock: socket.socket, service_us: int) -> None:
    """Answer requests for ever."""
    cost_ns = service_us * 1000
    while True:
        request, client = sock.recvfrom(REQUEST_BYTES)
        end = time.thread_time_ns() + cost_ns
        while time.thread_time_ns() < end:
            pass
        sock.sendto(request, client)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--port", type=int, help="UDP port on 127.0.0.1")
    where.add_argument("--fd", type=int, help="descriptor of a bound UDP socket")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--service-us", type=int, default=500, help="CPU time of one request")
    args = parser.parse_args()
    sock = bind(args.port) if args.fd is None else socket.socket(fileno=args.fd)
    return supervise(args.workers, lambda _: work(sock, args.service_us))


if __name__ == "__main__":
    sys.exit(main())

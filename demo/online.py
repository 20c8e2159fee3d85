"""The online service: worker processes that answer UDP requests, each costing a fixed amount of CPU time.

A request is 8 bytes (the time it was due, which the reply carries back). The cost is measured in the worker's own CPU
time, so the service's CPU use is exactly rate x cost, whoever preempts it: a number that the agent's can be held against.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import time


def serve(port: int, service_us: int) -> None:
    """Answer requests forever on 127.0.0.1:`port`; workers share the socket that their parent bound."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    sock.bind(("127.0.0.1", port))
    work(sock, service_us)


def work(sock: socket.socket, service_us: int) -> None:
    cost_ns = service_us * 1000
    while True:
        request, client = sock.recvfrom(64)
        end = time.thread_time_ns() + cost_ns
        while time.thread_time_ns() < end:
            pass
        sock.sendto(request, client)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--service-us", type=int, default=500, help="CPU time of one request")
    args = parser.parse_args()
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    sock.bind(("127.0.0.1", args.port))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    parent = os.getpid()
    for _ in range(args.workers - 1):
        if os.fork() == 0:
            break
    del parent
    work(sock, args.service_us)


if __name__ == "__main__":
    main()

"""Runs the demo's open-loop client: it sends requests when they are due and never waits for replies.
Latency is the kernel's receive timestamp of the reply minus the due time, so coordinated omission is excluded. A
request without a reply within the timeout counts as lost, with its age. The client uses SCHED_FIFO where permitted.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import signal
import socket
import struct
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from api.units import NS_PER_S
from demo.counters import CLIENT_CELLS, ClientCell, SharedCounters, bucket_of
from demo.launch import PR_SET_TIMERSLACK, STOP_SIGNALS, prctl
from demo.online import deepen_receive_queue
from demo.schedule import Schedule, arrivals, parse_schedule

SO_TIMESTAMPNS = 35
"""Number of the socket option and of its control message, which Python does not name."""
MAX_SLEEP_NS = 20_000_000
"""Maximum sleep, so that replies are counted and signals are handled soon also at low rates."""
SENDS_PER_DRAIN = 32
"""Requests sent between two reads of the replies, which may wait because their timestamps are the kernel's."""


class LoadClient:
    """One socket with its outstanding requests and the counters of their results."""

    def __init__(
        self, port: int, counters: SharedCounters, timeout_s: float, samples: array[int] | None = None
    ) -> None:
        self._counters = counters
        self._timeout_ns = int(timeout_s * NS_PER_S)
        self._samples = samples
        self._outstanding: dict[int, int] = {}
        self._sent = 0
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        deepen_receive_queue(self._sock)
        self._sock.connect(("127.0.0.1", port))
        self._sock.settimeout(0)
        self.stopped = False

    def stop(self, _signum: int = 0, _frame: FrameType | None = None) -> None:
        self.stopped = True

    def close(self) -> None:
        self._sock.close()

    def run(self, due: Iterator[float], duration_s: float | None) -> None:
        """Send requests when due until stopped or for `duration_s`, then wait for the outstanding replies."""
        start = self._counters[ClientCell.STARTED_NS] = time.time_ns()
        for due_s in due:
            if self.stopped or (duration_s is not None and due_s >= duration_s):
                break
            due_ns = start + int(due_s * NS_PER_S)
            self._wait_until(due_ns)
            self._send(due_ns)
            if self._sent % SENDS_PER_DRAIN == 0:
                self._drain()
        while self._outstanding and not self.stopped:
            time.sleep(MAX_SLEEP_NS / NS_PER_S)
            self._drain()

    def _wait_until(self, due_ns: int) -> None:
        while not self.stopped and (wait := due_ns - time.time_ns()) > 0:
            if wait <= MAX_SLEEP_NS:
                time.sleep(wait / NS_PER_S)
                return
            time.sleep(MAX_SLEEP_NS / NS_PER_S)
            self._drain()

    def _send(self, due_ns: int) -> None:
        seq = self._sent = self._sent + 1
        self._outstanding[seq] = due_ns
        counters = self._counters
        counters[ClientCell.LAG_NS] += max(0, time.time_ns() - due_ns)
        counters[ClientCell.SENT] = seq
        try:
            self._sock.send(struct.pack("=Q", seq))
        except (BlockingIOError, ConnectionRefusedError):
            return  # not delivered: it stays outstanding and is counted as lost after the timeout

    def _drain(self) -> None:
        while True:
            try:
                reply, ancillary, _, _ = self._sock.recvmsg(16, 64)
            except BlockingIOError:
                break
            except ConnectionRefusedError:
                continue  # the kernel's note about an earlier send to a dead service
            due_ns = self._outstanding.pop(struct.unpack("=Q", reply)[0], None)
            if due_ns is None:
                self._counters[ClientCell.LATE] += 1
                continue
            self._counters[ClientCell.ANSWERED] += 1
            self._count(due_ns, max(0, received_ns(ancillary) - due_ns))
        self._give_up(time.time_ns())

    def _give_up(self, now_ns: int) -> None:
        while self._outstanding:
            seq, due_ns = next(iter(self._outstanding.items()))
            if now_ns - due_ns < self._timeout_ns:
                return
            del self._outstanding[seq]
            self._counters[ClientCell.LOST] += 1
            self._count(due_ns, now_ns - due_ns)

    def _count(self, due_ns: int, latency_ns: int) -> None:
        self._counters[bucket_of(latency_ns)] += 1
        self._counters[ClientCell.SUM_NS] += latency_ns
        if self._samples is not None:
            self._samples.extend((due_ns, latency_ns))


def received_ns(ancillary: list[tuple[int, int, bytes]]) -> int:
    """Return the kernel's receive timestamp of a datagram; the current time if there is none."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPNS):
            seconds, nanoseconds = struct.unpack_from("qq", data)
            return int(seconds * NS_PER_S + nanoseconds)
    return time.time_ns()


def go_realtime() -> bool:
    """Request SCHED_FIFO and precise timers; return whether SCHED_FIFO was granted."""
    prctl(PR_SET_TIMERSLACK, 1)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        return False
    return True


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True, help="UDP port of the service on 127.0.0.1")
    parser.add_argument(
        "--schedule", type=parse_schedule, required=True, help='JSON: {"type": "constant", "rate": 800}'
    )
    parser.add_argument("--counters", type=Path, required=True, help="file of the histogram (demo.counters)")
    parser.add_argument(
        "--samples", type=Path, help="file for pairs of 64-bit (due, latency) in ns, written at the end"
    )
    parser.add_argument("--duration", type=float, help="seconds; without it until SIGTERM")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds after which a request is lost")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warmup", type=float, default=math.inf, help="seconds after which the seed is used again")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    schedule: Schedule = args.schedule
    counters = SharedCounters(args.counters, CLIENT_CELLS)
    samples = array("Q") if args.samples else None
    client = LoadClient(args.port, counters, args.timeout, samples)
    for signum in STOP_SIGNALS:
        signal.signal(signum, client.stop)
    counters[ClientCell.REALTIME] = int(go_realtime())
    if not counters[ClientCell.REALTIME]:
        print("client: no SCHED_FIFO (needs CAP_SYS_NICE), latency includes the client's own wait", file=sys.stderr)
    gc.disable()
    client.run(arrivals(schedule, args.seed, args.warmup), args.duration)
    client.close()
    if samples is not None:
        with args.samples.open("wb") as file:
            samples.tofile(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())

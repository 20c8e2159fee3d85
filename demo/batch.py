"""Runs the demo's batch job: processes that compute checksums, or stream memory, and count units of work.
A unit is the SHA-256 of 64 KiB: pure CPU. With --file it is a MiB copied within memory that exceeds a shared cache,
and every fourth time a MiB of the file, which the page cache holds.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from api.units import MIB
from demo.counters import SharedCounters
from demo.launch import supervise

UNIT_BYTES = 64 << 10
ARENA_MIB, FILE_MIB = 96, 192
READ_EVERY = 4
"""Number of copies for each MiB read from the file."""


def work(counters: SharedCounters, index: int, idle: bool, file: Path | None = None) -> None:
    """Compute units until killed; cell `index` counts them."""
    if idle:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    units = hash_blocks() if file is None else stream(file)
    for done, _ in enumerate(units, 1):
        counters[index] = done


def hash_blocks() -> Iterator[None]:
    """Yield units that need only a CPU."""
    block = bytes(UNIT_BYTES)
    while True:
        hashlib.sha256(block).digest()
        yield


def stream(file: Path) -> Iterator[None]:
    """Yield units that copy memory and read the page cache, limited by their bandwidth."""
    block = memoryview(bytearray(MIB))
    with file.open("rb", buffering=0) as cached:
        read = 0
        while True:
            with mmap.mmap(-1, ARENA_MIB * MIB) as arena, memoryview(arena) as view:
                for number in range(ARENA_MIB):
                    view[number * MIB : (number + 1) * MIB] = block
                    if number % READ_EVERY == 0:
                        os.preadv(cached.fileno(), [block], read * MIB)
                        read = (read + 1) % FILE_MIB
                    yield


def fill(file: Path) -> None:
    """Create the file that all burners read; its pages are charged to the cgroup of the batch job."""
    block = bytes(MIB)
    with file.open("wb") as output:
        for _ in range(FILE_MIB):
            output.write(block)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--burners", type=int, required=True)
    parser.add_argument("--counters", type=Path, required=True, help="file of the units done, one cell per burner")
    parser.add_argument("--idle", action="store_true", help="run under SCHED_IDLE")
    parser.add_argument("--file", type=Path, help="work on memory and on this file, which is made")
    args = parser.parse_args()
    counters = SharedCounters(args.counters, args.burners)
    if args.file is not None:
        fill(args.file)
    return supervise(args.burners, lambda index: work(counters, index, args.idle, args.file))


if __name__ == "__main__":
    sys.exit(main())

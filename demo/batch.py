"""Runs the demo's batch job: processes that do one kind of work until killed, and count its units.
`cpu`: the SHA-256 of 64 KiB. `memory`: a MiB copied within memory that exceeds a shared cache. `stream`: the same, and every
fourth time a MiB of a file in the page cache. `page-cache`: a MiB written to the page cache, and read back. `disk`: a MiB
written to the disk, past the page cache, and read back.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from api.units import MIB
from demo.counters import SharedCounters
from demo.launch import supervise


class BatchWork(StrEnum):
    """Kinds of batch work; the module's docstring has their units."""

    CPU = "cpu"
    MEMORY = "memory"
    STREAM = "stream"
    PAGE_CACHE = "page-cache"
    DISK = "disk"


UNIT_BYTES = 64 << 10
ARENA_MIB, FILE_MIB = 96, 192
READ_EVERY = 4
"""Number of copies for each MiB read from the file."""


OWN_FILE_MIB = 64
"""Size of a burner's own file: with two burners per CPU far less than the memory, so that writing evicts no pages of others."""


def work(counters: SharedCounters, index: int, idle: bool, kind: BatchWork, directory: Path) -> None:
    """Compute units until killed; cell `index` counts them."""
    if idle:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    for done, _ in enumerate(units_of(kind, directory, index), 1):
        counters[index] = done


def units_of(kind: BatchWork, directory: Path, index: int) -> Iterator[None]:
    """Return the endless units of a kind of work; files are in `directory`, and `index` numbers those of one burner."""
    match kind:
        case BatchWork.CPU:
            return hash_blocks()
        case BatchWork.MEMORY:
            return copy_memory()
        case BatchWork.STREAM:
            return copy_memory(shared_file(directory))
        case BatchWork.PAGE_CACHE:
            return refill_file(directory / f"batch.{index}.data")
        case BatchWork.DISK:
            return refill_file(directory / f"batch.{index}.data", os.O_DIRECT)


def hash_blocks() -> Iterator[None]:
    """Yield units that need only a CPU."""
    block = bytes(UNIT_BYTES)
    while True:
        hashlib.sha256(block).digest()
        yield


def copy_memory(file: Path | None = None) -> Iterator[None]:
    """Yield units that copy memory, and read `file` from the page cache, limited by their bandwidth."""
    block = memoryview(bytearray(MIB))
    cached = None if file is None else os.open(file, os.O_RDONLY)
    read = 0
    while True:
        with mmap.mmap(-1, ARENA_MIB * MIB) as arena, memoryview(arena) as view:
            for number in range(ARENA_MIB):
                view[number * MIB : (number + 1) * MIB] = block
                if cached is not None and number % READ_EVERY == 0:
                    os.preadv(cached, [block], read * MIB)
                    read = (read + 1) % FILE_MIB
                yield


def refill_file(file: Path, flags: int = 0) -> Iterator[None]:
    """Yield units that write a file and read it back, again and again.

    Through the page cache, the kernel allocates new pages each time, and frees them before it would write them to the disk
    (dirty_expire_centisecs, 30 s). With O_DIRECT every unit is two transfers to the disk.
    """
    block = mmap.mmap(-1, MIB)  # aligned to a page, as O_DIRECT requires
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | flags)
    while True:
        os.ftruncate(descriptor, 0)
        for number in range(OWN_FILE_MIB):
            os.pwritev(descriptor, [block], number * MIB)
            os.preadv(descriptor, [block], number * MIB)
            yield


def shared_file(directory: Path) -> Path:
    """Return the path of the file that all burners read."""
    return directory / "batch.data"


def fill(file: Path) -> None:
    """Create the file that all burners read; its pages are charged to the cgroup of the batch job."""
    block = bytes(MIB)
    with file.open("wb") as output:
        for _ in range(FILE_MIB):
            output.write(block)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--burners", type=int, required=True)
    parser.add_argument(
        "--counters", type=Path, required=True, help="file of the units done, one cell per burner; data is next to it"
    )
    parser.add_argument("--idle", action="store_true", help="run under SCHED_IDLE")
    parser.add_argument("--kind", type=BatchWork, choices=tuple(BatchWork), default=BatchWork.CPU, help="kind of work")
    args = parser.parse_args()
    counters, directory = SharedCounters(args.counters, args.burners), args.counters.parent
    if args.kind is BatchWork.STREAM:
        fill(shared_file(directory))
    return supervise(args.burners, lambda index: work(counters, index, args.idle, args.kind, directory))


if __name__ == "__main__":
    sys.exit(main())

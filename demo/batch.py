"""The batch job: processes that compute checksums as fast as they are let, each counting what it has done.

A unit of work is the SHA-256 of 64 KiB: pure CPU, no system call, no memory traffic beyond the L2 cache.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from pathlib import Path

from demo.counters import Counters
from demo.process import supervise

UNIT_BYTES = 64 << 10


def work(counters: Counters, index: int, idle: bool) -> None:
    """Do units for ever; cell `index` says how many."""
    if idle:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    block, done = bytes(UNIT_BYTES), 0
    while True:
        hashlib.sha256(block).digest()
        done += 1
        counters[index] = done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--burners", type=int, required=True)
    parser.add_argument("--counters", type=Path, required=True, help="file of the units done, one cell per burner")
    parser.add_argument("--idle", action="store_true", help="run under SCHED_IDLE")
    args = parser.parse_args()
    counters = Counters(args.counters, args.burners)
    return supervise(args.burners, lambda index: work(counters, index, args.idle))


if __name__ == "__main__":
    sys.exit(main())

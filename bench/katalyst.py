"""Measures the CPU and memory of the stock Katalyst agent and of dioptase on the same simulated node and pods."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping

from bench.machine import cpu_ns_of, end_cleanly_on_sigterm, memory_kib_of, this_machine


def measure_processes(
    pids: Mapping[str, int], seconds: float, cpu_ns: Callable[[int], int] = cpu_ns_of
) -> dict[str, dict[str, float]]:
    """Return CPU use in thousandths of a CPU and memory in MiB, by name."""
    before, began = {name: cpu_ns(pid) for name, pid in pids.items()}, time.monotonic_ns()
    time.sleep(seconds)
    passed_ns = time.monotonic_ns() - began
    return {
        name: {
            "cpu_milli": round((cpu_ns(pid) - before[name]) * 1000 / passed_ns, 1),
            "rss_mib": round(memory_kib_of(pid) / 1024, 1),
        }
        for name, pid in pids.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.katalyst", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    end_cleanly_on_sigterm()
    # The test cluster is imported here, because nothing else in this module needs it.
    from tests.cluster.side_by_side import both  # noqa: PLC0415

    with both() as pids:
        processes = measure_processes(pids, options.seconds)
    print(
        json.dumps({"seconds": options.seconds, "machine": this_machine("hybrid").line(), "found": processes}, indent=1)
    )


if __name__ == "__main__":
    main()

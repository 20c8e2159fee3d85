"""CPU time of this machine that neither the demo nor what it started used: what made the service wait, if not the batch job."""

from __future__ import annotations

import os
import resource
from pathlib import Path

TOLD_RATIO = 0.1
"""Of the node; less than that does not change the table's story."""
TOO_BUSY_RATIO = 0.25
"""Of the node; more than that is its story."""
_BUSY = (0, 1, 2, 5, 6)
"""user, nice, system, irq and softirq among the numbers of the first line of /proc/stat."""


def busy_s(stat: str) -> float:
    """CPU seconds that the machine was busy since boot, by the text of /proc/stat."""
    ticks = stat.split("\n", 1)[0].split()[1:]
    return sum(int(ticks[place]) for place in _BUSY) / os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    """CPU seconds of this process, and of all below it that have ended and were waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class Others:
    """What others use from when it is made until `cores` is asked for, when everything of ours has ended."""

    def __init__(self, now_s: float, stat: Path = Path("/proc/stat")) -> None:
        self._stat, self._began_s = stat, now_s
        self._before_s = self._used_s()

    def _used_s(self) -> float:
        return busy_s(self._stat.read_text()) - own_s()

    def cores(self, now_s: float) -> float:
        """On average."""
        seconds = now_s - self._began_s
        return (self._used_s() - self._before_s) / seconds if seconds > 0 else 0.0


def told(cores: float, cpus: int) -> str | None:
    """One line for the summary; None where others used little."""
    if cores <= TOLD_RATIO * cpus:
        return None
    used = f"{'others':<15}used {cores:.2f} of {cpus} cores on average"
    return f"{used}: not all that the service waited is the batch job's doing"


def warning(cores: float, cpus: int) -> str | None:
    """What has to be known before the table is read; None where others left enough of the machine."""
    if cores <= TOO_BUSY_RATIO * cpus:
        return None
    return (
        f"! this machine was too busy for the numbers below to be the product's: others used {cores:.2f} of {cpus} cores "
        "on average; end them and run it again"
    )

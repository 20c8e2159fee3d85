"""Whether power alerts can be answered on this machine: a source of its own where that is asked for. Reads, writes nothing.

What the node draws comes from RAPL's counters (agent/sense/power.py). A cap is the firmware's or the frequency governor's to
carry out, by whoever follows the advice; it needs one of their files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from api.ports import Seen, Unavailable

_METER = "class/powercap/intel-rapl:*/energy_uj"
_LIMITS = {
    "class/powercap/intel-rapl:*/constraint_0_power_limit_uw": "RAPL power limit",
    "devices/system/cpu/cpufreq/policy*/scaling_max_freq": "frequency limit of cpufreq",
}


class PowerCaps:
    """Says every round what is missing; hardware does not come and go, so it is looked at once."""

    name = "power"
    lost_events = None

    def __init__(self, sys: Path) -> None:
        found = [name for pattern, name in _LIMITS.items() if any(sys.glob(pattern))]
        self.form = " and ".join(found) or "none"
        self._why: Unavailable | None = None
        if not any(sys.glob(_METER)):
            self._why = Unavailable(
                f"what the node draws cannot be metered: there is no /sys/{_METER}",
                "load intel_rapl_msr on a machine that has it, or set power.enable: false: no alert can be answered",
            )
        elif not found:
            self._why = Unavailable(
                f"nothing here can cap power: there is no {' and no '.join(f'/sys/{each}' for each in _LIMITS)}",
                "load a cpufreq driver, or let alerts ask for evictions alone (power-internal-op: 2)",
            )

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> Seen:  # noqa: ARG002 - as every source is asked
        """It counts nothing."""
        if self._why is not None:
            raise Unavailable(self._why.reason, self._why.remedy)
        return Seen()

    def problem(self) -> Unavailable | None:
        """What `read` does not say already: nothing."""
        return None

    def close(self) -> None:
        """There is nothing to close."""

"""Reads RAPL energy counters (drivers/powercap, microjoules, wrapping) and reports whether this machine can cap power.
Writes nothing: agent.qrm.actuator.power_limits applies the cap."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from agent.sensors import parsers
from agent.sensors.kernel_files import ProcSysFiles
from agent.sensors.parsers import number
from api.interfaces import Unavailable

_POWERCAP_ROOT = "class/powercap"
_RAPL_PREFIX = "intel-rapl:"
"""AMD's counters have the same prefix. intel-rapl-mmio is another path to the same counters."""
RAPL_MISSING = "no energy counters of RAPL can be read"
RAPL_REMEDY = "load intel_rapl_msr on a machine that has them, and run the agent as root; virtual machines have none"


def read_rapl_energy(files: ProcSysFiles) -> dict[str, Any]:
    """Return energy counters by domain: `package-0`, and below it `package-0/dram`."""
    energy_uj: dict[str, int] = {}
    for entry in files.names(files.sys / _POWERCAP_ROOT):
        if not entry.startswith(_RAPL_PREFIX):
            continue
        directory = files.sys / _POWERCAP_ROOT / entry
        microjoules = number(files.read_optional(directory / "energy_uj"))
        name = _zone_name(files, directory)
        zone, _, part = entry.removeprefix(_RAPL_PREFIX).partition(":")
        if part:
            name = f"{_zone_name(files, files.sys / _POWERCAP_ROOT / (_RAPL_PREFIX + zone))}/{name}"
        if microjoules is not None:
            energy_uj[name] = microjoules
    if not energy_uj:
        files.lack(RAPL_MISSING, RAPL_REMEDY)
    return {"power_uj": energy_uj}


def _zone_name(files: ProcSysFiles, directory: Path) -> str:
    return parsers.name(files.read_optional(directory / "name").strip()) or directory.name


_ENERGY_COUNTERS = "class/powercap/intel-rapl:*/energy_uj"
_POWER_LIMITS = "class/powercap/intel-rapl:*/constraint_0_power_limit_uw"
_EVICT_ONLY = "or set power-internal-op: 2 in alerts, to evict only"


def _is_enabled(zone: Path) -> bool:
    try:
        return (zone / "enabled").read_text().strip() != "0"
    except OSError:
        return True


class PowerCapSupport:
    """Reports every cycle what is missing to cap power; hardware is checked once, because it does not change."""

    name = "power"
    lost_events = None

    def __init__(self, sys: Path, *, capping: bool) -> None:
        """`capping` says whether power limits are to be written."""
        limits = [limit for limit in sys.glob(_POWER_LIMITS) if _is_enabled(limit.parent)]
        self.form = "RAPL power limit" if limits else "none"
        self._problem: Unavailable | None = None
        if not any(sys.glob(_ENERGY_COUNTERS)):
            self._problem = Unavailable(
                f"the node's power cannot be measured: there is no /sys/{_ENERGY_COUNTERS}",
                "load intel_rapl_msr on a machine that has it, or set power.enable: false",
            )
        elif not capping:
            return
        elif not limits:
            self._problem = Unavailable(
                f"power cannot be capped: there is no /sys/{_POWER_LIMITS} beside which `enabled` is 1",
                f"use a machine with RAPL power limits, write 1 to `enabled` of its packages, {_EVICT_ONLY}",
            )
        elif not any(os.access(limit, os.W_OK) for limit in limits):
            self._problem = Unavailable(
                f"power cannot be capped: /sys/{_POWER_LIMITS} cannot be written",
                f"run the agent as root with a writable /sys, in a pod as a privileged container, {_EVICT_ONLY}",
            )

    def problem(self) -> Unavailable | None:
        """Return why power cannot be measured or capped; None if it can."""
        return self._problem

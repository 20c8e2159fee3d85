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
_PACKAGE_PREFIX = "package"
ENABLE_REMEDY = "write 1 to `enabled` of its packages, and if it stays 0, unlock the limits in the firmware"
_EVICT_ONLY = "or set power-internal-op: 2 in alerts, to evict only"


def package_limit_files(sys: Path) -> list[str]:
    """Return the long-term limits of packages, below /sys; the kernel numbers such a limit 0 (drivers/powercap).

    The processor ignores the limits of a zone whose `enabled` is 0 (Documentation/power/powercap/powercap.rst). Either its
    owner disabled it, or the firmware has locked it (get_domain_enable() in intel_rapl_common.c).
    """
    return [
        str(limit.relative_to(sys))
        for limit in sorted(sys.glob(_POWER_LIMITS))
        if limit.parent.name.count(":") == 1
        and _attribute(limit.parent, "name").startswith(_PACKAGE_PREFIX)
        and _attribute(limit.parent, "enabled").strip() != "0"
    ]


def _attribute(zone: Path, name: str) -> str:
    try:
        return (zone / name).read_text()
    except OSError:
        return ""


class PowerCapSupport:
    """Reports every cycle what is missing to cap power: `enabled` is a switch."""

    name = "power"
    lost_events = None

    def __init__(self, sys: Path, *, capping: bool) -> None:
        """`capping` says whether power limits are to be written."""
        self._sys, self._capping = sys, capping

    @property
    def form(self) -> str:
        return "RAPL power limit" if package_limit_files(self._sys) else "none"

    def problem(self) -> Unavailable | None:
        """Return why power cannot be measured or capped; None if it can."""
        if not any(self._sys.glob(_ENERGY_COUNTERS)):
            return Unavailable(
                f"the node's power cannot be measured: there is no /sys/{_ENERGY_COUNTERS}",
                "load intel_rapl_msr on a machine that has it, or set power.enable: false",
            )
        if not self._capping:
            return None
        limits = package_limit_files(self._sys)
        if not limits:
            return Unavailable(
                f"power cannot be capped: there is no /sys/{_POWER_LIMITS} of a package whose `enabled` is 1",
                f"use a machine with RAPL power limits, {ENABLE_REMEDY}, {_EVICT_ONLY}",
            )
        if not any(os.access(self._sys / limit, os.W_OK) for limit in limits):
            return Unavailable(
                f"power cannot be capped: /sys/{_POWER_LIMITS} cannot be written",
                f"run the agent as root with a writable /sys, in a pod as a privileged container, {_EVICT_ONLY}",
            )
        return None

"""Energy that the machine's RAPL counters have metered (drivers/powercap): microjoules since some moment, wrapping around."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agent.sense import parsers
from agent.sense.node_files import NodeFiles
from agent.sense.parsers import number

_ROOT = "class/powercap"
_PREFIX = "intel-rapl:"
"""AMD's counters have the same name. Those of intel-rapl-mmio are the same counters by another way."""
LACK = "no energy counters of RAPL can be read"
REMEDY = "load intel_rapl_msr on a machine that has them, and run the agent as root; virtual machines have none"


def energy(files: NodeFiles) -> dict[str, Any]:
    """Counters by domain: `package-0`, and below it `package-0/dram`."""
    found: dict[str, int] = {}
    for entry in files.names(files.sys / _ROOT):
        if not entry.startswith(_PREFIX):
            continue
        directory = files.sys / _ROOT / entry
        microjoules = number(files.look(directory / "energy_uj"))
        name = _name(files, directory)
        zone, _, part = entry.removeprefix(_PREFIX).partition(":")
        if part:
            name = f"{_name(files, files.sys / _ROOT / (_PREFIX + zone))}/{name}"
        if microjoules is not None:
            found[name] = microjoules
    if not found:
        files.lack(LACK, REMEDY)
    return {"power_uj": found}


def _name(files: NodeFiles, directory: Path) -> str:
    return parsers.name(files.look(directory / "name").strip()) or directory.name

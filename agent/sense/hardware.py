"""What the CPU can do, and which network cards there are: for reports, and read when one is due."""

from __future__ import annotations

from pathlib import Path

from agent.sense.machine import first_cpu
from agent.sense.topology import text
from api.reports import Card, Hardware

_LONGEST_BLOCK = 16 << 10
"""Of one CPU in /proc/cpuinfo; that of one with many flags has 2 KiB."""
_MOST_CARDS = 64


def read_hardware(proc: Path, sys: Path) -> Hardware:
    """Never raises: what cannot be read is not there."""
    return Hardware(flags=_flags(proc / "cpuinfo"), cards=_cards(sys / "class/net"))


def _flags(path: Path) -> tuple[str, ...]:
    try:
        with path.open("rb") as file:
            said = first_cpu(file.read(_LONGEST_BLOCK))
    except OSError:
        return ()
    # Other architectures have `Features`.
    return tuple((said.get("flags") or said.get("Features") or "").split())


def _cards(directory: Path) -> tuple[Card, ...]:
    try:
        names = sorted(entry.name for entry in directory.iterdir() if (entry / "device").exists())
    except OSError:
        return ()
    return tuple(_card(directory / name) for name in names[:_MOST_CARDS])


def _card(path: Path) -> Card:
    device = (path / "device").resolve()
    # Of a virtual card the device is virtio's, and what it is on is on the bus.
    on_bus = (name for name in (device.name, device.parent.name) if name.count(":") == 2)
    return Card(
        name=path.name,
        index=_number(text(path / "ifindex"), 0),
        numa=_number(text(path / "device/numa_node"), -1),
        pci=next(on_bus, ""),
        speed_mbit=_number(text(path / "speed"), -1),
        enabled=text(path / "operstate") == "up",
    )


def _number(said: str, unknown: int) -> int:
    return int(said) if said.isascii() and said.removeprefix("-").isdigit() and len(said) < 10 else unknown

"""What the machine is made of as properties of CustomNodeResource, under Katalyst's names. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from api.crds.node import Property
from api.reports import Card, Hardware

INSTRUCTIONS = {"avx2": "avx2", "avx512f": "avx512"}
"""Flags, and what `cis` calls the sets that they begin."""


class _Wire(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """As Katalyst's scheduler plugins and network plugin read it."""

    ns_name: str = msgspec.field(name="NSName", default="")
    ns_inode: int = msgspec.field(name="NSInode", default=0)
    ns_abs_dir: str = msgspec.field(name="NSAbsDir", default="")
    name: str
    if_index: int
    speed: int
    numa_node: int
    enable: bool
    addr: None = None
    pci_addr: str = msgspec.field(name="PCIAddr")


def hardware_properties(hardware: Hardware, *, flags: bool = False) -> Iterator[Property]:
    """Instruction sets and cards, and the CPU's `flags` where they are wanted; nothing of what is not known."""
    if hardware.flags:
        known = tuple(name for flag, name in INSTRUCTIONS.items() if flag in hardware.flags)
        yield Property(property_name="cis", property_values=known)
        if flags:
            yield Property(property_name="cpu_flags", property_values=(",".join(hardware.flags),))
    if hardware.cards:
        yield Property(property_name="topology", property_values=tuple(_card(card) for card in hardware.cards))


def _card(card: Card) -> str:
    wire = _Wire(
        name=card.name,
        if_index=card.index,
        speed=card.speed_mbit,
        numa_node=card.numa,
        enable=card.enabled,
        pci_addr=card.pci,
    )
    return msgspec.json.encode(wire).decode()

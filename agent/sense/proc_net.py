"""The node's network: protocol counters, sockets by state, interfaces. All of the network namespace that the agent is in."""

from __future__ import annotations

import itertools
from typing import Any

from agent.sense import parsers
from agent.sense.node_files import NodeFiles
from agent.sense.parsers import number
from agent.sense.sock_diag import count_states
from api.facts import Interface
from api.ports import Unavailable

HOST_NET = "run the agent in the host's network namespace, with its /proc"
_RECEIVED = ("bytes", "packets", "errs", "drop", "fifo", "frame", "compressed", "multicast")
_SENT = ("bytes", "packets", "errs", "drop", "fifo", "colls", "carrier", "compressed")


def counters(files: NodeFiles) -> dict[str, Any]:
    """/proc/net/snmp, netstat and sockstat. Version 6 of IP has no TCP counters of its own."""
    found: dict[str, int] = {}
    for name in ("net/snmp", "net/netstat"):
        found |= files.parse(name, protocol_counters, HOST_NET) or {}
    found |= files.parse("net/sockstat", socket_counts, HOST_NET) or {}
    return {"netstat": found}


def states(files: NodeFiles) -> dict[str, Any]:
    """TCP sockets by state. The kernel is asked for those in states that few sockets are in for long.

    /proc/net/tcp costs the kernel a line for every socket, millions on a busy proxy; established ones and those in
    TIME_WAIT it counts itself, and shows in netstat (`Tcp.CurrEstab`, which has CLOSE_WAIT in it, and `sockstat.TCP.tw`).
    """
    try:
        return {"tcp_states": count_states()}
    except Unavailable as missing:
        files.lack(missing.reason, missing.remedy)
        return {"tcp_states": {}}


def interfaces(files: NodeFiles) -> dict[str, Any]:
    """/proc/net/dev, and speed and duplex of interfaces that are devices or bonds of them."""
    counts = files.parse("net/dev", interface_counts, HOST_NET) or {}
    found = {}
    for name, (received, sent) in counts.items():
        directory = files.sys / "class/net" / name
        speed, duplex, bonded, carrier = None, "", False, None
        if files.exists(directory / "device") or files.exists(directory / "bonding"):
            speed = number(files.look(directory / "speed"))
            duplex = parsers.name(files.look(directory / "duplex").strip())
            carrier = {"0": False, "1": True}.get(parsers.name(files.look(directory / "carrier").strip()))
            bonded = files.exists(directory / "bonding_slave")
        found[name] = Interface(
            received=received, sent=sent, duplex=duplex, speed_mbit=speed, carrier=carrier, bonded=bonded
        )
    return {"interfaces": found}


def protocol_counters(text: bytes) -> dict[str, int]:
    """/proc/net/snmp and netstat: a line of names and one of numbers for each protocol. Negative ones are settings."""
    found = {}
    lines = text.split(b"\n")
    for names, values in itertools.pairwise(lines):
        protocol, colon, rest = names.partition(b": ")
        if not colon or not values.startswith(protocol + b": "):
            continue
        keys, words = rest.split(), values[len(protocol) + 2 :].split()
        if len(keys) != len(words) or not keys or number(keys[0]) is not None:
            continue
        for key, word in zip(keys, words, strict=True):
            value = number(word)
            if value is not None:
                found[f"{parsers.name(protocol)}.{parsers.name(key)}"] = value
    return found


def socket_counts(text: bytes) -> dict[str, int]:
    """/proc/net/sockstat: `TCP: inuse 2 orphan 0`; memory in pages."""
    found = {}
    for line in text.split(b"\n"):
        protocol, colon, rest = line.partition(b": ")
        words = rest.split()
        if not colon or len(words) % 2:
            continue
        for key, word in zip(words[::2], words[1::2], strict=True):
            value = number(word)
            if value is not None:
                found[f"sockstat.{parsers.name(protocol)}.{parsers.name(key)}"] = value
    return found


def interface_counts(text: bytes) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """/proc/net/dev: what each interface received and sent. Old kernels put no blank after the colon."""
    found = {}
    width = len(_RECEIVED)
    for line in text.split(b"\n"):
        name, colon, rest = line.rpartition(b":")
        values = [number(word) for word in rest.split()]
        known = [value for value in values if value is not None]
        if colon and len(known) == len(values) == width + len(_SENT) and _is_name(name.strip()):
            received = dict(zip(_RECEIVED, known[:width], strict=True))
            found[parsers.name(name.strip())] = (received, dict(zip(_SENT, known[width:], strict=True)))
    return found


def _is_name(name: bytes) -> bool:
    # dev_valid_name() of the kernel, and printable; the name becomes part of a path.
    return (
        0 < len(name) < 16 and name not in (b".", b"..") and b"/" not in name and name.decode("latin-1").isprintable()
    )

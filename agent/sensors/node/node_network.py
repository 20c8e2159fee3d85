"""Reads protocol counters, interfaces and TCP socket states of the network namespace that the agent runs in.
TCP states come from netlink (sock_diag(7)) and only for transient states: /proc/net/tcp costs a line per socket.
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import struct
from collections import Counter
from typing import Any

from agent.sensors import parsers
from agent.sensors.kernel_files import ProcSysFiles
from agent.sensors.parsers import number
from api.interfaces import Unavailable
from api.measurements import Interface

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST, _NLM_F_DUMP = 0x01, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
TCP_STATES = {
    2: "syn_sent",
    3: "syn_recv",
    4: "fin_wait1",
    5: "fin_wait2",
    8: "close_wait",
    9: "last_ack",
    10: "listen",
    11: "closing",
    12: "syn_recv",
}
"""include/net/tcp_states.h; 12 is NEW_SYN_RECV, how request sockets look from inside. Not asked for: 1 ESTABLISHED,
6 TIME_WAIT, and 7 CLOSE, in which sockets are that nobody sees."""
MAX_SOCKETS = 20_000
"""More are not counted: a leak of sockets must not become a leak of time."""
_TIMEOUT_S = 0.2
_RECEIVE_BYTES = 1 << 16
_HEADER = struct.Struct("=IHHII")
"""struct nlmsghdr: length, type, flags, sequence number, port."""
_REQUEST = struct.Struct("=BBBBI48x")
"""struct inet_diag_req_v2: family, protocol, extensions, padding, states, and the socket's identity, which is not asked for."""
_MASK = sum(1 << state for state in TCP_STATES)


def count_tcp_states() -> dict[str, int]:
    """Sockets of both families by state; a state that no socket is in is 0. Raises Unavailable."""
    found: Counter[int] = Counter()
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG) as netlink:
            netlink.settimeout(_TIMEOUT_S)
            for family in (socket.AF_INET, socket.AF_INET6):
                _dump_family(netlink, family, found)
    except OSError as error:
        # Without the module that answers for TCP, and where it may not be loaded, the answer is ENOENT.
        reason = f"the kernel does not list TCP sockets: {error.strerror or error}"
        raise Unavailable(reason, "load the module tcp_diag: modprobe tcp_diag") from None
    if found.total() > MAX_SOCKETS:
        raise Unavailable(f"more than {MAX_SOCKETS} TCP sockets are in passing states", "see `ss -s` for a leak")
    counts = dict.fromkeys(TCP_STATES.values(), 0)
    for state, count in found.items():
        counts[TCP_STATES[state]] += count
    return counts


def _dump_family(netlink: socket.socket, family: int, found: Counter[int]) -> None:
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, _MASK)
    length = _HEADER.size + len(request)
    netlink.send(_HEADER.pack(length, SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST | _NLM_F_DUMP, family, 0) + request)
    while found.total() <= MAX_SOCKETS:
        states, done = parse_sock_diag(netlink.recv(_RECEIVE_BYTES))
        found.update(states)
        if done:
            return


def parse_sock_diag(answer: bytes) -> tuple[list[int], bool]:
    """States of the sockets in one datagram, and whether it is the last. Raises OSError where the kernel says no."""
    states: list[int] = []
    at = 0
    while at + _HEADER.size <= len(answer):
        length, kind, _, _, _ = _HEADER.unpack_from(answer, at)
        body = at + _HEADER.size
        if kind == _NLMSG_DONE:
            return states, True
        if kind == _NLMSG_ERROR:
            code = -int.from_bytes(answer[body : body + 4], "little", signed=True)
            raise OSError(code, os.strerror(code) if code in errno.errorcode else "an answer that is none")
        # struct inet_diag_msg starts with family and state.
        if kind == SOCK_DIAG_BY_FAMILY and body + 1 < len(answer) and answer[body + 1] in TCP_STATES:
            states.append(answer[body + 1])
        if length < _HEADER.size:
            raise OSError(errno.EPROTO, "an answer that is none")
        at += (length + 3) & ~3
    return states, False


HOST_NET_REMEDY = "run the agent in the host's network namespace, with its /proc"
_RECEIVED = ("bytes", "packets", "errs", "drop", "fifo", "frame", "compressed", "multicast")
_SENT = ("bytes", "packets", "errs", "drop", "fifo", "colls", "carrier", "compressed")


def read_protocol_counters(files: ProcSysFiles) -> dict[str, Any]:
    """/proc/net/snmp, netstat and sockstat. Version 6 of IP has no TCP counters of its own."""
    found: dict[str, int] = {}
    for name in ("net/snmp", "net/netstat"):
        found |= files.parse(name, parse_protocol_counters, HOST_NET_REMEDY) or {}
    found |= files.parse("net/sockstat", parse_sockstat, HOST_NET_REMEDY) or {}
    return {"netstat": found}


def read_tcp_states(files: ProcSysFiles) -> dict[str, Any]:
    """TCP sockets by state. The kernel is asked for those in states that few sockets are in for long.

    /proc/net/tcp costs the kernel a line for every socket, millions on a busy proxy; established ones and those in
    TIME_WAIT it counts itself, and shows in netstat (`Tcp.CurrEstab`, which has CLOSE_WAIT in it, and `sockstat.TCP.tw`).
    """
    try:
        return {"tcp_states": count_tcp_states()}
    except Unavailable as missing:
        files.lack(missing.reason, missing.remedy)
        return {"tcp_states": {}}


def read_interfaces(files: ProcSysFiles) -> dict[str, Any]:
    """/proc/net/dev, and speed and duplex of interfaces that are devices or bonds of them."""
    counts = files.parse("net/dev", parse_net_dev, HOST_NET_REMEDY) or {}
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


def parse_protocol_counters(text: bytes) -> dict[str, int]:
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


def parse_sockstat(text: bytes) -> dict[str, int]:
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


def parse_net_dev(text: bytes) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """/proc/net/dev: what each interface received and sent. Old kernels put no blank after the colon."""
    found = {}
    width = len(_RECEIVED)
    for line in text.split(b"\n"):
        name, colon, rest = line.rpartition(b":")
        values = [number(word) for word in rest.split()]
        known = [value for value in values if value is not None]
        if colon and len(known) == len(values) == width + len(_SENT) and _is_interface_name(name.strip()):
            received = dict(zip(_RECEIVED, known[:width], strict=True))
            found[parsers.name(name.strip())] = (received, dict(zip(_SENT, known[width:], strict=True)))
    return found


def _is_interface_name(name: bytes) -> bool:
    # dev_valid_name() of the kernel, and printable; the name becomes part of a path.
    return (
        0 < len(name) < 16 and name not in (b".", b"..") and b"/" not in name and name.decode("latin-1").isprintable()
    )

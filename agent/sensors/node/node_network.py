"""Reads protocol counters, interfaces and TCP socket states of the network namespace that the agent runs in. TCP states
come from netlink (sock_diag(7)) and only for transient states: /proc/net/tcp costs a line per socket."""

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
from api.snapshot import Interface

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST, _NLM_F_DUMP = 0x01, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
TCP_STATES = {
    2: "syn_sent", 3: "syn_recv", 4: "fin_wait1", 5: "fin_wait2", 8: "close_wait", 9: "last_ack", 10: "listen", 11:
    "closing", 12: "syn_recv",
}  # fmt: skip
"""States of include/net/tcp_states.h; 12 is NEW_SYN_RECV, the kernel's state of request sockets. ESTABLISHED (1),
TIME_WAIT (6) and CLOSE (7, sockets that no tool lists) are not requested."""
MAX_SOCKETS = 20_000
"""More sockets are not counted: a socket leak must not slow the agent down."""
_TIMEOUT_S = 0.2
_RECEIVE_BYTES = 1 << 16
_HEADER = struct.Struct("=IHHII")
"""The struct nlmsghdr: length, type, flags, sequence number, port."""
_REQUEST = struct.Struct("=BBBBI48x")
"""The struct inet_diag_req_v2: family, protocol, extensions, padding, states, and the socket's identity, left empty."""
_MASK = sum(1 << state for state in TCP_STATES)


def count_tcp_states() -> dict[str, int]:
    """Return sockets of both families by state, 0 for a state without any. Raises Unavailable."""
    counter: Counter[int] = Counter()
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG) as netlink:
            netlink.settimeout(_TIMEOUT_S)
            for family in (socket.AF_INET, socket.AF_INET6):
                _dump_family(netlink, family, counter)
    except OSError as error:
        # The kernel answers ENOENT if tcp_diag is neither loaded nor loadable (net/core/sock_diag.c).
        reason = f"the kernel does not list TCP sockets: {error.strerror or error}"
        raise Unavailable(reason, "load the module tcp_diag: modprobe tcp_diag") from None
    if counter.total() > MAX_SOCKETS:
        raise Unavailable(f"more than {MAX_SOCKETS} TCP sockets are in transient states", "see `ss -s` for a leak")
    counts = dict.fromkeys(TCP_STATES.values(), 0)
    for state, count in counter.items():
        counts[TCP_STATES[state]] += count
    return counts


def _dump_family(netlink: socket.socket, family: int, counter: Counter[int]) -> None:
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, _MASK)
    length = _HEADER.size + len(request)
    netlink.send(_HEADER.pack(length, SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST | _NLM_F_DUMP, family, 0) + request)
    while counter.total() <= MAX_SOCKETS:
        states, done = parse_sock_diag(netlink.recv(_RECEIVE_BYTES))
        counter.update(states)
        if done:
            return


def parse_sock_diag(answer: bytes) -> tuple[list[int], bool]:
    """Return the states of the sockets in one datagram, and whether it is the last. Raises OSError for a kernel error."""
    states: list[int] = []
    at = 0
    while at + _HEADER.size <= len(answer):
        length, kind, _, _, _ = _HEADER.unpack_from(answer, at)
        body = at + _HEADER.size
        if kind == _NLMSG_DONE:
            return states, True
        if kind == _NLMSG_ERROR:
            code = -int.from_bytes(answer[body : body + 4], "little", signed=True)
            raise OSError(code, os.strerror(code) if code in errno.errorcode else "malformed answer")
        # struct inet_diag_msg starts with family and state.
        if kind == SOCK_DIAG_BY_FAMILY and body + 1 < len(answer) and answer[body + 1] in TCP_STATES:
            states.append(answer[body + 1])
        if length < _HEADER.size:
            raise OSError(errno.EPROTO, "malformed answer")
        at += (length + 3) & ~3
    return states, False


HOST_NET_REMEDY = "run the agent in the host's network namespace, with its /proc"
_RECEIVED = ("bytes", "packets", "errs", "drop", "fifo", "frame", "compressed", "multicast")
_SENT = ("bytes", "packets", "errs", "drop", "fifo", "colls", "carrier", "compressed")


def read_protocol_counters(files: ProcSysFiles) -> dict[str, Any]:
    """Read /proc/net/snmp, netstat and sockstat. IPv6 has no TCP counters of its own."""
    counters: dict[str, int] = {}
    for name in ("net/snmp", "net/netstat"):
        counters |= files.parse(name, parse_protocol_counters, HOST_NET_REMEDY) or {}
    counters |= files.parse("net/sockstat", parse_sockstat, HOST_NET_REMEDY) or {}
    return {"netstat": counters}


def read_tcp_states(files: ProcSysFiles) -> dict[str, Any]:
    """Count TCP sockets by state, limited to states in which few sockets stay long.

    /proc/net/tcp costs the kernel a line for every socket, millions on a busy proxy. The kernel counts established and
    TIME_WAIT sockets itself, in netstat (`Tcp.CurrEstab`, which includes CLOSE_WAIT, and `sockstat.TCP.tw`).
    """
    try:
        return {"tcp_states": count_tcp_states()}
    except Unavailable as missing:
        files.lack(missing.reason, missing.remedy)
        return {"tcp_states": {}}


def read_interfaces(files: ProcSysFiles) -> dict[str, Any]:
    """Read /proc/net/dev, and speed and duplex of devices and bonds."""
    counts = files.parse("net/dev", parse_net_dev, HOST_NET_REMEDY) or {}
    interfaces = {}
    for name, (received, sent) in counts.items():
        directory = files.sys / "class/net" / name
        speed, duplex, bonded, carrier = None, "", False, None
        if files.exists(directory / "device") or files.exists(directory / "bonding"):
            speed = number(files.read_optional(directory / "speed"))
            duplex = parsers.name(files.read_optional(directory / "duplex").strip())
            carrier = {"0": False, "1": True}.get(parsers.name(files.read_optional(directory / "carrier").strip()))
            bonded = files.exists(directory / "bonding_slave")
        interfaces[name] = Interface(
            received=received, sent=sent, duplex=duplex, speed_mbit=speed, carrier=carrier, bonded=bonded
        )
    return {"interfaces": interfaces}


def parse_protocol_counters(text: bytes) -> dict[str, int]:
    """Parse /proc/net/snmp or netstat: a line of names and one of numbers per protocol. Negative numbers are settings."""
    counters = {}
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
                counters[f"{parsers.name(protocol)}.{parsers.name(key)}"] = value
    return counters


def parse_sockstat(text: bytes) -> dict[str, int]:
    """Parse /proc/net/sockstat: `TCP: inuse 2 orphan 0`; memory in pages."""
    counters = {}
    for line in text.split(b"\n"):
        protocol, colon, rest = line.partition(b": ")
        words = rest.split()
        if not colon or len(words) % 2:
            continue
        for key, word in zip(words[::2], words[1::2], strict=True):
            value = number(word)
            if value is not None:
                counters[f"sockstat.{parsers.name(protocol)}.{parsers.name(key)}"] = value
    return counters


def parse_net_dev(text: bytes) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """Parse /proc/net/dev: received and sent counters by interface. Old kernels put no blank after the colon."""
    by_interface = {}
    width = len(_RECEIVED)
    for line in text.split(b"\n"):
        name, colon, rest = line.rpartition(b":")
        values = [number(word) for word in rest.split()]
        numbers = [value for value in values if value is not None]
        if colon and len(numbers) == len(values) == width + len(_SENT) and _is_interface_name(name.strip()):
            received = dict(zip(_RECEIVED, numbers[:width], strict=True))
            by_interface[parsers.name(name.strip())] = (received, dict(zip(_SENT, numbers[width:], strict=True)))
    return by_interface


def _is_interface_name(name: bytes) -> bool:
    # As dev_valid_name (net/core/dev.c), and printable; the name becomes part of a path.
    return (
        0 < len(name) < 16 and name not in (b".", b"..") and b"/" not in name and name.decode("latin-1").isprintable()
    )

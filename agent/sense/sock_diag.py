"""TCP sockets by state, asked of the kernel by netlink (man 7 sock_diag): it sends those in the states that are asked for.

The states asked for are the passing ones. No privilege is needed; what is counted is our network namespace.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections import Counter

from api.ports import Unavailable

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST, _NLM_F_DUMP = 0x01, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
STATES = {
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
MOST_SOCKETS = 20_000
"""More are not counted: a leak of sockets must not become a leak of time."""
_TIMEOUT_S = 0.2
_RECEIVE_BYTES = 1 << 16
_HEADER = struct.Struct("=IHHII")
"""struct nlmsghdr: length, type, flags, sequence number, port."""
_REQUEST = struct.Struct("=BBBBI48x")
"""struct inet_diag_req_v2: family, protocol, extensions, padding, states, and the socket's identity, which is not asked for."""
_MASK = sum(1 << state for state in STATES)


def count_states() -> dict[str, int]:
    """Sockets of both families by state; a state that no socket is in is 0. Raises Unavailable."""
    found: Counter[int] = Counter()
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG) as netlink:
            netlink.settimeout(_TIMEOUT_S)
            for family in (socket.AF_INET, socket.AF_INET6):
                _dump(netlink, family, found)
    except OSError as error:
        # Without the module that answers for TCP, and where it may not be loaded, the answer is ENOENT.
        reason = f"the kernel does not list TCP sockets: {error.strerror or error}"
        raise Unavailable(reason, "load the module tcp_diag: modprobe tcp_diag") from None
    if found.total() > MOST_SOCKETS:
        raise Unavailable(f"more than {MOST_SOCKETS} TCP sockets are in passing states", "see `ss -s` for a leak")
    counts = dict.fromkeys(STATES.values(), 0)
    for state, count in found.items():
        counts[STATES[state]] += count
    return counts


def _dump(netlink: socket.socket, family: int, found: Counter[int]) -> None:
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, _MASK)
    length = _HEADER.size + len(request)
    netlink.send(_HEADER.pack(length, SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST | _NLM_F_DUMP, family, 0) + request)
    while found.total() <= MOST_SOCKETS:
        states, done = parse(netlink.recv(_RECEIVE_BYTES))
        found.update(states)
        if done:
            return


def parse(answer: bytes) -> tuple[list[int], bool]:
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
        if kind == SOCK_DIAG_BY_FAMILY and body + 1 < len(answer) and answer[body + 1] in STATES:
            states.append(answer[body + 1])
        if length < _HEADER.size:
            raise OSError(errno.EPROTO, "an answer that is none")
        at += (length + 3) & ~3
    return states, False

"""Counts TCP and UDP traffic per cgroup: bytes, packets and TCP retransmits of every socket call.
Bytes are the payload that send and receive calls returned. A call counts for the cgroup whose CPU weight its task
has. TCP packets are segments as the socket counts them and belong to the cgroup that called last. Traffic without a
socket call (splice, TCP_ZEROCOPY_RECEIVE, forwarding) is not counted. Traffic between tasks of one node counts on both
sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from api.interfaces import ProbeReading
from api.snapshot import SocketTraffic
from probes import kernel_fields
from probes.btf import VMLINUX
from probes.loader import CHILD_PYTHON, Form, Job, Loaded, Program, load_probe, tracepoint_forms
from probes.maps import possible_cpus
from probes.per_cgroup_probe import PerCgroupProbe, cgroup_slots, table_job

FORMS = ("tp_btf", "raw_tp", "fentry")
"""Forms in order of preference. The last one is for kernels before 6.3, which have no tracepoint with the bytes of a call."""
MAX_FLOWS = 1 << 14
"""Number of TCP sockets whose previous counters are kept: 1.5 MiB."""
TRAFFIC_COUNTERS = 9
"""Number of counters of struct traffic."""
_FIELDS = {
    **kernel_fields.TASK_GROUP_FIELDS,
    "SK_FAMILY": [("sock", "__sk_common.skc_family", 2)],
    "SK_PROTOCOL": [("sock", "sk_protocol", 2)],
    "SEGS_IN": [("tcp_sock", "segs_in", 4)],
    "SEGS_OUT": [("tcp_sock", "segs_out", 4)],
    "TOTAL_RETRANS": [("tcp_sock", "total_retrans", 4)],
}
_SOCKET = ("struct sock *",)
_STATE_ARGUMENTS = (*_SOCKET, "s32", "s32")
_CONNECTIONS = [
    Program("on_retransmit", "tcp_retransmit_skb", "dtse_sock_again", arguments=_SOCKET),
    Program("on_state", "inet_sock_set_state", "dtse_sock_state", arguments=_STATE_ARGUMENTS),
]
_PROGRAMS = [
    Program("on_send", "sock_send_length", "dtse_sock_send", arguments=_STATE_ARGUMENTS[:2]),
    Program("on_receive", "sock_recv_length", "dtse_sock_recv", arguments=_STATE_ARGUMENTS),
    *_CONNECTIONS,
]
_SENDS = ("struct socket *", "struct msghdr *", "u64")
_RECEIVES = (*_SENDS, "s32")
_FENTRY_PROGRAMS = [
    Program("on_send", "inet_sendmsg", "dtse_sock_send", arguments=_SENDS, at="return"),
    Program("on_send", "inet6_sendmsg", "dtse_sock_send6", arguments=_SENDS, at="return"),
    Program("on_receive", "inet_recvmsg", "dtse_sock_recv", arguments=_RECEIVES, at="return"),
    Program("on_receive", "inet6_recvmsg", "dtse_sock_recv6", arguments=_RECEIVES, at="return"),
    *_CONNECTIONS,
]
_FORMS = {
    **tracepoint_forms(_PROGRAMS, _FIELDS),
    "fentry": Form(
        name="fentry",
        typed=True,
        fields={**_FIELDS, "SOCKET_SK": [("socket", "sk", 8)]},
        programs=_FENTRY_PROGRAMS,
        constants={"TYPED": 1, "BY_CALL": 1},
    ),
}


class SocketsProbe(PerCgroupProbe):
    """The running probe: a Probe (`api.interfaces`)."""

    name = "sockets"

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded, self.name, "socket calls")

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:
        """Return traffic by cgroup id since the probe was opened. Raises Unavailable once closed."""
        counted = self.count(live, complete=complete)
        return ProbeReading(
            {number: {"net": net} for number, net in decode(counted.ids, counted.rows.tolist()).items()}
        )


def decode(ids: Sequence[int], rows: Sequence[Sequence[int]]) -> dict[int, SocketTraffic]:
    """Decode rows of `struct traffic` by cgroup id."""
    return {
        number: SocketTraffic(
            tcp_sent_bytes=row[0],
            tcp_received_bytes=row[1],
            tcp_sent_packets=row[2],
            tcp_received_packets=row[3],
            udp_sent_bytes=row[4],
            udp_received_bytes=row[5],
            udp_sent_packets=row[6],
            udp_received_packets=row[7],
            tcp_retransmits=row[8],
        )
        for number, row in zip(ids, rows, strict=True)
    }


def job(forms: Sequence[str], cpus: int, btf: Path = VMLINUX) -> Job:
    """Return the loader's job."""
    return table_job(
        "sockets",
        [_FORMS[name] for name in forms],
        cgroup_slots(cpus, 8 * TRAFFIC_COUNTERS),
        constants={"FLOWS": MAX_FLOWS},
        btf=btf,
        remedy="boot Linux 6.3 or later, which reports the bytes of each socket call, or 5.11 or later with fentry",
    )


def open_sockets(
    *, forms: Sequence[str] = FORMS, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX
) -> SocketsProbe:
    """Start the probe in the first form that the kernel accepts. Raises Unavailable if it accepts none."""
    return load_probe(job(forms, possible_cpus(), btf), SocketsProbe, child_python=child_python)

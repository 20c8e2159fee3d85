"""TCP and UDP traffic per cgroup: bytes, packets and TCP retransmits, of every call on every socket, unsampled.

What the numbers mean: bytes are what send and receive calls returned, so the payload as programs see it, headers not
included, once however often it is retransmitted. A call counts for the cgroup whose CPU weight its task has (as run-queue
waits do), on cgroup versions 1 and 2 alike: the cgroup of the socket's maker does not matter. TCP packets are segments as the
socket counts them, acknowledgements and retransmits included; they are added at each call, retransmit and close, and
belong to the cgroup that called last. A UDP packet is one call that sent or received, and one datagram unless the program
uses UDP_SEGMENT or UDP_GRO, which take several in one call. Traffic between tasks of one node counts on both sides.

What it cannot see: what does not pass through a socket call: sendfile before Linux 6.5, receiving by splice or
TCP_ZEROCOPY_RECEIVE, kernel services such as NFS other than as the root's, and packets that a node merely forwards. Segments
of a connection count from the first look at it: those that were open before the probe have lost nothing but their past. Where
two CPUs look at one connection at the same moment, such as for a thread that sends and one that receives, a segment may be
counted by both; bytes never are.
A cgroup that has not used a socket since the probe was opened is absent. Lost is, by the table of sockets alone
(16,384), what a socket that was dropped from it sent and received since its last call; segments, not bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from api.facts import Net
from api.histograms import SLOTS
from api.ports import Seen
from probes import fields
from probes.btf import VMLINUX
from probes.groups import places_for
from probes.loader import CHILD_PYTHON, Form, Job, Loaded, Program, opened
from probes.maps import possible_cpus
from probes.tabled import Tabled

FORMS = ("tp_btf", "raw_tp", "fentry")
"""In order of preference. The last is for kernels before 6.3, where no tracepoint says what a call has moved."""
FLOWS = 1 << 14
"""TCP sockets whose counters are remembered: 1.5 MiB."""
COUNTERS = 9
"""Of struct traffic."""
_FIELDS = {
    **fields.GROUP,
    "SK_FAMILY": [("sock", "__sk_common.skc_family", 2)],
    "SK_PROTOCOL": [("sock", "sk_protocol", 2)],
    "SEGS_IN": [("tcp_sock", "segs_in", 4)],
    "SEGS_OUT": [("tcp_sock", "segs_out", 4)],
    "TOTAL_RETRANS": [("tcp_sock", "total_retrans", 4)],
}
_SOCKET = ("struct sock *",)
_CALL = (*_SOCKET, "s32", "s32")
_CONNECTIONS = [
    Program("on_retransmit", "tcp_retransmit_skb", "dtse_sock_again", arguments=_SOCKET),
    Program("on_state", "inet_sock_set_state", "dtse_sock_state", arguments=_CALL),
]
_PROGRAMS = [
    Program("on_send", "sock_send_length", "dtse_sock_send", arguments=_CALL[:2]),
    Program("on_receive", "sock_recv_length", "dtse_sock_recv", arguments=_CALL),
    *_CONNECTIONS,
]
_SENDS = ("struct socket *", "struct msghdr *", "u64")
_RECEIVES = (*_SENDS, "s32")
_CALLS = [
    Program("on_send", "inet_sendmsg", "dtse_sock_send", arguments=_SENDS, at="return"),
    Program("on_send", "inet6_sendmsg", "dtse_sock_send6", arguments=_SENDS, at="return"),
    Program("on_receive", "inet_recvmsg", "dtse_sock_recv", arguments=_RECEIVES, at="return"),
    Program("on_receive", "inet6_recvmsg", "dtse_sock_recv6", arguments=_RECEIVES, at="return"),
    *_CONNECTIONS,
]
_FORMS = {
    "tp_btf": Form(name="tp_btf", typed=True, fields=_FIELDS, programs=_PROGRAMS, constants={"TYPED": 1}),
    "raw_tp": Form(name="raw_tp", typed=False, fields=_FIELDS, programs=_PROGRAMS),
    "fentry": Form(
        name="fentry",
        typed=True,
        fields={**_FIELDS, "SOCKET_SK": [("socket", "sk", 8)]},
        programs=_CALLS,
        constants={"TYPED": 1, "BY_CALL": 1},
    ),
}


class Sockets(Tabled):
    """The running probe: a Probe (`api.ports`)."""

    name = "sockets"

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded, self.name, "socket calls")

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> Seen:
        """Traffic by cgroup id since the probe was opened. Raises Unavailable once closed."""
        counted = self.count(live, complete=complete)
        return Seen({number: {"net": net} for number, net in decode(counted.ids, counted.rows.tolist()).items()})


def decode(ids: Sequence[int], rows: Sequence[Sequence[int]]) -> dict[int, Net]:
    """Pure: rows of `struct traffic` to traffic by cgroup id."""
    return {
        number: Net(
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
    """What the child is asked to do."""
    here = Path(__file__).parent
    return Job(
        sources=[here / "common.bpf.h", here / "sockets.bpf.c"],
        forms=[_FORMS[name] for name in forms],
        maps=["sockets", "groups", "owners", "lost"],
        constants={"SLOTS": SLOTS, "SEATS": 1, "PLACES": places_for(cpus, 8 * COUNTERS), "FLOWS": FLOWS},
        btf=btf,
        remedy="boot Linux 6.3 or later, which says what each call on a socket has moved, or 5.11 or later with fentry",
    )


def open_sockets(*, forms: Sequence[str] = FORMS, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX) -> Sockets:
    """Start the probe in the first form that the kernel takes. Raises Unavailable with reason and remedy if it takes none."""
    return opened(job(forms, possible_cpus(), btf), Sockets, child_python=child_python)

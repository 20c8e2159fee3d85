"""`system/network`: interfaces and TCP of the node. All counters are since boot."""

from __future__ import annotations

from collections.abc import Mapping

from api.facts import Interface
from api.rates import delta
from api.samples import Snapshot
from exporters.malachite.past import RETRANSMITTED, SENT, History, node_read_at_ns
from exporters.malachite.wire import Wire, named, real, seconds, u64


class Card(Wire, frozen=True):
    """One interface; the client looks at those whose names begin with `eth`. `speeds` is in Mbit/s."""

    name: str
    duplex: str | None = None
    update_time: int | None = None
    receive_bytes: int | None = None
    receive_packets: int | None = None
    receive_errs: int | None = None
    receive_drop: int | None = None
    receive_fifo: int | None = None
    receive_frame: int | None = None
    receive_compressed: int | None = None
    receive_multicast: int | None = None
    transmit_bytes: int | None = None
    transmit_packets: int | None = None
    transmit_errs: int | None = None
    transmit_drop: int | None = None
    transmit_fifo: int | None = None
    transmit_colls: int | None = None
    transmit_carrier: int | None = None
    transmit_compressed: int | None = None
    speeds: int | None = None


class Tcp(Wire, frozen=True):
    """TCP; `tcp_retran` is the percentage of segments sent again in the last five seconds, `tcp_close_wait` sockets."""

    tcp_delay_acks: int | None = None
    tcp_listen_overflows: int | None = None
    tcp_listen_drops: int | None = None
    tcp_abort_on_memory: int | None = None
    tcp_req_q_full_drop: int | None = None
    tcp_retran: float | None = None
    tcp_retrans_segs: int | None = None
    tcp_old_retrans_segs: int | None = None
    tcp_out_segs: int | None = None
    tcp_old_out_segs: int | None = None
    tcp_close_wait: int | None = None
    tcp_timeouts: int | None = None
    tcp_mem_press: int | None = None
    tcp_mem_press_chrono: int | None = None


class Network(Wire, frozen=True):
    """The document."""

    networkcard: tuple[Card, ...]
    tcp: Tcp
    update_time: int | None = None


def network(now: Snapshot, history: History) -> Network:
    """Every interface of the agent's network namespace, and its TCP."""
    at = seconds(node_read_at_ns(now))
    return Network(
        networkcard=tuple(_card(name, card, at) for name, card in sorted(now.node.interfaces.items())),
        tcp=_tcp(now.node.netstat, now.node.tcp_states, history),
        update_time=at,
    )


def _card(name: str, card: Interface, at: int | None) -> Card:
    received = {f"receive_{kind}": count for kind, count in card.received.items()}
    sent = {f"transmit_{kind}": count for kind, count in card.sent.items()}
    return Card(
        name=name,
        duplex=card.duplex or None,
        update_time=at,
        speeds=u64(card.speed_mbit),
        **named(Card, received | sent),
    )


def _tcp(counters: Mapping[str, int], states: Mapping[str, int], history: History) -> Tcp:
    before = history.tcp
    before_sent = None if before is None else before.sent
    before_again = None if before is None else before.again
    sent, again = delta(before_sent, counters.get(SENT)), delta(before_again, counters.get(RETRANSMITTED))
    return Tcp(
        tcp_delay_acks=u64(counters.get("TcpExt.DelayedACKs")),
        tcp_listen_overflows=u64(counters.get("TcpExt.ListenOverflows")),
        tcp_listen_drops=u64(counters.get("TcpExt.ListenDrops")),
        tcp_abort_on_memory=u64(counters.get("TcpExt.TCPAbortOnMemory")),
        tcp_req_q_full_drop=u64(counters.get("TcpExt.TCPReqQFullDrop")),
        tcp_retran=None if sent is None or again is None else real(100 * again / max(sent, 1)),
        tcp_retrans_segs=u64(counters.get(RETRANSMITTED)),
        tcp_old_retrans_segs=u64(before_again),
        tcp_out_segs=u64(counters.get(SENT)),
        tcp_old_out_segs=u64(before_sent),
        tcp_close_wait=u64(states.get("close_wait")),
        tcp_timeouts=u64(counters.get("TcpExt.TCPTimeouts")),
        tcp_mem_press=u64(counters.get("TcpExt.TCPMemoryPressures")),
        tcp_mem_press_chrono=u64(counters.get("TcpExt.TCPMemoryPressuresChrono")),
    )

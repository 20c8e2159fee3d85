"""Traffic per cgroup against programs that send exactly so much, and against the counters of a network namespace."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from agent.sensors.cgroup.hierarchy import Hierarchy
from api.snapshot import SocketTraffic
from probes.sockets import SocketsProbe, decode, open_sockets
from tests.kernel.open_probes import opened, probe_fixture, started_in
from tests.kernel.real_cgroups import TestCgroup, cgroup

pytestmark = pytest.mark.kernel

TRACEPOINTS = ("tp_btf", "raw_tp")
"""Forms that run at tracepoints. Where functions can be probed, in a VM, tests/vm/test_probes_forms.py does that."""
NONE = SocketTraffic(**dict.fromkeys(SocketTraffic.__struct_fields__, 0))
SERVER = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
with connection:
    got = 0
    connection.recv(100, socket.MSG_PEEK)
    while data := connection.recv(65536):
        got += len(data)
print(got, flush=True)
"""
"""Receives until the other side ends; the look at the first bytes must not count them twice."""
CLIENT = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    connection.sendall(b"x" * int(sys.argv[2]))
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(1) == b""
left, right = socket.socketpair()
left.send(b"u" * 1000), right.recv(1000)
"""
"""What goes through the Unix sockets at its end is no network traffic."""
ECHO = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
    server.bind(("127.0.0.1", 0))
    print(server.getsockname()[1], flush=True)
    for _ in range(int(sys.argv[1])):
        server.recv(1, socket.MSG_PEEK)
        data, sender = server.recvfrom(2000)
        server.sendto(data[:7], sender)
"""
PING = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
    client.connect(("127.0.0.1", int(sys.argv[1])))
    for _ in range(int(sys.argv[2])):
        client.send(b"d" * 100)
        assert client.recv(2000) == b"d" * 7
"""
BOTH = """
import json, socket, sys, threading
rounds = int(sys.argv[1])
def books():
    lines = [line.split() for line in open("/proc/net/snmp") if line.startswith("Tcp:")]
    return {name: int(value) for name, value in zip(lines[0][1:], lines[1][1:])}
def serve(server):
    for _ in range(rounds):
        connection, _ = server.accept()
        with connection:
            while connection.recv(65536): pass
before = books()
with socket.create_server(("127.0.0.1", 0)) as server:
    thread = threading.Thread(target=serve, args=(server,))
    thread.start()
    for _ in range(rounds):
        with socket.create_connection(server.getsockname()) as connection:
            connection.sendall(b"x" * 300_000)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
    thread.join()
after = books()
print(json.dumps({name: after[name] - before[name] for name in after}), flush=True)
"""
NOWHERE = """
import json, socket
def books():
    lines = [line.split() for line in open("/proc/net/snmp") if line.startswith("Tcp:")]
    return {name: int(value) for name, value in zip(lines[0][1:], lines[1][1:])}
with socket.socket() as client:
    client.settimeout(3.6)
    try:
        client.connect(("10.99.0.2", 9))
    except TimeoutError:
        pass
    print(json.dumps(books()), flush=True)
"""
"""Connects to a neighbour that never answers; what it sends to begin with is sent again after one second, and again."""


source = probe_fixture(open_sockets, TRACEPOINTS)


def traffic(source: SocketsProbe, group: TestCgroup) -> SocketTraffic:
    counters = source.read({}).cgroups.get(group.id, {}).get("net", NONE)
    assert isinstance(counters, SocketTraffic)
    return counters


def line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


@contextmanager
def ending(*processes: subprocess.Popen[bytes]) -> Iterator[None]:
    """Wait for them at the end; each must have done its work."""
    yield
    for process in processes:
        assert process.wait(timeout=30) == 0
        assert process.stdout is not None
        process.stdout.close()


def test_what_one_sends_the_other_receives_to_the_byte(source: SocketsProbe, hierarchy: Hierarchy) -> None:
    size = 10_000_019
    with cgroup(hierarchy, "client") as sender, cgroup(hierarchy, "server") as other:
        server = started_in(other, SERVER)
        client = started_in(sender, CLIENT, line(server), str(size))
        with ending(client, server):
            assert line(server) == str(size)
        sent, received = traffic(source, sender), traffic(source, other)
    assert (sent.tcp_sent_bytes, sent.tcp_received_bytes) == (size, 0)
    assert (received.tcp_sent_bytes, received.tcp_received_bytes) == (0, size)
    # Each segment of one is received by the other; the first and the last ones are the listener's or no process's.
    assert size / 65536 < sent.tcp_sent_packets < size / 1000
    assert received.tcp_received_packets == pytest.approx(sent.tcp_sent_packets, abs=3)
    assert received.tcp_sent_packets == pytest.approx(sent.tcp_received_packets, abs=3)
    assert sent.udp_sent_packets == received.udp_received_packets == 0
    assert source.problem() is None


def test_a_thousand_datagrams_are_a_thousand_packets(source: SocketsProbe, hierarchy: Hierarchy) -> None:
    with cgroup(hierarchy, "ping") as sender, cgroup(hierarchy, "echo") as other:
        server = started_in(other, ECHO, "1000")
        client = started_in(sender, PING, line(server), "1000")
        with ending(client, server):
            pass
        client_traffic, answered = traffic(source, sender), traffic(source, other)
    assert (client_traffic.udp_sent_packets, client_traffic.udp_sent_bytes) == (1000, 100_000)
    assert (client_traffic.udp_received_packets, client_traffic.udp_received_bytes) == (1000, 7_000)
    assert (answered.udp_received_packets, answered.udp_received_bytes) == (1000, 100_000)
    assert (answered.udp_sent_packets, answered.udp_sent_bytes) == (1000, 7_000)
    assert client_traffic.tcp_sent_bytes == answered.tcp_sent_bytes == 0


def test_segments_are_those_of_the_kernels_own_books(source: SocketsProbe, hierarchy: Hierarchy) -> None:
    """40 connections alone in a network namespace, against its /proc/net/snmp: there, what one sends the other receives.

    The answer to a connection's first segment is the listener's, and no task sent it. InSegs is no measure: it counts
    packets, and one may hold several segments.
    """
    rounds = 40
    with cgroup(hierarchy, "books") as group:
        both = started_in(group, BOTH, str(rounds), prefix=alone("ip link set lo up"))
        with ending(both):
            books = json.loads(line(both))
        own = traffic(source, group)
    assert own.tcp_sent_bytes == own.tcp_received_bytes == rounds * 300_000
    sent = books["OutSegs"] + books["RetransSegs"]
    assert own.tcp_sent_packets == sent - rounds
    assert own.tcp_received_packets == sent
    assert own.tcp_retransmits == books["RetransSegs"]


def alone(setup: str) -> tuple[str, ...]:
    """Start a program in a network namespace of its own, made ready by a shell command."""
    return ("unshare", "--net", "sh", "-ec", f'{setup}; exec "$@"', "sh")


def test_retransmits_are_the_sender_s_regardless_of_the_running_task(
    source: SocketsProbe, hierarchy: Hierarchy
) -> None:
    setup = (
        "ip link add v0 type veth peer name v1; ip addr add 10.99.0.1/24 dev v0; ip link set v0 up; ip link set v1 up;"
        " ip neigh add 10.99.0.2 lladdr 02:00:00:00:00:02 dev v0 nud permanent"
    )
    with cgroup(hierarchy, "nowhere") as group:
        client = started_in(group, NOWHERE, prefix=alone(setup))
        with ending(client):
            books = json.loads(line(client))
        own = traffic(source, group)
    assert books["RetransSegs"] >= 2
    assert own.tcp_retransmits == books["RetransSegs"]
    assert own.tcp_sent_packets == books["OutSegs"] + books["RetransSegs"]
    assert own.tcp_sent_bytes == 0


OLD = """
import signal, socket
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
connection, _ = server.accept()
def turn(times):
    for _ in range(times):
        client.sendall(b"x" * 1000)
        assert len(connection.recv(1000)) == 1000
turn(500)
print("old", flush=True)
signal.sigwait({signal.SIGUSR1})
turn(11)
print("done", flush=True)
"""


@pytest.mark.parametrize("form", TRACEPOINTS)
def test_a_connection_from_before_the_probe_has_no_past(hierarchy: Hierarchy, form: str) -> None:
    """Its 500 turns and more are not counted; from the first look on, its segments are: data, and at most as many answers."""
    with cgroup(hierarchy, "old") as group:
        worker = started_in(group, OLD)
        assert line(worker) == "old"
        with opened(open_sockets, form) as source, ending(worker):
            assert traffic(source, group) == NONE
            worker.send_signal(signal.SIGUSR1)
            assert line(worker) == "done"
            assert worker.wait() == 0
            own = traffic(source, group)
    assert (own.tcp_sent_bytes, own.tcp_received_bytes) == (11_000, 11_000)
    assert 10 <= own.tcp_sent_packets <= 30
    assert 10 <= own.tcp_received_packets <= 30


def test_a_row_is_what_the_source_says() -> None:
    net = decode([7], [list(range(1, 10))])[7]
    assert (net.tcp_sent_bytes, net.tcp_received_bytes, net.tcp_sent_packets, net.tcp_received_packets) == (1, 2, 3, 4)
    assert (net.udp_sent_bytes, net.udp_received_bytes, net.udp_sent_packets, net.udp_received_packets) == (5, 6, 7, 8)
    assert net.tcp_retransmits == 9

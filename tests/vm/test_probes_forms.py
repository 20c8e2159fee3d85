"""Every probe in every form on this kernel, and all forms at the same time on the same events.

Whatever counts things must count the same things: all forms are attached at the same time, to a workload of known size.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from agent.sensors.cgroup.hierarchy import Hierarchy
from api.snapshot import SocketTraffic, Wakeups
from probes import registry
from probes.migrations import numa_nodes_of_cpus
from probes.per_cgroup_probe import ROOT_CGROUP_ID
from tests.builders.waiting import until
from tests.kernel.open_probes import PINNED, having, started_in
from tests.kernel.real_cgroups import TestCgroup, cgroup
from tests.kernel.test_sockets import CLIENT, ECHO, PING, SERVER, ending, line
from tests.kernel.test_wakeups import FIRST, NEXT, start
from tests.vm.conftest import Programs, forms_of

pytestmark = pytest.mark.vm_probes

NAMES = ("runqlat", *(name for name in registry.PROBE_NAMES if name != "blame"))
"""Blame has the programs of run-queue waits."""
MISSING = {
    "6.1": {
        # Since 6.3.
        ("sockets", "tp_btf"): "no typedef btf_trace_sock_send_length",
        ("sockets", "raw_tp"): "no typedef btf_trace_sock_send_length",
        # Since 6.6.
        ("throttles", "tp_btf"): "no member throttled_clock_self_time",
        ("throttles", "raw_tp"): "no member throttled_clock_self_time",
    },
    "6.12": {},
}
"""What these kernels do not have, and in which words the loader says so."""
BYTES, DATAGRAMS, TURNS, MOVES = 1_000_003, 200, 300, 20


IN_FUNCTIONS = """
from probes.loader import Compiler, sharing
from probes.oomkill import open_oomkill
from probes.sockets import open_sockets
from probes.throttles import open_throttles
with Compiler(timeout_s=300.0) as compiler, sharing(compiler):
    for opener, form in (
        (open_throttles, "fentry"), (open_throttles, "kprobe"), (open_oomkill, "fentry"), (open_oomkill, "kprobe"),
        (open_sockets, "fentry"),
    ):
        probe = opener(forms=(form,))
        probe.read({1: "/"})
        probe.close()
        print(probe.name, probe.form)
"""
"""All that are attached to functions of the kernel."""


def same(read: Mapping[str, Any]) -> Any:
    """What all forms have read."""
    assert read
    assert all(value == next(iter(read.values())) for value in read.values()), read
    return next(iter(read.values()))


@pytest.fixture(scope="module", autouse=True)
def _all_at_once(programs: Programs) -> None:
    programs.open(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_form_loads_but_those_that_this_kernel_lacks(programs: Programs, series: str, name: str) -> None:
    opened = programs(name)
    refused = {form: reason for (probe, form), reason in programs.refused.items() if probe == name}
    expected = {form: words for (probe, form), words in MISSING[series].items() if probe == name}
    assert refused.keys() == expected.keys(), refused
    assert all(words in refused[form] for form, words in expected.items()), refused
    assert opened.keys() == set(forms_of(name)) - expected.keys()
    assert {form: probe.form for form, probe in opened.items()} == {form: form for form in opened}
    assert all(probe.problem() is None for probe in opened.values())


@pytest.fixture
def paranoid() -> Iterator[None]:
    """At 3, its default there, Debian's 6.12 requires SYS_ADMIN to open a perf event, including kprobes."""
    setting = Path("/proc/sys/kernel/perf_event_paranoid")
    before = setting.read_text()
    setting.write_text("2")
    yield
    setting.write_text(before)


@pytest.mark.usefixtures("paranoid")
def test_functions_can_be_probed_with_the_capabilities_of_every_other_probe() -> None:
    lines = having(registry.BPF_CAPABILITIES, IN_FUNCTIONS).splitlines()
    assert lines == ["throttles fentry", "throttles kprobe", "oomkill fentry", "oomkill kprobe", "sockets fentry"]


def test_blame_comes_from_the_programs_that_count_waits(programs: Programs) -> None:
    assert {form: waits.has_blame for form, waits in programs("runqlat").items()} == {
        "tp_btf": True, "raw_tp": True, "classic": False,
    }  # fmt: skip


def snmp(protocol: str, name: str) -> int:
    """One counter of /proc/net/snmp."""
    names, values = (
        line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith(f"{protocol}:")
    )
    return int(values[names.index(name)])


def test_what_one_sends_the_other_receives_in_every_form(programs: Programs, hierarchy: Hierarchy) -> None:
    """Bytes and segments of a connection over loopback, and datagrams there and back. What a slow machine takes for lost is
    sent again, and the kernel counts it too."""
    probes, retransmits = programs("sockets"), snmp("Tcp", "RetransSegs")
    with cgroup(hierarchy, "sends") as item, cgroup(hierarchy, "receives") as other:
        server = started_in(other, SERVER)
        client = started_in(item, CLIENT, line(server), str(BYTES))
        with ending(client, server):
            assert line(server) == str(BYTES)
        echo = started_in(other, ECHO, str(DATAGRAMS))
        ping = started_in(item, PING, line(echo), str(DATAGRAMS))
        with ending(ping, echo):
            pass
        observed = {form: probe.read({}).cgroups for form, probe in probes.items()}
        sent, received = (
            same({form: result[group.id]["net"] for form, result in observed.items()}) for group in (item, other)
        )
        retransmits = snmp("Tcp", "RetransSegs") - retransmits
    assert isinstance(sent, SocketTraffic)
    assert (sent.tcp_sent_bytes, sent.tcp_received_bytes) == (BYTES, 0)
    assert (received.tcp_sent_bytes, received.tcp_received_bytes) == (0, BYTES)
    assert received.tcp_received_packets == pytest.approx(sent.tcp_sent_packets, abs=3)
    assert (sent.udp_sent_packets, sent.udp_sent_bytes) == (DATAGRAMS, 100 * DATAGRAMS)
    assert (sent.udp_received_packets, sent.udp_received_bytes) == (DATAGRAMS, 7 * DATAGRAMS)
    assert (received.udp_received_bytes, received.udp_sent_bytes) == (100 * DATAGRAMS, 7 * DATAGRAMS)
    assert sent.tcp_retransmits + received.tcp_retransmits == retransmits


@pytest.mark.parametrize("across", [True, False], ids=["nodes", "cpus"])
def test_moves_to_another_node_count_and_those_within_one_do_not(
    programs: Programs, hierarchy: Hierarchy, *, across: bool
) -> None:
    probes, nodes = programs("migrations"), numa_nodes_of_cpus()
    first = min(nodes)
    second = next(cpu for cpu in nodes if cpu != first and (nodes[cpu] != nodes[first]) == across)
    with cgroup(hierarchy, "moved") as group:
        mover = group.start([sys.executable, "-c", PINNED, str(first)])
        until(lambda: os.sched_getaffinity(mover.pid) == {first})
        live = {group.id: group.path}
        before = {form: probe.read(live).cgroups[group.id]["numa_migrations"] for form, probe in probes.items()}
        for turn in range(MOVES):
            os.sched_setaffinity(mover.pid, {second if turn % 2 == 0 else first})
            time.sleep(0.02)
        moved = same(
            {
                form: probe.read(live).cgroups[group.id]["numa_migrations"] - before[form]
                for form, probe in probes.items()
            }
        )
    assert moved == (MOVES if across else 0)


def test_each_byte_there_and_back_is_a_wakeup_each_way(programs: Programs, hierarchy: Hierarchy) -> None:
    """Requester and responder both sleep before each byte, so that each byte finds its reader asleep."""
    probes = programs("wakeups")
    with cgroup(hierarchy, "asks") as asks, cgroup(hierarchy, "answers") as answers:
        (there, to), (back, answer) = os.pipe(), os.pipe()
        client = start(asks, FIRST, back, to, TURNS, fds=(back, to))
        server = start(answers, NEXT, there, answer, 1, fds=(there, answer))
        for fd in (there, to, back, answer):
            os.close(fd)
        live = {ROOT_CGROUP_ID: "/", asks.id: asks.path, answers.id: answers.path}
        for probe in probes.values():
            probe.read(live)
        slept = (client.slept(), server.slept())
        assert client.process.stdin is not None
        assert client.process.stdout is not None
        client.process.stdin.write(b"x")
        client.process.stdin.flush()
        assert client.process.stdout.readline() == b"done\n"
        slept = (client.slept() - slept[0], server.slept() - slept[1])
        result = {form: probe.read(live).cgroups for form, probe in probes.items()}
        wakeups = {
            form: (observed[asks.id]["wakeups"], observed[answers.id]["wakeups"]) for form, observed in result.items()
        }
    counts = same({form: (counted(wakeup, answers), counted(text, asks)) for form, (wakeup, text) in wakeups.items()})
    assert slept[0] >= 2 * TURNS * 0.96, "each turn is two sleeps of the requester"
    assert counts == pytest.approx((TURNS, TURNS), rel=0.04)


def counted(wakeups: object, by: TestCgroup) -> int:
    assert isinstance(wakeups, Wakeups)
    return wakeups.by_cgroup[by.path].count


def flood(datagrams: int) -> None:
    """To ourselves over loopback."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        receiver.bind(("127.0.0.1", 0))
        sender.connect(receiver.getsockname())
        for _ in range(datagrams):
            sender.send(b"x" * 1000)


def test_a_flood_over_loopback_is_softirq_time_of_receiving_in_every_form(programs: Programs) -> None:
    """Each form reads the clock for itself, in the middle of the other one: within a third of each other."""
    probes = programs("softirq")
    before = {form: net_rx_ns(probe) for form, probe in probes.items()}
    runs = net_rx_runs()
    flood(3000)
    spent = {form: net_rx_ns(probe) - before[form] for form, probe in probes.items()}
    runs = net_rx_runs() - runs
    assert runs >= 2000, "nearly each datagram is received by itself"
    assert min(spent.values()) > runs * 1000, spent
    assert max(spent.values()) <= 1.5 * min(spent.values()), spent


def net_rx_ns(probe: Any) -> int:
    return sum(kinds["NET_RX"] for kinds in probe.read({}).node["softirq_ns"].values())


def net_rx_runs() -> int:
    (row,) = (line.split() for line in Path("/proc/softirqs").read_text().splitlines() if "NET_RX:" in line)
    return reduce(lambda sum_, word: sum_ + int(word), row[1:], 0)

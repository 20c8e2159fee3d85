"""Softirq time against a flood of packets whose receiving is softirq work, and against the kernel's own sum."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from probes.softirq import FORMS, VECTORS, SoftIrqProbe, decode, open_softirq
from tests.kernel.open_probes import probe_fixture

pytestmark = pytest.mark.kernel

Times = Mapping[int, Mapping[str, int]]


source = probe_fixture(open_softirq, FORMS)


def times(source: SoftIrqProbe) -> Times:
    names = source.read({}).node["softirq_ns"]
    assert isinstance(names, dict)
    return names


def grown(before: Times, after: Times, vector: str) -> int:
    return sum(kinds[vector] - before.get(cpu, {}).get(vector, 0) for cpu, kinds in after.items())


def flood(seconds: float) -> int:
    """Datagrams to ourselves over loopback, which are received in NET_RX; how many."""
    sent = 0
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        receiver.bind(("127.0.0.1", 0))
        sender.connect(receiver.getsockname())
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(100):
                sender.send(b"x" * 1000)
            sent += 100
    return sent


def accounted_s() -> float:
    """Softirq time of all CPUs as /proc/stat has it."""
    return int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[7]) / os.sysconf("SC_CLK_TCK")


def test_a_flood_on_loopback_is_time_in_net_rx(source: SoftIrqProbe) -> None:
    """At least 0.3 us and at most 20 us a datagram of 1,000 bytes, and less than the time that the flood took."""
    times(source)
    before, started = times(source), time.monotonic_ns()
    sent = flood(1.0)
    after, elapsed = times(source), time.monotonic_ns() - started
    spent = grown(before, after, "NET_RX")
    assert 300 * sent <= spent <= 20_000 * sent
    assert spent < elapsed * os.sysconf("SC_NPROCESSORS_ONLN")


def test_a_second_without_packets_has_little_net_rx(source: SoftIrqProbe) -> None:
    """The contrast to the flood: what grows above is the flood's."""
    before = times(source)
    sent = flood(0.5)
    between = times(source)
    time.sleep(0.5)
    after = times(source)
    assert sent > 0
    assert grown(between, after, "NET_RX") < grown(before, between, "NET_RX") / 4


def test_the_sum_is_what_the_kernel_accounts(source: SoftIrqProbe) -> None:
    """/proc/stat is exact only where the kernel was built with IRQ_TIME_ACCOUNTING, else it samples at ticks: within a half."""
    before, accounted = times(source), accounted_s()
    flood(3.0)
    after, accounted = times(source), accounted_s() - accounted
    own = sum(grown(before, after, vector) for vector in VECTORS) / 1e9
    if accounted < 0.2:
        pytest.skip(f"/proc/stat has {accounted} s of softirq for a flood of 3 s: this kernel does not account it")
    assert own == pytest.approx(accounted, rel=0.5)


def test_timers_tick_on_every_cpu_that_is_counted(source: SoftIrqProbe) -> None:
    time.sleep(0.3)
    names = times(source)
    assert names.keys() <= set(range(os.cpu_count() or 1))
    assert all(kinds.keys() == set(VECTORS) for kinds in names.values())
    assert all(ns < 10**9 for kinds in names.values() for ns in kinds.values()), "none is an absolute time"


def test_names_are_those_of_the_kernel() -> None:
    listed = [line.split(":")[0].strip() for line in Path("/proc/softirqs").read_text().splitlines()[1:]]
    assert listed == list(VECTORS)


def test_cpus_that_never_ran_a_softirq_are_left_out() -> None:
    row = [0] * len(VECTORS)
    assert decode((0, 4), [row, [*row[:-1], 7]]) == {4: {**dict.fromkeys(VECTORS, 0), "RCU": 7}}

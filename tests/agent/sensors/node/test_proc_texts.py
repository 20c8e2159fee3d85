"""Texts of /proc and /sys: odd ones, and those of this kernel."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.sensors.cgroup.hierarchy import parse_mountinfo
from agent.sensors.kernel_files import ProcSysFiles
from agent.sensors.node import machine, node_cpu, node_disks, node_memory, node_network
from api.interfaces import Unavailable
from tests.agent.sensors import machine_texts

BUDDY = machine_texts.BUDDYINFO.encode()


def fragmentation(text: bytes) -> dict[int, dict[int, int]]:
    zones = node_memory.parse_zoneinfo(machine_texts.ZONEINFO.encode())
    return node_memory.external_fragmentation(zones, node_memory.parse_buddyinfo(text))


def mount_points(text: bytes) -> list[str]:
    return [mount.point for mount in node_disks.local_mounts(parse_mountinfo(text))]


PARSERS: dict[str, tuple[Callable[[bytes], Any], bytes]] = {
    "schedstat": (node_cpu.parse_run_delays, machine_texts.SCHEDSTAT.encode()),
    "cpuinfo_khz": (node_cpu.parse_cpuinfo_khz, machine_texts.CPUINFO.encode()),
    "interrupts": (node_cpu.parse_interrupts, machine_texts.INTERRUPTS.encode()),
    "zoneinfo": (node_memory.parse_zoneinfo, machine_texts.ZONEINFO.encode()),
    "buddyinfo": (fragmentation, BUDDY),
    "snmp": (node_network.parse_protocol_counters, machine_texts.SNMP.encode()),
    "sockstat": (node_network.parse_sockstat, machine_texts.SOCKSTAT.encode()),
    "net/dev": (node_network.parse_net_dev, machine_texts.NET_DEV.encode()),
    "diskstats": (node_disks.parse_diskstats, machine_texts.DISKSTATS.encode()),
    "mountinfo": (mount_points, machine_texts.MOUNTINFO.encode()),
    "first_cpu": (lambda text: machine.cpu_codename(machine.parse_first_cpu(text)), machine_texts.CPUINFO.encode()),
    "cpulist": (lambda text: machine.parse_cpus(text.decode("ascii", "replace")), b"0-3,8\n"),
    "distance": (lambda text: node_memory.parse_numa_distances(text, [0, 2]), b"10 20\n"),
}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/proc/interrupts", "interrupts"),
        ("/proc/zoneinfo", "zoneinfo"),
        ("/proc/net/snmp", "snmp"),
        ("/proc/net/netstat", "snmp"),
        ("/proc/net/sockstat", "sockstat"),
        ("/proc/net/dev", "net/dev"),
        ("/proc/diskstats", "diskstats"),
        ("/sys/devices/system/node/node0/cpulist", "cpulist"),
    ],
)
def test_this_kernels_own_texts_are_understood(path: str, name: str) -> None:
    if not Path(path).exists():
        pytest.skip(f"this kernel has no {path}")
    assert PARSERS[name][0](Path(path).read_bytes())


@pytest.mark.parametrize(
    ("free", "order", "index"),
    [
        ((0, 0, 0), 1, 0),
        ((5, 0, 1), 2, -1000),
        ((5, 0, 1), 3, 1000 - (1000 + 9000 // 8) // 6),
        # 64 single pages, none adjacent to another: only fragmentation prevents a pair.
        ((64, 0, 0), 1, 1000 - (1000 + 32000) // 64),
        # One page: want of memory, as far as an order of 2 is concerned.
        ((1, 0, 0), 2, 1000 - (1000 + 250) // 1),
    ],
)
def test_the_fragmentation_index_is_the_kernels(free: tuple[int, ...], order: int, index: int) -> None:
    assert node_memory.fragmentation_index(free, order) == index


def test_debugfs_shows_the_same_fragmentation() -> None:
    shown = Path("/sys/kernel/debug/extfrag/extfrag_index")
    if not os.access(shown, os.R_OK):
        pytest.skip("debugfs is not mounted, or not for us: mount -t debugfs debugfs /sys/kernel/debug")
    for _ in range(20):
        before = Path("/proc/buddyinfo").read_bytes()
        text = shown.read_text()
        if before == Path("/proc/buddyinfo").read_bytes():
            break
    else:
        pytest.skip("free memory did not stand still for the time of two reads")
    reported = {}
    for line in text.splitlines():
        words = line.replace(",", "").split()
        reported[int(words[1]), words[3]] = [round(float(word) * 1000) for word in words[4:]]
    free = node_memory.parse_buddyinfo(before)
    assert {
        where: [node_memory.fragmentation_index(counts, order) for order in range(len(counts))]
        for where, counts in free.items()
    } == reported


def test_one_mount_point_of_each_device_of_this_machine() -> None:
    chosen = node_disks.local_mounts(parse_mountinfo(machine_texts.MOUNTINFO.encode()))
    assert [(mount.point, mount.source) for mount in chosen] == [("/", "/dev/vda"), ("/data disk", "/dev/vdc")]


def test_interfaces_without_a_blank_and_with_a_colon_in_the_name() -> None:
    text = b"eth0:1:5 1 1 1 1 1 1 1 6 1 1 1 1 1 1 1\n../x: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n"
    counts = node_network.parse_net_dev(text)
    assert {name: (received["bytes"], sent["bytes"]) for name, (received, sent) in counts.items()} == {"eth0:1": (5, 6)}


@pytest.mark.parametrize(
    ("vendor", "family", "model", "stepping", "name"),
    [
        ("GenuineIntel", 6, 0x55, 4, "Intel_SkyLake"),
        ("GenuineIntel", 6, 0x55, 7, "Intel_CascadeLake"),
        ("GenuineIntel", 6, 0x55, 11, "Intel_CooperLake"),
        ("GenuineIntel", 6, 0x6A, 6, "Intel_IceLake"),
        ("GenuineIntel", 6, 0x8F, 8, "Intel_SapphireRapids"),
        ("GenuineIntel", 6, 0xCF, 2, "Intel_EmeraldRapids"),
        ("GenuineIntel", 6, 0x01, 2, ""),
        ("AuthenticAMD", 0x17, 0x31, 0, "AMD_K17Zen2"),
        ("AuthenticAMD", 0x19, 0x01, 1, "AMD_K19Zen3"),
        ("AuthenticAMD", 0x19, 0x11, 1, "AMD_K19Zen4"),
        ("AuthenticAMD", 0x19, 0xA0, 2, "AMD_K19Zen4"),
        ("AuthenticAMD", 0x1A, 0x02, 1, "AMD_K1AZen5"),
        ("AuthenticAMD", 0x0F, 0x02, 1, ""),
        ("HygonGenuine", 0x18, 0x00, 1, ""),
    ],
)
def test_generations_are_spelled_as_malachite_does(
    vendor: str, family: int, model: int, stepping: int, name: str
) -> None:
    text = f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\nstepping\t: {stepping}\n"
    assert machine.cpu_codename(machine.parse_first_cpu(text.encode())) == name


@pytest.mark.parametrize(
    ("files", "is_vm"),
    [
        ({"proc/cpuinfo": "flags\t: fpu hypervisor vme\n"}, True),
        ({"proc/cpuinfo": "flags\t: fpu vme\n", "sys/class/dmi/id/sys_vendor": "QEMU\n"}, False),
        ({"proc/cpuinfo": "CPU part\t: 0xd0c\n", "sys/class/dmi/id/sys_vendor": "QEMU\n"}, True),
        ({"proc/cpuinfo": "CPU part\t: 0xd0c\n", "sys/class/dmi/id/sys_vendor": "Dell Inc.\n"}, False),
        ({"sys/hypervisor/type": "xen\n"}, True),
        ({}, None),
    ],
)
def test_a_virtual_machine_is_detected_by_its_cpu_or_its_firmware(
    tmp_path: Path, files: dict[str, str], is_vm: bool | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine.read_machine(ProcSysFiles(tmp_path / "proc", tmp_path / "sys")).is_vm is is_vm


def counted() -> dict[str, int]:
    try:
        return node_network.count_tcp_states()
    except Unavailable as missing:
        pytest.skip(missing.reason)


def test_sockets_are_counted_by_state() -> None:
    """Five listeners more, and three connections whose other end has closed."""
    before = counted()
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    listeners.append(
        socket.create_server(("::1", 0), family=socket.AF_INET6) if socket.has_ipv6 else socket.create_server(("", 0))
    )
    own_key = [socket.create_connection(listeners[0].getsockname()) for _ in range(3)]
    other_key = [listeners[0].accept()[0] for _ in own_key]
    try:
        for connection in other_key:
            connection.close()
        for connection in own_key:
            assert connection.recv(1) == b""
        # The other end may put off its acknowledgement for 40 ms, and a busy machine everything.
        deadline = time.monotonic() + 10
        while (after := counted())["close_wait"] - before["close_wait"] != 3 and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        for end in (*own_key, *other_key, *listeners):
            end.close()
    assert after["listen"] - before["listen"] == 5
    assert after["close_wait"] - before["close_wait"] == 3
    # Others' connections come and go in these states meanwhile.
    assert after["fin_wait1"] + after["fin_wait2"] >= 3


@given(answer=st.binary(max_size=100))
def test_any_answer_of_netlink_is_read_or_refused(answer: bytes) -> None:
    try:
        states, _ = node_network.parse_sock_diag(answer)
    except OSError:
        return
    assert set(states) <= node_network.TCP_STATES.keys()


def test_an_answer_of_netlink_that_is_an_error_is_one() -> None:
    with pytest.raises(OSError, match="No such file"):
        node_network.parse_sock_diag(struct.pack("=IHHIIi", 20, 2, 0, 0, 0, -2))

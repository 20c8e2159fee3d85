"""The node reader on a declared machine, on one that lacks everything, and on this one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent.sensors.node.node_reader import NodeReader, _boot_id
from api.snapshot import Disk, Interface, L3Monitor, Machine, MemoryZone, NodeSample, NumaNode
from tests.agent.sensors import kernel_trees
from tests.agent.sensors.machine_texts import MORE_PROC, PROC, SYS

S = 1_000_000_000


def machine(root: Path) -> NodeReader:
    kernel_trees.make(root / "proc", PROC | MORE_PROC)
    kernel_trees.make(root / "sys", SYS)
    return NodeReader(root / "proc", root / "sys", live=False)


def test_what_is_read_every_tick(tmp_path: Path) -> None:
    reader = machine(tmp_path)
    sample = reader.read()
    assert sample.cpu is not None
    # A tick is 10 ms: 300 user and 100 system ticks are 4 s of work in 10 s.
    assert (sample.cpu.busy_ns, sample.cpu.steal_ns, sample.cpu.total_ns) == (4 * 10**9, 10**9, 10 * 10**9)
    assert {cpu: times.busy_ns for cpu, times in sample.per_cpu.items()} == {0: 2_500_000_000, 1: 1_500_000_000}
    assert sample.load == (0.84, 1.82, 1.08)
    assert (sample.memory_total_bytes, sample.memory_available_bytes) == (2 << 20, 1 << 20)
    stalls = [
        p and (p.some_us, p.some_avg60) for p in (sample.cpu_pressure, sample.memory_pressure, sample.io_pressure)
    ]
    assert stalls == [(7000, 0.75), (8000, 0.75), (9000, 0.75)]
    assert (sample.procs_running, sample.procs_blocked) == (2, 1)
    assert sample.run_delay_ns == {0: 1500, 1: 2500}
    assert sample.timeslices == {0: 7, 1: 7}
    assert sample.cpu_khz == {0: 2_596_120, 1: 3_100_500}
    assert sample.meminfo["MemFree"] == 100 * 1024
    assert sample.meminfo["HugePages_Total"] == 3
    assert sample.power_uj == {"package-0": 262143328850, "package-0/dram": 5_000_000}
    assert sample.l3 == (
        L3Monitor(id=0, group="", total_bytes=101, local_bytes=99, occupancy_bytes=16234000),
        L3Monitor(id=0, group="batch", total_bytes=11, local_bytes=9),
        L3Monitor(id=0, group="batch/mon_groups/pod", total_bytes=7, local_bytes=6),
    )
    assert (reader.boot_id, reader.problems()) == ("b7c1", ())
    assert sample.machine == Machine(codename="Intel_CascadeLake", is_vm=True)
    reader.close()


def test_however_many_groups_are_monitored_those_that_have_all_traffic_are_read(tmp_path: Path) -> None:
    reader = machine(tmp_path)
    pods = [f"fs/resctrl/mon_groups/pod{number}" for number in range(100)]
    for group in (*pods, "fs/resctrl/batch"):
        data = tmp_path / "sys" / group / "mon_data/mon_L3_00"
        data.mkdir(parents=True, exist_ok=True)
        for name in ("mbm_total_bytes", "mbm_local_bytes"):
            (data / name).write_text("5\n")
    result = [monitor.group for monitor in reader.read().l3]
    reader.close()
    assert result[:2] == ["", "batch"]
    assert len(result) == 64


def test_memory_by_node_and_zone(tmp_path: Path) -> None:
    sample = machine(tmp_path).read()
    assert sample.vmstat == {"nr_free_pages": 5, "pgsteal_kswapd": 7}
    assert sample.numa == {
        0: NumaNode(
            cpus=(0, 1), distances={0: 10, 2: 20}, meminfo={"MemTotal": 4096, "MemUsed": 1024},
            vmstat={"nr_free_pages": 77},
        ),
        2: NumaNode(distances={0: 20, 2: 10}),
    }  # fmt: skip
    assert sample.zones == (
        MemoryZone(node=0, name="DMA", free=3840, min=40, low=50, high=60, managed=3840),
        MemoryZone(node=1, name="Normal", free=612, min=1000, low=1250, high=1500, managed=812000),
    )
    # 562 free blocks of 612 pages: for order 2, 1000 - (1000 + 612000 / 4) / 562.
    assert sample.fragmentation == {
        0: dict.fromkeys(range(4), -1000),
        1: {0: -1000, 1: -1000, 2: 1000 - 154000 // 562, 3: 1000 - 77500 // 562},
    }
    assert sample.free_blocks == {0: {0: 0, 1: 0, 2: 1, 3: 1}, 1: {0: 512, 1: 50, 2: 0, 3: 0}}
    assert sample.sysctl == {
        "vm.watermark_scale_factor": 10,
        "net.ipv4.tcp_mem.min": 287901,
        "net.ipv4.tcp_mem.pressure": 383868,
        "net.ipv4.tcp_mem.max": 575802,
    }


def test_disks_and_network(tmp_path: Path) -> None:
    sample = machine(tmp_path).read()
    assert sample.disks == {
        "vda": Disk(
            number="254:0", reads=998846, read_bytes=43106690 * 512, read_ns=1368608_000_000, writes=158365,
            write_bytes=10694584 * 512, write_ns=54925_000_000, busy_ns=120124_000_000, in_flight=3,
            kind="VIRTIO", wbt_lat_us=75000,
        ),
        "vda1": Disk(
            number="254:1", reads=5, read_bytes=4096, read_ns=1_000_000, writes=0, write_bytes=0, write_ns=0,
            busy_ns=1_000_000, in_flight=0,
        ),
        "nvme0n1": Disk(
            number="259:0", reads=1, read_bytes=4096, read_ns=2_000_000, writes=3, write_bytes=8192, write_ns=4_000_000,
            busy_ns=5_000_000, in_flight=0, kind="NVME", wbt_lat_us=2000,
        ),
    }  # fmt: skip
    received = {
        "bytes": 871644666,
        "packets": 34723,
        "errs": 1,
        "drop": 2,
        "fifo": 3,
        "frame": 4,
        "compressed": 5,
        "multicast": 6,
    }
    sent = {
        "bytes": 2422506,
        "packets": 25104,
        "errs": 7,
        "drop": 8,
        "fifo": 9,
        "colls": 10,
        "carrier": 11,
        "compressed": 12,
    }
    assert sample.interfaces.keys() == {"lo", "eth0"}
    assert sample.interfaces["eth0"] == Interface(
        received=received, sent=sent, duplex="full", speed_mbit=25000, carrier=True
    )
    lo = sample.interfaces["lo"]
    assert (lo.sent["bytes"], lo.speed_mbit, lo.carrier) == (1000, None, None)
    assert sample.netstat == {
        "Ip.Forwarding": 2, "Ip.DefaultTTL": 64, "Ip.InReceives": 17563317,
        "Tcp.RtoAlgorithm": 1, "Tcp.CurrEstab": 3, "Tcp.RetransSegs": 234,
        "TcpExt.SyncookiesSent": 0, "TcpExt.ListenDrops": 17, "IpExt.InOctets": 5,
        "sockstat.sockets.used": 21, "sockstat.TCP.inuse": 2, "sockstat.TCP.orphan": 0, "sockstat.TCP.tw": 6,
        "sockstat.TCP.alloc": 2, "sockstat.TCP.mem": 9, "sockstat.FRAG.inuse": 0, "sockstat.FRAG.memory": 0,
    }  # fmt: skip
    assert sample.interrupts == {0: 39 + 7960 + 100, 1: 201}


def test_a_card_of_a_bond_is_known_as_one(tmp_path: Path) -> None:
    reader = machine(tmp_path)
    assert not reader.read().interfaces["eth0"].bonded
    (tmp_path / "sys/class/net/eth0/bonding_slave").mkdir()
    reader = machine(tmp_path)
    assert (reader.read().interfaces["eth0"].bonded, reader.read().interfaces["lo"].bonded) == (True, False)


def test_slow_files_are_as_old_as_the_sample_says(tmp_path: Path) -> None:
    reader = machine(tmp_path)
    first = reader.read(10 * S, 70)
    kernel_trees.make(tmp_path / "proc", {"vmstat": "nr_free_pages 6\n", "loadavg": "1 2 3\n"})
    later = reader.read(14 * S, 74)
    assert (later.load, later.vmstat, later.files_read_at_ns) == ((1.0, 2.0, 3.0), first.vmstat, 70)
    last = reader.read(15 * S, 75)
    assert (last.vmstat, last.files_read_at_ns) == ({"nr_free_pages": 6}, 75)
    reader.close()


def test_what_is_missing_is_empty_and_named(tmp_path: Path) -> None:
    reader = NodeReader(tmp_path, tmp_path / "sys", live=False)
    assert reader.read(wall_time_ns=5) == NodeSample(files_read_at_ns=5)
    assert reader.boot_id == ""
    (problem,) = reader.problems()
    assert not problem.ok
    for name in PROC.keys() - {"sys/kernel/random/boot_id"}:
        assert f"{name} is missing" in problem.error
    kernel_trees.make(tmp_path, {name: text for name, text in PROC.items() if not name.startswith("pressure")})
    assert reader.read(now_ns=1 << 62).load == (0.84, 1.82, 1.08)
    (problem,) = reader.problems()
    assert problem.error == "pressure/cpu is missing; pressure/memory is missing; pressure/io is missing"
    assert problem.remedy == "boot with psi=1, on a kernel with CONFIG_PSI"
    reader.close()


def test_a_boot_id_that_is_none_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "sys/kernel/random/boot_id"
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    assert _boot_id(tmp_path) == ""
    path.unlink()
    path.write_text("b7c1\n")
    assert _boot_id(tmp_path) == "b7c1"
    path.write_bytes(bytes(1 << 20))
    assert _boot_id(tmp_path) == ""


@pytest.mark.parametrize("name", sorted(PROC.keys() - {"sys/kernel/random/boot_id"}))
def test_a_file_that_fails_costs_its_own_fields_alone(tmp_path: Path, name: str) -> None:
    complete = machine(tmp_path).read(wall_time_ns=1)
    (tmp_path / "proc" / name).unlink()
    (tmp_path / "proc" / name).mkdir()
    reader = NodeReader(tmp_path / "proc", tmp_path / "sys", live=False)
    sample = reader.read(wall_time_ns=1)
    lost = {field for field in NodeSample.__struct_fields__ if getattr(sample, field) != getattr(complete, field)}
    assert lost
    assert len(lost) <= 4, lost
    (problem,) = reader.problems()
    assert problem.error == f"{name}: Is a directory"


def test_missing_optional_hardware_is_no_problem_but_is_listed(tmp_path: Path) -> None:
    kernel_trees.make(tmp_path / "proc", PROC)
    reader = NodeReader(tmp_path / "proc", tmp_path / "sys", live=False)
    reader.read()
    assert reader.problems() == ()
    assert {lack.reason for _, lack in reader.lacks()} == {
        "there is no /proc/schedstat",
        "no frequency of any CPU is known",
        "no energy counters of RAPL can be read",
        "there is no resctrl file system with monitors",
        "sysfs has no NUMA nodes",
    }
    reader.close()


def test_a_file_that_a_container_runtime_hides_is_no_failure(tmp_path: Path) -> None:
    reader = machine(tmp_path)
    (tmp_path / "proc/interrupts").unlink()
    (tmp_path / "proc/interrupts").symlink_to("/dev/null")
    assert reader.read(wall_time_ns=1).interrupts == {}
    assert reader.problems() == ()
    assert "/proc/interrupts is hidden" in {lack.reason for _, lack in reader.lacks()}
    reader.close()


@pytest.mark.parametrize("garbage", ["", "\0\0", "cpu one two\n", "9" * 5000, "some avg10=\n"])
def test_garbage_is_named_and_does_not_raise(tmp_path: Path, garbage: str) -> None:
    kernel_trees.make(tmp_path / "proc", dict.fromkeys(PROC | MORE_PROC, garbage))
    kernel_trees.make(tmp_path / "sys", dict.fromkeys(SYS, garbage))
    reader = NodeReader(tmp_path / "proc", tmp_path / "sys", live=False)
    sample = reader.read()
    assert (sample.cpu, sample.per_cpu, sample.cpu_pressure, sample.memory_total_bytes) == (None, {}, None, None)
    assert (sample.zones, sample.disks, sample.interfaces, sample.interrupts) == ((), {}, {}, {})
    for name in ("stat", "meminfo", "loadavg", "pressure/io", "zoneinfo", "diskstats", "net/dev"):
        assert f"{name} has an unexpected format" in reader.problems()[0].error
    reader.close()


def test_cpufreq_comes_before_what_cpuinfo_says(tmp_path: Path) -> None:
    kernel_trees.make(tmp_path / "sys", {"devices/system/cpu/cpu1/cpufreq/scaling_cur_freq": "1800000\n"})
    reader = machine(tmp_path)
    assert reader.read().cpu_khz == {1: 1_800_000}
    kernel_trees.make(tmp_path / "sys", {"devices/system/cpu/cpu1/cpufreq/scaling_cur_freq": "1900000\n"})
    assert reader.read().cpu_khz == {1: 1_900_000}
    reader.close()


def test_no_descriptor_is_left_behind(tmp_path: Path) -> None:
    before = kernel_trees.open_files()
    reader = machine(tmp_path)
    for second in range(12):
        reader.read(second * S)
    open_count = kernel_trees.open_files()
    for second in range(12, 40):
        reader.read(second * S)
    assert kernel_trees.open_files() == open_count
    reader.close()
    reader.close()
    assert kernel_trees.open_files() == before


def test_this_machine_adds_up() -> None:
    reader = NodeReader(Path("/proc"))
    sample = reader.read()
    assert reader.problems() == ()
    reader.close()
    assert sample.cpu is not None
    # Each line is rounded down to ticks for itself, and the lines are read one after another.
    assert sum(times.total_ns for times in sample.per_cpu.values()) == pytest.approx(sample.cpu.total_ns, rel=0.01)
    assert sample.memory_total_bytes is not None
    assert sample.memory_available_bytes is not None
    assert 0 < sample.memory_available_bytes <= sample.memory_total_bytes
    assert len(reader.boot_id) == 36
    assert sample.interrupts.keys() >= sample.per_cpu.keys()
    root = os.statvfs("/")
    if "/" in sample.filesystems:
        assert sample.filesystems["/"].size_bytes == root.f_blocks * root.f_frsize
    assert all(zone.free <= zone.managed and zone.min <= zone.low <= zone.high for zone in sample.zones)
    assert sum(zone.managed for zone in sample.zones) * os.sysconf("SC_PAGE_SIZE") == pytest.approx(
        sample.memory_total_bytes, rel=0.8
    )


def test_every_field_of_a_node_has_a_source(tmp_path: Path) -> None:
    """Every field that no probe gives comes from the files or the kernel."""
    sample = machine(tmp_path).read()
    fields = NodeSample.__struct_fields__
    of_files = fields[: fields.index("files_read_at_ns") + 1]
    empty = {name for name in of_files if getattr(sample, name) == getattr(NodeSample(), name)}
    assert empty == {"tcp_states", "filesystems"}

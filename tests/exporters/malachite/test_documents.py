"""Every document of a machine whose numbers can be computed by hand: whole as golden files, and the ones in dispute here."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from api.cpu import Topology
from api.interfaces import Unavailable
from api.snapshot import (
    CgroupLimits,
    CgroupSample,
    CpuCounters,
    CpuTimes,
    Disk,
    Durations,
    L3Monitor,
    NodeSample,
    NumaNode,
    Snapshot,
)
from api.units import GIB, KIB, MIB
from exporters.malachite.devices import frequency_document, info_document, io_document, power_document, resctrl_document
from exporters.malachite.history import MalachiteHistory
from exporters.malachite.memory import unusable_free_percent
from exporters.malachite.server import DOCUMENTS
from tests.exporters.malachite import contract
from tests.exporters.malachite.documents import TEN_SECONDS, changed, document, observe, with_node
from tests.exporters.malachite.machine import MS, S, history, snapshot


@pytest.mark.parametrize("name", DOCUMENTS)
def test_golden_documents_of_the_node(name: str, golden: Callable[[str, str], None]) -> None:
    shown = document(name, history(*TEN_SECONDS))
    golden(f"malachite/{name.replace('/', '-')}.json", json.dumps(shown, indent=1) + "\n")
    assert not list(contract.breaches(shown, contract.DOCUMENTS[name]))


def test_shares_of_cpu_time_are_percent_but_iowait_is_a_fraction() -> None:
    shown = document("system/compute", history(*TEN_SECONDS))
    assert [cpu["name"] for cpu in shown["cpu"]] == ["cpu0", "cpu1", "cpu2", "cpu3"]
    for cpu in (*shown["cpu"], shown["global_cpu"]):
        assert cpu["cpu_usage"] == pytest.approx(78.0)
        assert cpu["cpu_sys_usage"] == pytest.approx(20.0)
        assert cpu["cpu_usr_ratio"] == pytest.approx(55.0)
        assert cpu["cpu_irq_ratio"] == pytest.approx(3.0)
        assert cpu["cpu_steal_ratio"] == pytest.approx(2.0)
        assert cpu["cpu_iowait_ratio"] == pytest.approx(0.1)


def test_scheduling_wait_is_the_mean_of_one_wait_in_milliseconds() -> None:
    """CPU n makes 100 tasks a second wait (n + 1) * 50 ms together."""
    shown = document("system/compute", history(*TEN_SECONDS))
    assert [cpu["cpu_sched_wait"] for cpu in shown["cpu"]] == [0.5, 1.0, 1.5, 2.0]
    assert shown["global_cpu"]["cpu_sched_wait"] == 1.25


def test_without_schedstats_waits_of_cgroups_tell_pools_of_cpus_apart() -> None:
    """On CPUs 0 and 1 100 waits of 2 ms a second; on 2 and 3 50 of 8 ms; and on all of them 200 of 1 ms."""

    def change(second: int, base: Snapshot) -> Snapshot:
        cgroups = {
            path: CgroupSample(
                path=path,
                id=number,
                limits=CgroupLimits(cpus=cpus),
                wait=Durations(sum_ns=count * ms * MS * second, count=count * second),
            )
            for number, (path, cpus, count, ms) in enumerate(
                (("/a", "0-1", 100, 2), ("/b", "2-3", 50, 8), ("/c", None, 200, 1), ("/d", "garbage", 0, 0))
            )
        }
        return msgspec.structs.replace(with_node(base, run_delay_ns={}, timeslices={}), cgroups=cgroups)

    shown = document("system/compute", observe(TEN_SECONDS, change))
    first, second_pool = (50 * 2 + 50 * 1) / 100, (25 * 8 + 50 * 1) / 75
    assert [cpu["cpu_sched_wait"] for cpu in shown["cpu"]] == pytest.approx([first, first, second_pool, second_pool])
    assert shown["global_cpu"]["cpu_sched_wait"] == pytest.approx((200 + 400 + 200) / 350)


def test_without_schedstats_the_probes_waits_by_cpu_come_before_the_estimate() -> None:
    """CPU 0 makes 100 tasks a second wait 2 ms each, CPU 1 one of 300 ms, no task waits for CPU 2; CPU 3 came a second ago."""

    def change(second: int, base: Snapshot) -> Snapshot:
        waits = {
            cpu: Durations(sum_ns=count * ms * MS * second, count=count * second)
            for cpu, count, ms in ((0, 100, 2), (1, 1, 300), (2, 0, 0), (3, 10, 1))
            if cpu != 3 or second == TEN_SECONDS[-1]
        }
        estimated = CgroupSample(path="/a", id=7, wait=Durations(sum_ns=S * second, count=second))
        without_schedstat = with_node(base, run_delay_ns={}, timeslices={}, cpu_waits=waits)
        return msgspec.structs.replace(without_schedstat, cgroups={"/a": estimated})

    shown = document("system/compute", observe(TEN_SECONDS, change))
    assert [cpu.get("cpu_sched_wait") for cpu in shown["cpu"]] == [2.0, 300.0, 0.0, None]
    assert shown["global_cpu"]["cpu_sched_wait"] == pytest.approx((200 + 300) / 101)


def test_cycles_per_instruction_are_those_of_the_last_five_seconds() -> None:
    """CPU 0 goes from 1 to 3 cycles an instruction after five seconds; CPU 1 retired nothing, CPU 2 has no third counter."""

    def change(second: int, base: Snapshot) -> Snapshot:
        late = max(0, second - 5)
        counted = {
            0: CpuCounters(cycles=(second + 2 * late) * S, instructions=second * S, misses=1000 * second),
            1: CpuCounters(cycles=second, instructions=0, misses=0),
            2: CpuCounters(cycles=S * second, instructions=2 * S * second),
        }
        return with_node(base, cpu_counters=counted)

    shown = document("system/compute", observe(TEN_SECONDS, change))
    assert [cpu.get("cpi_data") for cpu in shown["cpu"]] == [
        {"cpi": 3.0, "instructions": 5.0 * S, "cycles": 15.0 * S, "l3_misses": 5000.0},
        None,
        {"cpi": 0.5, "instructions": 10.0 * S, "cycles": 5.0 * S},
        None,
    ]
    assert not list(contract.breaches(shown, contract.DOCUMENTS["system/compute"]))


def test_no_wait_is_zero_and_an_unknown_wait_is_absent() -> None:
    def shown(**node: Any) -> dict[str, Any]:
        observed = observe((1, 6), lambda _second, base: with_node(base, **node))
        return dict(document("system/compute", observed)["cpu"][0])

    assert shown(run_delay_ns={0: 5}, timeslices={0: 7})["cpu_sched_wait"] == 0.0
    assert "cpu_sched_wait" not in shown(run_delay_ns={}, timeslices={})


def test_without_a_past_the_cpus_are_there_and_their_shares_are_not() -> None:
    shown = document("system/compute", history(1))
    assert shown["cpu"] == [{"name": f"cpu{number}"} for number in range(4)]
    assert shown["load"]["one"] == 1.5


def test_a_mode_that_goes_backwards_has_not_grown() -> None:
    before = CpuTimes(user_ns=0, nice_ns=0, system_ns=0, idle_ns=100, iowait_ns=50, irq_ns=0, softirq_ns=0, steal_ns=0)
    after = msgspec.structs.replace(before, user_ns=60, idle_ns=140, iowait_ns=40)
    times = {1: before, 6: after}
    observed = observe(times, lambda second, base: with_node(base, per_cpu={0: times[second]}, cpu=times[second]))
    shown = document("system/compute", observed)
    assert (shown["cpu"][0]["cpu_usage"], shown["cpu"][0]["cpu_iowait_ratio"]) == (60.0, 0.0)


def test_used_memory_of_the_node_is_without_caches_and_of_a_numa_node_with_them() -> None:
    """The agent reports the first as it is and subtracts file pages from the second."""
    shown = document("system/memory", history(1))
    assert shown["system"]["mem_used"] * KIB == (24 - 16 - 1 - 4 - 1) * GIB
    assert shown["system"]["mem_util"] == pytest.approx(100 * 2 / 24)
    assert [numa["mem_used"] * KIB for numa in shown["numa"]] == [6 * GIB, 2 * GIB]
    assert [numa["mem_file_pages"] * KIB for numa in shown["numa"]] == [3 * GIB, GIB]
    assert (shown["system"]["mem_total"] * KIB, shown["numa"][0]["mem_total"] * KIB) == (24 * GIB, 12 * GIB)


def test_what_a_numa_node_could_give_is_the_kernels_estimate() -> None:
    """Node 0: 6 GiB free less 384 pages; 12 MiB of cache less the low watermark of 1 MiB; 4 MiB of slab less 1 MiB."""
    shown = document("system/memory", history(1))
    assert shown["numa"][0]["mem_available"] * KIB == 6 * GIB - 384 * 4096 + 11 * MIB + 3 * MIB
    assert shown["numa"][1]["mem_available"] * KIB == 2 * GIB + 12 * MIB + 4 * MIB, "no zones are known"


def test_cpus_of_numa_nodes_are_always_listed() -> None:
    shown = document("system/memory", changed(numa={0: NumaNode(), 1: NumaNode()}))
    assert [numa["cpu_list"] for numa in shown["numa"]] == [
        {"meta": "0-1", "inner": [0, 1]},
        {"meta": "2-3", "inner": [2, 3]},
    ]
    shown = document("system/memory", changed(numa={}))
    assert [numa["cpu_list"]["inner"] for numa in shown["numa"]] == [[0, 1], [2, 3]]
    assert "mem_total" not in shown["numa"][0], "the distribution of the memory is unknown"


def test_a_kernel_without_numa_has_one_node_with_all_memory() -> None:

    def change(_second: int, base: Snapshot) -> Snapshot:
        cpus = tuple(msgspec.structs.replace(cpu, numa=0) for cpu in base.topology.cpus)
        return msgspec.structs.replace(with_node(base, numa={}), topology=Topology(cpus=cpus))

    shown = document("system/memory", observe((1,), change))["numa"]
    assert [(numa["id"], numa["cpu_list"]["meta"]) for numa in shown] == [(0, "0-3")]
    assert (shown[0]["mem_total"] * KIB, shown[0]["mem_used"] * KIB) == (24 * GIB, 8 * GIB)
    assert (shown[0]["mem_file_pages"] * KIB, shown[0]["mem_available"] * KIB) == (5 * GIB, 20 * GIB)


def test_fragmentation_is_the_share_of_free_memory_that_is_in_smaller_blocks() -> None:
    """1024 pages in single ones and 3 blocks of 1024: for order 9 a quarter is useless. Node 1: half; and all for 10."""
    free = {0: 1024, 9: 0, 10: 3}
    assert [unusable_free_percent(free, order) for order in (0, 1, 9, 10, 11)] == [0, 25, 25, 25, 100]
    assert unusable_free_percent({0: 0}, 0) is None, "nothing is free, so nothing is in pieces"
    shown = document("system/memory", history(1))["extfrag"]
    assert shown[0]["mem_frag_score"] == 25
    assert shown[1]["mem_order_scores"] == [
        {"order": 0, "score": 0},
        {"order": 9, "score": 50},
        {"order": 10, "score": 100},
    ]
    assert shown[1]["mem_frag_score"] == 75


def test_disks_are_those_of_sys_block_and_busy_is_milliseconds() -> None:
    shown = document("system/io", history(*TEN_SECONDS))["disk_io"]
    assert [disk["device_name"] for disk in shown] == ["vda"]
    assert (shown[0]["primary_device_id"], shown[0]["secondary_device_id"]) == (254, 0)
    assert (shown[0]["io_read"], shown[0]["io_busy"], shown[0]["wbt_lat_usec"]) == (200, 159, 2000)


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["sda", "sda1", "sda12"], ["sda"]),
        (["nvme0n1", "nvme0n1p1", "nvme0n12"], ["nvme0n1", "nvme0n12"]),
        (["sdp", "sdp1", "sdpa", "sdpa12"], ["sdp", "sdpa"]),
        (["md1", "md12", "md1p2"], ["md1", "md12"]),
        (["dm-1", "dm-11"], ["dm-1", "dm-11"]),
        (["sda1"], ["sda1"]),
        (["mmcblk0", "mmcblk0p1", "loop0p1", "loop0"], ["loop0", "mmcblk0"]),
    ],
)
def test_a_partition_is_recognized_by_its_disk(names: list[str], shown: list[str]) -> None:
    disk = Disk(
        number="8:0", reads=0, read_bytes=0, read_ns=0, writes=0, write_bytes=0, write_ns=0, busy_ns=0, in_flight=0
    )
    observed = changed(disks=dict.fromkeys(names, disk))
    assert [disk["device_name"] for disk in document("system/io", observed)["disk_io"]] == shown


@pytest.mark.parametrize("number", ["", "8", "8:", ":0", "8:x", "-8:0", "8:٣", "9" * 20 + ":0"])
def test_a_disk_without_numbers_is_left_out(number: str) -> None:
    observed = changed(disks={"sda": msgspec.structs.replace(snapshot(1).node.disks["vda"], number=number)})
    assert observed.latest is not None
    assert io_document(observed.latest, observed).disk_io == ()


def test_retransmissions_are_a_percentage_of_the_last_five_seconds() -> None:
    shown = document("system/network", history(*TEN_SECONDS))
    assert shown["tcp"]["tcp_retran"] == pytest.approx(0.5)
    assert (shown["tcp"]["tcp_out_segs"], shown["tcp"]["tcp_old_out_segs"]) == (10_000, 5_000)
    assert [card["name"] for card in shown["networkcard"]] == ["eth0", "lo"]
    assert (shown["networkcard"][0]["speeds"], shown["networkcard"][0]["receive_bytes"]) == (10_000, 10_000)
    assert "speeds" not in shown["networkcard"][1]


def test_power_is_that_of_the_last_second() -> None:
    shown = document("realtime/power", history(*TEN_SECONDS))["sensors"]
    assert (shown["cpu_power"], shown["mem_power"], shown["total_power"]) == (60.0, 5.5, 65.5)


def test_the_platforms_own_counter_is_the_total() -> None:
    def change(second: int, base: Snapshot) -> Snapshot:
        return with_node(base, power_uj={**base.node.power_uj, "psys": 200_000_000 * second})

    assert document("realtime/power", observe((1, 2), change))["sensors"]["total_power"] == 200.0


def test_a_counter_of_energy_that_wrapped_gives_no_power() -> None:
    observed = history(9)
    base = snapshot(10)
    observed = observed.after(with_node(base, power_uj={**base.node.power_uj, "package-0": 17}))
    with pytest.raises(Unavailable, match="two samples"):
        document("realtime/power", observed)


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (power_document, {"power_uj": {}}),
        (frequency_document, {"cpu_khz": {}}),
        (resctrl_document, {"l3": ()}),
        (info_document, {"machine": NodeSample().machine}),
    ],
)
def test_what_the_machine_cannot_tell_is_an_error_and_no_zero(
    make: Callable[[Snapshot, MalachiteHistory], object], fields: dict[str, Any]
) -> None:
    observed = changed(**fields)
    assert observed.latest is not None
    with pytest.raises(Unavailable) as caught:
        make(observed.latest, observed)
    assert caught.value.remedy


def test_frequencies_are_in_order_of_cpu_number() -> None:
    shown = document("realtime/freq", history(1))["sysfreq"]["cpu_freq"]
    assert shown == [{"scaling_cur_freq": 2_500_000}, {"scaling_cur_freq": 2_400_000}]


def test_groups_of_resctrl_and_the_one_of_all_others() -> None:
    shown = document("realtime/resctrl", history(1))["resctrl"]["group_mbm"]
    assert shown == {
        "root": [{"id": 0, "mbm_local_bytes": 2000, "mbm_total_bytes": 3000}],
        "shared-50": [{"id": 0, "mbm_local_bytes": 200, "mbm_total_bytes": 300}],
    }


def test_traffic_of_a_cache_is_that_of_all_control_groups() -> None:
    """A monitoring group is counted in its control group already. Of cache 1 one group's counter could not be read."""

    def monitor(cache: int, group: str, total: int) -> L3Monitor:
        return L3Monitor(id=cache, group=group, total_bytes=total, local_bytes=total // 2, occupancy_bytes=total // 4)

    groups = (("", 800), ("mon_groups/web", 80), ("batch", 400), ("batch/mon_groups/pod", 40))
    observed = changed(l3=(*(monitor(0, group, total) for group, total in groups), monitor(1, "", 800)))
    shown = document("system/compute", observed)["l3_mon"]["l3mon"]
    assert shown == [{"id": 0, "mbm_total_bytes": 1200, "mbm_local_bytes": 600, "llc_occupancy": 300}]
    assert "l3_mon" not in document("system/compute", changed(l3=(monitor(0, "", 800), monitor(1, "batch", 400))))

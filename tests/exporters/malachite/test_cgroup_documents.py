"""Documents of cgroups whose numbers can be computed by hand: whole as golden files, and the ones in dispute here."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest

from api.snapshot import BlockIo, CgroupLimits, CpuCounters, Durations, ReclaimLatency, Snapshot
from api.units import MIB
from exporters.malachite.cgroup_documents import CgroupLayout
from exporters.malachite.history import MalachiteHistory
from exporters.malachite.memory import memory_document
from tests.exporters.malachite import contract
from tests.exporters.malachite.documents import TEN_SECONDS, cgroup, changed, document, observe, with_cgroups
from tests.exporters.malachite.machine import BUSY, IDLE, MS, POD, V1, V2, S, busy, history, snapshot


@pytest.mark.parametrize("layout", [V1, V2], ids=lambda layout: layout.version)
@pytest.mark.parametrize(("path", "what"), [(BUSY, "container"), (POD, "pod"), ("/", "root")])
def test_golden_documents_of_cgroups(
    path: str, what: str, layout: CgroupLayout, golden: Callable[[str, str], None]
) -> None:
    shown = cgroup(path, history(*TEN_SECONDS, layout=layout), layout)
    golden(f"malachite/{what}-{layout.version.lower()}.json", json.dumps(shown, indent=1) + "\n")
    assert not list(contract.breaches(shown, contract.groups(layout.version)))


def test_usage_ratios_of_a_cgroup_are_cores() -> None:
    for layout in (V1, V2):
        cpu = cgroup(BUSY, history(*TEN_SECONDS, layout=layout), layout)["Cpuacct"]["Cpu"][layout.version]
        ratios = (cpu["cpu_usage_ratio"], cpu["cpu_user_usage_ratio"], cpu["cpu_sys_usage_ratio"])
        assert ratios == (1.5, 1.25, 0.25)


@pytest.mark.parametrize("layout", [V1, V2], ids=lambda layout: layout.version)
def test_no_limit_is_what_each_version_says(layout: CgroupLayout) -> None:
    huge = (1 << 64) - 1
    free = CgroupLimits(
        quota_us=-1, period_us=100_000, memory_max_bytes=huge, memory_high_bytes=huge, swap_max_bytes=huge
    )
    sample = msgspec.structs.replace(busy(layout, 1), limits=free)
    observed = observe((1,), lambda _second, base: with_cgroups(base, sample), layout)
    shown = cgroup(BUSY, observed, layout)
    if layout.version == "V1":
        assert shown["Cpuacct"]["Cpu"]["V1"]["cfs_quota_us"] == -1
        assert shown["Memory"]["Memory"]["V1"]["memory_limit_in_bytes"] == 9223372036854771712
    else:
        assert shown["Cpuacct"]["Cpu"]["V2"]["max"] == huge
        of = shown["Memory"]["Memory"]["V2"]
        assert (of["max"], of["high"], of["swap_max"]) == (huge, huge, huge)


@pytest.mark.parametrize("period", [None, 0, -1])
def test_the_client_never_divides_by_zero(period: int | None) -> None:
    sample = msgspec.structs.replace(busy(V1, 1), limits=CgroupLimits(quota_us=-1, period_us=period))
    observed = observe((1,), lambda _second, base: with_cgroups(base, sample))
    assert cgroup(BUSY, observed)["Cpuacct"]["Cpu"]["V1"]["cfs_period_us"] == 100_000


def test_threads_load_and_sockets_of_a_pod_are_those_of_its_containers() -> None:
    shown = cgroup(POD, history(*TEN_SECONDS))
    cpu = shown["Cpuacct"]["Cpu"]["V1"]
    assert (cpu["task_nr_runnable"], cpu["task_nr_unint"], cpu["task_nr_sleeping"]) == (3, 1, 5)
    assert (cpu["load"]["one"], cpu["load"]["runnable_one"]) == (3.0, 2.75)
    assert shown["NetCls"]["Net"]["bpf_net_data"]["net_tcp_tx_bytes"] == 30_000


def test_old_io_and_traffic_lie_five_seconds_before_the_new() -> None:
    """The client divides the difference by its own interval, five seconds: 16 reads and 3 packets a second."""
    shown = cgroup(BUSY, history(*TEN_SECONDS))
    blocks = shown["Blkio"]["BlkIO"]["V1"]
    assert blocks["bpf_fs_data"]["fs_read"] - blocks["old_bpf_fs_data"]["fs_read"] == 5 * 16
    assert blocks["bpf_fs_data"]["fs_write_bytes"] - blocks["old_bpf_fs_data"]["fs_write_bytes"] == 5 * 2 * MIB
    net = shown["NetCls"]["Net"]
    assert net["bpf_net_data"]["net_tcp_tx"] - net["old_bpf_net_data"]["net_tcp_tx"] == 5 * 3


def test_requests_that_a_probe_saw_stand_in_where_files_count_none() -> None:
    """Two containers of a pod, 4 reads of 4096 bytes a second each; the second one is new since three seconds."""
    observed = MalachiteHistory()
    for second in TEN_SECONDS:
        base = snapshot(second)
        reads = [(BUSY, 4 * second), (IDLE, 4 * (second - 7))]
        cgroups = dict(base.cgroups)
        for path, count in reads:
            done = Durations(sum_ns=count, count=count)
            counted = BlockIo(reads=done, writes=Durations(sum_ns=0, count=0), read_bytes=4096 * count, write_bytes=0)
            cgroups[path] = msgspec.structs.replace(cgroups[path], io={}, block_io={"254:0": counted})
        if second <= 7:
            del cgroups[IDLE]
        observed = observed.after(msgspec.structs.replace(base, cgroups=cgroups))
    for path, new, old in ((BUSY, 40, 20), (IDLE, 12, 0), (POD, 52, 20)):
        blocks = cgroup(path, observed)["Blkio"]["BlkIO"]["V1"]
        assert (blocks["bpf_fs_data"]["fs_read"], blocks["old_bpf_fs_data"]["fs_read"]) == (new, old)
        assert blocks["bpf_fs_data"]["fs_read_bytes"] == 4096 * new
        assert blocks["update_time"] == 1_700_000_010, "probes count in every round"


def test_files_without_a_line_are_no_zeros_of_now() -> None:
    """Current kernels count for version 1 only where a limit is set: empty files say nothing, today and five seconds ago."""
    observed = history(*range(1, 6))
    for second in range(6, 11):
        observed = observed.after(with_cgroups(snapshot(second), msgspec.structs.replace(busy(V1, second), io={})))
    assert "Blkio" not in cgroup(BUSY, observed)
    assert "Blkio" not in cgroup(POD, observed)


def test_a_cgroup_made_again_shares_nothing_with_the_one_before() -> None:
    observed = history(*TEN_SECONDS)
    base = snapshot(11)
    again = msgspec.structs.replace(busy(V1, 1), id=99, files_read_at_ns=base.node.files_read_at_ns)
    observed = observed.after(with_cgroups(base, again))
    shown = cgroup(BUSY, observed)
    assert "cpu_usage_ratio" not in shown["Cpuacct"]["Cpu"]["V1"]
    blocks, net = shown["Blkio"]["BlkIO"]["V1"], shown["NetCls"]["Net"]
    assert blocks["old_bpf_fs_data"] == blocks["bpf_fs_data"]
    assert net["old_bpf_net_data"] == net["bpf_net_data"]


def test_a_cgroup_that_is_new_has_moved_all_its_traffic_since_then() -> None:
    observed = history(*range(1, 9))
    for second in (9, 10):
        young = msgspec.structs.replace(busy(V1, second - 8), path=f"{POD}/c3", id=13)
        observed = observed.after(with_cgroups(snapshot(second), young))
    net = cgroup(f"{POD}/c3", observed)["NetCls"]["Net"]
    assert (net["bpf_net_data"]["net_tcp_tx"], net["old_bpf_net_data"]["net_tcp_tx"]) == (6, 0)


def test_new_minus_old_is_never_negative_when_a_counter_goes_back() -> None:
    observed = history(*TEN_SECONDS)
    base = snapshot(11)
    back = msgspec.structs.replace(busy(V1, 2), files_read_at_ns=base.node.files_read_at_ns)
    observed = observed.after(with_cgroups(base, back))
    shown = cgroup(BUSY, observed)
    for new, old in (
        (shown["Blkio"]["BlkIO"]["V1"]["bpf_fs_data"], shown["Blkio"]["BlkIO"]["V1"]["old_bpf_fs_data"]),
        (shown["NetCls"]["Net"]["bpf_net_data"], shown["NetCls"]["Net"]["old_bpf_net_data"]),
    ):
        assert all(new[key] >= old[key] for key in new)


def test_uncounted_values_are_omitted_and_never_zero() -> None:
    others = {path: sample for path, sample in snapshot(1).cgroups.items() if path != BUSY}
    observed = observe((1,), lambda _second, base: msgspec.structs.replace(base, cgroups=others))
    shown = cgroup(IDLE, observed)
    assert set(shown) == {"Cpuacct"}
    cpu = shown["Cpuacct"]["Cpu"]["V1"]
    assert "cpu_nr_throttled" not in cpu
    assert cpu["new_cpu_basic_info"]["cpu_usage"] == 5 * MS


def test_a_cgroup_that_never_used_a_socket_has_sent_nothing_where_sockets_are_counted() -> None:
    net = cgroup(IDLE, history(*TEN_SECONDS))["NetCls"]["Net"]
    assert net["bpf_net_data"] == net["old_bpf_net_data"] == dict.fromkeys(net["bpf_net_data"], 0)
    assert len(net["bpf_net_data"]) == 8
    assert net["update_time"] == 1_700_000_010


def test_each_part_says_when_it_was_read() -> None:
    """The snapshot of second 10 at 10.25 s, its memory and I/O at 9.85 s; both rounded down."""
    boot = 1_700_000_000
    for layout in (V1, V2):
        shown = cgroup(BUSY, history(*TEN_SECONDS, layout=layout), layout)
        version = layout.version
        assert shown["Cpuacct"]["Cpu"][version]["update_time"] == boot + 10
        assert shown["Memory"]["Memory"][version]["update_time"] == boot + 9
        assert shown["Blkio"]["BlkIO"][version]["update_time"] == boot + 9
        assert shown["NetCls"]["Net"]["update_time"] == boot + 10
    observed = changed(files_read_at_ns=(boot - 7) * S)
    assert observed.latest is not None
    assert memory_document(observed.latest, observed).update_time == boot - 7
    assert document("system/compute", observed)["update_time"] == boot + 1


@pytest.mark.parametrize("layout", [V1, V2], ids=lambda layout: layout.version)
def test_a_pods_counters_are_those_of_its_containers(layout: CgroupLayout) -> None:
    """Without a third counter there are no misses, rather than none."""
    counted = {
        BUSY: CpuCounters(cycles=300, instructions=200, misses=None),
        IDLE: CpuCounters(cycles=50, instructions=100, misses=None),
        POD: CpuCounters(cycles=0, instructions=0, misses=None),
    }

    def change(_second: int, base: Snapshot) -> Snapshot:
        samples = base.cgroups.items()
        return with_cgroups(base, *(msgspec.structs.replace(of, counters=counted.get(path)) for path, of in samples))

    observed = observe((1,), change, layout)
    shown = cgroup(POD, observed, layout)["Cpuacct"]
    cpu = shown["Cpu"][layout.version]
    assert (cpu["cycles"], cpu["instructions"]) == (350, 300)
    assert "l3_misses" not in cpu


NONE = Durations(sum_ns=0, count=0)
NO_RECLAIM = ReclaimLatency(direct=NONE, limit=NONE, reclaimed_pages=0, kswapd_wakeups=0)


@pytest.mark.parametrize("layout", [V1, V2], ids=lambda layout: layout.version)
def test_reclaim_of_a_pod_is_that_of_its_containers(layout: CgroupLayout) -> None:
    """The probe says nothing happened of the pod itself, which has no tasks: one container reclaimed 1 + 2 times, one 4."""
    base = snapshot(1, layout)
    four = msgspec.structs.replace(NO_RECLAIM, direct=Durations(sum_ns=500, count=4))
    cgroups = {
        path: msgspec.structs.replace(sample, memory_bytes=MIB, reclaim=sample.reclaim or NO_RECLAIM)
        for path, sample in base.cgroups.items()
    }
    cgroups[IDLE] = msgspec.structs.replace(cgroups[IDLE], reclaim=four)
    observed = MalachiteHistory()
    observed = observed.after(msgspec.structs.replace(base, cgroups=cgroups))
    for path, stalls, count, took in ((BUSY, 1, 3, 4000), (POD, 5, 7, 4500), ("/kubepods/besteffort", 5, 7, 4500)):
        memory = cgroup(path, observed, layout)["Memory"]["Memory"][layout.version]
        of = memory["bpf_mem_data"]
        assert (of["mem_reclaim_cnt"], of["mem_reclaim_time"]) == (count, took), path
        assert memory.get("total_allocstall") == (stalls if layout.version == "V1" else None), path


def kills(path: str, events: dict[str, dict[str, int]], probed: dict[str, int]) -> int | None:
    """What the documents say of a cgroup whose files and whose probe say that."""

    def change(_second: int, base: Snapshot) -> Snapshot:
        return with_cgroups(base, *(
            msgspec.structs.replace(of, memory_bytes=MIB, memory_events=events.get(at, {}), oom_kills=probed.get(at))
            for at, of in base.cgroups.items()
        ))  # fmt: skip

    observed = observe((1,), change)
    shown = cgroup(path, observed)["Memory"]["Memory"]["V1"]["bpf_mem_data"].get("mem_oom_cnt")
    return None if shown is None else int(shown)


def test_kills_of_a_pod_are_the_sum_of_its_containers() -> None:
    """Version 1's file has the cgroup's own kills, version 2's all below too, and the probe's are the cgroup's own."""
    own = {POD: {"oom_kill": 0}, BUSY: {"oom_kill": 2}, IDLE: {"oom_kill": 1}}
    assert [kills(path, own, {}) for path in (BUSY, POD, "/")] == [2, 3, 3]
    below = {path: {"max": 9, "oom_kill": count} for path, count in ((POD, 3), (BUSY, 2), (IDLE, 1))}
    assert [kills(path, below, {}) for path in (BUSY, POD, "/")] == [2, 3, None], (
        "version 2 has no such file at the top"
    )
    probed = {"/": 0, POD: 0, BUSY: 4, IDLE: 5}
    assert [kills(path, {}, probed) for path in (BUSY, POD, "/")] == [4, 9, 9]
    assert [kills(path, below, probed) for path in (BUSY, POD, "/")] == [2, 3, 9]
    assert kills(BUSY, {}, {}) is None

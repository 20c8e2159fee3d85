"""What the client decodes, written down a second time: every key with the Go type behind it.

A key may be missing, and null is as good; a key that is not here would be ignored, so it is a mistake of ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

LIMITS = {
    "int": (-(1 << 63), (1 << 63) - 1),
    "uint32": (0, (1 << 32) - 1),
    "uint64": (0, (1 << 64) - 1),
}


def keys(kind: str, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), kind)


STALL = keys("float", "avg10 avg60 avg300 total")
PRESSURE = {"some": STALL, "full": STALL}
LOAD = keys("float", "one five fifteen runnable_one runnable_five runnable_fifteen")
CPU_LIST = {"meta": "str", "inner": ["int"]}
CPI = keys("float", "cpi instructions cycles l3_misses utilization")
CPU = {"name": "str", "cpi_data": CPI} | keys(
    "float",
    "cpu_usage cpu_sys_usage cpu_iowait_ratio cpu_sched_wait cpu_steal_ratio cpu_usr_ratio cpu_irq_ratio",
)
COMPUTE = {
    "cpu": [CPU],
    "global_cpu": CPU,
    "load": LOAD,
    "process_stats": keys("uint64", "procs_running procs_blocked"),
    "cpu_codename": "str",
    "l3_mon": {
        "l3mon": [
            {"id": "int"} | keys("uint64", "mbm_total_bytes mbm_local_bytes mbm_victim_bytes_psec llc_occupancy")
        ],
        "path": "str",
        "update_time": "int",
    },
    "pressure": PRESSURE,
    "update_time": "int",
}
MEMORY = {
    "system": {"mem_util": "float"}
    | keys(
        "uint64",
        "mem_total mem_used mem_free mem_shm mem_buffers mem_page_cache mem_available mem_swap_total mem_swap_free "
        "mem_active_anon mem_inactive_anon mem_active_file mem_inactive_file mem_dirty_page_cache "
        "mem_write_back_page_cache mem_slab_reclaimable vm_watermark_scale_factor vmstat_pgsteal_kswapd "
        "vmstat_pgsteal_direct vmstat_pgscan_kswapd vmstat_pgscan_direct vmstat_compact_stall mem_sock_tcp "
        "mem_sock_tcp_limit mem_sock_udp mem_sock_udp_limit",
    ),
    "numa": [
        {"id": "int", "path": "str", "cpu_list": CPU_LIST}
        | keys(
            "uint64",
            "mem_total mem_used mem_free mem_shmem mem_available mem_file_pages mem_inactive_file mem_active_anon "
            "mem_inactive_anon mem_active_file",
        )
        | keys(
            "float",
            "mem_read_bandwidth_mb mem_write_bandwidth_mb mem_theory_mx_bandwidth_mb mem_mx_bandwidth_mb "
            "mem_read_latency mem_write_latency amd_l3_miss_latency_max",
        )
    ],
    "extfrag": [
        {"id": "int", "mem_frag_score": "uint64", "mem_order_scores": [{"order": "uint32", "score": "uint64"}]}
    ],
    "update_time": "int",
}
IO = {
    "disk_io": [
        keys("int", "primary_device_id secondary_device_id wbt_lat_usec")
        | keys("str", "device_name disk_type")
        | keys("uint64", "io_read io_write io_busy")
    ],
    "zram_stat": [{"name": "str"} | keys("uint64", "orig_data_size compr_data_size mem_used_total")],
    "update_time": "int",
}
NETWORK = {
    "networkcard": [
        keys("str", "name duplex")
        | {"update_time": "int"}
        | keys(
            "uint64",
            "receive_bytes receive_packets receive_errs receive_drop receive_fifo receive_frame receive_compressed "
            "receive_multicast transmit_bytes transmit_packets transmit_errs transmit_drop transmit_fifo "
            "transmit_colls transmit_carrier transmit_compressed speeds",
        )
    ],
    "tcp": {"tcp_retran": "float"}
    | keys(
        "uint64",
        "tcp_delay_acks tcp_listen_overflows tcp_listen_drops tcp_abort_on_memory tcp_req_q_full_drop "
        "tcp_retrans_segs tcp_old_retrans_segs tcp_out_segs tcp_old_out_segs tcp_close_wait tcp_timeouts "
        "tcp_mem_press tcp_mem_press_chrono tcp_in_pressure tcpv6_in_pressure",
    ),
    "update_time": "int",
}
INFO = {"is_vm": "bool", "update_time": "int"}
POWER = {
    "sensors": {"update_time": "int"}
    | keys("float", "total_power cpu_power mem_power fan_power hdd_power psu0_pout psu1_pout psu0_pin psu1_pin")
}
FREQ = {"sysfreq": {"cpu_freq": [{"scaling_cur_freq": "int"}], "update_time": "int"}}
RESCTRL = {"resctrl": {"group_mbm": {"*": [keys("int", "id mbm_local_bytes mbm_total_bytes")]}, "update_time": "int"}}
TASKS = keys("uint64", "task_nr_runnable task_nr_unint task_nr_iowait task_nr_sleeping")
COUNTERS = keys("uint64", "cycles instructions l3_misses ocr_read_drams store_ins store_all_ins imc_writes")
RATIOS = keys("float", "cpu_usage_ratio cpu_user_usage_ratio cpu_sys_usage_ratio")
TIMES_AT = keys("uint64", "cpu_usage cpu_user_time cpu_sys_time") | {"update_time": "int"}
FS_DATA = keys("uint64", "fs_created fs_open fs_read fs_read_bytes fs_write fs_write_bytes fs_fsync")
NET_DATA = keys(
    "uint64",
    "net_tcp_rx net_tcp_rx_bytes net_udp_rx net_udp_rx_bytes net_tcp_tx net_tcp_tx_bytes net_udp_tx net_udp_tx_bytes",
)
MEM_DATA = keys("uint64", "mem_oom_cnt mem_reclaim_cnt mem_reclaim_setting_sum mem_reclaim_time")
DETAILS = {"*": {"Data": {"*": "uint64"}}}
CPUSET = {"full_path": "str", "mems": CPU_LIST, "cpus": CPU_LIST, "update_time": "int"}
NET = {
    "Net": {"bpf_net_data": NET_DATA, "old_bpf_net_data": NET_DATA, "update_time": "int"}
    | keys("str", "full_path user_path")
}
CPU_V1 = (
    keys("int", "cfs_quota_us cfs_period_us update_time")
    | {"full_path": "str", "load": LOAD, "percpu_usage": ["uint64"]}
    | {"old_cpu_basic_info": TIMES_AT, "new_cpu_basic_info": TIMES_AT}
    | keys("uint64", "cpu_shares cpu_nr_throttled cpu_nr_periods cpu_throttled_time")
    | TASKS
    | COUNTERS
    | RATIOS
)
MEMORY_V1 = (
    {"full_path": "str", "update_time": "int", "bpf_mem_data": MEM_DATA}
    | keys(
        "uint64",
        "memory_limit_in_bytes memory_usage_in_bytes kern_memory_usage_in_bytes kern_tcp_memory_limit_in_bytes "
        "kern_tcp_memory_usage_in_bytes cache rss shmem dirty kswapd_steal writeback pgfault pgmajfault allocstall "
        "total_cache total_rss total_shmem total_dirty total_kswapd_steal total_writeback total_pgfault "
        "total_pgmajfault total_allocstall total_swap total_active_anon total_inactive_anon total_active_file "
        "total_inactive_file",
    )
    | {
        "numa_stat": [
            {"numa_name": "str"}
            | keys(
                "uint64",
                "total file anon unevictable hierarchical_total hierarchical_file hierarchical_anon "
                "hierarchical_unevictable",
            )
        ]
    }
)
BLKIO_V1 = (
    keys("str", "full_path user_path")
    | {"iops_details": DETAILS, "bps_details": DETAILS, "update_time": "int"}
    | keys("uint64", "iops_total bps_total")
    | {"bpf_fs_data": FS_DATA, "old_bpf_fs_data": FS_DATA}
)
CPU_V2 = (
    {"full_path": "str", "cpu_pressure": PRESSURE, "load": LOAD, "percpu_usage": ["uint64"], "max": "uint64"}
    | {"cpu_stats": keys("uint64", "usage_usec user_usec system_usec nr_periods nr_throttled throttled_usec")}
    | keys("int", "weight weight_nice max_burst max_period update_time")
    | TASKS
    | COUNTERS
    | RATIOS
)
NUMA_V2 = keys(
    "uint64",
    "anon file kernel_stack shmem file_mapped file_dirty file_writeback anon_thp inactive_anon active_anon "
    "inactive_file active_file unevictable slab_reclaimable slab_unreclaimable workingset_refault "
    "workingset_activate workingset_nodereclaim",
)
MEMORY_V2 = (
    keys("str", "full_path user_path")
    | keys("uint64", "memory_usage_in_bytes max high low min swap_current swap_max")
    | {"mem_pressure": PRESSURE, "bpf_mem_data": MEM_DATA, "update_time": "int", "mem_numa_stats": {"*": NUMA_V2}}
    | {"mem_local_events": keys("uint64", "low high max oom oom_kill")}
    | {
        "mem_stats": NUMA_V2
        | keys(
            "uint64",
            "kernel sock slab bgd_reclaim workingset_refault_anon workingset_refault_file workingset_activate_anon "
            "workingset_activate_file workingset_restore_anon workingset_restore_file pgfault pgmajfault pgrefill "
            "pgscan pgsteal pgscan_kswapd pgscan_direct pgsteal_kswapd pgsteal_direct pgactivate pgdeactivate "
            "pglazyfree pglazyfreed thp_fault_alloc thp_collapse_alloc",
        )
    }
)
FLAT = {"*": "uint64"}
BLKIO_V2 = (
    keys("str", "full_path user_path")
    | {"io_stat": DETAILS, "io_max": FLAT, "io_latency": FLAT, "io_weight": FLAT, "io_pressure": PRESSURE}
    | {"bpf_fs_data": FS_DATA, "old_bpf_fs_data": FS_DATA, "update_time": "int"}
)


def groups(version: str) -> dict[str, Any]:
    cpu, memory, blkio = (CPU_V1, MEMORY_V1, BLKIO_V1) if version == "V1" else (CPU_V2, MEMORY_V2, BLKIO_V2)
    return {
        "Cpuacct": {"Cpu": {version: cpu}},
        "Memory": {"Memory": {version: memory}},
        "Cpuset": {"CpuSet": {version: CPUSET}},
        "Blkio": {"BlkIO": {version: blkio}},
        "NetCls": NET,
    }


def cgroup(version: str) -> dict[str, Any]:
    return keys("str", "mount_point user_path cgroup_type") | {"sub_system_groups": groups(version)}


DOCUMENTS = {
    "system/compute": COMPUTE,
    "system/memory": MEMORY,
    "system/io": IO,
    "system/network": NETWORK,
    "system/info": INFO,
    "realtime/power": POWER,
    "realtime/freq": FREQ,
    "realtime/resctrl": RESCTRL,
}


def breaches(value: Any, kind: Any, where: str = "data") -> Iterator[str]:
    """Everything in a document that the client would not decode, or not notice."""
    if value is None:
        return
    if isinstance(kind, str):
        if not _is(value, kind):
            yield f"{where} = {value!r} is no {kind}"
    elif isinstance(kind, list):
        if isinstance(value, list):
            for index, item in enumerate(value):
                yield from breaches(item, kind[0], f"{where}[{index}]")
        else:
            yield f"{where} is no list"
    elif not isinstance(value, dict):
        yield f"{where} is no object"
    else:
        for key, item in value.items():
            if key not in kind and "*" not in kind:
                yield f"{where}.{key} is unknown to the client"
            else:
                yield from breaches(item, kind.get(key, kind.get("*")), f"{where}.{key}")


def _is(value: Any, kind: str) -> bool:
    if kind == "str":
        return isinstance(value, str)
    if kind == "bool":
        return isinstance(value, bool)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if kind == "float":
        return math.isfinite(value)
    low, high = LIMITS[kind]
    return isinstance(value, int) and low <= value <= high

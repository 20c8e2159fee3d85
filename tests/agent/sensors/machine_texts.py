"""A declared machine: two CPUs, two NUMA nodes, two disks, two interfaces. Texts of /proc and /sys as kernels write them."""

from __future__ import annotations

from tests.agent.sensors import kernel_trees

CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 85
model name\t: Intel(R) Xeon(R) Platinum 8269CY CPU @ 2.50GHz
stepping\t: 7
cpu MHz\t\t: 2596.120
flags\t\t: fpu vme hypervisor

processor\t: 1
vendor_id\t: GenuineIntel
cpu MHz\t\t: 3100.500
"""
SCHEDSTAT = (
    "version 17\ntimestamp 4295020563\ncpu0 0 0 5 4 3 2 900 1500 7\ndomain0 MC 3 1 2 3\ncpu1 0 0 5 4 3 2 900 2500 7\n"
)
ZONEINFO = """Node 0, zone      DMA
  per-node stats
      nr_inactive_anon 25323
      nr_dirty     8
  pages free     3840
        boost    0
        min      40
        low      50
        high     60
        promo    70
        spanned  4095
        present  3998
        managed  3840
        cma      0
        protection: (0, 3063, 6234, 6234, 6234)
      nr_free_pages 3840
  pagesets
    cpu: 0
              count:    0
              high:     0
              batch:    1
Node 0, zone  Movable
  pages free     0
        boost    0
        min      0
        low      0
        high     0
        spanned  0
        present  0
        managed  0
Node 1, zone   Normal
  pages free     612
        min      1000
        low      1250
        high     1500
        managed  812000
"""
BUDDYINFO = "Node 0, zone      DMA      0      0      1      1 \nNode 1, zone   Normal    512     50      0      0 \n"
SNMP = (
    "Ip: Forwarding DefaultTTL InReceives\nIp: 2 64 17563317\n"
    "Tcp: RtoAlgorithm MaxConn CurrEstab RetransSegs\nTcp: 1 -1 3 234\n"
)
NETSTAT = "TcpExt: SyncookiesSent ListenDrops\nTcpExt: 0 17\nIpExt: InOctets\nIpExt: 5\n"
SOCKSTAT = "sockets: used 21\nTCP: inuse 2 orphan 0 tw 6 alloc 2 mem 9\nFRAG: inuse 0 memory 0\n"
NET_DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:    1000      10    0    0    0     0          0         0     1000      10    0    0    0     0       0          0
  eth0:871644666   34723    1    2    3     4          5         6  2422506   25104    7    8    9    10      11         12
"""
DISKSTATS = (
    " 254       0 vda 998846 41508 43106690 1368608 158365 271310 10694584 54925 3 120124 1442165 214567 67 4207192 16161 1 2\n"
    " 254       1 vda1 5 0 8 1 0 0 0 0 0 1 1\n"
    " 259       0 nvme0n1 1 0 8 2 3 0 16 4 0 5 6\n"
    "   7       0 loop0 0 0 0 0 0 0 0 0 0 0 0\n"
)
INTERRUPTS = """           CPU0       CPU1
  0:         39          0   IO-APIC   2-edge      timer
 41:       7960          1   PCI-MSIX-0000:00:04.0   1-edge      virtio3-rx
LOC:        100        200   Local timer interrupts
ERR:          5
MIS:          0
"""
MOUNTINFO = """22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
28 27 0:60 / /mnt/nfs rw - nfs4 server:/export rw
29 28 254:16 / /mnt/nfs/disk rw - ext4 /dev/vdb rw
30 27 254:32 /sub /var/lib/part rw - xfs /dev/vdc rw
31 27 254:32 / /data\\040disk rw shared:5 - xfs /dev/vdc rw
32 27 254:0 /var/lib/kubelet /var/lib/kubelet rw - ext4 /dev/vda rw
33 27 8:1 / /mnt/ntfs rw - fuseblk /dev/sda1 rw
"""
PROC = {
    "stat": "cpu  300 0 100 500 0 0 0 100 0 0\ncpu0 200 0 50 200 0 0 0 50 0 0\ncpu1 100 0 50 300 0 0 0 50 0 0\n"
    "intr 5\nprocs_running 2\nprocs_blocked 1\n",
    "meminfo": "MemTotal:       2048 kB\nMemFree:  100 kB\nMemAvailable:   1024 kB\nHugePages_Total:       3\n",
    "loadavg": "0.84 1.82 1.08 1/94 12303\n",
    "pressure/cpu": kernel_trees.PRESSURE.format(7000, 0),
    "pressure/memory": kernel_trees.PRESSURE.format(8000, 0),
    "pressure/io": kernel_trees.PRESSURE.format(9000, 0),
    "sys/kernel/random/boot_id": "b7c1\n",
    "vmstat": "nr_free_pages 5\npgsteal_kswapd 7\n",
    "zoneinfo": ZONEINFO,
    "buddyinfo": BUDDYINFO,
    "net/snmp": SNMP,
    "net/netstat": NETSTAT,
    "net/sockstat": SOCKSTAT,
    "net/dev": NET_DEV,
    "diskstats": DISKSTATS,
    "interrupts": INTERRUPTS,
}
"""What every machine has."""
MORE_PROC = {
    "cpuinfo": CPUINFO,
    "schedstat": SCHEDSTAT,
    "self/mountinfo": MOUNTINFO,
    "sys/vm/watermark_scale_factor": "10\n",
    "sys/net/ipv4/tcp_mem": "287901\t383868\t575802\n",
}
SYS = {
    "devices/system/cpu/online": "0-1\n",
    "devices/system/node/node0/cpulist": "0-1\n",
    "devices/system/node/node0/distance": "10 20\n",
    "devices/system/node/node0/meminfo": "Node 0 MemTotal:        4 kB\nNode 0 MemUsed:          1 kB\n",
    "devices/system/node/node0/vmstat": "nr_free_pages 77\n",
    "devices/system/node/node2/cpulist": "\n",
    "devices/system/node/node2/distance": "20 10\n",
    "devices/system/node/possible": "0-2\n",
    "block/vda/device/vendor": "0x1af4\n",
    "block/vda/queue/wbt_lat_usec": "75000\n",
    "block/nvme0n1/device/model": "X\n",
    "block/nvme0n1/queue/wbt_lat_usec": "2000\n",
    "class/net/eth0/device/vendor": "0x1af4\n",
    "class/net/eth0/speed": "25000\n",
    "class/net/eth0/duplex": "full\n",
    "class/net/eth0/carrier": "1\n",
    "class/powercap/intel-rapl/enabled": "1\n",
    "class/powercap/intel-rapl:0/name": "package-0\n",
    "class/powercap/intel-rapl:0/energy_uj": "262143328850\n",
    "class/powercap/intel-rapl:0:0/name": "dram\n",
    "class/powercap/intel-rapl:0:0/energy_uj": "5000000\n",
    "class/powercap/intel-rapl-mmio:0/name": "package-0\n",
    "class/powercap/intel-rapl-mmio:0/energy_uj": "1\n",
    "fs/resctrl/info/last_cmd_status": "ok\n",
    "fs/resctrl/mon_data/mon_L3_00/llc_occupancy": "16234000\n",
    "fs/resctrl/mon_data/mon_L3_00/mbm_total_bytes": "101\n",
    "fs/resctrl/mon_data/mon_L3_00/mbm_local_bytes": "99\n",
    "fs/resctrl/mon_data/mon_L3_01/llc_occupancy": "5\n",
    "fs/resctrl/mon_data/mon_L3_01/mbm_total_bytes": "Unavailable\n",
    "fs/resctrl/mon_data/mon_L3_01/mbm_local_bytes": "1\n",
    "fs/resctrl/batch/mon_data/mon_L3_00/mbm_total_bytes": "11\n",
    "fs/resctrl/batch/mon_data/mon_L3_00/mbm_local_bytes": "9\n",
    "fs/resctrl/batch/mon_groups/pod/mon_data/mon_L3_00/mbm_total_bytes": "7\n",
    "fs/resctrl/batch/mon_groups/pod/mon_data/mon_L3_00/mbm_local_bytes": "6\n",
}

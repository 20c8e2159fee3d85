"""Node-wide reclaim against the kernel's own books, on a machine small enough to be filled: two NUMA nodes of 1 GiB in QEMU.

A task that may use node 1 alone takes all that is free there and 150 MiB more, which wakes that node's kswapd.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from api.facts import Kswapd, Reclaim
from api.ports import Seen
from probes.kswapd import FORMS, nodes_with_memory, open_kswapd
from tests.kernel.probing import opened
from tests.kernel.support import cgroup, require_writable_cgroups

pytestmark = pytest.mark.kernel

MIB = 1 << 20
SMALL_BYTES = 4 << 30
HOG = """
import sys, time
block = bytearray(int(sys.argv[1]))
for at in range(0, len(block), 4096): block[at] = 1
"""


def meminfo(path: Path, name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", path.read_text())
    assert found is not None
    return int(found[1]) * 1024


def vmstat() -> dict[str, int]:
    pairs = (line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return {name: int(value) for name, value in pairs}


def nodes_of(seen: Seen) -> dict[int, Kswapd]:
    found = seen.node["kswapd"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("form", FORMS)
def test_a_node_bound_hog_wakes_the_kswapd_of_its_node(form: str) -> None:
    if meminfo(Path("/proc/meminfo"), "MemTotal") > SMALL_BYTES:
        pytest.skip("fills the memory of a NUMA node: only on machines of at most 4 GiB, as the VM is")
    if nodes_with_memory() != (0, 1):
        pytest.skip("needs two NUMA nodes, 0 and 1")
    hierarchy = require_writable_cgroups()
    with opened(open_kswapd, form) as probe, cgroup(hierarchy, "hog") as group:
        group.file("cpuset", "cpuset.mems").write_text("1")
        live = {group.id: group.path, 1: "/"}
        before, books = probe.read(live), vmstat()
        free = meminfo(Path("/sys/devices/system/node/node1/meminfo"), "MemFree")
        assert group.start([sys.executable, "-c", HOG, str(free + 150 * MIB)]).wait() == 0
        after, books = probe.read(live), {name: now - books[name] for name, now in vmstat().items()}
        woken = after.cgroups[group.id]["reclaim"]
    nodes = {
        number: {name: getattr(now, name) - getattr(nodes_of(before)[number], name) for name in now.__struct_fields__}
        for number, now in nodes_of(after).items()
    }
    assert nodes[1]["wakeups"] > nodes[0]["wakeups"]
    assert sum(node["wakeups"] for node in nodes.values()) == books["pageoutrun"]
    assert sum(node["reclaimed_pages"] for node in nodes.values()) == books["pgsteal_kswapd"]
    scanned = sum(node["scanned_pages"] for node in nodes.values())
    assert 0.95 * books["pgscan_kswapd"] <= scanned <= books["pgscan_kswapd"]
    assert nodes[1]["active_ns"] > 0
    assert isinstance(woken, Reclaim)
    assert woken.kswapd_wakeups > 0
    stalls = sum(count for name, count in books.items() if name.startswith("allocstall_"))
    reclaims = [values["reclaim"] for values in after.cgroups.values()]
    assert sum(each.direct.count for each in reclaims if isinstance(each, Reclaim)) == stalls

"""Disk knobs on version 2, on the data disk: limits and weights as bytes and operations that were let through."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from agent.config.qrm import DiskIoConfig
from agent.qrm.actuator.state_dir import read_boot_id
from agent.qrm.actuator.sysfs_writer import FILE_NAME, SysfsWriter
from agent.qrm.knobs.io import disk_settings
from agent.sensors.node.node_reader import NodeReader
from api.decision import OutcomeStatus
from api.knobs import Knob
from api.units import MIB
from tests.builders.waiting import until
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups
from tests.vm.workloads import DATA, PYTHON, KnobWriters, disk, io, number_of

pytestmark = pytest.mark.vm

S = 1_000_000_000
BLOCK = 64 << 10
LOAD = f"""
import mmap, os, sys
block = mmap.mmap(-1, {BLOCK})
fd = os.open(sys.argv[1], os.O_RDWR | os.O_DIRECT)
while True:
    if sys.argv[2] == "read":
        os.preadv(fd, [block], 0)
    else:
        os.pwrite(fd, block, 0)
"""
"""Reads or writes one block of a file again and again, past the page cache."""
COST = {
    "enable": "enable=1 ctrl=user rpct=0.00 rlat=1000000 wpct=0.00 wlat=1000000 min=100.00 max=100.00",
    "model": "ctrl=user model=linear rbps=8388608 rseqiops=1000000 rrandiops=1000000 "
    "wbps=8388608 wseqiops=1000000 wrandiops=1000000",
}
"""A disk that can write 8 MiB a second, says the model, and is driven at just that pace."""


@pytest.fixture
def pair() -> Iterator[tuple[TestCgroup, TestCgroup]]:
    with ExitStack() as stack:
        item, other = (stack.enter_context(cgroup(require_writable_cgroups(), name)) for name in ("one", "other"))
        yield item, other


@pytest.fixture
def device() -> str:
    return number_of("data")


def load(group: TestCgroup, kind: str) -> None:
    """A process of the group that reads or writes a file of its own as fast as it may."""
    path = DATA / group.path[1:]
    path.write_bytes(bytes(BLOCK))
    group.start([*PYTHON, LOAD, str(path), kind])


def through(group: TestCgroup, device: str, key: str, least: int) -> tuple[int, float]:
    """How much of that was let through, at least so much, and in how many seconds."""
    until(lambda: io(group, device).get(key, 0) > 0, "it has started")
    started, before = time.monotonic_ns(), io(group, device)[key]
    until(lambda: io(group, device)[key] >= before + least, f"{least} {key}")
    after = io(group, device)[key]
    return after - before, (time.monotonic_ns() - started) / S


def test_no_more_is_written_and_read_than_the_limits_allow(
    agent: KnobWriters, pair: tuple[TestCgroup, TestCgroup], device: str
) -> None:
    """A fast machine has to wait for it; a slow one lets through less, which is not above the limit either."""
    limited, free = pair
    with agent.turned((limited, Knob.IO_MAX, f"{device} wbps=1048576 riops=20")):
        load(limited, "write")
        load(free, "write")
        written, seconds = through(limited, device, "wbytes", 2 * MIB)
        # One block may be on its way at either end, and a slice of 0.1 s is given at a time.
        assert written <= 1_048_576 * (seconds + 0.2) + 2 * BLOCK
        assert io(free, device)["wbytes"] >= 4 * written
        load(limited, "read")
        count, seconds = through(limited, device, "rios", 30)
        assert count <= 20 * (seconds + 0.2) + 2
    before = io(limited, device)["wbytes"]
    _, seconds = through(limited, device, "wbytes", 4 * MIB)
    assert io(limited, device)["wbytes"] - before > 1_048_576 * seconds


def test_a_busy_disk_is_shared_by_weight(
    agent: KnobWriters, pair: tuple[TestCgroup, TestCgroup], device: str, tmp_path: Path
) -> None:
    name = disk("data").name
    reader = NodeReader(Path("/proc"), Path("/sys"))
    config = DiskIoConfig(cost_qos={name: COST["enable"]}, cost_model={name: COST["model"]})
    settings = disk_settings(reader.read().disks, config, "fs/cgroup")
    reader.close()
    assert [(setting.path, setting.device) for setting in settings] == [
        ("fs/cgroup/io.cost.qos", device),
        ("fs/cgroup/io.cost.model", device),
    ]
    state = tmp_path / "node"
    state.mkdir()
    node = SysfsWriter(Path("/sys"), state, read_boot_id())
    assert [(o.status, o.error) for o in node.apply(settings)] == [(OutcomeStatus.APPLIED, "")] * 2
    try:
        with agent.turned((pair[0], Knob.IO_WEIGHT, "50"), (pair[1], Knob.IO_WEIGHT, "200")):
            for group in pair:
                load(group, "write")
            until(lambda: all(io(group, device).get("wbytes", 0) > MIB for group in pair), "both write")
            before = [io(group, device)["wbytes"] for group in pair]
            through(pair[0], device, "wbytes", 3 * MIB)
            less, more = (io(group, device)["wbytes"] - start for group, start in zip(pair, before, strict=True))
        assert 3 <= more / less <= 5.5
    finally:
        assert OutcomeStatus.REFUSED not in {outcome.status for outcome in node.restore()}
    assert not (state / FILE_NAME).exists()
    assert "enable=1" not in (Path("/sys/fs/cgroup/io.cost.qos")).read_text()

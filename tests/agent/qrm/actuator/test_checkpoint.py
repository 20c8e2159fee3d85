"""The CPU state on disk: exact, with Katalyst's keys, never used in part, written only if it changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from agent.qrm.actuator.checkpoint import FILE_NAME, CpusetCheckpoint, decode_state, encode_state
from agent.qrm.cpuset.state import CpusetState
from api.interfaces import Unavailable
from api.qos import QoSLevel
from common.state_file import StateFileDamaged
from tests.agent.qrm.cpuset.builders import S, bound, dedicated, machine, pod, reclaimed, run

NODE = machine(2, 1, 1, 8, 2)
PODS = (pod("web", cores=2.0), bound("near", 3.0), dedicated("db", 4.0), reclaimed("batch"))
BOOT = "0d5a1e9c-3a52-4c1e-9a8e-6f0b2f6f2a11"
ALLOCATED = msgspec.structs.replace(run((), PODS, NODE, at_s=5.0)[1], numa_headroom={0: 3.5})
WRITE_UNTIL_KILLED = """
import sys
from pathlib import Path
import msgspec
from agent.qrm.actuator.checkpoint import CpusetCheckpoint, decode_state
boot, state = decode_state(Path(sys.argv[1]).read_bytes())
file = CpusetCheckpoint(Path(sys.argv[2]), boot)
print("started", flush=True)
number = 0
while True:
    number += 1
    file.save(msgspec.structs.replace(state, residual={"u-web": number}))
"""


def test_the_state_is_read_back_as_written(tmp_path: Path) -> None:
    first = CpusetCheckpoint(tmp_path, BOOT)
    assert first.load(0) is None
    assert first.messages == ()
    assert first.save(ALLOCATED)
    assert CpusetCheckpoint(tmp_path, BOOT).load(0) == ALLOCATED
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600


def test_the_next_placement_is_the_same_with_the_state_from_disk() -> None:
    _, restored = decode_state(encode_state(ALLOCATED, BOOT))
    assert run((), PODS, NODE, restored, at_s=6.0)[0].cpus == run((), PODS, NODE, at_s=5.0)[0].cpus


def test_keys_are_katalysts() -> None:
    file = json.loads(encode_state(ALLOCATED, BOOT))
    assert file["policyName"] == "dynamic"
    assert file["allow_shared_cores_overlap_reclaimed_cores"] is False
    assert file["numa_headroom"] == {"0": 3.5}
    assert file["machineState"]["0"].keys() == {"default_cpuset", "allocated_cpuset"}
    assert file["pod_entries"]["share"][""]["owner_pool_name"] == "share"
    entry = file["pod_entries"]["u-db"]["c"]
    assert entry["pod_namespace"] == "default"
    assert (entry["owner_pool_name"], entry["qosLevel"], entry["container_type"]) == (
        "dedicated", QoSLevel.DEDICATED.value, "MAIN"
    )  # fmt: skip
    assert entry["topology_aware_assignments"] == {str(entry["bound_numa"][0]): entry["allocation_result"]}
    assert entry["request_quantity"] == 4.0


def test_an_unchanged_state_is_not_written(tmp_path: Path) -> None:
    file = CpusetCheckpoint(tmp_path, BOOT)
    assert file.save(ALLOCATED)
    inode = (tmp_path / FILE_NAME).stat().st_ino
    assert not file.save(msgspec.structs.replace(ALLOCATED, numa_headroom={0: 9.0}))
    after = CpusetCheckpoint(tmp_path, BOOT)
    after.load(0)
    assert not after.save(ALLOCATED)
    assert (tmp_path / FILE_NAME).stat().st_ino == inode
    assert file.save(msgspec.structs.replace(ALLOCATED, residual={"u-web": 1}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[:-20], "cannot be read"),
        (lambda data: data.replace(b'"request_quantity":4.0', b'"request_quantity":5.0'), "checksum"),
        (lambda data: data + b"\n", "bytes that this program never writes"),
        (lambda data: data.replace(b'"version":1', b'"version":2'), "layout version 2"),
        (lambda data: b"", "cannot be read"),
        (lambda data: b"\xff\xfe", "cannot be read"),
        (lambda data: b"[" * 100_000, "cannot be read"),
    ],
)
def test_a_damaged_file_is_quarantined_and_reported(tmp_path: Path, change: object, reason: str) -> None:
    data = change(encode_state(ALLOCATED, BOOT))
    with pytest.raises(StateFileDamaged, match=reason):
        decode_state(data)
    (tmp_path / FILE_NAME).write_bytes(data)
    file = CpusetCheckpoint(tmp_path, BOOT)
    assert file.load(0) is None
    assert (tmp_path / f"{FILE_NAME}.damaged-1").read_bytes() == data
    assert reason in file.messages[0]
    assert "damaged-1" in file.messages[0]
    assert not (tmp_path / FILE_NAME).exists()


def test_an_invalid_cpu_list_is_damage_despite_a_valid_checksum() -> None:
    entry = msgspec.structs.replace(ALLOCATED.pod_entries["share"][""], allocation_result="all")
    state = msgspec.structs.replace(ALLOCATED, pod_entries={**ALLOCATED.pod_entries, "share": {"": entry}})
    with pytest.raises(StateFileDamaged, match="'all'"):
        decode_state(encode_state(state, BOOT))


def test_times_of_another_boot_are_reset(tmp_path: Path) -> None:
    CpusetCheckpoint(tmp_path, BOOT).save(msgspec.structs.replace(ALLOCATED, residual={"u-web": 4 * S}))
    state = CpusetCheckpoint(tmp_path, "another").load(77)
    assert state is not None
    assert state.residual == {"u-web": 77}
    assert state.pod_entries["u-db"]["c"].since_ns == 77
    assert state.pod_entries["u-db"]["c"].allocation_result == ALLOCATED.pod_entries["u-db"]["c"].allocation_result


def test_an_unwritable_directory_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / f"{FILE_NAME}.tmp").mkdir()
    file = CpusetCheckpoint(tmp_path, BOOT)
    with pytest.raises(Unavailable, match="cannot be written") as caught:
        file.save(ALLOCATED)
    assert "--state-dir" in caught.value.remedy
    (tmp_path / f"{FILE_NAME}.tmp").rmdir()
    assert file.save(ALLOCATED), "a failed save is repeated"


def test_a_pipe_in_place_of_the_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE_NAME)
    with pytest.raises(Unavailable, match="not a regular file"):
        CpusetCheckpoint(tmp_path, BOOT).load(0)


def test_the_file_is_complete_after_a_kill_at_any_point(tmp_path: Path) -> None:
    start = tmp_path / "start"
    start.write_bytes(encode_state(ALLOCATED, BOOT))
    for attempt in range(5):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITE_UNTIL_KILLED, str(start), str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "started\n"
        while not (tmp_path / FILE_NAME).exists():
            assert child.poll() is None
        for _ in range(200 * attempt):
            (tmp_path / FILE_NAME).read_bytes()
        child.kill()
        child.wait()
        child.stdout.close()
        file = CpusetCheckpoint(tmp_path, BOOT)
        state = file.load(0)
        assert file.messages == ()
        assert isinstance(state, CpusetState)
        assert state.pod_entries == ALLOCATED.pod_entries

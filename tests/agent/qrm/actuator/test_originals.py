"""The journal of originals: on disk before writes, exact, alone in its directory, never used in part."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent.journal.decisions import DecisionJournal
from agent.qrm.actuator.originals import (
    FILE_NAME,
    HOLDER_NAME,
    OriginalsJournal,
    StateDirLocked,
    decode_journal,
    encode_journal,
    restore_all,
)
from agent.qrm.actuator.state_dir import default_state_dir, open_originals
from agent.qrm.actuator.writer import KnobWriter, OriginalValue, RawValue, is_cgroup_path
from api.decision import Outcome
from api.interfaces import Unavailable
from api.knobs import Knob
from common.state_file import StateFileDamaged
from tests.agent.qrm.actuator.trees import Tree

BOOT = "0d5a1e9c-3a52-4c1e-9a8e-6f0b2f6f2a11"


def original(
    texts: dict[str, str], cgroup: str = "/batch", cgroup_id: int = 77, knob: Knob = Knob.WEIGHT
) -> OriginalValue:
    """Return an entry whose directory has the inode of the cgroup, as on version 2."""
    raw = RawValue(directory_id=cgroup_id, texts=texts)
    return OriginalValue(cgroup=cgroup, cgroup_id=cgroup_id, knob=knob, raw=raw)


SHARES = original({"cpu.shares": "1024\n"})
OTHER_SHARES = original({"cpu.shares": "2\n"})
QUOTA = original(
    {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, "/kubepods/böse ecke", (7 << 32) + 5, Knob.QUOTA
)
FILE = encode_journal(BOOT, (SHARES, QUOTA))
ANY_TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
RAW_TEXT = st.binary(max_size=30).map(lambda raw: raw.decode("latin-1"))
ORIGINALS = st.builds(
    OriginalValue,
    cgroup=ANY_TEXT.filter(str.isprintable).map("/{}".format).filter(is_cgroup_path),
    cgroup_id=st.integers(1, 2**63 - 1),
    knob=st.sampled_from(Knob),
    raw=st.builds(RawValue, directory_id=st.integers(1, 2**63 - 1), texts=st.dictionaries(ANY_TEXT, RAW_TEXT)),
)
HOLD = """
import sys
from pathlib import Path
from agent.qrm.actuator.state_dir import open_originals
open_originals(Path(sys.argv[1]), "boot")
print("locked", flush=True)
sys.stdin.read()
"""


@given(st.lists(ORIGINALS, max_size=5))
def test_encoded_originals_decode_to_themselves(entries: list[OriginalValue]) -> None:
    assert decode_journal(encode_journal(BOOT, entries)) == (BOOT, tuple(entries))


@given(st.integers(0, len(FILE) - 1))
@example(0)
@example(len(FILE) - 1)
def test_every_truncation_is_detected(length: int) -> None:
    with pytest.raises(StateFileDamaged):
        decode_journal(FILE[:length])


def test_every_flipped_bit_is_detected() -> None:
    for position in range(len(FILE) * 8):
        flipped = bytearray(FILE)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(StateFileDamaged):
            decode_journal(bytes(flipped))


@given(st.binary(max_size=200))
@example(b"[" * 5000)
@example(b'{"version":1,"x":' + b"[" * 5000)
@example(FILE + b"\n")
@example(b" " + FILE)
def test_other_bytes_are_detected(data: bytes) -> None:
    with pytest.raises(StateFileDamaged):
        decode_journal(data)


def test_another_layout_version_is_named() -> None:
    with pytest.raises(StateFileDamaged, match="layout version 2, this program reads version 1"):
        decode_journal(FILE.replace(b'"version":1', b'"version":2'))


def test_the_first_original_stays(tmp_path: Path) -> None:
    originals = open_originals(tmp_path, BOOT)
    originals.record(SHARES)
    originals.record(OTHER_SHARES, QUOTA)
    originals.close()
    again = open_originals(tmp_path, BOOT)
    assert again.entries() == (SHARES, QUOTA)
    assert again.messages == ()
    again.close()


def test_a_new_cgroup_on_the_path_has_its_own_original(tmp_path: Path) -> None:
    originals = open_originals(tmp_path, BOOT)
    originals.record(SHARES)
    new = original({"cpu.shares": "2\n"}, cgroup_id=78)
    originals.record(new)
    assert originals.entries() == (new,)
    originals.close()


@pytest.mark.parametrize("damage", [FILE[:-20], b"", b"\0" * 4096, FILE.replace(b"1024", b"1025")])
def test_a_damaged_file_is_quarantined_and_reported(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / FILE_NAME
    (tmp_path / f"{FILE_NAME}.damaged-1").write_text("an older one")
    path.write_bytes(damage)
    originals = open_originals(tmp_path, BOOT)
    aside = tmp_path / f"{FILE_NAME}.damaged-2"
    assert originals.entries() == ()
    assert aside.read_bytes() == damage
    assert not path.exists()
    assert str(path) in originals.messages[0]
    assert str(aside) in originals.messages[0]
    assert originals.damaged() == (tmp_path / f"{FILE_NAME}.damaged-1", aside)
    originals.close()


@pytest.mark.parametrize(
    "forged",
    [
        original({"cpu.shares": "1024\u0100"}),
        original({"cpu.idle": "0"}, cgroup="/../etc", knob=Knob.IDLE),
        original({"cpu.idle": "0"}, cgroup="batch", knob=Knob.IDLE),
    ],
)
def test_an_impossible_entry_is_damage_despite_a_valid_checksum(tmp_path: Path, forged: OriginalValue) -> None:
    (tmp_path / FILE_NAME).write_bytes(encode_journal(BOOT, (forged,)))
    originals = open_originals(tmp_path, BOOT)
    assert originals.entries() == ()
    assert len(originals.damaged()) == 1
    originals.close()


def test_a_pipe_in_place_of_the_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE_NAME)
    with pytest.raises(Unavailable, match=r"cannot be read from .*: not a regular file"):
        open_originals(tmp_path, BOOT)


def test_originals_of_another_boot_are_dropped_and_reported(tmp_path: Path) -> None:
    first = open_originals(tmp_path, "another-boot")
    first.record(SHARES, QUOTA)
    first.close()
    second = open_originals(tmp_path, BOOT)
    assert second.entries() == ()
    assert "2 originals of another boot" in second.messages[0]
    # The same cgroup and inode exist again: the file must have the id of this boot.
    second.record(SHARES, QUOTA)
    second.close()
    third = open_originals(tmp_path, BOOT)
    assert third.entries() == (SHARES, QUOTA)
    third.close()


def test_vanished_cgroups_leave_the_file_with_the_next_record(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "cgroup", "v2")
    alive = original({"cpu.weight": "100\n"}, cgroup_id=tree.make("/batch"))
    files = KnobWriter(tree.hierarchy)
    originals = open_originals(tmp_path / "state", BOOT)
    originals.record(QUOTA)
    originals.forget_vanished(files)
    originals.record(alive)
    assert decode_journal(originals.path.read_bytes())[1] == (alive,)
    originals.close()
    files.close()


def test_two_processes_cannot_share_a_directory(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(StateDirLocked, match=f"in use by process {holder.pid}$"):
            open_originals(tmp_path, BOOT)
        holder.kill()
    open_originals(tmp_path, BOOT).close()


def test_closing_releases_the_lock(tmp_path: Path) -> None:
    first = open_originals(tmp_path, BOOT)
    with pytest.raises(StateDirLocked, match=f"process {os.getpid()}"):
        open_originals(tmp_path, BOOT)
    first.close()
    first.close()
    open_originals(tmp_path, BOOT).close()


def test_a_state_directory_that_cannot_be_created_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match=r"state directory .*/file/state cannot be used") as caught:
        open_originals(tmp_path / "file/state", BOOT)
    assert "--state-dir" in caught.value.remedy


def test_only_the_owner_can_read_the_file(tmp_path: Path) -> None:
    originals = open_originals(tmp_path / "state", BOOT)
    originals.record(SHARES)
    assert originals.path.stat().st_mode & 0o777 == 0o600
    assert originals.path.parent.stat().st_mode & 0o777 == 0o700
    originals.close()


@pytest.mark.parametrize("mode", [0o1777, 0o770, 0o702])
def test_a_directory_writable_by_others_is_refused(tmp_path: Path, mode: int) -> None:
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(mode)
    with pytest.raises(Unavailable, match=f"can be written by other users .mode {mode:04o}") as caught:
        open_originals(state, BOOT)
    assert caught.value.remedy.endswith(f"chmod go-w {state}")
    assert list(state.iterdir()) == []
    state.chmod(0o755)
    open_originals(state, BOOT).close()


def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    os.chown(state, 65534, 65534)
    with pytest.raises(Unavailable, match="belongs to another user") as caught:
        open_originals(state, BOOT)
    assert "--state-dir" in caught.value.remedy
    assert list(state.iterdir()) == []


def test_parent_directories_are_created_for_the_owner_only_with_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        open_originals(tmp_path / "a/b", BOOT).close()
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o700, 0o700]


def test_no_link_is_followed_to_write_the_holder(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept\n")
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    (state / HOLDER_NAME).symlink_to(precious)
    with pytest.raises(Unavailable, match=f"{HOLDER_NAME} is a symbolic link") as caught:
        open_originals(state, BOOT)
    assert caught.value.remedy == "remove that link"
    assert precious.read_text() == "kept\n"
    (state / HOLDER_NAME).unlink()
    open_originals(state, BOOT).close()


def test_a_removed_directory_records_nothing(tmp_path: Path) -> None:
    originals = OriginalsJournal(tmp_path / "state" / FILE_NAME, BOOT)
    with pytest.raises(Unavailable, match="No such file or directory"):
        originals.record(SHARES)
    assert originals.entries() == ()


@pytest.mark.parametrize(
    ("uid", "environ", "expected"),
    [
        (0, {"XDG_STATE_HOME": "/x", "HOME": "/root"}, "/var/lib/dioptase"),
        (1000, {"XDG_STATE_HOME": "/x", "HOME": "/home/a"}, "/x/dioptase"),
        (1000, {"XDG_STATE_HOME": "relative", "HOME": "/home/a"}, "/home/a/.local/state/dioptase"),
        (1000, {"HOME": "/home/a"}, "/home/a/.local/state/dioptase"),
    ],
)
def test_default_state_directory(uid: int, environ: dict[str, str], expected: str) -> None:
    assert default_state_dir(environ, uid) == Path(expected)


class DefectiveRestorer:
    def restore(self) -> tuple[Outcome, ...]:
        raise RecursionError("maximum recursion depth exceeded")


class OneValueRestorer:
    def __init__(self) -> None:
        self.calls = 0

    def restore(self) -> tuple[Outcome, ...]:
        self.calls += 1
        return ()


def test_a_defect_in_one_control_does_not_stop_the_restore_of_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    originals, files, second = (
        open_originals(tmp_path / "state", BOOT),
        KnobWriter(Tree(tmp_path, "v2").hierarchy),
        OneValueRestorer(),
    )
    remaining = restore_all(originals, files, (DefectiveRestorer(), second), None, DecisionJournal(None))
    assert (remaining, second.calls) == (1, 1)
    assert "Restoring stopped at an unexpected error" in caplog.text
    assert "1 values could not be restored: run `dioptase reset`" in caplog.text
    originals.close()
    files.close()

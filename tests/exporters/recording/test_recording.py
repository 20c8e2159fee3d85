"""What was recorded comes back exactly, whatever happened to the file; and the recorder keeps within its bound."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import exporters
from api.decision import Cycle
from api.interfaces import Unavailable
from api.units import MIB
from exporters.recording import recorder as recorder_module
from exporters.recording import segments
from exporters.recording.recorder import Recorder
from exporters.recording.segments import NotARecording, pack_cycle, read_recording, segment_header, segment_paths
from tests.builders.four_cpu_node import bare_cycle, busy_cycle
from tests.builders.full_node import full_cycle

PATIENCE_S = 20
Problems = list[tuple[str, str]]


def listed(path: Path, problems: Problems | None = None) -> list[Cycle]:
    """Every cycle; a damage that the test does not ask for fails it."""

    def damage(file: Path, text: str) -> None:
        assert problems is not None, f"{file}: {text}"
        problems.append((file.name, text))

    return list(read_recording(path, damage))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def record(directory: Path, cycles: list[Cycle], max_mib: int = 8) -> None:
    writer = Recorder(directory, max_mib, "1.2.3", retry_s=0.0)
    for done, finished in enumerate(cycles, 1):
        writer.publish(finished)
        wait_for(lambda done=done: writer.state.cycles + writer.state.lost_cycles >= done)
    writer.close()
    assert writer.state.lost_cycles == 0


def test_cycles_come_back_exactly_and_each_knows_the_one_before_it(tmp_path: Path) -> None:
    cycles = [full_cycle(seq, cgroups=3) for seq in range(1, 6)]
    record(tmp_path, cycles)
    back = listed(tmp_path)
    assert back == cycles
    assert isinstance(back[0].snapshot.node.run_delay_ns, dict)
    assert back[2].previous is back[1].snapshot


def test_a_gap_and_another_boot_leave_the_cycle_before_unknown(tmp_path: Path) -> None:
    other = msgspec.structs.replace(full_cycle(3).snapshot, boot_id="another")
    cycles = [full_cycle(1), full_cycle(2), msgspec.structs.replace(full_cycle(3), snapshot=other), full_cycle(9)]
    record(tmp_path, cycles)
    back = listed(tmp_path)
    assert [r.snapshot.seq for r in back] == [1, 2, 3, 9]
    assert [r.previous is None for r in back] == [True, False, True, True]
    assert len(segment_paths(tmp_path)) == 3, "a segment belongs to one boot"


@pytest.mark.parametrize("name", ["/caf\udce9", "/\x00e9", "/\x00", "/größe ☃", "/new\nline\"'", "/\ud800x", "\x00"])
def test_hostile_names_come_back_exactly(tmp_path: Path, name: str) -> None:
    finished = busy_cycle(2)
    web = msgspec.structs.replace(finished.snapshot.cgroups["/web"], path=name)
    pods = tuple(msgspec.structs.replace(pod, annotations={name: name}) for pod in finished.snapshot.pods)
    snapshot = msgspec.structs.replace(finished.snapshot, cgroups={name: web}, pods=pods)
    hostile = msgspec.structs.replace(finished, snapshot=snapshot, previous=None, startup_warnings=(name, "\x00plain"))
    record(tmp_path, [hostile])
    assert listed(tmp_path) == [hostile]


@given(
    st.dictionaries(st.text(st.characters(), max_size=8), st.integers(0, 2**63)), st.text(st.characters(), max_size=20)
)
@settings(deadline=None, max_examples=200)
def test_any_text_comes_back_exactly(stat: dict[str, int], name: str) -> None:
    finished = bare_cycle(1)
    root = msgspec.structs.replace(finished.snapshot.cgroups["/"], memory_stat=stat, path=name)
    snapshot = msgspec.structs.replace(finished.snapshot, cgroups={name: root})
    packed = pack_cycle(msgspec.structs.replace(finished, snapshot=snapshot))
    mark, length, _, flags = segments.RECORD_FRAME.unpack_from(packed)
    assert (mark, length) == (segments.RECORD_MARK, len(packed) - segments.RECORD_FRAME.size)
    assert segments.CycleUnpacker().unpack(packed[segments.RECORD_FRAME.size :], flags).snapshot == snapshot


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A segment of four cycles, each whole."""
    path = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recorder_module, "KEY_RECORD_INTERVAL", 1)
        record(path, [busy_cycle(seq) for seq in range(1, 5)])
    return segment_paths(path)[0].read_bytes()


def test_a_segment_says_what_it_is(full: bytes) -> None:
    line, _, records = full.partition(b"\n")
    described = msgspec.json.decode(line)
    assert (described["format"], described["version"], described["product"]) == ("dioptase-recording", 1, "1.2.3")
    assert "snapshot" in described["fields"]["$defs"]["Cycle"]["properties"]
    assert records.startswith(segments.RECORD_MARK)


def test_a_tail_that_was_cut_anywhere_costs_the_last_cycle_alone(tmp_path: Path, full: bytes) -> None:
    path = tmp_path / "00000001.dioptase"
    last = full.rindex(segments.RECORD_MARK)
    for cut in [last + 1, last + 4, last + segments.RECORD_FRAME.size, last + 100, len(full) - 1]:
        path.write_bytes(full[:cut])
        problems: Problems = []
        assert [r.snapshot.seq for r in listed(tmp_path, problems)] == [1, 2, 3]
        ((name, text),) = problems
        assert name == path.name
        assert f"{cut - last} bytes at {last} are skipped" in text
    path.write_bytes(full[:last])
    assert len(listed(tmp_path)) == 3


@given(st.integers(0, 1 << 20), st.binary(min_size=1, max_size=40))
@settings(deadline=None, max_examples=300)
def test_any_damage_is_survived_and_said(
    tmp_path_factory: pytest.TempPathFactory, full: bytes, place: int, garbage: bytes
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "00000001.dioptase"
    start = full.index(b"\n") + 1
    at = start + place % (len(full) - start)
    damaged = full[:at] + garbage + full[at + len(garbage) :]
    path.write_bytes(damaged)
    problems: Problems = []
    back = listed(path.parent, problems)
    good = {seq: busy_cycle(seq).snapshot for seq in range(1, 5)}
    assert all(r.snapshot == good[r.snapshot.seq] for r in back), "what comes back is true"
    assert len(back) >= 2, "damage in one place costs at most the two records it touches"
    assert bool(problems) == (damaged != full)


def test_damage_is_logged_without_a_callback(tmp_path: Path, full: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "00000001.dioptase").write_bytes(full[:-1])
    assert len(list(read_recording(tmp_path))) == 3
    assert "00000001.dioptase: the last record is cut short; " in caplog.text


def test_damage_in_the_middle_costs_that_cycle_alone(tmp_path: Path, full: bytes) -> None:
    second = full.index(segments.RECORD_MARK, full.index(segments.RECORD_MARK) + 1)
    damaged = bytearray(full)
    damaged[second + 60] ^= 1
    (tmp_path / "00000001.dioptase").write_bytes(damaged)
    problems: Problems = []
    back = listed(tmp_path, problems)
    assert [r.snapshot.seq for r in back] == [1, 3, 4]
    assert [r.previous is None for r in back] == [True, True, False]
    assert problems[0][1].startswith("a record is damaged; ")


def test_only_what_changed_is_recorded_and_every_sixtieth_cycle_is_whole(tmp_path: Path) -> None:
    cycles = [full_cycle(seq, cgroups=5) for seq in range(1, 2 * segments.KEY_RECORD_INTERVAL + 3)]
    record(tmp_path, cycles)
    assert listed(tmp_path) == cycles
    _sizes, flags = frames(segment_paths(tmp_path)[0].read_bytes())
    assert [at for at, flag in enumerate(flags) if flag == 0] == [
        0,
        segments.KEY_RECORD_INTERVAL,
        2 * segments.KEY_RECORD_INTERVAL,
    ]
    still = msgspec.structs.replace(
        cycles[-1], snapshot=msgspec.structs.replace(cycles[-1].snapshot, seq=999), evictions=None, kills=()
    )
    assert len(pack_cycle(still, cycles[-1])) < len(pack_cycle(still)) / 4, (
        "a node where nothing moves costs next to nothing"
    )


def frames(text: bytes) -> tuple[list[int], list[int]]:
    """Sizes and flags of the records of a segment."""
    at, sizes, flags = text.index(b"\n") + 1, [], []
    while at < len(text):
        _, length, _, flag = segments.RECORD_FRAME.unpack_from(text, at)
        sizes.append(length)
        flags.append(flag)
        at += segments.RECORD_FRAME.size + length
    return sizes, flags


def test_created_removed_and_recreated_cgroups_are_restored_exactly(tmp_path: Path) -> None:
    first, second, third = (full_cycle(seq, cgroups=3) for seq in (1, 2, 3))
    cgroups = dict(second.snapshot.cgroups)
    del cgroups["/other-1"]
    cgroups["/caf\udce9"] = msgspec.structs.replace(cgroups["/web"], path="/caf\udce9", id=77)
    recreated = msgspec.structs.replace(cgroups["/other-2"], id=78, blame=None, wait=None)
    cgroups["/other-2"] = recreated
    second = msgspec.structs.replace(second, snapshot=msgspec.structs.replace(second.snapshot, cgroups=cgroups))
    second = msgspec.structs.replace(second, previous=first.snapshot)
    third = msgspec.structs.replace(third, previous=second.snapshot, advice=None, outcomes=())
    record(tmp_path, [first, second, third])
    back = listed(tmp_path)
    assert back == [first, second, third]
    assert frames(segment_paths(tmp_path)[0].read_bytes())[1] == [0, 3, 3]


def test_what_builds_on_a_damaged_record_is_left_out_up_to_the_next_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "KEY_RECORD_INTERVAL", 4)
    record(tmp_path, [busy_cycle(seq) for seq in range(1, 10)])
    path = segment_paths(tmp_path)[0]
    text = bytearray(path.read_bytes())
    second = text.index(segments.RECORD_MARK, text.index(segments.RECORD_MARK) + 1)
    text[second + 40] ^= 1
    path.write_bytes(text)
    problems: Problems = []
    assert [r.snapshot.seq for r in listed(tmp_path, problems)] == [1, 5, 6, 7, 8, 9]
    assert [text.partition("; ")[0] for _, text in problems] == [
        "a record is damaged",
        "a record is complete but contains no cycle: it builds on cycle 2, which is missing",
        "a record is complete but contains no cycle: it builds on cycle 3, which is missing",
    ]


def framed(text: bytes, flags: int = 0) -> bytes:
    payload = zlib.compress(text, 9)
    return segments.RECORD_FRAME.pack(segments.RECORD_MARK, len(payload), zlib.crc32(payload), flags) + payload


@pytest.mark.parametrize(
    ("text", "flags", "lines"),
    [
        (b"\x90" * (segments.MAX_CYCLE_BYTES + 1), 0, "it has more than 33554432 bytes"),
        (b"\x91" * 1_000_000 + b"\xc0", 0, "recursion"),
        (b"\x91" * 900 + b"\xc0", segments.FLAG_HEX_NAMES, ""),
        (b"\x91" * 900 + b"\xc0", segments.FLAG_DELTA, ""),
        (b"\xc0", 0, "Expected `object`, got `null`"),
    ],
)
def test_a_record_made_to_harm_costs_itself_alone(
    tmp_path: Path, full: bytes, text: bytes, flags: int, lines: str
) -> None:
    (tmp_path / "00000001.dioptase").write_bytes(full + framed(text, flags))
    problems: Problems = []
    assert [r.snapshot.seq for r in listed(tmp_path, problems)] == [1, 2, 3, 4]
    ((_, problem),) = problems
    assert problem.startswith("a record is complete but contains no cycle: ")
    assert lines in problem


def test_a_record_that_unpacks_to_gigabytes_costs_no_memory(tmp_path: Path, full: bytes) -> None:
    """In a process of its own, with a limit of address space: two GiB come of two MiB."""
    zeros = zlib.compressobj(1)
    payload = b"".join([*(zeros.compress(bytes(1 << 20)) for _ in range(2048)), zeros.flush()])
    frame = segments.RECORD_FRAME.pack(segments.RECORD_MARK, len(payload), zlib.crc32(payload), 0)
    (tmp_path / "00000001.dioptase").write_bytes(full + frame + payload)
    script = (
        "import resource, sys, pathlib; from exporters.recording.segments import read_recording;"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30));"
        "print(len(list(read_recording(pathlib.Path(sys.argv[1]), lambda *_: None))))"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("4\n", "")


def test_a_cycle_that_could_not_be_read_back_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Recorder(tmp_path, 8, "1", retry_s=0.0)
    with monkeypatch.context() as patched:
        patched.setattr(segments, "MAX_CYCLE_BYTES", 1000)
        writer.publish(busy_cycle(1))
        wait_for(lambda: writer.state.lost_cycles == 1)
    problem = writer.problem()
    assert problem is not None
    assert re.search("a cycle has .* bytes, and recordings allow 1000", problem.reason)
    assert "maxCgroups" in problem.remedy
    writer.publish(busy_cycle(2))
    wait_for(lambda: writer.state.writable)
    writer.close()
    assert [r.snapshot.seq for r in listed(tmp_path)] == [2]


def test_marks_that_all_claim_the_rest_are_given_up(
    tmp_path: Path, full: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[int] = []
    real = zlib.crc32
    monkeypatch.setattr(segments.zlib, "crc32", lambda text: added.append(len(text)) or real(text))
    count, size = 2000, segments.RECORD_FRAME.size
    marks = b"".join(
        segments.RECORD_FRAME.pack(segments.RECORD_MARK, (count - at - 1) * size, 0, 0) for at in range(count)
    )
    (tmp_path / "00000001.dioptase").write_bytes(full + marks)
    problems: Problems = []
    assert [r.snapshot.seq for r in listed(tmp_path, problems)] == [1, 2, 3, 4]
    assert problems[-1][1].startswith("too many damaged records; ")
    assert sum(added) <= (segments.MAX_DAMAGED_RATIO + 2) * len(full + marks)


def test_a_pipe_in_place_of_a_segment_is_not_waited_for(tmp_path: Path, full: bytes) -> None:
    os.mkfifo(tmp_path / "00000001.dioptase")
    (tmp_path / "00000002.dioptase").write_bytes(full)
    problems: Problems = []
    assert len(listed(tmp_path, problems)) == 4
    assert "not a regular file" in problems[0][1]
    with pytest.raises(OSError, match="not a regular file"):
        listed(tmp_path / "00000001.dioptase")


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (b"", "not a recording"),
        (b"\x00\xff" * 50, "not a recording"),
        (b"{}\n", "not a recording"),
        (b'{"product":"","boot_id":"","began_ns":0,"version":9}\n', "dioptase-recording of version 9"),
        (b'{"product":"","boot_id":"","began_ns":0,"format":"tar"}\n', "tar of version 1"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, text: bytes, lines: str) -> None:
    (tmp_path / "00000001.dioptase").write_bytes(text)
    with pytest.raises(NotARecording, match=lines):
        listed(tmp_path)


def test_a_segment_without_a_header_costs_itself_alone(tmp_path: Path) -> None:
    for seq in (1, 2, 3):
        record(tmp_path, [busy_cycle(seq)])
    segment_paths(tmp_path)[1].write_bytes(b"")
    problems: Problems = []
    assert [finished.snapshot.seq for finished in listed(tmp_path, problems)] == [1, 3]
    assert [name for name, _ in problems] == ["00000002.dioptase"]


def test_an_empty_directory_and_other_files_are_no_recording(tmp_path: Path) -> None:
    (tmp_path / "notes.dioptase").write_text("mine")
    (tmp_path / "00000001.txt").write_text("mine")
    with pytest.raises(NotARecording, match="it contains no recording"):
        listed(tmp_path)


def test_the_oldest_go_when_the_bound_is_reached_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MIB", 1 << 15)  # eight "MiB" of 32 kB: segments of 32 kB
    mine = tmp_path / "mine.txt"
    mine.write_text("x" * 100_000)
    cycles = [busy_cycle(seq, cgroups=40) for seq in range(1, 120)]
    record(tmp_path, cycles)
    size = sum(path.stat().st_size for path in segment_paths(tmp_path))
    assert size <= 8 * (1 << 15)
    back = listed(tmp_path)
    assert 1 < len(back) < len(cycles)
    assert back[1:] == cycles[-len(back) + 1 :], "the newest, without a gap"
    assert mine.exists()


def test_a_new_recorder_goes_on_behind_what_an_earlier_one_left(tmp_path: Path) -> None:
    record(tmp_path, [busy_cycle(1), busy_cycle(2)])
    torn = segment_paths(tmp_path)[0]
    torn.write_bytes(torn.read_bytes()[:-10])
    record(tmp_path, [busy_cycle(3)])
    assert [path.name for path in segment_paths(tmp_path)] == ["00000001.dioptase", "00000002.dioptase"]
    problems: Problems = []
    assert [r.snapshot.seq for r in listed(tmp_path, problems)] == [1, 3]
    assert len(problems) == 1


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(Unavailable, match="cannot record to") as refused:
        Recorder(file, 8, "1")
    assert "--record" in refused.value.remedy


def truncate(path: Path) -> None:
    os.truncate(path, 100)


@pytest.mark.parametrize("take", [Path.unlink, truncate, lambda path: shutil.rmtree(path.parent)])
def test_a_segment_that_is_taken_away_is_followed_by_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, take: Callable[[Path], None]
) -> None:
    directory = tmp_path / "recording"
    writer = Recorder(directory, 8, "1", retry_s=0.0)
    for seq in range(1, 5):
        if seq == 3:
            take(directory / "00000001.dioptase")
        writer.publish(busy_cycle(seq))
        wait_for(lambda seq=seq: writer.state.cycles == seq)
    writer.close()
    assert (writer.state.writable, writer.state.lost_cycles) == (True, 0)
    assert [r.snapshot.seq for r in listed(directory, [])] == [3, 4]
    assert writer.state.size_bytes == sum(path.stat().st_size for path in segment_paths(directory))
    assert [r.getMessage() for r in caplog.records] == [
        f"{directory}/00000001.dioptase was deleted or changed; starting another segment"
    ]


def test_every_problem_of_the_directory_has_its_own_remedy(tmp_path: Path) -> None:
    directory = tmp_path / "recording"
    writer = Recorder(directory, 8, "1", retry_s=0.0)
    directory.rmdir()
    directory.write_text("")
    writer.publish(busy_cycle(1))
    wait_for(lambda: writer.state.lost_cycles == 1)
    problem = writer.problem()
    assert problem is not None
    assert "File exists" in problem.reason
    assert "check the directory" in problem.remedy
    directory.unlink()
    writer.publish(busy_cycle(2))
    wait_for(lambda: writer.state.writable)
    writer.close()
    assert [r.snapshot.seq for r in listed(directory)] == [2]


def test_a_directory_belongs_to_one_recorder(tmp_path: Path) -> None:
    directory = tmp_path / "recording"
    first = Recorder(directory, 8, "1")
    for _ in range(2):
        with pytest.raises(Unavailable, match="another agent records there") as refused:
            Recorder(directory, 8, "1")
        assert "--record" in refused.value.remedy
        shutil.rmtree(directory)
        first.publish(busy_cycle(1))
        wait_for(lambda: (directory / "00000001.dioptase").exists() or (directory / "00000002.dioptase").exists())
    first.close()
    Recorder(directory, 8, "1").close()


def test_what_is_called_like_a_segment_and_is_none_stays_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MIB", 1 << 15)
    (tmp_path / "00000001.dioptase").mkdir()
    (tmp_path / "00000002.dioptase").symlink_to("nowhere")
    os.mkfifo(tmp_path / "00000003.dioptase")
    record(tmp_path, [busy_cycle(seq, cgroups=40) for seq in range(1, 60)])
    actual = [path.name for path in segment_paths(tmp_path)]
    assert actual[:3] == ["00000001.dioptase", "00000002.dioptase", "00000003.dioptase"]
    assert int(actual[3][:8]) > 4, "segments of our own went to make room"


def test_numbers_go_on_beyond_eight_digits(tmp_path: Path) -> None:
    (tmp_path / "99999999.dioptase").write_bytes(b"")
    (tmp_path / "0123456789.dioptase").write_bytes(b"no segment has a zero before nine digits")
    for seq in (1, 2):
        record(tmp_path, [busy_cycle(seq)])
    names = ["99999999.dioptase", "100000000.dioptase", "100000001.dioptase"]
    assert [path.name for path in segment_paths(tmp_path)] == names
    assert [r.snapshot.seq for r in listed(tmp_path, [])] == [1, 2]


def test_a_disk_slower_than_cycles_costs_cycles_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = recorder_module.threading.Event()
    monkeypatch.setattr(recorder_module, "pack_cycle", lambda *cycles: stuck.wait(PATIENCE_S) and pack_cycle(*cycles))
    writer = Recorder(tmp_path, 8, "1")
    for seq in range(1, 21):
        writer.publish(busy_cycle(seq))
    stuck.set()
    wait_for(lambda: writer.state.cycles + writer.state.lost_cycles == 20)
    writer.close()
    assert writer.state.lost_cycles >= 20 - recorder_module.MAX_QUEUED_CYCLES - 1
    assert len(listed(tmp_path)) == writer.state.cycles


def test_losses_of_both_threads_are_all_counted(tmp_path: Path) -> None:
    """Between any two steps of `publish` the thread that writes may lose a cycle, too; here it always does."""
    writer = Recorder(tmp_path, 8, "1")
    writer.close()
    for seq in range(recorder_module.MAX_QUEUED_CYCLES):
        writer.publish(busy_cycle(seq))
    lost = 0

    def step(frame: FrameType, event: str, _argument: object) -> Callable[..., object] | None:
        nonlocal lost
        if frame.f_code is not Recorder.publish.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            writer._failed(OSError(errno.ENOSPC, "no space"))
            lost += 1
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        writer.publish(busy_cycle(9))
    finally:
        sys.settrace(before)
    assert lost > 10
    assert writer.state.lost_cycles == lost + 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"this machine mounts no tmpfs: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.mark.kernel
def test_a_full_disk_stops_the_recording_says_so_and_lets_it_go_on(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ballast = small_disk / "ballast"
    writer = Recorder(small_disk, 8, "1", retry_s=0.0)
    with caplog.at_level(logging.INFO):
        writer.publish(busy_cycle(1, cgroups=20))
        wait_for(lambda: writer.state.cycles == 1)
        assert writer.problem() is None
        room = os.statvfs(small_disk)
        ballast.write_bytes(b"x" * (room.f_bavail * room.f_frsize))
        seq = 2
        while writer.state.writable:
            writer.publish(busy_cycle(seq, cgroups=20))
            wait_for(lambda seq=seq: writer.state.cycles + writer.state.lost_cycles == seq)
            seq += 1
        problem = writer.problem()
        assert problem is not None
        assert "No space left on device" in problem.reason
        assert "--record" in problem.remedy
        good = writer.state.cycles
        for more in range(seq, seq + 3):
            writer.publish(busy_cycle(more, cgroups=20))
            wait_for(lambda more=more: writer.state.lost_cycles == more - good)
        assert len(listed(small_disk)) == good, "nothing is half written"
        ballast.unlink()
        writer.publish(busy_cycle(seq + 3, cgroups=20))
        wait_for(lambda: writer.state.writable)
        writer.close()
    assert [r.snapshot.seq for r in listed(small_disk)] == [*range(1, good + 1), seq + 3]
    assert writer.problem() is None
    messages = [record.getMessage() for record in caplog.records]
    assert sum("are not recorded" in message for message in messages) == 1
    assert sum("continues; " in message for message in messages) == 1


def test_the_bound_is_at_least_one_mebibyte_a_segment() -> None:
    assert 16 * len(segment_header("1", "b", 0)) <= exporters.MIN_RECORDING_MIB * MIB // recorder_module.MAX_SEGMENTS

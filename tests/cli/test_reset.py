"""`dioptase reset` as a person meets it: what it says and its exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from agent.qrm.actuator.originals import FILE_NAME, encode_journal
from agent.qrm.actuator.state_dir import open_originals, read_boot_id
from agent.qrm.actuator.writer import OriginalValue, RawValue
from api.knobs import Knob
from cli.demo import _state_dir
from cli.reset import reset

REMOVED = OriginalValue(
    cgroup="/dioptase-test-no-such-cgroup",
    cgroup_id=1,
    knob=Knob.IDLE,
    raw=RawValue(directory_id=1, texts={"cpu.idle": "0\n"}),
)


def run(state: Path) -> Result:
    return CliRunner().invoke(reset, ["--state-dir", str(state)])


def test_without_a_state_directory_there_is_nothing_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.reset.default_state_dir", lambda: tmp_path / "none")
    result = CliRunner().invoke(reset, [])
    assert (result.exit_code, result.output) == (
        0,
        f"Nothing to restore: {tmp_path}/none does not exist. If the agent had another --state-dir, name it.\n",
    )
    assert not (tmp_path / "none").exists()


def test_what_a_killed_demo_left_is_put_back_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.reset.default_state_dir", lambda: tmp_path)
    monkeypatch.setattr("cli.demo.default_state_dir", lambda: tmp_path)
    own, demos = tmp_path / FILE_NAME, _state_dir() / FILE_NAME
    assert demos.parent == tmp_path / "demo"
    assert CliRunner().invoke(reset, []).output == "Nothing is left to restore.\n"
    demos.parent.mkdir(mode=0o700)
    for path in (own, demos):
        path.write_bytes(encode_journal(read_boot_id(), [REMOVED]))
    holder = open_originals(tmp_path, read_boot_id())
    result = CliRunner().invoke(reset, [])
    assert result.exit_code == 1
    assert "is in use by process" in result.stderr
    assert (own.exists(), demos.exists()) == (True, False)
    holder.close()
    result = CliRunner().invoke(reset, [])
    assert (result.exit_code, result.output.count("Nothing is left to restore.")) == (0, 2)
    assert not own.exists()


def test_a_new_demo_does_not_count_the_decisions_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.demo.default_state_dir", lambda: tmp_path)
    state = tmp_path / "demo"
    state.mkdir()
    for name in (FILE_NAME, "decisions.jsonl", "decisions.jsonl.1"):
        (state / name).write_text("")
    assert _state_dir() == state
    assert [path.name for path in state.iterdir()] == [FILE_NAME]


def test_an_empty_journal_is_all_done(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert (result.exit_code, result.output) == (0, "Nothing is left to restore.\n")


def test_cgroups_that_are_gone_need_nothing(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(encode_journal(read_boot_id(), [REMOVED]))
    result = run(tmp_path)
    assert result.exit_code == 0
    assert "/dioptase-test-no-such-cgroup  cpu.idle" in result.output
    assert "cgroup was removed" in result.output
    assert not (tmp_path / FILE_NAME).exists()
    assert run(tmp_path).output == "Nothing is left to restore.\n"


def test_originals_of_another_boot_are_dropped_aloud(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(encode_journal("another-boot", [REMOVED]))
    result = run(tmp_path)
    assert result.exit_code == 0
    assert "dropped 1 originals of another boot" in result.stderr


def test_a_damaged_journal_is_no_success_until_a_person_removed_it(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(encode_journal(read_boot_id(), [REMOVED])[:-9])
    aside = tmp_path / f"{FILE_NAME}.damaged-1"
    for _ in range(2):
        result = run(tmp_path)
        assert result.exit_code == 1
        assert f"{aside} holds originals that could not be read" in result.stderr
    aside.unlink()
    assert run(tmp_path).exit_code == 0


def test_a_state_directory_in_use_is_left_alone(tmp_path: Path) -> None:
    holder = open_originals(tmp_path, read_boot_id())
    holder.record(REMOVED)
    result = run(tmp_path)
    holder.close()
    assert result.exit_code == 1
    assert "is in use by process" in result.stderr
    assert result.stdout == ""
    assert (tmp_path / FILE_NAME).exists()

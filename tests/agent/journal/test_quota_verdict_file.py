"""Verdicts of quota trials on disk: after a restart, on another kernel, on a full disk, and with any content at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.advisor.advisor_state import QuotaTrialState
from agent.advisor.quota_trial import MAX_VERDICTS, current_verdict
from agent.journal.quota_verdict_file import (
    FILE_NAME,
    MAX_BYTES,
    RETRY_S,
    VERSION,
    QuotaVerdictFile,
    SavedQuotaVerdicts,
)
from api.advice import QuotaVerdict
from api.interfaces import Unavailable
from common.state_file import encode_state
from tests.builders.quota_verdicts import WALL_NS, S, quota_verdict

KERNEL = "6.18.5"
VERDICTS = (quota_verdict(), quota_verdict(helped=False, key="11"))


def test_a_restarted_agent_has_the_verdicts(tmp_path: Path) -> None:
    QuotaVerdictFile(tmp_path, KERNEL).save(VERDICTS)
    file = QuotaVerdictFile(tmp_path, KERNEL)
    assert file.load() == VERDICTS
    assert file.messages == ()


def test_without_a_file_there_is_none(tmp_path: Path) -> None:
    file = QuotaVerdictFile(tmp_path, KERNEL)
    assert (file.load(), file.messages) == ((), ())


def test_another_kernel_tries_every_quota_again(tmp_path: Path) -> None:
    QuotaVerdictFile(tmp_path, KERNEL).save(VERDICTS)
    file = QuotaVerdictFile(tmp_path, "6.18.6")
    assert (file.load(), file.messages) == ((), ())
    file.save((VERDICTS[0],))
    assert QuotaVerdictFile(tmp_path, KERNEL).load() == ()


def test_it_is_written_when_the_verdicts_change(tmp_path: Path) -> None:
    file, path = QuotaVerdictFile(tmp_path, KERNEL), tmp_path / FILE_NAME
    file.save(())
    assert not path.exists()
    file.save(VERDICTS)
    first = path.stat().st_ino
    file.save(tuple(VERDICTS))
    assert path.stat().st_ino == first
    file.save(VERDICTS[:1])
    assert QuotaVerdictFile(tmp_path, KERNEL).load() == VERDICTS[:1]


def test_the_largest_file_that_is_written_can_be_read(tmp_path: Path) -> None:
    longest = ", ".join(["n" * 63 + "/" + "w" * 253] * 3) + " and 250 more"
    verdicts = tuple(quota_verdict(key=f"{i:016x}", workloads=longest) for i in range(MAX_VERDICTS))
    QuotaVerdictFile(tmp_path, KERNEL).save(verdicts)
    assert QuotaVerdictFile(tmp_path, KERNEL).load() == verdicts
    assert (tmp_path / FILE_NAME).stat().st_size < MAX_BYTES


@pytest.mark.parametrize("hold_s", [0, -1, 3601, 10**10])
def test_a_verdict_never_holds_for_longer_than_an_hour(tmp_path: Path, hold_s: int) -> None:
    strange = quota_verdict(expires_wall_ns=WALL_NS + hold_s * S)
    (tmp_path / FILE_NAME).write_bytes(encode_state(SavedQuotaVerdicts(kernel=KERNEL, verdicts=(strange, *VERDICTS))))
    assert QuotaVerdictFile(tmp_path, KERNEL).load() == VERDICTS


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (b"", "cannot be read"),
        (b"{", "cannot be read"),
        (encode_state(SavedQuotaVerdicts(kernel=KERNEL, verdicts=VERDICTS)).replace(b"41", b"14", 1), "checksum"),
        (encode_state(SavedQuotaVerdicts(version=VERSION + 1, kernel=KERNEL, verdicts=())), "layout version 2"),
    ],
)
def test_a_damaged_file_is_renamed_with_a_warning(tmp_path: Path, damaged: bytes, message: str) -> None:
    path = tmp_path / FILE_NAME
    path.write_bytes(damaged)
    file = QuotaVerdictFile(tmp_path, KERNEL)
    assert file.load() == ()
    (warning,) = file.messages
    assert warning.startswith(f"Every CPU quota is tried again: {path} is damaged: ")
    assert message in warning
    assert f"It was renamed to {path}.damaged-1." in warning
    assert (tmp_path / f"{FILE_NAME}.damaged-1").read_bytes() == damaged
    file.save(VERDICTS)
    assert QuotaVerdictFile(tmp_path, KERNEL).load() == VERDICTS


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=300)
    | st.text(max_size=200).map(str.encode)
    | st.tuples(st.integers(0, 900), st.binary(min_size=1, max_size=4)).map(
        lambda edit: _with(encode_state(SavedQuotaVerdicts(kernel=KERNEL, verdicts=VERDICTS)), *edit)
    )
)
def test_any_content_gives_the_verdicts_or_a_warning_and_a_fresh_start(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / FILE_NAME
    for old in tmp_path.glob(f"{FILE_NAME}*"):
        old.unlink()
    path.write_bytes(content)
    file = QuotaVerdictFile(tmp_path, KERNEL)
    verdicts = file.load()
    intact = content == encode_state(SavedQuotaVerdicts(kernel=KERNEL, verdicts=VERDICTS))
    assert (verdicts, len(file.messages)) == ((VERDICTS, 0) if intact else ((), 1))
    file.save(VERDICTS)
    assert QuotaVerdictFile(tmp_path, KERNEL).load() == VERDICTS


def _with(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def test_a_file_that_cannot_be_read_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    file = QuotaVerdictFile(tmp_path, KERNEL)
    assert file.load() == ()
    assert "cannot be read" in file.messages[0]


def test_a_full_disk_is_reported_until_a_write_succeeds_and_tried_once_a_minute(tmp_path: Path) -> None:
    now = 0.0
    directory = tmp_path / "gone"
    file = QuotaVerdictFile(directory, KERNEL, clock=lambda: now)
    for _ in range(2):
        with pytest.raises(Unavailable, match=f"cannot be written to {directory}/{FILE_NAME}: No such file"):
            file.save(VERDICTS)
    directory.mkdir()
    with pytest.raises(Unavailable):
        file.save(VERDICTS)
    now = RETRY_S
    file.save(VERDICTS)
    assert QuotaVerdictFile(directory, KERNEL).load() == VERDICTS


@pytest.mark.parametrize(
    ("after_s", "holds"), [(-1, False), (0, True), (3599, True), (3600, False)], ids=["set back", "now", "last", "over"]
)
def test_a_verdict_holds_from_its_trial_for_an_hour(after_s: int, *, holds: bool) -> None:
    state = QuotaTrialState(verdicts=VERDICTS)
    current: QuotaVerdict | None = current_verdict(state, "11", WALL_NS + after_s * S)
    assert current == (VERDICTS[1] if holds else None)
    assert current_verdict(state, "22", WALL_NS) is None

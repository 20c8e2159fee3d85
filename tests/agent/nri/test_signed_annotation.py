"""Signed annotations: verified by the next agent with the key, refused without it, and what happens to a bad key."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.nri.signed_annotation import KEY_FILE, open_signed_annotations
from api.knobs import Knob

PAIRS = {Knob.QUOTA: ("max 100000", "5000 100000")}


def test_only_an_agent_with_the_same_state_directory_verifies_an_annotation(tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    first = open_signed_annotations(here)
    first.save_key()
    note = first.write("id", PAIRS)
    assert open_signed_annotations(here).read("id", note) == PAIRS
    assert (here / KEY_FILE).stat().st_mode & 0o777 == 0o600
    for notes, container in ((open_signed_annotations(elsewhere), "id"), (open_signed_annotations(here), "id2")):
        with pytest.raises(ValueError, match="signature is not that of this node's agent"):
            notes.read(container, note)


@pytest.mark.parametrize("pairs", [b"", b"k" * 31, b"k" * 33])
def test_a_key_of_another_length_is_replaced(tmp_path: Path, pairs: bytes) -> None:
    (tmp_path / KEY_FILE).write_bytes(pairs)
    notes = open_signed_annotations(tmp_path)
    assert (tmp_path / KEY_FILE).read_bytes() == pairs, "opening it does not wait for the disk"
    notes.save_key()
    note = notes.write("id", PAIRS)
    assert len((tmp_path / KEY_FILE).read_bytes()) == 32
    assert open_signed_annotations(tmp_path).read("id", note) == PAIRS


def test_a_key_that_cannot_be_saved_works_for_this_agent_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / KEY_FILE).mkdir()
    notes = open_signed_annotations(tmp_path)
    notes.save_key()
    assert notes.read("id", notes.write("id", PAIRS)) == PAIRS
    assert "cannot be read and is created again: Is a directory" in caplog.text
    assert "cannot be written: Is a directory" in caplog.text


@pytest.mark.parametrize("text", ["x" * 4097, "{", "[]", '{"seal":"é","knobs":{}}', '{"seal":1,"knobs":{}}'])
def test_any_other_annotation_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError):
        open_signed_annotations(tmp_path).read("id", text)

"""Compiled forms in files: what is kept, what is refused, and that nothing depends on them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from probes import compiled_forms
from probes.compiled_forms import (
    CompiledForm,
    FormLayout,
    MapSpec,
    cache_directory,
    file_name,
    read_form,
    read_layout,
    replace_maps,
    write_form,
    write_layout,
)

LOAD_MAP_3 = bytes([0x18, 0x11, 0, 0, 3, 0, 0, 0]) + bytes(8)
LOAD_NUMBER_3 = bytes([0x18, 0x01, 0, 0, 3, 0, 0, 0]) + bytes(8)
RETURN = bytes([0x95, 0, 0, 0, 0, 0, 0, 0])
WAITS = MapSpec("waits", ["u32", 4], {"slots": 16}, kind=6, key_size=4, value_size=128, max_entries=512, flags=0)
A, B, C, D, E = (letter * 64 for letter in "abcde")
FORM = CompiledForm([WAITS], {"on_switch": LOAD_MAP_3 + RETURN})


@pytest.mark.parametrize(
    ("code", "result"),
    [
        (RETURN, RETURN),
        (LOAD_MAP_3 + RETURN, bytes([0x18, 0x11, 0, 0, 7, 1, 0, 0]) + bytes(8) + RETURN),
        (LOAD_NUMBER_3 + RETURN, LOAD_NUMBER_3 + RETURN),
        # The second half of a 64-bit number is data, also where it looks like an instruction that loads a map.
        (LOAD_NUMBER_3[:8] + LOAD_MAP_3[:8], LOAD_NUMBER_3[:8] + LOAD_MAP_3[:8]),
    ],
    ids=["no map", "a map", "a number", "the second half of a number"],
)
def test_the_number_of_a_map_is_replaced_and_no_other(code: bytes, result: bytes) -> None:
    assert replace_maps(code, {3: 263}) == result


def test_a_map_that_is_not_known_is_an_error() -> None:
    with pytest.raises(KeyError):
        replace_maps(LOAD_MAP_3, {4: 0})


def test_a_form_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    write_form(directory, "name", FORM)
    assert read_form(directory, "name") == FORM
    assert read_form(directory, "another") is None
    assert (directory.stat().st_mode & 0o777, (directory / "name").stat().st_mode & 0o777) == (0o700, 0o600)
    assert [entry.name for entry in directory.iterdir()] == ["name"]


def test_a_layout_is_read_back_and_a_damaged_one_is_not_used(tmp_path: Path) -> None:
    layout = FormLayout({"LAST_QUEUED": 2320, "DELAYED_BIT": 8}, [71234, 0])
    write_layout(tmp_path, A, layout)
    assert read_layout(tmp_path, A) == layout
    assert read_layout(tmp_path, B) is None
    write_form(tmp_path, B, FORM)
    assert read_layout(tmp_path, B) is None
    assert read_form(tmp_path, A) is None
    (tmp_path / A).write_text((tmp_path / A).read_text().replace("2320", "2321"))
    assert read_layout(tmp_path, A) is None


def test_every_part_of_the_name_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {file_name(parts) for parts in (["a", "b"], ["ab"], ["a", "b", ""], ["b", "a"])}
    kernel = os.uname()
    other = os.uname_result((*kernel[:3], kernel.version + " rebuilt", kernel.machine))
    monkeypatch.setattr(compiled_forms.os, "uname", lambda: other)
    assert len({*names, file_name(["a", "b"])}) == 5


@pytest.mark.parametrize("size", [0, 10, 64, 65, 100, -1], ids=lambda size: f"{size} bytes")
def test_a_torn_file_is_not_used(tmp_path: Path, size: int) -> None:
    write_form(tmp_path, "name", FORM)
    path = tmp_path / "name"
    path.write_bytes(path.read_bytes()[:size])
    assert read_form(tmp_path, "name") is None
    write_form(tmp_path, "name", FORM)
    assert read_form(tmp_path, "name") == FORM


@pytest.mark.parametrize(
    "body", [b"[]", b"{}", b'{"maps": [{"name": 1}], "programs": {}}', b'{"maps": [], "programs": 1}']
)
def test_a_file_of_another_shape_is_not_used(tmp_path: Path, body: bytes) -> None:
    checksum = compiled_forms.hashlib.sha256(body).hexdigest().encode()
    (tmp_path / "name").write_bytes(checksum + b"\n" + body)
    assert read_form(tmp_path, "name") is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"macros": {}, "targets": [1e999]}',
        b'{"macros": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"macros": {}, "targets": [' + b"9" * 5_000 + b"]}",
    ],
    ids=["infinite", "nested", "digits"],
)
def test_a_layout_with_impossible_numbers_or_nesting_is_not_used(tmp_path: Path, body: bytes) -> None:
    checksum = compiled_forms.hashlib.sha256(body).hexdigest().encode()
    (tmp_path / "name").write_bytes(checksum + b"\n" + body)
    assert read_layout(tmp_path, "name") is None
    assert read_form(tmp_path, "name") is None


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    """Opening a FIFO without a writer would wait for ever."""
    os.mkfifo(tmp_path / "fifo", 0o600)
    (tmp_path / "directory").mkdir(mode=0o700)
    for name in ("fifo", "directory"):
        assert read_form(tmp_path, name) is None
        assert read_layout(tmp_path, name) is None


@pytest.mark.parametrize("what", ["directory", "file"])
def test_what_others_can_write_is_not_used(tmp_path: Path, what: str) -> None:
    directory = tmp_path / "cache"
    write_form(directory, "name", FORM)
    path = {"directory": directory, "file": directory / "name"}[what]
    path.chmod(path.stat().st_mode | 0o020)
    assert read_form(directory, "name") is None
    if what == "directory":
        with pytest.raises(PermissionError):
            write_form(directory, "another", FORM)
        assert [entry.name for entry in directory.iterdir()] == ["name"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("what", ["directory", "file"])
def test_what_belongs_to_another_user_is_not_used(tmp_path: Path, what: str) -> None:
    directory = tmp_path / "cache"
    write_form(directory, "name", FORM)
    os.chown({"directory": directory, "file": directory / "name"}[what], 65534, -1)
    assert read_form(directory, "name") is None


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    write_form(real, "name", FORM)
    link.symlink_to(real)
    assert read_form(link, "name") is None
    (real / "linked").symlink_to(real / "name")
    assert read_form(real, "linked") is None


def test_a_directory_that_cannot_be_written_is_an_error_of_the_system(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    for directory in (occupied, occupied / "below", tmp_path / "no" / "parent"):
        with pytest.raises(OSError, match=r"Not a directory|No such file"):
            write_form(directory, "name", FORM)
        assert read_form(directory, "name") is None


def test_a_file_that_another_process_writes_stays_for_ten_minutes_and_blocks_no_other(tmp_path: Path) -> None:
    """A killed process leaves it; two containers that share the directory can have the same process id."""
    written, left, numbered = (tmp_path / f".{A}.{suffix}" for suffix in ("0" * 16, "1" * 16, str(os.getpid())))
    for path, age_s in ((written, 590), (left, 610), (numbered, 0)):
        path.write_text("half")
        os.utime(path, times=(time.time() - age_s,) * 2)
    write_form(tmp_path, A, FORM)
    assert read_form(tmp_path, A) == FORM
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([written.name, numbered.name, A])
    assert written.read_text() == "half"


def test_a_form_that_vanishes_while_the_oldest_are_removed_is_no_error(tmp_path: Path) -> None:
    (tmp_path / B).symlink_to("missing")
    write_form(tmp_path, A, FORM)
    assert read_form(tmp_path, A) == FORM


def test_the_forms_used_longest_ago_are_removed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_forms, "MAX_FILES", 3)
    foreign = ["originals.json", "a" * 63, "notes.key"]
    for name in foreign:
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, ns=(0, 0))
    for number, name in enumerate((A, B, C, D)):
        write_form(tmp_path, name, FORM)
        os.utime(tmp_path / name, ns=(number, number))
        if name == C:
            assert read_form(tmp_path, A) is not None, "A is in use"
    write_form(tmp_path, E, FORM)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([*foreign, A, D, E])


@pytest.mark.parametrize(
    ("value", "directory"), [(None, Path("/var/cache/dioptase")), ("/run/x", Path("/run/x")), ("", None)]
)
def test_the_directory_is_named_by_a_variable(
    monkeypatch: pytest.MonkeyPatch, value: str | None, directory: Path | None
) -> None:
    monkeypatch.delenv("DIOPTASE_CACHE_DIR", raising=False)
    if value is not None:
        monkeypatch.setenv("DIOPTASE_CACHE_DIR", value)
    assert cache_directory() == directory

"""Offsets are compared with what C gives for the same struct; damage must end in BtfError, never in anything else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes import btf
from probes.btf import Btf, BtfError, Field
from tests.probes.blob import Blob, sample


@pytest.mark.parametrize(
    ("path", "offset", "size"),
    [
        ("info", 8, 16),
        ("info.runs", 8, 8),
        ("info.queued", 16, 8),
        ("left", 24, 4),
        ("right", 28, 4),
        ("whole", 24, 8),
        ("next", 32, 8),
        ("name", 40, 16),
        ("after", 60, 4),
    ],
)
def test_offsets_and_sizes_are_those_of_c(path: str, offset: int, size: int) -> None:
    assert Btf(sample()).field("task", path) == Field(offset, size)


@pytest.mark.parametrize(
    ("struct_name", "path", "words"),
    [
        ("task", "bits", "task: bits is a bitfield"),
        ("old", "flag", "old: flag is a bitfield"),
        ("task", "missing", "struct task of this kernel has no member missing"),
        ("task", "next.runs", "struct task of this kernel has no member next.runs"),
        ("task", "info.missing", "no member info.missing"),
        ("nobody", "x", "no struct nobody"),
        ("info_t", "runs", "no struct info_t"),
        ("task", "", "no member"),
    ],
)
def test_what_is_not_there_is_named(struct_name: str, path: str, words: str) -> None:
    with pytest.raises(BtfError, match=words):
        Btf(sample()).field(struct_name, path)


def test_an_ordinary_member_of_the_old_encoding_is_no_bitfield() -> None:
    assert Btf(sample()).field("old", "plain") == Field(0, 4)


def test_a_struct_defined_twice_is_searched_in_both_definitions() -> None:
    assert Btf(sample()).field("rq", "clock") == Field(8, 8)


def test_typedefs_have_numbers_counted_from_one() -> None:
    blob = Blob()
    pointed = blob.integer("int", 4)
    expected = blob.alias(btf.TYPEDEF, "btf_trace_sched_switch", pointed)
    assert Btf(blob.bytes()).typedef_id("btf_trace_sched_switch") == expected == 2
    with pytest.raises(BtfError, match="no typedef btf_trace_other"):
        Btf(blob.bytes()).typedef_id("btf_trace_other")


def test_a_name_that_ends_like_another_is_another() -> None:
    blob = Blob()
    blob.struct("my_task", 0, [])
    with pytest.raises(BtfError, match="no struct task"):
        Btf(blob.bytes()).field("task", "x")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda blob: b"", "shorter than its header"),
        (lambda blob: blob[1::-1] + blob[2:], "not BTF"),
        (lambda blob: blob[:-1], "promises more"),
        (lambda blob: blob[:24], "promises more"),
        (lambda blob: blob[:31] + b"\x1f" + blob[32:], "of kind 31, which is not known"),
    ],
)
def test_damage_is_described(damage: Callable[[bytes], bytes], words: str) -> None:
    with pytest.raises(BtfError, match=words):
        Btf(damage(sample()))


def test_a_typedef_of_itself_ends() -> None:
    blob = Blob()
    blob.alias(btf.TYPEDEF, "loop", 1)
    blob.struct("task", 8, [("x", 1, 0), ("", 1, 0)])
    with pytest.raises(BtfError, match="a chain without an end"):
        Btf(blob.bytes()).field("task", "x")


def test_an_anonymous_struct_inside_itself_ends() -> None:
    blob = Blob()
    blob.struct("task", 8, [("", 1, 0), ("", 2, 0)])
    blob.struct("", 8, [("", 1, 0), ("", 2, 0)])
    with pytest.raises(BtfError, match="no member x"):
        Btf(blob.bytes()).field("task", "x")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BtfError, match=r"nowhere: No such file or directory"):
        Btf.read(tmp_path / "nowhere")


def _ask_everything(blob: bytes) -> None:
    """Every question ends in an answer or in BtfError; anything else fails the test, and so does not ending."""
    try:
        types = Btf(blob)
    except BtfError:
        return
    for struct_name in ("task", "old", "rq", "sched_info", "nobody"):
        for path in ("info.queued", "left", "after", "flag", "clock", "next.runs", "name", "missing"):
            try:
                types.field(struct_name, path)
            except BtfError:
                continue
    try:
        types.typedef_id("btf_trace_switch")
    except BtfError:
        return


@given(st.binary(max_size=400))
def test_random_bytes_end_in_an_error(noise: bytes) -> None:
    with pytest.raises(BtfError):
        Btf(noise)


@given(st.binary(max_size=600))
def test_random_types_behind_a_good_header_end(noise: bytes) -> None:
    whole = sample()
    _ask_everything(whole[:24] + (noise + whole[24 + len(noise) :])[: len(whole) - 24])


@given(st.integers(0, len(sample()) - 1))
def test_every_truncation_ends_in_an_error(length: int) -> None:
    with pytest.raises(BtfError):
        Btf(sample()[:length])


@given(st.lists(st.integers(0, len(sample()) * 8 - 1), min_size=1, max_size=6))
def test_flipped_bits_end(positions: list[int]) -> None:
    blob = bytearray(sample())
    for position in positions:
        blob[position // 8] ^= 1 << position % 8
    _ask_everything(bytes(blob))

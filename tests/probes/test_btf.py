"""Offsets are compared with what C gives for the same struct; damage must end in BtfError, never in anything else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes import btf
from probes.btf import Btf, BtfBit, BtfError, BtfField
from tests.probes.btf_blob import Blob, sample


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
    assert Btf(sample()).field("task", path) == BtfField(offset, size, parts=path == "info")


@pytest.mark.parametrize(
    ("struct_name", "path", "words"),
    [
        ("task", "bits", "task: bits is a bitfield"),
        ("old", "flag", "old: flag is a bitfield"),
        ("task", "missing", "struct task of this kernel has no member missing"),
        ("task", "next.runs", "struct task of this kernel has no member next.runs"),
        ("task", "info.missing", "no member info.missing"),
        ("absent", "x", "no struct absent"),
        ("info_t", "runs", "no struct info_t"),
        ("task", "", "no member"),
    ],
)
def test_what_is_not_there_is_named(struct_name: str, path: str, words: str) -> None:
    with pytest.raises(BtfError, match=words):
        Btf(sample()).field(struct_name, path)


@pytest.mark.parametrize(("name", "size", "offset"), [("depth", 4, 0x40), ("depth", 0, 0x40), ("hot", 16, 0x180)])
def test_per_cpu_variables_lie_where_their_section_says(name: str, size: int, offset: int) -> None:
    assert Btf(sample()).per_cpu_offset(name, size) == offset


@pytest.mark.parametrize(("name", "size"), [("depth", 8), ("lonely", 4), ("info", 16), ("nobody", 0)])
def test_what_is_no_per_cpu_variable_of_that_size_is_refused(name: str, size: int) -> None:
    with pytest.raises(BtfError, match=f"no per-CPU variable {name}"):
        Btf(sample()).per_cpu_offset(name, size)


def test_an_ordinary_member_of_the_old_encoding_is_no_bitfield() -> None:
    assert Btf(sample()).field("old", "plain") == BtfField(0, 4)


def test_a_struct_defined_twice_is_searched_in_both_definitions() -> None:
    assert Btf(sample()).field("rq", "clock") == BtfField(8, 8)


def test_typedefs_have_numbers_counted_from_one() -> None:
    blob = Blob()
    pointed = blob.integer("int", 4)
    expected = blob.alias(btf.TYPEDEF, "btf_trace_sched_switch", pointed)
    assert Btf(blob.bytes()).typedef_id("btf_trace_sched_switch") == expected == 2
    with pytest.raises(BtfError, match="no typedef btf_trace_other"):
        Btf(blob.bytes()).typedef_id("btf_trace_other")


def test_a_bit_has_its_byte_and_its_mask() -> None:
    """On a little-endian machine, the third bit of `flags` behind a whole int is bit 2 of byte 4."""
    blob = Blob()
    u32 = blob.integer("unsigned int", 4)
    members = [("whole", u32, 0), ("a", u32, 32 | 1 << 24), ("b", u32, 33 | 1 << 24), ("c", u32, 34 | 1 << 24),
               ("d", u32, 41 | 1 << 24), ("wide", u32, 42 | 2 << 24)]  # fmt: skip
    blob.struct("task", 8, members, flag=True)
    types = Btf(blob.bytes())
    assert (types.bit("task", "a"), types.bit("task", "c")) == (BtfBit(4, 1), BtfBit(4, 4))
    assert types.bit("task", "d") == BtfBit(5, 2)
    for name in ("whole", "wide"):
        with pytest.raises(BtfError, match=f"task: {name} is no bitfield of one bit"):
            types.bit("task", name)
    with pytest.raises(BtfError, match="no member e"):
        types.bit("task", "e")


def test_functions_are_found_among_other_types_of_their_name() -> None:
    blob = Blob()
    blob.struct("bpf_iter_task", 0, [])
    proto = blob.function([])
    expected = blob.alias(btf.FUNC, "bpf_iter_task", proto)
    blob.alias(btf.FUNC, "bpf_iter_task_file", proto)
    assert Btf(blob.bytes()).function_id("bpf_iter_task") == expected == 3
    with pytest.raises(BtfError, match="no function bpf_iter_cgroup"):
        Btf(blob.bytes()).function_id("bpf_iter_cgroup")


def test_arguments_of_a_tracepoint_are_spelled_by_size_and_sign() -> None:
    """`unsigned long` has two names in BTF, by compiler; its size and sign do not."""
    blob = Blob()
    signed, unsigned = blob.integer("int", 4, signed=True), blob.integer("long unsigned int", 8)
    pages = blob.alias(btf.TYPEDEF, "pages_t", blob.alias(btf.CONST, "", unsigned))
    task = blob.alias(btf.PTR, "", blob.alias(btf.CONST, "", blob.struct("task_struct", 0, [])))
    names = blob.alias(btf.PTR, "", blob.alias(btf.PTR, "", blob.integer("char", 1, signed=True)))
    anything = blob.alias(btf.PTR, "", 0)
    passed = [anything, signed, pages, task, names, anything]
    blob.alias(btf.TYPEDEF, "btf_trace_reclaim", blob.alias(btf.PTR, "", blob.function(passed)))
    blob.alias(btf.TYPEDEF, "btf_trace_broken", signed)
    types = Btf(blob.bytes())
    assert types.arguments("reclaim") == ("s32", "u64", "struct task_struct *", "s8 **", "void *")
    with pytest.raises(BtfError, match=r"btf_trace_broken .* is not a pointer to a function"):
        types.arguments("broken")
    with pytest.raises(BtfError, match="no typedef btf_trace_other"):
        types.arguments("other")


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
        (lambda blob: blob[:-1], "describes more"),
        (lambda blob: blob[:24], "describes more"),
        (lambda blob: blob[:31] + b"\x1f" + blob[32:], "has the unknown kind 31"),
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
    questions: list[Callable[[], object]] = [
        lambda: types.typedef_id("btf_trace_switch"),
        lambda: types.function_id("bpf_iter_task"),
        lambda: types.arguments("switch"),
        lambda: types.arguments("wakeup"),
        lambda: types.bit("task", "bits"),
    ]
    for question in questions:
        with contextlib.suppress(BtfError):
            question()


@given(st.binary(max_size=400))
def test_random_bytes_end_in_an_error(noise: bytes) -> None:
    with pytest.raises(BtfError):
        Btf(noise)


@given(st.binary(max_size=600))
def test_random_types_behind_a_good_header_end(noise: bytes) -> None:
    full = sample()
    _ask_everything(full[:24] + (noise + full[24 + len(noise) :])[: len(full) - 24])


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

"""The child's pure parts: which macros a form gets, and the tree that stands in for kernel headers."""

from __future__ import annotations

import ast
import errno
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from probes import bpf, btf, compiled_forms, compiler, perf_event
from probes.btf import Btf, BtfError
from probes.compiled_forms import FormLayout, read_layout, write_layout
from probes.compiler import (
    STUBS,
    FormRefused,
    LoadFailure,
    _attach_target,
    _compiled_form,
    _program_type,
    _try_form,
    field_offsets,
    stub_tree,
)
from tests.probes.btf_blob import Blob, sample


def form(**fields: Any) -> dict[str, Any]:
    return {"name": "f", "fields": fields.get("fields", {}), "optional": fields.get("optional", {})}


def test_fields_become_macros() -> None:
    required = form(fields={"QUEUED": [("task", "info.queued", 8)], "LEFT": [("task", "left", 4)]})
    assert field_offsets(Btf(sample()), required) == {"QUEUED": 16, "LEFT": 24}


def test_the_first_alternative_that_the_kernel_has_is_taken() -> None:
    required = form(fields={"NAME": [("task", "gone", 8), ("task", "right", 4), ("task", "left", 4)]})
    assert field_offsets(Btf(sample()), required) == {"NAME": 28}


def test_a_field_of_another_size_is_another_field() -> None:
    with pytest.raises(FormRefused, match=r"struct task: left has 4 bytes, not 8; .*no member gone"):
        field_offsets(Btf(sample()), form(fields={"LEFT": [("task", "left", 8), ("task", "gone", 8)]}))


def test_a_struct_of_the_right_size_is_no_number() -> None:
    """As kernfs_node.id was one of 8 bytes before Linux 5.5, with the inode in one half."""
    with pytest.raises(FormRefused, match="struct task: info is no number but a struct or union of that size"):
        field_offsets(Btf(sample()), form(fields={"INFO": [("task", "info", 16)]}))


def test_optional_fields_may_be_missing() -> None:
    required = form(optional={"GONE": [("task", "gone", 8)], "AFTER": [("task", "after", 4)]})
    assert field_offsets(Btf(sample()), required) == {"AFTER": 60}


def test_a_refusal_carries_the_tail_of_a_long_log() -> None:
    assert FormRefused("load x", "no", 22, "a" * 10_000 + "reason").facts["log"].endswith("reason")
    assert len(FormRefused("load x", "no", 22, "a" * 10_000).facts["log"]) == 1500


def test_the_stub_tree_is_complete_and_can_be_written_twice(tmp_path: Path) -> None:
    stub_tree(tmp_path)
    stub_tree(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.h")} == set(STUBS)


def test_a_bitfield_becomes_its_byte_and_a_mask() -> None:
    blob = Blob()
    u32 = blob.integer("unsigned int", 4)
    blob.struct("task", 4, [("flag", u32, 10 | 1 << 24), ("wide", u32, 11 | 3 << 24)], flag=True)
    types = Btf(blob.bytes())
    assert field_offsets(types, form(fields={"FLAG": [("task", "flag", 0)]})) == {"FLAG": 1, "FLAG_BIT": 4}
    assert field_offsets(types, form(optional={"WIDE": [("task", "wide", 0)]})) == {}
    with pytest.raises(FormRefused, match="wide is no bitfield of one bit"):
        field_offsets(types, form(fields={"WIDE": [("task", "wide", 0)]}))


def program(event: str, *arguments: str, iterator: bool = False, at: str = "") -> dict[str, Any]:
    return {"tracepoint": event, "arguments": list(arguments), "iterator": iterator, "at": at}


def test_a_variable_has_no_struct_and_becomes_its_place_among_those_of_a_cpu() -> None:
    required = form(fields={"DEPTH": [("", "gone", 4), ("", "depth", 4)]}, optional={"LONELY": [("", "lonely", 4)]})
    assert field_offsets(Btf(sample()), required) == {"DEPTH": 0x40}


def test_a_tracepoint_that_passes_something_else_is_refused() -> None:
    """`wakeup` of the sample passes an unsigned int and a pointer, behind the one that every tracepoint passes."""
    types = Btf(sample())
    typedef, function = types.typedef_id("btf_trace_wakeup"), types.function_id("bpf_iter_task")
    assert _attach_target(types, program("wakeup", "u32", "struct sched_info *"), typed=True) == typedef
    assert _attach_target(types, program("wakeup", "u32"), typed=True) == typedef
    assert _attach_target(types, program("wakeup"), typed=False) == 0
    assert _attach_target(types, program("task", iterator=True), typed=True) == function
    for arguments in (("s32",), ("u32", "u64"), ("u32", "struct sched_info *", "u32")):
        for typed in (True, False):
            with pytest.raises(BtfError, match=r"wakeup of this kernel passes \(u32, struct sched_info \*\), not \("):
                _attach_target(types, program("wakeup", *arguments), typed=typed)


@pytest.mark.parametrize(("event", "reason"), [("wakeup", "wakeup of this kernel passes"), ("gone", "btf_trace_gone")])
def test_what_the_kernel_lacks_is_found_before_the_compiler_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, event: str, reason: str
) -> None:
    """Compiling takes most of the time that a form takes, and a kernel may refuse all of them."""
    monkeypatch.setattr(compiler, "_compiled_form", lambda *_: pytest.fail("compiled in vain"))
    required = {**form(), "constants": {}, "typed": True, "programs": [{**program(event, "s32"), "needs": ""}]}
    (tmp_path / "vmlinux").write_bytes(sample())
    monkeypatch.setenv("DIOPTASE_CACHE_DIR", "")
    with pytest.raises(FormRefused, match=reason) as refused:
        _try_form({"constants": {}, "sources": [], "maps": [], "btf": str(tmp_path / "vmlinux")}, required)
    assert refused.value.facts["stage"] == "fields"
    assert refused.value.facts["errno"] == errno.ENOENT


def test_a_function_is_known_by_its_number_and_must_be_passed_what_the_source_reads() -> None:
    """`bpf_iter_task` of the sample is passed a pointer, an unsigned int and a pointer."""
    types = Btf(sample())
    passed = ("struct sched_info *", "u32")
    assert types.parameters("bpf_iter_task") == (*passed, "struct sched_info *")
    full = (*passed, "struct sched_info *")
    with pytest.raises(BtfError, match=r"bpf_iter_task of this kernel passes \(struct sched_info \*, u32, struct"):
        _attach_target(types, program("bpf_iter_task", *passed, at="return"), typed=True)
    for at, read in (("entry", passed), ("return", full)):
        assert _attach_target(types, program("bpf_iter_task", *read, at=at), typed=True) == types.function_id(
            "bpf_iter_task"
        )
        assert _attach_target(types, program("bpf_iter_task", *read, at=at), typed=False) == 0
        for typed in (True, False):
            with pytest.raises(BtfError, match=r"bpf_iter_task of this kernel passes \(struct sched_info \*, u32, "):
                _attach_target(types, program("bpf_iter_task", "u32", at=at), typed=typed)
            with pytest.raises(BtfError, match="no function gone"):
                _attach_target(types, program("gone", "u32", at=at), typed=typed)


@pytest.mark.parametrize(
    ("at", "iterator", "typed", "kind", "attach_type"),
    [
        ("", False, True, bpf.TRACING, None),
        ("", False, False, bpf.RAW_TRACEPOINT, None),
        ("", True, True, bpf.TRACING, bpf.TRACE_ITER),
        ("entry", False, True, bpf.TRACING, bpf.TRACE_FENTRY),
        ("return", False, True, bpf.TRACING, bpf.TRACE_FEXIT),
        ("entry", False, False, bpf.KPROBE, None),
        ("return", False, False, bpf.KPROBE, None),
    ],
)
def test_what_kind_of_program_it_is(
    at: str, kind: int, attach_type: int | None, *, iterator: bool, typed: bool
) -> None:
    expected = {"kind": kind} | ({} if attach_type is None else {"attach_type": attach_type})
    assert _program_type(program("x", iterator=iterator, at=at), typed=typed) == expected


def test_a_kernel_without_kprobes_has_no_file_that_says_how_to_ask_for_them(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="bus/event_source/devices/kprobe/type"):
        perf_event.attach_to_function(0, "unthrottle_cfs_rq", returning=False, sys_root=tmp_path)


@pytest.mark.parametrize(
    ("kind", "bit"), [("", "config:0"), ("0x6", "config:0"), ("4294967296", "config:0"), ("8", "config1:0"), ("8", "config:64")]
)  # fmt: skip
def test_another_interface_of_kprobes_than_ours_is_refused(tmp_path: Path, kind: str, bit: str) -> None:
    """Not taken for the entry of a function where the return was meant."""
    source = tmp_path / "bus/event_source/devices/kprobe"
    (source / "format").mkdir(parents=True)
    (source / "type").write_text(kind + "\n")
    (source / "format/retprobe").write_text(bit + "\n")
    with pytest.raises(OSError, match="is not supported"):
        perf_event.attach_to_function(0, "schedule", returning=True, sys_root=tmp_path)


def test_a_header_that_the_sources_include_changes_the_name_of_the_compiled_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"a.bpf.c": '#include "a.bpf.h"', "a.bpf.h": '#include "b.bpf.h"', "b.bpf.h": "1"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(compiler, "_bcc_version", lambda: "0.26")
    names: list[str] = []
    monkeypatch.setattr(compiler.compiled_forms, "read_form", lambda _, name: names.append(name) or "stored")
    for text in ("1", "1", "2"):
        (tmp_path / "b.bpf.h").write_text(text)
        _compiled_form({"sources": [str(tmp_path / "a.bpf.h"), str(tmp_path / "a.bpf.c")]}, {}, [])
    assert len(names) == 3
    assert names[0] == names[1] != names[2]


def test_the_layout_of_a_form_is_read_once_for_the_same_types_and_again_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIOPTASE_CACHE_DIR", str(tmp_path / "cache"))
    read: list[Path] = []
    monkeypatch.setattr(compiler, "_types_of", read.append)
    monkeypatch.setattr(compiler, "field_offsets", lambda _types, _form: {"PID": 8 * len(read)})
    monkeypatch.setattr(compiler, "_attach_targets", lambda _types, _form, programs: [17] * len(programs))
    job = {"btf": str(tmp_path / "vmlinux"), "constants": {}}
    form = {"name": "tp_btf", "constants": {}, "programs": [{"needs": ""}, {"needs": "PID"}, {"needs": "ABSENT"}]}
    offsets = []
    for types in ("one", "one", "two"):
        (tmp_path / "vmlinux").write_text(types)
        compiler._digest_of.cache_clear()
        layout = compiler._layout_of(job, form)
        offsets.append(layout.macros["PID"])
        assert list(layout.targets) == [17, 17]
    assert offsets == [8, 8, 16]
    compiler._digest_of.cache_clear()
    (tmp_path / "vmlinux").unlink()
    with pytest.raises(LoadFailure, match="vmlinux: No such file"):
        compiler._layout_of(job, form)


@pytest.mark.parametrize("targets", [[], [17], [17, 17, 17]])
def test_a_stored_layout_with_another_number_of_targets_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: list[int]
) -> None:
    """A program without a target would stay unattached, and the probe would count nothing."""
    monkeypatch.setenv("DIOPTASE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_types_of", lambda _blob: None)
    monkeypatch.setattr(compiler, "field_offsets", lambda _types, _form: {"PID": 8})
    monkeypatch.setattr(compiler, "_attach_targets", lambda _types, _form, programs: [17] * len(programs))
    (tmp_path / "vmlinux").write_text("types")
    job = {"btf": str(tmp_path / "vmlinux"), "constants": {}}
    form = {"name": "tp_btf", "constants": {}, "programs": [{"needs": ""}, {"needs": "PID"}]}
    layout = compiler._layout_of(job, form)
    (stored,) = (tmp_path / "cache").iterdir()
    write_layout(tmp_path / "cache", stored.name, FormLayout(layout.macros, targets))
    assert compiler._layout_of(job, form) == layout
    assert read_layout(tmp_path / "cache", stored.name) == layout, "it is replaced"


@pytest.mark.parametrize("files", [(), ("__init__.py",), ("__init__.py", "libbcc.py")])
def test_another_package_called_bcc_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...]
) -> None:
    (tmp_path / "bcc").mkdir()
    for name in files:
        (tmp_path / "bcc" / name).write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "bcc", raising=False)
    importlib.invalidate_caches()
    with pytest.raises(LoadFailure, match="a package bcc that is not BCC"):
        compiler._bcc_version()


@pytest.mark.parametrize("module", [bpf, btf, compiled_forms, perf_event])
def test_modules_of_the_child_import_the_standard_library_only(module: ModuleType) -> None:
    """The distribution's Python runs them, and the product's packages are not installed there."""
    assert module.__file__ is not None
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= sys.stdlib_module_names

"""What docs/kernels.md says of this kernel's version is so on this kernel, natively and in the guests."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator

import msgspec
import pytest

from agent.sensors.cgroup.hierarchy import Hierarchy
from probes.btf import VMLINUX, Btf, BtfError
from probes.compiler import FormRefused, _attach_targets, field_offsets
from tests.kernel.real_cgroups import cgroup, require_writable_cgroups
from tests.kernels_page import JOBS, came, event, kernels, named, programs, spelled, tables, version

pytestmark = [pytest.mark.kernel, pytest.mark.vm]

RELEASE = os.uname().release
RUNNING = version(RELEASE)
PLACES = {
    spelled([place])[0]: place
    for job in JOBS.values()
    for form in job.forms
    for places in (*form.fields.values(), *form.optional.values())
    for place in places
}
"""Every field, by its spelling, with its struct, member and size."""
COLUMNS = [version(text) for text in tables("What runs where")[0][0][1:]]
TAKEN_OVER = {what for row in tables("What came when")[0][1:] if "updates" in row[1] for what in named(row[0])}
"""What older series got in updates, too."""


@pytest.fixture(scope="module")
def blob() -> bytes:
    if ".el" in RELEASE:
        pytest.skip(f"{RELEASE} has much of later kernels, so its number says nothing")
    return VMLINUX.read_bytes()


@pytest.fixture(scope="module")
def types(blob: bytes) -> Btf:
    return Btf(blob)


def is_there(thing: str, types: Btf, blob: bytes) -> bool:
    """Whether this kernel has what the page calls by that name, checked as by the loader."""
    name, call, passed = thing.rstrip(")").partition("(")
    if thing in PLACES:
        form = {"name": thing, "fields": {}, "optional": {"X": [PLACES[thing]]}}
        return "X" in field_offsets(types, form)
    try:
        if call:
            members = tuple(filter(None, passed.split(", ")))
            return types.arguments(name)[: len(members)] == members
        if thing.startswith("btf_trace_"):
            return types.typedef_id(thing) > 0
        if thing.startswith("bpf_iter_"):
            return types.function_id(thing) > 0
    except BtfError:
        return False
    if thing.startswith("/"):
        return VMLINUX.samefile(thing)
    label = f"BPF_FUNC_{thing.removeprefix('bpf_')}" if thing.startswith("bpf_") else thing
    return f"\0{label}\0".encode() in blob


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the page's versions of fields are those of x86")
@pytest.mark.parametrize(
    "thing", [thing for thing, when in came().items() if RUNNING in when or thing not in TAKEN_OVER]
)
def test_what_came_when_is_there_from_then_on(thing: str, types: Btf, blob: bytes) -> None:
    assert is_there(thing, types, blob) == (RUNNING in came()[thing])


@pytest.mark.skipif(RUNNING not in COLUMNS, reason=f"the page has no column for Linux {RUNNING[0]}.{RUNNING[1]}")
@pytest.mark.parametrize("name", JOBS)
def test_the_form_that_this_kernel_is_said_to_take_is_the_first_that_finds_its_fields(
    name: str, types: Btf, blob: bytes
) -> None:
    """By the functions that refuse forms before the compiler runs; that the rest load is for tests/kernel/test_registry.py."""
    row = next(row for row in tables("What runs where")[0][1:] if named(row[0]) == [name])
    documented = row[1 + COLUMNS.index(RUNNING)]
    updates = {event(program) for _, program in programs(name)} & TAKEN_OVER
    if updates and all(is_there(thing, types, blob) for thing in updates):
        documented = JOBS[name].forms[0].name
    assert next(fitting(name, types), "-") == documented


def fitting(name: str, types: Btf) -> Iterator[str]:
    for form in JOBS[name].forms:
        form_fields = msgspec.to_builtins(form)
        try:
            field_offsets(types, form_fields)
            _attach_targets(types, form_fields, form_fields["programs"])
        except FormRefused:
            continue
        yield form.name


def test_files_of_a_cgroup_are_there_from_their_version_on() -> None:
    """Those that hang on nothing but a controller; with an option they may be missing, but not be there before their time."""
    hierarchy = require_writable_cgroups()
    rows = tables("Files of cgroups")[0 if hierarchy.mode == "v2" else 1][1:]
    wrong, there = [], 0
    with cgroup(hierarchy, "kernels-page") as group:
        for files, when, needs in rows:
            for file in named(files):
                if (controller := controller_of(file, hierarchy)) is None:
                    continue
                exists, present = group.file(controller, file).exists(), RUNNING in kernels(when)
                there += exists
                must = present and needs.startswith("the controller")
                if (exists and not present) or (must and not exists):
                    wrong.append(file)
    assert wrong == []
    assert there >= 20


def controller_of(file: str, hierarchy: Hierarchy) -> str | None:
    """The mounted controller whose directory has the file."""
    prefix = file.partition(".")[0]
    name = "cpu" if prefix in {"tasks", "cgroup"} else prefix
    return name if hierarchy.controller(name) is not None else None

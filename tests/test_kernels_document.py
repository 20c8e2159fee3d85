"""The document docs/kernels.md names exactly what the code uses, and what follows from its tables."""

from __future__ import annotations

import re
from collections.abc import Set
from functools import cache
from pathlib import Path

import pytest

from agent.qrm.knobs import knob_files
from agent.sensors.cgroup import cgroup_files as cgroup_cgroup_files
from agent.sensors.node.node_reader import KERNEL_QUERIES, NODE_SOURCES
from probes import registry
from probes.loader import Form, Program
from tests.kernels_page import (
    JOBS,
    PAGE,
    ROOT,
    Version,
    alternatives,
    came,
    event,
    named,
    probes,
    programs,
    spelled,
    tables,
    version,
)

HELPERS_OF_OLD = {
    "bpf_get_current_pid_tgid", "bpf_get_current_task", "bpf_get_smp_processor_id", "bpf_ktime_get_ns",
}  # fmt: skip
"""Those that raw tracepoints had when there were any (Linux 4.17)."""
TRACEPOINTS_TYPED = "btf_trace_sched_switch"
FUNCTIONS_TYPED = "BPF_TRACE_FENTRY"
NEEDED_AS_WELL = {"wakeups": ("per-CPU runqueues",)}
"""Without what its source, on x86, does not compile, although it is optional for the loader."""


def test_the_page_knows_every_probe() -> None:
    assert list(JOBS) == ["runqlat", *registry.PROBE_NAMES]
    assert [named(row[0]) for row in tables("What runs where")[0][1:]] == [[name] for name in JOBS]


def test_tracepoints_and_what_they_pass_are_those_of_the_programs() -> None:
    rows = tables("Tracepoints and functions")[0][1:]
    assert {row[0].strip("`"): set(named(row[1])) for row in rows} == {
        name: {event(program) for _, program in programs(name)} for name in JOBS
    }


def pairs(kind: str) -> set[tuple[tuple[str, ...], str]]:
    """Every field of every form with the probe that has it there, alternatives together."""
    return {
        (spelled(places), name)
        for name, job in JOBS.items()
        for form in job.forms
        for places in getattr(form, kind).values()
    }


@pytest.mark.parametrize(("kind", "column"), [("fields", 1), ("optional", 2)])
def test_fields_are_those_that_the_forms_ask_for(kind: str, column: int) -> None:
    texts = [
        (field, name)
        for row in tables("Fields")[0][1:]
        for field in alternatives(row[0])
        for name in probes(row[column])
        if row[column]
    ]
    assert sorted(texts) == sorted(pairs(kind))


@cache
def source(job: str) -> str:
    """The C of a probe, with what it includes, without comments."""
    files = [*JOBS[job].sources]
    for file in files:
        included = re.findall(r'^#include "(.+)"', file.read_text(), re.MULTILINE)
        files += [file.with_name(name) for name in included if file.with_name(name) not in files]
    return re.sub(r"/\*.*?\*/", "", "".join(file.read_text() for file in files), flags=re.DOTALL)


def helpers(name: str, form: Form) -> set[str]:
    """Functions of the kernel that a form of a probe calls: kernel.bpf.h has both ways to read a field and the task."""
    text = source(name).replace("#define CURRENT()", "").replace("#define FIELD(", "")
    direct = re.findall(r"\bbpf_(?!probe_read_kernel|get_current_task)\w+(?=\()", text)
    result = {*direct, *(f"bpf_{name}" for name in re.findall(r"\bBPF_FUNC_(\w+)", text) if form.typed)}
    if re.search(r"\bCURRENT\(\)", text):
        result.add("bpf_get_current_task_btf" if form.typed else "bpf_get_current_task")
    if re.search(r"\bFIELD\(", text) and not form.typed:
        result.add("bpf_probe_read_kernel")
    return result


def test_helpers_are_old_or_listed() -> None:
    used = {helper for name, job in JOBS.items() for form in job.forms for helper in helpers(name, form)}
    listed = {name for name in came() if name.startswith("bpf_") and not name.startswith("bpf_iter_")}
    assert used - HELPERS_OF_OLD == listed


def runs_on(name: str, form: Form, running: Version) -> bool:
    """Whether mainline of that version has all that the form needs; what the page does not list is older than all forms."""
    when = came()
    needs = [helpers(name, form), NEEDED_AS_WELL.get(name, ())]
    needs += [(event(program), *kind(program, typed=form.typed)) for program in form.programs]
    either = [spelled(places) for places in form.fields.values()]
    has = {thing: running in kernels for thing, kernels in when.items()}
    return all(has.get(thing, True) for group in needs for thing in group) and all(
        any(has.get(thing, True) for thing in places) for places in either
    )


def kind(program: Program, *, typed: bool) -> tuple[str, ...]:
    """What else its kind of program needs."""
    if program.at:
        return (FUNCTIONS_TYPED,) if typed else ()
    return () if program.iterator else (TRACEPOINTS_TYPED,)


def best(name: str, running: Version) -> str:
    result = next((form.name for form in JOBS[name].forms if runs_on(name, form, running)), None)
    return result or ("schedstat" if name == "runqlat" else "-")


def test_what_runs_where_follows_from_the_other_tables() -> None:
    head, *rows = tables("What runs where")[0]
    versions = [version(text) for text in head[1:]]
    assert versions == sorted(versions)
    assert {(4, 18), (5, 14), (6, 1), (6, 12)} <= set(versions)
    assert [row[1:] for row in rows] == [[best(name, running) for running in versions] for name in JOBS]


def cgroup_files(kind: str) -> set[str]:
    """Files of one version of the hierarchy: `v1` or `v2`."""
    index = ("v1", "v2").index(kind)
    knobs = [place for row in knob_files.KNOB_SPECS.values() for place in getattr(row, kind)]
    once = [files[index] for files in (*knob_files.ONE_SHOT_FILES.values(), *knob_files.EFFECTIVE_FILES.values())]
    return (
        {file for place in knobs for file in (*place.files, *place.context_files)}
        | {place.file.decode() for row in cgroup_cgroup_files.FIELD_TABLE.values() for place in getattr(row, kind)}
        | {file for file in once if file}
    )


@pytest.mark.parametrize(("kind", "position"), [("v2", 0), ("v1", 1)])
def test_files_of_cgroups_are_those_that_are_read_and_written(kind: str, position: int) -> None:
    rows = tables("Files of cgroups")[position][1:]
    texts = [file for row in rows for file in named(row[0])]
    assert sorted(texts) == sorted(cgroup_files(kind))


def test_sources_of_the_node_are_those_that_it_has() -> None:
    texts = [name for row in tables("Sources of the node")[0][1:] for name in named(row[0])]
    assert sorted(texts) == sorted(
        [*(name for each in NODE_SOURCES.values() for name in each), *KERNEL_QUERIES, "frequencies"]
    )


def compiled(text: str, macros: Set[str]) -> str:
    """What is left of C behind #ifdef, #ifndef and #else; both sides of other conditions."""
    result, state = [], [True]
    for line in text.splitlines():
        word, _, rest = line.lstrip("#").strip().partition(" ")
        if line.startswith("#if"):
            state.append({"ifdef": rest in macros, "ifndef": rest not in macros}.get(word, True))
        elif line.startswith("#else"):
            state[-1] = not state[-1]
        elif line.startswith("#endif"):
            state.pop()
        elif all(state):
            result.append(line)
    return "\n".join(result)


@pytest.mark.parametrize("name", JOBS)
def test_every_argument_that_is_read_is_in_the_list_of_arguments(name: str) -> None:
    """Or the program would read whatever a later kernel passes in its place. What a function returns comes after them."""
    text = JOBS[name].sources[-1].read_text()
    for form, program in programs(name):
        if program.iterator:
            continue
        code = compiled(text, {*JOBS[name].constants, *form.constants, *form.fields})
        (body,) = re.findall(rf"^int {program.function}\(u64 \*ctx\)\n\{{\n(.*?)^\}}", code, re.M | re.S)
        read = {int(form.constants.get(at, at)) for at in re.findall(r"\bctx\[(\w+)\]", body)}
        values = len(program.arguments) + (program.at == "return")
        assert read <= set(range(values)), f"{program.function} of {form.name}"


def test_the_page_can_be_found() -> None:
    assert "(docs/kernels.md)" in (ROOT / "README.md").read_text()
    assert Path("docs/kernels.md") == PAGE.relative_to(ROOT)

"""Probes come, go and refuse on a real kernel: every form, every way to end, every privilege."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from api.histogram import BOUNDS_NS, SLOT_COUNT, slot_of
from api.interfaces import KernelFeatureAbsent, Unavailable
from probes import bpf, doctor, softirq, wakeups
from probes.loader import Form, Job, Program, load
from probes.maps import cpu_id_limit
from probes.runqlat import FORMS, RunqLatencyProbe, job, open_runqlat
from tests.kernel.open_probes import probe, program_ids, unloaded
from tests.kernel.real_cgroups import require_root

pytestmark = pytest.mark.kernel

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import json, time
from probes.runqlat import open_runqlat
source = open_runqlat()
print(json.dumps([info.id for info in source.stats().values()]), flush=True)
time.sleep(600)
"""
TRY = """
import json
from api.interfaces import Unavailable
from probes.runqlat import open_runqlat
try:
    with_it = open_runqlat()
    print(json.dumps([with_it.form, len(with_it.read({}))]))
except Unavailable as error:
    print(json.dumps([error.reason, error.remedy]))
"""


@pytest.mark.parametrize("form", FORMS)
def test_each_form_loads_and_closing_detaches_it(form: str) -> None:
    with probe(form) as source:
        ids = program_ids(source)
        assert source.form == form
        assert source.refused == ()
        listed = {info.id: info.name for info in bpf.programs()}
        assert {listed[number] for number in ids} == set(source.stats())
        assert all(name.startswith("dtse_") for name in source.stats())
    assert unloaded(ids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_attached_however_the_holder_ends(number: signal.Signals) -> None:
    with probe("tp_btf", "raw_tp", "classic"):
        pass
    holder = subprocess.Popen([sys.executable, "-c", HOLD], cwd=ROOT, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    with holder.stdout:
        ids = set(json.loads(holder.stdout.readline()))
        assert ids <= {info.id for info in bpf.programs()}
        holder.send_signal(number)
        assert holder.wait() == -number
    assert unloaded(ids)


def test_descriptors_are_not_inherited_by_programs_that_the_agent_starts() -> None:
    with probe("tp_btf", "raw_tp", "classic") as source:
        assert not any(os.get_inheritable(fd) for fd in source.descriptors())


def test_a_second_load_compiles_nothing_and_a_damaged_file_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each compilation writes a new file, so that an inode of before tells that there was none; so does each reading of the
    kernel's types, whose file is the smaller one."""
    monkeypatch.setenv("DIOPTASE_CACHE_DIR", str(tmp_path / "cache"))
    shapes: list[tuple[str, list[str]]] = []
    inodes: list[list[int]] = []
    damaged: list[str] = []

    def files() -> list[Path]:
        return sorted((tmp_path / "cache").iterdir(), key=lambda file: file.stat().st_size)

    for attempt in ("compiled", "read", "damaged"):
        if attempt == "damaged":
            damaged = [file.read_text()[:-100] for file in files()]
            for file, text in zip(files(), damaged, strict=True):
                file.write_text(text)
        with probe("tp_btf") as source:
            time.sleep(0.1)
            waits = source.read({})
            assert sum(sum(each.slots) for each in waits.values() if each.slots) > 0
            shapes.append((source.form, sorted(source.stats())))
        inodes.append([file.stat().st_ino for file in files()])
    assert shapes[0] == shapes[1] == shapes[2]
    assert inodes[0] == inodes[1]
    assert len(inodes[0]) == 2
    assert not {file.read_text() for file in files()} & {*damaged}


def test_the_next_form_is_taken_where_one_is_refused() -> None:
    with probe("tp_btf", "raw_tp", "classic"):
        pass
    full = job(FORMS, cpu_id_limit())
    broken = msgspec.structs.replace(full.forms[0], fields={"LAST_QUEUED": [("task_struct", "no_such_field", 8)]})
    with load(msgspec.structs.replace(full, forms=[broken, *full.forms[1:]])) as loaded:
        assert loaded.form == "raw_tp"
        assert [(r.form, r.stage) for r in loaded.refused] == [("tp_btf", "fields")]
        assert loaded.refused[0].reason == "struct task_struct of this kernel has no member no_such_field"
        assert RunqLatencyProbe(loaded).read({}) is not None


@pytest.mark.parametrize("job_", [softirq.job(("raw_tp",)), wakeups.job(("raw_tp",), 2)], ids=["softirq", "wakeups"])
def test_preempt_rt_is_refused_where_softirqs_would_be_misread(job_: Job) -> None:
    """The macro is there where the kernel's struct task_struct has softirq_disable_cnt."""
    with probe("raw_tp"):
        pass
    with_constant = msgspec.structs.replace(job_, constants={**job_.constants, "SOFTIRQ_OF_TASK": 0})
    with pytest.raises(Unavailable, match="this kernel is a PREEMPT_RT one") as caught:
        load(with_constant).close()
    assert "without PREEMPT_RT" in caught.value.remedy


def _one_program(tmp_path: Path, text: str, tracepoint: str = "sched_process_exit", *, typed: bool = False) -> Job:
    source = tmp_path / "one.bpf.c"
    source.write_text(text)
    common = ROOT / "probes/per_cgroup.bpf.h"
    form = Form(name="one", typed=typed, fields={}, programs=[Program("on_event", tracepoint, "dtse_one")])
    fields = dict.fromkeys(("CSS_SERIAL", "CSS_CGROUP", "CGROUP_KN", "KN_ID"), 0)
    constants = {"HIST_SLOTS": SLOT_COUNT, "CGROUP_SLOTS": 64, "TASK_SLOTS": 64, **fields}
    return Job(sources=[common, source], forms=[form], maps=["lost"], constants=constants)


@pytest.mark.parametrize(
    ("text", "tracepoint", "typed", "words", "kind"),
    [
        ("int on_event(u64 *ctx) { return nothing; }", "sched_process_exit", False,
         r"compile: .*one\.bpf\.c:1:\d+: error", Unavailable),
        ("int on_event(u64 *ctx) { return *(u64 *)(ctx[0]); }", "sched_process_exit", False,
         "load dtse_one: .*invalid mem", Unavailable),
        ("int on_event(u64 *ctx) { return 0; }", "no_such_tracepoint", False,
         "attach dtse_one to no_such_tracepoint: ", KernelFeatureAbsent),
        ("int on_event(u64 *ctx) { return 0; }", "no_such_tracepoint", True,
         "no typedef btf_trace_no_such_tracepoint", KernelFeatureAbsent),
    ],
    ids=["compiler", "verifier", "tracepoint", "typed"],
)  # fmt: skip
def test_refusals_quote_the_error_and_name_what_the_kernel_lacks(
    tmp_path: Path, text: str, tracepoint: str, words: str, kind: type[Unavailable], *, typed: bool
) -> None:
    with probe("tp_btf", "raw_tp", "classic"):
        pass
    with pytest.raises(Unavailable, match=words) as caught:
        load(_one_program(tmp_path, text, tracepoint, typed=typed))
    assert type(caught.value) is kind


class _TestRun(ctypes.Structure):
    """BPF_PROG_TEST_RUN of include/uapi/linux/bpf.h."""

    _fields_ = (
        ("prog_fd", ctypes.c_uint32), ("retval", ctypes.c_uint32),
        ("data_size_in", ctypes.c_uint32), ("data_size_out", ctypes.c_uint32),
        ("data_in", ctypes.c_uint64), ("data_out", ctypes.c_uint64), ("repeat", ctypes.c_uint32),
        ("duration", ctypes.c_uint32), ("ctx_size_in", ctypes.c_uint32), ("ctx_size_out", ctypes.c_uint32),
        ("ctx_in", ctypes.c_uint64), ("ctx_out", ctypes.c_uint64), ("flags", ctypes.c_uint32), ("cpu", ctypes.c_uint32),
    )  # fmt: skip


def test_the_kernel_side_puts_every_wait_into_the_slot_that_python_says(tmp_path: Path) -> None:
    """Every bound of every slot, and one nanosecond around it, run through the compiled program."""
    with probe("tp_btf", "raw_tp", "classic"):
        pass
    edges = {
        edge + step for edge in (0, *BOUNDS_NS, BOUNDS_NS[-1] * 2, 2**32, 2**35, 2**40, 2**63) for step in (-1, 0, 1)
    }
    edges |= {3**k for k in range(40)} | {1000 * k + 1 for k in range(0, 3000, 7)}
    with load(_one_program(tmp_path, "int on_event(u64 *ctx) { return slot_of(ctx[0]); }")) as loaded:
        for wait_ns in sorted(edge for edge in edges if edge >= 0):
            context = ctypes.create_string_buffer(wait_ns.to_bytes(8, sys.byteorder), 8)
            attr = _TestRun(prog_fd=loaded.programs["dtse_one"], ctx_size_in=8, ctx_in=ctypes.addressof(context))
            bpf.call(10, attr)
            assert attr.retval == slot_of(wait_ns), f"{wait_ns} ns"


def test_stub_headers_serve_arm64_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """BCC looks into the other architecture's part of the tree; the program is the same."""
    with probe("tp_btf", "raw_tp", "classic"):
        pass
    monkeypatch.setenv("ARCH", "arm64")
    with probe("raw_tp") as source:
        assert source.form == "raw_tp"


def _with_capabilities(*names: str) -> list[str]:
    require_root()
    ids = ",".join(["-all", *(f"+{name}" for name in names)])
    command = ["setpriv", f"--bounding-set={ids}", f"--inh-caps={ids}", sys.executable, "-c", TRY]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    answer = json.loads(run.stdout)
    assert isinstance(answer, list)
    return answer


@pytest.mark.parametrize("names", [(), ("bpf",), ("perfmon",), ("sys_ptrace", "net_admin")])
def test_missing_capabilities_are_named(names: tuple[str, ...]) -> None:
    reason, remedy = _with_capabilities(*names)
    assert "Operation not permitted" in reason
    assert "capabilities BPF and PERFMON" in remedy


def test_two_capabilities_are_enough() -> None:
    with probe("tp_btf", "raw_tp", "classic") as source:
        assert _with_capabilities("bpf", "perfmon")[0] == source.form


def test_without_btf_the_remedy_is_a_kernel_that_has_it(tmp_path: Path) -> None:
    with probe("tp_btf", "raw_tp", "classic"):
        pass
    with pytest.raises(Unavailable, match="nowhere: No such file") as missing:
        open_runqlat(btf=tmp_path / "nowhere")
    assert "CONFIG_DEBUG_INFO_BTF" in missing.value.remedy
    damaged = tmp_path / "vmlinux"
    damaged.write_bytes(Path("/sys/kernel/btf/vmlinux").read_bytes()[:100_000])
    with pytest.raises(Unavailable, match="describes more"):
        open_runqlat(btf=damaged)


def test_a_python_without_bcc_is_detected() -> None:
    require_root()
    with pytest.raises(Unavailable, match="cannot import BCC") as caught:
        open_runqlat(child_python=Path(sys.executable))
    assert "apt-get install python3-bpfcc" in caught.value.remedy
    by_name = {check.name: check for check in doctor.probe_checks(child_python=Path(sys.executable))}
    assert not by_name["compiler (python3-bpfcc)"].ok
    assert "apt-get install python3-bpfcc" in by_name["run-queue probe, form tp_btf"].remedy


def test_doctor_tries_every_form() -> None:
    with probe(*FORMS):
        reason = {check.name: check for check in doctor.probe_checks()}
    assert set(reason) >= {f"run-queue probe, form {form}" for form in FORMS}
    assert all(check.ok or check.remedy for check in reason.values())
    assert reason["kernel types (BTF)"].ok

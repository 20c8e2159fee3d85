"""The parent's side against children that misbehave: each is a real process that the loader starts as if it were Python."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from api.interfaces import KernelFeatureAbsent, Unavailable
from probes.loader import Job, load
from probes.remedies import FormRefusal, explain_refusals
from tests.builders.waiting import until

JOB = Job(sources=[Path("/nowhere/x.bpf.c")], forms=[], maps=[], constants={})


def child(tmp_path: Path, body: str) -> Path:
    """A stand-in for the distribution's Python: a shell script; its last argument is the number of the socket."""
    script = tmp_path / "python3"
    script.write_text(f"#!/bin/sh\nfd=$4\n{body}\n")
    script.chmod(0o755)
    return script


def answering(tmp_path: Path, message: str) -> Path:
    return child(
        tmp_path,
        "exec /usr/bin/env python3 -c 'import socket, sys; s = socket.socket(fileno=int(sys.argv[1]));"
        f" s.recv(1 << 20); s.send(sys.argv[2].encode())' $fd '{message}'",
    )


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def refusal(python: Path, timeout_s: float = 20) -> Unavailable:
    """What loading fails with; the failure leaves no descriptor behind."""
    before = descriptors()
    with pytest.raises(Unavailable) as caught:
        load(JOB, child_python=python, timeout_s=timeout_s)
    assert descriptors() == before
    return caught.value


def test_no_python_there(tmp_path: Path) -> None:
    error = refusal(tmp_path / "python3")
    assert error.reason == f"{tmp_path}/python3 cannot be run: No such file or directory"
    assert "apt-get install python3-bpfcc" in error.remedy


def test_killed_child_is_probably_short_of_memory(tmp_path: Path) -> None:
    error = refusal(child(tmp_path, "kill -9 $$"))
    assert error.reason == "the compiling child was killed by signal 9"
    assert "memory" in error.remedy


def test_failing_child_is_quoted(tmp_path: Path) -> None:
    error = refusal(child(tmp_path, "echo first line >&2; echo SyntaxError: too old >&2; exit 3"))
    assert error.reason == "the compiling child ended with status 3: SyntaxError: too old"


def test_silent_child_is_given_up_and_ended(tmp_path: Path) -> None:
    error = refusal(child(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 600"), timeout_s=0.5)
    assert error.reason == "compiling x.bpf.c took more than 0.5 s"
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


@pytest.mark.parametrize(
    ("kind", "words", "absent"),
    [
        ("permission", "capabilities BPF and PERFMON", False),
        ("btf", "CONFIG_DEBUG_INFO_BTF", True),
        ("bcc", "apt-get install python3-bpfcc", False),
        ("no_bpf", "CONFIG_BPF_SYSCALL", True),
        ("no_map", "RLIMIT_MEMLOCK", False),
        ("refused", "schedstat", True),
    ],
)
def test_every_kind_of_failure_has_its_remedy(tmp_path: Path, kind: str, words: str, absent: bool) -> None:
    error = refusal(answering(tmp_path, f'{{"error": "{kind}", "detail": "as it is"}}'))
    assert error.reason == "as it is"
    assert words in error.remedy
    assert isinstance(error, KernelFeatureAbsent) is absent


@pytest.mark.parametrize(
    ("codes", "words", "absent"),
    [
        ((1, 1), "capabilities", False),
        ((1, 22), "Linux 5.5", False),
        ((2, 22), "Linux 5.5", True),  # no such tracepoint, and no such kind of program
        ((22, 0), "Linux 5.5", False),  # the second one did not compile
        ((22, 12), "Linux 5.5", False),  # no memory for it
        ((22, 13), "Linux 5.5", False),  # its verifier sees a mistake
    ],
)
def test_forms_that_are_all_forbidden_are_a_matter_of_capabilities_and_none_that_could_run_is_absent(
    tmp_path: Path, codes: tuple[int, ...], words: str, absent: bool
) -> None:
    forms = ",".join(
        f'{{"form": "f{code}", "stage": "load p", "reason": "no", "errno": {code}, "log": "unknown opcode\\n"}}'
        for code in codes
    )
    error = refusal(answering(tmp_path, f'{{"error": "refused", "detail": "none", "refused": [{forms}]}}'))
    assert error.reason.startswith(f"none: f{codes[0]}: load p: no (unknown opcode); f")
    assert words in error.remedy
    assert isinstance(error, KernelFeatureAbsent) is absent


def test_descriptors_that_did_not_arrive_are_missed(tmp_path: Path) -> None:
    error = refusal(answering(tmp_path, '{"form": "tp_btf", "programs": ["dtse_x"]}'))
    assert error.reason == "only 0 of a probe's descriptors were received"
    assert "ulimit -n" in error.remedy


def test_a_refusal_quotes_the_verifiers_last_word_not_its_statistics() -> None:
    log = "0: (85) call\nunknown func bpf_x#999\nprocessed 3 insns (limit 1000000)\n"
    text = str(FormRefusal(form="tp_btf", stage="load dtse_x", reason="Invalid argument", errno=22, log=log))
    assert text == "tp_btf: load dtse_x: Invalid argument (unknown func bpf_x#999)"


@pytest.mark.parametrize(
    ("stage", "wants"),
    [("attach dtse_mark to mark_oom_victim", "kernel.perf_event_paranoid"), ("load dtse_mark", "use another kernel")],
)
def test_missing_rights_to_open_an_event_have_a_remedy(stage: str, wants: str) -> None:
    """The verifier says EACCES too: there the program is at fault, not the rights."""
    missing = FormRefusal(form="tp_btf", stage="fields", reason="no such field", errno=2, log="")
    refused = FormRefusal(form="kprobe", stage=stage, reason="Permission denied", errno=13, log="")
    assert wants in explain_refusals("refused", "no form", [missing, refused], "use another kernel").remedy


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOMEM, errno.E2BIG, errno.EINVAL])
def test_a_map_that_cannot_be_created_is_no_lack_of_rights_or_of_a_feature(number: int) -> None:
    """The child has created a small map before: what is missing is memory."""
    refused = [
        FormRefusal(form=form, stage="create map waits", reason=os.strerror(number), errno=number, log="")
        for form in ("tp_btf", "raw_tp")
    ]
    error = explain_refusals("refused", "no form", refused, "use another kernel")
    assert "memory limit" in error.remedy
    assert not isinstance(error, KernelFeatureAbsent)


@pytest.mark.parametrize(
    "error_text",
    [
        '{"error": "files", "detail": "bpf(BPF_MAP_CREATE): Too many open files"}',
        (
            '{"error": "refused", "detail": "no form", "refused":'
            ' [{"form": "tp_btf", "stage": "load x", "reason": "Too many open files", "errno": 24, "log": ""}]}'
        ),
    ],
)
def test_a_child_without_descriptors_needs_a_higher_limit(tmp_path: Path, error_text: str) -> None:
    assert refusal(answering(tmp_path, error_text)).remedy == "raise the limit of open files: ulimit -n 1024"


def test_a_child_that_ends_for_want_of_descriptors_needs_a_higher_limit(tmp_path: Path) -> None:
    error = refusal(child(tmp_path, "echo OSError: [Errno 24] Too many open files >&2; exit 1"))
    assert error.remedy == "raise the limit of open files: ulimit -n 1024"


def test_a_lack_of_descriptors_is_reported_and_leaks_nothing(tmp_path: Path) -> None:
    """In a process of its own, with every limit from none to spare to enough; the child answers that it has no BCC."""
    python = answering(tmp_path, '{"error": "bcc", "detail": "none here"}')
    script = """
import os, resource, sys
from pathlib import Path
from api.interfaces import Unavailable
from probes.loader import Job, load
job = Job(sources=[Path("/nowhere/x.bpf.c")], forms=[], maps=[], constants={})
held = [os.open("/", os.O_RDONLY) for _ in range(20)]  # the child, which does not get them, is a shell and wants some
for spare in range(14):
    low = os.open("/", os.O_RDONLY)
    os.close(low)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (low + spare, hard))
    try:
        load(job, child_python=Path(sys.argv[1]))
    except Unavailable as error:
        print(error.reason, error.remedy, sep=": ")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
"""
    (tmp_path / "scratch").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", script, python], capture_output=True, text=True, check=False,
        env={**os.environ, "TMPDIR": str(tmp_path / "scratch")},
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert (len(lines), done.stderr) == (14, "")
    few = [line for line in lines if "ulimit -n 1024" in line]
    assert 4 <= len(few) < 14
    assert lines[0].startswith("a probe cannot be loaded: Too many open files")
    assert all(line.startswith("none here") for line in lines[len(few) :])
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_parent_that_is_killed_leaves_no_directory(tmp_path: Path) -> None:
    """The real child, by any Python: without BCC it answers so and waits for the next job."""
    (tmp_path / "scratch").mkdir()
    script = """
import sys
from pathlib import Path
from api.interfaces import Unavailable
from probes.loader import Compiler, Job
job = Job(sources=[Path("/nowhere/x.bpf.c")], forms=[], maps=[], constants={}, btf=Path("/nowhere"))
compiler = Compiler(Path(sys.executable))
try:
    compiler.load(job)
except Unavailable:
    print(compiler._running.child.pid, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "scratch")},
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        pid = parent.stdout.readline().strip()
        assert len(list((tmp_path / "scratch").iterdir())) == 1
        parent.kill()
    until(lambda: not list((tmp_path / "scratch").iterdir()) and not Path(f"/proc/{pid}").exists())

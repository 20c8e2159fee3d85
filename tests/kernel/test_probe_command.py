"""`dioptase probe runqlat` and `blame` as commands; tests/kernel/test_registry.py runs the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from probes.runqlat import FORMS
from tests.kernel.blame_window import FORMS as BLAME_FORMS
from tests.kernel.open_probes import LAST_CPU, PINNED, probe
from tests.kernel.real_cgroups import cgroup, require_root, require_writable_cgroups

pytestmark = pytest.mark.kernel

ROOT = Path(__file__).resolve().parents[2]
PROBE = [sys.executable, "-c", "from cli.main import main; main()", "probe"]
COMMAND = [*PROBE, "runqlat"]


def test_json_is_one_complete_object_per_interval() -> None:
    hierarchy = require_writable_cgroups()
    with probe(*FORMS), cgroup(hierarchy, "watched") as watched:
        for _ in range(2):
            watched.start([sys.executable, "-c", PINNED, str(LAST_CPU)])
        argv = [*COMMAND, "--json", "--interval", "0.5", "--duration", "1.4", "--cgroup", watched.path]
        run = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
        intervals = [json.loads(line) for line in run.stdout.splitlines()]
        assert len(intervals) == 3
        for interval in intervals:
            assert interval["form"] in FORMS
            assert len(interval["bounds_ns"]) + 1 == 27
            (only,) = interval["cgroups"]
            assert (only["cgroup"], only["id"]) == (watched.path, watched.id)
            assert sum(only["slots"]) == only["count"] > 0
        # Two burners on one CPU: one of them is waiting at any time. What the ends cut off is a slice or two.
        waited_s = sum(interval["cgroups"][0]["sum_ns"] for interval in intervals) / 1e9
        assert waited_s > 0.8 * sum(interval["interval_s"] for interval in intervals)


def test_json_names_the_neighbour_that_has_the_cpu() -> None:
    hierarchy = require_writable_cgroups()
    with probe(*BLAME_FORMS), cgroup(hierarchy, "victim") as victim, cgroup(hierarchy, "culprit") as aggressor:
        for group in (victim, aggressor):
            group.start([sys.executable, "-c", PINNED, str(LAST_CPU)])
        argv = [*PROBE, "blame", "--json", "--interval", "0.5", "--duration", "1.4", "--cgroup", victim.path]
        run = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    intervals = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(intervals) == 3
    for interval in intervals:
        assert (interval["probe"], interval["problem"]) == ("blame", "")
        assert interval["form"] in BLAME_FORMS
        (only,) = interval["cgroups"]
        assert only["cgroup"] == victim.path
        blame = only["values"]["blame"]
        assert blame.keys() == {"by_cgroup", "throttled_ns", "higher_class_ns", "other_ns"}
    # The victim waits while the aggressor runs: about half of the time, less where the machine is busy.
    blamed_s = (
        sum(interval["cgroups"][0]["values"]["blame"]["by_cgroup"][aggressor.path] for interval in intervals) / 1e9
    )
    assert 0.15 < blamed_s / sum(interval["interval_s"] for interval in intervals) < 0.7


@pytest.mark.parametrize("form", FORMS)
def test_a_person_sees_the_form_and_a_histogram(form: str) -> None:
    with probe(form):
        pass
    argv = [*COMMAND, "--duration", "0.5", "--form", form]
    run = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.startswith(f"run-queue wait, form {form}, 0.5 s, ")
    assert "█" in run.stdout
    assert run.stderr == ""


def test_ctrl_c_ends_it_cleanly() -> None:
    with probe(*FORMS):
        pass
    argv = [*COMMAND, "--json", "--interval", "0.2"]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    json.loads(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    assert all(json.loads(line) for line in rest.splitlines())


def test_without_privileges_it_says_what_is_missing() -> None:
    require_root()
    drop = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    run = subprocess.run([*drop, *COMMAND], cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ)
    assert run.returncode == 1
    assert run.stderr.splitlines() == [
        "Error: bpf(BPF_MAP_CREATE): Operation not permitted",
        "remedy: run as root, or with the capabilities BPF and PERFMON (in a pod: securityContext.capabilities.add)",
    ]

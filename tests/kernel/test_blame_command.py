"""`dioptase probe blame` as a person and as a program run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernel.open_probes import LAST_CPU, PINNED, probe
from tests.kernel.real_cgroups import cgroup, require_root, require_writable_cgroups

pytestmark = pytest.mark.kernel

ROOT = Path(__file__).resolve().parents[2]
FORMS = ("tp_btf", "raw_tp")
COMMAND = [sys.executable, "-c", "from cli.main import main; main()", "probe", "blame"]


def test_json_names_the_neighbour_that_has_the_cpu() -> None:
    hierarchy = require_writable_cgroups()
    with probe(*FORMS), cgroup(hierarchy, "victim") as victim, cgroup(hierarchy, "culprit") as aggressor:
        for group in (victim, aggressor):
            group.start([sys.executable, "-c", PINNED, str(LAST_CPU)])
        argv = [*COMMAND, "--json", "--interval", "0.5", "--duration", "1.4", "--cgroup", victim.path]
        run = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    intervals = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(intervals) == 3
    for interval in intervals:
        assert (interval["probe"], interval["problem"]) == ("blame", "")
        assert interval["form"] in FORMS
        (only,) = interval["cgroups"]
        assert only["cgroup"] == victim.path
        blame = only["values"]["blame"]
        assert blame.keys() == {"by_cgroup", "throttled_ns", "higher_class_ns", "other_ns"}
    # The victim waits while the aggressor runs: about half of the time, less where the machine is busy.
    blamed_s = (
        sum(interval["cgroups"][0]["values"]["blame"]["by_cgroup"][aggressor.path] for interval in intervals) / 1e9
    )
    assert 0.15 < blamed_s / sum(interval["interval_s"] for interval in intervals) < 0.7


def test_a_person_sees_the_form_and_a_matrix() -> None:
    with probe(*FORMS) as source:
        form = source.form
    argv = [*COMMAND, "--duration", "0.5"]
    run = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.startswith(f"blame, form {form}, 0.5 s: ")
    assert "quota" in run.stdout
    assert run.stderr == ""


def test_without_privileges_it_says_what_is_missing() -> None:
    require_root()
    drop = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    run = subprocess.run([*drop, *COMMAND], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr.startswith("Error: bpf(BPF_MAP_CREATE): Operation not permitted\nWhat to do: run as root")

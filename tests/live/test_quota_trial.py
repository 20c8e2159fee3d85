"""A real agent measures that the CPU quota of a reclaimed pod helps an online pod, reports it, and saves the verdict."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from agent.journal.quota_verdict_file import QuotaVerdictFile
from tests.builders.waiting import until
from tests.kernel.knob_cgroups import give_controllers
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups
from tests.live.agent_process import Agent, pods_file

pytestmark = pytest.mark.live
SERVE = """import time
while True:
    time.sleep(0.002)
    end = time.monotonic() + 0.0005
    while time.monotonic() < end:
        pass
"""
"""A thread that wakes up some hundred times a second."""
SETTINGS = "advisor: {latency: {targetWaitMs: 40, leastBlameRatio: 0}}\n"
BURNERS, TRIAL_S = 3, 240
METRIC = "dioptase_quota_trial_runq_wait_seconds"
MAX_SHARES = 262_144
"""Largest value of cpu.shares (kernel/sched/sched.h)."""


def build_inverted_priority(stack: ExitStack) -> tuple[TestCgroup, TestCgroup]:
    """Return an online container in the class with the lowest weight, and a batch container in a class of high weight.

    `cpu.idle` of the batch pod has no effect between classes, so that only the quota can help.
    """
    root = stack.enter_context(cgroup(require_writable_cgroups(), "trial"))
    give_controllers(root)

    def set_shares(group: TestCgroup, shares: int) -> None:
        v2 = group.hierarchy.mode == "v2"
        weight = max(shares * 10_000 // MAX_SHARES, 1) if v2 else shares
        group.file("cpu", "cpu.weight" if v2 else "cpu.shares").write_text(str(weight))

    def make(above: TestCgroup, name: str, shares: int) -> TestCgroup:
        group = TestCgroup(above.hierarchy, f"{above.path}/{name}")
        stack.callback(group.close)
        if name != "c":
            give_controllers(group)
        set_shares(group, shares)
        return group

    # Other work on this machine hardly competes on this CPU, and has the other CPUs.
    root.file("cpuset", "cpuset.cpus").write_text(str(max(os.sched_getaffinity(0))))
    set_shares(root, 32_768)
    kubepods = make(root, "kubepods", 32_768)
    web = make(make(make(kubepods, "besteffort", 160), "podweb", 1024), "c", 1024)
    batch = make(make(make(kubepods, "burstable", 8192), "podbatch", 1024), "c", 1024)
    return web, batch


def test_a_quota_that_helps_is_proved_reported_and_remembered(tmp_path: Path) -> None:
    settings, state = tmp_path / "settings.yaml", tmp_path / "state"
    settings.write_text(SETTINGS)
    with ExitStack() as stack:
        web, batch = build_inverted_priority(stack)
        for _ in range(2):
            web.start([sys.executable, "-c", SERVE])
        batch.burn(BURNERS)
        pods = pods_file(tmp_path / "pods.yaml", web.path, batch.path)
        options = ("--act", "on", "--config", str(settings), "--pods", str(pods), "--state-dir", str(state))
        with Agent(*options) as agent:
            until(
                lambda: agent.view()["quota_trial"] != "",
                lambda: f"a verdict: {agent.view()['rule']}: {agent.view()['reason']}",
                TRIAL_S,
            )
            text = str(agent.view()["quota_trial"])
            assert text.startswith("The CPU quota of reclaimed pods helped default/web: run-queue latency p99 ")
            with_s, without_s = (
                next(float(row.split()[1]) for row in agent.get("/metrics").splitlines() if row.startswith(series))
                for series in (f'{METRIC}{{verdict="helped",quota="{quota}"}}' for quota in ("with", "without"))
            )
            assert with_s < 0.5 * without_s
            entries = [json.loads(line) for line in (state / "decisions.jsonl").read_text().splitlines()]
            reasons = [entry["outcome"]["decision"]["verdict"] for entry in entries]
            proofs = [reason for reason in reasons if reason["rule"] == "quota_helped"]
            assert [reason["inputs"]["workloads"] for reason in proofs] == ["default/web"]
            released = [reason for reason in reasons if reason["rule"] == "quota_trial"]
            assert released, "the quota was lifted to measure"
            agent.end(signal.SIGKILL)
    (verdict,) = QuotaVerdictFile(state, os.uname().release).load()
    assert (verdict.helped, verdict.workloads, verdict.text) == (True, "default/web", text)

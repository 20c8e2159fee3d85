"""The longest runs of threads by the text of the scheduler's tracepoint, and the verdicts on the agent's cost."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from api.interfaces import Unavailable
from bench.agent_cost import AgentCost, AgentCostResults, markdown
from bench.scheduler_trace import LongestRun, Switch, longest_runs, parse_switches, scheduler_trace
from tests.bench.builders import MACHINE

TRACE = """# tracer: nop
          <idle>-0       [001] d..2. 4512.000100: sched_switch: prev_comm=swapper/1 prev_pid=0 prev_prio=120 prev_state=R \
==> next_comm=my agent next_pid=7 next_prio=120
        my agent-7       [001] d..2. 4512.004100: sched_switch: prev_comm=my agent prev_pid=7 prev_prio=120 prev_state=R+ \
==> next_comm=stress next_pid=9 next_prio=120
"""

BUSY = """
import time
while True:
    end = time.thread_time() + 0.03
    while time.thread_time() < end: pass
    time.sleep(0.1)
"""


def test_a_switch_has_its_time_cpu_and_threads() -> None:
    assert parse_switches(TRACE) == [
        Switch(4512_000_100, 1, 0, preempted=True, following=7),
        Switch(4512_004_100, 1, 7, preempted=True, following=9),
    ]


def switch(at_ms: float, previous: int, following: int, *, preempted: bool = False) -> Switch:
    return Switch(round(at_ms * 1000), 0, previous, preempted=preempted, following=following)


def test_preemption_ends_a_run_and_sleep_ends_work() -> None:
    """Thread 7 works for 3 ms, is preempted for 10 ms, works for 5 ms more and sleeps: a run of 5 ms, and work of 8 ms."""
    switches = [
        switch(100, 0, 7), switch(103, 7, 9, preempted=True), switch(113, 9, 7), switch(118, 7, 0),
        switch(1200, 0, 7), switch(1201, 7, 0), switch(1300, 0, 9), switch(1400, 9, 0),
    ]  # fmt: skip
    assert longest_runs(switches, {7}) == [LongestRun(5.0, 8.0), LongestRun(1.0, 1.0)]


def test_a_run_that_began_before_the_trace_does_not_count() -> None:
    assert longest_runs([switch(5, 7, 0), switch(6, 0, 7)], {7}) == []


def test_each_goal_has_its_verdict() -> None:
    cost = AgentCost(
        start_cpu_s=2.0, restart_cpu_s=1.5, cpu_s_per_minute=0.61, rss_mib=60.4,
        longest=(LongestRun(1.0, 2.0), LongestRun(1.5, 2.01), LongestRun(0.5, 0.5)),
    )  # fmt: skip
    text = markdown(AgentCostResults(machine=MACHINE, seconds=60, cost=cost))
    assert "| CPU of the start, s | 2.00 | MISS 1.5 |" in text
    assert "| CPU of a restart, s | 1.50 | PASS 1.5 |" in text
    assert "| CPU a minute, s | 0.61 | MISS 0.6 |" in text
    assert "| longest work of a second, ms | 2.00, at most 2.01 | MISS 2 |" in text
    assert "| longest run of a second, ms | 1.00, at most 1.50 |  |" in text


@pytest.mark.kernel
def test_the_kernel_reports_the_work_of_a_thread() -> None:
    """A process that computes for 30 ms of its CPU time, then sleeps, several times: preemptions split its runs, not its
    work."""
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        with scheduler_trace("dioptase-test") as trace:
            trace.start([process.pid])
            time.sleep(3)
            switches = trace.stop()
    except Unavailable as error:
        pytest.skip(error.reason)
    finally:
        process.kill()
        process.wait()
    works = sorted(each.work_ms for each in longest_runs(switches, {process.pid}))
    assert works[len(works) // 2] == pytest.approx(30, rel=0.5), "the first second also has the interpreter's start"

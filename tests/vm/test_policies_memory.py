"""Memory policies on version 2 with real memory, swap and NUMA nodes: the guard, the cache reaper and memory offloading."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from mmap import PAGESIZE
from pathlib import Path

import pytest

from api.decision import Cycle, Outcome, OutcomeStatus
from api.knobs import Knob
from api.units import MIB
from tests.builders.waiting import until
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups
from tests.vm.agent_cycles import acting_loop, pod, refused, run_cycle, run_cycles_until
from tests.vm.workloads import (
    DATA,
    cache,
    disk,
    family,
    free_bytes,
    generations,
    hold,
    numa_nodes,
    number,
    numbers,
    reclaimed_bytes,
    swapped,
    vmstat,
)

pytestmark = pytest.mark.vm

RATIO = 0.04


@pytest.fixture
def web() -> Iterator[TestCgroup]:
    """An online pod of 64 MiB."""
    with cgroup(require_writable_cgroups(), "web") as created:
        hold(created, 64 * MIB)
        yield created


@pytest.fixture
def root() -> Iterator[TestCgroup]:
    """The group above batch pods."""
    with cgroup(require_writable_cgroups(), "batch") as created:
        yield created


def test_batch_work_meets_its_limit_before_the_node_runs_out_of_memory(
    web: TestCgroup, root: TestCgroup, tmp_path: Path
) -> None:
    """It wants 96 MiB more than the guard, by what is free beyond its watermark, leaves to it."""
    with family(root, "job") as (job,):
        hold(job, 16 * MIB)
        floor = min(map(free_bytes, numa_nodes())) - 64 * MIB
        spare = sum(max(free_bytes(node) - floor, 0) for node in numa_nodes())
        settings = {
            "advisor": {"policy": "none"},
            "memory": {"reclaimRoot": root.path, "minCriticalWatermarkBytes": floor},
        }
        with acting_loop(tmp_path, settings, [pod(web, "shared_cores"), pod(job, "reclaimed_cores")]) as loop:
            assert refused(run_cycle(loop)) == []
            limit, high = number(root, "memory.max"), number(root, "memory.high")
            assert limit - number(root, "memory.current") == pytest.approx(spare, abs=32 * MIB)
            assert high == pytest.approx(0.95 * limit, abs=8192)
            stolen = vmstat()["pgsteal_kswapd"]
            hold(job, limit - 16 * MIB + 96 * MIB)
            events = numbers(root, "memory.events")
            assert (events["high"] > 0, events["oom_kill"]) == (True, 0)
            assert swapped(root) >= 80 * MIB
            assert number(root, "memory.current") <= limit
            assert (vmstat()["pgsteal_kswapd"] - stolen) * PAGESIZE < 4 * MIB, (
                "the node itself reclaims next to nothing"
            )
            assert swapped(web) == 0
        assert root.file("memory", "memory.max").read_text() == "max\n"


@pytest.fixture
def without_swap() -> Iterator[None]:
    """Before Linux 6.9 a caller cannot limit reclaim to page cache, unless the cgroup has nothing else to reclaim."""
    device = f"/dev/{disk('swap').name}"
    subprocess.run(["swapoff", device], check=True)
    yield
    subprocess.run(["swapon", device], check=True)


def test_the_reaper_drops_the_cache_of_batch_work_when_memory_is_short(
    web: TestCgroup, root: TestCgroup, without_swap: None, tmp_path: Path
) -> None:
    with family(root, "job", "small") as (job, small):
        hold(job, 32 * MIB)
        cache(job, DATA / "large", 64 * MIB)
        cache(small, DATA / "small", 4 * MIB)
        cache(web, DATA / "theirs", 64 * MIB)
        before = {group.path: numbers(group, "memory.stat") for group in (web, job, small)}
        short = free_bytes() // len(numa_nodes()) + 64 * MIB
        settings = {
            "advisor": {"policy": "none"},
            "memory": {"minCriticalWatermarkBytes": short, "reaper": {"enable": True, "minCacheRatio": 0.01}},
        }
        pods = [pod(web, "shared_cores"), pod(job, "reclaimed_cores"), pod(small, "reclaimed_cores")]
        with acting_loop(tmp_path, settings, pods) as loop:
            done = run_cycles_until(loop, "the reaper is done", lambda each: bool(dropped(each)))
        (outcome,) = dropped(done[-1])
        assert (outcome.decision.cgroup, outcome.status) == (job.path, OutcomeStatus.APPLIED)
        assert "free, less than the" in outcome.decision.reason.text
        now = {group.path: numbers(group, "memory.stat") for group in (web, job, small)}
        removed = {path: before[path]["file"] - now[path]["file"] for path in now}
        assert removed[job.path] >= 48 * MIB
        assert max(removed[web.path], removed[small.path]) < MIB, "online work and what is not worth it keep theirs"
        assert numbers(job, "memory.stat")["anon"] >= 32 * MIB


def dropped(done: Cycle) -> list[Outcome]:
    """What the reaper had done, as far as it is finished."""
    own = [outcome for outcome in done.outcomes if outcome.decision.knob is Knob.DROP_CACHE]
    return [outcome for outcome in own if outcome.status is not OutcomeStatus.UNCHANGED]


def offload_inputs(done: list[Cycle], group: TestCgroup) -> list[dict[str, float]]:
    """What a law of offloading looked at, each time that it looked at that group."""
    results = []
    for each in done:
        stat = each.snapshot.cgroups[group.path].memory_stat
        for verdict in each.memory.reasons if each.memory is not None else ():
            if verdict.rule == "memory_offload" and f" {group.path};" in verdict.text:
                inputs = {name: float(value or 0) for name, value in verdict.inputs.items()}
                results.append({**inputs, "inactive": stat["inactive_anon"] + stat["inactive_file"]})
    return results


def expected(law: str, observed: list[dict[str, float]]) -> list[int]:
    """By pressure a part of the use; by what is read back nothing at first, then a part of what is inactive, up to as much."""
    most = [RATIO * each["usage_bytes"] for each in observed]
    if law == "psi":
        return [round(size) for size in most]
    request = [
        max(1.05 * each["last_bytes"], 0.1 * (each["inactive"] or top))
        for each, top in zip(observed, most, strict=True)
    ]
    return [0, *(round(min(pair)) for pair in zip(request[1:], most[1:], strict=True))]


def test_idle_memory_is_swapped_out_bit_by_bit_and_no_more_once_it_is_wanted_back(
    web: TestCgroup, root: TestCgroup, tmp_path: Path
) -> None:
    """By pressure and by what is read back, side by side: at each interval a twenty-fifth of what is used."""
    with family(root, "psi", "refault") as pair:
        for group in pair:
            hold(group, 128 * MIB)
        law = {"enable": True, "enableSwap": True, "intervalS": 1, "psiMaxProbe": RATIO, "refaultMaxProbe": RATIO}
        law |= {"reclaimAccuracyTarget": 0.9, "reclaimScanEfficiencyTarget": 0}
        laws = {group.path: {**law, "policy": group.path.rpartition("/")[2]} for group in pair}
        settings = {"advisor": {"policy": "none"}, "memory": {"offloading": {"cgroups": laws}}}
        pods = [pod(web, "shared_cores"), *(pod(group, "reclaimed_cores") for group in pair)]
        with acting_loop(tmp_path, settings, pods) as loop:
            done: list[Cycle] = []

            def looked(times: int) -> bool:
                done.append(run_cycle(loop))
                return all(len(offload_inputs(done, group)) >= times for group in pair)

            until(lambda: looked(3), "three looks at each")
            for group in pair:
                observed = offload_inputs(done, group)
                result = expected(group.path.rpartition("/")[2], observed)
                assert [each["asked_bytes"] for each in observed] == pytest.approx(result, abs=2)
                given = sum(result)
                until(lambda group=group, given=given: reclaimed_bytes(group) >= 0.9 * given, "it has given that")
                # The kernel scans more at once the fewer idle pages it finds, as on a busy machine (mm/vmscan.c,
                # shrink_lruvec()): 1.7 times as much was seen. The multi-generational LRU finishes what it has started.
                assert generations() or reclaimed_bytes(group) <= 3 * given + MIB
            assert swapped(web) == 0
            # One has room for half of its memory only, the other for all; both want all of it back, time and again.
            pair[0].file("memory", "memory.high").write_text(str(64 * MIB))
            before = len(done)

            def backs_off() -> bool:
                for group in pair:
                    group.processes[0].send_signal(signal.SIGUSR1)
                done.append(run_cycle(loop))
                stalled, misses = (offload_inputs(done[before:], group) for group in pair)
                return any(each["psi_some_avg60"] > 0.1 and each["law_bytes"] == 0 for each in stalled) and any(
                    each["law_bytes"] < 0.9 * each["last_bytes"] for each in misses
                )

            until(backs_off, "both targets are reduced")

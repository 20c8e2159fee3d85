"""Limits of decisions on trees of both versions: memory in use, bursts below quotas, owners' values; one-shot operations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.qrm.actuator import one_shot
from agent.qrm.actuator.one_shot import run_one_shot
from agent.qrm.actuator.plan import SLACK_BYTES, STEP_BYTES, USAGE_FILES, WritePlan, writing_order
from agent.qrm.actuator.writer import RawValue
from agent.qrm.knobs.notation import PAGE_BYTES
from api.decision import ActMode, Decision, Outcome, OutcomeStatus
from api.knobs import Knob
from api.units import MIB
from tests.agent.qrm.actuator.trees import Bench
from tests.builders.waiting import until


@pytest.fixture(params=["v1", "v2"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    instance = Bench(tmp_path, request.param)
    yield instance
    instance.close()


def uses(bench: Bench, used: int, cache: int, dirty: int = 0) -> None:
    v2 = bench.tree.hierarchy.mode == "v2"
    prefix, dirty_name = ("", "file_dirty") if v2 else ("total_", "total_dirty")
    bench.tree.file("/batch", USAGE_FILES[bench.files.version]).write_text(f"{used}\n")
    bench.tree.file("/batch", "memory.stat").write_text(
        f"{prefix}inactive_file {cache}\n{prefix}active_file 0\n{dirty_name} {dirty}\n"
    )


@pytest.mark.parametrize(
    ("used", "cache", "dirty", "requested", "given"),
    [
        (100, 50, 0, 200, 200),
        (100, 50, 0, 100, 100),
        (100, 48, 0, 90, 90),
        (100, 48, 0, 60, 80),
        (100, 48, 20, 60, 90),
        (100, 8, 0, 60, 100),
        (100, 0, 0, 60, 100),
        (4000, 3000, 0, 60, 4000 - 256),
    ],
)
def test_memory_is_lowered_by_half_of_the_clean_page_cache(
    bench: Bench, used: int, cache: int, dirty: int, requested: int, given: int
) -> None:
    uses(bench, used * MIB, cache * MIB, dirty * MIB)
    (outcome,) = bench.apply(("/batch", Knob.MEMORY_MAX, str(requested * MIB)))
    assert (outcome.status, outcome.after) == (OutcomeStatus.APPLIED, str(given * MIB))
    assert outcome.clamped_from == (None if given == requested else str(requested * MIB))
    assert (SLACK_BYTES, STEP_BYTES) == (8 * MIB, 256 * MIB)


@pytest.mark.parametrize("bench", ["v2"], indirect=True)  # version 1 has no memory.high
def test_memory_high_is_lowered_in_steps(bench: Bench) -> None:
    uses(bench, 1000 * MIB, 0)
    limits_mib = []
    for used in (1000, 744, 488):
        uses(bench, used * MIB, 0)
        (outcome,) = bench.actuator.apply([bench.tree.decision("/batch", Knob.MEMORY_HIGH, str(300 * MIB))], 1)
        limits_mib.append(int(outcome.after or 0) // MIB)
    assert limits_mib == [744, 488, 300]


def test_only_exempt_cgroups_may_exceed_the_owner_s_quota(bench: Bench) -> None:
    bench.apply(("/batch", Knob.QUOTA, "50000"))
    bench.originals.restore(bench.files)
    bench.files.write("/batch", bench.tree.id("/batch"), Knob.QUOTA, "50000")
    decision = bench.tree.decision("/batch", Knob.QUOTA, "120000")
    (outcome,) = bench.actuator.apply([decision])
    assert (outcome.status, outcome.clamped_from) == (OutcomeStatus.UNCHANGED, "120000")
    (outcome,) = bench.actuator.apply([decision], quota_exempt={"/batch"})
    assert (outcome.status, outcome.after) == (OutcomeStatus.APPLIED, "120000 100000")
    bench.originals.restore(bench.files)
    assert bench.files.read("/batch", bench.tree.id("/batch"), Knob.QUOTA) == "50000 100000"


def test_with_unknown_usage_no_limit_is_lowered(bench: Bench) -> None:
    bench.tree.file("/batch", USAGE_FILES[bench.files.version]).write_text("lots\n")
    (outcome,) = bench.apply(("/batch", Knob.MEMORY_MAX, str(MIB)))
    assert (outcome.status, outcome.before) == (OutcomeStatus.REFUSED, "max")
    assert "its memory usage cannot be read" in outcome.error
    (outcome,) = bench.apply(("/batch", Knob.MEMORY_MAX, "max"))
    assert outcome.status is OutcomeStatus.UNCHANGED


def test_a_lower_quota_lowers_the_burst_and_both_are_restored(bench: Bench) -> None:
    before = bench.tree.texts("/batch")
    v2 = bench.tree.hierarchy.mode == "v2"
    burst = bench.tree.file("/batch", "cpu.max.burst" if v2 else "cpu.cfs_burst_us")
    burst.write_text("80000\n")
    (outcome,) = bench.apply(("/batch", Knob.QUOTA, "20000"))
    assert (outcome.status, burst.read_text()) == (OutcomeStatus.APPLIED, "20000\n")
    assert set(bench.journalled()) == {("/batch", Knob.QUOTA), ("/batch", Knob.BURST)}
    quota = [bench.tree.decision("/batch", Knob.QUOTA, "20000")]
    assert bench.actuator.release(quota, ()) == (), "the burst belongs to the quota that is still decided"
    assert {o.status for o in bench.actuator.release([], ())} == {OutcomeStatus.APPLIED}
    assert burst.read_text() == "80000\n"
    burst.write_text(before[burst.name])
    assert bench.tree.texts("/batch") == before


def plan(bench: Bench, knob: Knob, before: str, value: str) -> WritePlan:
    return WritePlan(bench.tree.decision("/batch", knob, value), before, RawValue(directory_id=1, texts={}))


def test_the_inner_limit_is_lowered_before_the_outer_and_raised_after_it(bench: Bench) -> None:
    down = [
        plan(bench, Knob.MEMORY_MAX, "max", "8192"),
        plan(bench, Knob.MEMORY_HIGH, "max", "4096"),
        plan(bench, Knob.MEMORY_LOW, "8192", "4096"),
        plan(bench, Knob.QUOTA, "max 100000", "20000 100000"),
        plan(bench, Knob.BURST, "50000", "10000"),
    ]
    order = [each.decision.knob for each in sorted(down, key=writing_order)]
    assert order == [Knob.BURST, Knob.QUOTA, Knob.MEMORY_LOW, Knob.MEMORY_HIGH, Knob.MEMORY_MAX]
    up = [
        plan(bench, each.decision.knob, each.decision.value, "max" if each.before.startswith("max") else each.before)
        for each in down
    ]
    order = [each.decision.knob for each in sorted(up, key=writing_order)]
    assert order == [Knob.QUOTA, Knob.BURST, Knob.MEMORY_MAX, Knob.MEMORY_HIGH, Knob.MEMORY_LOW]


@pytest.mark.parametrize(
    ("knob", "value", "written"),
    [
        (Knob.MEMORY_RECLAIM, str(10 * MIB), {"v2": f"{10 * MIB}\n"}),
        (Knob.MEMORY_RECLAIM, str(65 * MIB), {"v2": f"{MIB}\n"}),
        (Knob.DROP_CACHE, str(10 * MIB), {"v2": f"{10 * MIB} swappiness=0\n", "v1": "0\n"}),
    ],
)
def test_memory_is_reclaimed_in_chunks(bench: Bench, knob: Knob, value: str, written: dict[str, str]) -> None:
    """The file holds the last chunk: of 65 MiB, the first write is 64 MiB."""
    uses(bench, 100 * PAGE_BYTES, 0)
    outcome = run_one_shot(bench.tree.decision("/batch", knob, value), bench.files)
    if bench.files.version not in written:
        assert (outcome.status, "there is no memory.reclaim" in outcome.error) == (OutcomeStatus.REFUSED, True)
        return
    assert (outcome.status, outcome.before, outcome.after) == (OutcomeStatus.APPLIED, *[str(100 * PAGE_BYTES)] * 2)
    name = "memory.reclaim" if bench.files.version == "v2" else "memory.force_empty"
    assert bench.tree.file("/batch", name).read_text() == written[bench.files.version]


@pytest.mark.parametrize("bench", ["v2"], indirect=True)  # version 1 drops everything in one system call
def test_the_time_limit_ends_a_reclaim_partially(bench: Bench) -> None:
    outcome = run_one_shot(bench.tree.decision("/batch", Knob.MEMORY_RECLAIM, str(200 * MIB)), bench.files, limit_s=0)
    assert outcome.status is OutcomeStatus.APPLIED
    assert outcome.error == f"partial: {136 * MIB} of {200 * MIB} bytes were left at the time limit"


def test_an_unexpected_exception_is_reported_and_the_worker_continues(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def fail_once(decision: Decision, *_: object) -> Outcome:
        calls.append(decision.value)
        if len(calls) == 1:
            raise KeyError("no such operation")
        return Outcome(decision=decision, status=OutcomeStatus.APPLIED)

    monkeypatch.setattr(one_shot, "run_one_shot", fail_once)
    worker = one_shot.OneShotWorker(bench.tree.hierarchy)
    reported = []
    for value in ("4096", "8192"):
        outcome = worker.submit(bench.tree.decision("/batch", Knob.DROP_CACHE, value))
        assert outcome.error == one_shot.IN_PROGRESS
        reported += until(worker.finished)
    assert [(outcome.decision.value, outcome.status) for outcome in reported] == [
        ("4096", OutcomeStatus.REFUSED), ("8192", OutcomeStatus.APPLIED),
    ]  # fmt: skip
    assert "KeyError('no such operation')" in reported[0].error


@pytest.mark.parametrize("mode", ["v1", "v2"])
def test_a_dry_run_runs_no_one_shot_operation(tmp_path: Path, mode: str) -> None:
    bench = Bench(tmp_path, mode, ActMode.DRY_RUN)
    drop, bad = bench.apply(("/batch", Knob.DROP_CACHE, "4096"), ("/batch", Knob.MIGRATE_PAGES, "0"))
    assert (drop.status, bad.status) == (OutcomeStatus.DRY_RUN, OutcomeStatus.REFUSED)
    assert bench.actuator.finished() == ()
    assert bench.tree.file("/batch", "memory.reclaim" if mode == "v2" else "memory.force_empty").read_text() == ""
    (root,) = bench.apply(("/", Knob.DROP_CACHE, "4096"))
    assert root.status is OutcomeStatus.REFUSED
    bench.close()


def test_the_quota_left_by_a_previous_agent_is_reported_per_cgroup(bench: Bench) -> None:
    bench.tree.make("/web")
    bench.apply(("/batch", Knob.QUOTA, "10000"), ("/web", Knob.QUOTA, "400000"))
    assert bench.actuator.previous_quota_cores({"/batch"}) == 0.1
    assert bench.actuator.previous_quota_cores({"/elsewhere"}) is None

"""`dioptase explain`: from a knob to its decision, rule, inputs and sources."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from click.testing import CliRunner, Result

from api.decision import OutcomeStatus
from api.knobs import Knob, Reason
from api.pod import Container
from api.snapshot import ComponentHealth
from cli import formats
from cli.explain.answer import Explanation, explain_target, is_about_target, knob_histories, known_targets
from cli.explain.command import explain
from cli.explain.report import explanation_text, reason_text
from cli.top.summary import cycle_line
from exporters.view.cycle_view import build_view
from tests.builders import colocation_run
from tests.builders.agent_server import AgentServer
from tests.builders.full_node import RICH_NODE

TOLD = colocation_run.simulate_run(205, others=(), sources=(*colocation_run.SOURCES, colocation_run.FAILING))
LATER_NS = TOLD.rounds[-1].snapshot.wall_time_ns + 2 * colocation_run.S


def asked(target: str | None, told: colocation_run.ColocationRun = TOLD) -> Explanation:
    last = told.rounds[-1]
    return explain_target(target, build_view(last), told.entries, last.snapshot, LATER_NS)


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentServer]:
    made = AgentServer(TOLD.entries)
    made.show(TOLD.rounds)
    yield made
    made.close()


def call(agent: AgentServer, *arguments: str) -> Result:
    return CliRunner().invoke(explain, [*arguments, "--url", agent.url])


def test_a_knob_is_explained_by_its_newest_decision(agent: AgentServer) -> None:
    done = call(agent, "cpu.max")
    assert done.exit_code == 0
    flat = " ".join(done.stdout.split())
    newest = next(e for e in reversed(TOLD.entries) if e.outcome.decision.knob is Knob.QUOTA)
    verdict = newest.outcome.decision.reason
    assert verdict.rule == "wait_far_above_target"
    assert "cpu.max of default/batch is 0.20 cores (20000 100000)" in flat
    assert "no limit (max 100000) → 0.20 cores (20000 100000); written and verified" in flat
    assert f"because {verdict.text}" in flat
    assert "rule wait_far_above_target, threshold 10" in flat
    known = {name: value for name, value in verdict.inputs.items() if value is not None}
    assert len(known) == 8, "what the pods wait by themselves is not known yet"
    for name, value in known.items():
        assert f"{name} {value:g}" in flat if isinstance(value, float) else f"{name} {value}" in flat
    assert f"wait_ms {verdict.inputs['wait_ms']:g} (from waits)" in flat
    assert "between ticks: run-queue latency of online pods exceeded its limit" in flat
    assert "cpu.idle" not in flat


def test_age_and_state_of_the_sources_close_the_answer() -> None:
    flat = " ".join(" ".join(explanation_text(asked("cpu.idle"), LATER_NS, 100)).split())
    assert "Now: cycle 206, 2 s ago, --act on" in flat
    assert "✓ waits tp_btf: 2 s old, took 310 µs" in flat
    assert f"✕ psi: failed: {colocation_run.FAILING.error}; {colocation_run.FAILING.remedy}" in flat


def test_readings_that_are_older_than_the_round_have_ages_of_their_own() -> None:
    """Asked 2 s after the round: the node's rare files were read 3 s before it, a pod's 4 s, and a pod asked 1 s before."""
    last = TOLD.rounds[-1].snapshot
    cgroups = {
        path: msgspec.structs.replace(sample, files_read_at_ns=last.wall_time_ns - (3 + number) * colocation_run.S)
        for number, (path, sample) in enumerate(last.cgroups.items())
    }
    aged = msgspec.structs.replace(
        last,
        node=msgspec.structs.replace(last.node, files_read_at_ns=last.wall_time_ns - 3 * colocation_run.S),
        cgroups=cgroups,
        indicators={
            pod: msgspec.structs.replace(each, sampled_at_ns=last.taken_at_ns - colocation_run.S)
            for pod, each in last.indicators.items()
        },
        sources=(*last.sources, ComponentHealth(name="indicators", ok=True, duration_ns=1000)),
    )
    finished = msgspec.structs.replace(TOLD.rounds[-1], snapshot=aged)
    flat = " ".join(
        " ".join(explanation_text(asked(None, msgspec.structs.replace(TOLD, rounds=[finished])), LATER_NS, 300)).split()
    )
    assert "✓ node: 2 s old, took 190 µs; zones, vmstat, NUMA nodes, disks and file systems: 5 s old" in flat
    assert "✓ cgroups: 2 s old, took 1.45 ms; memory.stat, numa_stat and io.stat of pods: 6 s old" in flat, (
        "no pod's: 7"
    )
    assert "✓ indicators: 2 s old, took 1.00 µs; the oldest: 3 s old" in flat
    assert "✓ waits tp_btf: 2 s old, took 310 µs ✕" in flat


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("low_bytes", "files of the node, up to 5 s old"), ("need_bytes", "files of cgroups, up to 5 s old"),
        ("cap_bytes", "limits, up to 30 s old"), ("avg10", "cgroups"), ("promised", "the reported headroom"),
        ("requested", "pods"), ("rounds", "earlier cycles"), ("for_s", "earlier cycles"), ("factor", "the settings"),
        ("wait_ms", "waits"),
    ],
)  # fmt: skip
def test_an_input_is_told_with_its_source_and_how_old_that_may_be(name: str, source: str) -> None:
    verdict = Reason(rule="r", text="t", inputs={name: 1.5, "victims": 2})
    assert list(reason_text(verdict))[2:] == [("inputs", f"{name} 1.5 (from {source})"), ("", "victims 2")]


def test_an_event_is_told_as_it_was_and_what_came_after_it() -> None:
    """The first quota, long gone, is not what the knob is; the newest one is."""
    quotas = [entry for entry in TOLD.entries if entry.outcome.decision.knob is Knob.QUOTA]
    first, newest = quotas[0], quotas[-1]
    assert first.outcome.decision.value != newest.outcome.decision.value
    told = "\n".join(explanation_text(asked(f"#{first.seq}"), LATER_NS, 200))
    clock = formats.clock(first.wall_time_ns / 1e6)
    assert f"cpu.max of default/batch was, at {clock}, {formats.knob_value('cpu.max', first.outcome.after)} (" in told
    assert f"  since then #{newest.seq}, " in told
    latest = "\n".join(explanation_text(asked(f"#{newest.seq}"), LATER_NS, 200))
    assert "cpu.max of default/batch is 0.20 cores" in latest
    assert "since then" not in latest
    assert "since then" not in "\n".join(explanation_text(asked("cpu.max"), LATER_NS, 200))


@pytest.mark.parametrize(
    ("target", "knobs"),
    [
        ("default/batch", {"cpu.idle", "cpu.max"}), ("batch", {"cpu.idle", "cpu.max"}), ("cpu.idle", {"cpu.idle"}),
        ("quota", {"cpu.max"}), ("IDLE", {"cpu.idle"}), ("/dioptase-demo-batch", {"cpu.idle", "cpu.max"}),
        ("#1", {"cpu.idle"}), ("2", {"cpu.max"}), ("#9999", set()),
        ("memory", set()), ("share", set()),
        ("/", {"cpu.idle", "cpu.max"}), ("/dioptase-demo", set()), (None, {"cpu.idle", "cpu.max"}), ("web", set()),
    ],
)  # fmt: skip
def test_what_a_person_may_call_it(target: str | None, knobs: set[str]) -> None:
    assert {found.knob for found in asked(target).knobs} == knobs


def test_a_pod_that_was_never_touched_is_known() -> None:
    found = asked("default/web")
    assert found.has_content
    assert [(pod.pod, pod.untouched) for pod in found.pods] == [("default/web", True)]
    assert "No change of a knob of default/web is in the journal" in "\n".join(explanation_text(found, LATER_NS, 80))


def test_a_pod_is_not_answered_for_by_one_that_had_its_name_before() -> None:
    """As of a StatefulSet: the cgroup of the pod that was decided on is gone, and another pod of that name is here."""
    last = TOLD.rounds[-1]
    sample = last.snapshot.cgroups["/dioptase-demo-batch"]
    new = msgspec.structs.replace(sample, path="/new-batch", id=999)
    others = {path: one for path, one in last.snapshot.cgroups.items() if one is not sample}
    batch = msgspec.structs.replace(
        colocation_run.BATCH, uid="2", containers=(Container(name="batch", cgroup=new.path),)
    )
    seen = msgspec.structs.replace(
        last.snapshot,
        cgroups={**others, new.path: new},
        pods=(batch, *(pod for pod in last.snapshot.pods if pod.key != batch.key)),
    )
    told = msgspec.structs.replace(TOLD, rounds=[msgspec.structs.replace(last, snapshot=seen)])
    newest = max(e.seq for e in TOLD.entries if e.outcome.decision.pod == "default/batch")

    found = asked("default/batch", told)
    assert found.knobs == ()
    assert [(pod.untouched, pod.past) for pod in found.pods] == [(True, newest)]
    said = " ".join("\n".join(explanation_text(found, LATER_NS, 200)).split())
    assert "No change of a knob of default/batch is in the journal" in said
    assert f"an earlier pod or container of this name, whose cgroup was removed; the newest is #{newest} (" in said

    # One decision, and that cgroup, can still be asked about, and are said to be past.
    for target in (f"#{newest}", "/dioptase-demo-batch", "cpu.max", None):
        quota = next(one for one in asked(target, told).knobs if one.knob in ("cpu.max", "cpu.idle"))
        assert quota.removed
        said = "\n".join(explanation_text(asked(target, told), LATER_NS, 200))
        assert "of default/batch is " not in said
        assert "/dioptase-demo-batch, removed" in said

    # The same path made anew is another cgroup; and so is a pod that has only its past.
    again = msgspec.structs.replace(sample, id=999)
    seen = msgspec.structs.replace(last.snapshot, cgroups={**others, again.path: again})
    told = msgspec.structs.replace(TOLD, rounds=[msgspec.structs.replace(last, snapshot=seen)])
    assert asked("default/batch", told).knobs == ()
    gone = msgspec.structs.replace(seen, pods=(), cgroups=others)
    told = msgspec.structs.replace(TOLD, rounds=[msgspec.structs.replace(last, snapshot=gone)])
    assert [one.removed for one in asked("default/batch", told).knobs] == [True, True]


def test_what_a_container_was_made_with_is_told_as_the_runtimes_doing() -> None:
    newest = TOLD.entries[-1]
    told = msgspec.structs.replace(TOLD, entries=[msgspec.structs.replace(newest, trigger="nri")])
    said = " ".join("\n".join(explanation_text(asked("default/batch", told), LATER_NS, 300)).split())
    assert f"round {newest.cycle_seq}, before it, by the container runtime, which asks the agent" in said


def test_a_cgroup_that_came_after_the_round_looked_is_not_gone() -> None:
    # As of a container that is just made: its decisions have the time of the latest round, which could not see it yet.
    last, newest = TOLD.rounds[-1], TOLD.entries[-1]
    decision = msgspec.structs.replace(newest.outcome.decision, pod="default/new", cgroup="/kubepods/new", cgroup_id=77)
    made = msgspec.structs.replace(
        newest,
        seq=newest.seq + 1,
        trigger="nri",
        wall_time_ns=last.snapshot.wall_time_ns,
        outcome=msgspec.structs.replace(newest.outcome, decision=decision),
    )
    told = msgspec.structs.replace(TOLD, entries=[*TOLD.entries, made])
    assert [one.removed for one in asked("default/new", told).knobs] == [False]
    before = msgspec.structs.replace(made, wall_time_ns=last.snapshot.wall_time_ns - 1)
    told = msgspec.structs.replace(TOLD, entries=[*TOLD.entries, before])
    assert [one.removed for one in asked("default/new", told).knobs] == [True]


def test_who_read_no_cgroup_calls_none_gone() -> None:
    last = TOLD.rounds[-1]
    seen = msgspec.structs.replace(last.snapshot, cgroups={})
    told = msgspec.structs.replace(TOLD, rounds=[msgspec.structs.replace(last, snapshot=seen)])
    assert [one.removed for one in asked("default/batch", told).knobs] == [False, False]


def test_a_pool_is_its_cpus_and_what_is_lent(agent: AgentServer) -> None:
    done = call(agent, "reclaim")
    view = build_view(TOLD.rounds[-1])
    assert done.exit_code == 0
    assert "Pool reclaim has CPUs 0-3" in done.stdout
    assert f"{formats.cores(view.reclaimable_cores)} cores may be used by reclaimed pods" in done.stdout
    assert view.headroom is not None
    promised = f"{formats.cores(view.headroom.cores)} cores for all reclaimed pods together, their current use included"
    assert promised in " ".join(done.stdout.split())


def test_what_cannot_be_found_lists_what_can(agent: AgentServer) -> None:
    done = call(agent, "no\x1bpe")
    assert done.exit_code == 1
    assert "There is no data on 'no\\x1bpe'." in done.stderr
    for name in ("default/batch, default/web", "/dioptase-demo-batch", "cpu.idle, cpu.max", "reclaim, share"):
        assert name in done.stderr
    assert done.stdout == ""


def test_json_holds_the_same(agent: AgentServer) -> None:
    done = call(agent, "quota", "--json")
    found = msgspec.json.decode(done.stdout, type=Explanation)
    assert [k.knob for k in found.knobs] == ["cpu.max"]
    assert found.knobs[0].value == "20000 100000"
    assert found.knobs[0].newest == asked("quota").knobs[0].newest


def test_without_an_agent() -> None:
    done = CliRunner().invoke(explain, ["--url", "http://127.0.0.1:9"])
    assert done.exit_code == 1
    assert "does not answer" in done.stderr
    assert "remedy:" in done.stderr


@pytest.mark.parametrize(
    ("status", "value"),
    [
        (OutcomeStatus.REFUSED, "max 100000"),
        (OutcomeStatus.DRY_RUN, "max 100000"),
        (OutcomeStatus.VANISHED, None),
        (OutcomeStatus.MISMATCH, "0-1"),
    ],
)
def test_what_was_not_written_is_not_called_the_value(status: OutcomeStatus, value: str | None) -> None:
    entries = colocation_run.with_every_status(TOLD)
    newest = next(e for e in entries if e.outcome.status is status)
    upto = [e for e in entries if e.seq <= newest.seq]
    found = next(s for s in knob_histories(upto) if s.newest is newest)
    assert found.value == value
    if found.in_force is not None:
        assert found.in_force.outcome.status is OutcomeStatus.APPLIED


def test_a_refusal_shows_the_error_and_what_is_in_force() -> None:
    entries = [
        e
        for e in colocation_run.with_every_status(TOLD)
        if e.outcome.status in (OutcomeStatus.APPLIED, OutcomeStatus.REFUSED)
    ]
    last = TOLD.rounds[-1]
    flat = " ".join(
        " ".join(
            explanation_text(
                explain_target("cpu.max", build_view(last), entries, last.snapshot, LATER_NS), LATER_NS, 100
            )
        ).split()
    )
    assert "refused: Permission denied (EACCES)" in flat
    assert "in force" in flat


@pytest.mark.parametrize("repaired", [False, True])
def test_a_repair_is_explained_as_one(*, repaired: bool) -> None:
    entries = [e for e in colocation_run.with_every_status(TOLD) if e.outcome.status is OutcomeStatus.APPLIED]
    entries = [
        msgspec.structs.replace(e, outcome=msgspec.structs.replace(e.outcome, repaired=repaired)) for e in entries
    ]
    last = TOLD.rounds[-1]
    found = explain_target("cpu.max", build_view(last), entries, last.snapshot, LATER_NS)
    flat = " ".join(" ".join(explanation_text(found, LATER_NS, 100)).split())
    assert ("somebody else or the kernel had changed it: repaired" in flat) is repaired


def test_an_agent_that_does_not_act_vouches_for_nothing() -> None:
    found = asked("cpu.max")
    off = msgspec.structs.replace(found, now=msgspec.structs.replace(found.now, act="off"))
    clock = formats.clock(found.knobs[0].newest.wall_time_ns / 1e6)
    assert f"cpu.max of default/batch was, at {clock}, 0.20 cores" in "\n".join(explanation_text(off, LATER_NS, 100))


def test_names_cannot_colour_the_terminal() -> None:
    entries = colocation_run.with_every_status(TOLD)
    last = TOLD.rounds[-1]
    shown = "\n".join(
        explanation_text(explain_target(None, build_view(last), entries, last.snapshot, LATER_NS), LATER_NS, 100)
    )
    assert "\x1b" not in shown
    assert "\\x1b[31m\\u202e" in shown
    assert is_about_target(knob_histories(entries)[0], knob_histories(entries)[0].cgroup)
    assert set(known_targets(build_view(last), entries)["knobs"]) == {"cpu.idle", "cpu.max", "cpuset.cpus"}


def test_what_is_said_of_the_node_as_a_whole_is_in_every_explanation() -> None:
    rounds = [*TOLD.rounds[:-1], msgspec.structs.replace(TOLD.rounds[-1], node=RICH_NODE)]
    told = msgspec.structs.replace(TOLD, rounds=rounds)
    said = "\n".join(explanation_text(asked(None, told), LATER_NS, 200))
    assert "power      The node draws 100 W of 80 W at alert s0: power is capped to 80 W. (rule power_cap)" in said
    assert "overcommit CPU: 1.60. Memory: 1.17. (rule overcommit_realtime)" in said
    assert "overcommit" not in "\n".join(explanation_text(asked(None), LATER_NS, 200))
    assert "power: The node draws 100 W of 80 W" in cycle_line(build_view(rounds[-1]))

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
from cli.fleet.agent_endpoints import AgentEndpoint
from cli.fleet.api_server import AgentReply
from cli.fleet.node_table import node_row
from cli.top.summary import cycle_line
from exporters.view.cycle_view import build_view
from tests.builders import colocation_run
from tests.builders.agent_server import AgentServer
from tests.builders.full_node import RICH_NODE

RUN = colocation_run.simulate_run(205, others=(), sources=(*colocation_run.SOURCES, colocation_run.FAILING))
LATER_NS = RUN.rounds[-1].snapshot.wall_time_ns + 2 * colocation_run.S


def explanation_of(target: str | None, run: colocation_run.ColocationRun = RUN) -> Explanation:
    last = run.rounds[-1]
    return explain_target(target, build_view(last), run.entries, last.snapshot, LATER_NS)


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentServer]:
    server = AgentServer(RUN.entries)
    server.show(RUN.rounds)
    yield server
    server.close()


def call(agent: AgentServer, *arguments: str) -> Result:
    return CliRunner().invoke(explain, [*arguments, "--url", agent.url])


def test_a_knob_is_explained_by_its_newest_decision(agent: AgentServer) -> None:
    done = call(agent, "cpu.max")
    assert done.exit_code == 0
    flat = " ".join(done.stdout.split())
    newest = next(e for e in reversed(RUN.entries) if e.outcome.decision.knob is Knob.QUOTA)
    verdict = newest.outcome.decision.reason
    assert verdict.rule == "wait_far_above_target"
    assert "cpu.max of default/batch is 0.20 cores (20000 100000)" in flat
    assert "no limit (max 100000) → 0.20 cores (20000 100000); written and verified" in flat
    assert f"because {verdict.text}" in flat
    assert "rule wait_far_above_target, threshold 10" in flat
    values = {name: value for name, value in verdict.inputs.items() if value is not None}
    assert len(values) == 10, "the waits that the pods cause themselves are not known yet"
    for name, value in values.items():
        assert f"{name} {value:g}" in flat if isinstance(value, float) else f"{name} {value}" in flat
    assert f"wait_ms {verdict.inputs['wait_ms']:g} (from waits since the previous cycle)" in flat
    assert "between ticks: run-queue latency of online pods exceeded its limit" in flat
    assert "cpu.idle" not in flat


def test_the_age_and_state_of_the_sources_end_the_explanation() -> None:
    flat = " ".join(" ".join(explanation_text(explanation_of("cpu.idle"), LATER_NS, 100)).split())
    assert "Now: cycle 206, 2 s ago, --act on" in flat
    assert "✓ 2 s old: pods, topology, node, cgroups, waits tp_btf" in flat
    assert f"✕ psi: failed: {colocation_run.FAILING.error}; {colocation_run.FAILING.remedy}" in flat


def test_readings_that_are_older_than_the_cycle_have_their_own_ages() -> None:
    """Explained 2 s after the cycle: rare files of the node are 3 s older than it, a pod's 4 s, a pod's own metrics 1 s."""
    last = RUN.rounds[-1].snapshot
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
    finished = msgspec.structs.replace(RUN.rounds[-1], snapshot=aged)
    flat = " ".join(
        " ".join(
            explanation_text(explanation_of(None, msgspec.structs.replace(RUN, rounds=[finished])), LATER_NS, 300)
        ).split()
    )
    assert "✓ node: 2 s old; zones, vmstat, NUMA nodes, disks and file systems: 5 s old" in flat
    assert "✓ cgroups: 2 s old; memory.stat, numa_stat and io.stat of pods: 6 s old" in flat, "no pod's: 7"
    assert "✓ indicators: 2 s old; the oldest: 3 s old" in flat
    assert "sources ✕ psi: failed" in flat, "what failed comes first"
    assert flat.endswith("✓ 2 s old: pods, topology, waits tp_btf")


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("low_bytes", "files of the node, up to 5 s old"), ("need_bytes", "files of cgroups, up to 5 s old"),
        ("cap_bytes", "limits, up to 30 s old"), ("avg10", "cgroups"), ("promised", "the reported headroom"),
        ("requested", "pods"), ("rounds", "earlier cycles"), ("for_s", "earlier cycles"), ("factor", "the settings"),
        ("wait_ms", "waits since the previous cycle"),
    ],
)  # fmt: skip
def test_an_input_has_its_source_and_the_maximum_age_of_that(name: str, source: str) -> None:
    verdict = Reason(rule="r", text="t", inputs={name: 1.5, "victims": 2})
    assert list(reason_text(verdict))[2:] == [("inputs", f"{name} 1.5 (from {source}), victims 2")]


def test_the_longest_wait_is_the_number_that_top_shows() -> None:
    """The table of `kubectl dioptase top` and the explanation read one number of one cycle, with its window."""
    last = RUN.rounds[-1]
    wait = explanation_of("cpu.max").now.wait
    assert wait is not None
    row = node_row(AgentReply(AgentEndpoint(node="n"), build_view(last)))
    assert (wait.p99_us, wait.pod, wait.interval_s) == (row.wait_p99_us, row.wait_pod, 1.0)
    flat = " ".join(" ".join(explanation_text(explanation_of("cpu.max"), LATER_NS, 100)).split())
    assert f"run-queue latency p99 of {wait.pod} is {formats.duration(wait.p99_us)}, the longest of online" in flat


def test_the_reclaim_pool_is_explained_within_one_screen() -> None:
    """The answer, how much reclaimed pods may use and why, comes first; a terminal has 24 lines or more."""
    lines = list(explanation_text(explanation_of("reclaim"), LATER_NS, 100))
    assert [line.split()[0] for line in lines[1:3]] == ["reclaimable", "because"]
    assert len(lines) <= 40


def test_an_event_is_shown_as_it_was_with_the_later_decision() -> None:
    """The first quota is not the current value; the newest one is."""
    quotas = [entry for entry in RUN.entries if entry.outcome.decision.knob is Knob.QUOTA]
    first, newest = quotas[0], quotas[-1]
    assert first.outcome.decision.value != newest.outcome.decision.value
    text = "\n".join(explanation_text(explanation_of(f"#{first.seq}"), LATER_NS, 200))
    clock = formats.clock(first.wall_time_ns / 1e6)
    assert f"cpu.max of default/batch was, at {clock}, {formats.knob_value('cpu.max', first.outcome.after)} (" in text
    assert f"  since then  #{newest.seq}, " in text
    latest = "\n".join(explanation_text(explanation_of(f"#{newest.seq}"), LATER_NS, 200))
    assert "cpu.max of default/batch is 0.20 cores" in latest
    assert "since then" not in latest
    assert "since then" not in "\n".join(explanation_text(explanation_of("cpu.max"), LATER_NS, 200))


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
def test_targets_of_a_knob(target: str | None, knobs: set[str]) -> None:
    assert {knob.knob for knob in explanation_of(target).knobs} == knobs


def test_a_pod_is_explained_with_the_decisions_on_its_qos_class() -> None:
    last, qos_class = RUN.rounds[-1], "/kubepods.slice/kubepods-besteffort.slice"
    idle = next(entry for entry in RUN.entries if entry.outcome.decision.knob is Knob.IDLE)
    decision = msgspec.structs.replace(idle.outcome.decision, cgroup=qos_class, pod="")
    entry = msgspec.structs.replace(idle, outcome=msgspec.structs.replace(idle.outcome, decision=decision))
    batch = next(pod for pod in last.snapshot.pods if pod.name == "batch")
    below = msgspec.structs.replace(batch.containers[0], cgroup=f"{qos_class}/pod1/c")
    pods = [pod for pod in last.snapshot.pods if pod is not batch] + [
        msgspec.structs.replace(batch, containers=(below,))
    ]
    snapshot = msgspec.structs.replace(last.snapshot, pods=tuple(pods))
    for target, cgroups in (("default/batch", [qos_class]), ("default/web", [])):
        result = explain_target(target, build_view(last), [entry], snapshot, LATER_NS)
        assert [knob.cgroup for knob in result.knobs] == cgroups


def test_a_pod_without_decisions_is_explained() -> None:
    result = explanation_of("default/web")
    assert result.has_content
    assert [(pod.pod, pod.untouched) for pod in result.pods] == [("default/web", True)]
    assert "The journal has no change of a knob of default/web" in "\n".join(explanation_text(result, LATER_NS, 80))


def test_decisions_on_an_earlier_pod_of_the_same_name_are_separate() -> None:
    """As in a StatefulSet: the cgroup of the decisions was removed, and another pod of the same name exists."""
    last = RUN.rounds[-1]
    sample = last.snapshot.cgroups["/dioptase-demo-batch"]
    new = msgspec.structs.replace(sample, path="/new-batch", id=999)
    others = {path: cgroup for path, cgroup in last.snapshot.cgroups.items() if cgroup is not sample}
    batch = msgspec.structs.replace(
        colocation_run.BATCH, uid="2", containers=(Container(name="batch", cgroup=new.path),)
    )
    changed = msgspec.structs.replace(
        last.snapshot,
        cgroups={**others, new.path: new},
        pods=(batch, *(pod for pod in last.snapshot.pods if pod.key != batch.key)),
    )
    run = msgspec.structs.replace(RUN, rounds=[msgspec.structs.replace(last, snapshot=changed)])
    newest = max(e.seq for e in RUN.entries if e.outcome.decision.pod == "default/batch")

    result = explanation_of("default/batch", run)
    assert result.knobs == ()
    assert [(pod.untouched, pod.past) for pod in result.pods] == [(True, newest)]
    text = " ".join("\n".join(explanation_text(result, LATER_NS, 200)).split())
    assert "The journal has no change of a knob of default/batch" in text
    assert f"an earlier pod or container of this name, whose cgroup was removed; the newest is #{newest} (" in text

    # The decision and the cgroup are still valid targets, and are shown as past.
    for target in (f"#{newest}", "/dioptase-demo-batch", "cpu.max", None):
        quota = next(item for item in explanation_of(target, run).knobs if item.knob in ("cpu.max", "cpu.idle"))
        assert quota.removed
        text = "\n".join(explanation_text(explanation_of(target, run), LATER_NS, 200))
        assert "of default/batch is " not in text
        assert "/dioptase-demo-batch, removed" in text

    # A recreated cgroup of the same path is another one; so is the cgroup of a pod that does not exist any more.
    again = msgspec.structs.replace(sample, id=999)
    changed = msgspec.structs.replace(last.snapshot, cgroups={**others, again.path: again})
    run = msgspec.structs.replace(RUN, rounds=[msgspec.structs.replace(last, snapshot=changed)])
    assert explanation_of("default/batch", run).knobs == ()
    removed = msgspec.structs.replace(changed, pods=(), cgroups=others)
    run = msgspec.structs.replace(RUN, rounds=[msgspec.structs.replace(last, snapshot=removed)])
    assert [knob.removed for knob in explanation_of("default/batch", run).knobs] == [True, True]


def test_decisions_for_a_new_container_name_the_runtime_as_trigger() -> None:
    newest = RUN.entries[-1]
    changed = msgspec.structs.replace(RUN, entries=[msgspec.structs.replace(newest, trigger="nri")])
    text = " ".join("\n".join(explanation_text(explanation_of("default/batch", changed), LATER_NS, 300)).split())
    assert f"cycle {newest.cycle_seq}, by the container runtime, which calls the agent" in text


def test_a_cgroup_newer_than_the_latest_cycle_is_not_removed() -> None:
    # Decisions for a container that is being created have the time of the latest cycle, whose snapshot does not have it.
    last, newest = RUN.rounds[-1], RUN.entries[-1]
    decision = msgspec.structs.replace(newest.outcome.decision, pod="default/new", cgroup="/kubepods/new", cgroup_id=77)
    changed = msgspec.structs.replace(
        newest,
        seq=newest.seq + 1,
        trigger="nri",
        wall_time_ns=last.snapshot.wall_time_ns,
        outcome=msgspec.structs.replace(newest.outcome, decision=decision),
    )
    run = msgspec.structs.replace(RUN, entries=[*RUN.entries, changed])
    assert [knob.removed for knob in explanation_of("default/new", run).knobs] == [False]
    before = msgspec.structs.replace(changed, wall_time_ns=last.snapshot.wall_time_ns - 1)
    run = msgspec.structs.replace(RUN, entries=[*RUN.entries, before])
    assert [item.removed for item in explanation_of("default/new", run).knobs] == [True]


def test_without_cgroups_in_the_snapshot_none_counts_as_removed() -> None:
    last = RUN.rounds[-1]
    changed = msgspec.structs.replace(last.snapshot, cgroups={})
    run = msgspec.structs.replace(RUN, rounds=[msgspec.structs.replace(last, snapshot=changed)])
    assert [knob.removed for knob in explanation_of("default/batch", run).knobs] == [False, False]


def test_a_pool_shows_its_cpus_and_the_reclaimable_cpu(agent: AgentServer) -> None:
    done = call(agent, "reclaim")
    view = build_view(RUN.rounds[-1])
    assert done.exit_code == 0
    assert "Pool reclaim has CPUs 0-3" in done.stdout
    assert f"{formats.cores(view.reclaimable_cores)} cores may be used by reclaimed pods" in done.stdout
    assert view.headroom is not None
    headroom = f"{formats.cores(view.headroom.cores)} cores for all reclaimed pods together, their current use included"
    assert headroom in " ".join(done.stdout.split())


def test_an_unknown_target_lists_the_valid_ones(agent: AgentServer) -> None:
    done = call(agent, "no\x1bpe")
    assert done.exit_code == 1
    assert "There is no data on 'no\\x1bpe'." in done.stderr
    for name in ("default/batch, default/web", "/dioptase-demo-batch", "cpu.idle, cpu.max", "reclaim, share"):
        assert name in done.stderr
    assert done.stdout == ""


def test_json_has_the_same_explanation(agent: AgentServer) -> None:
    done = call(agent, "quota", "--json")
    document = msgspec.json.decode(done.stdout, type=Explanation)
    assert [k.knob for k in document.knobs] == ["cpu.max"]
    assert document.knobs[0].value == "20000 100000"
    assert document.knobs[0].newest == explanation_of("quota").knobs[0].newest


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
    entries = colocation_run.with_every_status(RUN)
    newest = next(e for e in entries if e.outcome.status is status)
    upto = [e for e in entries if e.seq <= newest.seq]
    result = next(s for s in knob_histories(upto) if s.newest is newest)
    assert result.value == value
    if result.in_force is not None:
        assert result.in_force.outcome.status is OutcomeStatus.APPLIED


def test_a_refusal_shows_the_error_and_what_is_in_force() -> None:
    entries = [
        e
        for e in colocation_run.with_every_status(RUN)
        if e.outcome.status in (OutcomeStatus.APPLIED, OutcomeStatus.REFUSED)
    ]
    last = RUN.rounds[-1]
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
def test_a_repair_is_explained(*, repaired: bool) -> None:
    entries = [e for e in colocation_run.with_every_status(RUN) if e.outcome.status is OutcomeStatus.APPLIED]
    entries = [
        msgspec.structs.replace(e, outcome=msgspec.structs.replace(e.outcome, repaired=repaired)) for e in entries
    ]
    last = RUN.rounds[-1]
    result = explain_target("cpu.max", build_view(last), entries, last.snapshot, LATER_NS)
    flat = " ".join(" ".join(explanation_text(result, LATER_NS, 100)).split())
    assert ("another process or the kernel changed it: repaired" in flat) is repaired


def test_without_act_on_the_value_is_shown_as_past() -> None:
    result = explanation_of("cpu.max")
    off = msgspec.structs.replace(result, now=msgspec.structs.replace(result.now, act="off"))
    clock = formats.clock(result.knobs[0].newest.wall_time_ns / 1e6)
    assert f"cpu.max of default/batch was, at {clock}, 0.20 cores" in "\n".join(explanation_text(off, LATER_NS, 100))


def test_names_cannot_colour_the_terminal() -> None:
    entries = colocation_run.with_every_status(RUN)
    last = RUN.rounds[-1]
    shown = "\n".join(
        explanation_text(explain_target(None, build_view(last), entries, last.snapshot, LATER_NS), LATER_NS, 100)
    )
    assert "\x1b" not in shown
    assert "\\x1b[31m\\u202e" in shown
    assert is_about_target(knob_histories(entries)[0], knob_histories(entries)[0].cgroup)
    assert set(known_targets(build_view(last), entries)["knobs"]) == {"cpu.idle", "cpu.max", "cpuset.cpus"}


def test_advice_for_the_whole_node_is_in_every_explanation() -> None:
    rounds = [*RUN.rounds[:-1], msgspec.structs.replace(RUN.rounds[-1], node=RICH_NODE)]
    changed = msgspec.structs.replace(RUN, rounds=rounds)
    text = "\n".join(explanation_text(explanation_of(None, changed), LATER_NS, 200))
    assert "power       The node draws 100 W of 80 W at alert s0: power is capped to 80 W. (rule power_cap)" in text
    assert "overcommit  CPU: 1.60. Memory: 1.17. (rule overcommit_realtime)" in text
    assert "overcommit" not in "\n".join(explanation_text(explanation_of(None), LATER_NS, 200))
    assert "power: The node draws 100 W of 80 W" in cycle_line(build_view(rounds[-1]))

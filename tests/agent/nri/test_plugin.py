"""The plugin over a real socket: who is made, what with, and everything that may go wrong on either side."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from agent.advisor.engine import PolicyState, evaluate_policy
from agent.advisor.preview import PreviewInputs
from agent.config.loader import parse_config
from agent.nri.adjustments import NriContext
from agent.nri.plugin import NriPlugin
from agent.nri.signed_annotation import ORIGINALS_ANNOTATION, SignedAnnotations
from agent.qrm.actuator.originals import OriginalsJournal
from agent.qrm.actuator.pending_originals import PendingOriginals
from agent.qrm.actuator.writer import KnobWriter
from agent.sensors.pods.pod_join import KubeletPod
from agent.sensors.pods.pod_spec import PodParsingContext
from api.decision import OutcomeStatus
from api.knobs import Knob
from api.proto import nri_pb2 as wire
from api.proto import ttrpc_pb2 as rpc
from api.qos import QoSLevel
from tests.agent.advisor.builders import pod, snapshot
from tests.agent.nri.fake_runtime import Runtime, a_container
from tests.agent.qrm.actuator.trees import Tree

CANONICAL = """
advisor: {policy: canonical, minShareCores: 1, reservedForAllocateCores: 0, rampUpS: 0}
placing: {rampUpS: 0}
"""
NOTES = SignedAnnotations(b"k" * 32)
POD = "/kubepods/poduid-batch"
BATCH = f"{POD}/batch"


def basis_of(settings: str, *, cpus: int = 4, age_s: float = 0.0) -> PreviewInputs:
    """What a round was judged by in which one shared pod used one CPU for ten seconds."""
    config = parse_config(settings.encode(), "test.yaml")
    known = PolicyState()
    for second in (0, 10):
        seen = snapshot(second, [pod("web", QoSLevel.SHARED, request=1)], cpus=cpus, usage_s={"web": second})
        before = known
        _, known = evaluate_policy(seen, config, before, seen.taken_at_ns)
    knobs = {"/web": frozenset({Knob.CPUSET, Knob.QUOTA, Knob.WEIGHT, Knob.IDLE, Knob.MEMS})}
    now = time.monotonic_ns() - round(age_s * 1e9)
    return PreviewInputs(snapshot=seen, config=config, state=before, now_ns=now, knobs=knobs)


class Agent:
    """The agent's side, with a tree of cgroups."""

    def __init__(self, folder: Path, preview_inputs: PreviewInputs | None) -> None:
        self.tree = Tree(folder / "cgroup", "v1")
        self.tree.make("/kubepods")
        self.tree.make(POD)
        self.preview_inputs, self.foretold, self.woken = preview_inputs, PendingOriginals(), 0
        self.listed: dict[str, KubeletPod] = {}
        self.ask: Callable[[], PreviewInputs | None] = lambda: self.preview_inputs

    def latest(self) -> PreviewInputs | None:
        return self.ask()

    def wake(self) -> None:
        self.woken += 1

    @contextmanager
    def plugin(self, socket: Path, bound_s: float = 5.0) -> Iterator[NriPlugin]:
        around = NriContext(
            preview_inputs=self.latest,
            listed=self.listed.get,
            wake=self.wake,
            door=PodParsingContext(),
            hierarchy=self.tree.hierarchy,
            foretold=self.foretold,
        )
        plugin = NriPlugin(socket, around, NOTES, bound_s)
        plugin.start()
        try:
            yield plugin
        finally:
            plugin.close()


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    async with Runtime(tmp_path / "nri.sock") as serving:
        yield serving


def written(file: Path, text: str) -> None:
    file.write_text(text)


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.01)


async def test_a_container_is_made_with_what_the_next_round_would_give_it(tmp_path: Path, runtime: Runtime) -> None:
    agent = Agent(tmp_path, basis_of(CANONICAL))
    with agent.plugin(runtime.path) as plugin:
        await runtime.plugin()
        assert runtime.registered == [("99", "dioptase")]
        answer = await runtime.ask("Configure", wire.ConfigureRequest(runtime_name="containerd"))
        # Sandboxes that begin, and containers: made, started, changed, stopped, removed.
        assert wire.ConfigureResponse.FromString(answer.payload).events == 0b11011001001
        made = await runtime.create(a_container("batch", "reclaimed_cores", cgroup=BATCH))
        cpus = made.adjust.linux.resources.cpu.cpus
        assert cpus, "kept apart from the share pool, which has the others"
        assert set(cpus) < set("0-123"), cpus
        assert json.loads(made.adjust.annotations[ORIGINALS_ANNOTATION])["knobs"] == {"cpuset.cpus": ["0-3", cpus]}
        assert NOTES.read("id-batch", made.adjust.annotations[ORIGINALS_ANNOTATION]) == {Knob.CPUSET: ("0-3", cpus)}
        assert plugin.counts == {"adjusted": 1, "unchanged": 0, "unknown": 0, "late": 0, "refused": 0}
    agent.tree.make(BATCH)
    agent.tree.file(BATCH, "cpuset.cpus").write_text(f"{cpus}\n")
    originals = OriginalsJournal(tmp_path / "originals.json", "boot")
    agent.foretold.adopt(KnobWriter(agent.tree.hierarchy), originals)
    (outcome,) = agent.foretold.outcomes()
    decision = outcome.decision
    assert (outcome.before, decision.value, outcome.after, outcome.clamped_from) == ("0-3", cpus, cpus, None)
    assert cpus in decision.reason.text


async def test_what_was_given_is_put_back_to_what_the_owner_asked_for(tmp_path: Path, runtime: Runtime) -> None:
    agent = Agent(tmp_path, basis_of("advisor: {policy: latency}"))
    with agent.plugin(runtime.path):
        await runtime.plugin()
        made = await runtime.create(a_container("batch", "reclaimed_cores", cgroup=BATCH, shares=205))
        assert made.adjust.linux.resources.cpu.shares.value == 10, "the least weight, until cpu.idle can be set"
    files, originals = KnobWriter(agent.tree.hierarchy), OriginalsJournal(tmp_path / "originals.json", "boot")
    assert agent.foretold.adopt(files, originals) == 0, "the runtime has not made the cgroup yet"
    assert agent.foretold.outcomes() == ()
    agent.tree.make(BATCH)
    agent.tree.file(BATCH, "cpu.shares").write_text("10\n")
    quota = made.adjust.linux.resources.cpu.quota.value
    assert agent.foretold.adopt(files, originals) == 0, "it has not written all yet"
    agent.tree.file(BATCH, "cpu.cfs_quota_us").write_text(f"{quota}\n")
    assert agent.foretold.adopt(files, originals) == 1
    by_knob = {one.decision.knob: one for one in agent.foretold.outcomes()}
    assert (by_knob[Knob.QUOTA].status, by_knob[Knob.QUOTA].after) == (OutcomeStatus.APPLIED, f"{quota} 100000")
    outcome = by_knob[Knob.WEIGHT]
    decision = outcome.decision
    assert (decision.pod, decision.cgroup, decision.knob) == ("shop/batch", BATCH, Knob.WEIGHT)
    assert decision.cgroup_id == originals.entries()[0].cgroup_id > 0
    assert (outcome.status, outcome.before, outcome.after) == (OutcomeStatus.APPLIED, "20", "1")
    assert decision.reason.rule == "yield_to_online", "the least weight stands in for cpu.idle"
    assert agent.foretold.outcomes() == (), "once"
    assert [(entry.cgroup, entry.knob, dict(entry.raw.texts)) for entry in originals.entries()] == [
        (BATCH, Knob.WEIGHT, {"cpu.shares": "205\n"}),
        (BATCH, Knob.QUOTA, {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}),
    ]
    originals.restore(files)
    assert agent.tree.file(BATCH, "cpu.shares").read_text().strip() == "205"


async def test_who_is_made_after_another_is_provided_for_with_it(tmp_path: Path, runtime: Runtime) -> None:
    """Two of one quota: the second one's part is half, although no round has seen the first."""
    basis = basis_of("advisor: {policy: latency, enableReclaim: false, latency: {minLentRatio: 0.5}}", cpus=4)
    agent = Agent(tmp_path, basis)
    quotas = []
    with agent.plugin(runtime.path):
        await runtime.plugin()
        for name in ("batch", "other"):
            made = await runtime.create(a_container(name, "reclaimed_cores", cgroup=f"{POD}/{name}"))
            quotas.append(made.adjust.linux.resources.cpu.quota.value)
        await runtime.ask(
            "StopContainer", wire.StopContainerRequest(container=a_container("batch", "", cgroup=BATCH).container)
        )
        made = await runtime.create(a_container("third", "reclaimed_cores", cgroup=f"{POD}/third"))
        quotas.append(made.adjust.linux.resources.cpu.quota.value)
    assert quotas[0] == 2 * quotas[1] == 2 * quotas[2] > 0, quotas


async def test_cpus_that_were_promised_are_given_to_nobody_else_before_a_round_knows_of_them(
    tmp_path: Path, runtime: Runtime
) -> None:
    agent, made = Agent(tmp_path, basis_of(CANONICAL)), {}
    with agent.plugin(runtime.path):
        await runtime.plugin()
        for name in ("b", "a"):  # whoever comes first in the order of names does not come first
            request = a_container(name, "dedicated_cores", cgroup=f"{POD}/{name}", shares=1024)
            request.pod.annotations["katalyst.kubewharf.io/memory_enhancement"] = '{"numa_binding": "true"}'
            made[name] = (await runtime.create(request)).adjust.linux.resources.cpu.cpus
    assert len({*made.values()} - {""}) == 2, made
    basis = agent.preview_inputs
    assert basis is not None
    known = agent.foretold.promised.kept(basis.state.cpus)
    assert {name: known.pod(f"uid-{name}")["main"].allocation_result for name in made} == made
    # A round that does not see them yet: the others are placed around them.
    seen = msgspec.structs.replace(basis.state, cpus=known)
    judged, after = evaluate_policy(basis.snapshot, basis.config, seen, basis.now_ns)
    assert judged.placement is not None
    assert not {str(cpu) for cpu in judged.placement.cpus["/web"]} & {*made.values()}
    assert {name: after.cpus.pod(f"uid-{name}")["main"].allocation_result for name in made} == made
    agent.foretold.promised.taken(after.cpus)
    assert agent.foretold.promised.kept(basis.state.cpus) is basis.state.cpus, "that round knows of them"


async def test_requests_of_reclaimed_resources_are_the_kubelets_word(tmp_path: Path, runtime: Runtime) -> None:
    basis = basis_of("advisor: {policy: latency, enableReclaim: false, latency: {minLentRatio: 0.5}}", cpus=4)
    agent = Agent(tmp_path, basis)
    for name, millis in (("batch", "1k"), ("other", "3k")):
        amounts = {"requests": {"resource.katalyst.kubewharf.io/reclaimed_millicpu": millis}}
        agent.listed[f"uid-{name}"] = msgspec.convert(
            {
                "metadata": {
                    "name": name,
                    "uid": f"uid-{name}",
                    "namespace": "shop",
                    "annotations": {"katalyst.kubewharf.io/qos_level": "reclaimed_cores"},
                },
                "spec": {"containers": [{"name": "main", "resources": amounts}]},
            },
            KubeletPod,
        )
    with agent.plugin(runtime.path):
        await runtime.plugin()
        await runtime.create(a_container("batch", "reclaimed_cores", cgroup=BATCH))
        made = await runtime.create(a_container("other", "reclaimed_cores", cgroup=f"{POD}/other"))
    assert made.adjust.linux.resources.cpu.quota.value == 150_000, "three quarters of two CPUs"


async def test_who_changes_a_container_changes_what_is_put_back_and_not_what_is_decided(
    tmp_path: Path, runtime: Runtime
) -> None:
    agent = Agent(tmp_path, basis_of("advisor: {policy: latency}"))
    made = a_container("batch", "reclaimed_cores", cgroup=BATCH, shares=205)
    with agent.plugin(runtime.path):
        await runtime.plugin()
        request = wire.UpdateContainerRequest(pod=made.pod, container=made.container)
        request.linux_resources.cpu.shares.value = 512
        answer = await runtime.ask("UpdateContainer", request)
        (update,) = wire.UpdateContainerResponse.FromString(answer.payload).update
        assert (update.container_id, update.linux.resources.cpu.shares.value) == ("id-batch", 10)
        assert update.ignore_failure, "where another plugin changes the same, the owner's change goes on without ours"
        request.linux_resources.Clear()
        request.linux_resources.cpu.cpus = "2"
        answer = await runtime.ask("UpdateContainer", request)
        assert not wire.UpdateContainerResponse.FromString(answer.payload).update, "nothing was said of its weight"
    agent.tree.make(BATCH)
    agent.tree.file(BATCH, "cpu.shares").write_text("10\n")
    files, originals = KnobWriter(agent.tree.hierarchy), OriginalsJournal(tmp_path / "originals.json", "boot")
    agent.foretold.adopt(files, originals)
    assert [dict(entry.raw.texts) for entry in originals.entries()] == [{"cpu.shares": "512\n"}]


async def test_who_was_made_by_an_agent_that_was_killed_is_known_by_his_annotation(
    tmp_path: Path, runtime: Runtime
) -> None:
    agent = Agent(tmp_path, None)
    known, broken = (
        a_container(name, "reclaimed_cores", cgroup=f"{POD}/{name}").container for name in ("batch", "bad")
    )
    known.annotations[ORIGINALS_ANNOTATION] = NOTES.write(
        known.id, {Knob.CPUSET: ("0-3", "3"), Knob.WEIGHT: ("204", "1")}
    )
    broken.annotations[ORIGINALS_ANNOTATION] = '{"cpuset.cpus":'
    agent.tree.make(BATCH)
    agent.tree.file(BATCH, "cpuset.cpus").write_text("3\n")
    # What it was not given: somebody has changed it since.
    agent.tree.file(BATCH, "cpu.shares").write_text("512\n")
    with agent.plugin(runtime.path) as plugin:
        await runtime.plugin()
        answer = await runtime.ask("Synchronize", wire.SynchronizeRequest(containers=[broken], more=True))
        assert wire.SynchronizeResponse.FromString(answer.payload).more, "there is more to come"
        await runtime.ask("Synchronize", wire.SynchronizeRequest(containers=[known]))
        assert plugin.source.problem() is None
    originals = OriginalsJournal(tmp_path / "originals.json", "boot")
    assert agent.foretold.adopt(KnobWriter(agent.tree.hierarchy), originals) == 1
    assert [dict(entry.raw.texts) for entry in originals.entries()] == [{"cpuset.cpus": "0-3\n"}]


async def test_who_makes_a_pod_cannot_say_what_was_asked_for(
    tmp_path: Path, runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    """As with CRI-O, which copies a pod's annotations to its containers: a tenant with a limit of 0.1 CPU and 64 MiB."""
    pairs = {Knob.QUOTA: ("max 100000", "10000 100000"), Knob.MEMORY_MAX: ("max", "67108864")}
    forged = {
        "bare": msgspec.json.encode(pairs).decode(),
        "another": NOTES.write("id-another", pairs),
        "stranger": SignedAnnotations(b"s" * 32).write("id-batch", pairs),
        "edited": NOTES.write("id-batch", {**pairs, Knob.QUOTA: ("20000 100000", "10000 100000")}).replace(
            "20000", "90000"
        ),
        "deep": '{"seal":"","knobs":' + "[" * 3000,
    }
    agent = Agent(tmp_path, None)
    agent.tree.make(BATCH)
    agent.tree.file(BATCH, "cpu.cfs_quota_us").write_text("10000\n")
    agent.tree.file(BATCH, "memory.limit_in_bytes").write_text("67108864\n")
    with agent.plugin(runtime.path) as plugin:
        await runtime.plugin()
        for note in forged.values():
            container = a_container("batch", "reclaimed_cores", cgroup=BATCH).container
            container.annotations[ORIGINALS_ANNOTATION] = note
            await runtime.ask("Synchronize", wire.SynchronizeRequest(containers=[container]))
        assert plugin.source.problem() is None
        originals = OriginalsJournal(tmp_path / "originals.json", "boot")
        assert agent.foretold.adopt(KnobWriter(agent.tree.hierarchy), originals) == 0
        assert originals.entries() == ()
        assert caplog.text.count("of container id-batch counts for nothing") == len(forged)
        # The same words of this agent's own are believed.
        container.annotations[ORIGINALS_ANNOTATION] = NOTES.write("id-batch", pairs)
        await runtime.ask("Synchronize", wire.SynchronizeRequest(containers=[container]))
        assert agent.foretold.adopt(KnobWriter(agent.tree.hierarchy), originals) == 1
        assert {entry.knob for entry in originals.entries()} == pairs.keys()


async def test_at_the_end_the_runtime_hears_what_became_of_whom_it_made(tmp_path: Path, runtime: Runtime) -> None:
    """Else it writes the agent's values again whenever somebody changes such a container through it."""
    agent = Agent(tmp_path, basis_of(CANONICAL))
    names = [f"batch{number}" for number in range(40)]
    with agent.plugin(runtime.path) as plugin:
        await runtime.plugin()
        gone, left = a_container("gone", "reclaimed_cores", cgroup=f"{POD}/gone"), a_container("left", "", cgroup=BATCH)
        for request in (gone, *(a_container(name, "reclaimed_cores", cgroup=f"{POD}/{name}") for name in names)):
            await runtime.create(request)
        await runtime.ask("StopContainer", wire.StopContainerRequest(container=gone.container))
        # One that an agent before this one made, with values of more than one knob.
        pairs = {Knob.WEIGHT: ("20", "1"), Knob.QUOTA: ("max 100000", "5000 100000")}
        left.container.annotations[ORIGINALS_ANNOTATION] = NOTES.write(left.container.id, pairs)
        await runtime.ask("Synchronize", wire.SynchronizeRequest(containers=[left.container]))
        for group in (BATCH, *(f"{POD}/{name}" for name in names)):
            agent.tree.make(group)
        agent.tree.file(BATCH, "cpu.shares").write_text("206\n")
        agent.tree.file(f"{POD}/batch0", "cpuset.cpus").write_text("0-2\n")
        agent.tree.file(f"{POD}/batch1", "cpuset.cpus").write_text("0-3\n")
        files = KnobWriter(agent.tree.hierarchy)
        # What somebody wrote into a file alone, runtimes write over.
        shares = agent.tree.file(f"{POD}/batch0", "cpu.shares")
        shares.write_text("77\n")
        runtime.updating = lambda: None if len(runtime.updates) > 1 else written(shares, "2\n")
        plugin.stop_adjusting()
        assert (await runtime.create(a_container("late", "reclaimed_cores", cgroup=f"{POD}/late"))).ByteSize() == 0
        await asyncio.to_thread(plugin.leave, files, {})
        said = {one.container_id: one.linux.resources for update in runtime.updates for one in update.update}
        assert [len(update.update) for update in runtime.updates] == [32, 9]
        assert (said["id-batch0"].cpu.cpus, said["id-batch1"].cpu.cpus) == ("0-2", "0-3")
        cpu = said["id-left"].cpu
        assert (cpu.shares.value, cpu.quota.value, cpu.cpus) == (206, -1, "")
        assert said.keys() == {"id-left", *(f"id-{name}" for name in names)}
        assert shares.read_text() == "77\n"


async def test_who_is_made_and_has_not_begun_at_the_end_begins_as_his_owner_wanted(
    tmp_path: Path, runtime: Runtime
) -> None:
    """Nobody puts back what is not there yet, and the runtime would write what it was answered."""
    agent = Agent(tmp_path, basis_of("advisor: {policy: latency}"))
    with agent.plugin(runtime.path) as plugin:
        await runtime.plugin()
        for name in ("late", "there"):
            made = await runtime.create(
                a_container(name, "reclaimed_cores", cgroup=f"{POD}/{name}", shares=205, quota=50_000)
            )
            assert made.adjust.linux.resources.cpu.shares.value == 10
        # One whose cgroup has come, and of which the journal could not be written: its files hold the agent's value.
        agent.tree.make(f"{POD}/there")
        shares = agent.tree.file(f"{POD}/there", "cpu.shares")
        shares.write_text("10\n")
        runtime.updating = lambda: written(shares, "205\n")
        plugin.stop_adjusting()
        files = KnobWriter(agent.tree.hierarchy)
        await asyncio.to_thread(plugin.leave, files, agent.foretold.pending(0.0))
        said = {one.container_id: one.linux.resources for update in runtime.updates for one in update.update}
        assert {name: one.cpu.shares.value for name, one in said.items()} == {"id-late": 205, "id-there": 205}
        assert shares.read_text() == "205\n", "and no file is put back to what it held"


async def test_a_runtime_that_is_gone_at_the_end_is_told_nothing(
    tmp_path: Path, runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Agent(tmp_path, basis_of(CANONICAL))
    with agent.plugin(runtime.path) as plugin:
        await runtime.plugin()
        await runtime.create(a_container("batch", "reclaimed_cores", cgroup=BATCH))
        agent.tree.make(BATCH)
        runtime.hang_up()
        await until(plugin.source.problem)
        await asyncio.to_thread(plugin.leave, KnobWriter(agent.tree.hierarchy), {})
    assert runtime.updates == []
    assert "some of 1 containers stay in the runtime's belief as they were made: there is no connection" in caplog.text


# --- what may go wrong


async def test_nobody_is_kept_waiting_for_longer_than_the_bound(tmp_path: Path, runtime: Runtime) -> None:
    agent = Agent(tmp_path, basis_of(CANONICAL))
    basis, hold = agent.preview_inputs, asyncio.Event()
    loop = asyncio.get_running_loop()
    calls = 0

    def slow() -> PreviewInputs | None:
        nonlocal calls
        calls += 1
        if calls == 2:  # the first one is asked for whom was made before
            asyncio.run_coroutine_threadsafe(hold.wait(), loop).result(20)
        return basis

    agent.ask = slow
    with agent.plugin(runtime.path, bound_s=0.2) as plugin:
        await runtime.plugin()
        made = await runtime.create(a_container("batch", "reclaimed_cores", cgroup=BATCH))
        assert (made.ByteSize(), plugin.counts["late"]) == (0, 1)
        made = await runtime.create(a_container("other", "reclaimed_cores", cgroup=f"{POD}/other"))
        assert (made.ByteSize(), plugin.counts["late"]) == (0, 2), "nobody queues behind one who hangs"
        hold.set()
        await until(lambda: calls == 2)
        await asyncio.sleep(0.3)
        made = await runtime.create(a_container("other", "reclaimed_cores", cgroup=f"{POD}/other"))
        assert made.adjust.linux.resources.cpu.cpus


@pytest.mark.parametrize("age_s", [None, 60.0])
async def test_an_agent_that_does_not_know_says_nothing(tmp_path: Path, runtime: Runtime, age_s: float | None) -> None:
    agent = Agent(tmp_path, None if age_s is None else basis_of(CANONICAL, age_s=age_s))
    with agent.plugin(runtime.path) as plugin:
        await runtime.plugin()
        made = await runtime.create(a_container("batch", "reclaimed_cores", cgroup=BATCH))
        assert (made.ByteSize(), plugin.counts["unknown"]) == (0, 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("cgroup", "relative/path"), ("cgroup", "/kubepods/../etc"), ("cgroup", ""), ("uid", "../x"), ("name", "")],
)
async def test_whoever_cannot_be_understood_is_made_as_he_is(
    tmp_path: Path, runtime: Runtime, field: str, value: str
) -> None:
    request = a_container("batch", "reclaimed_cores", cgroup=BATCH)
    if field == "cgroup":
        request.container.linux.cgroups_path = value
    elif field == "uid":
        request.pod.uid = value
    else:
        request.container.name = value
    agent = Agent(tmp_path, basis_of(CANONICAL))
    with agent.plugin(runtime.path) as plugin:
        await runtime.plugin()
        assert (await runtime.create(request)).ByteSize() == 0
        assert plugin.counts["unknown"] == 1


async def test_who_did_not_start_with_what_was_answered_is_made_as_he_is_from_then_on(
    tmp_path: Path, runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    """As where another plugin sets the same: the runtime takes back what it began to make, and starts nothing."""
    agent, made = Agent(tmp_path, basis_of("advisor: {policy: latency}")), []
    with agent.plugin(runtime.path) as plugin:
        await runtime.plugin()
        for number, name in enumerate(("batch", "good", "batch", "good", "batch")):
            request = a_container(name, "reclaimed_cores", cgroup=f"{POD}/{name}-{number}")
            request.container.id = f"id-{number}"
            made.append((await runtime.create(request)).adjust.linux.resources.cpu.shares.value)
            gone = wire.StopContainerRequest(container=request.container)
            if name == "good":
                event = wire.StateChangeEvent(
                    event=wire.POST_START_CONTAINER, pod=request.pod, container=request.container
                )
                await runtime.ask("StateChange", event)
            await runtime.ask("StopContainer", gone)
        assert made == [10, 10, 0, 10, 0]
        assert (plugin.counts["adjusted"], plugin.counts["refused"]) == (3, 2)
    assert caplog.text.count("container main of pod shop/batch did not start with what it was given") == 1


async def test_what_started_while_nobody_listened_is_not_taken_for_what_failed(
    tmp_path: Path, runtime: Runtime
) -> None:
    agent = Agent(tmp_path, basis_of("advisor: {policy: latency}"))
    with agent.plugin(runtime.path) as plugin:
        await runtime.plugin()
        request = a_container("batch", "reclaimed_cores", cgroup=BATCH)
        await runtime.create(request)
        runtime.hang_up()
        await runtime.plugin()
        await runtime.ask("Configure", wire.ConfigureRequest(runtime_name="containerd"))
        request.container.id = "id-2"
        assert (await runtime.create(request)).adjust.linux.resources.cpu.shares.value == 10
        assert plugin.counts["refused"] == 0


async def test_lists_that_another_plugin_has_set_stay(tmp_path: Path, runtime: Runtime) -> None:
    agent = Agent(tmp_path, basis_of(CANONICAL))
    with agent.plugin(runtime.path):
        await runtime.plugin()
        request = a_container("batch", "reclaimed_cores", cgroup=BATCH)
        request.container.linux.resources.cpu.cpus = "0-2"
        assert not (await runtime.create(request)).adjust.linux.resources.cpu.cpus


async def test_a_call_that_is_not_ours_or_no_message_is_refused_and_the_next_is_answered(
    tmp_path: Path, runtime: Runtime
) -> None:
    agent = Agent(tmp_path, basis_of(CANONICAL))
    with agent.plugin(runtime.path):
        await runtime.plugin()
        assert (await runtime.ask("Dance", wire.Empty())).status.code == 12
        assert (await runtime.ask("Configure", wire.Empty(), service="other.Service")).status.code == 12
        bad = wire.RegisterPluginRequest(plugin_name="\x01")  # as the request of another call it is broken
        assert (await runtime.ask("Synchronize", bad)).status.code == 3
        assert (await runtime.ask("Shutdown", wire.Empty())).status.code == 0


@pytest.mark.parametrize("hurt", ["garbage", "hang up"])
async def test_after_garbage_or_a_restart_of_the_runtime_the_plugin_is_back(
    tmp_path: Path, runtime: Runtime, hurt: str
) -> None:
    agent = Agent(tmp_path, basis_of(CANONICAL))
    with agent.plugin(runtime.path) as plugin:
        await runtime.plugin()
        if hurt == "garbage":
            runtime.forget()
            runtime.write(b"\xff" * 64)
        else:
            runtime.hang_up()
        await until(lambda: plugin.source.problem() is not None)
        assert ("a piece of 4294967295 bytes" in str(plugin.source.problem())) is (hurt == "garbage")
        await runtime.plugin()
        assert runtime.connections == 2
        await runtime.ask("Synchronize", wire.SynchronizeRequest())
        assert plugin.source.problem() is None
        made = await runtime.create(a_container("batch", "reclaimed_cores", cgroup=BATCH))
        assert made.adjust.linux.resources.cpu.cpus


@pytest.mark.parametrize("garbles", [b"\xff\xff\xff", rpc.Response(payload=b"\xff\xff\xff").SerializeToString()])
async def test_an_answer_that_is_no_message_is_garbage_too(
    tmp_path: Path, runtime: Runtime, caplog: pytest.LogCaptureFixture, garbles: bytes
) -> None:
    agent = Agent(tmp_path, basis_of(CANONICAL))
    runtime.garbles = garbles
    with agent.plugin(runtime.path) as plugin:
        await until(lambda: "the answer to RegisterPlugin is no message" in str(plugin.source.problem()))
        runtime.garbles = None
        await runtime.plugin()
        await runtime.create(a_container("batch", "reclaimed_cores", cgroup=BATCH))
        agent.tree.make(BATCH)
        runtime.garbles = garbles
        assert "Traceback" not in caplog.text, "it is no bug of the agent"
        await asyncio.to_thread(plugin.leave, KnobWriter(agent.tree.hierarchy), {})
    assert "some of 1 containers stay in the runtime's belief as they were made: the answer to Up" in caplog.text


async def test_a_runtime_that_says_no_or_is_not_there_is_told_with_the_remedy(tmp_path: Path) -> None:
    agent = Agent(tmp_path, None)
    with agent.plugin(tmp_path / "nri.sock") as plugin:
        await until(plugin.source.problem)
        problem = plugin.source.problem()
        assert problem is not None
        assert "has NRI switched on" in problem.remedy
        async with Runtime(tmp_path / "nri.sock") as runtime:
            runtime.refuses = "no plugins today"
            await until(lambda: runtime.registered)
            await until(lambda: "no plugins today" in str(plugin.source.problem()))


async def test_pods_are_looked_at_when_one_comes_and_when_one_has_started(tmp_path: Path, runtime: Runtime) -> None:
    agent = Agent(tmp_path, None)
    with agent.plugin(runtime.path):
        await runtime.plugin()
        for event in (wire.RUN_POD_SANDBOX, wire.POST_START_CONTAINER, wire.REMOVE_CONTAINER):
            await runtime.ask("StateChange", wire.StateChangeEvent(event=event))
    assert agent.woken == 2


def test_it_ends_at_once_wherever_it_is(tmp_path: Path) -> None:
    with Agent(tmp_path, None).plugin(tmp_path / "nowhere.sock") as plugin:
        pass
    plugin.close()

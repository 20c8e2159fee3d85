"""The plugin over a real socket: adjustments, restored values, and failures on both sides."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from operator import attrgetter
from pathlib import Path

import msgspec
import pytest

from agent.advisor.engine import PolicyState, evaluate_policy
from agent.advisor.preview import PreviewInputs
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
from api.snapshot import CgroupSample, ComponentHealth
from tests.agent.nri.fake_runtime import POD, Runtime, a_container
from tests.agent.qrm.actuator.trees import Tree
from tests.builders.pods import shared
from tests.builders.settings import parse_config
from tests.builders.snapshots import snapshot
from tests.builders.waiting import until_async

CANONICAL = """
advisor: {policy: canonical, minShareCores: 1, reservedForAllocateCores: 0, rampUpS: 0}
placing: {rampUpS: 0}
"""
NOTES = SignedAnnotations(b"k" * 32)
BATCH = f"{POD}/batch"


def inputs_of(settings: str, *, cpus: int = 4, age_s: float = 0.0) -> PreviewInputs:
    """Return the inputs of a cycle in which one shared pod used one CPU for ten seconds."""
    config = parse_config(settings.encode(), "test.yaml")
    state = PolicyState()
    for second in (0, 10):
        shot = snapshot(second, [shared("web", cpu_request=1)], machine=cpus, usage_s={"web": second})
        state_before = state
        _, state = evaluate_policy(shot, config, state_before, shot.taken_at_ns)
    knobs = {"/web": frozenset({Knob.CPUSET, Knob.QUOTA, Knob.WEIGHT, Knob.IDLE, Knob.MEMS})}
    now = time.monotonic_ns() - round(age_s * 1e9)
    return PreviewInputs(snapshot=shot, config=config, state=state_before, now_ns=now, knobs=knobs)


class Agent:
    """The agent's side, with a tree of cgroups."""

    def __init__(self, folder: Path, preview_inputs: PreviewInputs | None) -> None:
        self.tree = Tree(folder / "cgroup", "v1")
        self.tree.make("/kubepods")
        self.tree.make(POD)
        self.preview_inputs, self.pending_originals, self.woken = preview_inputs, PendingOriginals(), 0
        self.files = KnobWriter(self.tree.hierarchy)
        self.originals = OriginalsJournal(folder / "originals.json", "boot")
        self.listed: dict[str, KubeletPod] = {}
        self.ask: Callable[[], PreviewInputs | None] = lambda: self.preview_inputs

    def latest(self) -> PreviewInputs | None:
        return self.ask()

    def wake(self) -> None:
        self.woken += 1

    def adopt(self) -> int:
        """Journal the originals of created cgroups; return their number."""
        return self.pending_originals.adopt(self.files, self.originals)

    @asynccontextmanager
    async def connected(self, runtime: Runtime, timeout_s: float = 5.0) -> AsyncIterator[NriPlugin]:
        """Run a plugin that has registered with the runtime."""
        with self.plugin(runtime.path, timeout_s) as plugin:
            await runtime.plugin()
            yield plugin

    @contextmanager
    def plugin(self, socket: Path, timeout_s: float = 5.0) -> Iterator[NriPlugin]:
        context = NriContext(
            preview_inputs=self.latest,
            listed=self.listed.get,
            wake=self.wake,
            parsing=PodParsingContext(),
            hierarchy=self.tree.hierarchy,
            pending_originals=self.pending_originals,
        )
        plugin = NriPlugin(socket, context, NOTES, timeout_s)
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


async def test_a_new_container_gets_the_values_of_the_next_cycle(tmp_path: Path, runtime: Runtime) -> None:
    agent = Agent(tmp_path, inputs_of(CANONICAL))
    async with agent.connected(runtime) as plugin:
        assert runtime.registered == [("99", "dioptase")]
        answer = await runtime.ask("Configure", wire.ConfigureRequest(runtime_name="containerd"))
        # Events: sandbox run; container created, started, updated, stopped, removed.
        assert wire.ConfigureResponse.FromString(answer.payload).events == 0b11011001001
        response = await runtime.create(a_container())
        cpus = response.adjust.linux.resources.cpu.cpus
        assert cpus, "the share pool has the others"
        assert set(cpus) < set("0-123"), cpus
        assert json.loads(response.adjust.annotations[ORIGINALS_ANNOTATION])["knobs"] == {"cpuset.cpus": ["0-3", cpus]}
        assert NOTES.read("id-batch", response.adjust.annotations[ORIGINALS_ANNOTATION]) == {Knob.CPUSET: ("0-3", cpus)}
        assert plugin.counts == {"adjusted": 1, "unchanged": 0, "unknown": 0, "late": 0, "refused": 0}
    agent.tree.make(BATCH, {"cpuset.cpus": cpus})
    agent.adopt()
    (outcome,) = agent.pending_originals.outcomes()
    decision = outcome.decision
    assert (outcome.before, decision.value, outcome.after, outcome.clamped_from) == ("0-3", cpus, cpus, None)
    assert cpus in decision.reason.text


async def test_adjusted_values_are_restored_to_the_requested_ones(tmp_path: Path, runtime: Runtime) -> None:
    agent = Agent(tmp_path, inputs_of("advisor: {policy: latency}"))
    async with agent.connected(runtime):
        cpu = await runtime.created_cpu(a_container(shares=205))
        assert cpu.shares.value == 10, "the minimum weight, until cpu.idle can be set"
    assert agent.adopt() == 0, "the runtime has not created the cgroup yet"
    assert agent.pending_originals.outcomes() == ()
    agent.tree.make(BATCH, {"cpu.shares": "10"})
    quota = cpu.quota.value
    assert agent.adopt() == 0, "it has not written all yet"
    agent.tree.file(BATCH, "cpu.cfs_quota_us").write_text(f"{quota}\n")
    assert agent.adopt() == 1
    by_knob = {item.decision.knob: item for item in agent.pending_originals.outcomes()}
    assert (by_knob[Knob.QUOTA].status, by_knob[Knob.QUOTA].after) == (OutcomeStatus.APPLIED, f"{quota} 100000")
    outcome = by_knob[Knob.WEIGHT]
    decision = outcome.decision
    assert (decision.pod, decision.cgroup, decision.knob) == ("shop/batch", BATCH, Knob.WEIGHT)
    assert decision.cgroup_id == agent.originals.entries()[0].cgroup_id > 0
    assert (outcome.status, outcome.before, outcome.after) == (OutcomeStatus.APPLIED, "20", "1")
    assert decision.reason.rule == "yield_to_online", "the minimum weight replaces cpu.idle"
    assert agent.pending_originals.outcomes() == (), "once"
    assert [(entry.cgroup, entry.knob, dict(entry.raw.texts)) for entry in agent.originals.entries()] == [
        (BATCH, Knob.WEIGHT, {"cpu.shares": "205\n"}),
        (BATCH, Knob.QUOTA, {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}),
    ]
    agent.originals.restore(agent.files)
    assert agent.tree.file(BATCH, "cpu.shares").read_text().strip() == "205"


async def test_in_the_pod_of_a_kubelet_a_container_keeps_its_weight(tmp_path: Path, runtime: Runtime) -> None:
    """The pod's cgroup gets the priority, so the runtime is given the quota alone."""
    agent = Agent(tmp_path, inputs_of("advisor: {policy: latency}"))
    async with agent.connected(runtime):
        request = a_container(shares=205, cgroup="/kubepods/burstable/poduid-batch/main")
        cpu = await runtime.created_cpu(request)
        assert cpu.shares.value == 0
        assert cpu.quota.value > 0


async def test_a_second_container_is_computed_with_the_first(tmp_path: Path, runtime: Runtime) -> None:
    """The second container of one quota gets half, although no cycle has listed the first."""
    inputs = inputs_of("advisor: {policy: latency, enableReclaim: false, latency: {minLentRatio: 0.5}}", cpus=4)
    agent = Agent(tmp_path, inputs)
    quotas = []
    async with agent.connected(runtime):
        for name in ("batch", "other"):
            quotas.append((await runtime.created_cpu(a_container(name))).quota.value)
        await runtime.ask("StopContainer", wire.StopContainerRequest(container=a_container().container))
        quotas.append((await runtime.created_cpu(a_container("third"))).quota.value)
    assert quotas[0] == 2 * quotas[1] == 2 * quotas[2] > 0, quotas


async def test_reserved_cpus_are_assigned_to_no_other_container_before_a_cycle_lists_them(
    tmp_path: Path, runtime: Runtime
) -> None:
    agent, response = Agent(tmp_path, inputs_of(CANONICAL)), {}
    async with agent.connected(runtime):
        for name in ("b", "a"):  # created in another order than that of the names
            request = a_container(name, "dedicated_cores", shares=1024)
            request.pod.annotations["katalyst.kubewharf.io/memory_enhancement"] = '{"numa_binding": "true"}'
            response[name] = (await runtime.created_cpu(request)).cpus
    assert len({*response.values()} - {""}) == 2, response
    inputs = agent.preview_inputs
    assert inputs is not None
    state = agent.pending_originals.reservations.merge_into(inputs.state.cpus)
    assert {name: state.pod(f"uid-{name}")["main"].allocation_result for name in response} == response
    # A cycle that does not list them yet assigns other CPUs to the others.
    shot = msgspec.structs.replace(inputs.state, cpus=state)
    result, after = evaluate_policy(inputs.snapshot, inputs.config, shot, inputs.now_ns)
    assert result.placement is not None
    assert not {str(cpu) for cpu in result.placement.cpus["/web"]} & {*response.values()}
    assert {name: after.cpus.pod(f"uid-{name}")["main"].allocation_result for name in response} == response
    agent.pending_originals.reservations.drop_merged(after.cpus)
    assert agent.pending_originals.reservations.merge_into(inputs.state.cpus) is inputs.state.cpus, (
        "that cycle has them in its state"
    )


async def test_requests_of_reclaimed_resources_come_from_the_kubelet(tmp_path: Path, runtime: Runtime) -> None:
    inputs = inputs_of("advisor: {policy: latency, enableReclaim: false, latency: {minLentRatio: 0.5}}", cpus=4)
    agent = Agent(tmp_path, inputs)
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
    async with agent.connected(runtime):
        await runtime.create(a_container())
        assert (await runtime.created_cpu(a_container("other"))).quota.value == 150_000, "three quarters of two CPUs"


async def test_an_update_changes_the_original_and_not_the_decision(tmp_path: Path, runtime: Runtime) -> None:
    agent = Agent(tmp_path, inputs_of("advisor: {policy: latency}"))
    response = a_container(shares=205)
    async with agent.connected(runtime):
        request = wire.UpdateContainerRequest(pod=response.pod, container=response.container)
        request.linux_resources.cpu.shares.value = 512
        answer = await runtime.ask("UpdateContainer", request)
        (update,) = wire.UpdateContainerResponse.FromString(answer.payload).update
        assert (update.container_id, update.linux.resources.cpu.shares.value) == ("id-batch", 10)
        assert update.ignore_failure, (
            "if another plugin changes the same value, the owner's update succeeds without this one"
        )
        request.linux_resources.Clear()
        request.linux_resources.cpu.cpus = "2"
        answer = await runtime.ask("UpdateContainer", request)
        assert not wire.UpdateContainerResponse.FromString(answer.payload).update, "the update does not set the weight"
    agent.tree.make(BATCH, {"cpu.shares": "10"})
    agent.adopt()
    assert [dict(entry.raw.texts) for entry in agent.originals.entries()] == [{"cpu.shares": "512\n"}]


async def test_a_container_of_a_killed_agent_is_restored_from_its_annotation(tmp_path: Path, runtime: Runtime) -> None:
    agent = Agent(tmp_path, None)
    signed, broken = (a_container(name).container for name in ("batch", "bad"))
    signed.annotations[ORIGINALS_ANNOTATION] = NOTES.write(
        signed.id, {Knob.CPUSET: ("0-3", "3"), Knob.WEIGHT: ("204", "1")}
    )
    broken.annotations[ORIGINALS_ANNOTATION] = '{"cpuset.cpus":'
    agent.tree.make(BATCH, {"cpuset.cpus": "3"})
    # Another value than the given one: it was changed since.
    agent.tree.file(BATCH, "cpu.shares").write_text("512\n")
    async with agent.connected(runtime) as plugin:
        answer = await runtime.ask("Synchronize", wire.SynchronizeRequest(containers=[broken], more=True))
        assert wire.SynchronizeResponse.FromString(answer.payload).more, "there is more to come"
        await runtime.synchronize(signed)
        assert plugin.source.problem() is None
    assert agent.adopt() == 1
    assert [dict(entry.raw.texts) for entry in agent.originals.entries()] == [{"cpuset.cpus": "0-3\n"}]


async def test_a_forged_annotation_is_ignored(
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
    agent.tree.make(BATCH, {"cpu.cfs_quota_us": "10000", "memory.limit_in_bytes": "67108864"})
    async with agent.connected(runtime) as plugin:
        for note in forged.values():
            container = a_container().container
            container.annotations[ORIGINALS_ANNOTATION] = note
            await runtime.synchronize(container)
        assert plugin.source.problem() is None
        assert agent.adopt() == 0
        assert agent.originals.entries() == ()
        assert caplog.text.count("of container id-batch is ignored") == len(forged)
        # The same values signed by this agent are used.
        container.annotations[ORIGINALS_ANNOTATION] = NOTES.write("id-batch", pairs)
        await runtime.synchronize(container)
        assert agent.adopt() == 1
        assert {entry.knob for entry in agent.originals.entries()} == pairs.keys()


async def test_at_shutdown_the_runtime_gets_the_restored_values(tmp_path: Path, runtime: Runtime) -> None:
    """Otherwise it would write the agent's values again with the next update of such a container."""
    agent = Agent(tmp_path, inputs_of(CANONICAL))
    names = [f"batch{number}" for number in range(40)]
    async with agent.connected(runtime) as plugin:
        stopped, left = a_container("stopped"), a_container("left", cgroup=BATCH)
        for request in (stopped, *(a_container(name) for name in names)):
            await runtime.create(request)
        await runtime.ask("StopContainer", wire.StopContainerRequest(container=stopped.container))
        # A container of an earlier agent, with adjusted values of two knobs.
        pairs = {Knob.WEIGHT: ("20", "1"), Knob.QUOTA: ("max 100000", "5000 100000")}
        left.container.annotations[ORIGINALS_ANNOTATION] = NOTES.write(left.container.id, pairs)
        await runtime.synchronize(left.container)
        for group in (BATCH, *(f"{POD}/{name}" for name in names)):
            agent.tree.make(group)
        agent.tree.file(BATCH, "cpu.shares").write_text("206\n")
        agent.tree.file(f"{POD}/batch0", "cpuset.cpus").write_text("0-2\n")
        agent.tree.file(f"{POD}/batch1", "cpuset.cpus").write_text("0-3\n")
        # The runtime overwrites files that were changed without it.
        shares = agent.tree.file(f"{POD}/batch0", "cpu.shares")
        shares.write_text("77\n")
        runtime.updating = lambda: None if len(runtime.updates) > 1 else written(shares, "2\n")
        plugin.stop_adjusting()
        assert (await runtime.create(a_container("late"))).ByteSize() == 0
        await asyncio.to_thread(plugin.leave, agent.files, {})
        resources = {item.container_id: item.linux.resources for update in runtime.updates for item in update.update}
        assert [len(update.update) for update in runtime.updates] == [32, 9]
        assert (resources["id-batch0"].cpu.cpus, resources["id-batch1"].cpu.cpus) == ("0-2", "0-3")
        cpu = resources["id-left"].cpu
        assert (cpu.shares.value, cpu.quota.value, cpu.cpus) == (206, -1, "")
        assert resources.keys() == {"id-left", *(f"id-{name}" for name in names)}
        assert shares.read_text() == "77\n"


async def test_a_container_that_starts_after_shutdown_gets_the_requested_values(
    tmp_path: Path, runtime: Runtime
) -> None:
    """A missing cgroup cannot be restored, and the runtime would write the adjusted values."""
    agent = Agent(tmp_path, inputs_of("advisor: {policy: latency}"))
    async with agent.connected(runtime) as plugin:
        for name in ("late", "there"):
            assert (await runtime.created_cpu(a_container(name, shares=205, quota=50_000))).shares.value == 10
        # Its cgroup exists and the journal could not be written: its files hold the agent's value.
        agent.tree.make(f"{POD}/there")
        shares = agent.tree.file(f"{POD}/there", "cpu.shares")
        shares.write_text("10\n")
        runtime.updating = lambda: written(shares, "205\n")
        plugin.stop_adjusting()
        await asyncio.to_thread(plugin.leave, agent.files, agent.pending_originals.pending(0.0))
        resources = {item.container_id: item.linux.resources for update in runtime.updates for item in update.update}
        assert {name: item.cpu.shares.value for name, item in resources.items()} == {"id-late": 205, "id-there": 205}
        assert shares.read_text() == "205\n", "no file is rewritten to its content before the update"


async def test_a_runtime_without_connection_gets_no_updates_at_shutdown(
    tmp_path: Path, runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Agent(tmp_path, inputs_of(CANONICAL))
    async with agent.connected(runtime) as plugin:
        await runtime.create(a_container())
        agent.tree.make(BATCH)
        runtime.hang_up()
        await until_async(plugin.source.problem)
        await asyncio.to_thread(plugin.leave, agent.files, {})
    assert runtime.updates == []
    assert "the runtime keeps adjusted values of up to 1 containers: there is no connection" in caplog.text


async def test_a_container_whose_removal_was_missed_is_dropped_by_the_next_cycles(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop and remove events are lost while the runtime is disconnected; the latest cycle has the running containers."""
    inputs = inputs_of(CANONICAL)
    agent = Agent(tmp_path, inputs)
    async with agent.connected(runtime) as plugin:
        for name in ("running", "removed"):
            await runtime.create(a_container(name))
            agent.tree.make(f"{POD}/{name}")
        monkeypatch.setattr("agent.nri.plugin.MAX_UNLISTED_S", 0.0)
        cgroups = {**inputs.snapshot.cgroups, f"{POD}/running": CgroupSample(path=f"{POD}/running", id=9)}
        unlisted = (ComponentHealth(name="pods", ok=False, error="refused", remedy=""),)
        shot = msgspec.structs.replace(inputs.snapshot, cgroups=cgroups, sources=unlisted)
        agent.preview_inputs = msgspec.structs.replace(inputs, snapshot=shot)
        await runtime.create(a_container("second"))
        assert set(plugin._adjusted) == {f"{POD}/{name}" for name in ("running", "removed", "second")}, "stale pod list"
        monkeypatch.setattr("agent.nri.plugin.MAX_UNLISTED_S", 120.0)
        agent.preview_inputs = msgspec.structs.replace(inputs, snapshot=msgspec.structs.replace(shot, sources=()))
        await runtime.create(a_container("third"))
        assert f"{POD}/removed" in plugin._adjusted, "a container that was just created may not have started yet"
        monkeypatch.setattr("agent.nri.plugin.MAX_UNLISTED_S", 0.0)
        await runtime.create(a_container("fourth"))
        assert set(plugin._adjusted) == {f"{POD}/running", f"{POD}/fourth"}


# --- failures


async def test_no_request_takes_longer_than_the_timeout(tmp_path: Path, runtime: Runtime) -> None:
    agent = Agent(tmp_path, inputs_of(CANONICAL))
    inputs, hold = agent.preview_inputs, asyncio.Event()
    loop = asyncio.get_running_loop()
    calls = 0

    def slow() -> PreviewInputs | None:
        nonlocal calls
        calls += 1
        if calls == 2:  # the first call only selects expected containers
            asyncio.run_coroutine_threadsafe(hold.wait(), loop).result(20)
        return inputs

    agent.ask = slow
    async with agent.connected(runtime, timeout_s=0.2) as plugin:
        response = await runtime.create(a_container())
        assert (response.ByteSize(), plugin.counts["late"]) == (0, 1)
        response = await runtime.create(a_container("other"))
        assert (response.ByteSize(), plugin.counts["late"]) == (0, 2), "no request queues behind a hanging one"
        hold.set()
        await until_async(lambda: calls == 2)
        await asyncio.sleep(0.3)
        assert (await runtime.created_cpu(a_container("other"))).cpus


@pytest.mark.parametrize(
    ("age_s", "field", "value"),
    [
        (None, "", ""),
        (60.0, "", ""),
        (0.0, "container.linux.cgroups_path", "relative/path"),
        (0.0, "container.linux.cgroups_path", "/kubepods/../etc"),
        (0.0, "container.linux.cgroups_path", ""),
        (0.0, "pod.uid", "../x"),
        (0.0, "container.name", ""),
    ],
)
async def test_without_fresh_inputs_or_a_valid_request_nothing_is_adjusted(
    tmp_path: Path, runtime: Runtime, age_s: float | None, field: str, value: str
) -> None:
    request = a_container()
    if field:
        parent, _, name = field.rpartition(".")
        setattr(attrgetter(parent)(request), name, value)
    agent = Agent(tmp_path, None if age_s is None else inputs_of(CANONICAL, age_s=age_s))
    async with agent.connected(runtime) as plugin:
        assert (await runtime.create(request)).ByteSize() == 0
        assert plugin.counts["unknown"] == 1


async def test_a_container_that_did_not_start_is_not_adjusted_again(
    tmp_path: Path, runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    """As if another plugin set the same value: the runtime removes the container that it was creating."""
    agent, response = Agent(tmp_path, inputs_of("advisor: {policy: latency}")), []
    async with agent.connected(runtime) as plugin:
        for number, name in enumerate(("batch", "good", "batch", "good", "batch")):
            request = a_container(name, "reclaimed_cores", cgroup=f"{POD}/{name}-{number}")
            request.container.id = f"id-{number}"
            response.append((await runtime.created_cpu(request)).shares.value)
            stopped = wire.StopContainerRequest(container=request.container)
            if name == "good":
                event = wire.StateChangeEvent(
                    event=wire.POST_START_CONTAINER, pod=request.pod, container=request.container
                )
                await runtime.ask("StateChange", event)
            await runtime.ask("StopContainer", stopped)
        assert response == [10, 10, 0, 10, 0]
        assert (plugin.counts["adjusted"], plugin.counts["refused"]) == (3, 2)
    assert caplog.text.count("container main of pod shop/batch did not start with adjusted values") == 1


async def test_a_start_during_a_lost_connection_is_no_failure(tmp_path: Path, runtime: Runtime) -> None:
    agent = Agent(tmp_path, inputs_of("advisor: {policy: latency}"))
    async with agent.connected(runtime) as plugin:
        request = a_container()
        await runtime.create(request)
        runtime.hang_up()
        await runtime.plugin()
        await runtime.ask("Configure", wire.ConfigureRequest(runtime_name="containerd"))
        request.container.id = "id-2"
        assert (await runtime.created_cpu(request)).shares.value == 10
        assert plugin.counts["refused"] == 0


async def test_lists_set_by_another_plugin_stay(tmp_path: Path, runtime: Runtime) -> None:
    agent = Agent(tmp_path, inputs_of(CANONICAL))
    async with agent.connected(runtime):
        request = a_container()
        request.container.linux.resources.cpu.cpus = "0-2"
        assert not (await runtime.created_cpu(request)).cpus


async def test_an_unknown_or_invalid_call_is_refused_and_the_next_is_answered(tmp_path: Path, runtime: Runtime) -> None:
    agent = Agent(tmp_path, inputs_of(CANONICAL))
    async with agent.connected(runtime):
        assert (await runtime.ask("Dance", wire.Empty())).status.code == 12
        assert (await runtime.ask("Configure", wire.Empty(), service="other.Service")).status.code == 12
        bad = wire.RegisterPluginRequest(plugin_name="\x01")  # invalid as a request of Synchronize
        assert (await runtime.ask("Synchronize", bad)).status.code == 3
        assert (await runtime.ask("Shutdown", wire.Empty())).status.code == 0


@pytest.mark.parametrize("hurt", ["garbage", "hang up"])
async def test_the_plugin_reconnects_after_invalid_bytes_and_after_a_restart(
    tmp_path: Path, runtime: Runtime, hurt: str
) -> None:
    agent = Agent(tmp_path, inputs_of(CANONICAL))
    async with agent.connected(runtime) as plugin:
        if hurt == "garbage":
            runtime.forget()
            runtime.write(b"\xff" * 64)
        else:
            runtime.hang_up()
        await until_async(lambda: plugin.source.problem() is not None)
        assert ("a fragment of 4294967295 bytes" in str(plugin.source.problem())) is (hurt == "garbage")
        await runtime.plugin()
        assert runtime.connections == 2
        await runtime.ask("Synchronize", wire.SynchronizeRequest())
        assert plugin.source.problem() is None
        assert (await runtime.created_cpu(a_container())).cpus


@pytest.mark.parametrize("garbles", [b"\xff\xff\xff", rpc.Response(payload=b"\xff\xff\xff").SerializeToString()])
async def test_an_invalid_response_of_the_runtime_is_reported(
    tmp_path: Path, runtime: Runtime, caplog: pytest.LogCaptureFixture, garbles: bytes
) -> None:
    agent = Agent(tmp_path, inputs_of(CANONICAL))
    runtime.garbles = garbles
    with agent.plugin(runtime.path) as plugin:
        await until_async(lambda: "the response to RegisterPlugin cannot be decoded" in str(plugin.source.problem()))
        runtime.garbles = None
        await runtime.plugin()
        await runtime.create(a_container())
        agent.tree.make(BATCH)
        runtime.garbles = garbles
        assert "Traceback" not in caplog.text, "it is no bug of the agent"
        await asyncio.to_thread(plugin.leave, agent.files, {})
    assert "the runtime keeps adjusted values of up to 1 containers: the response to Up" in caplog.text


async def test_a_missing_or_refusing_runtime_is_reported_with_the_remedy(tmp_path: Path) -> None:
    agent = Agent(tmp_path, None)
    with agent.plugin(tmp_path / "nri.sock") as plugin:
        await until_async(plugin.source.problem)
        problem = plugin.source.problem()
        assert problem is not None
        assert "has NRI enabled" in problem.remedy
        async with Runtime(tmp_path / "nri.sock") as runtime:
            runtime.refuses = "no plugins today"
            await until_async(lambda: runtime.registered)
            await until_async(lambda: "no plugins today" in str(plugin.source.problem()))


async def test_pods_are_listed_when_a_sandbox_or_container_starts(tmp_path: Path, runtime: Runtime) -> None:
    agent = Agent(tmp_path, None)
    async with agent.connected(runtime):
        for event in (wire.RUN_POD_SANDBOX, wire.POST_START_CONTAINER, wire.REMOVE_CONTAINER):
            await runtime.ask("StateChange", wire.StateChangeEvent(event=event))
    assert agent.woken == 2


def test_close_ends_the_plugin_while_it_connects(tmp_path: Path) -> None:
    with Agent(tmp_path, None).plugin(tmp_path / "nowhere.sock") as plugin:
        pass
    plugin.close()

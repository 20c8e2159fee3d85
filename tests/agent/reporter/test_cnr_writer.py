"""Requests of the writers to the API server over a real socket: changes only, within the rate, retried after failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest

from agent.reporter.cnr_inputs import CnrInputs
from agent.reporter.cnr_writer import CnrWriter
from agent.reporter.desired_state_writer import POLL_INTERVAL_S, DesiredStateWriter
from agent.reporter.events import MAX_QUEUED_EVENTS, EvictionEventWriter, build_event
from agent.reporter.extended_resources import ExtendedResources
from api.advice import Headroom, NodeAdvice, OvercommitAdvice
from api.decision import Cycle
from api.eviction import EvictionEvent, EvictionEventReason, EvictionResult, EvictionVictim
from api.knobs import Reason
from api.node_resources import ObjectSection
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from api.snapshot import ORIGINALS, ComponentHealth, KubeletManagers
from api.units import GIB
from tests.agent.reporter.test_cnr import ADVERTISED, BATCH, LIFECYCLE, OWN_TAINT, finished
from tests.agent.reporter.test_cnr_merge import field
from tests.builders.api_server import FakeApiServer
from tests.builders.health import problem_of

CNR = "/apis/node.katalyst.kubewharf.io/v1alpha1/customnoderesources/n1"
NODE = "/api/v1/nodes/n1/status"
spec_field = partial(field, part=ObjectSection.SPEC)


def bodies(server: FakeApiServer) -> list[Any]:
    """Return the bodies written since the last call of `paths`."""
    return [request.body for request in server.writes]


def paths(server: FakeApiServer) -> list[str]:
    """Return the parts of the CustomNodeResource written since the last call."""
    written = [request.path.removeprefix(CNR) or "spec" for request in server.writes]
    server.writes.clear()
    return written


def taints(server: FakeApiServer) -> list[Mapping[str, Any]]:
    return server.objects[CNR]["spec"]["taints"]  # type: ignore[no-any-return]


@asynccontextmanager
async def writing(server: FakeApiServer, **options: Any) -> AsyncIterator[tuple[CnrWriter, float]]:
    async with server.client() as client:
        yield CnrWriter(client, "n1", **{"metrics": False, **options}), time.monotonic()


async def write(writer: DesiredStateWriter, cycle: Cycle, now_s: float) -> None:
    """Publish the cycle, and write what is due."""
    writer.publish(cycle)
    await writer.sync(now_s)


def quiet(reported_headroom: Headroom | None = ADVERTISED, **changes: Any) -> Cycle:
    return finished(reported_headroom, **{"evictions": None, **changes})


def headroom(cores: float) -> Headroom:
    return msgspec.structs.replace(ADVERTISED, cores=cores)


async def test_only_what_changed_is_written() -> None:
    server = FakeApiServer()
    async with writing(server) as (writer, now_s):
        await writer.sync(now_s)
        assert server.requests == [], "there was no cycle yet"
        await write(writer, quiet(), now_s)
        assert [
            (each.headers["Content-Type"], each.query["fieldManager"], each.body["apiVersion"])
            for each in server.writes
        ] == [("application/apply-patch+yaml", "dioptase-agent", "node.katalyst.kubewharf.io/v1alpha1")] * 2
        assert paths(server) == ["spec", "/status"]
        await write(writer, quiet(), now_s + 60)
        assert paths(server) == []
        await write(writer, quiet(headroom(3.0)), now_s + 120)
        assert bodies(server)[0]["status"]["resources"]["allocatable"][RECLAIMED_CPU] == "3000"
        assert paths(server) == ["/status"]
        assert (writer.problem(), writer.writes) == (None, 3)


async def test_everything_is_written_again_periodically() -> None:
    server = FakeApiServer()
    async with writing(server) as (writer, now_s):
        await write(writer, quiet(), now_s)
        paths(server)
        await writer.sync(now_s + 299)
        assert paths(server) == []
        await writer.sync(now_s + 451)
        assert paths(server) == ["spec", "/status"]


async def test_a_node_where_everything_changes_all_the_time_is_written_within_the_rate() -> None:
    server = FakeApiServer()
    async with writing(server) as (writer, now_s):
        for second in range(100):
            await write(writer, quiet(headroom(second)), now_s + second)
    # Five at once, and one every five seconds; one of the tokens was for reading the taints.
    assert 15 <= len(server.writes) <= 25


async def test_node_metrics_are_written_once_a_minute() -> None:
    server = FakeApiServer()
    async with writing(server, metrics=True) as (writer, now_s):
        for second in range(0, 125, 5):
            await write(writer, quiet(), now_s + second)
        assert paths(server).count("/status") == 3


async def test_overcommit_ratios_alone_are_written_once_a_minute_and_stay_without_advice() -> None:
    def ratio(cpu: float, guaranteed: int = 0) -> Cycle:
        advice = OvercommitAdvice(cpu_ratio=cpu, memory_ratio=1.0, reason=Reason(rule="r", text="R."))
        cycle = quiet()
        node = msgspec.structs.replace(
            cycle.snapshot.node, kubelet=KubeletManagers(cpu="static" if guaranteed else "none", memory="none")
        )
        snapshot = msgspec.structs.replace(cycle.snapshot, node=node)
        return msgspec.structs.replace(cycle, snapshot=snapshot, node=NodeAdvice(overcommit=advice))

    server = FakeApiServer()
    ratios = []
    async with writing(server) as (writer, now_s):
        for second, cycle in (
            (0, quiet()),
            (5, ratio(1.5)),  # the first one at once
            (15, ratio(1.6)),
            (30, ratio(1.7)),
            (66, ratio(1.8)),
            (71, ratio(1.9, guaranteed=4)),  # another manager is written at once
            (140, quiet()),  # no advice in this cycle
        ):
            await write(writer, cycle, now_s + second)
            ratios += [
                (
                    second,
                    each.body.get("metadata", {})
                    .get("annotations", {})
                    .get("katalyst.kubewharf.io/cpu_overcommit_ratio"),
                )
                for each in server.writes
                if each.path == CNR and "nodeResourceProperties" in each.body["spec"]
            ]
            server.writes.clear()
    assert ratios == [(0, None), (5, "1.50"), (66, "1.80"), (71, "1.90")]


async def test_only_own_taints_change_and_by_resource_version() -> None:
    server = FakeApiServer({CNR: {"metadata": {"name": "n1"}, "spec": {"taints": [LIFECYCLE]}}})
    async with writing(server) as (writer, now_s):
        await write(writer, finished(), now_s)
        pressure = {**OWN_TAINT, "key": "node.katalyst.kubewharf.io/MemoryPressure"}
        assert taints(server) == [LIFECYCLE, pressure]
        assert bodies(server)[1]["metadata"]["resourceVersion"] == "1"
        await write(writer, quiet(), now_s + 60)
        assert taints(server) == [LIFECYCLE]


async def test_an_unavailable_server_blocks_nothing_and_gets_the_latest_state_afterwards() -> None:
    server = FakeApiServer()
    server.refuse["PATCH"] = 503
    async with writing(server) as (writer, now_s):
        for second in range(0, 300, 10):
            await write(writer, quiet(headroom(second)), now_s + second)
        assert "CustomNodeResource n1 cannot be written: 503" in problem_of(writer).reason
        server.refuse.clear()
        await writer.sync(now_s + 600)
        assert writer.problem() is None
        assert bodies(server)[-1]["status"]["resources"]["capacity"][RECLAIMED_CPU] == "290000"
        assert paths(server) == ["spec", "/status"], "once, not thirty times"


async def test_a_deleted_object_is_created_again() -> None:
    server = FakeApiServer()
    async with writing(server) as (writer, now_s):
        await write(writer, quiet(), now_s)
        paths(server)
        server.refuse[f"{CNR}/status"] = 404
        await write(writer, quiet(headroom(1.0)), now_s + 30)
        assert problem_of(writer).remedy.startswith("install the definition")
        server.refuse.clear()
        await writer.sync(now_s + 60)
        assert paths(server) == ["spec", "/status"]


async def test_a_missing_permission_is_named() -> None:
    server = FakeApiServer()
    server.refuse[CNR] = 403
    async with writing(server) as (writer, now_s):
        await write(writer, quiet(), now_s)
        assert problem_of(writer).remedy.startswith(
            "give the agent's role get, create and patch of customnoderesources"
        )


async def test_fields_taken_over_from_other_managers_are_reported_until_there_is_no_conflict() -> None:
    server = FakeApiServer()
    server.claims = [("kubectl-edit", ".status.topologyPolicy")]
    async with writing(server) as (writer, now_s):
        await write(writer, quiet(), now_s)
        assert paths(server) == ["spec", "/status"]
        assert problem_of(writer).reason.endswith("overwritten by this agent: .status.topologyPolicy by kubectl-edit")
        await writer.sync(now_s + 60)
        assert writer.problem() is not None, "nothing was written since"
        await writer.sync(now_s + 451)
        assert (paths(server), writer.problem()) == (["spec", "/status"], None)
        server.claims = [(f"m{number}", f".f{number}") for number in range(5)]
        await writer.sync(now_s + 1000)
        assert problem_of(writer).reason.endswith(": .f0 by m0, .f1 by m1, .f2 by m2 and 2 more")


async def test_a_dry_run_takes_over_no_field() -> None:
    server = FakeApiServer({CNR: {"metadata": {"name": "n1"}, "spec": {}}})
    server.claims = [("katalyst-agent", ".status.topologyPolicy")]
    async with writing(server, reports_reclaimable=False) as (writer, now_s):
        await write(writer, quiet(), now_s)
        assert (server.writes, len(server.claims), writer.problem()) == ([], 1, None)
        server.claims.clear()
        await writer.sync(now_s + 500)
        assert paths(server) == ["spec", "/status"]


async def test_fields_of_plugins_are_written_and_removed_with_them() -> None:
    server, fields = FakeApiServer(), [spec_field("NodeResourceProperties", [{"propertyName": "rack"}])]
    async with writing(server, inputs=lambda: CnrInputs(fields=tuple(fields))) as (writer, now_s):
        await write(writer, quiet(), now_s)
        assert bodies(server)[0]["spec"]["nodeResourceProperties"][-1] == {"propertyName": "rack"}
        paths(server)
        fields.append(spec_field("Nonsense", 1))
        await writer.sync(now_s + 10)
        assert problem_of(writer).reason.startswith("reporter plugin p: spec Nonsense is no field")
        assert paths(server) == []
        fields.clear()
        await writer.sync(now_s + 20)
        assert "rack" not in [item["propertyName"] for item in bodies(server)[0]["spec"]["nodeResourceProperties"]]
        assert (paths(server), writer.problem()) == (["spec"], None)


async def test_taints_of_plugins_are_removed_with_them_and_those_of_other_owners_stay() -> None:
    taint = {"key": "x.io/a", "effect": "NoSchedule", "qosLevel": "reclaimed_cores"}
    fields = [spec_field("Taints", [taint])]
    server = FakeApiServer({CNR: {"metadata": {"name": "n1"}, "spec": {"taints": [LIFECYCLE]}}})
    async with writing(server, inputs=lambda: CnrInputs(fields=tuple(fields))) as (writer, now_s):
        await write(writer, quiet(), now_s)
        assert taints(server) == [LIFECYCLE, taint]
        fields.clear()
        await writer.sync(now_s + 60)
        assert taints(server) == [LIFECYCLE]


async def test_invalid_fields_of_plugins_do_not_block_the_agents_own() -> None:
    server, fields = FakeApiServer(), [spec_field("NodeResourceProperties", [{"propertyName": "spoiled"}])]
    server.invalid = "spoiled"
    async with writing(server, inputs=lambda: CnrInputs(fields=tuple(fields))) as (writer, now_s):
        await write(writer, quiet(), now_s)
        await writer.sync(now_s + 5)
        assert paths(server) == ["spec", "/status"]
        assert problem_of(writer).reason == (
            "the API server rejects the fields of plugins; they are left out until they change: invalid"
        )
        fields[:] = [spec_field("NodeResourceProperties", [{"propertyName": "corrected"}])]
        await writer.sync(now_s + 10)
        assert (paths(server), writer.problem()) == (["spec"], None)


async def test_wake_writes_before_the_poll_interval() -> None:
    server = FakeApiServer()
    async with writing(server) as (writer, _):
        writer.publish(quiet())
        began_s, run = time.monotonic(), asyncio.create_task(writer.run())
        writer.wake()
        while not server.writes:
            await asyncio.sleep(0.01)
        assert time.monotonic() - began_s < POLL_INTERVAL_S
        run.cancel()


async def test_a_bug_in_the_report_is_a_problem_and_does_not_end_the_writer(monkeypatch: Any) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("agent.reporter.cnr_writer.build_cnr_report", broken)
    async with writing(FakeApiServer()) as (writer, now_s):
        await write(writer, quiet(), now_s)
        assert "a bug" in problem_of(writer).reason


AMOUNTS = {RECLAIMED_CPU: "5123", RECLAIMED_MEMORY: str(10 * GIB)}
REMOVED = dict.fromkeys(AMOUNTS)


def resources(amounts: Mapping[str, str | None]) -> tuple[str, str, Any]:
    """Return the request that writes these extended resources."""
    return "PATCH", NODE, {"status": {"capacity": amounts, "allocatable": amounts}}


@asynccontextmanager
async def extending(server: FakeApiServer, **options: Any) -> AsyncIterator[tuple[ExtendedResources, float]]:
    async with server.client() as client:
        yield ExtendedResources(client, "n1", **options), time.monotonic()


async def test_extended_resources_are_written_again_because_the_kubelet_may_reset_them() -> None:
    server = FakeApiServer()
    async with extending(server) as (writer, now_s):
        await write(writer, quiet(None), now_s)
        assert server.writes == [], "the amounts of the previous agent stay until the headroom is known"
        await write(writer, quiet(), now_s)
        assert [request[:3] for request in server.writes] == [resources(AMOUNTS)]
        await writer.sync(now_s + 29)
        assert len(server.writes) == 1
        await writer.sync(now_s + 30)
        assert len(server.writes) == 2
        await write(writer, quiet(headroom(0.0)), now_s + 31)
        assert bodies(server)[-1]["status"]["capacity"][RECLAIMED_CPU] == "0"
        server.refuse[NODE] = 403
        await writer.sync(now_s + 90)
        assert "--set agent.extendedResources=true" in problem_of(writer).remedy
        assert "report.extendedResources: false" in problem_of(writer).remedy


async def test_a_dry_run_removes_the_extended_resources_of_the_previous_agent() -> None:
    server = FakeApiServer()
    async with extending(server, reports_reclaimable=False) as (writer, now_s):
        await writer.sync(now_s)
        assert server.writes == []
        await write(writer, quiet(), now_s)
        assert [request[:3] for request in server.writes] == [resources(REMOVED)]


async def test_without_evaluated_cycles_extended_resources_are_not_restored() -> None:
    server = FakeApiServer()
    async with extending(server) as (writer, now_s):
        writer.publish(quiet())
        for poll in range(60):
            await writer.sync(now_s + 5 * poll)
        assert len(server.writes) == 2, "at once and after half a minute, but not after a minute without a cycle"
        await write(writer, quiet(), now_s + 300)
        assert len(server.writes) == 3
        blind = quiet()
        unlisted = (ComponentHealth(name="pods", ok=False, error="refused", remedy=""),)
        blind = msgspec.structs.replace(blind, snapshot=msgspec.structs.replace(blind.snapshot, sources=unlisted))
        for poll in range(60):
            await write(writer, quiet(None) if poll % 2 else blind, now_s + 300 + 5 * poll)
        assert len(server.writes) == 4, "nor after a minute of cycles without advice or without pods"


async def test_extended_resources_are_removed_at_shutdown(caplog: pytest.LogCaptureFixture) -> None:
    server = FakeApiServer()
    async with extending(server) as (writer, now_s):
        await writer.withdraw()
        assert server.writes == [], "nothing was written, so nothing is removed"
        await write(writer, quiet(), now_s)
        await writer.withdraw()
        assert server.writes[-1][:3] == resources(REMOVED)
        await writer.sync(now_s + 100)
        server.refuse["PATCH"] = 500
        await writer.withdraw()
        assert "reclaimed resources stay allocatable; remove them from its status: 500" in caplog.text


VICTIM = EvictionVictim(
    pod="shop/batch",
    uid="uid-batch",
    plugin="rss-overuse-eviction-plugin",
    scope="s",
    forced=True,
    grace_s=1,
    reason=Reason(rule="over", text="Resident memory is 200.0 MiB, above 1.05 times the 100.0 MiB"),
)


def kill(reason: EvictionEventReason = EvictionEventReason.CREATED, name: str = "batch") -> EvictionEvent:
    return EvictionEvent(pod=f"shop/{name}", reason=reason, message="eviction in 1 s", at_ns=0)


def test_an_event_names_the_pod_the_reason_and_the_numbers() -> None:
    event = build_event(kill(EvictionEventReason.EXCEEDED), BATCH, VICTIM, "n1", 1_767_225_600_000_000_000)
    assert (event["reason"], event["type"], event["action"]) == ("EvictExceededGracePeriod", "Warning", "Evicting")
    assert event["involvedObject"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "namespace": "shop",
        "name": "batch",
        "uid": "uid-batch",
    }
    assert event["message"] == (
        "eviction in 1 s (rss-overuse-eviction-plugin: Resident memory is 200.0 MiB, above 1.05 times the 100.0 MiB)"
    )
    assert (event["firstTimestamp"], event["eventTime"]) == ("2026-01-01T00:00:00Z", "2026-01-01T00:00:00.000000Z")
    assert event["metadata"] == {"generateName": "batch.", "namespace": "shop"}
    assert "uid" not in build_event(kill(), None, None, "n1", 0)["involvedObject"]
    long = build_event(msgspec.structs.replace(kill(), message="x" * 5000), None, None, "n1", 0)
    assert (len(long["message"]), len(event["source"])) == (1024, 2)


def test_an_event_ends_with_observation_threshold_start_and_cgroup() -> None:
    numbers = msgspec.structs.replace(
        VICTIM,
        reason=msgspec.structs.replace(VICTIM.reason, threshold=1.05),
        observed=2.0,
        since_ns=3_000_000_000,
        cgroup="/kubepods/podu",
    )
    at = (1_767_225_600_000_000_000, 63_000_000_000)
    ends = (
        "[rss-overuse-eviction-plugin; observed 2 > threshold 1.05; since 2025-12-31T23:59:00Z; cgroup /kubepods/podu]"
    )
    event = build_event(kill(), BATCH, numbers, "n1", *at)
    assert event["message"].endswith(f"above 1.05 times the 100.0 MiB) {ends}")
    verdict = msgspec.structs.replace(VICTIM.reason, threshold=100 * 2.0**40)
    sizes = msgspec.structs.replace(
        VICTIM, scope="SystemMemory", subject="free", reason=verdict, observed=93.5 * 2**30, operator="<"
    )
    assert "; observed 93.50 GiB < threshold 100.00 TiB]" in build_event(kill(), BATCH, sizes, "n1", *at)["message"]
    long = build_event(msgspec.structs.replace(kill(), message="x" * 5000), BATCH, numbers, "n1", *at)
    assert (len(long["message"]), long["message"].endswith(f"... {ends}")) == (1024, True)
    deep = msgspec.structs.replace(numbers, cgroup="/c" * 4000)
    assert len(build_event(kill(), BATCH, deep, "n1", *at)["message"]) <= 1024
    stopped = build_event(kill(EvictionEventReason.STOPPED), BATCH, VICTIM, "n1", 0)
    assert (stopped["reason"], stopped["action"]) == ("ContainerStopped", "ContainerStopping")


async def test_events_of_an_earlier_victim_have_its_numbers_and_are_limited_in_rate() -> None:
    server = FakeApiServer()
    async with server.client() as client:
        writer, now_s = EvictionEventWriter(client, "n1"), time.monotonic()
        writer.publish(quiet(evictions=EvictionResult(victims=(VICTIM,))))
        writer.publish(quiet(kills=(kill(), kill(EvictionEventReason.SUCCEEDED))))
        await writer.sync(now_s)
        assert [body["reason"] for body in bodies(server)] == ["EvictCreated", "EvictSucceeded"]
        assert all("200.0 MiB" in body["message"] for body in bodies(server))
        writer.publish(quiet(kills=tuple(kill(name=f"p{i}") for i in range(100))))
        await writer.sync(now_s)
        assert len(server.writes) == 25, "a burst"
        await writer.sync(now_s + 10)
        assert len(server.writes) == 35, "and one a second"


async def test_refused_events_are_bounded_and_counted() -> None:
    server = FakeApiServer()
    server.refuse["POST"] = 500
    async with server.client() as client:
        writer, now_s = EvictionEventWriter(client, "n1"), time.monotonic()
        writer.publish(quiet(kills=tuple(kill(name=f"p{i}") for i in range(MAX_QUEUED_EVENTS + 7))))
        assert writer.lost_events == 7
        await writer.sync(now_s)
        assert writer.problem() is not None
        assert writer.lost_events == 32, "25 were refused, and would be refused again"


async def test_the_node_has_an_event_when_originals_cannot_be_journalled_and_when_they_can_again() -> None:
    server = FakeApiServer()
    full = ComponentHealth(name=ORIGINALS, ok=False, error="No space left on device", remedy="free space")
    async with server.client() as client:
        writer, now_s = EvictionEventWriter(client, "n1"), time.monotonic()
        for sources in ((), (full,), (full,), ()):
            cycle = quiet()
            snapshot = msgspec.structs.replace(cycle.snapshot, sources=sources)
            writer.publish(msgspec.structs.replace(cycle, snapshot=snapshot))
        await writer.sync(now_s)
    first, second = bodies(server)
    assert first["involvedObject"] == {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "n1"}
    assert (first["type"], first["reason"], second["type"], second["reason"]) == (
        "Warning", "OriginalsNotJournalled", "Normal", "OriginalsJournalled",
    )  # fmt: skip
    assert first["message"] == (
        "No space left on device: free space. Until then reclaimable CPU does not grow, and the node's agent is not ready"
    )
    assert first["metadata"]["namespace"] == "default"

"""Requests of the writers to the API server over a real socket: changes only, within the rate, retried after failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from agent.reporter.cnr_inputs import CnrInputs
from agent.reporter.cnr_writer import CnrWriter
from agent.reporter.desired_state_writer import POLL_INTERVAL_S
from agent.reporter.events import MAX_QUEUED_EVENTS, EvictionEventWriter, build_event
from agent.reporter.extended_resources import ExtendedResources
from api.advice import Headroom, NodeAdvice, OvercommitAdvice
from api.decision import Cycle
from api.eviction import EvictionEvent, EvictionEventReason, EvictionResult, EvictionVictim
from api.knobs import Reason
from api.measurements import KubeletManagers
from api.node_resources import ObjectSection, ReportedField
from api.pod import RECLAIMED_MEMORY
from api.snapshot import ComponentHealth
from tests.agent.reporter.test_cnr import ADVERTISED, BATCH, LIFECYCLE, OWN_TAINT, finished
from tests.builders.api_server import client_of, status_response

CNR = "/apis/node.katalyst.kubewharf.io/v1alpha1/customnoderesources/n1"
NODE = "/api/v1/nodes/n1/status"
GIB = 1 << 30


class Server:
    """API server that records the writing requests."""

    def __init__(self) -> None:
        self.written: list[tuple[str, str, Any]] = []
        self.taints: list[Any] = []
        self.status = 200
        self.refuse: dict[str, int] = {}
        self.invalid = b"\0"
        """Bytes that it rejects in an object."""
        self.held: list[tuple[str, str]] = []
        """Manager and field of other owners, which only a forced apply changes."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        status = self.refuse.get(request.path, self.status)
        if status != 200:
            return status_response(
                status, msgspec.json.encode({"kind": "Status", "reason": "R", "code": status}).decode()
            )
        if self.invalid in body:
            return status_response(
                422, msgspec.json.encode({"kind": "Status", "reason": "Invalid", "message": "no", "code": 422}).decode()
            )
        if request.method != "GET" and self.held and request.query.get("force") == "false":
            causes = [
                {
                    "reason": "FieldManagerConflict",
                    "message": f'conflict with "{manager}" using v1alpha1',
                    "field": field,
                }
                for manager, field in self.held
            ]
            status_body = {
                "kind": "Status",
                "reason": "Conflict",
                "message": "m",
                "code": 409,
                "details": {"causes": causes},
            }
            return status_response(409, msgspec.json.encode(status_body).decode())
        if request.query.get("force") == "true":
            self.held.clear()
        if request.method != "GET":
            self.written.append((request.method, request.path, msgspec.json.decode(body)))
        if request.path == CNR and request.method == "PATCH":
            kind = request.headers["Content-Type"]
            assert kind == ("application/merge-patch+json" if b'"taints"' in body else "application/apply-patch+yaml")
            if "apply" in kind:
                assert request.query["fieldManager"] == "dioptase-agent"
        document = {"metadata": {"name": "n1", "resourceVersion": "7"}, "spec": {"taints": self.taints}}
        return status_response(200, msgspec.json.encode(document).decode())

    def paths(self) -> list[str]:
        """Return the paths written since the last call."""
        paths = [path.removeprefix(CNR) or "spec" for _, path, _ in self.written]
        self.written.clear()
        return paths


@asynccontextmanager
async def writing(server: Server, *, metrics: bool = False) -> AsyncIterator[tuple[CnrWriter, float]]:
    async with client_of(server.answer) as client:
        yield CnrWriter(client, "n1", metrics=metrics), time.monotonic()


def quiet(reported_headroom: Headroom | None = ADVERTISED, **changes: Any) -> Cycle:
    return finished(reported_headroom, **{"evictions": None, **changes})


def headroom(cores: float) -> Headroom:
    return msgspec.structs.replace(ADVERTISED, cores=cores)


async def test_only_what_changed_is_written() -> None:
    server = Server()
    async with writing(server) as (writer, now_s):
        await writer.sync(now_s)
        assert server.written == [], "there was no round yet"
        writer.publish(quiet())
        await writer.sync(now_s)
        assert [body.get("apiVersion") for _, _, body in server.written] == ["node.katalyst.kubewharf.io/v1alpha1"] * 2
        assert server.paths() == ["spec", "/status"]
        writer.publish(quiet())
        await writer.sync(now_s + 60)
        assert server.paths() == []
        writer.publish(quiet(headroom(3.0)))
        await writer.sync(now_s + 120)
        assert (
            server.written[0][2]["status"]["resources"]["allocatable"][
                "resource.katalyst.kubewharf.io/reclaimed_millicpu"
            ]
            == "3000"
        )
        assert server.paths() == ["/status"]
        assert (writer.problem(), writer.writes) == (None, 3)


async def test_everything_is_written_again_periodically() -> None:
    server = Server()
    async with writing(server) as (writer, now_s):
        writer.publish(quiet())
        await writer.sync(now_s)
        server.paths()
        await writer.sync(now_s + 299)
        assert server.paths() == []
        await writer.sync(now_s + 451)
        assert server.paths() == ["spec", "/status"]


async def test_a_node_where_everything_changes_all_the_time_is_written_within_the_rate() -> None:
    server = Server()
    async with writing(server) as (writer, now_s):
        for second in range(100):
            writer.publish(quiet(headroom(second)))
            await writer.sync(now_s + second)
    # Five at once, and one every five seconds; one of the tokens was for looking at the taints.
    assert 15 <= len(server.written) <= 25


async def test_node_metrics_are_written_once_a_minute() -> None:
    server = Server()
    async with writing(server, metrics=True) as (writer, now_s):
        for second in range(0, 125, 5):
            writer.publish(quiet())
            await writer.sync(now_s + second)
        assert [path for path in server.paths() if path == "/status"] == ["/status"] * 3


async def test_overcommit_ratios_alone_are_written_once_a_minute_and_stay_without_advice() -> None:
    def ratio(cpu: float, guaranteed: int = 0) -> Cycle:
        advice = OvercommitAdvice(cpu_ratio=cpu, memory_ratio=1.0, reason=Reason(rule="r", text="R."))
        cycle = quiet()
        node = msgspec.structs.replace(
            cycle.snapshot.node, kubelet=KubeletManagers(cpu="static" if guaranteed else "none", memory="none")
        )
        snapshot = msgspec.structs.replace(cycle.snapshot, node=node)
        return msgspec.structs.replace(cycle, snapshot=snapshot, node=NodeAdvice(overcommit=advice))

    server = Server()
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
            writer.publish(cycle)
            await writer.sync(now_s + second)
            ratios += [
                (
                    second,
                    body.get("metadata", {}).get("annotations", {}).get("katalyst.kubewharf.io/cpu_overcommit_ratio"),
                )
                for _, path, body in server.written
                if path == CNR and "nodeResourceProperties" in body["spec"]
            ]
            server.written.clear()
    assert ratios == [(0, None), (5, "1.50"), (66, "1.80"), (71, "1.90")]


async def test_only_own_taints_change_and_by_resource_version() -> None:
    server = Server()
    server.taints = [LIFECYCLE]
    async with writing(server) as (writer, now_s):
        writer.publish(finished())
        await writer.sync(now_s)
        body = server.written[1][2]
        pressure = {**OWN_TAINT, "key": "node.katalyst.kubewharf.io/MemoryPressure"}
        assert body == {"metadata": {"resourceVersion": "7"}, "spec": {"taints": [LIFECYCLE, pressure]}}
        server.paths()
        server.taints = [LIFECYCLE, pressure]
        writer.publish(quiet())
        await writer.sync(now_s + 60)
        assert [body["spec"]["taints"] for _, _, body in server.written] == [[LIFECYCLE]]


async def test_an_unavailable_server_blocks_nothing_and_gets_the_latest_state_afterwards() -> None:
    server = Server()
    server.status = 503
    async with writing(server) as (writer, now_s):
        for second in range(0, 300, 10):
            began = time.monotonic()
            writer.publish(quiet(headroom(second)))
            assert time.monotonic() - began < 1
            await writer.sync(now_s + second)
        problem = writer.problem()
        assert problem is not None
        assert "CustomNodeResource n1 cannot be written: 503" in problem.reason
        server.status = 200
        await writer.sync(now_s + 600)
        assert writer.problem() is None
        assert (
            server.written[-1][2]["status"]["resources"]["capacity"][
                "resource.katalyst.kubewharf.io/reclaimed_millicpu"
            ]
            == "290000"
        )
        assert server.paths() == ["spec", "/status"], "once, not thirty times"


async def test_a_deleted_object_is_created_again() -> None:
    server = Server()
    async with writing(server) as (writer, now_s):
        writer.publish(quiet())
        await writer.sync(now_s)
        server.paths()
        server.refuse[f"{CNR}/status"] = 404
        writer.publish(quiet(headroom(1.0)))
        await writer.sync(now_s + 30)
        problem = writer.problem()
        assert problem is not None
        assert problem.remedy.startswith("install the definition")
        server.refuse.clear()
        await writer.sync(now_s + 60)
        assert server.paths() == ["spec", "/status"]


async def test_a_missing_permission_is_named() -> None:
    server = Server()
    server.refuse[CNR] = 403
    async with writing(server) as (writer, now_s):
        writer.publish(quiet())
        await writer.sync(now_s)
        problem = writer.problem()
        assert problem is not None
        assert problem.remedy.startswith("give the agent's role get, create and patch of customnoderesources")


async def test_fields_taken_over_from_other_managers_are_reported_until_there_is_no_conflict() -> None:
    server = Server()
    server.held = [("kubectl-edit", ".status.topologyPolicy")]
    async with writing(server) as (writer, now_s):
        writer.publish(quiet())
        await writer.sync(now_s)
        assert server.paths() == ["spec", "/status"]
        problem = writer.problem()
        assert problem is not None
        assert problem.reason.endswith("overwritten by this agent: .status.topologyPolicy by kubectl-edit")
        await writer.sync(now_s + 60)
        assert writer.problem() is not None, "nothing was written since"
        await writer.sync(now_s + 451)
        assert (server.paths(), writer.problem()) == (["spec", "/status"], None)
        server.held = [(f"m{number}", f".f{number}") for number in range(5)]
        await writer.sync(now_s + 1000)
        problem = writer.problem()
        assert problem is not None
        assert problem.reason.endswith(": .f0 by m0, .f1 by m1, .f2 by m2 and 2 more")


def reported_field(name: str, value: Any, part: ObjectSection = ObjectSection.SPEC) -> ReportedField:
    return ReportedField(
        plugin="p",
        group="node.katalyst.kubewharf.io",
        version="v1alpha1",
        kind="CustomNodeResource",
        part=part,
        name=name,
        value=msgspec.Raw(msgspec.json.encode(value)),
    )


async def test_fields_of_plugins_are_written_and_removed_with_them() -> None:
    server, fields = Server(), [reported_field("NodeResourceProperties", [{"propertyName": "rack"}])]
    async with client_of(server.answer) as client:
        writer = CnrWriter(client, "n1", metrics=False, inputs=lambda: CnrInputs(fields=tuple(fields)))
        now_s = time.monotonic()
        writer.publish(quiet())
        await writer.sync(now_s)
        assert server.written[0][2]["spec"]["nodeResourceProperties"][-1] == {"propertyName": "rack"}
        server.paths()
        fields.append(reported_field("Nonsense", 1))
        await writer.sync(now_s + 10)
        problem = writer.problem()
        assert problem is not None
        assert problem.reason.startswith("reporter plugin p: spec Nonsense is no field")
        assert server.paths() == []
        fields.clear()
        await writer.sync(now_s + 20)
        names = [item["propertyName"] for item in server.written[0][2]["spec"]["nodeResourceProperties"]]
        assert "rack" not in names
        assert (server.paths(), writer.problem()) == (["spec"], None)


async def test_taints_of_plugins_are_removed_with_them_and_those_of_other_owners_stay() -> None:
    taint = {"key": "x.io/a", "effect": "NoSchedule", "qosLevel": "reclaimed_cores"}
    server, fields = Server(), [reported_field("Taints", [taint])]
    server.taints = [LIFECYCLE]
    async with client_of(server.answer) as client:
        writer = CnrWriter(client, "n1", metrics=False, inputs=lambda: CnrInputs(fields=tuple(fields)))
        now_s = time.monotonic()
        writer.publish(quiet())
        await writer.sync(now_s)
        assert server.written[1][2]["spec"]["taints"] == [LIFECYCLE, taint]
        server.taints = [LIFECYCLE, taint]
        server.paths()
        fields.clear()
        await writer.sync(now_s + 60)
        assert [body["spec"]["taints"] for _, _, body in server.written] == [[LIFECYCLE]]


async def test_invalid_fields_of_plugins_do_not_block_the_agents_own() -> None:
    server, fields = Server(), [reported_field("NodeResourceProperties", [{"propertyName": "spoiled"}])]
    server.invalid = b"spoiled"
    async with client_of(server.answer) as client:
        writer = CnrWriter(client, "n1", metrics=False, inputs=lambda: CnrInputs(fields=tuple(fields)))
        now_s = time.monotonic()
        writer.publish(quiet())
        await writer.sync(now_s)
        await writer.sync(now_s + 5)
        assert server.paths() == ["spec", "/status"]
        problem = writer.problem()
        assert problem is not None
        assert problem.reason == (
            "the API server rejects the fields of plugins; they are left out until they change: no"
        )
        fields[:] = [reported_field("NodeResourceProperties", [{"propertyName": "mended"}])]
        await writer.sync(now_s + 10)
        assert (server.paths(), writer.problem()) == (["spec"], None)


async def test_wake_writes_before_the_poll_interval() -> None:
    server = Server()
    async with writing(server) as (writer, _now_s):
        writer.publish(quiet())
        began, run = time.monotonic(), asyncio.create_task(writer.run())
        writer.wake()
        while not server.written:
            await asyncio.sleep(0.01)
        assert time.monotonic() - began < POLL_INTERVAL_S
        run.cancel()


async def test_a_bug_in_the_report_is_a_problem_and_does_not_end_the_writer(monkeypatch: Any) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("agent.reporter.cnr_writer.build_cnr_report", broken)
    async with writing(Server()) as (writer, now_s):
        writer.publish(quiet())
        await writer.sync(now_s)
        problem = writer.problem()
        assert problem is not None
        assert "a bug" in problem.reason


async def test_extended_resources_are_written_again_because_the_kubelet_may_reset_them() -> None:
    server = Server()
    async with client_of(server.answer) as client:
        writer, now_s = ExtendedResources(client, "n1"), time.monotonic()
        writer.publish(quiet(None))
        await writer.sync(now_s)
        assert server.written == [], "what an agent before this one said stands until more is known"
        writer.publish(quiet())
        await writer.sync(now_s)
        amounts = {
            "resource.katalyst.kubewharf.io/reclaimed_millicpu": "5123",
            "resource.katalyst.kubewharf.io/reclaimed_memory": str(10 * GIB),
        }
        assert server.written == [("PATCH", NODE, {"status": {"capacity": amounts, "allocatable": amounts}})]
        await writer.sync(now_s + 29)
        assert len(server.written) == 1
        await writer.sync(now_s + 30)
        assert len(server.written) == 2
        writer.publish(quiet(headroom(0.0)))
        await writer.sync(now_s + 31)
        assert server.written[-1][2]["status"]["capacity"]["resource.katalyst.kubewharf.io/reclaimed_millicpu"] == "0"
        server.refuse[NODE] = 403
        await writer.sync(now_s + 90)
        problem = writer.problem()
        assert problem is not None
        assert "--set agent.extendedResources=true" in problem.remedy
        assert "report.extendedResources: false" in problem.remedy


async def test_a_dry_run_removes_the_extended_resources_of_the_previous_agent() -> None:
    server = Server()
    async with client_of(server.answer) as client:
        writer, now_s = ExtendedResources(client, "n1", reports_reclaimable=False), time.monotonic()
        await writer.sync(now_s)
        assert server.written == []
        writer.publish(quiet())
        await writer.sync(now_s)
        nothing = {"resource.katalyst.kubewharf.io/reclaimed_millicpu": None, RECLAIMED_MEMORY: None}
        assert server.written == [("PATCH", NODE, {"status": {"capacity": nothing, "allocatable": nothing}})]


async def test_without_evaluated_cycles_extended_resources_are_not_restored() -> None:
    server = Server()
    async with client_of(server.answer) as client:
        writer, now_s = ExtendedResources(client, "n1"), time.monotonic()
        writer.publish(quiet())
        for look in range(60):
            await writer.sync(now_s + 5 * look)
        assert len(server.written) == 2, "at once and after half a minute, and not after a minute without a round"
        writer.publish(quiet())
        await writer.sync(now_s + 300)
        assert len(server.written) == 3
        blind = quiet()
        unlisted = (ComponentHealth(name="pods", ok=False, error="refused", remedy=""),)
        blind = msgspec.structs.replace(blind, snapshot=msgspec.structs.replace(blind.snapshot, sources=unlisted))
        for look in range(60):
            writer.publish(quiet(None) if look % 2 else blind)
            await writer.sync(now_s + 300 + 5 * look)
        assert len(server.written) == 4, "nor after a minute of rounds that judge nothing, or see no pods"


async def test_a_dry_run_takes_over_no_field() -> None:
    server = Server()
    server.held.append(("katalyst-agent", ".status.topologyPolicy"))
    async with client_of(server.answer) as client:
        writer, now_s = CnrWriter(client, "n1", metrics=False, reports_reclaimable=False), time.monotonic()
        writer.publish(quiet())
        await writer.sync(now_s)
        assert (server.written, server.held, writer.problem()) == (
            [],
            [("katalyst-agent", ".status.topologyPolicy")],
            None,
        )
        server.held.clear()
        await writer.sync(now_s + 500)
        assert server.paths() == ["spec", "/status"]


async def test_extended_resources_are_removed_at_shutdown(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    async with client_of(server.answer) as client:
        writer = ExtendedResources(client, "n1")
        await writer.withdraw()
        assert server.written == [], "nothing was written, so nothing is removed"
        writer.publish(quiet())
        await writer.sync(time.monotonic())
        await writer.withdraw()
        nothing = {"resource.katalyst.kubewharf.io/reclaimed_millicpu": None, RECLAIMED_MEMORY: None}
        assert server.written[-1] == ("PATCH", NODE, {"status": {"capacity": nothing, "allocatable": nothing}})
        server.status = 500
        await writer.sync(time.monotonic() + 100)
        writer._written = {"x": "1"}
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


def test_an_event_ends_with_what_was_held_against_what_since_when_and_whose_cgroup_it_is() -> None:
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


async def test_events_of_a_victim_that_is_long_chosen_have_its_numbers_and_come_within_the_rate() -> None:
    server = Server()
    async with client_of(server.answer) as client:
        writer, now_s = EvictionEventWriter(client, "n1"), time.monotonic()
        writer.publish(quiet(evictions=EvictionResult(victims=(VICTIM,))))
        writer.publish(quiet(kills=(kill(), kill(EvictionEventReason.SUCCEEDED))))
        await writer.sync(now_s)
        assert [body["reason"] for _, _, body in server.written] == ["EvictCreated", "EvictSucceeded"]
        assert all("200.0 MiB" in body["message"] for _, _, body in server.written)
        writer.publish(quiet(kills=tuple(kill(name=f"p{i}") for i in range(100))))
        await writer.sync(now_s)
        assert len(server.written) == 25, "a burst"
        await writer.sync(now_s + 10)
        assert len(server.written) == 35, "and one a second"


async def test_refused_events_are_bounded_and_counted() -> None:
    server = Server()
    server.status = 500
    async with client_of(server.answer) as client:
        writer, now_s = EvictionEventWriter(client, "n1"), time.monotonic()
        writer.publish(quiet(kills=tuple(kill(name=f"p{i}") for i in range(MAX_QUEUED_EVENTS + 7))))
        assert writer.lost_events == 7
        await writer.sync(now_s)
        assert writer.problem() is not None
        assert writer.lost_events == 32, "25 were refused, and would be refused again"

"""What reaches the API server, over a real socket: only what changed, never faster than the bound, and again after trouble."""

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
from agent.reporter.cnr_writer import POLL_INTERVAL_S, CnrWriter
from agent.reporter.events import MAX_QUEUED_EVENTS, EvictionEventWriter, build_event
from agent.reporter.extended_resources import ExtendedResources
from api.advice import Headroom
from api.decision import Cycle
from api.eviction import EvictionEvent, EvictionEventReason, EvictionResult, EvictionVictim
from api.knobs import Reason
from api.node_resources import ObjectSection, ReportedField
from api.pod import RECLAIMED_MEMORY
from api.snapshot import ComponentHealth
from tests.agent.reporter.test_cnr import ADVERTISED, BATCH, LIFECYCLE, OURS, finished
from tests.kube.test_client import asking, status_response

CNR = "/apis/node.katalyst.kubewharf.io/v1alpha1/customnoderesources/n1"
NODE = "/api/v1/nodes/n1/status"
GIB = 1 << 30


class Server:
    """Plays an API server and remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, Any]] = []
        self.taints: list[Any] = []
        self.status = 200
        self.refuse: dict[str, int] = {}
        self.invalid = b"\0"
        """What it refuses to have in an object."""
        self.held: list[tuple[str, str]] = []
        """Fields of others, which only a forced apply changes: manager and field."""

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
                {"reason": "FieldManagerConflict", "message": f'conflict with "{who}" using v1alpha1', "field": field}
                for who, field in self.held
            ]
            said = {"kind": "Status", "reason": "Conflict", "message": "m", "code": 409, "details": {"causes": causes}}
            return status_response(409, msgspec.json.encode(said).decode())
        if request.query.get("force") == "true":
            self.held.clear()
        if request.method != "GET":
            self.told.append((request.method, request.path, msgspec.json.decode(body)))
        if request.path == CNR and request.method == "PATCH":
            kind = request.headers["Content-Type"]
            assert kind == ("application/merge-patch+json" if b'"taints"' in body else "application/apply-patch+yaml")
            if "apply" in kind:
                assert request.query["fieldManager"] == "dioptase-agent"
        whole = {"metadata": {"name": "n1", "resourceVersion": "7"}, "spec": {"taints": self.taints}}
        return status_response(200, msgspec.json.encode(whole).decode())

    def paths(self) -> list[str]:
        """What was written since the last time."""
        found = [path.removeprefix(CNR) or "spec" for _, path, _ in self.told]
        self.told.clear()
        return found


@asynccontextmanager
async def writing(server: Server, *, metrics: bool = False) -> AsyncIterator[tuple[CnrWriter, float]]:
    async with asking(server.answer) as client:
        yield CnrWriter(client, "n1", metrics=metrics), time.monotonic()


def quiet(reported_headroom: Headroom | None = ADVERTISED, **changes: Any) -> Cycle:
    return finished(reported_headroom, **{"evictions": None, **changes})


def lent(cores: float) -> Headroom:
    return msgspec.structs.replace(ADVERTISED, cores=cores)


async def test_only_what_changed_is_written() -> None:
    server = Server()
    async with writing(server) as (writer, now_s):
        await writer.look(now_s)
        assert server.told == [], "there was no round yet"
        writer.publish(quiet())
        await writer.look(now_s)
        assert [body.get("apiVersion") for _, _, body in server.told] == ["node.katalyst.kubewharf.io/v1alpha1"] * 2
        assert server.paths() == ["spec", "/status"]
        writer.publish(quiet())
        await writer.look(now_s + 60)
        assert server.paths() == []
        writer.publish(quiet(lent(3.0)))
        await writer.look(now_s + 120)
        assert (
            server.told[0][2]["status"]["resources"]["allocatable"]["resource.katalyst.kubewharf.io/reclaimed_millicpu"]
            == "3000"
        )
        assert server.paths() == ["/status"]
        assert (writer.problem(), writer.writes) == (None, 3)


async def test_everything_is_written_again_now_and_then_for_somebody_may_have_changed_it() -> None:
    server = Server()
    async with writing(server) as (writer, now_s):
        writer.publish(quiet())
        await writer.look(now_s)
        server.paths()
        await writer.look(now_s + 299)
        assert server.paths() == []
        await writer.look(now_s + 451)
        assert server.paths() == ["spec", "/status"]


async def test_a_node_where_everything_changes_all_the_time_is_written_within_the_rate() -> None:
    server = Server()
    async with writing(server) as (writer, now_s):
        for second in range(100):
            writer.publish(quiet(lent(second)))
            await writer.look(now_s + second)
    # Five at once, and one every five seconds; one of the tokens was for looking at the taints.
    assert 15 <= len(server.told) <= 25


async def test_what_is_used_is_written_once_a_minute() -> None:
    server = Server()
    async with writing(server, metrics=True) as (writer, now_s):
        for second in range(0, 125, 5):
            writer.publish(quiet())
            await writer.look(now_s + second)
        assert [path for path in server.paths() if path == "/status"] == ["/status"] * 3


async def test_taints_are_ours_alone_and_swapped_by_version() -> None:
    server = Server()
    server.taints = [LIFECYCLE]
    async with writing(server) as (writer, now_s):
        writer.publish(finished())
        await writer.look(now_s)
        body = server.told[1][2]
        pressure = {**OURS, "key": "node.katalyst.kubewharf.io/MemoryPressure"}
        assert body == {"metadata": {"resourceVersion": "7"}, "spec": {"taints": [LIFECYCLE, pressure]}}
        server.paths()
        server.taints = [LIFECYCLE, pressure]
        writer.publish(quiet())
        await writer.look(now_s + 60)
        assert [body["spec"]["taints"] for _, _, body in server.told] == [[LIFECYCLE]]


async def test_while_the_server_is_gone_nothing_is_held_up_and_what_is_so_then_is_written_after() -> None:
    server = Server()
    server.status = 503
    async with writing(server) as (writer, now_s):
        for second in range(0, 300, 10):
            began = time.monotonic()
            writer.publish(quiet(lent(second)))
            assert time.monotonic() - began < 1
            await writer.look(now_s + second)
        problem = writer.problem()
        assert problem is not None
        assert "CustomNodeResource n1 cannot be written: 503" in problem.reason
        server.status = 200
        await writer.look(now_s + 600)
        assert writer.problem() is None
        assert (
            server.told[-1][2]["status"]["resources"]["capacity"]["resource.katalyst.kubewharf.io/reclaimed_millicpu"]
            == "290000"
        )
        assert server.paths() == ["spec", "/status"], "once, not thirty times"


async def test_an_object_that_was_deleted_is_made_anew() -> None:
    server = Server()
    async with writing(server) as (writer, now_s):
        writer.publish(quiet())
        await writer.look(now_s)
        server.paths()
        server.refuse[f"{CNR}/status"] = 404
        writer.publish(quiet(lent(1.0)))
        await writer.look(now_s + 30)
        problem = writer.problem()
        assert problem is not None
        assert problem.remedy.startswith("install the definition")
        server.refuse.clear()
        await writer.look(now_s + 60)
        assert server.paths() == ["spec", "/status"]


async def test_who_may_not_write_is_told_which_right_is_missing() -> None:
    server = Server()
    server.refuse[CNR] = 403
    async with writing(server) as (writer, now_s):
        writer.publish(quiet())
        await writer.look(now_s)
        problem = writer.problem()
        assert problem is not None
        assert problem.remedy.startswith("give the agent's role get, create and patch of customnoderesources")


async def test_whose_field_is_taken_over_is_told_until_nobody_claims_it_any_more() -> None:
    server = Server()
    server.held = [("kubectl-edit", ".status.topologyPolicy")]
    async with writing(server) as (writer, now_s):
        writer.publish(quiet())
        await writer.look(now_s)
        assert server.paths() == ["spec", "/status"]
        problem = writer.problem()
        assert problem is not None
        assert problem.reason.endswith("and it took that over: .status.topologyPolicy by kubectl-edit")
        await writer.look(now_s + 60)
        assert writer.problem() is not None, "nothing was written since"
        await writer.look(now_s + 451)
        assert (server.paths(), writer.problem()) == (["spec", "/status"], None)
        server.held = [(f"m{number}", f".f{number}") for number in range(5)]
        await writer.look(now_s + 1000)
        problem = writer.problem()
        assert problem is not None
        assert problem.reason.endswith(": .f0 by m0, .f1 by m1, .f2 by m2 and 2 more")


def told_by(name: str, value: Any, part: ObjectSection = ObjectSection.SPEC) -> ReportedField:
    return ReportedField(
        plugin="p",
        group="node.katalyst.kubewharf.io",
        version="v1alpha1",
        kind="CustomNodeResource",
        part=part,
        name=name,
        value=msgspec.Raw(msgspec.json.encode(value)),
    )


async def test_what_plugins_say_goes_along_and_goes_away_with_them() -> None:
    server, fields = Server(), [told_by("NodeResourceProperties", [{"propertyName": "rack"}])]
    async with asking(server.answer) as client:
        writer = CnrWriter(client, "n1", metrics=False, beside=lambda: CnrInputs(fields=tuple(fields)))
        now_s = time.monotonic()
        writer.publish(quiet())
        await writer.look(now_s)
        assert server.told[0][2]["spec"]["nodeResourceProperties"][-1] == {"propertyName": "rack"}
        server.paths()
        fields.append(told_by("Nonsense", 1))
        await writer.look(now_s + 10)
        problem = writer.problem()
        assert problem is not None
        assert problem.reason.startswith("reporter plugin p: spec Nonsense is no field")
        assert server.paths() == []
        fields.clear()
        await writer.look(now_s + 20)
        names = [one["propertyName"] for one in server.told[0][2]["spec"]["nodeResourceProperties"]]
        assert "rack" not in names
        assert (server.paths(), writer.problem()) == (["spec"], None)


async def test_taints_of_plugins_go_when_they_are_not_said_any_more_and_those_of_others_stay() -> None:
    taint = {"key": "x.io/a", "effect": "NoSchedule", "qosLevel": "reclaimed_cores"}
    server, fields = Server(), [told_by("Taints", [taint])]
    server.taints = [LIFECYCLE]
    async with asking(server.answer) as client:
        writer = CnrWriter(client, "n1", metrics=False, beside=lambda: CnrInputs(fields=tuple(fields)))
        now_s = time.monotonic()
        writer.publish(quiet())
        await writer.look(now_s)
        assert server.told[1][2]["spec"]["taints"] == [LIFECYCLE, taint]
        server.taints = [LIFECYCLE, taint]
        server.paths()
        fields.clear()
        await writer.look(now_s + 60)
        assert [body["spec"]["taints"] for _, _, body in server.told] == [[LIFECYCLE]]


async def test_what_the_api_server_refuses_of_plugins_keeps_nothing_of_ours_back() -> None:
    server, fields = Server(), [told_by("NodeResourceProperties", [{"propertyName": "spoiled"}])]
    server.invalid = b"spoiled"
    async with asking(server.answer) as client:
        writer = CnrWriter(client, "n1", metrics=False, beside=lambda: CnrInputs(fields=tuple(fields)))
        now_s = time.monotonic()
        writer.publish(quiet())
        await writer.look(now_s)
        await writer.look(now_s + 5)
        assert server.paths() == ["spec", "/status"]
        problem = writer.problem()
        assert problem is not None
        assert problem.reason == (
            "the API server refuses what plugins say, which is left out until they say something else: no"
        )
        fields[:] = [told_by("NodeResourceProperties", [{"propertyName": "mended"}])]
        await writer.look(now_s + 10)
        assert (server.paths(), writer.problem()) == (["spec"], None)


async def test_who_has_something_new_to_say_wakes_the_writer() -> None:
    server = Server()
    async with writing(server) as (writer, _now_s):
        writer.publish(quiet())
        began, run = time.monotonic(), asyncio.create_task(writer.run())
        writer.wake()
        while not server.told:
            await asyncio.sleep(0.01)
        assert time.monotonic() - began < POLL_INTERVAL_S
        run.cancel()


async def test_a_bug_in_what_is_reported_is_seen_and_ends_nothing(monkeypatch: Any) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("agent.reporter.cnr_writer.build_cnr_report", broken)
    async with writing(Server()) as (writer, now_s):
        writer.publish(quiet())
        await writer.look(now_s)
        problem = writer.problem()
        assert problem is not None
        assert "a bug" in problem.reason


async def test_extended_resources_are_written_again_for_the_kubelet_may_have_set_them_to_nothing() -> None:
    server = Server()
    async with asking(server.answer) as client:
        writer, now_s = ExtendedResources(client, "n1"), time.monotonic()
        writer.publish(quiet(None))
        await writer.look(now_s)
        assert server.told == [], "what an agent before this one said stands until more is known"
        writer.publish(quiet())
        await writer.look(now_s)
        amounts = {
            "resource.katalyst.kubewharf.io/reclaimed_millicpu": "5123",
            "resource.katalyst.kubewharf.io/reclaimed_memory": str(10 * GIB),
        }
        assert server.told == [("PATCH", NODE, {"status": {"capacity": amounts, "allocatable": amounts}})]
        await writer.look(now_s + 29)
        assert len(server.told) == 1
        await writer.look(now_s + 30)
        assert len(server.told) == 2
        writer.publish(quiet(lent(0.0)))
        await writer.look(now_s + 31)
        assert server.told[-1][2]["status"]["capacity"]["resource.katalyst.kubewharf.io/reclaimed_millicpu"] == "0"
        server.refuse[NODE] = 403
        await writer.look(now_s + 90)
        problem = writer.problem()
        assert problem is not None
        assert "--set agent.extendedResources=true" in problem.remedy
        assert "report.extendedResources: false" in problem.remedy


async def test_a_dry_run_takes_back_what_the_agent_before_it_promised_on_the_node() -> None:
    server = Server()
    async with asking(server.answer) as client:
        writer, now_s = ExtendedResources(client, "n1", lends=False), time.monotonic()
        await writer.look(now_s)
        assert server.told == []
        writer.publish(quiet())
        await writer.look(now_s)
        nothing = {"resource.katalyst.kubewharf.io/reclaimed_millicpu": None, RECLAIMED_MEMORY: None}
        assert server.told == [("PATCH", NODE, {"status": {"capacity": nothing, "allocatable": nothing}})]


async def test_an_agent_that_judges_nothing_any_more_promises_nothing_anew() -> None:
    server = Server()
    async with asking(server.answer) as client:
        writer, now_s = ExtendedResources(client, "n1"), time.monotonic()
        writer.publish(quiet())
        for look in range(60):
            await writer.look(now_s + 5 * look)
        assert len(server.told) == 2, "at once and after half a minute, and not after a minute without a round"
        writer.publish(quiet())
        await writer.look(now_s + 300)
        assert len(server.told) == 3
        blind = quiet()
        unlisted = (ComponentHealth(name="pods", ok=False, error="refused", remedy=""),)
        blind = msgspec.structs.replace(blind, snapshot=msgspec.structs.replace(blind.snapshot, sources=unlisted))
        for look in range(60):
            writer.publish(quiet(None) if look % 2 else blind)
            await writer.look(now_s + 300 + 5 * look)
        assert len(server.told) == 4, "nor after a minute of rounds that judge nothing, or see no pods"


async def test_in_a_dry_run_what_others_say_stays_theirs() -> None:
    server = Server()
    server.held.append(("katalyst-agent", ".status.topologyPolicy"))
    async with asking(server.answer) as client:
        writer, now_s = CnrWriter(client, "n1", metrics=False, lends=False), time.monotonic()
        writer.publish(quiet())
        await writer.look(now_s)
        assert (server.told, server.held, writer.problem()) == (
            [],
            [("katalyst-agent", ".status.topologyPolicy")],
            None,
        )
        server.held.clear()
        await writer.look(now_s + 500)
        assert server.paths() == ["spec", "/status"]


async def test_who_ends_takes_what_was_lent_away_from_the_node(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    async with asking(server.answer) as client:
        writer = ExtendedResources(client, "n1")
        await writer.withdraw()
        assert server.told == [], "nothing was written, so nothing is taken away"
        writer.publish(quiet())
        await writer.look(time.monotonic())
        await writer.withdraw()
        nothing = {"resource.katalyst.kubewharf.io/reclaimed_millicpu": None, RECLAIMED_MEMORY: None}
        assert server.told[-1] == ("PATCH", NODE, {"status": {"capacity": nothing, "allocatable": nothing}})
        server.status = 500
        await writer.look(time.monotonic() + 100)
        writer._written = {"x": "1"}
        await writer.withdraw()
        assert "goes on to promise what was lent: 500" in caplog.text


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
    return EvictionEvent(pod=f"shop/{name}", reason=reason, message="asked to leave within 1 s", at_ns=0)


def test_an_event_names_the_pod_the_reason_and_the_numbers() -> None:
    made = build_event(kill(EvictionEventReason.EXCEEDED), BATCH, VICTIM, "n1", 1_767_225_600_000_000_000)
    assert (made["reason"], made["type"], made["action"]) == ("EvictExceededGracePeriod", "Warning", "Evicting")
    assert made["involvedObject"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "namespace": "shop",
        "name": "batch",
        "uid": "uid-batch",
    }
    assert made["message"] == (
        "asked to leave within 1 s (rss-overuse-eviction-plugin: Resident memory is 200.0 MiB, above 1.05 times the 100.0 MiB)"
    )
    assert (made["firstTimestamp"], made["eventTime"]) == ("2026-01-01T00:00:00Z", "2026-01-01T00:00:00.000000Z")
    assert made["metadata"] == {"generateName": "batch.", "namespace": "shop"}
    assert "uid" not in build_event(kill(), None, None, "n1", 0)["involvedObject"]
    long = build_event(msgspec.structs.replace(kill(), message="x" * 5000), None, None, "n1", 0)
    assert (len(long["message"]), len(made["source"])) == (1024, 2)


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
    made = build_event(kill(), BATCH, numbers, "n1", *at)
    assert made["message"].endswith(f"above 1.05 times the 100.0 MiB) {ends}")
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
    async with asking(server.answer) as client:
        writer, now_s = EvictionEventWriter(client, "n1"), time.monotonic()
        writer.publish(quiet(evictions=EvictionResult(victims=(VICTIM,))))
        writer.publish(quiet(kills=(kill(), kill(EvictionEventReason.SUCCEEDED))))
        await writer.look(now_s)
        assert [body["reason"] for _, _, body in server.told] == ["EvictCreated", "EvictSucceeded"]
        assert all("200.0 MiB" in body["message"] for _, _, body in server.told)
        writer.publish(quiet(kills=tuple(kill(name=f"p{i}") for i in range(100))))
        await writer.look(now_s)
        assert len(server.told) == 25, "a burst"
        await writer.look(now_s + 10)
        assert len(server.told) == 35, "and one a second"


async def test_events_that_nobody_takes_are_bounded_and_counted() -> None:
    server = Server()
    server.status = 500
    async with asking(server.answer) as client:
        writer, now_s = EvictionEventWriter(client, "n1"), time.monotonic()
        writer.publish(quiet(kills=tuple(kill(name=f"p{i}") for i in range(MAX_QUEUED_EVENTS + 7))))
        assert writer.lost_events == 7
        await writer.look(now_s)
        assert writer.problem() is not None
        assert writer.lost_events == 32, "25 were refused, and would be refused again"

"""Eviction records: disruption budgets from an API server, and evictions counted by workload."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from aiohttp import web

from agent.eviction import eviction_records
from agent.eviction.eviction_inputs import EvictionBucket, PodEvictionRecord
from agent.eviction.eviction_records import EvictionRecords
from agent.sensors.pods.pod_join import KubeletPodList, decode_pod_list
from api.eviction import EvictionEvent, EvictionEventReason, EvictionResult, EvictionVictim
from api.knobs import Reason
from api.pod import Pod
from api.qos import QoSLevel
from tests.builders.api_server import FakeApiServer
from tests.builders.pods import pod
from tests.builders.snapshots import cycle, snapshot

BUDGETS = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
WEB = pod("web", labels={"app": "web", "tier": "front"})
WORKLOAD = "default/Deployment/web"
TEN_O_CLOCK_S = 36_000.0


def budget(name: str, spec: Mapping[str, Any], allowed: int = 1) -> dict[str, Any]:
    """A budget of ten pods, of which nine are healthy and eight must be."""
    status = {"disruptionsAllowed": allowed, "currentHealthy": 9, "desiredHealthy": 8, "expectedPods": 10}
    return {"metadata": {"name": name, "namespace": "default"}, "spec": spec, "status": status}


def selector(*, labels: Mapping[str, str] | None = None, **expression: Any) -> dict[str, Any]:
    return {"selector": {"matchLabels": labels or {}, "matchExpressions": [expression] if expression else []}}


async def load(*budgets: Mapping[str, Any], pods: tuple[Pod, ...] = (WEB,)) -> Mapping[str, PodEvictionRecord]:
    server = FakeApiServer({f"{BUDGETS}/{each['metadata']['name']}": each for each in budgets})
    async with server.client() as client:
        return await EvictionRecords(client, lambda _uid: "", lambda: False).load(pods)


@pytest.mark.parametrize(
    ("spec", "selected"),
    [
        (selector(labels={"app": "web"}), True),
        (selector(labels={"app": "web", "tier": "back"}), False),
        (selector(), True),
        ({}, False),
        (selector(key="tier", operator="In", values=["front", "back"]), True),
        (selector(key="tier", operator="NotIn", values=["front"]), False),
        (selector(key="zone", operator="NotIn", values=["a"]), True),
        (selector(key="app", operator="Exists"), True),
        (selector(key="app", operator="DoesNotExist"), False),
        (selector(labels={"app": "web"}, key="zone", operator="Exists"), False),
    ],
)
async def test_a_budget_selects_pods_by_its_label_selector(spec: dict[str, Any], selected: bool) -> None:
    (record,) = (await load(budget("b", spec))).values()
    assert (record.has_budget, record.expected_pods) == (selected, 10 if selected else 0)


async def test_the_record_has_the_status_of_the_budget_that_allows_fewest_disruptions() -> None:
    records = await load(budget("a", selector(), allowed=3), budget("b", selector(), allowed=0))
    assert records == {
        WEB.uid: PodEvictionRecord(
            has_budget=True, disruptions_allowed=0, current_healthy=9, desired_healthy=8, expected_pods=10
        )
    }


async def test_budgets_are_listed_once_per_namespace_within_five_seconds() -> None:
    server, now = FakeApiServer({f"{BUDGETS}/b": budget("b", selector())}), [0.0]
    async with server.client() as client:
        records = EvictionRecords(client, lambda _uid: "", lambda: False, lambda: now[0])
        for now[0] in (0.0, 4.9, 5.0):
            assert len(await records.load((WEB, pod("db")))) == 2
    assert [request.path for request in server.requests] == [BUDGETS, BUDGETS]


async def test_without_the_right_to_list_budgets_a_pod_has_no_record() -> None:
    server = FakeApiServer({f"{BUDGETS}/b": budget("b", selector())})
    server.refuse[BUDGETS] = 403
    async with server.client() as client:
        records = EvictionRecords(client, lambda _uid: "", lambda: False)
        assert await records.load((WEB,)) == {}
        problem = records.problem()
        assert problem is not None
        assert "list of poddisruptionbudgets.policy" in problem.remedy
        del server.refuse[BUDGETS]
        assert (await records.load((WEB,)))[WEB.uid].has_budget
        assert records.problem() is None


async def test_a_list_that_hangs_ends_after_a_second_and_its_problem_after_two_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An external plugin has five seconds for all its calls."""
    monkeypatch.setattr(eviction_records, "LIST_TIMEOUT_S", 0.05)

    async def hang(_request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise AssertionError

    server, now = FakeApiServer(), [0.0]
    server.handlers[BUDGETS] = hang
    async with server.client() as client:
        records = EvictionRecords(client, lambda _uid: "", lambda: False, lambda: now[0])
        assert await records.load((WEB,)) == {}
        problem = records.problem()
        assert problem is not None
        assert problem.reason.endswith("the API server did not answer within 0.05 s")
        assert await records.load(()) == {}
        assert records.problem() is not None, "nothing was listed"
        now[0] = 121.0
        assert records.problem() is None


async def test_evictions_are_counted_by_workload_in_buckets_of_ten_minutes() -> None:
    """The pod may have left the snapshot when its eviction is reported; failed evictions and dry runs do not count."""
    created, failed = EvictionEventReason.CREATED, EvictionEventReason.FAILED
    server, wall_s = FakeApiServer({f"{BUDGETS}/b": budget("b", selector())}), [TEN_O_CLOCK_S]
    async with server.client() as client:
        records = EvictionRecords(client, lambda _uid: WORKLOAD, lambda: False, wall_clock=lambda: wall_s[0])
        reported: list[tuple[int, bool, tuple[EvictionEventReason, ...]]] = [
            (0, False, ()), (10, True, (failed,)), (20, False, (created,)), (30, True, ()), (40, True, (created,)),
            (690, False, ()), (700, True, (created, EvictionEventReason.STOPPED)),
        ]  # fmt: skip
        for after_s, listed, reasons in reported:
            victim = EvictionVictim(
                pod=WEB.key, uid=WEB.uid, plugin="p", scope="", forced=True, grace_s=None, dry_run=after_s == 30,
                reason=Reason(rule="r", text="t"),
            )  # fmt: skip
            kills = tuple(EvictionEvent(pod=WEB.key, reason=each, message="", at_ns=0) for each in reasons)
            now = snapshot(TEN_O_CLOCK_S + after_s, (WEB,) if listed else ())
            records.publish(cycle(now, kills=kills, evictions=EvictionResult(victims=(victim,) if not reasons else ())))
        wall_s[0] = TEN_O_CLOCK_S + 700
        buckets = (await records.load((WEB,)))[WEB.uid].buckets
        assert (len(buckets), buckets[0].time_s, buckets[0].count) == (13, 36_000 + 600 - 7200, 0)
        assert buckets[-2:] == (
            EvictionBucket(time_s=36_000, duration_s=600, count=1),
            EvictionBucket(time_s=36_600, duration_s=600, count=2),
        )


@pytest.mark.parametrize(
    ("kind", "name", "template_hash", "workload"),
    [
        ("ReplicaSet", "web-7d9f8", "7d9f8", WORKLOAD),
        ("ReplicaSet", "web", "", "default/ReplicaSet/web"),
        ("StatefulSet", "db", "", "default/StatefulSet/db"),
        (None, "", "", ""),
    ],
)
def test_the_workload_is_the_controller_of_the_pod(
    kind: str | None, name: str, template_hash: str, workload: str
) -> None:
    owners = [{"kind": "Node", "name": "n1"}, *([{"kind": kind, "name": name, "controller": True}] if kind else [])]
    labels = {"pod-template-hash": template_hash} if template_hash else {}
    metadata = {"name": "web-0", "uid": "u1", "labels": labels, "ownerReferences": owners}
    text = msgspec.json.encode({"items": [{"metadata": metadata, "spec": {"containers": [{"name": "c"}]}}]})
    assert decode_pod_list(text, KubeletPodList()).items["u1"].pod.workload == workload


@pytest.mark.parametrize("keep", [True, False])
def test_the_pods_text_is_kept_if_plugins_need_it(keep: bool) -> None:
    pod_text = (
        b'{"metadata": {"name": "web-0", "uid": "u1"}, "spec": {"nodeName": "n1", "containers": [{"name": "c"}]}}'
    )
    listing = decode_pod_list(b'{"items": [' + pod_text + b"]}", KubeletPodList(), keep_manifests=keep)
    assert listing.items["u1"].manifest == (pod_text if keep else b"")


async def test_records_of_shared_pods_are_loaded_while_a_built_in_plugin_needs_them() -> None:
    server = FakeApiServer({f"{BUDGETS}/b": budget("b", selector())})
    async with server.client() as client:
        records = EvictionRecords(client, lambda _uid: "", lambda: True)
        records.publish(cycle(snapshot(1.0, (WEB, pod("batch", QoSLevel.RECLAIMED)))))
        await records.refresh()
    assert records.latest().keys() == {WEB.uid}

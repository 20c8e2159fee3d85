"""The controller as a process: settings, options, HTTP endpoints, and errors without a cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import msgspec
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from api.metrics import CONTROLLER_METRICS_BY_NAME
from cli.controller import controller
from common.backoff import Backoff
from common.http.listener import HttpListener
from controller.endpoints import build_application
from controller.kinds import NODES, ControllerNode
from controller.metrics import ControllerExposition
from controller.reconcile import MetricValues, reconcile_queue, run_all
from controller.serving import parse_settings
from controller.settings import ControllerConfig
from kube.client import KubeClient
from kube.credentials import ApiAccess, ApiCredentials
from kube.errors import ApiError, ApiUnreachable
from kube.informer import Informer
from kube.objects import KubeMetadata
from kube.work_queue import WorkQueue


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("health: {taintAfter: 5}", "health: Object contains unknown field `taintAfter`, did you mean `taintAfterS`?"),
        ("controllers: [kcc, spd]", "controllers[1]: Invalid enum value 'spd', choose from kcc, lifecycle"),
        ("health: {taintPerS: 0}", "health.taintPerS: Expected `float` > 0.0"),
        ("health: {disruptionThreshold: 20}", "health.disruptionThreshold: Expected `float` <= 1.0"),
        (
            "health: {taintAfterS: 60, evictAfterS: 30}",
            "health: evictAfterS is 30 and taintAfterS 60: pods evicted before the taint would come back; set",
        ),
        ("health: {nodeSelector: a>b}", "health: nodeSelector: 'a>b' is no part of a selector"),
        ("health: {agents: {mine: 'a b'}}", "health: agents.mine: 'a b' is no part of a selector"),
        ("health: {agents: {mine: ''}}", "health: agents.mine: it is empty and would match every pod"),
        ("a: 1\na: 2", "line 2: key 'a' occurs twice: remove one"),
        ("- 1", "top level: Expected `object`, got `array`"),
    ],
)  # fmt: skip
def test_invalid_settings_are_rejected_by_field(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_settings(text, ControllerConfig)
    assert str(caught.value).startswith(message)


def test_settings() -> None:
    assert parse_settings("", ControllerConfig) == ControllerConfig()
    read = parse_settings(
        "controllers: [kcc]\nhealth: {dryRun: true, agents: {malachite: app=malachite}}",
        ControllerConfig,
    )
    assert (read.controllers, read.health.dry_run, read.health.agents) == (
        ("kcc",),
        True,
        {"malachite": "app=malachite"},
    )
    assert (read.health.taint_after_s, read.health.evict_after_s) == (600, 1200)


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--config", "missing.yaml"], 2, "missing.yaml: cannot be read: No such file or directory"),
        (["--config", "bad.yaml"], 2, "bad.yaml: health.taintPerS: Expected `float`, got `str`"),
        (["--listen", "9316"], 2, "--listen"),
        ([], 1, "kubeconfig: current-context: is not set"),
    ],
)
def test_the_command_reports_invalid_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], status: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text("health: {taintPerS: fast}")
    (tmp_path / "kubeconfig").write_text("{}")
    result = CliRunner().invoke(controller, options, env={"KUBECONFIG": str(tmp_path / "kubeconfig")})
    assert result.exit_code == status
    assert message in result.output


async def test_a_histogram_has_cumulative_buckets_and_the_sum() -> None:
    name = "dioptase_scheduler_request_duration_seconds"
    values = MetricValues()
    for seconds in (0.001, 0.0015, 0.03, 40.0):
        values.observe(name, seconds, "filter")
    async with KubeClient(ApiAccess("http://127.0.0.1:1", ApiCredentials()), "test") as client:
        for accept in ("", "application/openmetrics-text"):
            text = ControllerExposition(values, client).render(accept, 0)[0].decode()
            samples = {
                (sample.name.removeprefix(name), sample.labels.get("le", "")): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if sample.name.startswith(name)
            }
            counts = {le: value for (suffix, le), value in samples.items() if suffix == "_bucket"}
            assert (counts["0.001"], counts["0.002"], counts["0.02"], counts["0.05"], counts["30.0"]) == (1, 2, 2, 3, 3)
            assert (counts["+Inf"], samples["_count", ""]) == (4, 4)
            assert samples["_sum", ""] == pytest.approx(40.0325)


async def test_health_readiness_and_metrics_over_http() -> None:
    tally = MetricValues()
    tally.count("dioptase_lifecycle_evictions_total", "budget")
    tally.count("dioptase_lifecycle_evictions_total", "budget")
    tally.set("dioptase_kcc_target_nodes", [(("k", "a"), 3), (("k", "b"), 4), (("l", "a"), 5)])
    tally.set("dioptase_kcc_target_nodes", [(("k", "b"), 6)], ("k",))
    async with KubeClient(ApiAccess("http://127.0.0.1:1", ApiCredentials()), "test") as client:
        with pytest.raises(ApiUnreachable):
            await client.get(NODES, "n1")
        exposition = ControllerExposition(tally, client)
        informer = Informer(client, NODES)
        informer.store.put("n1", ControllerNode(metadata=KubeMetadata(name="n1", resource_version="1")))
        queue: WorkQueue[str] = WorkQueue(lambda: 0.0)
        queue.add("n1")
        exposition.watch([informer, informer], {"lifecycle": queue})
        waiting = ["nodes.v1"]
        listener = HttpListener(build_application(exposition, lambda: waiting[0]))
        ((host, port),) = await listener.open("127.0.0.1", 0, "--listen")
        async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
            responses = {}
            for path in ("/healthz", "/readyz", "/metrics"):
                async with session.get(path) as answer:
                    responses[path] = (answer.status, await answer.text())
            waiting[0] = ""
            async with session.get("/readyz") as answer:
                assert answer.status == 200
            async with session.get("/metrics", headers={"Accept": "application/openmetrics-text"}) as answer:
                assert (await answer.text()).endswith("# EOF\n")
        await listener.close()
    assert (responses["/healthz"], responses["/readyz"]) == ((200, "ok\n"), (503, "nodes.v1\n"))
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(responses["/metrics"][1])
        for sample in family.samples
        if sample.name in CONTROLLER_METRICS_BY_NAME
    }
    assert samples == {
        ("dioptase_controller_queue_length", "lifecycle"): 1,
        ("dioptase_controller_api_requests_total", "GET", "nodes.v1", "unreachable"): 1,
        ("dioptase_controller_watched_objects", "nodes.v1"): 2,
        ("dioptase_controller_unreadable_objects", "nodes.v1"): 0,
        ("dioptase_controller_relists_total", "nodes.v1"): 0,
        ("dioptase_kcc_target_nodes", "b", "k"): 6,
        ("dioptase_kcc_target_nodes", "a", "l"): 5,
        ("dioptase_lifecycle_evictions_total", "budget"): 2,
    }


async def test_metrics_need_authorization_and_health_does_not() -> None:
    requests = []

    async def admit(message: str, path: str, connection: str) -> tuple[int, str, str] | None:
        address, _, client_port = connection.rpartition(":")
        assert 0 < int(client_port) < 65536
        requests.append((message, path, address))
        return None if message == "Bearer good" else (401, "unknown token", "send another")

    async with KubeClient(ApiAccess("http://127.0.0.1:1", ApiCredentials()), "test") as client:
        listener = HttpListener(build_application(ControllerExposition(MetricValues(), client), lambda: "", admit))
        ((host, port),) = await listener.open("127.0.0.1", 0, "--listen")
        async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
            async with session.get("/metrics") as answer:
                assert (answer.status, await answer.text()) == (401, "unknown token: send another\n")
                assert answer.headers["WWW-Authenticate"] == 'Bearer realm="dioptase"'
            async with session.get("/metrics", headers={"Authorization": "Bearer good"}) as answer:
                assert answer.status == 200
            for path in ("/healthz", "/readyz"):
                async with session.get(path) as answer:
                    assert answer.status == 200
        await listener.close()
    assert requests == [("", "/metrics", "127.0.0.1"), ("Bearer good", "/metrics", "127.0.0.1")]


async def test_a_key_that_fails_is_retried_and_does_not_end_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    tally, over = MetricValues(), asyncio.Event()
    queue: WorkQueue[str] = WorkQueue(asyncio.get_running_loop().time, backoff=Backoff(first_s=0.001, max_s=0.001))
    looked: list[str] = []

    async def look(key: str) -> None:
        looked.append(key)
        if looked.count(key) > 1:
            over.set()
        elif key == "conflict":
            raise ApiError(409, "Conflict", "the object has been modified")
        elif key == "bug":
            raise ZeroDivisionError

    for key in ("conflict", "bug", "fine"):
        queue.add(key)
    working = asyncio.create_task(reconcile_queue("kcc", queue, look, tally))
    while looked.count("bug") < 2 or looked.count("conflict") < 2:
        over.clear()
        await asyncio.wait_for(over.wait(), 5)
    working.cancel()
    assert sorted(looked) == ["bug", "bug", "conflict", "conflict", "fine"]
    name = "dioptase_controller_reconciles_total"
    assert tally.values(name)["kcc", "retried"] == 1
    assert tally.values(name)["kcc", "failed"] == 1
    assert [record.levelname for record in caplog.records] == ["ERROR"], "a conflict is not worth a line"


def test_rows_are_wellformed() -> None:
    for name, metric in CONTROLLER_METRICS_BY_NAME.items():
        assert (metric.kind == "counter") == name.endswith("_total")
        assert msgspec.structs.replace(metric, help=metric.help.strip()) == metric


async def test_all_requests_are_sent_before_the_first_error_is_raised() -> None:
    written: list[int] = []

    async def write(number: int) -> None:
        if number < 2:
            raise ApiError(422, "Invalid", f"number {number}")
        written.append(number)

    with pytest.raises(ApiError, match="number 0"):
        await run_all(write(number) for number in range(4))
    assert written == [2, 3]

"""Text that a pod, a peer or a client wrote is escaped and bounded wherever it is shown: the places, one by one."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from rich.console import Console

from agent.config.kubelet import KubeletConfig
from agent.eviction.soft_eviction_notifier import SoftEvictionNotifier
from agent.journal.decisions import DecisionJournal
from agent.journal.evictions import EvictionJournal
from agent.journal.log import CycleLog
from agent.journal.stderr import StderrLog
from agent.katalyst.external_evictions import _decode_direct_findings, decode_threshold
from agent.reporter.events import build_event
from agent.sensors.pods.cri_client import join_runtime_lists
from agent.sensors.pods.kubelet_pods import KubeletPodSource
from agent.sensors.pods.pod_join import KubeletPodList, PodJoinContext, decode_pod_list, pod_from_kubelet
from agent.sensors.pods.pod_spec import MAX_PROBLEMS, PodParsingContext
from agent.sensors.snapshot import _annotation_status
from api.annotations import MAX_ANNOTATION_CHARS, PROFILE_KEY
from api.eviction import EvictionEvent, EvictionEventReason, EvictionResult, EvictionVictim
from api.interfaces import Unavailable
from api.knobs import Reason
from api.pod import Pod
from api.proto import cri_runtime_pb2 as cri
from api.proto import eviction_plugin_pb2 as wire
from api.qos import (
    CPU_KEY,
    MAIN_CONTAINER_KEY,
    MEMORY_KEY,
    NETWORK_KEY,
    NUMA_BIND_RESULT_KEY,
    NUMA_IDS_KEY,
    QOS_LEVEL_KEY,
)
from api.snapshot import ComponentHealth
from api.text import MAX_MESSAGE_CHARS, MAX_SENTENCE_CHARS, printable
from cli.tables import check_table
from common.http.request_guard import HttpRefused
from common.log_lines import PrintableFormatter
from exporters.page.web_server import AgentWebServer
from tests.agent.sensors.pods.kubelet_objects import listing, pod
from tests.builders import pods
from tests.builders.four_cpu_node import busy_cycle
from tests.language import PRODUCT, ROOT

HOSTILE = "web\x1b[31m\nERROR forged\r\u202e\x9b2J\x00\x7f\u2028end"
KEYS = (
    QOS_LEVEL_KEY, CPU_KEY, MEMORY_KEY, NETWORK_KEY, NUMA_IDS_KEY, NUMA_BIND_RESULT_KEY, MAIN_CONTAINER_KEY, PROFILE_KEY,
    "koordinator.sh/cpuBurst", "koordinator.sh/memoryQOS", "scheduling.koordinator.sh/resource-spec",
    "scheduling.koordinator.sh/resource-status", "scheduling.koordinator.sh/numa-topology-spec",
    "node.koordinator.sh/extended-resource-spec",
)  # fmt: skip
VALUES = {
    "text": HOSTILE,
    "key": json.dumps({HOSTILE: "1"}),
    "keys": json.dumps({f"{HOSTILE}{number}": "1" for number in range(60)}),
    "value": json.dumps({"policy": HOSTILE, "numa_binding": HOSTILE, "requiredCPUBindPolicy": HOSTILE}),
    "not-text": json.dumps({"numa_binding": [HOSTILE]}),
    "long": HOSTILE * 10_000,
    "long-key": json.dumps({HOSTILE + "k" * 10_000: 1}),
    "deep": '{"policy": ' + "[" * 900 + "]" * 900 + "}",
}


def parse(**changes: Any) -> Pod:
    """Return a pod of the kubelet as the agent reads it."""
    (item,) = decode_pod_list(listing(pod("web", **changes)), KubeletPodList()).items.values()
    return pod_from_kubelet(item.pod, {"main": "/kubepods/web"}, PodParsingContext())


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("key", KEYS)
def test_problems_of_a_pod(key: str, value: str) -> None:
    problems = parse(annotations={key: VALUES[value]}).problems
    assert all(problem.isprintable() and len(problem) <= MAX_SENTENCE_CHARS for problem in problems)
    assert len(problems) <= MAX_PROBLEMS + 1
    if len(VALUES[value]) > MAX_ANNOTATION_CHARS and key not in (QOS_LEVEL_KEY, MAIN_CONTAINER_KEY):
        assert f"has {len(VALUES[value])} characters, more than {MAX_ANNOTATION_CHARS}" in problems[0]


def test_problems_of_labels() -> None:
    labels = {
        "koordinator.sh/qosClass": HOSTILE,
        "koordinator.sh/priority-class": HOSTILE,
        "koordinator.sh/networkQOS": "x",
    }
    problems = parse(labels=labels, priorityClassName=HOSTILE).problems
    assert len(problems) >= 1
    assert all(problem.isprintable() for problem in problems)


@pytest.mark.parametrize("field", ["name", "namespace", "uid", "container"])
def test_names_of_a_pod(field: str) -> None:
    document = pod("web")
    place = document["spec"]["containers"][0] if field == "container" else document["metadata"]
    place["name" if field == "container" else field] = HOSTILE
    result = decode_pod_list(listing(document), KubeletPodList())
    texts = list(result.problems)
    for item in result.items.values():
        with pytest.raises(ValueError, match="is not a name") as refused:
            pod_from_kubelet(item.pod, {}, PodParsingContext())
        texts.append(str(refused.value))
    assert len(texts) == 1
    assert texts[0].isprintable()


def test_names_of_the_runtime_are_left_out() -> None:
    for pod_name, namespace, name in ((HOSTILE, "shop", "main"), ("web", HOSTILE, "main"), ("web", "shop", HOSTILE)):
        metadata = cri.PodSandboxMetadata(name=pod_name, namespace=namespace, uid="uid-web")
        box = cri.PodSandbox(id="box", metadata=metadata)
        container = cri.Container(
            id="a", pod_sandbox_id="box", metadata=cri.ContainerMetadata(name=name), state=cri.CONTAINER_RUNNING
        )
        listed = join_runtime_lists(
            cri.ListPodSandboxResponse(items=[box]), cri.ListContainersResponse(containers=[container])
        )
        assert listed.running == {}


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (lambda text: Unavailable(text, text), lambda error: (error.reason, error.remedy, str(error))),
        (lambda text: HttpRefused(400, text, text).problem, lambda problem: (problem.error, problem.remedy)),
        (lambda text: Reason(rule="rule", text=text), lambda reason: (reason.text,)),
        (
            lambda text: ComponentHealth(name="x", ok=False, error=text, remedy=text),
            lambda health: (health.error, health.remedy),
        ),
        (
            lambda text: EvictionEvent(pod="a/b", reason=EvictionEventReason.FAILED, message=text, at_ns=1),
            lambda event: (event.message,),
        ),
    ],
    ids=["unavailable", "http", "reason", "health", "event"],
)  # fmt: skip
def test_texts_that_are_passed_on(make: Callable[[str], Any], texts: Callable[[Any], tuple[str, ...]]) -> None:
    for given in (HOSTILE, HOSTILE * 10_000, "plain"):
        for text in texts(make(given)):
            assert text.isprintable()
            assert text.startswith("web\\x1b[31m\\nERROR forged\\r\\u202e\\x9b2J") or given == text
            assert len(text) <= MAX_MESSAGE_CHARS


def lines_of(write: Callable[[logging.Logger], None]) -> list[str]:
    """Return what a logger of the agent writes."""
    stream, logger = io.StringIO(), logging.getLogger("dioptase")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PrintableFormatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        write(logger)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return stream.getvalue().splitlines()


def test_lines_of_the_log() -> None:
    health = ComponentHealth(name="pod-annotations", ok=False, error=HOSTILE, remedy=HOSTILE)
    cycle = busy_cycle()
    cycle = msgspec.structs.replace(cycle, snapshot=msgspec.structs.replace(cycle.snapshot, sources=(health,)))

    def write(logger: logging.Logger) -> None:
        CycleLog().publish(cycle)
        logger.warning("pod %s: %s", HOSTILE, HOSTILE * 10_000)
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            logger.exception("bug in %s", HOSTILE)

    lines = lines_of(write)
    assert all(line.isprintable() and len(line) <= MAX_MESSAGE_CHARS for line in lines)
    assert not [line for line in lines if line.startswith(("ERROR forged", "Traceback"))]
    assert [line[:15] for line in lines if line.startswith("ERROR")] == ["ERROR bug in we"]


def test_the_agent_and_the_controller_use_that_formatter() -> None:
    for path in ("cli/agent.py", "cli/controller.py"):
        text = (ROOT / path).read_text()
        assert "write_printable_lines(" in text
        assert "basicConfig" not in text
    assert issubclass(StderrLog, logging.Handler)


def test_the_status_of_pods() -> None:
    (health,) = _annotation_status((parse(annotations={PROFILE_KEY: json.dumps({HOSTILE: 1})}),))
    assert health.error.isprintable()
    assert "Object contains unknown field `web\\x1b[31m\\nERROR forged" in health.error


def test_what_an_eviction_plugin_says(tmp_path: Path) -> None:
    victim_pod = pods.pod("batch")
    answer = wire.GetEvictPodsResponse()
    named = answer.evict_pods.add(reason=HOSTILE * 1000, force_evict=True)
    named.pod.metadata.uid = victim_pod.uid
    met = wire.ThresholdMetResponse(met_type=wire.HARD_MET, eviction_scope=HOSTILE * 100)
    met.condition.met_condition, met.condition.condition_name = True, HOSTILE
    met.condition.effects.append("NoSchedule")
    threshold = decode_threshold("external", met)
    (finding,) = _decode_direct_findings("external", answer, {victim_pod.uid: victim_pod})
    assert threshold.condition is not None
    for text in (threshold.scope, threshold.reason.text, threshold.condition.name, finding.candidates[0].text):
        assert text.isprintable()
        assert len(text) <= 1000
    victim = EvictionVictim(
        pod=victim_pod.key, uid=victim_pod.uid, plugin="external", scope=threshold.scope, forced=True, grace_s=None,
        reason=Reason(rule="x", text=HOSTILE), notify=True, cgroup="/kubepods/batch",
    )  # fmt: skip
    step = EvictionEvent(pod=victim.pod, reason=EvictionEventReason.CREATED, message=HOSTILE, at_ns=1)
    assert build_event(step, victim_pod, victim, "n1", 1)["message"].isprintable()
    journal = EvictionJournal(tmp_path / "evictions.jsonl")
    journal.publish(msgspec.structs.replace(busy_cycle(), evictions=EvictionResult(victims=(victim,)), kills=(step,)))
    journal.close()
    (written,) = tmp_path.glob("evictions.jsonl*")
    lines = written.read_text().splitlines()
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)


def test_the_notice_in_a_pods_folder_is_one_line(tmp_path: Path) -> None:
    victim = EvictionVictim(
        pod="default/batch", uid="u", plugin="external", scope="x", forced=False, grace_s=None, notify=True,
        reason=Reason(rule="x", text=HOSTILE),
    )  # fmt: skip
    notifier = SoftEvictionNotifier(tmp_path)
    notifier.run_cycle((victim,), (), 1)
    (notice,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert len(notice.read_text().splitlines()) == 1
    assert notice.read_text().strip().isprintable()


async def test_answers_of_the_http_server() -> None:
    server = AgentWebServer(journal=DecisionJournal(None), version="1")
    port = await server.start("127.0.0.1", 0)
    server.publish(busy_cycle())
    url = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession() as session:
        for path in ("/%1b%5b31m%0aERROR", "/api/v1/view?%1b%0a=1", "/api/v1/decisions?after=%1b%0a", "/static/%1b%0a"):
            async with session.get(f"{url}{path}") as answer:
                body = json.loads(await answer.text())
                assert answer.status in (400, 404)
                assert all(text.isprintable() for text in body.values())
                assert "\\x1b" in body["error"]
    await server.stop()


def test_cells_of_a_table_in_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=200)
    console.print(check_table(("name", "remedy"), [(False, (printable(HOSTILE), HOSTILE))]))
    assert isinstance(console.file, io.StringIO)
    assert "\x1b" not in console.file.getvalue()
    assert "\u202e" not in console.file.getvalue()


def test_a_bug_while_polling_is_one_printable_reason() -> None:
    """The kubelet's answer can be part of an exception of a bug, and this of the health that every snapshot shows."""

    class Failing:
        url = "https://127.0.0.1:10250/pods"

        async def ask(self) -> bytes:
            raise ValueError(HOSTILE)

    async def poll() -> KubeletPodSource:
        context = PodJoinContext(parsing=PodParsingContext(), exists=lambda _path: False)
        source = KubeletPodSource(Failing(), None, context, KubeletConfig(events=False))  # type: ignore[arg-type]
        task = asyncio.create_task(source.run())
        while source.kubelet.problem() is None:
            await asyncio.sleep(0.001)
        task.cancel()
        return source

    problem = asyncio.run(poll()).kubelet.problem()
    assert problem is not None
    assert problem.reason.startswith("ValueError: web\\x1b[31m\\nERROR forged")


def test_no_module_has_a_formatter_of_its_own() -> None:
    formatters = []
    for package in PRODUCT:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            # The formatter itself, and the exposition's shortest notation of numbers.
            if name.endswith("_pb2.py") or name in ("api/text.py", "exporters/prometheus/exposition.py"):
                continue
            text = path.read_text()
            if not re.search(r"![ars]|(?<!\w)(?:repr|ascii)\(", text):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FormattedValue) and node.conversion != -1:
                    formatters.append(f"{name}:{node.lineno}: {ast.unparse(node.value)} has a conversion")
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("repr", "ascii"):
                    formatters.append(f"{name}:{node.lineno}: {node.func.id}()")
    assert formatters == [], "use api.text.quote or printable"

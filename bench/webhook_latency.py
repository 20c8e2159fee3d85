"""Latency of a pod's review by the webhooks: CPU time of the function, and round trips over TLS as of the API server."""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import ssl
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from api.qos import QOS_LEVEL_KEY
from bench.machine import markdown_table, this_machine
from common.http.listener import HttpListener
from controller.label_selectors import parse_selector
from controller.reconcile import MetricValues
from controller.webhooks.admission_review import ReviewRequest, ReviewResult, decode_review, encode_review
from controller.webhooks.colocation_profiles import PodProfile
from controller.webhooks.openssl import create_authority, create_certificate
from controller.webhooks.pod_mutation import mutate_pod
from controller.webhooks.serving_material import ServingMaterial, serving_context
from controller.webhooks.webhook_server import KEEPALIVE_S, MAX_CONNECTIONS, WebhookApplication

NAME = "dioptase-webhooks.dioptase.svc"
RESULT = Path(__file__).parent / "results/webhook_latency.md"
NAMESPACE_LABELS = {"colocation": "batch"}
PROFILES = tuple(
    PodProfile(
        name=f"profile-{number:03}", namespaces=parse_selector(f"colocation={'batch' if number == 0 else number}")
    )
    for number in range(50)
)


class LatencyRow(msgspec.Struct, frozen=True):
    """Result of one pod: CPU time of one review, and round trips one at a time and eight at a time."""

    pod: str
    body_kib: float
    cpu_us: float
    p50_ms: float
    p99_ms: float
    p99_parallel_ms: float


def a_pod(containers: int, annotations: int) -> dict[str, Any]:
    """Return a pod with so many containers and annotations, as a ReplicaSet creates it."""
    resources = {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}}
    environment = [{"name": f"VARIABLE_{number}", "value": "x" * 40} for number in range(10)]
    return {
        "metadata": {
            "generateName": "batch-5d4f8c7b9-", "labels": {"app": "batch"},
            "annotations": {f"example.com/{number}": "x" * 100 for number in range(annotations)},
        },
        "spec": {
            "schedulerName": "default-scheduler", "priority": 0,
            "containers": [
                {"name": f"container-{number}", "image": "registry/batch:1", "resources": resources, "env": environment}
                for number in range(containers)
            ],
        },
    }  # fmt: skip


PODS: dict[str, dict[str, Any]] = {
    "1 container, becomes reclaimed": a_pod(1, 5),
    "20 containers, becomes reclaimed": a_pod(20, 5),
    "20 containers, 1,000 annotations, becomes reclaimed": a_pod(20, 1000),
    "1 container, states shared_cores": {
        **a_pod(1, 5), "metadata": {"name": "web", "annotations": {QOS_LEVEL_KEY: "shared_cores"}},
    },
}  # fmt: skip


def body_of(pod: dict[str, Any]) -> bytes:
    request = {
        "uid": "705ab4f5-6393-11e8-b7cc-42010a800002", "operation": "CREATE", "namespace": "batch", "object": pod,
        "resource": {"group": "", "version": "v1", "resource": "pods"}, "userInfo": {"username": "system:admin"},
    }  # fmt: skip
    return json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()


def review(request: ReviewRequest) -> ReviewResult:
    return mutate_pod(request, PROFILES, NAMESPACE_LABELS)


def cpu_us(body: bytes, repetitions: int = 2000) -> float:
    """Return the CPU time of decoding, review and encoding in microseconds: the median of 20 groups."""
    groups = []
    for _ in range(20):
        started = time.process_time()
        for _ in range(repetitions // 20):
            request = decode_review(body)
            encode_review(request, review(request))
        groups.append((time.process_time() - started) / (repetitions // 20) * 1e6)
    return statistics.median(groups)


def serve(material: ServingMaterial, ready: Connection) -> None:
    """Serve the webhook in this process until it is ended, and send the port."""

    async def run() -> None:
        application = WebhookApplication({"pod-mutation": review}, MetricValues())
        listener = HttpListener(
            application.build(), application.body_problem, MAX_CONNECTIONS, keepalive_timeout=KEEPALIVE_S
        )
        ((_, port),) = await listener.open("127.0.0.1", 0, "--listen", serving_context(material))
        ready.send(port)
        await asyncio.Event().wait()

    asyncio.run(run())


async def round_trips(session: aiohttp.ClientSession, body: bytes, count: int, parallel: int) -> list[float]:
    """Return the times of so many requests in milliseconds, `parallel` at a time."""
    times: list[float] = []

    async def client() -> None:
        for _ in range(count // parallel):
            started = time.perf_counter()
            async with session.post("/pod-mutation", data=body, headers={"Content-Type": "application/json"}) as answer:
                await answer.read()
                assert answer.status == 200
            times.append((time.perf_counter() - started) * 1e3)

    await asyncio.gather(*(client() for _ in range(parallel)))
    return times


async def measure(
    count: int, make: Callable[..., multiprocessing.Process] = multiprocessing.Process
) -> list[LatencyRow]:
    authority = await create_authority("bench", 1)
    pair = await create_certificate(authority, [NAME], 1)
    material = ServingMaterial((authority.certificate,), authority.key, pair.certificate, pair.key)
    receiver, sender = multiprocessing.Pipe()
    process = make(target=serve, args=(material, sender))
    process.start()
    try:
        port = await asyncio.to_thread(receiver.recv)
        tls = ssl.create_default_context(cadata=authority.certificate)
        tls.check_hostname = False  # it is reached by its address
        async with aiohttp.ClientSession(
            f"https://127.0.0.1:{port}", connector=aiohttp.TCPConnector(ssl=tls)
        ) as session:
            return [await measure_pod(session, pod, body_of(object_), count) for pod, object_ in PODS.items()]
    finally:
        process.terminate()
        process.join()


async def measure_pod(session: aiohttp.ClientSession, pod: str, body: bytes, count: int) -> LatencyRow:
    await round_trips(session, body, 50, 1)
    single = await round_trips(session, body, count, 1)
    parallel = await round_trips(session, body, count, 8)
    return LatencyRow(
        pod=pod,
        body_kib=len(body) / 1024,
        cpu_us=cpu_us(body),
        p50_ms=statistics.median(single),
        p99_ms=statistics.quantiles(single, n=100)[98],
        p99_parallel_ms=statistics.quantiles(parallel, n=100)[98],
    )


def report(rows: Sequence[LatencyRow], machine: str, count: int) -> str:
    heads = ("pod", "body, KiB", "CPU time, µs", "p50, ms", "p99, ms", "p99 of 8 at a time, ms")
    cells = [
        (
            row.pod,
            f"{row.body_kib:.1f}",
            f"{row.cpu_us:.0f}",
            f"{row.p50_ms:.2f}",
            f"{row.p99_ms:.2f}",
            f"{row.p99_parallel_ms:.2f}",
        )
        for row in rows
    ]
    lines = [
        "## Latency of a pod's review",
        "",
        f"{machine}. `python -m bench.webhook_latency --count {count}`: {count} round trips over TLS",
        f"from one process to another, with {len(PROFILES)} colocation profiles. The goal is 5 ms at p99, one at a time.",
        "CPU time is that of decoding, review and encoding.",
        "",
        *markdown_table(heads, cells),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="round trips of each pod")
    count = parser.parse_args().count
    rows = asyncio.run(measure(count))
    text = report(rows, this_machine("not used").line(), count)
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()

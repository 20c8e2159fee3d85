"""The HTTP edge of the webhooks: reviews in, patches and rejections out, and what it does not read."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import pytest

from common.http.listener import HttpListener
from controller.reconcile import MetricValues
from controller.webhooks.admission_review import ReviewRequest, ReviewResult
from controller.webhooks.pod_mutation import mutate_pod
from controller.webhooks.pod_validation import validate_pod
from controller.webhooks.webhook_server import (
    KEEPALIVE_S,
    MAX_CONNECTIONS,
    MAX_REVIEW_BYTES,
    REVIEWS_METRIC,
    ReviewsNotReady,
    WebhookApplication,
)
from tests.controller.webhooks.reviews import REVIEW_UID, review_body

POD = {
    "metadata": {"annotations": {"katalyst.kubewharf.io/qos_level": "reclaimed_cores"}},
    "spec": {"containers": [{"name": "a", "resources": {"requests": {"cpu": "1"}}}]},
}


def fail(_request: ReviewRequest) -> ReviewResult:
    raise RuntimeError("a bug")


def wait_for_lists(_request: ReviewRequest) -> ReviewResult:
    raise ReviewsNotReady("not listed yet: namespaces.v1")


METRICS = MetricValues()


@pytest.fixture
def application() -> WebhookApplication:
    webhooks = {
        "pod-mutation": lambda request: mutate_pod(request, (), {}), "pod-validation": validate_pod, "bug": fail,
        "early": wait_for_lists,
    }  # fmt: skip
    return WebhookApplication(webhooks, METRICS)


@pytest.fixture
async def session(application: WebhookApplication) -> AsyncIterator[aiohttp.ClientSession]:
    listener = HttpListener(
        application.build(), application.body_problem, MAX_CONNECTIONS, keepalive_timeout=KEEPALIVE_S
    )
    ((host, port),) = await listener.open("127.0.0.1", 0, "--listen")
    async with aiohttp.ClientSession(f"http://{host}:{port}") as entered:
        yield entered
    await listener.close()


async def test_a_patch_and_a_rejection(session: aiohttp.ClientSession) -> None:
    async with session.post("/pod-mutation", data=review_body(POD)) as answer:
        response = msgspec.json.decode(await answer.read())["response"]
    patch = msgspec.json.decode(base64.b64decode(response.pop("patch")))
    assert response == {"uid": REVIEW_UID, "allowed": True, "patchType": "JSONPatch"}
    amount = {"resource.katalyst.kubewharf.io/reclaimed_millicpu": "1000"}
    assert patch == [
        {"op": "add", "path": f"/spec/containers/0/resources/{field}", "value": amount}
        for field in ("requests", "limits")
    ]
    async with session.post("/pod-validation", data=review_body(POD)) as answer:
        response = msgspec.json.decode(await answer.read())["response"]
    assert (response["allowed"], response["status"]["code"], response["status"]["reason"]) == (False, 422, "Invalid")
    assert response["status"]["message"].startswith("spec.containers[0].resources.requests.cpu: a pod with")


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/pod-mutation", b"{", 400, "the review cannot be decoded"),
        ("/pod-mutation", b"[" * 100_000, 400, "the review cannot be decoded"),
        ("/pod-mutation", b"\xff", 400, "the review cannot be decoded"),
        ("/pod-mutation", review_body([]), 400, "the review cannot be decoded"),
        ("/pod-mutation", review_body(POD).replace(b".io/v1\"", b".io/v2\""), 400, "admission.k8s.io/v2 AdmissionReview"),
        ("/pod-mutation", b"x" * (MAX_REVIEW_BYTES + 1), 413, "the body has 7340033 bytes, more than 7340032"),
        ("/bug", review_body(POD), 500, "the review failed; the log of the controller has the reason"),
        ("/early", review_body(POD), 503, "not listed yet: namespaces.v1"),
        ("/other", review_body(POD), 404, "there is no such webhook"),
        ("/a/b", review_body(POD), 404, "404"),
    ],
)  # fmt: skip
async def test_what_cannot_be_reviewed_is_an_http_error(
    session: aiohttp.ClientSession, path: str, body: bytes, status: int, text: str
) -> None:
    try:
        async with session.post(path, data=io.BytesIO(body)) as answer:
            assert (answer.status, (await answer.text())[: len(text)]) == (status, text)
    except aiohttp.ClientConnectionError:
        assert status == 413, "a connection whose body is refused may close before the body is sent"


async def test_a_body_without_length_is_not_read(session: aiohttp.ClientSession) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"{}"

    async with session.post("/pod-mutation", data=chunks()) as answer:
        assert (answer.status, await answer.text()) == (413, "Content-Length is missing\n")


async def test_results_are_counted(session: aiohttp.ClientSession) -> None:
    before = dict(METRICS.values(REVIEWS_METRIC))
    for path in ("pod-mutation", "pod-validation", "bug"):
        async with session.post(f"/{path}", data=review_body(POD)):
            pass
    counted = {key: count - before.get(key, 0) for key, count in METRICS.values(REVIEWS_METRIC).items()}
    assert {key: count for key, count in counted.items() if count} == {
        ("pod-mutation", "changed"): 1, ("pod-validation", "rejected"): 1, ("bug", "failed"): 1,
    }  # fmt: skip


async def test_connections_end_with_their_next_response_while_a_replica_ends(
    application: WebhookApplication, session: aiohttp.ClientSession
) -> None:
    ended = []
    for application.is_draining in (False, True):
        async with session.post("/pod-mutation", data=review_body(POD)) as answer:
            ended.append((answer.status, answer.headers.get("Connection")))
    assert ended == [(200, None), (200, "close")]


@pytest.mark.parametrize(
    ("containers", "expected"),
    [
        (b"[" + b",".join([b"{}"] * 100_000) + b"]", "the review has 100009 objects and lists, more than 100000"),
        (b"[" * 100_001, "the review has 100009 objects and lists, more than 100000"),
        (b'"' + b'\\"{' * 200_000, "the review cannot be decoded"),
    ],
    ids=["objects", "lists", "a string that does not end"],
)
async def test_a_body_with_millions_of_objects_is_not_decoded(
    session: aiohttp.ClientSession, containers: bytes, expected: str
) -> None:
    """2.3 million empty containers in 7 MiB stopped the controller for 4 s, and 4 such bodies for as long as its Lease."""
    body = review_body({"metadata": {}, "spec": {"containers": 7}}).replace(b"7}", containers + b"}", 1)
    async with session.post(
        "/pod-mutation", data=io.BytesIO(body), headers={"Content-Length": str(len(body))}
    ) as answer:
        assert (answer.status, (await answer.text())[: len(expected)]) == (400, expected)


@pytest.mark.parametrize("webhook", ["pod-mutation", "pod-validation"])
async def test_braces_in_an_annotation_bypass_no_webhook(session: aiohttp.ClientSession, webhook: str) -> None:
    pod = {**POD, "metadata": {"annotations": {**POD["metadata"]["annotations"], "any": "{[" * 100_000}}}
    async with session.post(f"/{webhook}", data=review_body(pod)) as answer:
        response = msgspec.json.decode(await answer.read())["response"]
    assert "patch" in response if webhook == "pod-mutation" else not response["allowed"]


async def test_a_bug_that_any_client_can_trigger_is_logged_once_a_minute(
    session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(20):
        async with session.post("/bug", data=review_body(POD)) as answer:
            assert answer.status == 500
    (line,) = [record for record in caplog.records if record.exc_info]
    assert line.getMessage() == "webhook bug: a bug"

"""HTTP server of the webhooks: limits size, number and time of reviews, decodes them, and counts the results.
A review that cannot be answered gets an HTTP error, so that the API server applies the webhook's failure policy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from aiohttp import web

from common.throttled_log import ThrottledLog
from controller.reconcile import MetricValues
from controller.webhooks.admission_review import (
    InvalidReview,
    ReviewRequest,
    ReviewResult,
    decode_review,
    encode_review,
)

log = logging.getLogger(__name__)

REVIEWS_METRIC = "dioptase_webhook_reviews_total"
MAX_REVIEW_BYTES = 7 << 20
"""An update has two objects of at most 3 MiB each, the API server's limit for a request body, and a few hundred bytes."""
MAX_BUFFERED_BYTES = 32 << 20
"""Bodies in memory at the same time: any client in the cluster's network can send some."""
MAX_CONNECTIONS = 1024
"""The API server speaks HTTP/1.1 here, so that each of its requests in flight, by default at most 600, has a connection."""
KEEPALIVE_S = 120.0
"""Longer than the 90 s of the API server's client (net/http, IdleConnTimeout), so that the client closes first and no review is
sent to a closed connection."""
BODY_TIMEOUT_S = 5.0
ReviewFunction = Callable[[ReviewRequest], ReviewResult]


class ReviewsNotReady(Exception):
    """Reviews cannot be answered yet; the text has the reason."""


class WebhookApplication:
    """Application that answers `POST /WEBHOOK` by the function of each webhook."""

    def __init__(self, webhooks: Mapping[str, ReviewFunction], metrics: MetricValues) -> None:
        self._webhooks, self._metrics = webhooks, metrics
        self._buffered_bytes = 0
        self.is_draining = False
        """Whether to close each connection after its next response: API servers keep connections to an address that the Service
        no longer has."""
        # Throttled, because any client in the cluster's network can cause these lines.
        self._throttled_log, self._bug_log = ThrottledLog(log), ThrottledLog(log)

    def build(self) -> web.Application:
        app = web.Application(client_max_size=MAX_REVIEW_BYTES)
        app.add_routes([web.post("/{webhook}", self._answer)])
        return app

    def body_problem(self, request: web.BaseRequest) -> str:
        """Return why a request may not have a body; empty if it may."""
        length = request.content_length
        if request.method != "POST":
            return "only POST has a body here"
        if length is None:
            return "Content-Length is missing"
        if length > MAX_REVIEW_BYTES:
            return f"the body has {length} bytes, more than {MAX_REVIEW_BYTES}"
        if self._buffered_bytes + length > MAX_BUFFERED_BYTES:
            return f"this review and those in progress have more than {MAX_BUFFERED_BYTES} bytes; try again"
        return ""

    async def _answer(self, request: web.Request) -> web.Response:
        response = await self._answer_review(request)
        if self.is_draining:
            response.force_close()
        return response

    async def _answer_review(self, request: web.Request) -> web.Response:
        name = request.match_info["webhook"]
        review = self._webhooks.get(name)
        if review is None:
            return web.Response(status=404, text="there is no such webhook\n")
        length = request.content_length or 0
        self._buffered_bytes += length
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await request.read()
            return self._review(name, review, body)
        except TimeoutError:
            return self._failure(name, 408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s")
        finally:
            self._buffered_bytes -= length

    def _review(self, name: str, review: ReviewFunction, body: bytes) -> web.Response:
        try:
            request = decode_review(body)
            result = review(request)
            encoded = encode_review(request, result)
        except InvalidReview as error:
            return self._failure(name, 400, str(error))
        except ReviewsNotReady as error:
            return self._failure(name, 503, str(error))
        except Exception:  # noqa: BLE001 - it is logged with its traceback, once a minute
            self._bug_log.warn(f"webhook {name}: a bug", with_traceback=True)
            return self._failure(name, 500, "the review failed; the log of the controller has the reason")
        self._metrics.count(REVIEWS_METRIC, name, result.outcome)
        return web.Response(body=encoded, content_type="application/json")

    def _failure(self, name: str, status: int, reason: str) -> web.Response:
        self._metrics.count(REVIEWS_METRIC, name, "failed")
        self._throttled_log.warn(f"webhook {name}: {status}: {reason}")
        return web.Response(status=status, text=f"{reason}\n")

"""HTTP endpoints of the extender: the verbs of kube-scheduler, and explanations."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import msgspec
from aiohttp import web

from api.text import quote
from common.http.listener import connection_of
from common.http.request_guard import HttpProblem, is_loopback
from controller.endpoints import RESPONSE_HEADERS, Authorizer, unauthorized
from controller.reconcile import MetricValues
from controller.scheduler.binding import PodBinder
from controller.scheduler.explanation import MAX_EXPLAINED_NODES, explain_placement
from controller.scheduler.extender import Extender
from controller.scheduler.extender_messages import (
    ExtenderArgs,
    ExtenderBindingArgs,
    ExtenderBindingResult,
    ExtenderFilterResult,
    ExtenderPreemptionArgs,
)
from controller.scheduler.pending_pods import PendingPods
from controller.scheduler.scheduling_pod import ScheduledPod
from kube.informer import Informer

VERBS = ("filter", "prioritize", "bind", "preempt")
MAX_BODY_BYTES = 8 << 20
"""A pod has at most 1.5 MiB (etcd), and 50,000 names of nodes at most 253 letters each, in practice 40."""
REQUESTS_METRIC, SECONDS_METRIC = "dioptase_scheduler_requests_total", "dioptase_scheduler_request_seconds_total"
DURATION_METRIC = "dioptase_scheduler_request_duration_seconds"
ArgsT = TypeVar("ArgsT")
JSON_HEADERS = {**RESPONSE_HEADERS, "Content-Type": "application/json"}


class ClusterCache(Protocol):
    """What the endpoints read of the informers."""

    @property
    def pods(self) -> Informer[ScheduledPod]: ...
    def unsynced(self) -> str:
        """Return the resources that have not been listed yet: until then nothing can be evaluated."""
        ...


def body_problem(request: web.BaseRequest) -> str:
    """Return why a request may not have a body; empty for a verb from loopback or with a verified client certificate.

    A verb can bind any pod to any node, so it needs proof of the client: a kube-scheduler in the same pod comes from loopback,
    any other one sends the certificate of its `tlsConfig`.
    """
    if request.path.strip("/") not in VERBS:
        return f"{request.path}: requests with a body are not supported; the verbs are {', '.join(VERBS)}"
    transport = request.transport
    peer = None if transport is None else transport.get_extra_info("peername")
    if peer and is_loopback(peer[0]):
        return ""
    tls = None if transport is None else transport.get_extra_info("ssl_object")
    # Not empty only if the certificate was verified against client_ca_file.
    if tls is not None and tls.getpeercert():
        return ""
    return (
        "verbs need a client certificate that tls_server_config.client_ca_file verifies; set it in the file of --web-config,"
        " and tlsConfig in KubeSchedulerConfiguration"
    )


class ExtenderEndpoints:
    """Handlers of the verbs. Nothing raises out of them: kube-scheduler receives an error that names field and fix."""

    def __init__(
        self,
        extender: Extender,
        binder: PodBinder,
        pending: PendingPods,
        cache: ClusterCache,
        metrics: MetricValues,
        authorize: Authorizer | None = None,
    ) -> None:
        """`authorize` checks requests for explanations."""
        self._extender, self._binder, self._pending, self._cache = extender, binder, pending, cache
        self._metrics, self._authorize = metrics, authorize
        self._encoder = msgspec.json.Encoder()

    def add_to(self, app: web.Application) -> None:
        """Add the verbs to an application."""
        handlers = (self._filter, self._prioritize, self._bind, self._preempt)
        app.add_routes([web.post(f"/{verb}", handler) for verb, handler in zip(VERBS, handlers, strict=True)])
        app.add_routes([web.get("/explain", self._explain)])

    async def _explain(self, request: web.Request) -> web.Response:
        # From loopback, which needs a shell in this pod or the right to forward its ports, no token is needed.
        is_local = is_loopback(connection_of(request).rpartition(":")[0])
        if not is_local and (refusal := await unauthorized(request, self._authorize)) is not None:
            return refusal
        if missing := self._cache.unsynced():
            return _problem_response(503, f"the extender is starting: {missing}", "try again in a few seconds")
        key = request.query.get("pod", "")
        pod = self._cache.pods.store.get(key)
        if pod is None:
            return _problem_response(404, f"there is no pod {quote(key)}", "name it as NAMESPACE/NAME")
        state, chain = self._extender.state, self._extender.chain
        explanation = explain_placement(state, chain, pod, time.time(), MAX_EXPLAINED_NODES)
        explanation = msgspec.structs.replace(explanation, gang=self._extender.gangs.describe(pod))
        return web.Response(body=self._encoder.encode(explanation), headers=JSON_HEADERS)

    async def _filter(self, request: web.Request) -> web.Response:
        async def answer(args: ExtenderArgs) -> object:
            if missing := self._cache.unsynced():
                return ExtenderFilterResult(error=f"the extender is starting: {missing}")
            result = self._extender.filter(args, time.time())
            if not result.error:
                is_rejected, extender = not result.node_names, self._extender
                names = list(result.failed_and_unresolvable_nodes) if is_rejected and extender.needs_room else []
                rows, plugin = extender.state.nodes.rows_of(names), extender.rejecting_plugin
                self._pending.record_result(args.pod, rows, is_rejected=is_rejected, plugin=plugin)
                self._pending.retry_now(self._extender.planned_keys)
            return result

        return await self._respond(request, "filter", ExtenderArgs, answer)

    async def _prioritize(self, request: web.Request) -> web.Response:
        async def answer(args: ExtenderArgs) -> object:
            return self._extender.prioritize(args, time.time())

        return await self._respond(request, "prioritize", ExtenderArgs, answer)

    async def _bind(self, request: web.Request) -> web.Response:
        async def answer(args: ExtenderBindingArgs) -> object:
            missing = self._cache.unsynced()
            error = f"the extender is starting: {missing}" if missing else await self._binder.bind(args)
            return ExtenderBindingResult(error=error)

        return await self._respond(request, "bind", ExtenderBindingArgs, answer)

    async def _preempt(self, request: web.Request) -> web.Response:
        async def answer(args: ExtenderPreemptionArgs) -> object:
            return self._extender.preempt(args, time.time())

        return await self._respond(request, "preempt", ExtenderPreemptionArgs, answer)

    async def _respond(
        self, request: web.Request, verb: str, kind: type[ArgsT], answer: Callable[[ArgsT], Awaitable[object]]
    ) -> web.Response:
        began_s = time.perf_counter()
        try:
            args = msgspec.json.decode(await request.read(), type=kind)
        except web.HTTPRequestEntityTooLarge:
            return self._refusal(verb, 413, f"the body has more than {MAX_BODY_BYTES} bytes")
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return self._refusal(verb, 400, f"not a request of the verb {verb}: {error}")
        result = await answer(args)
        failed = bool(getattr(result, "error", ""))
        self._metrics.count(REQUESTS_METRIC, verb, "error" if failed else "done")
        duration_s = time.perf_counter() - began_s
        self._metrics.add(SECONDS_METRIC, duration_s, verb)
        self._metrics.observe(DURATION_METRIC, duration_s, verb)
        return web.Response(body=self._encoder.encode(result), headers=JSON_HEADERS)

    def _refusal(self, verb: str, status: int, problem: str) -> web.Response:
        self._metrics.count(REQUESTS_METRIC, verb, "invalid")
        return web.Response(status=status, text=f"{problem}\n", headers=RESPONSE_HEADERS)


def _problem_response(status: int, error: str, remedy: str) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(HttpProblem(error, remedy)), headers=JSON_HEADERS)

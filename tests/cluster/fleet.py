"""A fleet without nodes: objects of the API server, with servers of the tests, or nothing, at the addresses of its pods."""

from __future__ import annotations

import asyncio
import socket
import threading
import uuid
from typing import Any

from aiohttp import web

from agent.journal.decisions import DecisionJournal
from api.diagnostics import DoctorCheck, EffectiveConfiguration
from api.text import to_json
from common.http.web_config import WebConfig
from exporters.page.web_server import AgentWebServer as AgentServer
from exporters.view.cycle_view import build_view
from kube import client as client_module
from kube.client import KubeClient
from tests.builders.full_node import full_cycle
from tests.cluster.daemons import wait
from tests.cluster.server import JSON, MERGE, Server

Request = tuple[str, str, dict[str, Any]]
"""Method, path and body of a request."""


class Agents:
    """Agents' HTTP servers in a thread of their own, and sockets that never answer."""

    def __init__(self, host: str) -> None:
        self._host, self._loop = host, asyncio.new_event_loop()
        self._servers: list[AgentServer] = []
        self._sockets: list[socket.socket] = []
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(
        self,
        configuration: EffectiveConfiguration,
        web_config: WebConfig | None = None,
        *,
        round_: bool = True,
        lacks: tuple[DoctorCheck, ...] = (),
    ) -> int:
        """Start one more server and return its port."""
        server = AgentServer(
            journal=DecisionJournal(None), version="1.2.3", configuration=lambda: configuration, checks=lambda: lacks,
            web_config=web_config, stale_s=3600,
        )  # fmt: skip
        self._servers.append(server)
        port = asyncio.run_coroutine_threadsafe(server.start(self._host, 0), self._loop).result(10)
        if round_:
            self._loop.call_soon_threadsafe(server.publish, full_cycle())
        return port

    def silent(self) -> int:
        """Return a port that accepts connections and never answers."""
        self._sockets.append(socket.create_server((self._host, 0)))
        return int(self._sockets[-1].getsockname()[1])

    def closed(self) -> int:
        """Return a port without a listener."""
        with socket.create_server((self._host, 0)) as listener:
            return int(listener.getsockname()[1])

    def close(self) -> None:
        for server in self._servers:
            asyncio.run_coroutine_threadsafe(server.stop(), self._loop).result(10)
        # TLS ends with a word of the other side, and a loop that is gone would not hear it.
        wait("the last word", lambda: not any(item._sock for item in self._loop._transports.values()), 10)
        for item in self._sockets:
            item.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class Fleet:
    """Node and pod objects of agents, all with one label and in one namespace."""

    def __init__(self, server: Server, host: str, namespace: str) -> None:
        self.server, self.host, self.namespace = server, host, namespace
        self.label = f"fleet={uuid.uuid4().hex[:8]}"

    def name(self, node: str) -> str:
        return f"{node}-{self.label[-4:]}"

    def node(self, name: str) -> None:
        for method, path, body in self._node(name):
            self.server.ask(method, path, body, MERGE if method == "PATCH" else JSON)

    def agent(self, node: str, port: int, scheme: str = "HTTP") -> None:
        """Create a node with a running agent's pod, whose health probe has this port and scheme."""
        for method, path, body in (*self._node(node), *self._pod(node, port, scheme)):
            self.server.ask(method, path, body, MERGE if method == "PATCH" else JSON)

    async def many(self, nodes: list[str], port: int, client: KubeClient) -> None:
        """Create nodes with agents' pods concurrently."""
        turns = asyncio.Semaphore(16)

        async def item(node: str) -> None:
            async with turns:
                for method, path, body in (*self._node(node), *self._pod(node, port, "HTTP")):
                    kind = client_module.MERGE_PATCH_TYPE if method == "PATCH" else client_module.JSON_TYPE
                    request = client_module._ApiRequest(
                        method=method, path=path, resource="test", body=body, content_type=kind
                    )
                    await client._answer(request)

        await asyncio.gather(*map(item, nodes))

    def _node(self, name: str) -> list[Request]:
        key, value = self.label.split("=")
        node = {"metadata": {"name": self.name(name), "labels": {key: value}}, "spec": {"unschedulable": True}}
        status = {"status": {"allocatable": {"cpu": "7800m", "memory": "8Gi"}}}
        return [("POST", "/api/v1/nodes", node), ("PATCH", f"/api/v1/nodes/{self.name(name)}/status", status)]

    def _pod(self, node: str, port: int, scheme: str) -> list[Request]:
        labels = {"app.kubernetes.io/name": "dioptase", "app.kubernetes.io/component": "agent"}
        probe = {"httpGet": {"path": "/healthz", "port": "web", "scheme": scheme}}
        container = {
            "name": "agent", "image": "localhost/dioptase:1", "ports": [{"name": "web", "containerPort": port}],
            "readinessProbe": probe,
        }  # fmt: skip
        spec = {"nodeName": self.name(node), "containers": [container], "automountServiceAccountToken": False}
        pods = f"/api/v1/namespaces/{self.namespace}/pods"
        status = {"status": {"phase": "Running", "podIP": self.host, "podIPs": [{"ip": self.host}]}}
        created = {"metadata": {"name": f"agent-{node}", "labels": labels}, "spec": spec}
        return [("POST", pods, created), ("PATCH", f"{pods}/agent-{node}/status", status)]

    def remove(self) -> None:
        """Delete the pods without grace, because no kubelet confirms their end, and then the nodes."""
        pods = f"/api/v1/namespaces/{self.namespace}/pods"
        self.server.ask("DELETE", pods, {"gracePeriodSeconds": 0})
        self.server.ask("DELETE", f"/api/v1/nodes?labelSelector={self.label}")


class Reviewing:
    """An agent that reviews tokens at the API server; it answers its first review with 429."""

    def __init__(self, server: Server, host: str) -> None:
        self._server, self._host = server, host
        self.requests: list[tuple[str | None, str]] = []
        """The Authorization header of each request, and the user of its token."""
        self.busy = 1
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    async def _start(self) -> int:
        self._runner = web.ServerRunner(web.Server(self._answer))
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, 0)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        given = request.headers.get("X-Dioptase-Authorization", "").removeprefix("Bearer ")
        if not given:
            return web.json_response({"error": "this agent asks for a token", "remedy": "send one"}, status=401)
        if self.busy:
            self.busy -= 1
            return web.json_response({"error": "busy", "remedy": "ask again"}, status=429)
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": given}}
        path = "/apis/authentication.k8s.io/v1/tokenreviews"
        user = (await asyncio.to_thread(self._server.ask, "POST", path, review))["status"]["user"]["username"]
        self.requests.append((request.headers.get("Authorization"), user))
        return web.Response(body=to_json(build_view(full_cycle())), content_type="application/json")

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

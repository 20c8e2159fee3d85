"""Reaches the agents of a cluster through the API server's pod proxy: options, access, concurrent requests.
An unreachable agent yields a reply with the reason. The user's own token is never sent to an agent: an agent that
requires one gets a short-lived token of the reader account in a header of their own.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Generic, TypeVar

import click
import msgspec

from api import VERSION
from api.interfaces import Unavailable
from api.text import printable, quote
from cli.fleet.agent_endpoints import (
    AGENT_SELECTOR,
    CONTROLLER_SELECTOR,
    NODE_RESOURCE,
    POD_RESOURCE,
    AgentEndpoint,
    FleetNode,
    FleetPod,
    find_agent_endpoints,
)
from cli.options import Seconds
from common.yaml_guard import check_yaml
from kube.client import MAX_RESPONSE_BYTES, KubeClient, ListScope, RawResponse
from kube.credentials import ApiAccess
from kube.errors import ApiError, ApiUnreachable, parse_api_error
from kube.kubeconfig import default_kubeconfig_path, load_access, load_kubeconfig_access

MAX_CONCURRENT_REQUESTS = 32
"""The API server opens one connection to an agent per request, and shares its capacity with all users."""
MAX_FLEET_ANSWER_BYTES = 16 << 20
"""Limit of one agent's response in a request to many agents: all responses together must fit into a laptop's memory."""
MAX_RETRIES, RETRY_DELAY_S = 5, 1.0
"""An agent reviews one token of an address at a time, and all requests come from the API server's address; the delays are
random, because other clients retry too."""
READER_ACCOUNT, TOKEN_LIFETIME_S = "dioptase-reader", 600
"""Service account whose token is sent to agents that require one, and the token's lifetime: the API server's minimum."""
AUTHORIZATION_HEADER = "X-Dioptase-Authorization"
"""Header that agents accept, because the API server's proxy does not pass Authorization on."""
UNREACHABLE_REMEDY = (
    "let it listen at an address that the control plane reaches (--listen), with TLS if its probe uses HTTPS"
)
VERSION_REMEDY = "check what listens there: kubectl describe its pod"
T = TypeVar("T")


class AgentReply(msgspec.Struct, Generic[T], frozen=True):
    """Response of one agent; `answer` is None if it failed, with the problem and the remedy."""

    member: AgentEndpoint
    answer: T | None
    problem: str = ""
    remedy: str = ""


class AgentSelector(msgspec.Struct, frozen=True, kw_only=True):
    """The agents to ask."""

    namespace: str = ""
    """Namespace of the agents; "" stands for all."""
    labels: str = ""
    """Label selector of the nodes, in kubectl's syntax."""
    nodes: tuple[str, ...] = ()


class _ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of an error response of the API server (a Status) or of an agent."""

    kind: str = ""
    message: str = ""
    reason: str = ""
    error: str = ""
    remedy: str = ""


async def find_fleet(client: KubeClient, selector: AgentSelector) -> list[AgentEndpoint]:
    """Return the selected nodes with their agents. Raises Unavailable if they cannot be determined."""
    pods, nodes = await asyncio.gather(
        list_pods(client, AGENT_SELECTOR, selector.namespace), _list_nodes(client, selector.labels)
    )
    namespaces = sorted({pod.metadata.namespace for pod in pods})
    if len(namespaces) > 1:
        # Every user with the right to create pods in a namespace can label them as agents.
        raise Unavailable(f"there are agents in several namespaces: {', '.join(namespaces)}", "choose one with -n")
    if not pods:
        where = f"in namespace {selector.namespace}" if selector.namespace else "in any namespace"
        raise Unavailable(
            f"no pod {where} is labelled {AGENT_SELECTOR}", "install the agents, or name their namespace with -n"
        )
    endpoints = find_agent_endpoints(nodes, pods, selector.nodes)
    names = {member.node for member in endpoints}
    for name in selector.nodes:
        if name not in names:
            raise Unavailable(f"there is no node {quote(name)}", "kubectl get nodes lists them")
    return endpoints


async def list_controller_pods(client: KubeClient, namespace: str) -> list[FleetPod]:
    """Return the controller's pods, sorted by name."""
    return await list_pods(client, CONTROLLER_SELECTOR, namespace)


async def list_pods(client: KubeClient, labels: str, namespace: str) -> list[FleetPod]:
    """Return the pods with these labels, sorted by name. Raises Unavailable."""
    try:
        pods = await client.list(POD_RESOURCE, ListScope(namespace=namespace, labels=labels))
    except (ApiError, ApiUnreachable, ValueError) as error:
        raise Unavailable(f"pods cannot be listed: {error}", _list_remedy(error, "pods")) from error
    for key, problem in pods.problems.items():
        raise Unavailable(f"pod {key} is invalid: {problem}", "check it with kubectl get pod -o yaml")
    return [pods.objects[key] for key in sorted(pods.objects)]


async def _list_nodes(client: KubeClient, labels: str) -> list[FleetNode] | None:
    """List the nodes; None if the user may not list them and did not select nodes by labels."""
    try:
        nodes = await client.list(NODE_RESOURCE, ListScope(labels=labels))
    except (ApiError, ApiUnreachable) as error:
        if isinstance(error, ApiError) and error.status == HTTPStatus.FORBIDDEN and not labels:
            return None
        raise Unavailable(f"nodes cannot be listed: {error}", _list_remedy(error, "nodes")) from error
    return list(nodes.objects.values())


class AgentProxy:
    """Sends requests to agents. Agents that require a token get one of the reader account, never the user's own token, because
    every user with the right to create pods can label one as an agent."""

    def __init__(self, client: KubeClient, account: str) -> None:
        self._client, self._account = client, account
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)
        self._tokens: dict[str, tuple[float, asyncio.Task[str]]] = {}
        """Token request by namespace with its start time. All requests that wait for it share its failure: a thousand agents
        must not cause a thousand token requests. It is retried after RETRY_DELAY_S."""
        self._requiring_token: set[str] = set()
        """Proxy paths of the pods that require a token."""

    async def request_all(self, members: Sequence[AgentEndpoint], path: str, kind: type[T]) -> list[AgentReply[T]]:
        """Request `path` from every agent; return the replies in the same order."""
        return list(
            await asyncio.gather(*(self.request_one(member, path, kind, MAX_FLEET_ANSWER_BYTES) for member in members))
        )

    async def request_one(
        self, member: AgentEndpoint, path: str, kind: type[T], max_bytes: int = MAX_RESPONSE_BYTES
    ) -> AgentReply[T]:
        """Request `path` from one agent and decode the response."""
        if member.problem:
            return AgentReply(member, None, member.problem, member.remedy)
        try:
            raw = await self.request_raw(member, path, max_bytes)
        except ApiUnreachable as error:
            return AgentReply(member, None, *no_answer_reason(error))
        except Unavailable as error:
            return AgentReply(member, None, error.reason, error.remedy)
        if raw.status != HTTPStatus.OK:
            return AgentReply(member, None, *refusal_reason(member, raw))
        try:
            return AgentReply(member, msgspec.json.decode(raw.body, type=kind))
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            return AgentReply(
                member, None, f"its response is not that of an agent of this version: {error}", VERSION_REMEDY
            )

    async def request_raw(self, member: AgentEndpoint, path: str, max_bytes: int = MAX_RESPONSE_BYTES) -> RawResponse:
        """Return the raw response of the agent or of the API server. Raises ApiUnreachable; Unavailable without a token."""
        async with self._slots:
            return await self._get(member, path, max_bytes)

    async def _get(self, member: AgentEndpoint, path: str, max_bytes: int) -> RawResponse:
        """Request again with a token after 401, and again after a pause after 429."""
        retries_left = MAX_RETRIES
        while True:
            headers = await self._headers(member)
            raw = await self._client.raw(member.path + path, "pods/proxy", headers, max_bytes)
            if is_from_api_server(raw):
                return raw
            if raw.status == HTTPStatus.UNAUTHORIZED and not headers:
                self._requiring_token.add(member.path)
            elif raw.status == HTTPStatus.TOO_MANY_REQUESTS and retries_left:
                retries_left -= 1
                await asyncio.sleep(RETRY_DELAY_S * random.uniform(0.5, 1.5))
            else:
                return raw

    async def _headers(self, member: AgentEndpoint) -> dict[str, str]:
        if member.path not in self._requiring_token:
            return {}
        now_s = time.monotonic()
        requested_at_s, token = self._tokens.get(member.namespace, (now_s - TOKEN_LIFETIME_S, None))
        if token is None or now_s - requested_at_s > (RETRY_DELAY_S if _has_failed(token) else TOKEN_LIFETIME_S / 2):
            token = asyncio.create_task(self._token(member.namespace))
            self._tokens[member.namespace] = now_s, token
        # Shielded: cancelling one request must not cancel the token request that others wait for.
        return {AUTHORIZATION_HEADER: f"Bearer {await asyncio.shield(token)}"}

    async def _token(self, namespace: str) -> str:
        try:
            return await self._client.token(f"{namespace}/{self._account}", TOKEN_LIFETIME_S)
        except (ApiError, ApiUnreachable) as error:
            raise Unavailable(
                f"it requires a token, and you may not create one of account {namespace}/{self._account}: {error}",
                "ask an administrator for the right to `create` serviceaccounts/token of it, or choose another --account",
            ) from error


def _has_failed(token: asyncio.Task[str]) -> bool:
    return token.done() and (token.cancelled() or token.exception() is not None)


def is_from_api_server(raw: RawResponse) -> bool:
    """Whether the response comes from the API server and not from the agent."""
    return _parse_error_body(raw.body).kind == "Status"


def no_answer_reason(error: ApiUnreachable) -> tuple[str, str]:
    """Return why no response came, and the remedy."""
    if isinstance(error.__cause__, TimeoutError):
        return (
            "no answer in time",
            "raise --request-timeout; check its pod with kubectl logs",
        )
    # Without address and path, which are the same for all agents.
    return f"no answer: {str(error).rpartition(': ')[2]}", "check that `kubectl get nodes` works"


def refusal_reason(member: AgentEndpoint, raw: RawResponse) -> tuple[str, str]:
    """Return why a request failed, and the remedy: for an error of the API server, of its connection to the agent, or of the
    agent itself."""
    error = _parse_error_body(raw.body)
    if error.kind == "Status":
        message = parse_api_error(raw.status, raw.body).message.removeprefix("error trying to reach service: ")
        if raw.status == HTTPStatus.FORBIDDEN:
            return (
                f"you may not reach it: {message}",
                f"ask an administrator for the right to `get` pods/proxy in namespace {member.namespace}",
            )
        if raw.status == HTTPStatus.NOT_FOUND:
            return f"its agent {member.pod} was just deleted", "run the command again"
        if raw.status == HTTPStatus.UNAUTHORIZED:
            return f"the API server does not know you: {message}", "log in again"
        return f"the API server cannot reach it: {message}", UNREACHABLE_REMEDY
    if error.error:
        return error.error, error.remedy
    text = " ".join(raw.body[:120].decode(errors="replace").split())
    return f"{raw.status}{f': {text}' if text else ''}", VERSION_REMEDY


def _parse_error_body(body: bytes) -> _ErrorBody:
    try:
        return msgspec.json.decode(body, type=_ErrorBody)
    except (ValueError, RecursionError):
        return _ErrorBody()


def _list_remedy(error: Any, what: str) -> str:
    if isinstance(error, ApiError) and error.status == HTTPStatus.FORBIDDEN:
        return f"ask an administrator for the right to list {what}; -n limits the request to one namespace"
    if isinstance(error, ApiError) and error.status == HTTPStatus.UNAUTHORIZED:
        return "log in again, or check `kubectl config view`"
    return "check that `kubectl get nodes` works"


DEFAULT_REQUEST_TIMEOUT_S = 10.0
ResultT = TypeVar("ResultT")


class ApiServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Access to the API server, the agents to ask, and the output format."""

    kubeconfig: Path | None = None
    context: str = ""
    chosen: AgentSelector = AgentSelector()
    account: str = READER_ACCOUNT
    timeout_s: float = DEFAULT_REQUEST_TIMEOUT_S
    as_json: bool = False

    def access(self, environ: Mapping[str, str] = os.environ) -> ApiAccess:
        """Find the cluster as kubectl does: option, KUBECONFIG, ~/.kube/config, the pod's own account. Raises Unavailable."""
        listed = environ.get("KUBECONFIG", "")
        home = default_kubeconfig_path(environ)
        if self.kubeconfig is not None:
            paths = [self.kubeconfig]
        elif listed:
            paths = [Path(part) for part in listed.split(os.pathsep) if part]
        elif home.exists() or self.context:
            paths = [home]
        else:
            return load_access(environ, check_yaml)
        return load_kubeconfig_access(paths, check_yaml, self.context, logins=True)

    def ask(
        self, command: str, question: Callable[[KubeClient, AgentProxy, list[AgentEndpoint]], Awaitable[ResultT]]
    ) -> ResultT:
        """Run `question` with a client and return its result; an Unavailable ends the program with its remedy and status 1."""

        async def run() -> ResultT:
            async with KubeClient(self.access(), f"kubectl-dioptase/{VERSION}", self.timeout_s) as client:
                return await question(client, AgentProxy(client, self.account), await find_fleet(client, self.chosen))

        try:
            return asyncio.run(run())
        except Unavailable as error:
            # The reason may contain text of agents.
            lines = (f"dioptase kubectl {command}: {error.reason}", f"  remedy: {error.remedy}")
            click.echo("\n".join(printable(line) for line in lines), err=True)
            sys.exit(1)


_OPTIONS = (
    click.option("-n", "--namespace", help="Namespace of the agents. Default: all."),
    click.option("--context", help="Context of the kubeconfig."),
    click.option("--kubeconfig", type=click.Path(path_type=Path), help="Instead of KUBECONFIG and ~/.kube/config."),
    click.option("-l", "--selector", help="Only nodes with these labels, in kubectl's syntax."),
    click.option("--node", "nodes", multiple=True, help="Only this node; may be given several times."),
    click.option("--account", help=f"Service account whose token agents get if they require one. Default: {READER_ACCOUNT}."),
    click.option(
        "--request-timeout", "timeout_s", type=Seconds(min=0.1),
        help=f"Seconds for each agent. Default: {DEFAULT_REQUEST_TIMEOUT_S:g}."
    ),
    click.option("-o", "--output", type=click.Choice(["table", "json"]), help="Default: table."),
)  # fmt: skip


def api_server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the API-server options to a command or to its group; the command's win. The command gets them as `server`."""

    @functools.wraps(command)
    def with_options(*args: Any, **kwargs: Any) -> None:
        context = click.get_current_context()
        group_options: dict[str, Any] = context.obj or {}
        options = {name: kwargs.pop(name) for name in OPTION_NAMES}
        options = {name: options[name] or group_options.get(name) for name in OPTION_NAMES}
        context.obj = options
        command(*args, server=_parse_options(options), **kwargs)

    for option in reversed(_OPTIONS):
        with_options = option(with_options)
    return with_options


OPTION_NAMES = ("namespace", "context", "kubeconfig", "selector", "nodes", "account", "timeout_s", "output")


def _parse_options(options: dict[str, Any]) -> ApiServerOptions:
    return ApiServerOptions(
        kubeconfig=options["kubeconfig"],
        context=options["context"] or "",
        chosen=AgentSelector(
            namespace=options["namespace"] or "", labels=options["selector"] or "", nodes=tuple(options["nodes"] or ())
        ),
        account=options["account"] or READER_ACCOUNT,
        timeout_s=options["timeout_s"] or DEFAULT_REQUEST_TIMEOUT_S,
        as_json=options["output"] == "json",
    )


def print_lines(lines: Sequence[str]) -> None:
    """Print lines to standard output."""
    for line in lines:
        click.echo(line)

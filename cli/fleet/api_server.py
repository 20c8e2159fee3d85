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
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Generic, TypeVar

import click
import msgspec

from api import VERSION
from api.interfaces import Unavailable
from cli import formats
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
"""The API server opens a connection to an agent for each, and shares its own capacity with everybody."""
MAX_FLEET_ANSWER_BYTES = 16 << 20
"""Of one agent's answer where many are asked: together they have room in a laptop, whatever they say."""
MAX_RETRIES, RETRY_DELAY_S = 5, 1.0
"""An agent reviews one token of an address at a time, and the API server is one address: for others who ask too, pauses are
of different lengths."""
READER_ACCOUNT, TOKEN_LIFETIME_S = "dioptase-reader", 600
"""Whose token agents are shown that want one, and for how long it is good: the least that the API server gives."""
AUTHORIZATION_HEADER = "X-Dioptase-Authorization"
"""As agents take it, for the proxy does not pass Authorization on."""
UNREACHABLE_REMEDY = (
    "it has to listen where the control plane reaches its node (--listen), over TLS if its probe says HTTPS"
)
VERSION_REMEDY = "see what listens there: kubectl describe its pod"
T = TypeVar("T")


class AgentReply(msgspec.Struct, Generic[T], frozen=True):
    """What one agent answered; None with the problem where it did not."""

    member: AgentEndpoint
    answer: T | None
    problem: str = ""
    remedy: str = ""


class AgentSelector(msgspec.Struct, frozen=True, kw_only=True):
    """Whom to ask."""

    namespace: str = ""
    """Of the agents; empty looks in all."""
    labels: str = ""
    """Of the nodes, in kubectl's syntax."""
    nodes: tuple[str, ...] = ()


class _ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The API server's own words, or the agent's."""

    kind: str = ""
    message: str = ""
    reason: str = ""
    error: str = ""
    remedy: str = ""


async def find_fleet(client: KubeClient, chosen: AgentSelector) -> list[AgentEndpoint]:
    """The nodes that are asked for and their agents. Raises Unavailable where that cannot be known."""
    pods, nodes = await asyncio.gather(
        list_pods(client, AGENT_SELECTOR, chosen.namespace), _list_nodes(client, chosen.labels)
    )
    places = sorted({pod.metadata.namespace for pod in pods})
    if len(places) > 1:
        # Whoever may make pods somewhere can label them as agents.
        raise Unavailable(f"there are agents in several namespaces: {', '.join(places)}", "choose one with -n")
    if not pods:
        where = f"in namespace {chosen.namespace}" if chosen.namespace else "in any namespace"
        raise Unavailable(
            f"no pod {where} is labelled {AGENT_SELECTOR}", "install the agents, or name their namespace with -n"
        )
    found = find_agent_endpoints(nodes, pods, chosen.nodes)
    known = {member.node for member in found}
    for name in chosen.nodes:
        if name not in known:
            raise Unavailable(f"there is no node {name!r:.80}", "kubectl get nodes lists them")
    return found


async def list_controller_pods(client: KubeClient, namespace: str) -> list[FleetPod]:
    """The controller's pods, in the order of their names."""
    return await list_pods(client, CONTROLLER_SELECTOR, namespace)


async def list_pods(client: KubeClient, labels: str, namespace: str) -> list[FleetPod]:
    """Pods with these labels. Raises Unavailable."""
    try:
        found = await client.list(POD_RESOURCE, ListScope(namespace=namespace, labels=labels))
    except (ApiError, ApiUnreachable, ValueError) as error:
        raise Unavailable(f"pods cannot be listed: {error}", _list_remedy(error, "pods")) from error
    for key, problem in found.problems.items():
        raise Unavailable(f"pod {key} is not as pods are: {problem}", "see kubectl get pod -o yaml")
    return [found.objects[key] for key in sorted(found.objects)]


async def _list_nodes(client: KubeClient, labels: str) -> list[FleetNode] | None:
    """None where this person may not list them, which only matters to who chooses nodes by their labels."""
    try:
        found = await client.list(NODE_RESOURCE, ListScope(labels=labels))
    except (ApiError, ApiUnreachable) as error:
        if isinstance(error, ApiError) and error.status == HTTPStatus.FORBIDDEN and not labels:
            return None
        raise Unavailable(f"nodes cannot be listed: {error}", _list_remedy(error, "nodes")) from error
    return list(found.objects.values())


class AgentProxy:
    """Asks agents, and shows those that want a token one of the account that is there to look at them: never a person's own,
    for whoever may make pods can call one an agent."""

    def __init__(self, client: KubeClient, account: str) -> None:
        self._client, self._account = client, account
        self._turns = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)
        self._tokens: dict[str, tuple[float, asyncio.Task[str]]] = {}
        """By namespace, and when each was asked for. One that could not be had is told to all who wait just then, for of a
        thousand agents each would ask again; a moment later it is tried anew."""
        self._wanting: set[str] = set()
        """Pods that want one, by path."""

    async def all(self, asked: Sequence[AgentEndpoint], path: str, kind: type[T]) -> list[AgentReply[T]]:
        """What each of them says at `path`, in the same order."""
        return list(await asyncio.gather(*(self.one(member, path, kind, MAX_FLEET_ANSWER_BYTES) for member in asked)))

    async def one(
        self, member: AgentEndpoint, path: str, kind: type[T], most: int = MAX_RESPONSE_BYTES
    ) -> AgentReply[T]:
        """What one agent says."""
        if member.problem:
            return AgentReply(member, None, member.problem, member.remedy)
        try:
            raw = await self.raw(member, path, most)
        except ApiUnreachable as error:
            return AgentReply(member, None, *no_answer_reason(error))
        except Unavailable as error:
            return AgentReply(member, None, error.reason, error.remedy)
        if raw.status != HTTPStatus.OK:
            return AgentReply(member, None, *refusal_reason(member, raw))
        try:
            return AgentReply(member, msgspec.json.decode(raw.body, type=kind))
        except (ValueError, RecursionError) as error:  # msgspec's own are ones
            return AgentReply(
                member, None, f"what it answers is not what an agent of this version says: {error}", VERSION_REMEDY
            )

    async def raw(self, member: AgentEndpoint, path: str, most: int = MAX_RESPONSE_BYTES) -> RawResponse:
        """What one agent answers, or the API server in its place. Raises Unreachable, and Unavailable without a token."""
        async with self._turns:
            return await self._get(member, path, most)

    async def _get(self, member: AgentEndpoint, path: str, most: int) -> RawResponse:
        """The agent's answer, asked again with a token where it wants one, and later where it asks for patience."""
        left = MAX_RETRIES
        while True:
            headers = await self._headers(member)
            raw = await self._client.raw(member.path + path, "pods/proxy", headers, most)
            if is_from_api_server(raw):
                return raw
            if raw.status == HTTPStatus.UNAUTHORIZED and not headers:
                self._wanting.add(member.path)
            elif raw.status == HTTPStatus.TOO_MANY_REQUESTS and left:
                left -= 1
                await asyncio.sleep(RETRY_DELAY_S * random.uniform(0.5, 1.5))
            else:
                return raw

    async def _headers(self, member: AgentEndpoint) -> dict[str, str]:
        if member.path not in self._wanting:
            return {}
        now_s = time.monotonic()
        made_s, token = self._tokens.get(member.namespace, (now_s - TOKEN_LIFETIME_S, None))
        if token is None or now_s - made_s > (RETRY_DELAY_S if _has_failed(token) else TOKEN_LIFETIME_S / 2):
            token = asyncio.create_task(self._token(member.namespace))
            self._tokens[member.namespace] = now_s, token
        # Whoever leaves while it is asked for takes it from none of the others.
        return {AUTHORIZATION_HEADER: f"Bearer {await asyncio.shield(token)}"}

    async def _token(self, namespace: str) -> str:
        try:
            return await self._client.token(f"{namespace}/{self._account}", TOKEN_LIFETIME_S)
        except (ApiError, ApiUnreachable) as error:
            raise Unavailable(
                f"it wants a token, and you get none of account {namespace}/{self._account}: {error}",
                "let somebody give you the right to `create` serviceaccounts/token of it, or name another with --account",
            ) from error


def _has_failed(token: asyncio.Task[str]) -> bool:
    return token.done() and (token.cancelled() or token.exception() is not None)


def is_from_api_server(raw: RawResponse) -> bool:
    """Whether it is the API server that answers, and not the agent."""
    return _parse_error_body(raw.body).kind == "Status"


def no_answer_reason(error: ApiUnreachable) -> tuple[str, str]:
    """Why nothing came back, and what helps."""
    if isinstance(error.__cause__, TimeoutError):
        return (
            "no answer in time",
            "--request-timeout waits for longer; kubectl logs of its pod says whether it is well",
        )
    # Without the address and path, which are the same for all.
    return f"no answer: {str(error).rpartition(': ')[2]}", "see whether `kubectl get nodes` is answered"


def refusal_reason(member: AgentEndpoint, raw: RawResponse) -> tuple[str, str]:
    """Why there is no answer, and what helps: of the API server, of the way to the agent, or of the agent itself."""
    said = _parse_error_body(raw.body)
    if said.kind == "Status":
        message = parse_api_error(raw.status, raw.body).message.removeprefix("error trying to reach service: ")
        if raw.status == HTTPStatus.FORBIDDEN:
            return f"you may not ask it: {message}", f"the right to `get` pods/proxy in namespace {member.namespace}"
        if raw.status == HTTPStatus.NOT_FOUND:
            return f"its agent {member.pod} has just gone", "ask again"
        if raw.status == HTTPStatus.UNAUTHORIZED:
            return f"the API server does not know you: {message}", "log in anew"
        return f"the API server cannot reach it: {message}", UNREACHABLE_REMEDY
    if said.error:
        return said.error, said.remedy
    text = " ".join(raw.body[:120].decode(errors="replace").split())
    return f"{raw.status}{f': {text}' if text else ''}", VERSION_REMEDY


def _parse_error_body(body: bytes) -> _ErrorBody:
    try:
        return msgspec.json.decode(body, type=_ErrorBody)
    except (ValueError, RecursionError):
        return _ErrorBody()


def _list_remedy(error: Any, what: str) -> str:
    if isinstance(error, ApiError) and error.status == HTTPStatus.FORBIDDEN:
        return f"let somebody give you the right to list {what}; -n asks of one namespace only"
    if isinstance(error, ApiError) and error.status == HTTPStatus.UNAUTHORIZED:
        return "log in anew, or see `kubectl config view`"
    return "see whether `kubectl get nodes` is answered"


DEFAULT_REQUEST_TIMEOUT_S = 10.0
ResultT = TypeVar("ResultT")


class ApiServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which cluster, whom in it, and how to say what they said."""

    kubeconfig: Path | None = None
    context: str = ""
    chosen: AgentSelector = AgentSelector()
    account: str = READER_ACCOUNT
    timeout_s: float = DEFAULT_REQUEST_TIMEOUT_S
    as_json: bool = False

    def access(self) -> ApiAccess:
        """As kubectl finds it: the option, KUBECONFIG, ~/.kube/config, a pod's own account. Raises Unavailable."""
        listed = os.environ.get("KUBECONFIG", "")
        home = default_kubeconfig_path(os.environ)
        if self.kubeconfig is not None:
            paths = [self.kubeconfig]
        elif listed:
            paths = [Path(part) for part in listed.split(os.pathsep) if part]
        elif home.exists() or self.context:
            paths = [home]
        else:
            return load_access(os.environ, check_yaml)
        return load_kubeconfig_access(paths, check_yaml, self.context, logins=True)

    def ask(
        self, command: str, question: Callable[[KubeClient, AgentProxy, list[AgentEndpoint]], Awaitable[ResultT]]
    ) -> ResultT:
        """What comes of it; whatever goes wrong with the cluster as a whole ends the program with a remedy and status 1."""

        async def asked() -> ResultT:
            async with KubeClient(self.access(), f"kubectl-dioptase/{VERSION}", self.timeout_s) as client:
                return await question(client, AgentProxy(client, self.account), await find_fleet(client, self.chosen))

        try:
            return asyncio.run(asked())
        except Unavailable as error:
            # Agents' own words among them.
            said = (f"dioptase kubectl {command}: {error.reason}", f"  remedy: {error.remedy}")
            click.echo("\n".join(formats.printable(line) for line in said), err=True)
            sys.exit(1)


_OPTIONS = (
    click.option("-n", "--namespace", help="Of the agents; all are looked in unless one is named."),
    click.option("--context", help="Of the kubeconfig."),
    click.option("--kubeconfig", type=click.Path(path_type=Path), help="Instead of KUBECONFIG and ~/.kube/config."),
    click.option("-l", "--selector", help="Only nodes with these labels, in kubectl's syntax."),
    click.option("--node", "nodes", multiple=True, help="Only this node; may be given several times."),
    click.option("--account", help=f"Whose token agents are shown that want one; {READER_ACCOUNT} unless set."),
    click.option(
        "--request-timeout", "timeout_s", type=Seconds(min=0.1), help=f"Seconds for each agent; {DEFAULT_REQUEST_TIMEOUT_S:g} unless set."
    ),
    click.option("-o", "--output", type=click.Choice(["table", "json"]), help="table unless set."),
)  # fmt: skip


def api_server_options(command: Callable[..., None]) -> Callable[..., None]:
    """All of them on a command, or on the group before it: what is nearer to the end counts. The command gets a `door`."""

    @functools.wraps(command)
    def opened(*words: Any, **given: Any) -> None:
        context = click.get_current_context()
        before: dict[str, Any] = context.obj or {}
        said = {name: given.pop(name) for name in OPTION_NAMES}
        said = {name: said[name] or before.get(name) for name in OPTION_NAMES}
        context.obj = said
        command(*words, door=_parse_options(said), **given)

    for option in reversed(_OPTIONS):
        opened = option(opened)
    return opened


OPTION_NAMES = ("namespace", "context", "kubeconfig", "selector", "nodes", "account", "timeout_s", "output")


def _parse_options(said: dict[str, Any]) -> ApiServerOptions:
    return ApiServerOptions(
        kubeconfig=said["kubeconfig"],
        context=said["context"] or "",
        chosen=AgentSelector(
            namespace=said["namespace"] or "", labels=said["selector"] or "", nodes=tuple(said["nodes"] or ())
        ),
        account=said["account"] or READER_ACCOUNT,
        timeout_s=said["timeout_s"] or DEFAULT_REQUEST_TIMEOUT_S,
        as_json=said["output"] == "json",
    )


def print_lines(lines: Sequence[str]) -> None:
    """On standard output."""
    for line in lines:
        click.echo(line)

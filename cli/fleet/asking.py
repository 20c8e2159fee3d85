"""Ask all agents the same question at once through the API server's proxy: bounded, each with its own time limit.

Whoever cannot be reached is an answer too, with the reason. The API server takes a person's credentials for itself and passes
none on; an agent that wants some takes a token from a header of its own.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Generic, TypeVar

import msgspec

from api.ports import Unavailable
from cli.fleet.members import AGENTS, CONTROLLERS, NODES, PODS, Member, Node, Pod, members
from kube.client import LARGEST_BYTES, Client, Raw, Scope
from kube.errors import ApiError, Unreachable, refusal

AT_ONCE = 32
"""The API server opens a connection to an agent for each, and shares its own capacity with everybody."""
OF_MANY_BYTES = 16 << 20
"""Of one agent's answer where many are asked: together they have room in a laptop, whatever they say."""
PATIENCE, PAUSE_S = 5, 1.0
"""An agent reviews one token of an address at a time, and the API server is one address: for others who ask too, pauses are
of different lengths."""
ACCOUNT, TOKEN_S = "dioptase-reader", 600
"""Whose token agents are shown that want one, and for how long it is good: the least that the API server gives."""
BESIDE = "X-Dioptase-Authorization"
"""As agents take it, for the proxy does not pass Authorization on."""
REACH = "it has to listen where the control plane reaches its node (--listen), over TLS if its probe says HTTPS"
UPGRADE = "see what listens there: kubectl describe its pod"
T = TypeVar("T")


class Told(msgspec.Struct, Generic[T], frozen=True):
    """What one agent answered; None with the problem where it did not."""

    member: Member
    answer: T | None
    problem: str = ""
    remedy: str = ""


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """Whom to ask."""

    namespace: str = ""
    """Of the agents; empty looks in all."""
    labels: str = ""
    """Of the nodes, in kubectl's syntax."""
    nodes: tuple[str, ...] = ()


class _Said(msgspec.Struct, frozen=True, kw_only=True):
    """The API server's own words, or the agent's."""

    kind: str = ""
    message: str = ""
    reason: str = ""
    error: str = ""
    remedy: str = ""


async def fleet_of(client: Client, chosen: Chosen) -> list[Member]:
    """The nodes that are asked for and their agents. Raises Unavailable where that cannot be known."""
    pods, nodes = await asyncio.gather(listed(client, AGENTS, chosen.namespace), _nodes(client, chosen.labels))
    places = sorted({pod.metadata.namespace for pod in pods})
    if len(places) > 1:
        # Whoever may make pods somewhere can label them as agents.
        raise Unavailable(f"there are agents in several namespaces: {', '.join(places)}", "choose one with -n")
    if not pods:
        where = f"in namespace {chosen.namespace}" if chosen.namespace else "in any namespace"
        raise Unavailable(f"no pod {where} is labelled {AGENTS}", "install the agents, or name their namespace with -n")
    found = members(nodes, pods, chosen.nodes)
    known = {member.node for member in found}
    for name in chosen.nodes:
        if name not in known:
            raise Unavailable(f"there is no node {name!r:.80}", "kubectl get nodes lists them")
    return found


async def controllers(client: Client, namespace: str) -> list[Pod]:
    """The controller's pods, in the order of their names."""
    return await listed(client, CONTROLLERS, namespace)


async def listed(client: Client, labels: str, namespace: str) -> list[Pod]:
    """Pods with these labels. Raises Unavailable."""
    try:
        found = await client.list(PODS, Scope(namespace=namespace, labels=labels))
    except (ApiError, Unreachable, ValueError) as error:
        raise Unavailable(f"pods cannot be listed: {error}", _remedy(error, "pods")) from error
    for key, problem in found.problems.items():
        raise Unavailable(f"pod {key} is not as pods are: {problem}", "see kubectl get pod -o yaml")
    return [found.objects[key] for key in sorted(found.objects)]


async def _nodes(client: Client, labels: str) -> list[Node] | None:
    """None where this person may not list them, which only matters to who chooses nodes by their labels."""
    try:
        found = await client.list(NODES, Scope(labels=labels))
    except (ApiError, Unreachable) as error:
        if isinstance(error, ApiError) and error.status == HTTPStatus.FORBIDDEN and not labels:
            return None
        raise Unavailable(f"nodes cannot be listed: {error}", _remedy(error, "nodes")) from error
    return list(found.objects.values())


class Asker:
    """Asks agents, and shows those that want a token one of the account that is there to look at them: never a person's own,
    for whoever may make pods can call one an agent."""

    def __init__(self, client: Client, account: str) -> None:
        self._client, self._account = client, account
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._tokens: dict[str, tuple[float, asyncio.Task[str]]] = {}
        """By namespace, and when each was asked for. One that could not be had is told to all who wait just then, for of a
        thousand agents each would ask again; a moment later it is tried anew."""
        self._wanting: set[str] = set()
        """Pods that want one, by path."""

    async def all(self, asked: Sequence[Member], path: str, kind: type[T]) -> list[Told[T]]:
        """What each of them says at `path`, in the same order."""
        return list(await asyncio.gather(*(self.one(member, path, kind, OF_MANY_BYTES) for member in asked)))

    async def one(self, member: Member, path: str, kind: type[T], most: int = LARGEST_BYTES) -> Told[T]:
        """What one agent says."""
        if member.problem:
            return Told(member, None, member.problem, member.remedy)
        try:
            raw = await self.raw(member, path, most)
        except Unreachable as error:
            return Told(member, None, *unanswered(error))
        except Unavailable as error:
            return Told(member, None, error.reason, error.remedy)
        if raw.status != HTTPStatus.OK:
            return Told(member, None, *refused(member, raw))
        try:
            return Told(member, msgspec.json.decode(raw.body, type=kind))
        except (ValueError, RecursionError) as error:  # msgspec's own are ones
            return Told(member, None, f"what it answers is not what an agent of this version says: {error}", UPGRADE)

    async def raw(self, member: Member, path: str, most: int = LARGEST_BYTES) -> Raw:
        """What one agent answers, or the API server in its place. Raises Unreachable, and Unavailable without a token."""
        async with self._turns:
            return await self._get(member, path, most)

    async def _get(self, member: Member, path: str, most: int) -> Raw:
        """The agent's answer, asked again with a token where it wants one, and later where it asks for patience."""
        left = PATIENCE
        while True:
            headers = await self._headers(member)
            raw = await self._client.raw(member.path + path, "pods/proxy", headers, most)
            if from_api_server(raw):
                return raw
            if raw.status == HTTPStatus.UNAUTHORIZED and not headers:
                self._wanting.add(member.path)
            elif raw.status == HTTPStatus.TOO_MANY_REQUESTS and left:
                left -= 1
                await asyncio.sleep(PAUSE_S * random.uniform(0.5, 1.5))
            else:
                return raw

    async def _headers(self, member: Member) -> dict[str, str]:
        if member.path not in self._wanting:
            return {}
        now_s = time.monotonic()
        made_s, token = self._tokens.get(member.namespace, (now_s - TOKEN_S, None))
        if token is None or now_s - made_s > (PAUSE_S if _failed(token) else TOKEN_S / 2):
            token = asyncio.create_task(self._token(member.namespace))
            self._tokens[member.namespace] = now_s, token
        # Whoever leaves while it is asked for takes it from none of the others.
        return {BESIDE: f"Bearer {await asyncio.shield(token)}"}

    async def _token(self, namespace: str) -> str:
        try:
            return await self._client.token(f"{namespace}/{self._account}", TOKEN_S)
        except (ApiError, Unreachable) as error:
            raise Unavailable(
                f"it wants a token, and you get none of account {namespace}/{self._account}: {error}",
                "let somebody give you the right to `create` serviceaccounts/token of it, or name another with --account",
            ) from error


def _failed(token: asyncio.Task[str]) -> bool:
    return token.done() and (token.cancelled() or token.exception() is not None)


def from_api_server(raw: Raw) -> bool:
    """Whether it is the API server that answers, and not the agent."""
    return _said(raw.body).kind == "Status"


def unanswered(error: Unreachable) -> tuple[str, str]:
    """Why nothing came back, and what helps."""
    if isinstance(error.__cause__, TimeoutError):
        return (
            "no answer in time",
            "--request-timeout waits for longer; kubectl logs of its pod says whether it is well",
        )
    # Without the address and path, which are the same for all.
    return f"no answer: {str(error).rpartition(': ')[2]}", "see whether `kubectl get nodes` is answered"


def refused(member: Member, raw: Raw) -> tuple[str, str]:
    """Why there is no answer, and what helps: of the API server, of the way to the agent, or of the agent itself."""
    said = _said(raw.body)
    if said.kind == "Status":
        message = refusal(raw.status, raw.body).message.removeprefix("error trying to reach service: ")
        if raw.status == HTTPStatus.FORBIDDEN:
            return f"you may not ask it: {message}", f"the right to `get` pods/proxy in namespace {member.namespace}"
        if raw.status == HTTPStatus.NOT_FOUND:
            return f"its agent {member.pod} has just gone", "ask again"
        if raw.status == HTTPStatus.UNAUTHORIZED:
            return f"the API server does not know you: {message}", "log in anew"
        return f"the API server cannot reach it: {message}", REACH
    if said.error:
        return said.error, said.remedy
    text = " ".join(raw.body[:120].decode(errors="replace").split())
    return f"{raw.status}{f': {text}' if text else ''}", UPGRADE


def _said(body: bytes) -> _Said:
    try:
        return msgspec.json.decode(body, type=_Said)
    except (ValueError, RecursionError):
        return _Said()


def _remedy(error: Any, what: str) -> str:
    if isinstance(error, ApiError) and error.status == HTTPStatus.FORBIDDEN:
        return f"let somebody give you the right to list {what}; -n asks of one namespace only"
    if isinstance(error, ApiError) and error.status == HTTPStatus.UNAUTHORIZED:
        return "log in anew, or see `kubectl config view`"
    return "see whether `kubectl get nodes` is answered"

"""Ask all agents the same question at once through the API server's proxy: bounded, each with its own time limit.

Whoever cannot be reached is an answer too, with the reason. The API server takes a person's credentials for itself and passes
none on, so an agent that wants some has to be told by the network who asks; see docs/kubectl.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Generic, TypeVar

import msgspec

from api.ports import Unavailable
from cli.fleet.members import AGENTS, CONTROLLERS, NODES, PODS, Member, Node, Pod, members
from kube.client import Client, Raw, Scope
from kube.errors import ApiError, Unreachable, refusal

AT_ONCE = 32
"""The API server opens a connection to an agent for each, and shares its own capacity with everybody."""
T = TypeVar("T")


class Told(msgspec.Struct, Generic[T], frozen=True):
    """What one agent answered; None with the problem where it did not."""

    member: Member
    answer: T | None
    problem: str = ""


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


async def find(client: Client, chosen: Chosen) -> list[Member]:
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


async def ask(client: Client, asked: Sequence[Member], path: str, kind: type[T]) -> list[Told[T]]:
    """What each of them says at `path`, in the same order."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(member: Member) -> Told[T]:
        if member.problem:
            return Told(member, None, member.problem)
        async with turns:
            return await ask_one(client, member, path, kind)

    return list(await asyncio.gather(*(one(member) for member in asked)))


async def ask_one(client: Client, member: Member, path: str, kind: type[T]) -> Told[T]:
    """What one agent says."""
    try:
        raw = await client.raw(member.path + path, "pods/proxy")
    except Unreachable as error:
        return Told(member, None, f"no answer: {_short(error)}")
    if raw.status != HTTPStatus.OK:
        return Told(member, None, refused(member, raw))
    try:
        return Told(member, msgspec.json.decode(raw.body, type=kind))
    except (ValueError, RecursionError) as error:  # msgspec's own are ones
        return Told(member, None, f"what it answers is not what an agent of this version says: {error}")


def refused(member: Member, raw: Raw) -> str:
    """Why there is no answer, and what helps: of the API server, of the way to the agent, or of the agent itself."""
    said = _said(raw.body)
    if said.kind == "Status":
        message = refusal(raw.status, raw.body).message
        if raw.status == HTTPStatus.FORBIDDEN:
            return (
                f"you may not ask it: {message}; to `get` pods/proxy in namespace {member.namespace} is what it takes"
            )
        if raw.status == HTTPStatus.NOT_FOUND:
            return f"its agent {member.pod} has just gone; ask again"
        return f"the API server cannot reach it at port {member.port}: {message}"
    if raw.status == HTTPStatus.UNAUTHORIZED:
        return "the agent wants credentials, and the API server's proxy passes none on; see docs/kubectl.md"
    if said.error:
        return f"{said.error}; {said.remedy}" if said.remedy else said.error
    text = " ".join(raw.body[:120].decode(errors="replace").split())
    return f"{raw.status}{f': {text}' if text else ''}"


def _said(body: bytes) -> _Said:
    try:
        return msgspec.json.decode(body, type=_Said)
    except (ValueError, RecursionError):
        return _Said()


def _short(error: Exception) -> str:
    """Without the address and path, which are the same for all."""
    return str(error).rpartition(": ")[2] or type(error).__name__


def _remedy(error: Any, what: str) -> str:
    if isinstance(error, ApiError) and error.status == HTTPStatus.FORBIDDEN:
        return f"let somebody give you the right to list {what}; -n asks of one namespace only"
    if isinstance(error, ApiError) and error.status == HTTPStatus.UNAUTHORIZED:
        return "log in anew, or see `kubectl config view`"
    return "see whether `kubectl get nodes` is answered"

"""Which agent answers for which node: from nodes and pods as the API server lists them to who is to be asked where. Pure.

Nothing but a pod's labels says that it is an agent, and nothing but its probes and ports where it listens; so whatever chart
it came from is good enough.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kube.objects import Meta, Resource

NAME = "app.kubernetes.io/name"
COMPONENT = "app.kubernetes.io/component"
AGENTS = f"{NAME}=dioptase,{COMPONENT}=agent"
CONTROLLERS = f"{NAME}=dioptase,{COMPONENT}=controller"
USUAL_PORT = 9102
PORT_NAMES = ("https", "https-metrics", "http", "http-metrics", "metrics")
HEALTH = ("/healthz", "/readyz")
MOST_LINES, MOST_LETTERS = 3, 300
"""Of what a program said before it ended."""


class _Struct(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    pass


class _Get(_Struct, frozen=True, kw_only=True):
    path: str = "/"
    port: int | str = 0
    scheme: str = "HTTP"


class _Probe(_Struct, frozen=True, kw_only=True):
    http_get: _Get | None = None


class _Port(_Struct, frozen=True, kw_only=True):
    name: str = ""
    container_port: int = 0


class _Container(_Struct, frozen=True, kw_only=True):
    name: str = ""
    image: str = ""
    ports: tuple[_Port, ...] = ()
    readiness_probe: _Probe | None = None
    liveness_probe: _Probe | None = None
    startup_probe: _Probe | None = None


class _PodSpec(_Struct, frozen=True, kw_only=True):
    node_name: str = ""
    containers: tuple[_Container, ...] = ()


class _Why(_Struct, frozen=True, kw_only=True):
    reason: str = ""
    message: str = ""


class _State(_Struct, frozen=True, kw_only=True):
    waiting: _Why | None = None
    terminated: _Why | None = None


class _ContainerStatus(_Struct, frozen=True, kw_only=True):
    ready: bool = False
    restart_count: int = 0
    state: _State = _State()
    last_state: _State = _State()


class _PodStatus(_Struct, frozen=True, kw_only=True):
    phase: str = ""
    reason: str = ""
    container_statuses: tuple[_ContainerStatus, ...] = ()


class Pod(_Struct, frozen=True, kw_only=True):
    """What is looked at of a pod of ours."""

    metadata: Meta = Meta()
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()

    @property
    def ready(self) -> bool:
        """Whether all of its containers are."""
        statuses = self.status.container_statuses
        return self.status.phase == "Running" and bool(statuses) and all(one.ready for one in statuses)


class _NodeStatus(_Struct, frozen=True, kw_only=True):
    allocatable: Mapping[str, str] = {}


class Node(_Struct, frozen=True, kw_only=True):
    """What is looked at of a node."""

    metadata: Meta = Meta()
    status: _NodeStatus = _NodeStatus()


PODS = Resource("", "v1", "pods", "Pod", Pod, namespaced=True)
NODES = Resource("", "v1", "nodes", "Node", Node)


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One node, and the agent that answers for it."""

    node: str
    namespace: str = ""
    pod: str = ""
    scheme: str = "http"
    port: int = USUAL_PORT
    image: str = ""
    restarts: int = 0
    allocatable_cpu: str = ""
    """A quantity; empty where nobody listed the node."""
    problem: str = ""
    """Why it cannot be asked at all,"""
    remedy: str = ""
    """and what helps."""

    @property
    def path(self) -> str:
        """Of the API server's proxy to it, without a slash at the end."""
        scheme = "https:" if self.scheme == "https" else ""
        return f"/api/v1/namespaces/{self.namespace}/pods/{scheme}{self.pod}:{self.port}/proxy"


def members(nodes: Sequence[Node] | None, pods: Iterable[Pod], wanted: Sequence[str] = ()) -> list[Member]:
    """One for each node, in the order of their names, or for those that are wanted; a node without an agent is one too.

    Nodes are None where nobody may list them: then every node that an agent is on is one.
    """
    by_node: dict[str, list[Pod]] = {}
    for pod in pods:
        if pod.spec.node_name:
            by_node.setdefault(pod.spec.node_name, []).append(pod)
    cpus = {} if nodes is None else {node.metadata.name: node.status.allocatable.get("cpu", "") for node in nodes}
    names = sorted(by_node if nodes is None else cpus)
    found = []
    for name in [name for name in names if not wanted or name in wanted]:
        # While an agent is replaced, there are two for a moment: the one that stays answers.
        best = max(by_node.get(name, ()), key=_worth, default=None)
        found.append(_member(name, best, cpus.get(name, "")))
    return found


def _worth(pod: Pod) -> tuple[bool, bool, bool, str]:
    here = pod.metadata.deletion_timestamp is None
    return here, pod.status.phase == "Running", pod.ready, pod.metadata.creation_timestamp or ""


def _member(node: str, pod: Pod | None, cpu: str) -> Member:
    if pod is None:
        return Member(node=node, allocatable_cpu=cpu, problem="no agent runs here")
    scheme, port = address(pod)
    problem, remedy = trouble(pod)
    return Member(
        node=node,
        namespace=pod.metadata.namespace,
        pod=pod.metadata.name,
        scheme=scheme,
        port=port,
        image=pod.spec.containers[0].image if pod.spec.containers else "",
        restarts=sum(status.restart_count for status in pod.status.container_statuses),
        allocatable_cpu=cpu,
        problem=f"its agent {pod.metadata.name} does not run: {problem}" if problem else "",
        remedy=remedy,
    )


def address(pod: Pod) -> tuple[str, int]:
    """Scheme and port at which an agent's pod is asked: where its health is probed, else a port with a usual name."""
    for container in pod.spec.containers:
        named = {port.name: port.container_port for port in container.ports}
        for probe in (container.readiness_probe, container.liveness_probe, container.startup_probe):
            get = None if probe is None else probe.http_get
            if get is None or get.path not in HEALTH:
                continue
            port = get.port if isinstance(get.port, int) else named.get(get.port, 0)
            if port:
                return get.scheme.lower(), port
        for name in PORT_NAMES:
            if name in named:
                return "https" if name.startswith("https") else "http", named[name]
    return "http", USUAL_PORT


def trouble(pod: Pod) -> tuple[str, str]:
    """Why a pod cannot be asked, and where more is to be read; empty where it can. One that is not ready is asked: it may say
    why."""
    at = f"-n {pod.metadata.namespace} {pod.metadata.name}"
    statuses = pod.status.container_statuses
    if pod.status.phase == "Running":
        for one in statuses:
            if one.state.terminated is not None:
                return f"it ended with {_ended(one.state.terminated)}", f"kubectl logs {at}"
            if one.state.waiting is not None:
                last = one.last_state.terminated
                if last is None:
                    return _why(one.state.waiting), f"kubectl describe pod {at}"
                return f"{one.state.waiting.reason}; it ended with {_ended(last)}", f"kubectl logs {at} --previous"
        return "", ""
    said = pod.status.reason or next((one.state.waiting.reason for one in statuses if one.state.waiting), "")
    return f"{pod.status.phase or 'unknown'}{f', {said}' if said else ''}", f"kubectl describe pod {at}"


def _why(why: _Why) -> str:
    return " ".join((why.reason, why.message)).strip()


def _ended(how: _Why) -> str:
    """The reason, such as OOMKilled, and the program's own words, which tell more than the word Error."""
    said = last_words(how.message)
    return said if said and how.reason in ("", "Error") else ": ".join(part for part in (how.reason, said) if part)


def last_words(message: str) -> str:
    """What a program said before it ended, on one line: its error where it names one, else its last lines."""
    error = re.search(r"^Error: ", message, re.MULTILINE)
    lines = [line for part in message[error.start() if error else 0 :].splitlines() if (line := " ".join(part.split()))]
    said = " / ".join(lines[:MOST_LINES] if error else lines[-MOST_LINES:])
    return said if len(said) <= MOST_LETTERS else f"{said[: MOST_LETTERS - 1]}…"

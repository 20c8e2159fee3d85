"""Finds the agent pod and its address for each node, from nodes and pods as the API server lists them. Pure.
Agents are recognised by pod labels, addresses by probes and ports, so any chart works.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kube.objects import KubeMetadata, ResourceType

NAME_LABEL = "app.kubernetes.io/name"
COMPONENT_LABEL = "app.kubernetes.io/component"
AGENT_SELECTOR = f"{NAME_LABEL}=dioptase,{COMPONENT_LABEL}=agent"
CONTROLLER_SELECTOR = f"{NAME_LABEL}=dioptase,{COMPONENT_LABEL}=controller"
DEFAULT_AGENT_PORT = 9102
PORT_NAMES = ("https", "https-metrics", "http", "http-metrics", "metrics")
HEALTH_PATHS = ("/healthz", "/readyz")
MAX_MESSAGE_LINES, MAX_MESSAGE_CHARS = 3, 300
"""Of what a program said before it ended."""


class _KubeStruct(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    pass


class _HttpGet(_KubeStruct, frozen=True, kw_only=True):
    path: str = "/"
    port: int | str = 0
    scheme: str = "HTTP"


class _Probe(_KubeStruct, frozen=True, kw_only=True):
    http_get: _HttpGet | None = None


class _Port(_KubeStruct, frozen=True, kw_only=True):
    name: str = ""
    container_port: int = 0


class _Container(_KubeStruct, frozen=True, kw_only=True):
    name: str = ""
    image: str = ""
    ports: tuple[_Port, ...] = ()
    readiness_probe: _Probe | None = None
    liveness_probe: _Probe | None = None
    startup_probe: _Probe | None = None


class _PodSpec(_KubeStruct, frozen=True, kw_only=True):
    node_name: str = ""
    containers: tuple[_Container, ...] = ()


class _StateDetail(_KubeStruct, frozen=True, kw_only=True):
    reason: str = ""
    message: str = ""


class _ContainerState(_KubeStruct, frozen=True, kw_only=True):
    waiting: _StateDetail | None = None
    terminated: _StateDetail | None = None


class _ContainerStatus(_KubeStruct, frozen=True, kw_only=True):
    ready: bool = False
    restart_count: int = 0
    state: _ContainerState = _ContainerState()
    last_state: _ContainerState = _ContainerState()


class _PodStatus(_KubeStruct, frozen=True, kw_only=True):
    phase: str = ""
    reason: str = ""
    container_statuses: tuple[_ContainerStatus, ...] = ()


class FleetPod(_KubeStruct, frozen=True, kw_only=True):
    """What is looked at of a pod of ours."""

    metadata: KubeMetadata = KubeMetadata()
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()

    @property
    def ready(self) -> bool:
        """Whether all of its containers are."""
        statuses = self.status.container_statuses
        return self.status.phase == "Running" and bool(statuses) and all(one.ready for one in statuses)


class _NodeStatus(_KubeStruct, frozen=True, kw_only=True):
    allocatable: Mapping[str, str] = {}


class FleetNode(_KubeStruct, frozen=True, kw_only=True):
    """What is looked at of a node."""

    metadata: KubeMetadata = KubeMetadata()
    status: _NodeStatus = _NodeStatus()


POD_RESOURCE = ResourceType("", "v1", "pods", "Pod", FleetPod, namespaced=True)
NODE_RESOURCE = ResourceType("", "v1", "nodes", "Node", FleetNode)


class AgentEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One node, and the agent that answers for it."""

    node: str
    namespace: str = ""
    pod: str = ""
    scheme: str = "http"
    port: int = DEFAULT_AGENT_PORT
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


def find_agent_endpoints(
    nodes: Sequence[FleetNode] | None, pods: Iterable[FleetPod], wanted: Sequence[str] = ()
) -> list[AgentEndpoint]:
    """One for each node, in the order of their names, or for those that are wanted; a node without an agent is one too.

    Nodes are None where nobody may list them: then every node that an agent is on is one.
    """
    by_node: dict[str, list[FleetPod]] = {}
    for pod in pods:
        if pod.spec.node_name:
            by_node.setdefault(pod.spec.node_name, []).append(pod)
    cpus = {} if nodes is None else {node.metadata.name: node.status.allocatable.get("cpu", "") for node in nodes}
    names = sorted(by_node if nodes is None else cpus)
    found = []
    for name in [name for name in names if not wanted or name in wanted]:
        # While an agent is replaced, there are two for a moment: the one that stays answers.
        best = max(by_node.get(name, ()), key=_preference, default=None)
        found.append(_agent_endpoint(name, best, cpus.get(name, "")))
    return found


def _preference(pod: FleetPod) -> tuple[bool, bool, bool, str]:
    here = pod.metadata.deletion_timestamp is None
    return here, pod.status.phase == "Running", pod.ready, pod.metadata.creation_timestamp or ""


def _agent_endpoint(node: str, pod: FleetPod | None, cpu: str) -> AgentEndpoint:
    if pod is None:
        return AgentEndpoint(node=node, allocatable_cpu=cpu, problem="no agent runs here")
    scheme, port = agent_address(pod)
    problem, remedy = pod_problem(pod)
    return AgentEndpoint(
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


def agent_address(pod: FleetPod) -> tuple[str, int]:
    """Scheme and port at which an agent's pod is asked: where its health is probed, else a port with a usual name."""
    for container in pod.spec.containers:
        named = {port.name: port.container_port for port in container.ports}
        for probe in (container.readiness_probe, container.liveness_probe, container.startup_probe):
            get = None if probe is None else probe.http_get
            if get is None or get.path not in HEALTH_PATHS:
                continue
            port = get.port if isinstance(get.port, int) else named.get(get.port, 0)
            if port:
                return get.scheme.lower(), port
        for name in PORT_NAMES:
            if name in named:
                return "https" if name.startswith("https") else "http", named[name]
    return "http", DEFAULT_AGENT_PORT


def pod_problem(pod: FleetPod) -> tuple[str, str]:
    """Why a pod cannot be asked, and where more is to be read; empty where it can. One that is not ready is asked: it may say
    why."""
    at = f"-n {pod.metadata.namespace} {pod.metadata.name}"
    statuses = pod.status.container_statuses
    if pod.status.phase == "Running":
        for one in statuses:
            if one.state.terminated is not None:
                return f"it ended with {_termination_text(one.state.terminated)}", f"kubectl logs {at}"
            if one.state.waiting is not None:
                last = one.last_state.terminated
                if last is None:
                    return _state_text(one.state.waiting), f"kubectl describe pod {at}"
                return (
                    f"{one.state.waiting.reason}; it ended with {_termination_text(last)}",
                    f"kubectl logs {at} --previous",
                )
        return "", ""
    said = pod.status.reason or next((one.state.waiting.reason for one in statuses if one.state.waiting), "")
    return f"{pod.status.phase or 'unknown'}{f', {said}' if said else ''}", f"kubectl describe pod {at}"


def _state_text(why: _StateDetail) -> str:
    return " ".join((why.reason, why.message)).strip()


def _termination_text(how: _StateDetail) -> str:
    """The reason, such as OOMKilled, and the program's own words, which tell more than the word Error."""
    said = termination_message(how.message)
    return said if said and how.reason in ("", "Error") else ": ".join(part for part in (how.reason, said) if part)


def termination_message(message: str) -> str:
    """What a program said before it ended, on one line: its error where it names one, else its last lines."""
    error = re.search(r"^Error: ", message, re.MULTILINE)
    lines = [line for part in message[error.start() if error else 0 :].splitlines() if (line := " ".join(part.split()))]
    said = " / ".join(lines[:MAX_MESSAGE_LINES] if error else lines[-MAX_MESSAGE_LINES:])
    return said if len(said) <= MAX_MESSAGE_CHARS else f"{said[: MAX_MESSAGE_CHARS - 1]}…"

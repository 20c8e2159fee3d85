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
    """The parts of a pod that the fleet commands read."""

    metadata: KubeMetadata = KubeMetadata()
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()

    @property
    def ready(self) -> bool:
        """Whether all containers are ready."""
        statuses = self.status.container_statuses
        return self.status.phase == "Running" and bool(statuses) and all(container.ready for container in statuses)


class _NodeStatus(_KubeStruct, frozen=True, kw_only=True):
    allocatable: Mapping[str, str] = {}


class FleetNode(_KubeStruct, frozen=True, kw_only=True):
    """The parts of a node that the fleet commands read."""

    metadata: KubeMetadata = KubeMetadata()
    status: _NodeStatus = _NodeStatus()


POD_RESOURCE = ResourceType("", "v1", "pods", "Pod", FleetPod, namespaced=True)
NODE_RESOURCE = ResourceType("", "v1", "nodes", "Node", FleetNode)


class AgentEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One node, and the agent on it."""

    node: str
    namespace: str = ""
    pod: str = ""
    scheme: str = "http"
    port: int = DEFAULT_AGENT_PORT
    image: str = ""
    restarts: int = 0
    allocatable_cpu: str = ""
    """A Kubernetes quantity; "" if the node could not be listed."""
    problem: str = ""
    """Why the agent cannot be reached; "" if it can be."""
    remedy: str = ""
    """What to do about the problem."""

    @property
    def path(self) -> str:
        """Path of the API server's proxy to the agent, without a slash at the end."""
        scheme = "https:" if self.scheme == "https" else ""
        return f"/api/v1/namespaces/{self.namespace}/pods/{scheme}{self.pod}:{self.port}/proxy"


def find_agent_endpoints(
    nodes: Sequence[FleetNode] | None, pods: Iterable[FleetPod], selected: Sequence[str] = ()
) -> list[AgentEndpoint]:
    """Return one endpoint per node, by name, or only for the selected nodes. A node without an agent has one with a `problem`.

    `nodes` is None if the user may not list nodes: then the nodes are those that have an agent.
    """
    by_node: dict[str, list[FleetPod]] = {}
    for pod in pods:
        if pod.spec.node_name:
            by_node.setdefault(pod.spec.node_name, []).append(pod)
    cpus = {} if nodes is None else {node.metadata.name: node.status.allocatable.get("cpu", "") for node in nodes}
    names = sorted(by_node if nodes is None else cpus)
    endpoints = []
    for name in [name for name in names if not selected or name in selected]:
        # While an agent is replaced, the node has two pods for a moment: prefer the one that stays.
        agent = max(by_node.get(name, ()), key=_preference, default=None)
        endpoints.append(_agent_endpoint(name, agent, cpus.get(name, "")))
    return endpoints


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
    """Return scheme and port of an agent's pod: those of its health probe, else of a port with a usual name."""
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
    """Return why the pod's agent cannot be reached, and a command that shows more; "" twice if it can be. A pod that is not
    ready can be reached: its agent may report why."""
    pod_args = f"-n {pod.metadata.namespace} {pod.metadata.name}"
    statuses = pod.status.container_statuses
    if pod.status.phase == "Running":
        for container in statuses:
            if container.state.terminated is not None:
                return f"it exited with {_termination_text(container.state.terminated)}", f"kubectl logs {pod_args}"
            if container.state.waiting is not None:
                previous = container.last_state.terminated
                if previous is None:
                    return _state_text(container.state.waiting), f"kubectl describe pod {pod_args}"
                return (
                    f"{container.state.waiting.reason}; it exited with {_termination_text(previous)}",
                    f"kubectl logs {pod_args} --previous",
                )
        return "", ""
    reason = pod.status.reason or next(
        (container.state.waiting.reason for container in statuses if container.state.waiting), ""
    )
    return f"{pod.status.phase or 'unknown'}{f', {reason}' if reason else ''}", f"kubectl describe pod {pod_args}"


def _state_text(state: _StateDetail) -> str:
    return " ".join((state.reason, state.message)).strip()


def _termination_text(state: _StateDetail) -> str:
    """Return the reason, such as OOMKilled, with the program's message, which says more than the reason Error."""
    text = termination_message(state.message)
    return text if text and state.reason in ("", "Error") else ": ".join(part for part in (state.reason, text) if part)


def termination_message(message: str) -> str:
    """Return the end of a program's output on one line: from `Error: ` on if it has that, else its last lines."""
    error = re.search(r"^Error: ", message, re.MULTILINE)
    lines = [line for part in message[error.start() if error else 0 :].splitlines() if (line := " ".join(part.split()))]
    text = " / ".join(lines[:MAX_MESSAGE_LINES] if error else lines[-MAX_MESSAGE_LINES:])
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[: MAX_MESSAGE_CHARS - 1]}…"

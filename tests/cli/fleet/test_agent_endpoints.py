"""The agent of each node and its address, for pods of different charts."""

from __future__ import annotations

import msgspec
import pytest

from cli.fleet.agent_endpoints import (
    MAX_MESSAGE_CHARS,
    AgentEndpoint,
    FleetNode,
    FleetPod,
    agent_address,
    find_agent_endpoints,
    termination_message,
)


def pod(name: str = "agent-1", node: str = "n1", **other: object) -> FleetPod:
    text = {
        "metadata": {"name": name, "namespace": "dioptase"},
        "spec": {"nodeName": node, "containers": [{"name": "agent", "image": "dioptase:1"}]},
        "status": {"phase": "Running", "containerStatuses": [{"ready": True, "restartCount": 2}]},
    }
    for key, value in other.items():
        part = text[key]
        assert isinstance(part, dict)
        assert isinstance(value, dict)
        part.update(value)
    return msgspec.json.decode(msgspec.json.encode(text), type=FleetPod)


def container(**fields: object) -> dict[str, object]:
    return {"containers": [{"name": "agent", **fields}]}


def node(name: str) -> FleetNode:
    return msgspec.convert({"metadata": {"name": name}, "status": {"allocatable": {"cpu": "3920m"}}}, FleetNode)


PORTS = [{"name": "web", "containerPort": 9443}, {"name": "other", "containerPort": 1}]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (container(), ("http", 9102)),
        (container(ports=PORTS), ("http", 9102)),
        (container(ports=[{"name": "metrics", "containerPort": 9200}]), ("http", 9200)),
        (container(ports=[{"name": "https-metrics", "containerPort": 9200}]), ("https", 9200)),
        (
            container(readinessProbe={"httpGet": {"path": "/healthz", "port": 9300, "scheme": "HTTPS"}}, ports=PORTS),
            ("https", 9300),
        ),
        (container(livenessProbe={"httpGet": {"path": "/readyz", "port": "web"}}, ports=PORTS), ("http", 9443)),
        # A probe of another path, or of an unknown port, is ignored.
        (container(readinessProbe={"httpGet": {"path": "/", "port": 80}}), ("http", 9102)),
        (container(readinessProbe={"httpGet": {"path": "/healthz", "port": "none"}}), ("http", 9102)),
        (container(readinessProbe={"exec": {"command": ["true"]}}), ("http", 9102)),
    ],
)
def test_the_address_of_an_agent_is_that_of_its_health_probe(
    spec: dict[str, object], expected: tuple[str, int]
) -> None:
    assert agent_address(pod(spec=spec)) == expected


def test_the_proxy_path_has_the_scheme_only_for_tls() -> None:
    plain = AgentEndpoint(node="n1", namespace="dioptase", pod="agent-1", port=9102)
    secure = msgspec.structs.replace(plain, scheme="https")
    assert plain.path == "/api/v1/namespaces/dioptase/pods/agent-1:9102/proxy"
    assert secure.path == "/api/v1/namespaces/dioptase/pods/https:agent-1:9102/proxy"


def test_every_node_is_a_member_with_or_without_an_agent() -> None:
    endpoints = find_agent_endpoints([node("n2"), node("n1")], [pod()])
    assert [(endpoint.node, endpoint.pod, endpoint.problem, endpoint.allocatable_cpu) for endpoint in endpoints] == [
        ("n1", "agent-1", "", "3920m"),
        ("n2", "", "no agent runs here", "3920m"),
    ]
    assert (endpoints[0].image, endpoints[0].restarts) == ("dioptase:1", 2)


def test_without_the_right_to_list_nodes_those_of_agents_are_used() -> None:
    endpoints = find_agent_endpoints(None, [pod(), pod("agent-2", "n2"), pod("agent-3", "")])
    assert [(endpoint.node, endpoint.allocatable_cpu) for endpoint in endpoints] == [("n1", ""), ("n2", "")]


def test_only_the_selected_nodes() -> None:
    assert [endpoint.node for endpoint in find_agent_endpoints([node("n1"), node("n2")], [], ["n2", "n3"])] == ["n2"]


def test_while_an_agent_is_replaced_the_one_that_stays_answers() -> None:
    leaving = pod("old", metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"})
    starting = pod("new", status={"phase": "Pending", "containerStatuses": []})
    (item,) = find_agent_endpoints(None, [leaving, starting])
    assert (item.pod, item.problem) == ("new", "its agent new does not run: Pending")


DESCRIBE = "kubectl describe pod -n dioptase agent-1"
USAGE = "Usage: dioptase agent [OPTIONS]\nTry 'dioptase agent -h' for help.\n\nError: agent.yaml: report: no such field `x`\n"


def crashed(reason: str, message: str) -> dict[str, object]:
    """The status of a container that the kubelet restarts later."""
    return {
        "state": {
            "waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container=agent"}
        },
        "lastState": {"terminated": {"reason": reason, "message": message}},
    }


@pytest.mark.parametrize(
    ("status", "problem", "remedy"),
    [
        (
            {"containerStatuses": [{"state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}}}]},
            "its agent agent-1 does not run: CrashLoopBackOff back-off 5m0s",
            DESCRIBE,
        ),
        (
            {"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}]},
            "its agent agent-1 does not run: Pending, ImagePullBackOff",
            DESCRIBE,
        ),
        (
            {"phase": "Failed", "reason": "Evicted", "containerStatuses": []},
            "its agent agent-1 does not run: Failed, Evicted",
            DESCRIBE,
        ),
        ({"phase": "", "containerStatuses": []}, "its agent agent-1 does not run: unknown", DESCRIBE),
        (
            {"containerStatuses": [crashed("Error", USAGE)]},
            "its agent agent-1 does not run: CrashLoopBackOff; it exited with Error: agent.yaml: report: no such field `x`",
            "kubectl logs -n dioptase agent-1 --previous",
        ),
        (
            {"containerStatuses": [crashed("OOMKilled", "")]},
            "its agent agent-1 does not run: CrashLoopBackOff; it exited with OOMKilled",
            "kubectl logs -n dioptase agent-1 --previous",
        ),
        (
            {"containerStatuses": [{"state": {"terminated": {"reason": "Error", "message": "a\nb\n\n c\td\ne\n"}}}]},
            "its agent agent-1 does not run: it exited with b / c d / e",
            "kubectl logs -n dioptase agent-1",
        ),
        # An agent that is not ready is reachable: it may report why.
        ({"containerStatuses": [{"ready": False}]}, "", ""),
    ],
)
def test_a_pod_that_does_not_run_says_why(status: dict[str, object], problem: str, remedy: str) -> None:
    (item,) = find_agent_endpoints(None, [pod(status=status)])
    assert (item.problem, item.remedy) == (problem, remedy)


def test_a_termination_message_is_limited_to_one_line() -> None:
    assert len(termination_message("x" * 2048)) == MAX_MESSAGE_CHARS
    assert termination_message("INFO Error: of the log\nlast") == "INFO Error: of the log / last"

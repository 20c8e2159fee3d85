"""Determines whether the DaemonSet of this agent will start another agent on this node after this one has ended.
If it will, the values of this agent may stay in force for that agent. The DaemonSet controller creates a new pod only after
the old one is gone (pkg/controller/daemon/daemon_controller.go, podsShouldBeOnNode), so that two agents never overlap.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from agent.reporter.desired_state_writer import NODES
from kube.client import KubeClient
from kube.errors import ApiError, ApiUnreachable
from kube.objects import PartialObjectMetadata, ResourceType, TaintedObject, Toleration

log = logging.getLogger("dioptase")
STATE_VOLUME = "state"
"""Name of the volume with the state directory in the chart's pod template."""
TIMEOUT_S = 5.0
"""Time for both requests; the agent's termination grace period is 60 s."""
AUTOMATIC_TOLERATIONS = frozenset(
    f"node.kubernetes.io/{name}"
    for name in (
        "not-ready", "unreachable", "disk-pressure", "memory-pressure", "pid-pressure", "unschedulable", "network-unavailable",
    )
)  # fmt: skip
"""Taints that every DaemonSet's pods tolerate (pkg/controller/daemon/util, AddOrUpdateDaemonPodTolerations)."""


class _Fields(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    pass


class SuccessorPodSpec(_Fields, frozen=True, kw_only=True):
    """Fields of a pod template that decide whether and with which state directory a pod runs on a node."""

    node_selector: Mapping[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()
    affinity: Mapping[str, Any] = {}
    volumes: tuple[Mapping[str, Any], ...] = ()


class SuccessorTemplate(_Fields, frozen=True, kw_only=True):
    spec: SuccessorPodSpec = SuccessorPodSpec()


class SuccessorDaemonSetSpec(_Fields, frozen=True, kw_only=True):
    template: SuccessorTemplate = SuccessorTemplate()


class SuccessorDaemonSet(PartialObjectMetadata, frozen=True, kw_only=True):
    """A DaemonSet, decoded only as far as the check needs it."""

    spec: SuccessorDaemonSetSpec = SuccessorDaemonSetSpec()


DAEMON_SETS = ResourceType("apps", "v1", "daemonsets", "DaemonSet", SuccessorDaemonSet, namespaced=True)


def successor_obstacle(daemon_set: SuccessorDaemonSet, node: TaintedObject, node_state_dir: str) -> str:
    """Return why the DaemonSet starts no agent on this node that adopts the state directory; empty if it does. Pure."""
    spec = daemon_set.spec.template.spec
    if daemon_set.metadata.deletion_timestamp is not None:
        return "it is being deleted"
    if node.metadata.deletion_timestamp is not None:
        return "the Node is being deleted"
    labels = node.metadata.labels
    for key, value in sorted(spec.node_selector.items()):
        if labels.get(key) != value:
            return f"its nodeSelector {key}={value} does not select this node"
    for taint in node.spec.taints:
        if taint.get("effect") in ("NoSchedule", "NoExecute") and not _is_tolerated(taint, spec.tolerations):
            return f"it does not tolerate the node's taint {taint.get('key')}"
    if spec.affinity.get("nodeAffinity"):
        return "its template has a nodeAffinity, which the agent does not evaluate"
    if node_state_dir not in _host_paths(spec.volumes, STATE_VOLUME):
        return f"its template does not mount the state directory {node_state_dir} of this agent"
    return ""


def _is_tolerated(taint: Mapping[str, Any], tolerations: tuple[Toleration, ...]) -> bool:
    key, value, effect = (str(taint.get(name, "")) for name in ("key", "value", "effect"))
    return key in AUTOMATIC_TOLERATIONS or any(each.matches(key, value, effect) for each in tolerations)


def _host_paths(volumes: tuple[Mapping[str, Any], ...], name: str) -> list[str]:
    return [
        volume["hostPath"].get("path", "") for volume in volumes if volume.get("name") == name and "hostPath" in volume
    ]


async def find_successor_obstacle(client: KubeClient, key: str, node: str, node_state_dir: str) -> str:
    """Return why the DaemonSet `NAMESPACE/NAME` will start no other agent on this node; empty if it will.

    An answer 401, 403 or 404 means that the release is being removed. Without an answer a successor is expected: during an
    outage of the API server no pod is deleted through it, and the kubelet restarts the container.
    """
    try:
        async with asyncio.timeout(TIMEOUT_S):
            daemon_set, node_object = await asyncio.gather(client.get(DAEMON_SETS, key), client.get(NODES, node))
    except ApiError as error:
        if error.status in (401, 403, 404):
            return f"DaemonSet {key} or Node {node} cannot be read: {error}"
        log.warning("DaemonSet %s cannot be read: %s. A successor is expected", key, error)
        return ""
    except (ApiUnreachable, TimeoutError) as error:
        log.warning(
            "The API server does not answer: %s. A successor is expected",
            str(error) or f"no answer within {TIMEOUT_S:g} s",
        )
        return ""
    obstacle = successor_obstacle(daemon_set, node_object, node_state_dir)
    return f"DaemonSet {key}: {obstacle}" if obstacle else ""

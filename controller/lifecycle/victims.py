"""Which pods of a node have to leave when nobody watches over them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from api.qos import QoSLevel, stated_level
from controller.kinds import Pod

MIRROR = "kubernetes.io/config.mirror"
OVER = ("Succeeded", "Failed")


def victims(pods: Iterable[Pod]) -> list[Pod]:
    """Reclaimed pods that run. Not those that would be back at once (of a DaemonSet), nor those that the API server cannot
    send away (static ones), nor those on their way out."""
    return [pod for pod in pods if _reclaimed(pod) and not _stays(pod)]


def _reclaimed(pod: Pod) -> bool:
    try:
        return stated_level(pod.metadata.annotations) is QoSLevel.RECLAIMED
    except ValueError:
        return False  # what cannot be read is not evicted


def _stays(pod: Pod) -> bool:
    owners = {owner.kind for owner in pod.metadata.owner_references if owner.controller}
    over = pod.status.phase in OVER or pod.metadata.deletion_timestamp is not None
    return over or "DaemonSet" in owners or MIRROR in pod.metadata.annotations

"""Settings that name cgroups, where nobody has set them and a kubelet made the cgroups: by its driver and its root. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent.sense.cgroup_paths import BEST_EFFORT, BURSTABLE, Driver, class_path, top_path
from agent.sense.podjoin import Exists

OFFLINE = "offline-besteffort-*"
"""Katalyst's own cgroups beside those of the kubelet's classes."""


def rooted(document: Mapping[str, Any], root: str, exists: Exists) -> Mapping[str, Any]:
    """The settings file's document with what it does not say. `exists` tells whether there is a cgroup."""
    drivers = [driver for driver in Driver if exists(top_path(root, driver))]
    found: dict[tuple[str, ...], Any] = {}
    if drivers:
        found["memory", "reclaimRoot"] = class_path(root, BEST_EFFORT, drivers[0])
    if root != "/":
        burstable = [class_path(root, BURSTABLE, driver) for driver in (Driver.CGROUPFS, Driver.SYSTEMD)]
        offline = f"{top_path(root, Driver.CGROUPFS)}/{OFFLINE}"
        found["memory", "offloading", "dyingCgroups"] = [burstable[0], offline, burstable[1]]
        found["eviction", "systemMemory", "psiRoots"] = burstable
    for path, value in found.items():
        document = _with(document, path, value)
    return document


def _with(document: Any, path: tuple[str, ...], value: Any) -> Any:
    """The same document with that field, unless it has it, or has something there that is no section."""
    name, *rest = path
    if not isinstance(document, Mapping):
        return document
    if rest:
        return {**document, name: _with(document.get(name, {}), tuple(rest), value)}
    return document if name in document else {**document, name: value}

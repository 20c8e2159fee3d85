"""Computes the cgroup paths that the kubelet and the container runtimes give to pods and containers. Pure.
The kubelet nests by QoS class and pod, spelled as its `cgroupDriver` (systemd or cgroupfs) demands; the runtime
adds the container. Paths are below the cgroup root and are the same for each version 1 controller and the unified
tree. Sources: kubelet pkg/kubelet/cm, the systemd driver of runc, containerd and CRI-O.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

KUBEPODS = "kubepods"
GUARANTEED, BURSTABLE, BEST_EFFORT = "Guaranteed", "Burstable", "BestEffort"
SCOPE_PREFIXES = {"containerd": "cri-containerd", "cri-o": "crio", "docker": "docker"}
"""By the scheme of a container's id in a pod's status: what its scope's name begins with."""
CRIO_RUNTIME = "cri-o"
SLICE_SUFFIX = ".slice"
DEFAULT_SLICE = "system.slice"
"""Where runc puts a scope that names no slice."""
MAX_PATH_CHARS = 4095
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}", re.ASCII)
"""Pod uids, container ids and names of units that cannot lead elsewhere: no slash, and no dot in front."""


class CgroupDriver(StrEnum):
    """The kubelet's `cgroupDriver`."""

    SYSTEMD = "systemd"
    CGROUPFS = "cgroupfs"


class PodCgroupIdentity(NamedTuple):
    """What the kubelet makes a pod's cgroup of."""

    uid: str
    """As the kubelet has it; of a static pod the hash of its file."""
    qos: str
    """QoS class."""
    root: str = "/"
    """The kubelet's `cgroupRoot`, plainly spelled whatever the driver: `/` or `/some/where`."""


def is_valid_id(name: str) -> bool:
    """Whether a uid or an id may be made part of a path."""
    return _ID.fullmatch(name) is not None


def pod_cgroup_path(identity: PodCgroupIdentity, driver: CgroupDriver) -> str:
    """Of the pod's own cgroup, with a leading slash. Raises ValueError for a uid that is none, or an unknown QoS class."""
    if not is_valid_id(identity.uid):
        raise ValueError(f"{identity.uid[:80]!r} is no uid of a pod")
    if identity.qos not in (GUARANTEED, BURSTABLE, BEST_EFFORT):
        raise ValueError(f"{identity.qos[:80]!r} is no QoS class")
    middle = [] if identity.qos == GUARANTEED else [identity.qos.lower()]
    return _join_names([*_root_names(identity.root), KUBEPODS, *middle, f"pod{identity.uid}"], driver)


def kubepods_path(root: str, driver: CgroupDriver) -> str:
    """Of the cgroup above all pods."""
    return _join_names([*_root_names(root), KUBEPODS], driver)


def qos_class_path(root: str, qos: str, driver: CgroupDriver) -> str:
    """Of the cgroup above all pods of a QoS class. Raises ValueError for one that has none of its own."""
    if qos not in (BURSTABLE, BEST_EFFORT):
        raise ValueError(f"{qos[:80]!r} is no QoS class with a cgroup of its own")
    return _join_names([*_root_names(root), KUBEPODS, qos.lower()], driver)


def container_cgroup_path(identity: PodCgroupIdentity, runtime: str, container_id: str, driver: CgroupDriver) -> str:
    """Of a container by its bare id and the name of its runtime, one of PREFIXES.

    Raises ValueError for an id that is none, an unknown runtime, and as `pod_path` does.
    """
    if runtime not in SCOPE_PREFIXES or not is_valid_id(container_id):
        raise ValueError(f"{container_id[:80]!r} is no id of a container of {', '.join(SCOPE_PREFIXES)}")
    name = f"{SCOPE_PREFIXES[runtime]}-{container_id}"
    if driver is CgroupDriver.SYSTEMD:
        name += ".scope"
    elif runtime != CRIO_RUNTIME:
        name = container_id
    return f"{pod_cgroup_path(identity, driver)}/{name}"


def parse_cgroups_path(cgroups_path: str) -> str:
    """The path that an OCI specification's `linux.cgroupsPath` means: `slice:prefix:name` of the systemd driver, or a path.

    Raises ValueError for one that leads nowhere in particular.
    """
    if len(cgroups_path) > MAX_PATH_CHARS or not cgroups_path.isprintable():
        raise ValueError(f"{cgroups_path[:80]!r} is no path of a cgroup")
    if cgroups_path.count(":") == 2 and not cgroups_path.startswith("/"):
        return _systemd_unit_path(*cgroups_path.split(":"))
    parts = cgroups_path.split("/")
    if parts[0] or len(parts) < 2 or any(part in ("", ".", "..") for part in parts[1:]):
        # One that does not begin with a slash is below wherever the runtime itself is.
        raise ValueError(f"{cgroups_path[:80]!r} is no path of a cgroup from the root on")
    return cgroups_path


def expand_slice(name: str) -> str:
    """Where systemd keeps a slice, whose name has all those above: `a-b.slice` is `/a.slice/a-b.slice`, `-.slice` the root.

    Raises ValueError for what is no name of a slice.
    """
    stem = name.removesuffix(SLICE_SUFFIX)
    if name == f"-{SLICE_SUFFIX}":
        return ""
    steps = stem.split("-")
    if stem == name or "/" in name or any(not step for step in steps):
        raise ValueError(f"{name[:80]!r} is no name of a slice")
    return "".join(f"/{'-'.join(steps[: count + 1])}{SLICE_SUFFIX}" for count in range(len(steps)))


def find_container_cgroup(
    identity: PodCgroupIdentity, container_id: str, reported_path: str, exists: Callable[[str], bool]
) -> str:
    """Where the container is: where its runtime told, else where it would have put it; empty where nothing of that exists.

    `container_id` may be that of a pod's status, with the runtime's name in front: `containerd://ID`; without it, every
    runtime's spelling is tried. Never raises: what is no id is nowhere.
    """
    if reported_path and exists(reported_path):
        return reported_path
    scheme, separator, bare = container_id.rpartition("://")
    runtimes = [scheme] if separator else list(SCOPE_PREFIXES)
    # After a change of the driver the other's cgroups may be left over: the container itself decides.
    for driver in CgroupDriver:
        if not exists(kubepods_path(identity.root, driver)):
            continue
        for runtime in runtimes:
            try:
                path = container_cgroup_path(identity, runtime, bare, driver)
            except ValueError:
                return ""
            if exists(path):
                return path
    return ""


def _systemd_unit_path(slice_: str, prefix: str, name: str) -> str:
    """Of a scope, or of a slice, that runc has systemd make."""
    if not is_valid_id(name) or not (prefix == "" or is_valid_id(prefix)):
        raise ValueError(f"{prefix[:80]!r}, {name[:80]!r} name no scope")
    unit = name if name.endswith(SLICE_SUFFIX) else f"{prefix}-{name}.scope"
    return f"{expand_slice(slice_ or DEFAULT_SLICE)}/{unit}"


def _join_names(names: list[str], driver: CgroupDriver) -> str:
    if driver is CgroupDriver.CGROUPFS:
        return "/" + "/".join(names)
    # A dash means nesting in a slice's name, so that those of the names themselves become underscores.
    return expand_slice("-".join(name.replace("-", "_") for name in names) + SLICE_SUFFIX)


def _root_names(root: str) -> list[str]:
    return [part.removesuffix(SLICE_SUFFIX) for part in root.split("/") if part]


CgroupExists = Callable[[str], bool]

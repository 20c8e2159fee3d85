"""Computes the cgroup paths that the kubelet and the container runtimes give to pods and containers. Pure. The kubelet
nests by QoS class and pod, spelled as its `cgroupDriver` (systemd or cgroupfs) requires; the runtime adds the
container. Paths are below the cgroup root and are the same for each version 1 controller and the unified tree. Sources:
kubelet pkg/kubelet/cm, the systemd driver of runc, containerd and CRI-O."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from api.text import quote

KUBEPODS = "kubepods"
GUARANTEED, BURSTABLE, BEST_EFFORT = "Guaranteed", "Burstable", "BestEffort"
SCOPE_PREFIXES = {"containerd": "cri-containerd", "cri-o": "crio", "docker": "docker"}
"""Prefix of a container's scope by the scheme of its id in a pod's status."""
CRIO_RUNTIME = "cri-o"
SLICE_SUFFIX = ".slice"
DEFAULT_SLICE = "system.slice"
"""Slice in which runc puts a scope without a slice."""
MAX_PATH_CHARS, MAX_PART_CHARS = 4095, 255
"""Limits of the kernel for a path and for one part of it (limits.h)."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}", re.ASCII)
"""Pod uids, container ids and unit names that cannot lead to another directory: no slash and no leading dot."""
_QOS_CGROUP = re.compile(r"(?:.*-)?(?:kubepods|burstable|besteffort)(?:\.slice)?")
_POD_CGROUP = re.compile(r"(?:.*-)?pod([^/]+?)(?:\.slice)?")
"""Names of the cgroups that the kubelet creates, with either driver."""


class CgroupDriver(StrEnum):
    """The kubelet's `cgroupDriver`."""

    SYSTEMD = "systemd"
    CGROUPFS = "cgroupfs"


class PodCgroupIdentity(NamedTuple):
    """Inputs of a pod's cgroup path."""

    uid: str
    """The kubelet's uid; for a static pod the hash of its file."""
    qos: str
    """QoS class."""
    root: str = "/"
    """The kubelet's `cgroupRoot`, without the driver's spelling: `/` or `/some/where`."""


def is_valid_id(name: str) -> bool:
    """Return whether a uid or an id may be part of a path."""
    return _ID.fullmatch(name) is not None


def pod_cgroup_path(identity: PodCgroupIdentity, driver: CgroupDriver) -> str:
    """Return the path of a pod's cgroup. Raises ValueError for an invalid uid or QoS class."""
    if not is_valid_id(identity.uid):
        raise ValueError(f"{quote(identity.uid)} is not a pod uid")
    if identity.qos not in (GUARANTEED, BURSTABLE, BEST_EFFORT):
        raise ValueError(f"{quote(identity.qos)} is not a QoS class")
    middle = [] if identity.qos == GUARANTEED else [identity.qos.lower()]
    return _join_names([*_root_names(identity.root), KUBEPODS, *middle, f"pod{identity.uid}"], driver)


def kubepods_path(root: str, driver: CgroupDriver) -> str:
    """Return the path of the cgroup above all pods."""
    return _join_names([*_root_names(root), KUBEPODS], driver)


def qos_class_path(root: str, qos: str, driver: CgroupDriver) -> str:
    """Return the path of the cgroup above all pods of a QoS class. Raises ValueError for a class without one."""
    if qos not in (BURSTABLE, BEST_EFFORT):
        raise ValueError(f"{quote(qos)} is not a QoS class with its own cgroup")
    return _join_names([*_root_names(root), KUBEPODS, qos.lower()], driver)


def is_qos_cgroup(path: str) -> bool:
    """Return whether the path is the cgroup of a QoS class, or the one above all pods. The kubelet writes their weights
    when it starts and every minute."""
    return _QOS_CGROUP.fullmatch(posixpath.basename(path)) is not None


def is_best_effort_class(path: str) -> bool:
    """Return whether the path is the cgroup of the class BestEffort."""
    return is_qos_cgroup(path) and path.removesuffix(SLICE_SUFFIX).endswith(BEST_EFFORT.lower())


@lru_cache(maxsize=4096)
def pod_cgroup_of(container: str) -> str | None:
    """Return the pod's cgroup, as the kubelet creates it, of a container's; None if no kubelet created it."""
    path = posixpath.dirname(container)
    return path if uid_of_pod_cgroup(path) else None


@lru_cache(maxsize=16384)
def uid_of_pod_cgroup(path: str) -> str:
    """Return the normalized uid in the name of a cgroup that the kubelet created for a pod; empty for any other cgroup."""
    match = _POD_CGROUP.fullmatch(posixpath.basename(path))
    return normalized_uid(match[1]) if match is not None and is_qos_cgroup(posixpath.dirname(path)) else ""


def normalized_uid(uid: str) -> str:
    """Return a pod's uid with underscores, to which the systemd driver converts dashes."""
    return uid.replace("-", "_")


def container_cgroup_path(identity: PodCgroupIdentity, runtime: str, container_id: str, driver: CgroupDriver) -> str:
    """Return the path of a container by its bare id and its runtime, one of SCOPE_PREFIXES.

    Raises ValueError for an invalid id or runtime, and as `pod_cgroup_path` does.
    """
    if runtime not in SCOPE_PREFIXES or not is_valid_id(container_id):
        raise ValueError(f"{quote(container_id)} is not a container id of {', '.join(SCOPE_PREFIXES)}")
    name = f"{SCOPE_PREFIXES[runtime]}-{container_id}"
    if driver is CgroupDriver.SYSTEMD:
        name += ".scope"
    elif runtime != CRIO_RUNTIME:
        name = container_id
    return f"{pod_cgroup_path(identity, driver)}/{name}"


def parse_cgroups_path(cgroups_path: str) -> str:
    """Return the path of `linux.cgroupsPath` in an OCI specification: `slice:prefix:name` of the systemd driver, or a
    path.

    Raises ValueError for any other text.
    """
    if len(cgroups_path) > MAX_PATH_CHARS or not cgroups_path.isprintable():
        raise ValueError(f"{quote(cgroups_path)} is not a cgroup path")
    if cgroups_path.count(":") == 2 and not cgroups_path.startswith("/"):
        return _systemd_unit_path(*cgroups_path.split(":"))
    parts = cgroups_path.split("/")
    if parts[0] or len(parts) < 2 or any(part in ("", ".", "..") for part in parts[1:]):
        # A relative path is below the runtime's own cgroup, which is unknown.
        raise ValueError(f"{quote(cgroups_path)} is not an absolute cgroup path")
    return cgroups_path


def expand_slice(name: str) -> str:
    """Return where systemd keeps a slice: `a-b.slice` is `/a.slice/a-b.slice`, `-.slice` the root (systemd.slice(5)).

    Raises ValueError for an invalid name.
    """
    if len(name) > MAX_PART_CHARS:  # the path has the square of its length
        raise ValueError(f"{quote(name)} is not a slice name")
    stem = name.removesuffix(SLICE_SUFFIX)
    if name == f"-{SLICE_SUFFIX}":
        return ""
    steps = stem.split("-")
    if stem == name or "/" in name or any(not step for step in steps):
        raise ValueError(f"{quote(name)} is not a slice name")
    return "".join(f"/{'-'.join(steps[: count + 1])}{SLICE_SUFFIX}" for count in range(len(steps)))


def find_container_cgroup(
    identity: PodCgroupIdentity, container_id: str, reported_path: str, exists: Callable[[str], bool]
) -> str:
    """Return the cgroup of a container: the reported path if it exists, else the path that its runtime would use; empty
    if no such cgroup exists.

    `container_id` may be that of a pod's status, with the runtime in front: `containerd://ID`; without it, every
    runtime's spelling is tried. Never raises.
    """
    if reported_path and exists(reported_path):
        return reported_path
    scheme, separator, bare = container_id.rpartition("://")
    runtimes = [scheme] if separator else list(SCOPE_PREFIXES)
    # After a change of the driver, cgroups of the other driver may remain: the container's cgroup decides.
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
    if not is_valid_id(name) or not (prefix == "" or is_valid_id(prefix)):
        raise ValueError(f"{quote(prefix)}, {quote(name)} are not a scope name")
    unit = name if name.endswith(SLICE_SUFFIX) else f"{prefix}-{name}.scope"
    return f"{expand_slice(slice_ or DEFAULT_SLICE)}/{unit}"


def _join_names(names: list[str], driver: CgroupDriver) -> str:
    if driver is CgroupDriver.CGROUPFS:
        return "/" + "/".join(names)
    # A dash nests slices, so the kubelet escapes dashes as underscores (pkg/kubelet/cm, escapeSystemdCgroupName).
    return expand_slice("-".join(name.replace("-", "_") for name in names) + SLICE_SUFFIX)


def _root_names(root: str) -> list[str]:
    return [part.removesuffix(SLICE_SUFFIX) for part in root.split("/") if part]


CgroupExists = Callable[[str], bool]

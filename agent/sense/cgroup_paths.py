"""Where the kubelet and the container runtimes put the cgroup of a container: names and paths below the cgroup root. Pure.

The kubelet nests by QoS class and pod, in one of two spellings that its `cgroupDriver` chooses; the runtime adds the container
by its id. The same path names the group below each controller of version 1 and in the unified tree. Sources: kubelet
(pkg/kubelet/cm), runc's systemd driver, containerd and CRI-O.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

KUBEPODS = "kubepods"
GUARANTEED, BURSTABLE, BEST_EFFORT = "Guaranteed", "Burstable", "BestEffort"
PREFIXES = {"containerd": "cri-containerd", "cri-o": "crio", "docker": "docker"}
"""By the scheme of a container's id in a pod's status: what its scope's name begins with."""
NAMED_BY_CRIO = "cri-o"
SUFFIX = ".slice"
DEFAULT_SLICE = "system.slice"
"""Where runc puts a scope that names no slice."""
LONGEST = 4095
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}", re.ASCII)
"""Pod uids, container ids and names of units that cannot lead elsewhere: no slash, and no dot in front."""


class Driver(StrEnum):
    """The kubelet's `cgroupDriver`."""

    SYSTEMD = "systemd"
    CGROUPFS = "cgroupfs"


class Home(NamedTuple):
    """What the kubelet makes a pod's cgroup of."""

    uid: str
    """As the kubelet has it; of a static pod the hash of its file."""
    qos: str
    """QoS class."""
    root: str = "/"
    """The kubelet's `cgroupRoot`, plainly spelled whatever the driver: `/` or `/some/where`."""


def plain(name: str) -> bool:
    """Whether a uid or an id may be made part of a path."""
    return _ID.fullmatch(name) is not None


def pod_path(home: Home, driver: Driver) -> str:
    """Of the pod's own cgroup, with a leading slash. Raises ValueError for a uid that is none, or an unknown QoS class."""
    if not plain(home.uid):
        raise ValueError(f"{home.uid[:80]!r} is no uid of a pod")
    if home.qos not in (GUARANTEED, BURSTABLE, BEST_EFFORT):
        raise ValueError(f"{home.qos[:80]!r} is no QoS class")
    middle = [] if home.qos == GUARANTEED else [home.qos.lower()]
    return _joined([*_root(home.root), KUBEPODS, *middle, f"pod{home.uid}"], driver)


def top_path(root: str, driver: Driver) -> str:
    """Of the cgroup above all pods."""
    return _joined([*_root(root), KUBEPODS], driver)


def class_path(root: str, qos: str, driver: Driver) -> str:
    """Of the cgroup above all pods of a QoS class. Raises ValueError for one that has none of its own."""
    if qos not in (BURSTABLE, BEST_EFFORT):
        raise ValueError(f"{qos[:80]!r} is no QoS class with a cgroup of its own")
    return _joined([*_root(root), KUBEPODS, qos.lower()], driver)


def container_path(home: Home, runtime: str, container_id: str, driver: Driver) -> str:
    """Of a container by its bare id and the name of its runtime, one of PREFIXES.

    Raises ValueError for an id that is none, an unknown runtime, and as `pod_path` does.
    """
    if runtime not in PREFIXES or not plain(container_id):
        raise ValueError(f"{container_id[:80]!r} is no id of a container of {', '.join(PREFIXES)}")
    name = f"{PREFIXES[runtime]}-{container_id}"
    if driver is Driver.SYSTEMD:
        name += ".scope"
    elif runtime != NAMED_BY_CRIO:
        name = container_id
    return f"{pod_path(home, driver)}/{name}"


def told_path(cgroups_path: str) -> str:
    """The path that an OCI specification's `linux.cgroupsPath` means: `slice:prefix:name` of the systemd driver, or a path.

    Raises ValueError for one that leads nowhere in particular.
    """
    if len(cgroups_path) > LONGEST or not cgroups_path.isprintable():
        raise ValueError(f"{cgroups_path[:80]!r} is no path of a cgroup")
    if cgroups_path.count(":") == 2 and not cgroups_path.startswith("/"):
        return _of_unit(*cgroups_path.split(":"))
    parts = cgroups_path.split("/")
    if parts[0] or len(parts) < 2 or any(part in ("", ".", "..") for part in parts[1:]):
        # One that does not begin with a slash is below wherever the runtime itself is.
        raise ValueError(f"{cgroups_path[:80]!r} is no path of a cgroup from the root on")
    return cgroups_path


def expand_slice(name: str) -> str:
    """Where systemd keeps a slice, whose name has all those above: `a-b.slice` is `/a.slice/a-b.slice`, `-.slice` the root.

    Raises ValueError for what is no name of a slice.
    """
    stem = name.removesuffix(SUFFIX)
    if name == f"-{SUFFIX}":
        return ""
    steps = stem.split("-")
    if stem == name or "/" in name or any(not step for step in steps):
        raise ValueError(f"{name[:80]!r} is no name of a slice")
    return "".join(f"/{'-'.join(steps[: count + 1])}{SUFFIX}" for count in range(len(steps)))


def found_path(home: Home, container_id: str, told: str, exists: Callable[[str], bool]) -> str:
    """Where the container is: where its runtime told, else where it would have put it; empty where nothing of that exists.

    `container_id` may be that of a pod's status, with the runtime's name in front: `containerd://ID`; without it, every
    runtime's spelling is tried. Never raises: what is no id is nowhere.
    """
    if told and exists(told):
        return told
    scheme, separator, bare = container_id.rpartition("://")
    runtimes = [scheme] if separator else list(PREFIXES)
    # After a change of the driver the other's cgroups may be left over: the container itself decides.
    for driver in Driver:
        if not exists(top_path(home.root, driver)):
            continue
        for runtime in runtimes:
            try:
                path = container_path(home, runtime, bare, driver)
            except ValueError:
                return ""
            if exists(path):
                return path
    return ""


def _of_unit(slice_: str, prefix: str, name: str) -> str:
    """Of a scope, or of a slice, that runc has systemd make."""
    if not plain(name) or not (prefix == "" or plain(prefix)):
        raise ValueError(f"{prefix[:80]!r}, {name[:80]!r} name no scope")
    unit = name if name.endswith(SUFFIX) else f"{prefix}-{name}.scope"
    return f"{expand_slice(slice_ or DEFAULT_SLICE)}/{unit}"


def _joined(names: list[str], driver: Driver) -> str:
    if driver is Driver.CGROUPFS:
        return "/" + "/".join(names)
    # A dash means nesting in a slice's name, so that those of the names themselves become underscores.
    return expand_slice("-".join(name.replace("-", "_") for name in names) + SUFFIX)


def _root(root: str) -> list[str]:
    return [part.removesuffix(SUFFIX) for part in root.split("/") if part]

"""Which containers of which pods run, whoever tells it. Plain data, apart from gRPC, which few agents need in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

SOCKETS = ("/run/containerd/containerd.sock", "/run/crio/crio.sock", "/run/k3s/containerd/containerd.sock")
SCHEME = "unix://"


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """One container that runs."""

    pod_uid: str
    pod: str
    """`namespace/name`."""
    name: str
    id: str
    created_at_ns: int
    cgroup: str = ""
    """Below the root of every controller, as the runtime tells it; empty where it does not, or was not asked yet."""


class Looked(msgspec.Struct, frozen=True, kw_only=True):
    """What a look at the runtime gave: of two containers of one pod with one name the newer."""

    running: Mapping[tuple[str, str], Running] = {}
    """By uid of the pod and name."""
    sandboxes: frozenset[str] = frozenset()
    """Uids of the pods whose sandbox is up, with containers or without."""

    def pods(self) -> Mapping[str, str]:
        """`namespace/name` of the pods of which some container runs, by uid."""
        return {one.pod_uid: one.pod for one in self.running.values()}


def find_socket(configured: str | None) -> Path | None:
    """The socket to ask: that of the settings, or the first that is there; None where none is to be asked, or none is there."""
    if configured is not None:
        return Path(configured.removeprefix(SCHEME)) if configured else None
    return next((path for path in map(Path, SOCKETS) if path.is_socket()), None)

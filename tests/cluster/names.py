"""Names of the parts of a cluster, so that all parts can be found by name after a killed run.

A cluster has a number. Cleanup only considers names with that number, except for the cgroup `kubepods`, whose owner is recorded
in a link.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

HOME = Path("/tmp/dioptase-cluster")
"""Folder of all clusters; short, because paths of sockets hold 108 bytes."""
MOST = 8
"""Maximum number of clusters. The first is that of `make cluster`; tests use the others."""
SERVICES, API_SERVICE, DNS_SERVICE = "10.96.0.0/16", "10.96.0.1", "10.96.0.10"
PODS = "10.88.0.0/16"
PORT = 6443
CONTROL = "control"
_SPACE = re.compile(r"dioptase-(\d)-[a-z0-9]+")


class Names(NamedTuple):
    """The names of one cluster."""

    number: int
    home: Path = HOME

    @property
    def run(self) -> Path:
        """Return the folder of all files of the cluster."""
        return self.home / str(self.number)

    @property
    def bridge(self) -> str:
        return f"dioptase{self.number}"

    @property
    def host(self) -> str:
        """Return the address of this machine on the cluster's network."""
        return f"10.89.{self.number}.1"

    @property
    def server(self) -> str:
        return f"https://{self.address(CONTROL)}:{PORT}"

    def space(self, machine: str) -> str:
        """Return the network namespace of the control plane or of a node such as `node1`."""
        return f"dioptase-{self.number}-{machine}"

    def link(self, machine: str) -> str:
        """Return the interface at the bridge; names of interfaces hold 15 bytes."""
        return f"dio{self.number}{machine}"

    def address(self, machine: str) -> str:
        return f"10.89.{self.number}.{2 if machine == CONTROL else 10 + index(machine)}"

    def pods(self, node: str) -> str:
        """Return the network of a node's pods."""
        return f"10.88.{self.number * 16 + index(node)}.0/24"

    def cgroup(self, node: str) -> str:
        """Return the parent cgroup of a node's pods, if the node does not use the usual /kubepods."""
        return f"dioptase-{self.number}-{node}"


def index(node: str) -> int:
    """Return 1 for `node1`. Raises ValueError for other names."""
    number = int(node.removeprefix("node"))
    if not node.startswith("node") or not 1 <= number <= 9:
        raise ValueError(f"{node!r} is no node: node1 to node9")
    return number


def number_of(space: str) -> int | None:
    """Return the number of the cluster of a network namespace; None if it belongs to none."""
    result = _SPACE.fullmatch(space)
    return int(result[1]) if result else None

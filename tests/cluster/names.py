"""Names of the parts of a cluster, so that all parts can be found by name after a killed run.

A cluster has a number. Cleanup only considers names with that number, except for the cgroup `kubepods`, whose owner is recorded
in a link.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

HOME = Path("/tmp/dioptase-cluster")
"""Short: paths of sockets hold 108 bytes."""
MOST = 8
"""Clusters at a time. The first is that of `make cluster`; tests take the others."""
SERVICES, API_SERVICE, DNS_SERVICE = "10.96.0.0/16", "10.96.0.1", "10.96.0.10"
PODS = "10.88.0.0/16"
PORT = 6443
CONTROL = "control"
_SPACE = re.compile(r"dioptase-(\d)-[a-z0-9]+")


class Names(NamedTuple):
    """Of one cluster."""

    number: int
    home: Path = HOME

    @property
    def run(self) -> Path:
        """Everything that it writes, but cgroups."""
        return self.home / str(self.number)

    @property
    def bridge(self) -> str:
        return f"dioptase{self.number}"

    @property
    def host(self) -> str:
        """This machine, on the cluster's network."""
        return f"10.89.{self.number}.1"

    @property
    def server(self) -> str:
        return f"https://{self.address(CONTROL)}:{PORT}"

    def space(self, machine: str) -> str:
        """The network namespace of the control plane, or of `node1` and so on."""
        return f"dioptase-{self.number}-{machine}"

    def link(self, machine: str) -> str:
        """The end of its cable at the bridge; such names hold 15 bytes."""
        return f"dio{self.number}{machine}"

    def address(self, machine: str) -> str:
        return f"10.89.{self.number}.{2 if machine == CONTROL else 10 + index(machine)}"

    def pods(self, node: str) -> str:
        """The network of its pods."""
        return f"10.88.{self.number * 16 + index(node)}.0/24"

    def cgroup(self, node: str) -> str:
        """The cgroup below which its pods are, where it is not the one to have the usual /kubepods."""
        return f"dioptase-{self.number}-{node}"


def index(node: str) -> int:
    """1 of `node1`. Raises ValueError for what is no name of a node here."""
    number = int(node.removeprefix("node"))
    if not node.startswith("node") or not 1 <= number <= 9:
        raise ValueError(f"{node!r} is no node: node1 to node9")
    return number


def number_of(space: str) -> int | None:
    """Of which cluster a network namespace is; None if of none."""
    result = _SPACE.fullmatch(space)
    return int(result[1]) if result else None

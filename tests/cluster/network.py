"""The network of a cluster: a bridge on this machine, and a network namespace at each cable.

This machine reaches nodes and pods through the bridge; nothing reaches beyond it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from tests.cluster.names import CONTROL, Names


def lay(names: Names) -> None:
    """Create the bridge and connect the control plane to it."""
    _ip("link", "add", names.bridge, "type", "bridge")
    _ip("addr", "add", f"{names.host}/24", "dev", names.bridge)
    _ip("link", "set", names.bridge, "up")
    _plug(names, CONTROL)


def add(names: Names, node: str, others: Sequence[str]) -> None:
    """Connect a node to the bridge and add routes to its pods; no address is translated."""
    _plug(names, node)
    space = names.space(node)
    subprocess.run(
        ["ip", "netns", "exec", space, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"],
        check=True,
        capture_output=True,
    )
    _ip("route", "add", names.pods(node), "via", names.address(node))
    for machine in (CONTROL, *others):
        _ip("-n", names.space(machine), "route", "add", names.pods(node), "via", names.address(node))
    for other in others:
        _ip("-n", space, "route", "add", names.pods(other), "via", names.address(other))


def _plug(names: Names, machine: str) -> None:
    space, link = names.space(machine), names.link(machine)
    _ip("netns", "add", space)
    _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
    _ip("link", "set", link, "master", names.bridge, "up")
    _ip("-n", space, "addr", "add", f"{names.address(machine)}/24", "dev", "eth0")
    for device in ("eth0", "lo"):
        _ip("-n", space, "link", "set", device, "up")
    _ip("-n", space, "route", "add", "default", "via", names.host)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")

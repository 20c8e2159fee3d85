"""A cluster: started with an API server, extended by nodes, and removed as a whole."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from tests.cluster import cleanup, network
from tests.cluster.binaries import CONTROL, PROGRAMS, obtain
from tests.cluster.control_plane import API_SERVER, CONTROLLERS, ETCD, Control
from tests.cluster.daemons import SPACES, Daemons
from tests.cluster.names import CONTROL as CONTROL_PLANE
from tests.cluster.names import MOST, Names
from tests.cluster.node import CGROUPFS, Node
from tests.cluster.server import Refused, Server

CONSENT = "dioptase-tests"
"""Namespace whose existence allows tests to change a cluster."""
# etcd's own way over HTTP, from within its namespace; without `physical` it only promises.
_COMPACT = """
import json, sys, urllib.request
def ask(path, **body):
    return json.load(urllib.request.urlopen(sys.argv[1] + "/v3/kv/" + path, json.dumps(body).encode()))
revision = ask("range", key="AA==")["header"]["revision"]
ask("compaction", revision=revision, physical=True)
print(revision)
"""


Progress = Callable[[str], None]


def _no_progress(_text: str) -> None:
    """Print nothing: tests create clusters silently."""


class Failed(Exception):
    """A command failed; the text has its error output."""


class Cluster:
    """One cluster of the tests, new or existing; its whole state is in its folder."""

    def __init__(self, names: Names, programs: Mapping[str, Path]) -> None:
        self.names, self.programs = names, dict(programs)
        self.daemons = Daemons(names.run / "daemons", self.programs)
        self.control = Control(names, self.programs, self.daemons)

    @property
    def kubeconfig(self) -> Path:
        """Return the kubeconfig of an administrator."""
        return self.names.run / "admin.kubeconfig"

    @property
    def server(self) -> Server:
        return self.control.server()

    @property
    def nodes(self) -> list[Node]:
        """Return the nodes, sorted by name."""
        results = [name for name in self.daemons.names() if name.startswith("node") and "-" not in name]
        return [Node(self.names, name, self.programs, self.daemons) for name in results]

    def begin(self) -> None:
        """Start etcd and the API server, without controllers and nodes."""
        network.lay(self.names)
        self.control.begin()
        self.server.ask("POST", "/api/v1/namespaces", {"metadata": {"name": CONSENT}})

    def grow(self, nodes: int, cgroup_driver: str = CGROUPFS, progress: Progress = _no_progress) -> None:
        """Start controllers and scheduler if needed, and add nodes until there are `nodes`, all of them ready."""
        self.programs.update(obtain())
        if CONTROLLERS not in self.daemons.names():
            progress("starting the controllers and the scheduler")
            self.control.govern()
        there = [node.name for node in self.nodes]
        for number in range(len(there) + 1, nodes + 1):
            name = f"node{number}"
            progress(f"starting containerd, the kubelet and kube-proxy of {name}")
            network.add(self.names, name, there)
            Node(self.names, name, self.programs, self.daemons).begin(self.control.authority, cgroup_driver)
            there.append(name)
        progress("waiting until every node is Ready")
        for name in there:
            self.daemons.wait(f"{name}-kubelet", partial(self.ready, name), 90)
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        self.daemons.wait(CONTROLLERS, lambda: self.server.ask("GET", account), 60)

    def resume(self) -> None:
        """Start everything again after a reboot of this machine, from the files on disk. The nodes are not awaited."""
        cleanup.make_mount_points(self.names.home)
        network.lay(self.names)
        self.control.resume()
        there: list[str] = []
        for node in self.nodes:
            network.add(self.names, node.name, there)
            node.resume()
            there.append(node.name)

    def ready(self, node: str) -> bool:
        """Return whether a node is ready; False if it does not exist."""
        try:
            conditions = self.server.ask("GET", f"/api/v1/nodes/{node}")["status"]["conditions"]
        except Refused as error:
            if error.status != 404:
                raise
            return False
        return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)

    def kubectl(self, *words: object, text: str | None = None) -> str:
        """Return the output of kubectl. Raises Failed."""
        command = [str(self.programs["kubectl"]), f"--kubeconfig={self.kubeconfig}", *map(str, words)]
        # Its cache is the cluster's, and no proxy is between.
        settings = {"PATH": self.daemons.path, "HOME": str(self.names.run)}
        return printed(command, settings, text)

    def compact(self) -> int:
        """Compact etcd to its current revision, and return that revision."""
        space = SPACES / self.names.space(CONTROL_PLANE)
        command = ["nsenter", f"--net={space}", sys.executable, "-c", _COMPACT, ETCD]
        return int(subprocess.run(command, check=True, capture_output=True, text=True, env={}).stdout)

    def restart_server(self) -> None:
        """Kill the API server, start it again, and wait until it answers."""
        self.daemons.end(API_SERVER)
        self.daemons.again(API_SERVER)
        self.control.ready()

    def release(self) -> None:
        """Remove the cluster with all its parts."""
        cleanup.release(self.names)


def printed(command: Sequence[str], settings: Mapping[str, str], text: str | None = None) -> str:
    """Return the output of a command. Raises Failed."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, input=text, env=settings)
    if done.returncode:
        raise Failed(f"{Path(command[0]).name} {' '.join(command[1:6])}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def create_cluster(
    nodes: int, *, retained: bool = False, cgroup_driver: str = CGROUPFS, progress: Progress = _no_progress
) -> Cluster:
    """Return a new cluster, for this process or retained for `make cluster-down`; without nodes it is only an API server.
    `progress` receives a line about each step.

    Raises Missing, ClusterNumberTaken and Late; then nothing is left.
    """
    programs = obtain(PROGRAMS if nodes else CONTROL)
    cluster = Cluster(cleanup.claim((0,) if retained else range(1, MOST), retained=retained), programs)
    try:
        progress("starting etcd and the API server")
        cluster.begin()
        if nodes:
            cluster.grow(nodes, cgroup_driver, progress)
    except BaseException:
        cluster.release()
        raise
    return cluster

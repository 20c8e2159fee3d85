"""The stock Katalyst agent on a node, and ours beside it: compiled only when it is asked for, run from folders of the cluster.

It expects `/kubepods` to be the kubelet's, and asks for Malachite at port 9002 of the node: that is where ours answers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.binaries import CACHE, HERE, Missing, compiled
from tests.cluster.cluster import Cluster
from tests.cluster.node import SOCKET, Node

ROOT = HERE.parents[1]
NAME, MODULE, PACKAGES = "katalyst-agent", "katalyst", "github.com/kubewharf/katalyst-core/cmd"
MALACHITE, METRICS = 9002, 9316
REPORTER, ADVISOR, ORM = "katalyst-agent-reporter", "katalyst-agent-advisor", "katalyst-agent-orm"
QRM = ("qrm_cpu_plugin", "qrm_memory_plugin")
_RUN = "import sys; from cli.main import main; sys.argv[0] = 'dioptase'; sys.exit(main())"
MAPPED = ",".join(
    f"resource.katalyst.kubewharf.io/{name}" for name in ("reclaimed_millicpu=cpu", "reclaimed_memory=memory")
)


def obtain_katalyst(cache: Path = CACHE) -> Path:
    """The program, at the version in modules/katalyst. Raises Missing."""
    return compiled(NAME, MODULE, PACKAGES, cache)


class Beside:
    """Both agents on one node. `folder` is a short one: sockets are in it."""

    def __init__(self, cluster: Cluster, node: Node, program: Path, folder: Path) -> None:
        if node.cgroup_root != "/":
            raise Missing("/kubepods is another cluster's: Katalyst looks nowhere else")
        self.cluster, self.node, self.folder = cluster, node, folder
        self._program = program
        folder.mkdir(exist_ok=True)
        for name in ("plugins", "advisor", "orm", "pods", "state", "checkpoints"):
            (folder / name).mkdir(exist_ok=True)

    @property
    def stock(self) -> str:
        """Its daemon,"""
        return f"{self.node.name}-katalyst"

    @property
    def ours(self) -> str:
        """and ours."""
        return f"{self.node.name}-dioptase"

    @property
    def sockets(self) -> dict[str, str]:
        """Of our settings."""
        return {
            "advisorDir": f"{self.folder}/advisor",
            "pluginDir": f"{self.folder}/plugins",
            "podResources": f"{self.folder}/pods/ours.sock",
        }

    def start_ours(self, settings: Mapping[str, Any], *options: str) -> None:
        """Ours, with Malachite's documents, and these settings beside those that the node needs."""
        kubelet = {"url": f"http://{self.node.address}:10255", "cgroupRoot": self.node.cgroup_root}
        told = {"kubelet": kubelet, **settings, "sockets": {**self.sockets, **settings.get("sockets", {})}}
        config = self.folder / "dioptase.json"
        config.write_text(json.dumps(told))
        state = self.folder / "dioptase"
        state.mkdir(mode=0o700, exist_ok=True)
        words = (
            "env", f"PYTHONPATH={ROOT}", f"KUBECONFIG={self.cluster.kubeconfig}", sys.executable, "-c", _RUN, "agent",
            "--kubelet", "--malachite", f"127.0.0.1:{MALACHITE}", "--listen", f"{self.node.address}:9102",
            "--state-dir", state, "--config", config, *options,
        )  # fmt: skip
        self._start(self.ours, *words)
        self.cluster.daemons.wait(self.ours, lambda: self.fetched(f"http://{self.node.address}:9102/healthz"), 60)

    def start_stock(self, agents: Sequence[str], *flags: str, pod_resources: str = "") -> None:
        """Theirs, with these of its parts. Pods come from kubelet's read-only port, nodes and CNR from the API server."""
        folder = self.folder
        words = (
            self._program, f"--kubeconfig={self.cluster.kubeconfig}", f"--node-name={self.node.name}",
            f"--node-address={self.node.address}", f"--agents={','.join(agents)}", "--logtostderr=true", "-v=3",
            f"--locking-file={folder}/lock", f"--generic-endpoint=:{METRICS}", "--cgroup-type=cgroupfs",
            f"--plugin-registration-dir={folder}/plugins", f"--qrm-socket-dirs={folder}/plugins",
            f"--orm-plugin-registration-dir={folder}/orm", f"--orm-pod-resources-socket=unix:{folder}/pods/orm.sock",
            "--topology-policy-name=none", "--orm-devices-provider=kubelet",
            f"--orm-resource-names-map={MAPPED}",
            f"--pod-resources-server-endpoint={pod_resources or f'{folder}/pods/orm.sock'}",
            f"--kubelet-resource-plugin-path={folder}/orm/",
            f"--checkpoint-manager-directory={folder}/checkpoints", f"--state-dir={folder}/state/",
            f"--qrm-state-dir={folder}/state", f"--cpu-advisor-sock-abs-path={folder}/advisor/cpu_advisor.sock",
            f"--cpu-plugin-sock-abs-path={folder}/advisor/cpu_plugin.sock",
            f"--memory-advisor-sock-abs-path={folder}/advisor/memory_advisor.sock",
            f"--memory-plugin-sock-abs-path={folder}/advisor/memory_plugin.sock",
            f"--remote-runtime-endpoint=unix://{SOCKET}", f"--pod-notifier-root-path={folder}/notify",
            "--enable-reclaim=true", "--kubelet-pod-cache-sync-period=2s", *flags,
        )  # fmt: skip
        self._start(self.stock, *words)

    def fetched(self, url: str) -> str:
        """What is answered in the node. Raises CalledProcessError."""
        return self.node.run(
            sys.executable, "-c", f"import urllib.request as u; print(u.urlopen({url!r}).read().decode())"
        )

    def end(self, name: str) -> None:
        """One of both, in its own time."""
        import signal  # noqa: PLC0415

        self.cluster.daemons.end(name, signal.SIGTERM)

    def log(self, name: str) -> str:
        return self.cluster.daemons.log(name).read_text(errors="replace")

    def cnr(self) -> dict[str, Any]:
        """What is published of the node. Raises Refused."""
        found: dict[str, Any] = self.cluster.server.ask(
            "GET", f"/apis/node.katalyst.kubewharf.io/v1alpha1/customnoderesources/{self.node.name}"
        )
        return found

    def _start(self, name: str, *words: object) -> None:
        self.cluster.daemons.start(name, self.cluster.names.space(self.node.name), self.node.words(*words)[2:])

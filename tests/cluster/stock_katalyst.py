"""The stock Katalyst agent next to dioptase: compiled on demand, with its own sockets and state.

It reads Malachite at port 9002 of the node, which dioptase serves.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.cluster.binaries import CACHE, HERE, compiled
from tests.cluster.cluster import Cluster
from tests.cluster.daemons import SPACES
from tests.cluster.node import SOCKET

ROOT = HERE.parents[1]
NAME, MODULE, PACKAGES = "katalyst-agent", "katalyst", "github.com/kubewharf/katalyst-core/cmd"
MALACHITE, METRICS = 9002, 9316
DIOPTASE, STAND_IN = "dioptase", "kubelet-stand-in"
CNRS = "/apis/node.katalyst.kubewharf.io/v1alpha1/customnoderesources"
REPORTER, ADVISOR, ORM = "katalyst-agent-reporter", "katalyst-agent-advisor", "katalyst-agent-orm"
QRM = ("qrm_cpu_plugin", "qrm_memory_plugin")
_RUN = "import sys; from cli.main import main; sys.argv[0] = 'dioptase'; sys.exit(main())"
MAPPED = ",".join(
    f"resource.katalyst.kubewharf.io/{name}" for name in ("reclaimed_millicpu=cpu", "reclaimed_memory=memory")
)


def obtain_katalyst(cache: Path = CACHE) -> Path:
    """Return the path of the program, at the version in modules/katalyst. Raises Missing."""
    return compiled(NAME, MODULE, PACKAGES, cache)


class Place(NamedTuple):
    """The place where both agents run."""

    space: str
    """Name of the network namespace."""
    address: str
    """Address in the namespace."""
    inside: tuple[str, ...]
    """Prefix of each command, for its mount namespace."""


class KatalystAndDioptase:
    """Both agents at one place. `folder` has a short path, because it holds sockets."""

    def __init__(self, cluster: Cluster, place: Place, program: Path, folder: Path, name: str) -> None:
        self.cluster, self.place, self.folder, self.name = cluster, place, folder, name
        self._program = program
        for part in ("plugins", "qrm", "advisor", "orm", "pods", "state", "checkpoints"):
            (folder / part).mkdir(parents=True)

    @property
    def sockets(self) -> dict[str, str]:
        """Return the socket paths of dioptase's settings."""
        return {
            "advisorDir": f"{self.folder}/advisor",
            "pluginDir": f"{self.folder}/plugins",
            "podResources": f"{self.folder}/pods/own_cluster.sock",
        }

    def start_ours(self, settings: Mapping[str, Any], *options: str) -> None:
        """Start dioptase with Malachite's documents and these settings in addition to those of the place."""
        text = {**settings, "sockets": {**self.sockets, **settings.get("sockets", {})}}
        config = self.folder / "dioptase.json"
        config.write_text(json.dumps(text))
        state = self.folder / "dioptase"
        state.mkdir(mode=0o700, exist_ok=True)
        self.start(
            DIOPTASE, "env", f"PYTHONPATH={ROOT}", f"KUBECONFIG={self.cluster.kubeconfig}", sys.executable, "-c", _RUN,
            "agent", "--malachite", f"127.0.0.1:{MALACHITE}", "--listen", f"{self.place.address}:9102",
            "--state-dir", state, "--config", config, *options,
        )  # fmt: skip
        self.cluster.daemons.wait(DIOPTASE, lambda: self.metrics()["dioptase_build_info"], 60)

    def start_stock(self, name: str, agents: Sequence[str], *flags: str) -> None:
        """Start a Katalyst agent with these parts; each such process has a lock and a port of its own."""
        folder = self.folder
        port = METRICS + len(list(folder.glob("*.lock")))
        (folder / f"{name}.lock").touch()
        sockets = [
            f"--{kind}-{role}-sock-abs-path={folder}/advisor/{kind}_{role}.sock"
            for kind in ("cpu", "memory")
            for role in ("advisor", "plugin")
        ]
        self.start(
            name, self._program, f"--kubeconfig={self.cluster.kubeconfig}", f"--node-name={self.name}",
            f"--node-address={self.place.address}", f"--agents={','.join(agents)}", "--logtostderr=true",
            f"--locking-file={folder}/{name}.lock", f"--generic-endpoint=:{port}", "--cgroup-type=cgroupfs",
            f"--plugin-registration-dir={folder}/plugins", f"--qrm-socket-dirs={folder}/qrm",
            f"--orm-plugin-registration-dir={folder}/orm", f"--orm-pod-resources-socket=unix:{folder}/pods/orm.sock",
            "--topology-policy-name=none", "--orm-devices-provider=kubelet",
            "--orm-resource-names-map=resource.katalyst.kubewharf.io/reclaimed_millicpu=cpu,"
            "resource.katalyst.kubewharf.io/reclaimed_memory=memory",
            f"--pod-resources-server-endpoint={folder}/pods/own_cluster.sock",
            f"--kubelet-resource-plugin-path={folder}/orm/", f"--checkpoint-manager-directory={folder}/checkpoints",
            f"--state-dir={folder}/state/", f"--qrm-state-dir={folder}/state", *sockets,
            f"--remote-runtime-endpoint=unix://{SOCKET}", f"--pod-notifier-root-path={folder}/notify",
            "--enable-reclaim=true", "--kubelet-pod-cache-sync-period=2s", *flags,
        )  # fmt: skip

    def start(self, name: str, *words: object) -> None:
        """Start a program at the place as a daemon of the cluster."""
        self.cluster.daemons.start(name, self.place.space, (*self.place.inside, *words))

    def end(self) -> None:
        """End all programs. Katalyst's do not always exit on SIGTERM."""
        for name in self.cluster.daemons.names():
            if name in (DIOPTASE, STAND_IN) or (self.folder / f"{name}.lock").exists():
                self.cluster.daemons.end(name, signal.SIGTERM, seconds=15)

    def metrics(self) -> dict[str, float]:
        """Return dioptase's samples by name and labels in text format. Raises CalledProcessError."""
        url = f"http://{self.place.address}:9102/metrics"
        code = f"import urllib.request as u; print(u.urlopen({url!r}, timeout=5).read().decode())"
        words = ["nsenter", f"--net={SPACES / self.place.space}", sys.executable, "-c", code]
        output = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        pairs = (line.rpartition(" ") for line in output.splitlines() if line and not line.startswith("#"))
        result = {name: float(value) for name, _space, value in pairs}
        return result | {
            name.partition("{")[0]: value for name, value in result.items() if "{" not in name or "build" in name
        }

    def state(self, kind: str) -> dict[str, Any]:
        """Return the state file of Katalyst's QRM plugin of `cpu` or `memory`."""
        text: dict[str, Any] = json.loads((self.folder / f"state/{kind}_plugin_state").read_text())
        return text

    def log(self, name: str) -> str:
        return self.cluster.daemons.log(name).read_text(errors="replace")

    def cnr(self) -> dict[str, Any]:
        """Return the CustomNodeResource of the node. Raises Refused."""
        result: dict[str, Any] = self.cluster.server.ask("GET", f"{CNRS}/{self.name}")
        return result

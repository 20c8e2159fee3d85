"""A node whose kubelet uses the systemd cgroup driver, with the chart installed, in a guest with systemd as the init.

The agent is the chart's pod, with the chart's roles, capabilities and mounts. Its image has no files of its own: Python and
this tree come from the guest's root as volumes, since to import the real image takes minutes on emulated processors.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.cluster import images
from tests.cluster.cgroups import ROOT
from tests.cluster.cluster import CONSENT, Cluster
from tests.cluster.daemons import PATIENCE, wait
from tests.cluster.image_and_chart import CHART, IMAGE, SHARED_MACHINE, TAG, helm
from tests.cluster.names import HOME
from tests.cluster.objects import IDLING, a_pod
from tests.cluster.programs import AGENT_PORT, CODE

NAMESPACE, RELEASE = "dioptase-system", "dioptase"
KUBEPODS = ROOT / "kubepods.slice"
CLASS = KUBEPODS / "kubepods-besteffort.slice"
DISK = Path("/run/data/cluster")
"""Folder of the cluster on the data disk, which the next boot has too."""
OUT = Path("/run/out")
READ_ONLY = re.compile(r"cgroup\.(procs|threads)|.*\.(pressure|peak)")
"""Writable files that are no settings: tasks, triggers, and maxima that a write resets."""
SCOPE = re.compile(r"cri-containerd-[0-9a-f]{64}\.scope")


def mount_disk() -> None:
    """Place the clusters' folder on the data disk: on the guest's root, an overlay, containerd can lay none of its own."""
    DISK.mkdir(exist_ok=True)
    HOME.mkdir(exist_ok=True)
    subprocess.run(["mount", "--bind", DISK, HOME], check=True)


def volumes() -> dict[str, list[dict[str, Any]]]:
    """Return the chart's values with Python and this tree as volumes."""
    places = ("/usr", "/lib", "/lib64", CODE, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve())
    needed = list(dict.fromkeys(Path(path) for path in places if Path(path).is_dir()))
    paths = [str(path) for path in needed if not set(path.parents) & set(needed)]
    names = {path: f"root{number}" for number, path in enumerate(paths)}
    return {
        "extraEnv": [{"name": "PYTHONPATH", "value": str(CODE)}],
        "extraVolumes": [{"name": name, "hostPath": {"path": path}} for path, name in names.items()],
        "extraVolumeMounts": [{"name": name, "mountPath": path, "readOnly": True} for path, name in names.items()],
    }


class SystemdNode:
    """The node of a cluster, its online pod `web` and its reclaimed pod `batch`, and the chart's agent."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        (self.node,) = cluster.nodes

    @property
    def state(self) -> Path:
        """Return the agent's state directory."""
        return self.node.at("/var/lib/dioptase")

    def create(self, name: str, level: str, command: str = IDLING, resources: Mapping[str, Any] | None = None) -> None:
        """Create a pod, which the scheduler places, and wait until it is ready."""
        path = f"/api/v1/namespaces/{CONSENT}/pods"
        self.cluster.server.ask("POST", path, a_pod(name, level, command, resources))
        wait(f"pod {name}", lambda: self.status(name).get("ready"))

    def delete(self, name: str) -> None:
        self.cluster.kubectl("--namespace", CONSENT, "delete", "pod", name, "--grace-period=1", "--timeout=300s")

    def status(self, name: str) -> Any:
        """Return the status of the pod's container."""
        pod = self.cluster.server.ask("GET", f"/api/v1/namespaces/{CONSENT}/pods/{name}")
        return pod["status"].get("containerStatuses", [{}])[0]

    def scope(self, name: str) -> Path:
        """Return the cgroup of the pod's container."""
        identity = self.status(name)["containerID"].removeprefix("containerd://")
        (path,) = KUBEPODS.glob(f"**/cri-containerd-{identity}.scope")
        return path

    def logs(self, name: str, lines: int) -> list[str]:
        """Return the first lines that a pod has printed."""
        words = ("logs", "--namespace", CONSENT, name)
        wait(f"output of {name}", lambda: self.cluster.kubectl(*words).count("\n") >= lines)
        return self.cluster.kubectl(*words).splitlines()[:lines]

    def install(self) -> None:
        """Install the chart and wait for the agent's first cycles."""
        settings = {
            "intervalS": 1,
            "probes": [],
            "advisor": SHARED_MACHINE,
            # The chart's capabilities do not include the one that shows the version of systemd.
            "kubelet": {"idleClass": True},
            # Minutes on a real node.
            "report": {"periodS": 1, "windowS": 3},
        }
        values = {
            "image": {"repository": IMAGE, "tag": TAG, "pullPolicy": "Never"},
            "agent": {"settings": settings, **volumes()},
            "controller": {"enabled": False},
            "tls": {"enabled": False},
            "tokenReview": False,
        }
        archive, file = self.cluster.names.run / "agent.tar", self.cluster.names.run / "values.json"
        images.write(archive, {f"{IMAGE}:{TAG}": (str(Path(sys.executable).with_name("dioptase")),)})
        self.node.load(archive)
        file.write_text(json.dumps(values))
        self.helm("upgrade", "--install", RELEASE, CHART, "--create-namespace", "--values", file)
        wait("two cycles of the agent", lambda: self.cycle() >= 2, 120)

    def uninstall(self) -> None:
        """Uninstall the chart and wait until the agent has ended. Its Job, which removes objects, needs the real image."""
        self.helm("uninstall", RELEASE, "--no-hooks", "--wait", "--timeout=600s")
        path = f"/api/v1/namespaces/{NAMESPACE}/pods"
        wait("the end of the agent", lambda: not self.cluster.server.ask("GET", path)["items"], 90)

    def helm(self, *words: object) -> str:
        return helm(self.cluster, "--namespace", NAMESPACE, *words)

    def ask(self, path: str) -> str:
        """Return the agent's response."""
        with urllib.request.urlopen(
            f"http://{self.node.address}:{AGENT_PORT}{path}", timeout=10 * PATIENCE
        ) as response:
            return str(response.read().decode())

    def view(self) -> Any:
        """Return the agent's latest cycle."""
        return json.loads(self.ask("/api/v1/view"))

    def cycle(self) -> int:
        """Return the number of the agent's latest cycle."""
        return int(self.view()["seq"])

    def errors(self) -> dict[str, str]:
        """Return the errors of the failed sources by name."""
        return {item["name"]: item["error"] for item in self.view()["sources"] if not item["ok"]}

    def source_is_healthy(self, name: str) -> bool:
        """Return whether the source is healthy. Raises AssertionError with its error."""
        errors = self.errors()
        assert name not in errors, errors[name]
        return True

    def repairs(self) -> int:
        """Return how often another program had cleared cpu.idle."""
        sample = re.search(r'^dioptase_knob_repairs_total\{knob="cpu\.idle"\} (\S+)', self.ask("/metrics"), re.M)
        return int(float(sample[1])) if sample else 0

    def nri_answers(self) -> float:
        """Return the number of containers for which the agent answered the runtime in time."""
        samples = re.findall(r'^dioptase_nri_containers_total\{answer="(\w+)"\} (\S+)', self.ask("/metrics"), re.M)
        return sum(float(value) for answer, value in samples if answer not in ("late", "refused"))

    def decisions(self) -> list[Any]:
        """Return the agent's journal."""
        return list(json.loads(self.ask("/api/v1/decisions?limit=2000")))

    def agent_pid(self) -> int:
        """Return the process id of the agent."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if b"agent" in words and b"--profile=colocate" in words:
                return int(path.parent.name)
        raise LookupError("no agent runs")

    def restart_kubelet(self, killed_agent: int | None = None) -> None:
        """Kill the kubelet, then the agent if its process is given; start the kubelet and wait until it has reported the
        node as ready since."""
        before = self._heartbeat()
        self.cluster.daemons.end(self.node.kubelet, signal.SIGKILL)
        if killed_agent is not None:
            os.kill(killed_agent, signal.SIGKILL)
            wait("the end of the agent", lambda: not Path(f"/proc/{killed_agent}").exists())
            assert is_idle(CLASS), "nothing but the agent has reset the class"
        self.cluster.daemons.again(self.node.kubelet)
        self.cluster.daemons.wait(
            self.node.kubelet, lambda: self.cluster.ready(self.node.name) and self._heartbeat() != before, 90
        )

    def _heartbeat(self) -> str:
        """Return the time of the kubelet's latest status report, which it also sends at its start."""
        conditions = self.cluster.server.ask("GET", f"/api/v1/nodes/{self.node.name}")["status"]["conditions"]
        return str(next(item["lastHeartbeatTime"] for item in conditions if item["type"] == "Ready"))


def is_idle(cgroup: Path) -> bool:
    return (cgroup / "cpu.idle").read_text() == "1\n"


def settings_of_pods(node: SystemdNode, *names: str) -> dict[str, str]:
    """Return the content of every file that is a setting: of these pods and their containers, the classes and their parent.

    The names of containers' scopes change with each start, so that their program takes the place of the name.
    """
    pods = [node.scope(name).parent for name in names]
    groups = {path: str(path.relative_to(ROOT)) for path in (KUBEPODS, *KUBEPODS.glob("kubepods-*.slice"), *pods)}
    for scope in (scope for pod in pods for scope in pod.iterdir() if SCOPE.fullmatch(scope.name)):
        (pid, *_) = (scope / "cgroup.procs").read_text().split()
        groups[scope] = f"{groups[scope.parent]}/{Path(f'/proc/{pid}/comm').read_text().strip()}"
    return {
        f"{name}/{file.name}": file.read_text()
        for group, name in groups.items()
        for file in sorted(group.iterdir())
        if file.is_file() and file.stat().st_mode & 0o600 == 0o600 and not READ_ONLY.fullmatch(file.name)
    }

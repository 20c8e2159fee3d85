"""A node: a network namespace, a mount namespace in which everything has its stock path, containerd, kubelet and kube-proxy."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster import cgroups, images
from tests.cluster.credentials import Authority
from tests.cluster.daemons import SPACES, Daemons
from tests.cluster.names import DNS_SERVICE, PODS, Names

OWN = (
    "/run/containerd",
    "/run/netns",
    "/run/nri",
    "/var/lib/containerd",
    "/var/lib/kubelet",
    "/var/lib/cni",
    "/var/lib/dioptase",
    "/var/log/containers",
    "/var/log/pods",
    "/etc/cni",
    "/etc/kubernetes",
)
"""Paths of which every node has its own; all others are this machine's."""
SOCKET = "/run/containerd/containerd.sock"
CGROUPFS, SYSTEMD = "cgroupfs", "systemd"
"""The kubelet's cgroup drivers."""
# Without CAP_SYS_RESOURCE runc cannot give a sandbox the oom_score_adj of -998 that containerd asks for.
_CONTAINERD = """version = 3
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "PAUSE"
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["/usr/lib/cni"]
    conf_dir = "/etc/cni/net.d"
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      SystemdCgroup = IS_SYSTEMD
[plugins.'io.containerd.nri.v1.nri']
  disable = false
"""
# The first word is the folder, the others are paths; what is mounted in pods and for them is seen in the whole node.
_MOUNTS = """set -e
for path; do mount --bind "$0$path" "$path"; done
mount --make-rshared /
touch "$0/ready"
exec sleep infinity
"""


class Node:
    """One node of a cluster."""

    def __init__(self, names: Names, name: str, programs: Mapping[str, Path], daemons: Daemons) -> None:
        self.name, self._names, self._programs, self._daemons = name, names, programs, daemons
        self.folder = names.run / name
        self.address = names.address(name)

    @property
    def kubelet(self) -> str:
        """Return the name of the kubelet's daemon."""
        return f"{self.name}-kubelet"

    @property
    def containerd(self) -> str:
        return f"{self.name}-containerd"

    @property
    def cgroup_root(self) -> str:
        """Return the kubelet's `cgroupRoot`: `/` if its pods are below /kubepods, or a cgroup of its own."""
        root: str = json.loads((self.folder / "kubelet.json").read_text())["cgroupRoot"]
        return root

    def at(self, path: str) -> Path:
        """Return the path on this machine of a path of the node, which differs only for those of OWN."""
        own = any(path == item or path.startswith(f"{item}/") for item in OWN)
        return self.folder / "root" / path[1:] if own else Path(path)

    def words(self, *words: object) -> list[str]:
        """Return a command that runs in the node."""
        space = SPACES / self._names.space(self.name)
        return ["nsenter", f"--net={space}", *self._mounts(), *map(str, words)]

    def run(self, *words: object) -> str:
        """Return the output of a command in the node. Raises CalledProcessError."""
        return subprocess.run(self.words(*words), check=True, capture_output=True, text=True).stdout

    def begin(self, authority: Authority, cgroup_driver: str = CGROUPFS) -> None:
        """Start the node's programs; the kubelet registers the node. Raises Late with a log."""
        for path in OWN:
            self.at(path).mkdir(parents=True)
        self._begin_mounts()
        self._write_network()
        (self.folder / "containerd.toml").write_text(
            _CONTAINERD.replace("PAUSE", images.PAUSE).replace("IS_SYSTEMD", str(cgroup_driver == SYSTEMD).lower())
        )
        self._begin_containerd()
        archive = self._names.run / "images.tar"
        if not archive.exists():
            images.write(archive)
        self.load(archive)
        self._configure_kubelet(authority, cgroup_driver)
        self._begin_kubelet()
        self._configure_proxy(authority)
        self._begin_proxy()

    def resume(self) -> None:
        """Start the node's programs again after a reboot of this machine, with the files on disk."""
        for path in OWN:
            # A real machine has /run in memory.
            if path.startswith("/run/"):
                shutil.rmtree(self.at(path))
                self.at(path).mkdir()
        (self.folder / "root/ready").unlink()
        self._begin_mounts()
        self._begin_containerd()
        self._begin_kubelet()
        self._begin_proxy()

    def load(self, archive: Path) -> None:
        """Import the images of an archive."""
        self._ctr("images", "import", archive)

    def tag(self, image: str, name: str) -> None:
        """Give an existing image a second name."""
        self._ctr("images", "tag", "--force", image, name)

    def _begin_mounts(self) -> None:
        self._daemons.start(
            self.name, self._names.space(self.name),
            ("unshare", "--mount", "--propagation", "private", "sh", "-c", _MOUNTS, self.folder / "root", *OWN),
        )  # fmt: skip
        self._daemons.wait(self.name, self._entered, 20)

    def _begin_containerd(self) -> None:
        self._start(self.containerd, self._programs["containerd"], "-c", self.folder / "containerd.toml")
        self._daemons.wait(self.containerd, lambda: self._ctr("version"), 30)

    def _entered(self) -> bool:
        ready = (self.folder / "root/ready").exists()
        if not ready and self._daemons.pid(self.name) is None:
            raise ProcessLookupError(self.name)
        return ready

    def _configure_kubelet(self, authority: Authority, cgroup_driver: str) -> None:
        authority.issue(self.name, f"/O=system:nodes/CN=system:node:{self.name}", f"IP:{self.address},DNS:{self.name}")
        # systemd's slices are its own: below /kubepods.slice, and removed with the machine.
        cgroup_root = "/" if cgroup_driver == SYSTEMD else cgroups.prepare(self._names, self.name)
        config = self._kubelet_config(authority, cgroup_root) | {"cgroupDriver": cgroup_driver}
        (self.folder / "kubelet.json").write_text(json.dumps(config))
        authority.kubeconfig(self.name, self.folder / "kubelet.kubeconfig")

    def _begin_kubelet(self) -> None:
        self._start(
            self.kubelet, self._programs["kubelet"], f"--config={self.folder}/kubelet.json",
            f"--kubeconfig={self.folder}/kubelet.kubeconfig", f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
        )  # fmt: skip

    def _kubelet_config(self, authority: Authority, cgroup_root: str) -> dict[str, object]:
        """Return the stock configuration, adapted for two kubelets on one machine, swap and cgroups of version 1."""
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "0.0.0.0",
            "cgroupRoot": cgroup_root,
            "failSwapOn": False,
            "failCgroupV1": False,
            "readOnlyPort": 10255,
            "healthzBindAddress": "127.0.0.1",
            "containerRuntimeEndpoint": f"unix://{SOCKET}",
            "volumePluginDir": "/var/lib/kubelet/volume-plugins",
            "tlsCertFile": str(authority.certificate(self.name)),
            "tlsPrivateKeyFile": str(authority.key(self.name)),
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(authority.certificate("ca"))},
            },
            "authorization": {"mode": "Webhook"},
            "clusterDNS": [DNS_SERVICE],
            "clusterDomain": "cluster.local",
            "kubeReserved": {"cpu": "100m", "memory": "256Mi"},
            "evictionHard": {"memory.available": "100Mi"},
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
        }

    def _configure_proxy(self, authority: Authority) -> None:
        user = f"{self.name}-proxy"
        authority.issue(user, "/CN=system:kube-proxy")
        config = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "clientConnection": {"kubeconfig": str(authority.kubeconfig(user, self.folder / "proxy.kubeconfig"))},
            "hostnameOverride": self.name,
            "clusterCIDR": PODS,
            # These sysctls are the machine's, and not to be written from a namespace, which has none before the first rule.
            "conntrack": {
                "maxPerCore": 0,
                "min": 0,
                "tcpEstablishedTimeout": "0s",
                "tcpCloseWaitTimeout": "0s",
            },
            "healthzBindAddress": "127.0.0.1:10256",
            "metricsBindAddress": "127.0.0.1:10249",
        }
        (self.folder / "proxy.json").write_text(json.dumps(config))

    def _begin_proxy(self) -> None:
        self._start(f"{self.name}-proxy", self._programs["kube-proxy"], f"--config={self.folder}/proxy.json")

    def _write_network(self) -> None:
        plugin = {
            "type": "ptp",
            "ipMasq": False,
            "ipam": {
                "type": "host-local",
                "subnet": self._names.pods(self.name),
                "routes": [{"dst": "0.0.0.0/0"}],
                "dataDir": "/var/lib/cni/networks",
            },
        }
        folder = self.at("/etc/cni/net.d")
        folder.mkdir()
        text = {"cniVersion": "1.0.0", "name": "pods", "plugins": [plugin]}
        (folder / "10-ptp.conflist").write_text(json.dumps(text))

    def _mounts(self) -> Sequence[str]:
        return ("nsenter", f"--mount=/proc/{self._daemons.pid(self.name)}/ns/mnt")

    def _start(self, name: str, *words: object) -> None:
        self._daemons.start(name, self._names.space(self.name), (*self._mounts(), *words))

    def _ctr(self, *words: object) -> str:
        return self.run(self._programs["ctr"], "-a", SOCKET, "-n", "k8s.io", *words)

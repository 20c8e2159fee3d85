"""Defines how the agent reaches the kubelet, the container runtime and NRI (`--kubelet`)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from agent.config.units import Seconds

Url = Annotated[str, Meta(pattern=r"^https?://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?$")]
LOOPBACK_URLS = ("https://127.", "https://localhost:", "https://[::1]:")
MAX_POLLS_WITHOUT_KUBELET = 5
"""While the running containers stay the same, the kubelet is polled at every fifth poll of the runtime."""
CgroupRoot = Annotated[str, Meta(pattern=r"^/([A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*)?$")]


class KubeletConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """With `--kubelet`. Replaced files are read again."""

    url: Url = "https://127.0.0.1:10250"
    """Address of the kubelet. A read-only port, such as `http://127.0.0.1:10255`, gets no token."""
    token_file: str | None = None
    """Bearer token; unset: the service account's; empty: none. Needs `get` of `nodes/proxy`, or from Kubernetes 1.33 of
    `nodes/pods` and, for reports, `nodes/configz`."""
    ca_file: str | None = None
    """CA of the kubelet's certificate; unset: the service account's; empty: the system's. Self-signed:
    `/var/lib/kubelet/pki/kubelet.crt`."""
    certificate_file: str = ""
    """Client certificate, besides or instead of the token; needs `keyFile`."""
    key_file: str = ""
    """Private key of `certificateFile`."""
    server_name: str = ""
    """Name in the kubelet's certificate; empty: `--node` for a loopback `url`, else the host in `url`."""
    verify: bool = True
    """`false` skips TLS verification: the token is sent to any server that answers at `url`."""
    runtime_socket: str | None = None
    """Socket of containerd or CRI-O; unset: the first of `/run/containerd/containerd.sock`, `/run/crio/crio.sock`,
    `/run/k3s/containerd/containerd.sock`. Empty: none, containers are noticed seconds later."""
    events: bool = False
    """Poll at once on container events. containerd blocks while a subscriber is stopped; containerd 1 sends each event
    to one subscriber, so a kubelet with `EventedPLEG` misses some."""
    nri_socket: str | None = None
    """NRI socket of containerd (2, or 1.7 with NRI) or CRI-O, see docs/acting.md. Unset: `/var/run/nri/nri.sock` if it
    exists. Empty: none."""
    nri_patience_s: Annotated[float, Meta(ge=0.01, le=1.5)] = 0.5
    """Maximum delay of a container's creation by NRI. The runtime drops a plugin after 2 s."""
    writer: Literal["files", "cri"] = "files"
    """`files`: the agent writes containers' CPU and NUMA lists, weight, quota and memory limit. `cri`: the runtime writes
    them. See docs/acting.md."""
    idle_class: bool = True
    """Set `cpu.idle` of a QoS class whose pods are all reclaimed, where a kubelet can still restart: cgroup version 2, its
    systemd driver, systemd 252. See docs/acting.md."""
    cgroup_root: CgroupRoot = "/"
    """The kubelet's `cgroupRoot`. Its `cgroupDriver` is detected."""
    root_dir: str = "/var/lib/kubelet"
    """The kubelet's `--root-dir` with its managers' state. Cpusets are not written if a manager is static, or if
    neither these files nor `/configz` are readable."""
    interval_s: Annotated[float, Meta(ge=0.2, le=60)] = 1.0
    """Time between polls of the runtime; the kubelet is polled on changes and every fifth time, without a runtime
    always."""
    timeout_s: Annotated[float, Meta(ge=0.1, le=60)] = 5.0
    """Deadline of a request to either."""
    stale_s: Seconds = 30.0
    """With an older pod list reclaimable resources do not grow."""

    def named(self, node: str) -> KubeletConfig:
        """Return these settings with the node's name as `serverName`, unless it or a host other than loopback is
        configured."""
        if self.server_name or not self.url.startswith(LOOPBACK_URLS):
            return self
        return msgspec.structs.replace(self, server_name=node)

    def __post_init__(self) -> None:
        if bool(self.certificate_file) is not bool(self.key_file):
            missing = "keyFile" if self.certificate_file else "certificateFile"
            raise ValueError(f"{missing} is missing; set both certificateFile and keyFile, or neither")
        if self.stale_s <= MAX_POLLS_WITHOUT_KUBELET * self.interval_s:
            raise ValueError(
                f"staleS {self.stale_s:g} is not longer than {MAX_POLLS_WITHOUT_KUBELET} times intervalS {self.interval_s:g}: "
                "the list would often be too old; raise it"
            )

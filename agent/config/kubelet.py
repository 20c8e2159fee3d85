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
    """With `--kubelet`, pod specifications come from the kubelet, and running containers from the container runtime,
    which knows them first. Files may be replaced at any time, as mounted tokens are."""

    url: Url = "https://127.0.0.1:10250"
    """Address of the kubelet. A read-only port, such as `http://127.0.0.1:10255`, gets no token."""
    token_file: str | None = None
    """File with the bearer token; unset: the service account's; empty: none. Needs `get` of `nodes/proxy`, or from
    Kubernetes 1.33 of `nodes/pods` and, for reports, `nodes/configz`."""
    ca_file: str | None = None
    """CA of the kubelet's certificate; unset: the service account's; empty: the system's. Self-signed:
    `/var/lib/kubelet/pki/kubelet.crt`."""
    certificate_file: str = ""
    """Client certificate, instead of the token or in addition to it; needs `keyFile`."""
    key_file: str = ""
    """Private key of `certificateFile`."""
    server_name: str = ""
    """Name in the kubelet's certificate; empty: `--node` for a loopback `url`, else the host in `url`."""
    verify: bool = True
    """`false` skips TLS verification: the token is sent to any server that answers at `url`."""
    runtime_socket: str | None = None
    """Socket of containerd or CRI-O; unset: the first of `/run/containerd/containerd.sock`, `/run/crio/crio.sock` and
    `/run/k3s/containerd/containerd.sock`. Empty: containers are noticed seconds later."""
    events: bool = False
    """Poll at once on container events. containerd blocks while a subscriber is stopped; containerd 1 sends each event
    to one subscriber only, so a kubelet with `EventedPLEG` misses some."""
    nri_socket: str | None = None
    """NRI socket of containerd (2, or 1.7 with NRI) or CRI-O: with `--act on`, limits hold from a container's first
    instruction, else seconds later. Unset: `/var/run/nri/nri.sock` if it exists. Empty: none."""
    nri_patience_s: Annotated[float, Meta(ge=0.01, le=1.5)] = 0.5
    """Maximum delay of a container's creation by NRI. The runtime drops a plugin after 2 s."""
    writer: Literal["files", "cri"] = "files"
    """`cri`: the runtime writes containers' CPU and memory node lists, weight, quota and memory limit, and keeps them
    when a client updates the container. `files`: the agent writes."""
    cgroup_root: CgroupRoot = "/"
    """The kubelet's `cgroupRoot`. Its `cgroupDriver` is detected."""
    root_dir: str = "/var/lib/kubelet"
    """The kubelet's `--root-dir` with its managers' state. No cpusets are written if a manager is static, or neither
    these files nor `/configz` are readable."""
    interval_s: Annotated[float, Meta(ge=0.2, le=60)] = 1.0
    """Time between polls of the runtime. The kubelet is polled on changes, else every fifth time; without a runtime
    always."""
    timeout_s: Annotated[float, Meta(ge=0.1, le=60)] = 5.0
    """Deadline of a request to either."""
    stale_s: Seconds = 30.0
    """With an older pod list reclaimable resources do not grow: new pods may be missing. Outlasts a kubelet's restart."""

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

"""Defines how the agent reaches the kubelet, the container runtime and NRI (`--kubelet`)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from agent.config.units import Seconds

Url = Annotated[str, Meta(pattern=r"^https?://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?$")]
LOOPBACK_URLS = ("https://127.", "https://localhost:", "https://[::1]:")
MAX_POLLS_WITHOUT_KUBELET = 5
"""So many looks at the runtime may pass without asking the kubelet, while nothing else runs than before."""
CgroupRoot = Annotated[str, Meta(pattern=r"^/([A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*)?$")]


class KubeletConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Where the node's pods are learnt with `--kubelet`: their specifications from the kubelet, and what runs of them from the
    container runtime, which knows it first. Files may be replaced at any time, as mounted tokens are."""

    url: Url = "https://127.0.0.1:10250"
    """Of the kubelet. Its read-only port, `http://127.0.0.1:10255`, where it is on, wants no token and gets none."""
    token_file: str | None = None
    """Who we are: a file with a token, unless set that of the pod's service account; empty for nobody. The account needs
    `get` of `nodes/proxy`, or from Kubernetes 1.33 on of `nodes/pods` and, for reports, `nodes/configz`."""
    ca_file: str | None = None
    """Who signed the kubelet's certificate, unless set the authority in the service account; empty for whom the system
    trusts. Of a kubelet that signs its own it is `/var/lib/kubelet/pki/kubelet.crt`."""
    certificate_file: str = ""
    """A client certificate instead of the token, or beside it,"""
    key_file: str = ""
    """and its key."""
    server_name: str = ""
    """The name in the kubelet's certificate; unless set, that of `--node` where `url` is an address of loopback, which no
    certificate is for, and the one in `url` elsewhere."""
    verify: bool = True
    """False believes whoever answers at `url`, and gives him the token."""
    runtime_socket: str | None = None
    """Of containerd or CRI-O; unless set the first that is there of `/run/containerd/containerd.sock`, `/run/crio/crio.sock`
    and `/run/k3s/containerd/containerd.sock`. Empty for none: then only the kubelet says what runs, some seconds late."""
    events: bool = False
    """Also be told by the runtime of each container that starts, and ask at once. containerd waits for those whom it tells,
    so that an agent that is stopped may hold it up; version 1 tells each event to one of them only, so that a kubelet with
    `EventedPLEG` misses what the agent hears."""
    nri_socket: str | None = None
    """Where containerd (2, or 1.7 with NRI switched on) and CRI-O take plugins: with `--act on` the agent is asked there before
    a container is made, so that its limits hold from its first instruction on. Unless set `/var/run/nri/nri.sock` where that
    is; empty for none: then a container runs for some seconds as the kubelet made it."""
    nri_patience_s: Annotated[float, Meta(ge=0.01, le=1.5)] = 0.5
    """How long a container may be kept waiting for that at most. The runtime drops a plugin that takes 2 s."""
    writer: Literal["files", "cri"] = "files"
    """Who writes the knobs of containers: the agent itself, or the runtime where it has a word for them (lists of CPUs and NUMA
    nodes, weight, quota, memory limit), which then does not reset them when somebody else changes the container."""
    cgroup_root: CgroupRoot = "/"
    """The kubelet's `cgroupRoot`. Its `cgroupDriver` is seen by what exists."""
    root_dir: str = "/var/lib/kubelet"
    """The kubelet's `--root-dir`, in which its CPU and memory managers keep whom they gave what: where they are static, or
    neither these files nor the kubelet's `/configz` tell, no cpuset is written over theirs."""
    interval_s: Annotated[float, Meta(ge=0.2, le=60)] = 1.0
    """How often the runtime is asked, and with it the kubelet if something else runs than before; else every fifth time.
    Without a runtime the kubelet is asked each time."""
    timeout_s: Annotated[float, Meta(ge=0.1, le=60)] = 5.0
    """How long either may take to answer."""
    stale_s: Seconds = 30.0
    """With a list of pods older than that no more is lent, because nobody knows who is new; a kubelet that is restarted is back
    sooner. The pods that were known stay so."""

    def named(self, node: str) -> KubeletConfig:
        """With the name that the certificate of this node's kubelet has, where nothing else tells it."""
        if self.server_name or not self.url.startswith(LOOPBACK_URLS):
            return self
        return msgspec.structs.replace(self, server_name=node)

    def __post_init__(self) -> None:
        if bool(self.certificate_file) is not bool(self.key_file):
            lacking = "keyFile" if self.certificate_file else "certificateFile"
            raise ValueError(f"{lacking} is missing beside the other of the two; write both, or none")
        if self.stale_s <= MAX_POLLS_WITHOUT_KUBELET * self.interval_s:
            raise ValueError(
                f"staleS {self.stale_s:g} is not longer than {MAX_POLLS_WITHOUT_KUBELET} times intervalS {self.interval_s:g}: "
                "the list would often be too old; raise it"
            )

"""Settings of the sockets that neighbours are met at (docs/protocols.md). Names in brackets are Katalyst's."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Place = Annotated[str, Meta(pattern="^/")]


class SocketsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Whom the agent serves, and whose advice it takes, over Unix sockets of the node: nobody unless named here. gRPC, which
    this needs, is 12 MiB."""

    serve: tuple[Literal["advisor", "resource-plugins", "pod-resources"], ...] = ()
    """`advisor`: our sizes of pools and memory advice for a stock QRM plugin, which then carries them out; decisions of this
    agent run dry. `resource-plugins`: our QRM as the plugins of CPU and memory, for KubeWharf's kubelet or Katalyst's ORM.
    `pod-resources`: who has what by NUMA node, as Katalyst's reporter asks its ORM for it."""
    take: tuple[Literal["cpu", "memory"], ...] = ()
    """[cpu-resource-plugin-advisor, memory-resource-plugin-advisor] Of which the advice of a stock advisor is carried out
    instead of ours, as long as it can be trusted. `advisor.policy` must not be `none`."""
    advisor_dir: Place = "/var/lib/katalyst/qrm_advisor"
    """[cpu-advisor-sock-abs-path and so on] Where `cpu_advisor.sock`, `cpu_plugin.sock`, `memory_advisor.sock` and
    `memory_plugin.sock` are."""
    plugin_dir: Place = "/var/lib/katalyst/plugin-socks"
    """[qrm-socket-dirs] Where resource plugins are looked for: this one by Katalyst's agent,
    `/var/lib/kubelet/plugins_registry` by KubeWharf's kubelet. To a `kubelet.sock` beside them, as there is in
    `/var/lib/katalyst/resource-plugins`, they announce themselves."""
    pod_resources: Place = "/var/lib/katalyst/pod-resources/kubelet.sock"
    """[pod-resources-server-endpoints] The socket of `pod-resources`."""

    def __post_init__(self) -> None:
        if "advisor" in self.serve and self.take:
            raise ValueError(
                f"take has {' and '.join(self.take)}, and serve has advisor, which is at the same sockets; leave one out"
            )

"""Defines the root of the agent's settings (`AgentConfig`) and the sections for exporters, sockets and the Node.
Field names in camel case are the names in the settings file. Pure: policies import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from agent.config.advisor import AdvisorConfig, ForecastConfig, InferenceConfig, OvercommitConfig, PowerConfig
from agent.config.eviction import EvictionConfig
from agent.config.kubelet import KubeletConfig
from agent.config.memory import MemoryConfig
from agent.config.qos import QosConfig
from agent.config.qrm import CpuPlacementConfig, KnobsConfig
from agent.config.report import ReportConfig


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """In the place of the Node object."""

    annotations: Mapping[str, str] = {}
    """A power alert (power-alert, power-budget, power-alert-time, power-internal-op) for `power`, and bounds of
    overcommitment (katalyst.kubewharf.io/cpu_overcommit_ratio and memory_overcommit_ratio) for `overcommit`."""


AbsolutePath = Annotated[str, Meta(pattern="^/")]


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
    advisor_dir: AbsolutePath = "/var/lib/katalyst/qrm_advisor"
    """[cpu-advisor-sock-abs-path and so on] Where `cpu_advisor.sock`, `cpu_plugin.sock`, `memory_advisor.sock` and
    `memory_plugin.sock` are."""
    plugin_dir: AbsolutePath = "/var/lib/katalyst/plugin-socks"
    """[qrm-socket-dirs] Where resource plugins are looked for: this one by Katalyst's agent,
    `/var/lib/kubelet/plugins_registry` by KubeWharf's kubelet. To a `kubelet.sock` beside them, as there is in
    `/var/lib/katalyst/resource-plugins`, they announce themselves."""
    pod_resources: AbsolutePath = "/var/lib/katalyst/pod-resources/kubelet.sock"
    """[pod-resources-server-endpoints] The socket of `pod-resources`."""

    def __post_init__(self) -> None:
        if "advisor" in self.serve and self.take:
            raise ValueError(
                f"take has {' and '.join(self.take)}, and serve has advisor, which is at the same sockets; leave one out"
            )


class ExportersConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """What is shown to Prometheus and OpenTelemetry."""

    max_cgroups: Annotated[int, Meta(ge=1, le=100_000)] = 512
    """Cgroups that have series, about 200 each; those of pods first, then those nearest to the root."""
    token_review: bool = False
    """Serve those alone whose bearer token the API server knows, and whose roles allow to get the nonResourceURL `/metrics`, or
    of another path `/dioptase/PATH`. Needs `--node`. `/healthz` and `/readyz` tell others their status alone. Without TLS
    tokens can be read on the way."""


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Everything that a file may set; the command line sets the rest."""

    interval_s: Annotated[float, Meta(ge=0.2, le=60)] = 1.0
    """Time between two rounds."""
    watch_interval_s: Annotated[float, Meta(ge=0.02, le=60)] = 0.1
    """How often the waits of online pods are looked at between rounds, to take CPU back at once."""
    max_cgroups: Annotated[int, Meta(ge=16, le=100_000)] = 4096
    """More cgroups than this are not read, those of pods excepted; how many were left out is shown."""
    probes: tuple[str, ...] | None = None
    """Probes beside run-queue waits (`runqlat`), which are always measured, such as `[blockio, sockets]`; none for `[]`, and
    unless set all but `counters`, which needs hardware counters and costs some 200 ns a switch, and `wakeups`, which costs
    something at each wakeup: name all that are wanted to have those. `dioptase probe` lists them."""
    qos: QosConfig = QosConfig()
    advisor: AdvisorConfig = AdvisorConfig()
    memory: MemoryConfig = MemoryConfig()
    forecast: ForecastConfig = ForecastConfig()
    inference: InferenceConfig = InferenceConfig()
    report: ReportConfig = ReportConfig()
    overcommit: OvercommitConfig = OvercommitConfig()
    power: PowerConfig = PowerConfig()
    node: NodeConfig = NodeConfig()
    placing: CpuPlacementConfig = CpuPlacementConfig()
    knobs: KnobsConfig = KnobsConfig()
    eviction: EvictionConfig = EvictionConfig()
    shadow: AdvisorConfig | None = None
    """A second policy that judges every round and touches nothing: what it would lend and promise is shown beside the first."""
    kubelet: KubeletConfig = KubeletConfig()
    sockets: SocketsConfig = SocketsConfig()
    exporters: ExportersConfig = ExportersConfig()

"""Defines the root of the agent's settings (`AgentConfig`) and the sections for exporters, sockets and the Node.
Camel-cased field names are the names in the settings file. Pure: policies import it."""

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
from api.metric_profiles import MetricProfile


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Stands in for the Node object."""

    annotations: Mapping[str, str] = {}
    """Annotations of the Node for an agent without API server; one with `--node` reads those of the Node and ignores these.
    `power-alert`, `power-budget`, `power-alert-time` and `power-internal-op` for `power`;
    `katalyst.kubewharf.io/cpu_overcommit_ratio` and `memory_overcommit_ratio` for `overcommit`."""


AbsolutePath = Annotated[str, Meta(pattern="^/")]


class SocketsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Unix sockets shared with a stock Katalyst; none by default, because gRPC costs 12 MiB."""

    serve: tuple[Literal["advisor", "resource-plugins", "pod-resources"], ...] = ()
    """Services to expose. `advisor`: pool sizes and memory advice for a stock QRM plugin (the agent runs dry).
    `resource-plugins`: CPU and memory plugins for KubeWharf's kubelet or Katalyst's ORM. `pod-resources`: allocations
    for Katalyst's reporter."""
    take: tuple[Literal["cpu", "memory"], ...] = ()
    """[cpu-resource-plugin-advisor, memory-resource-plugin-advisor] Apply a stock advisor's advice while it is valid.
    Not with `advisor.policy: none`."""
    advisor_dir: AbsolutePath = "/var/lib/katalyst/qrm_advisor"
    """[cpu-advisor-sock-abs-path etc.] Directory of `cpu_advisor.sock`, `cpu_plugin.sock`, `memory_advisor.sock` and
    `memory_plugin.sock`."""
    plugin_dir: AbsolutePath = "/var/lib/katalyst/plugin-socks"
    """[qrm-socket-dirs] Directory of resource plugins, which register at its `kubelet.sock`; KubeWharf's kubelet uses
    `/var/lib/kubelet/plugins_registry`."""
    pod_resources: AbsolutePath = "/var/lib/katalyst/pod-resources/kubelet.sock"
    """[pod-resources-server-endpoints] Socket of `pod-resources`."""
    trusted_uids: tuple[Annotated[int, Meta(ge=0, le=(1 << 32) - 2)], ...] = ()
    """Users whose plugins and advisors the agent uses, eviction and reporter plugins included, besides root and its own user.
    It refuses a socket of any other user, or in a directory that any other user can write to."""

    def __post_init__(self) -> None:
        if "advisor" in self.serve and self.take:
            raise ValueError(
                f"take has {' and '.join(self.take)}, and serve has advisor, which uses the same sockets; remove one of them"
            )


class ExportersConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Metrics for Prometheus and OpenTelemetry."""

    metric_profile: MetricProfile = MetricProfile.STANDARD
    """Metrics to export, see docs/metrics.md: `small` has at most 25 series for an ordinary container, `standard` 60, `full`
    all of them, and those of each pod's cgroup too. Dashboards and alerts need `standard`."""
    max_cgroups: Annotated[int, Meta(ge=1, le=100_000)] = 512
    """Cgroups with series; those of pods first, then those nearest to the root."""
    token_review: bool = False
    """Serve only bearer tokens that the API server accepts, see docs/operations.md. Needs `--node`; use TLS."""


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Settings of the file; the command line sets the rest."""

    interval_s: Annotated[float, Meta(ge=0.2, le=60)] = 1.0
    """Time between two cycles."""
    watch_interval_s: Annotated[float, Meta(ge=0.02, le=60)] = 0.1
    """Time between reads of online pods' run-queue latency within a cycle; a breach starts a cycle at once."""
    max_cgroups: Annotated[int, Meta(ge=16, le=100_000)] = 4096
    """Maximum number of cgroups to read; those of pods are always read."""
    probes: tuple[str, ...] | None = None
    """Probes besides `runqlat`; `[]`: none. Unset: all but `counters` and `wakeups`, which cost most. `dioptase probe`
    lists them."""
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
    """Second policy, evaluated every cycle without writes; its decisions are shown next to the first's."""
    kubelet: KubeletConfig = KubeletConfig()
    sockets: SocketsConfig = SocketsConfig()
    exporters: ExportersConfig = ExportersConfig()

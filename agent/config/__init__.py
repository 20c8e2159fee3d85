"""Settings of the node agent: frozen, typed, each explained. Read from a file by agent/settings.py."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from agent.config.eviction import EvictionConfig
from agent.config.forecast import ForecastConfig
from agent.config.headroom import HeadroomConfig, ReportConfig
from agent.config.inference import InferenceConfig
from agent.config.kubelet import KubeletConfig
from agent.config.memory import MemoryConfig
from agent.config.node import NodeConfig
from agent.config.overcommit import OvercommitConfig
from agent.config.power import PowerConfig
from agent.config.provision import ProvisionConfig
from agent.config.qos import QosConfig
from agent.config.qrm import CpuPlacementConfig
from agent.config.qrm_knobs import KnobsConfig
from agent.config.sockets import SocketsConfig
from agent.config.units import SMALL_NODE_SHARE, Cores, Ratio, Seconds, reclaim_reserve


class LatencyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Policy `latency`: the measured run-queue wait of online pods decides how much CPU is lent."""

    target_wait_ms: Annotated[float, Meta(ge=0.002, le=1000)] = 10.0
    """Run-queue wait that online pods may see at `quantile`. Lower protects harder and lends less."""
    quantile: Annotated[float, Meta(ge=0.5, le=0.999)] = 0.99
    """Which wait is held against the target. 0.99: one switch in a hundred may wait longer."""
    min_waits_above: Annotated[int, Meta(ge=1, le=1000)] = 2
    """So many waits above the target make a breach at least, so that one odd switch of a quiet pod does not."""
    calm_s: Seconds = 3.0
    """Waits must have stayed below half the target for so long before more is lent."""
    grow_ratio_per_s: Ratio = 0.1
    """How fast lending grows once calm, as a share of the node per second (Koordinator's suppress uses 0.1)."""
    min_lent_ratio: Annotated[float, Meta(gt=0, lt=1)] = 0.05
    """What batch work keeps even in a breach, as a share of the node, so that it makes progress and can be measured."""
    gross_breach_factor: Annotated[float, Meta(ge=1, le=1000)] = 4.0
    """A wait so many times the target takes everything back down to the minimum at once instead of halving."""
    least_blame_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Part of the waits for which batch work must have had the CPU before anything is taken from it; 0 takes from it whoever
    it was. Counts where the kernel tells (probe `blame`)."""
    stale_s: Seconds = 5.0
    """Without wait measurements for so long, no more is lent than the estimated need of online pods leaves."""


class AdvisorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """What is lent to reclaimed pods, and how that is judged. Names in brackets are Katalyst's."""

    policy: Literal["latency", "canonical", "none"] = "latency"
    """`latency`: priority and measured wait. `canonical`: Katalyst's estimate and disjoint cpusets. `none`: nothing."""
    enable_reclaim: bool = True
    """[enableReclaim] False takes everything back but the minimum."""
    reserved_for_allocate_cores: Cores | None = None
    """[reservedResourceForAllocate] kept for bursts of online pods; 4 unless set, a quarter of nodes below 16 CPUs."""
    min_reclaimed_cores: Annotated[int, Meta(ge=1, le=8192)] | None = None
    """[minReclaimedResourceForAllocate] CPUs that reclaimed pods always keep; 4 unless set, a quarter of nodes below 16 CPUs,
    and one a NUMA node at least."""
    min_share_cores: Annotated[int, Meta(ge=1, le=8192)] = 4
    """[MinShareCPURequirement] the share pool is never smaller, as far as the node allows."""
    usage_margin: Annotated[float, Meta(ge=1, le=10)] = 1.25
    """Estimated need = this x measured use, unless load is higher."""
    fallback_cores: Cores = 4.0
    """Assumed need of an online container that is neither measured nor has a request."""
    ramp_up_s: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    """A container that came after the agent is taken at its request for so long."""
    max_ramp_up_cores: Annotated[int, Meta(ge=1)] = 10
    """[MaxRampUpStep] the share pool grows by at most so much in one round."""
    max_ramp_down_cores: Annotated[int, Meta(ge=1)] = 2
    """[MaxRampDownStep] and shrinks by at most so much,"""
    min_ramp_down_period_s: Annotated[float, Meta(ge=0)] = 30.0
    """[MinRampDownPeriod] at most this often."""
    latency: LatencyConfig = LatencyConfig()
    provision: ProvisionConfig = ProvisionConfig()
    headroom: HeadroomConfig = HeadroomConfig()

    def reserve_cores(self, cpus: int) -> float:
        """CPU kept for bursts of online pods on a node of so many CPUs."""
        if self.reserved_for_allocate_cores is not None:
            return min(self.reserved_for_allocate_cores, cpus)
        return min(4.0, cpus / SMALL_NODE_SHARE)

    def reclaim_reserve_cores(self, cpus: int, numa_nodes: int) -> int:
        """CPUs that reclaimed pods always keep: at least one a NUMA node, at most all."""
        return reclaim_reserve(self.min_reclaimed_cores, cpus, numa_nodes)


class ExportersConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """What is shown to Prometheus and OpenTelemetry."""

    max_cgroups: Annotated[int, Meta(ge=1, le=100_000)] = 512
    """Cgroups that have series, about 200 each; those of pods first, then those nearest to the root."""
    token_review: bool = False
    """Serve those alone whose bearer token the API server knows, and whose roles allow to get the nonResourceURL `/metrics`, or
    of another path `/dioptase/PATH`. Needs `--node`. `/healthz` and `/readyz` tell others their status alone. Without TLS
    tokens can be read on the way."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
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

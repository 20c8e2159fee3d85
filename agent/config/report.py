"""Defines the settings of the reporter: how computed headroom becomes the reported allocatable resources.
Names in brackets are Katalyst's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from agent.config.units import GIB, MIB, Cores, Seconds

_SMALL_NODE_SHARE = 4

Mebibytes = Annotated[int, Meta(ge=0, le=1 << 40)]
SocketDirectory = Annotated[str, Meta(pattern=r"^(/[^\0]*)?$", max_length=80)]
"""Short: the path of a socket has at most 107 bytes."""


class ReportConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """How what was found becomes what is advertised."""

    period_s: Seconds = 30.0
    """[headroom reporter's sync period] a sample is taken, and what is advertised may change, this often."""
    window_s: Seconds = 120.0
    """Samples of so long are averaged; they count for twice as long where some are missing."""
    reserved_cores: Cores = 0.0
    """[reservedResourceForReport.cpu] kept back of what was found."""
    reserved_memory_mib: Mebibytes = 0
    """[reservedResourceForReport.memory] the same of memory."""
    min_cores: Cores | None = None
    """[minReclaimedResourceForReport.cpu] advertised at least; 4 unless set, a quarter of nodes below 16 CPUs."""
    min_memory_mib: Mebibytes | None = None
    """[minReclaimedResourceForReport.memory] 5 GiB unless set, a quarter of nodes below 20 GiB."""
    ignored_cores: Cores = 0.1
    """[minIgnoredReclaimedResourceForReport.cpu] a NUMA node with no more than this is advertised with nothing at all."""
    ignored_memory_mib: Mebibytes = 100
    """[minIgnoredReclaimedResourceForReport.memory] the same of memory."""
    min_step_cores: Cores = 0.3
    """Smaller changes are not advertised,"""
    max_step_cores: Annotated[float, Meta(gt=0, le=8192)] = 4.0
    """and larger ones in steps of this, one a period."""
    min_step_memory_mib: Mebibytes = 300
    """The same of memory,"""
    max_step_memory_mib: Annotated[int, Meta(gt=0, le=1 << 40)] = 5120
    """and of its steps."""
    fresh_s: Annotated[float, Meta(ge=0, le=86400)] = 180.0
    """While nothing new is known, what was advertised stands for so long,"""
    expired_s: Annotated[float, Meta(gt=0, le=86400)] = 900.0
    """and then goes down to the minimum, step by step, until so long after the last that was known."""
    extended_resources: bool = False
    """With `--node`: what is advertised is written into the Node's capacity too, so that a stock scheduler places reclaimed
    pods."""
    node_metrics: bool = False
    """[node-metrics-reporter] With `--node`: CustomNodeResource says what the node and its pods use, too, once a minute."""
    cpu_flags: bool = False
    """[enable-report-cpu-flags] With `--node`: it lists every flag of the CPU, which are some kilobytes."""
    reporter_plugins: SocketDirectory = ""
    """[plugin-registration-dirs] With `--node`: where reporter plugins are looked for, as `/var/lib/katalyst/plugin-socks`;
    what they say is merged into the CustomNodeResource. gRPC, which this needs, is 12 MiB; so for the next two."""
    offered_in: SocketDirectory = ""
    """With `--node`, beside a Katalyst agent: where that one looks for plugins. It is given what this agent lends, and writes
    the CustomNodeResource itself."""
    pod_resources: SocketDirectory | None = None
    """[pod-resources-server-endpoints] The socket where devices, huge pages and CPUs of single containers are learnt for the
    CustomNodeResource; unless set, with `--kubelet`, the kubelet's if it is there. Empty for none."""
    device_zones: Mapping[str, str] = {}
    """[resource-name-to-zone-type-map] Resources whose devices are each a topology zone, with the type of that, such as
    `nvidia.com/gpu: GPU`; others are counted with their NUMA node."""

    def __post_init__(self) -> None:
        """Raise ValueError for what no single field's bounds can say."""
        if self.window_s < self.period_s:
            raise ValueError(
                f"windowS {self.window_s:g} is shorter than periodS {self.period_s:g}: no sample would be left; raise it"
            )
        if self.reporter_plugins and self.offered_in:
            raise ValueError(
                "reporterPlugins and offeredIn: who writes the object merges the plugins; leave one of them out"
            )
        if self.expired_s <= self.fresh_s:
            raise ValueError(f"expiredS {self.expired_s:g} must be longer than freshS {self.fresh_s:g}")
        for unit, smallest, largest in (
            ("Cores", self.min_step_cores, self.max_step_cores),
            ("MemoryMib", self.min_step_memory_mib, self.max_step_memory_mib),
        ):
            if largest < smallest:
                raise ValueError(
                    f"maxStep{unit} {largest:g} is below minStep{unit} {smallest:g}: no change would ever be advertised; "
                    "raise it"
                )

    def minimum_cores(self, cpus: float) -> float:
        """What is advertised at least on a node of so many CPUs."""
        if self.min_cores is not None:
            return min(self.min_cores, cpus)
        return min(4.0, cpus / _SMALL_NODE_SHARE)

    def minimum_memory_bytes(self, total: float) -> float:
        """The same of memory on a node that has so much."""
        if self.min_memory_mib is not None:
            return min(float(self.min_memory_mib * MIB), total)
        return min(5.0 * GIB, total / _SMALL_NODE_SHARE)

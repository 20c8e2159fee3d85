"""Defines the settings of the reporter: how computed headroom becomes the reported allocatable resources. Names in
brackets are Katalyst's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from agent.config.units import SMALL_NODE_SHARE, Cores, Seconds
from api.units import GIB, MIB

Mebibytes = Annotated[int, Meta(ge=0, le=1 << 40)]
SocketDirectory = Annotated[str, Meta(pattern=r"^(/[^\0]*)?$", max_length=80)]
"""Short, because the path of a Unix socket has at most 107 bytes (sys/un.h)."""


class ReportConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """How computed headroom becomes reported resources."""

    period_s: Seconds = 30.0
    """[headroom reporter's sync period] Time between samples, and between changes of the report."""
    window_s: Seconds = 120.0
    """Samples of this time are averaged, up to twice as old ones if some are missing."""
    reserved_cores: Cores = 0.0
    """[reservedResourceForReport.cpu] Subtracted from CPU headroom."""
    reserved_memory_mib: Mebibytes = 0
    """[reservedResourceForReport.memory] Subtracted from memory headroom."""
    min_cores: Cores | None = None
    """[minReclaimedResourceForReport.cpu] Minimum CPU. Unset: 4, a quarter below 16 CPUs."""
    min_memory_mib: Mebibytes | None = None
    """[minReclaimedResourceForReport.memory] Minimum memory. Unset: 5 GiB, a quarter below 20 GiB."""
    ignored_cores: Cores = 0.1
    """[minIgnoredReclaimedResourceForReport.cpu] A NUMA node with at most this reports no CPU."""
    ignored_memory_mib: Mebibytes = 100
    """[minIgnoredReclaimedResourceForReport.memory] A NUMA node with at most this reports no memory."""
    min_step_cores: Cores = 0.3
    """Smaller changes of CPU are not reported."""
    max_step_cores: Annotated[float, Meta(gt=0, le=8192)] = 4.0
    """Maximum change of CPU per period."""
    min_step_memory_mib: Mebibytes = 300
    """Smaller changes of memory are not reported."""
    max_step_memory_mib: Annotated[int, Meta(gt=0, le=1 << 40)] = 5120
    """Maximum change of memory per period."""
    fresh_s: Annotated[float, Meta(ge=0, le=86400)] = 180.0
    """Without new headroom, the last report stays this long."""
    expired_s: Annotated[float, Meta(gt=0, le=86400)] = 900.0
    """Without new headroom, reports fall in steps to the minimum until then."""
    extended_resources: bool = False
    """With `--node`: also add to the Node's capacity, for a stock scheduler."""
    node_metrics: bool = False
    """[node-metrics-reporter] With `--node`: report use of node and pods once a minute."""
    cpu_flags: bool = False
    """[enable-report-cpu-flags] With `--node`: report every CPU flag, some kilobytes."""
    reporter_plugins: SocketDirectory = ""
    """[plugin-registration-dirs] With `--node`: directory of reporter plugins, such as
    `/var/lib/katalyst/plugin-socks`. Loads gRPC (12 MiB), as do the next two."""
    offered_in: SocketDirectory = ""
    """With `--node`: plugin directory of a Katalyst agent, which writes the CustomNodeResource from this agent's
    report."""
    pod_resources: SocketDirectory | None = None
    """[pod-resources-server-endpoints] Socket for devices, huge pages and CPUs of containers. Unset: with `--kubelet`
    the kubelet's, if it exists. Empty: none."""
    device_zones: Mapping[str, str] = {}
    """[resource-name-to-zone-type-map] Resources whose devices are topology zones, with the zone type: `nvidia.com/gpu:
    GPU`; others count per NUMA node."""

    def __post_init__(self) -> None:
        if self.window_s < self.period_s:
            raise ValueError(
                f"windowS {self.window_s:g} is shorter than periodS {self.period_s:g}: no sample would be left; raise it"
            )
        if self.reporter_plugins and self.offered_in:
            raise ValueError(
                "reporterPlugins and offeredIn are both set: the agent that writes the object merges the plugins; remove one"
            )
        if self.expired_s <= self.fresh_s:
            raise ValueError(f"expiredS {self.expired_s:g} must be longer than freshS {self.fresh_s:g}")
        for unit, smallest, largest in (
            ("Cores", self.min_step_cores, self.max_step_cores),
            ("MemoryMib", self.min_step_memory_mib, self.max_step_memory_mib),
        ):
            if largest < smallest:
                raise ValueError(
                    f"maxStep{unit} {largest:g} is below minStep{unit} {smallest:g}: no change would ever be reported; "
                    "raise it"
                )

    def minimum_cores(self, cpus: float) -> float:
        """Return the smallest CPU report of a node with this many CPUs."""
        if self.min_cores is not None:
            return min(self.min_cores, cpus)
        return min(4.0, cpus / SMALL_NODE_SHARE)

    def minimum_memory_bytes(self, total: float) -> float:
        """Return the smallest memory report of a node with this many bytes."""
        if self.min_memory_mib is not None:
            return min(float(self.min_memory_mib * MIB), total)
        return min(5.0 * GIB, total / SMALL_NODE_SHARE)

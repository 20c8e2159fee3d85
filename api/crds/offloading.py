"""TransparentMemoryOffloadingConfiguration: taking memory back that nobody misses, as PSI or refaults tell."""

from __future__ import annotations

from typing import Annotated

from msgspec import field

from api.crds.generic import ConfigResource, GenericConfigSpec
from api.crds.meta import Duration, Int64, Part, Quantity, keyed_by


class PSIPolicy(Part, frozen=True, kw_only=True):
    """Taking back until tasks wait for memory."""

    max_probe: float | None = None
    """Of the memory in use, what is taken back in one step."""
    psi_avg60_threshold: float | None = None


class RefaultPolicy(Part, frozen=True, kw_only=True):
    """Taking back until what was taken is read again."""

    max_probe: float | None = None
    """Of the memory in use, what is taken back in one step."""
    reclaim_accuracy_target: float | None = None
    reclaim_scan_efficiency_target: float | None = None


class OffloadingDetail(Part, frozen=True, kw_only=True):
    """How memory is taken back."""

    enable_tmo: bool | None = field(default=None, name="enableTMO")
    enable_swap: bool | None = None
    """Also what has no file."""
    interval: Duration | None = None
    """Between two steps, at least."""
    policy_name: str | None = None
    """PSI, Refault or Integrated."""
    psi_policy: PSIPolicy | None = None
    refault_policy: RefaultPolicy | None = None
    max_reclaim_size: Quantity | None = None
    """In one step, at most."""
    reserved_inactive_file: Int64 | None = None
    """Bytes of inactive page cache that stay."""


class QoSLevelOffloading(Part, frozen=True, kw_only=True):
    """How it is done for the pods of one level."""

    qos_level: str
    config_detail: OffloadingDetail


class PoolOffloading(Part, frozen=True, kw_only=True):
    """How it is done for the pods of one pool."""

    pool_name: str
    config_detail: OffloadingDetail


class CgroupOffloading(Part, frozen=True, kw_only=True):
    """How it is done for one cgroup, which need not be a pod's."""

    cgroup_path: str
    """Absolute, with the mount point."""
    config_detail: OffloadingDetail


class Requirement(Part, frozen=True, kw_only=True):
    """What a label or annotation has to be."""

    key: str
    operator: str
    """In, NotIn, Exists or DoesNotExist."""
    values: tuple[str, ...] | None = None


class BlockConfig(Part, frozen=True, kw_only=True):
    """Pods whose memory is left alone."""

    labels: tuple[Requirement, ...] | None = None
    annotations: tuple[Requirement, ...] | None = None


class OffloadingConfig(Part, frozen=True, kw_only=True):
    """Whose memory is taken back, and how."""

    qos_level_config: Annotated[tuple[QoSLevelOffloading, ...], keyed_by("qosLevel")] | None = None
    pool_name_config: Annotated[tuple[PoolOffloading, ...], keyed_by("poolName")] | None = None
    cgroup_config: Annotated[tuple[CgroupOffloading, ...], keyed_by("cgroupPath")] | None = field(
        default=None, name="CgroupConfig"
    )
    block_config: BlockConfig | None = None


class OffloadingSpec(GenericConfigSpec, frozen=True, kw_only=True):
    """Which nodes take memory back that nobody misses, and how."""

    config: OffloadingConfig


class TransparentMemoryOffloadingConfiguration(ConfigResource, frozen=True, kw_only=True):
    """How nodes take memory back that nobody misses."""

    spec: OffloadingSpec | None = None

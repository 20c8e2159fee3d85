"""Settings of the overcommit ratios that a node reports of itself. Names in brackets are Katalyst's."""

from __future__ import annotations

import msgspec

from agent.config.units import Ratio, Seconds


class OvercommitConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """How much more than it has a node may be scheduled for, given what its pods really use."""

    enable: bool = False
    """[overcommit_aware among the sysadvisor plugins] Whether it is done at all."""
    period_s: Seconds = 10.0
    """[SyncPeriod] the ratios are judged anew this often."""
    target_cpu: Ratio = 0.6
    """[TargetCPULoad] share of the node's CPU that pods may use in the end."""
    target_memory: Ratio = 0.8
    """[TargetMemoryLoad] the same of memory."""
    estimated_cpu: Ratio = 0.4
    """[EstimatedPodCPULoad] new pods are taken to use this share of their requests at least."""
    estimated_memory: Ratio = 0.8
    """[EstimatedPodMemoryLoad] the same of memory."""

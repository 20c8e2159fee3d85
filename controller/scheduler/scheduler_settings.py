"""Settings of the scheduler extender. Names in brackets are Katalyst's or Koordinator's arguments."""

from __future__ import annotations

import msgspec

from controller.scheduler.harm_score import HarmSettings
from controller.scheduler.load_aware import LoadSettings
from controller.scheduler.resource_fit import FitSettings
from controller.scheduler.topology_plugin import TopologySettings


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Content of the settings file."""

    token_review: bool = False
    """Serve metrics and explanations only to clients whose bearer token the API server allows to get their path."""
    elastic_quota: bool = False
    """Apply ElasticQuotas (scheduling.sigs.k8s.io) to reclaimed resources; install their CustomResourceDefinition first."""
    node_overcommitment: bool = True
    """Keep pods off nodes whose overcommitted CPU or memory the kubelet has pinned [plugin NodeOvercommitment]."""
    topology: TopologySettings = TopologySettings()
    fit: FitSettings = FitSettings()
    load: LoadSettings = LoadSettings()
    harm: HarmSettings = HarmSettings()

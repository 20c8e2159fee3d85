"""Settings of the scheduler extender, and their parser. Names in brackets are Katalyst's or Koordinator's arguments."""

from __future__ import annotations

from collections.abc import Callable

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


SchedulerErrorDescriber = Callable[[msgspec.ValidationError, object, type[SchedulerConfig]], str]


def parse_scheduler_settings(
    text: str, check: Callable[[str], None], describe_error: SchedulerErrorDescriber
) -> SchedulerConfig:
    """Parse the settings file. Raises ValueError with the field and the remedy.

    `check` raises ValueError unless the text is one plain YAML document; `describe_error` words validation errors.
    """
    check(text)
    document = msgspec.yaml.decode(text)
    try:
        return msgspec.convert({} if document is None else document, SchedulerConfig)
    except msgspec.ValidationError as error:
        raise ValueError(describe_error(error, document, SchedulerConfig)) from None

"""Maps TransparentMemoryOffloadingConfiguration to settings: one layer per QoS level, pool or cgroup. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent.dynamic_config.mappings.field_mapping import (
    FieldMapping,
    SettingValues,
    get_field,
    identity,
    to_byte_count,
    to_cgroup_path,
    to_seconds,
)
from api.text import quote

_POLICIES = {"psi": "psi", "refault": "refault", "integrated": "integrated"}


def _policy(value: str) -> str:
    policy = _POLICIES.get(value.lower())
    if policy is None:
        raise ValueError(f"policyName {quote(value, 60)} is none of PSI, Refault and Integrated")
    return policy


LAYER_FIELDS: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("enableTMO", "enable", identity),
    ("enableSwap", "enableSwap", identity),
    ("interval", "intervalS", to_seconds),
    ("policyName", "policy", _policy),
    ("maxReclaimSize", "maxReclaimBytes", to_byte_count),
    ("reservedInactiveFile", "reservedInactiveFileBytes", to_byte_count),
    ("psiPolicy.maxProbe", "psiMaxProbe", identity),
    ("psiPolicy.psiAvg60Threshold", "psiAvg60Threshold", identity),
    ("refaultPolicy.maxProbe", "refaultMaxProbe", identity),
    ("refaultPolicy.reclaimAccuracyTarget", "reclaimAccuracyTarget", identity),
    ("refaultPolicy.reclaimScanEfficiencyTarget", "reclaimScanEfficiencyTarget", identity),
)
"""Field of a configDetail, setting of a layer, and conversion."""


def _map_layers(
    section: str, key: str, name: Callable[[str], str] = identity
) -> Callable[[Sequence[Mapping[str, Any]]], SettingValues]:
    def put(entries: Sequence[Mapping[str, Any]]) -> SettingValues:
        for entry in entries:
            for field, setting, unit in LAYER_FIELDS:
                value = get_field(entry["configDetail"], field)
                if value is not None:
                    yield ("memory", "offloading", section, name(entry[key]), setting), unit(value)

    return put


def _map_block_selector(section: str) -> Callable[[Sequence[Mapping[str, Any]]], SettingValues]:
    def put(requirements: Sequence[Mapping[str, Any]]) -> SettingValues:
        for each in requirements:
            operator, values = each["operator"], each.get("values") or []
            if operator not in ("In", "Exists") or (operator == "In" and not values):
                raise ValueError(
                    f"{quote(each['key'])} with operator {quote(operator, 40)} and {len(values)} values is not "
                    "supported; use In with values, or Exists"
                )
            yield ("memory", "offloading", "block", section, each["key"]), values if operator == "In" else []

    return put


def _offloading_mapping(field: str, section: str, put: Callable[[Any], SettingValues]) -> FieldMapping:
    return FieldMapping(field, (f"memory.offloading.{section}",), put)


OFFLOADING_MAPPINGS: tuple[FieldMapping, ...] = (
    _offloading_mapping("qosLevelConfig", "levels", _map_layers("levels", "qosLevel")),
    _offloading_mapping("poolNameConfig", "pools", _map_layers("pools", "poolName")),
    _offloading_mapping("CgroupConfig", "cgroups", _map_layers("cgroups", "cgroupPath", to_cgroup_path)),
    _offloading_mapping("blockConfig.labels", "block.labels", _map_block_selector("labels")),
    _offloading_mapping("blockConfig.annotations", "block.annotations", _map_block_selector("annotations")),
)

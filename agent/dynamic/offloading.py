"""TransparentMemoryOffloadingConfiguration as settings: a whole layer for each level, pool or cgroup that it names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent.dynamic.rules import Put, Rule, dig
from agent.dynamic.values import cgroup, same, seconds, size

_POLICIES = {"psi": "psi", "refault": "refault", "integrated": "integrated"}


def _policy(value: str) -> str:
    found = _POLICIES.get(value.lower())
    if found is None:
        raise ValueError(f"policyName {value!r:.60} is none of PSI, Refault and Integrated")
    return found


DETAIL: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("enableTMO", "enable", same),
    ("enableSwap", "enableSwap", same),
    ("interval", "intervalS", seconds),
    ("policyName", "policy", _policy),
    ("maxReclaimSize", "maxReclaimBytes", size),
    ("reservedInactiveFile", "reservedInactiveFileBytes", size),
    ("psiPolicy.maxProbe", "psiMaxProbe", same),
    ("psiPolicy.psiAvg60Threshold", "psiAvg60Threshold", same),
    ("refaultPolicy.maxProbe", "refaultMaxProbe", same),
    ("refaultPolicy.reclaimAccuracyTarget", "reclaimAccuracyTarget", same),
    ("refaultPolicy.reclaimScanEfficiencyTarget", "reclaimScanEfficiencyTarget", same),
)
"""Field of a configDetail, setting of a layer, and unit."""


def _layers(section: str, key: str, name: Callable[[str], str] = same) -> Callable[[Sequence[Mapping[str, Any]]], Put]:
    def put(entries: Sequence[Mapping[str, Any]]) -> Put:
        for entry in entries:
            for field, setting, unit in DETAIL:
                value = dig(entry["configDetail"], field)
                if value is not None:
                    yield ("memory", "offloading", section, name(entry[key]), setting), unit(value)

    return put


def _blocked(section: str) -> Callable[[Sequence[Mapping[str, Any]]], Put]:
    def put(requirements: Sequence[Mapping[str, Any]]) -> Put:
        for each in requirements:
            operator, values = each["operator"], each.get("values") or []
            if operator not in ("In", "Exists") or (operator == "In" and not values):
                raise ValueError(
                    f"{each['key']!r:.80} with operator {operator!r:.40} and {len(values)} values: pods are left alone "
                    "for what they have; write In with values, or Exists"
                )
            yield ("memory", "offloading", "block", section, each["key"]), values if operator == "In" else []

    return put


def _rule(field: str, section: str, put: Callable[[Any], Put]) -> Rule:
    return Rule(field, (f"memory.offloading.{section}",), put)


RULES: tuple[Rule, ...] = (
    _rule("qosLevelConfig", "levels", _layers("levels", "qosLevel")),
    _rule("poolNameConfig", "pools", _layers("pools", "poolName")),
    _rule("CgroupConfig", "cgroups", _layers("cgroups", "cgroupPath", cgroup)),
    _rule("blockConfig.labels", "block.labels", _blocked("labels")),
    _rule("blockConfig.annotations", "block.annotations", _blocked("annotations")),
)

"""Translates Koordinator's QoS classes, priorities, resources and annotations into Katalyst's. Pure.
Katalyst's own annotations take precedence where a pod has both. Keys without a counterpart are reported as problems
of the pod; keys that concern only the scheduler are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import msgspec

from agent.sensors.pods.resource_quantities import CPU, MEMORY, MILLI, ResourceRequirements, is_whole
from api.cpu import MAX_CPU
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from api.qos import QoSLevel
from api.quantity import convert_quantity

DOMAIN = "koordinator.sh"
QOS_CLASS_LABEL, PRIORITY_CLASS_LABEL = "koordinator.sh/qosClass", "koordinator.sh/priority-class"
RESOURCE_SPEC, RESOURCE_STATUS = "scheduling.koordinator.sh/resource-spec", "scheduling.koordinator.sh/resource-status"
NUMA_SPEC = "scheduling.koordinator.sh/numa-topology-spec"
EXTENDED_SPEC = "node.koordinator.sh/extended-resource-spec"
CPU_BURST, MEMORY_QOS = "koordinator.sh/cpuBurst", "koordinator.sh/memoryQOS"
LEVELS_BY_QOS_CLASS = {
    "LSE": QoSLevel.DEDICATED,
    "LSR": QoSLevel.DEDICATED,
    "LS": QoSLevel.SHARED,
    "BE": QoSLevel.RECLAIMED,
    "SYSTEM": QoSLevel.SYSTEM,
}
PRIORITY_BANDS = {
    "koord-prod": (9000, 9500, 9999),
    "koord-mid": (7000, 7500, 7999),
    "koord-batch": (5000, 5500, 5999),
    "koord-free": (3000, 3500, 3999),
}
"""Priority classes: lowest, default and highest priority."""
REJECTED_BANDS = {"BE": ("koord-prod",), "LSR": ("koord-mid", "koord-batch", "koord-free")}
"""Pairs of QoS and priority class that its webhook refuses."""
BATCH_RESOURCES = {
    "kubernetes.io/batch-cpu": CPU,
    "kubernetes.io/batch-memory": MEMORY,
    "koordinator.sh/batch-cpu": CPU,
    "koordinator.sh/batch-memory": MEMORY,
}
MID_RESOURCES = {"kubernetes.io/mid-cpu": CPU, "kubernetes.io/mid-memory": MEMORY}
KOORDINATOR_RESOURCES = {**BATCH_RESOURCES, **MID_RESOURCES}
"""Resources that mean something here, and what of: CPU in thousandths, memory in bytes."""
FULL_PCPUS = {"full_pcpus_pairing": "true"}
BIND_POLICIES: Mapping[str, Mapping[str, str]] = {"Default": {}, "FullPCPUs": FULL_PCPUS}
EXCLUSIVE_POLICIES: Mapping[str, Mapping[str, str]] = {"None": {}, "PCPULevel": FULL_PCPUS}
NUMA_POLICIES: Mapping[str, Mapping[str, str]] = {
    "": {},
    "Restricted": {"numa_binding": "true"},
    "SingleNUMANode": {"numa_binding": "true", "numa_number": "1"},
}
BURST_POLICIES = {"none": "closed", "cpuBurstOnly": "static", "cfsQuotaBurstOnly": "dynamic", "auto": "dynamic"}
DEFAULT_BURST_PERCENT, MAX_BURST_PERCENT = 1000, 100
"""Koordinator's default, and the kernel's bound: no burst is more than the quota."""
UNSUPPORTED_KEYS = {
    "koordinator.sh/networkQOS": "bandwidth is shared by QoS level",
    "koordinator.sh/blkioQOS": "disks are shared by QoS level",
    "koordinator.sh/cpuQOS": "CPU is shared by QoS level",
    "koordinator.sh/oom-score-adj": "say oom_priority in katalyst.kubewharf.io/memory_enhancement",
    "koordinator.sh/oom-score-adj-spec": "say oom_priority in katalyst.kubewharf.io/memory_enhancement",
    "koordinator.sh/eviction-enabled": "what may be evicted is a matter of QoS level and priority",
    "koordinator.sh/eviction-policy": "what may be evicted is a matter of QoS level and priority",
    "koordinator.sh/eviction-priority": "set the pod's priority",
    "koordinator.sh/priority": "set the pod's priority",
    "node.koordinator.sh/resctrl": "cache and memory bandwidth are shared by QoS level",
    "node.koordinator.sh/network-bandwidth": "bandwidth is shared by QoS level",
}
"""Words for the node that have no counterpart, and what there is instead."""


class KoordinatorTranslation(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod says in Koordinator's words, in ours."""

    level: QoSLevel | None = None
    """None where it says nothing of it."""
    priority: int | None = None
    words: Mapping[str, str] = {}
    """Enhancements by Katalyst's names."""
    bound_numa: tuple[int, ...] = ()
    extended: Mapping[str, ResourceRequirements] = {}
    """Requests of containers by name, where an annotation repeats those that a kubelet does not know."""
    problems: tuple[str, ...] = ()


class KoordinatorPodInput(msgspec.Struct, frozen=True, kw_only=True):
    """A pod as it was written down."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    priority: int | None
    priority_class: str
    asks: Mapping[str, ResourceRequirements]
    """By container."""


def translate_koordinator_pod(said: KoordinatorPodInput, stated: QoSLevel | None) -> KoordinatorTranslation:
    """Translate. `stated` is the level that Katalyst's annotation has; it counts more.

    Raises ValueError where the QoS class is none and nothing else says the level.
    """
    if not _uses_koordinator(said):
        return KoordinatorTranslation()
    problems = [f"{kind} {key}: has no counterpart here and is ignored: {instead}"
                for kind, entries in (("label", said.labels), ("annotation", said.annotations))
                for key, instead in UNSUPPORTED_KEYS.items() if key in entries]  # fmt: skip
    extended = _extended_resources(said.annotations, problems)
    asks = [*said.asks.values(), *extended.values()]
    band = _priority_band(said, problems)
    name = said.labels.get(QOS_CLASS_LABEL, "") or _implied_qos_class(band, asks)
    level = LEVELS_BY_QOS_CLASS.get(name)
    if level is None and QOS_CLASS_LABEL in said.labels:
        problem = f"label {QOS_CLASS_LABEL}: {said.labels[QOS_CLASS_LABEL]!r:.80} is not a QoS class; use one of {', '.join(LEVELS_BY_QOS_CLASS)}"
        if stated is None:
            raise ValueError(problem)
        problems.append(problem)
    if level is not None and QOS_CLASS_LABEL in said.labels and stated not in (None, level):
        problems.append(f"label {QOS_CLASS_LABEL}: {name} means {level.value}, Katalyst's annotation says {stated} and counts; "
                        "remove one of the two")  # fmt: skip
    elif level is not None:
        _check_class(name, band, asks, problems)
    words = {"numa_binding": "true"} if level is QoSLevel.DEDICATED and stated in (None, level) else {}
    words |= _cpu_and_numa_policies(said.annotations, problems) | _burst(said.annotations, problems)
    return KoordinatorTranslation(
        level=level,
        priority=_priority(said, band, name),
        words=words,
        bound_numa=_bound_numa_nodes(said.annotations, problems),
        extended=extended,
        problems=tuple(problems),
    )


def translate_koordinator_resources(
    ask: ResourceRequirements, extended: ResourceRequirements | None, level: QoSLevel
) -> tuple[ResourceRequirements, tuple[str, ...]]:
    """A container's requests and limits without Koordinator's resources: of reclaimed pods they are reclaimed ones, with
    the limits they imply (its runtime hook sets those); mid ones of other pods are ordinary ones."""
    also = extended or ResourceRequirements()
    requests, limits = {**also.requests, **ask.requests}, {**also.limits, **ask.limits}
    problems = []
    for name, kind in KOORDINATOR_RESOURCES.items():
        request, limit = requests.pop(name, None), limits.pop(name, None)
        request = limit if request is None else request
        if request is None:
            continue
        scale = MILLI if kind == CPU else 1
        if level is QoSLevel.RECLAIMED:
            requests.setdefault(RECLAIMED_CPU if kind == CPU else RECLAIMED_MEMORY, request)
        elif name in MID_RESOURCES:
            requests.setdefault(kind, request / scale)
        else:
            problems.append(f"resource {name}: is for QoS class BE only, this pod has {level.value}; it is ignored")
            continue
        if limit:
            limits.setdefault(kind, limit / scale)
    return ResourceRequirements(requests, limits), tuple(problems)


def _uses_koordinator(said: KoordinatorPodInput) -> bool:
    domains = {key.partition("/")[0] for key in (*said.labels, *said.annotations)}
    return (
        any(domain == DOMAIN or domain.endswith(f".{DOMAIN}") for domain in domains)
        or said.priority_class in PRIORITY_BANDS
        or any(name in KOORDINATOR_RESOURCES for ask in said.asks.values() for name in (*ask.requests, *ask.limits))
    )


def _priority_band(said: KoordinatorPodInput, problems: list[str]) -> str:
    """Its priority class: by label, by name, or by number; empty for none of Koordinator's."""
    label = said.labels.get(PRIORITY_CLASS_LABEL, "")
    if label in PRIORITY_BANDS:
        return label
    if label:
        problems.append(
            f"label {PRIORITY_CLASS_LABEL}: {label!r:.80} is no priority class; use one of {', '.join(PRIORITY_BANDS)}"
        )
    if said.priority_class in PRIORITY_BANDS:
        return said.priority_class
    number = -1 if said.priority is None else said.priority
    return next((name for name, (low, _, high) in PRIORITY_BANDS.items() if low <= number <= high), "")


def _implied_qos_class(band: str, asks: list[ResourceRequirements]) -> str:
    """The QoS class of a pod without the label: BE for batch work and for what asks Kubernetes for nothing."""
    names = {name for ask in asks for name in (*ask.requests, *ask.limits)}
    batch = band == "koord-batch" or bool(names & BATCH_RESOURCES.keys())
    modest = band in ("koord-mid", "koord-free") and not names & {CPU, MEMORY, *MID_RESOURCES}
    return "BE" if batch or modest else ""


def _check_class(name: str, band: str, asks: list[ResourceRequirements], problems: list[str]) -> None:
    if band in REJECTED_BANDS.get(name, ()):
        problems.append(
            f"label {QOS_CLASS_LABEL}: {name} does not go with {band}; it is taken as {name} all the same, choose others"
        )
    if name == "LSE":
        problems.append(
            f"label {QOS_CLASS_LABEL}: CPU that an LSE pod leaves idle may be lent here; there is no counterpart to never"
        )
    if name in ("LSE", "LSR") and not all(is_whole(ask.requests.get(CPU, Decimal(0))) for ask in asks):
        problems.append(
            f"label {QOS_CLASS_LABEL}: {name} pods get whole CPUs, and this one requests a fraction; request whole ones"
        )


def _priority(said: KoordinatorPodInput, band: str, name: str) -> int | None:
    if said.priority is not None or (not band and not name):
        return said.priority
    return PRIORITY_BANDS[band or ("koord-batch" if name == "BE" else "koord-prod")][1]


def _cpu_and_numa_policies(annotations: Mapping[str, str], problems: list[str]) -> dict[str, str]:
    words: dict[str, str] = {}
    spec, numa = _json_object(annotations, RESOURCE_SPEC, problems), _json_object(annotations, NUMA_SPEC, problems)
    for key, found, field, known in (
        (RESOURCE_SPEC, spec, "requiredCPUBindPolicy", BIND_POLICIES),
        (RESOURCE_SPEC, spec, "preferredCPUBindPolicy", BIND_POLICIES),
        (RESOURCE_SPEC, spec, "preferredCPUExclusivePolicy", EXCLUSIVE_POLICIES),
        (NUMA_SPEC, numa, "numaTopologyPolicy", NUMA_POLICIES),
    ):
        value = found.get(field)
        if value is None:
            continue
        if isinstance(value, str) and value in known:
            words |= known[value]
        else:
            problems.append(f"annotation {key}: {field}: {value!r:.80} has no counterpart here and is ignored; "
                            f"there are {', '.join(filter(None, known))}")  # fmt: skip
    return words


def _burst(annotations: Mapping[str, str], problems: list[str]) -> dict[str, str]:
    memory = _json_object(annotations, MEMORY_QOS, problems)
    if memory.get("policy", "none") != "none" or memory.keys() - {"policy"}:
        problems.append(
            f"annotation {MEMORY_QOS}: has no counterpart here and is ignored: memory is protected by QoS level"
        )
    burst = _json_object(annotations, CPU_BURST, problems)
    policy = burst.get("policy")
    if policy is None and not burst:
        return {}
    if not isinstance(policy, str) or policy not in BURST_POLICIES:
        problems.append(
            f"annotation {CPU_BURST}: policy: {policy!r:.80} is none; use one of {', '.join(BURST_POLICIES)}"
        )
        return {}
    for field in sorted(burst.keys() - {"policy", "cpuBurstPercent"}):
        problems.append(f"annotation {CPU_BURST}: {field[:80]}: is set for the whole node here, and ignored; remove it")
    words = {"cpu_burst_policy": BURST_POLICIES[policy]}
    if policy in ("cpuBurstOnly", "auto"):
        percent = burst.get("cpuBurstPercent", DEFAULT_BURST_PERCENT)
        if isinstance(percent, bool) or not isinstance(percent, int) or percent < 0:
            problems.append(
                f"annotation {CPU_BURST}: cpuBurstPercent: {percent!r:.80} is no percentage; write 0 to 10000"
            )
            percent = DEFAULT_BURST_PERCENT
        words["cpu_burst_percent"] = str(min(percent, MAX_BURST_PERCENT))
    return words


def _bound_numa_nodes(annotations: Mapping[str, str], problems: list[str]) -> tuple[int, ...]:
    """NUMA nodes that its scheduler has chosen. Which of their CPUs the pod gets is for the agent to say."""
    status = _json_object(annotations, RESOURCE_STATUS, problems)
    if status.get("cpuset"):
        problems.append(f"annotation {RESOURCE_STATUS}: cpuset: has no counterpart here and is ignored: "
                        "the agent chooses the CPUs of a pod itself")  # fmt: skip
    listed = status.get("numaNodeResources", [])
    nodes = (
        [entry.get("node") if isinstance(entry, dict) else None for entry in listed]
        if isinstance(listed, list)
        else [None]
    )
    known = [node for node in nodes if isinstance(node, int) and not isinstance(node, bool) and 0 <= node <= MAX_CPU]
    if len(known) < len(nodes):
        problems.append(f'annotation {RESOURCE_STATUS}: numaNodeResources: names no NUMA node; write [{{"node": 0}}]')
    return tuple(sorted(set(known)))


def _extended_resources(annotations: Mapping[str, str], problems: list[str]) -> dict[str, ResourceRequirements]:
    containers = _json_object(annotations, EXTENDED_SPEC, problems).get("containers", {})
    try:
        listed = msgspec.convert(containers, dict[str, dict[str, dict[str, str | int]]])
        return {
            name: ResourceRequirements(*(_whole_quantities(lists.get(kind, {})) for kind in ("requests", "limits")))
            for name, lists in listed.items()
        }
    except (msgspec.ValidationError, ValueError) as error:
        problems.append(f"annotation {EXTENDED_SPEC}: cannot be read and is ignored: {str(error)[:120]}")
        return {}


def _whole_quantities(listed: Mapping[str, str | int]) -> dict[str, Decimal]:
    found = {name: convert_quantity(value) for name, value in listed.items() if name in KOORDINATOR_RESOURCES}
    if broken := [name for name, value in found.items() if not is_whole(value)]:
        raise ValueError(f"{broken[0]} is no whole number; write one")
    return found


def _json_object(annotations: Mapping[str, str], key: str, problems: list[str]) -> dict[str, Any]:
    if key not in annotations:
        return {}
    try:
        found = msgspec.json.decode(annotations[key])
    except (msgspec.DecodeError, ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return found
    problems.append(f"annotation {key}: {annotations[key]!r:.80} is no JSON object and is ignored; write it like "
                    """'{"name": "value"}'""")  # fmt: skip
    return {}

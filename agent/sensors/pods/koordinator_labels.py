"""Translates Koordinator's QoS classes, priorities, resources and annotations into Katalyst's. Pure. Katalyst's own
annotations take precedence where a pod has both. Keys without a counterpart are reported as problems of the pod; keys
that concern only the scheduler are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import msgspec

from agent.sensors.pods.resource_quantities import CPU, MEMORY, MILLI, ResourceRequirements, is_whole
from api.annotations import size_problem
from api.cpu import MAX_CPU
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from api.qos import QoSLevel
from api.quantity import convert_quantity
from api.text import printable, quote

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
"""Priority classes with their lowest, default and highest priority."""
REJECTED_BANDS = {"BE": ("koord-prod",), "LSR": ("koord-mid", "koord-batch", "koord-free")}
"""Pairs of QoS class and priority class that Koordinator's webhook rejects."""
BATCH_RESOURCES = {
    "kubernetes.io/batch-cpu": CPU,
    "kubernetes.io/batch-memory": MEMORY,
    "koordinator.sh/batch-cpu": CPU,
    "koordinator.sh/batch-memory": MEMORY,
}
MID_RESOURCES = {"kubernetes.io/mid-cpu": CPU, "kubernetes.io/mid-memory": MEMORY}
KOORDINATOR_RESOURCES = {**BATCH_RESOURCES, **MID_RESOURCES}
"""Resources with a meaning here, as CPU (thousandths) or memory (bytes)."""
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
"""Koordinator's default, and the kernel's bound: a burst is at most the quota (kernel/sched/core.c,
tg_set_cfs_bandwidth)."""
UNSUPPORTED_KEYS = {
    "koordinator.sh/networkQOS": "bandwidth is shared by QoS level",
    "koordinator.sh/blkioQOS": "disks are shared by QoS level",
    "koordinator.sh/cpuQOS": "CPU is shared by QoS level",
    "koordinator.sh/oom-score-adj": "set oom_priority in katalyst.kubewharf.io/memory_enhancement",
    "koordinator.sh/oom-score-adj-spec": "set oom_priority in katalyst.kubewharf.io/memory_enhancement",
    "koordinator.sh/eviction-enabled": "QoS level and priority decide about eviction",
    "koordinator.sh/eviction-policy": "QoS level and priority decide about eviction",
    "koordinator.sh/eviction-priority": "set the pod's priority",
    "koordinator.sh/priority": "set the pod's priority",
    "node.koordinator.sh/resctrl": "cache and memory bandwidth are shared by QoS level",
    "node.koordinator.sh/network-bandwidth": "bandwidth is shared by QoS level",
}
"""Keys without a counterpart, and what to use instead."""


class KoordinatorTranslation(msgspec.Struct, frozen=True, kw_only=True):
    """Koordinator's labels and annotations of a pod, as Katalyst's."""

    level: QoSLevel | None = None
    """None if the pod does not state one."""
    priority: int | None = None
    words: Mapping[str, str] = {}
    """Enhancements by Katalyst's names."""
    bound_numa: tuple[int, ...] = ()
    extended: Mapping[str, ResourceRequirements] = {}
    """Requests and limits by container, from an annotation that repeats resources a kubelet does not know."""
    problems: tuple[str, ...] = ()


class KoordinatorPodInput(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of the translation."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    priority: int | None
    priority_class: str
    asks: Mapping[str, ResourceRequirements]
    """Resources by container."""


def translate_koordinator_pod(pod: KoordinatorPodInput, stated: QoSLevel | None) -> KoordinatorTranslation:
    """Translate a pod. `stated` is the level of Katalyst's annotation, which takes precedence.

    Raises ValueError if the QoS class is invalid and nothing else states the level.
    """
    if not _uses_koordinator(pod):
        return KoordinatorTranslation()
    problems = [f"{kind} {key}: has no counterpart here and is ignored: {instead}"
                for kind, entries in (("label", pod.labels), ("annotation", pod.annotations))
                for key, instead in UNSUPPORTED_KEYS.items() if key in entries]  # fmt: skip
    extended = _extended_resources(pod.annotations, problems)
    requirements = [*pod.asks.values(), *extended.values()]
    band = _priority_band(pod, problems)
    name = pod.labels.get(QOS_CLASS_LABEL, "") or _implied_qos_class(band, requirements)
    level = LEVELS_BY_QOS_CLASS.get(name)
    if level is None and QOS_CLASS_LABEL in pod.labels:
        classes = ", ".join(LEVELS_BY_QOS_CLASS)
        problem = (
            f"label {QOS_CLASS_LABEL}: {quote(pod.labels[QOS_CLASS_LABEL])} is not a QoS class; use one of {classes}"
        )
        if stated is None:
            raise ValueError(problem)
        problems.append(problem)
    if level is not None and QOS_CLASS_LABEL in pod.labels and stated not in (None, level):
        problems.append(f"label {QOS_CLASS_LABEL}: {name} means {level.value}, Katalyst's annotation says {stated} and counts; "
                        "remove one of the two")  # fmt: skip
    elif level is not None:
        _check_class(name, band, requirements, problems)
    enhancements = {"numa_binding": "true"} if level is QoSLevel.DEDICATED and stated in (None, level) else {}
    enhancements |= _cpu_and_numa_policies(pod.annotations, problems) | _burst(pod.annotations, problems)
    return KoordinatorTranslation(
        level=level,
        priority=_priority(pod, band, name),
        words=enhancements,
        bound_numa=_bound_numa_nodes(pod.annotations, problems),
        extended=extended,
        problems=tuple(problems),
    )


def translate_koordinator_resources(
    requirements: ResourceRequirements, extended: ResourceRequirements | None, level: QoSLevel
) -> tuple[ResourceRequirements, tuple[str, ...]]:
    """Return a container's requests and limits with Koordinator's resources converted, and problems.

    Those of reclaimed pods become reclaimed resources with the limits they imply, which Koordinator's runtime hook
    sets; mid resources of other pods become ordinary ones. `extended` is what the pod's owner wrote into an annotation: its
    limits restrict a reclaimed container, and its requests count for nothing, because no scheduler accounted for them.
    """
    also = extended or ResourceRequirements()
    requests, own_limits = dict(requirements.requests), requirements.limits
    limits = {**(also.limits if level is QoSLevel.RECLAIMED else {}), **own_limits}
    problems = []
    for name, kind in KOORDINATOR_RESOURCES.items():
        request, limit = requests.pop(name, own_limits.get(name)), limits.pop(name, None)
        scale = MILLI if kind == CPU else 1
        if request is None:
            if name in also.requests or name in also.limits:
                problems.append(f"annotation {EXTENDED_SPEC}: {name}: the container does not request it, so no scheduler has "
                                "accounted for it; it is ignored, request it")  # fmt: skip
        elif level is QoSLevel.RECLAIMED:
            requests.setdefault(RECLAIMED_CPU if kind == CPU else RECLAIMED_MEMORY, request)
        elif name in MID_RESOURCES:
            requests.setdefault(kind, request / scale)
        else:
            problems.append(f"resource {name}: is for QoS class BE only, this pod has {level.value}; it is ignored")
            continue
        if limit:
            limits.setdefault(kind, limit / scale)
    return ResourceRequirements(requests, limits), tuple(problems)


def _uses_koordinator(pod: KoordinatorPodInput) -> bool:
    domains = {key.partition("/")[0] for key in (*pod.labels, *pod.annotations)}
    return (
        any(domain == DOMAIN or domain.endswith(f".{DOMAIN}") for domain in domains)
        or pod.priority_class in PRIORITY_BANDS
        or any(
            name in KOORDINATOR_RESOURCES
            for requirements in pod.asks.values()
            for name in (*requirements.requests, *requirements.limits)
        )
    )


def _priority_band(pod: KoordinatorPodInput, problems: list[str]) -> str:
    """Return Koordinator's priority class by label, name or number; empty without one."""
    label = pod.labels.get(PRIORITY_CLASS_LABEL, "")
    if label in PRIORITY_BANDS:
        return label
    if label:
        problems.append(
            f"label {PRIORITY_CLASS_LABEL}: {quote(label)} is not a priority class; use one of {', '.join(PRIORITY_BANDS)}"
        )
    if pod.priority_class in PRIORITY_BANDS:
        return pod.priority_class
    number = -1 if pod.priority is None else pod.priority
    return next((name for name, (low, _, high) in PRIORITY_BANDS.items() if low <= number <= high), "")


def _implied_qos_class(band: str, requirements: list[ResourceRequirements]) -> str:
    """Return the QoS class of a pod without the label: BE for batch work and for pods without Kubernetes requests."""
    names = {name for requirement in requirements for name in (*requirement.requests, *requirement.limits)}
    batch = band == "koord-batch" or bool(names & BATCH_RESOURCES.keys())
    modest = band in ("koord-mid", "koord-free") and not names & {CPU, MEMORY, *MID_RESOURCES}
    return "BE" if batch or modest else ""


def _check_class(name: str, band: str, requirements: list[ResourceRequirements], problems: list[str]) -> None:
    if band in REJECTED_BANDS.get(name, ()):
        problems.append(
            f"label {QOS_CLASS_LABEL}: {name} is not allowed with {band}; it is treated as {name}, change one of the two"
        )
    if name == "LSE":
        problems.append(
            f"label {QOS_CLASS_LABEL}: idle CPU of an LSE pod is reclaimable here, which Koordinator never allows; use LSR"
        )
    if name in ("LSE", "LSR") and not all(
        is_whole(requirement.requests.get(CPU, Decimal(0))) for requirement in requirements
    ):
        problems.append(
            f"label {QOS_CLASS_LABEL}: {name} pods get whole CPUs and this one requests a fraction; request whole CPUs"
        )


def _priority(pod: KoordinatorPodInput, band: str, name: str) -> int | None:
    if pod.priority is not None or (not band and not name):
        return pod.priority
    return PRIORITY_BANDS[band or ("koord-batch" if name == "BE" else "koord-prod")][1]


def _cpu_and_numa_policies(annotations: Mapping[str, str], problems: list[str]) -> dict[str, str]:
    enhancements: dict[str, str] = {}
    spec, numa = _json_object(annotations, RESOURCE_SPEC, problems), _json_object(annotations, NUMA_SPEC, problems)
    for key, document, field, policies in (
        (RESOURCE_SPEC, spec, "requiredCPUBindPolicy", BIND_POLICIES),
        (RESOURCE_SPEC, spec, "preferredCPUBindPolicy", BIND_POLICIES),
        (RESOURCE_SPEC, spec, "preferredCPUExclusivePolicy", EXCLUSIVE_POLICIES),
        (NUMA_SPEC, numa, "numaTopologyPolicy", NUMA_POLICIES),
    ):
        value = document.get(field)
        if value is None:
            continue
        if isinstance(value, str) and value in policies:
            enhancements |= policies[value]
        else:
            problems.append(f"annotation {key}: {field}: {quote(value)} has no counterpart here and is ignored; "
                            f"there are {', '.join(filter(None, policies))}")  # fmt: skip
    return enhancements


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
            f"annotation {CPU_BURST}: policy: {quote(policy)} is invalid; use one of {', '.join(BURST_POLICIES)}"
        )
        return {}
    for field in sorted(burst.keys() - {"policy", "cpuBurstPercent"}):
        problems.append(f"annotation {CPU_BURST}: {field[:80]}: is set for the whole node here, and ignored; remove it")
    enhancements = {"cpu_burst_policy": BURST_POLICIES[policy]}
    if policy in ("cpuBurstOnly", "auto"):
        percent = burst.get("cpuBurstPercent", DEFAULT_BURST_PERCENT)
        if isinstance(percent, bool) or not isinstance(percent, int) or percent < 0:
            problems.append(
                f"annotation {CPU_BURST}: cpuBurstPercent: {quote(percent)} is not a percentage; write 0 to 10000"
            )
            percent = DEFAULT_BURST_PERCENT
        enhancements["cpu_burst_percent"] = str(min(percent, MAX_BURST_PERCENT))
    return enhancements


def _bound_numa_nodes(annotations: Mapping[str, str], problems: list[str]) -> tuple[int, ...]:
    """Return the NUMA nodes chosen by Koordinator's scheduler; the agent chooses the CPUs."""
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
    valid = [node for node in nodes if isinstance(node, int) and not isinstance(node, bool) and 0 <= node <= MAX_CPU]
    if len(valid) < len(nodes):
        problems.append(f'annotation {RESOURCE_STATUS}: numaNodeResources: names no NUMA node; write [{{"node": 0}}]')
    return tuple(sorted(set(valid)))


def _extended_resources(annotations: Mapping[str, str], problems: list[str]) -> dict[str, ResourceRequirements]:
    containers = _json_object(annotations, EXTENDED_SPEC, problems).get("containers", {})
    try:
        listed = msgspec.convert(containers, dict[str, dict[str, dict[str, str | int]]])
        return {
            name: ResourceRequirements(*(_whole_quantities(lists.get(kind, {})) for kind in ("requests", "limits")))
            for name, lists in listed.items()
        }
    except (msgspec.ValidationError, ValueError) as error:
        problems.append(f"annotation {EXTENDED_SPEC}: cannot be read and is ignored: {printable(str(error), 120)}")
        return {}


def _whole_quantities(listed: Mapping[str, str | int]) -> dict[str, Decimal]:
    quantities = {name: convert_quantity(value) for name, value in listed.items() if name in KOORDINATOR_RESOURCES}
    if fractions := [name for name, value in quantities.items() if not is_whole(value)]:
        raise ValueError(f"{fractions[0]} is not a whole number; use one")
    return quantities


def _json_object(annotations: Mapping[str, str], key: str, problems: list[str]) -> dict[str, Any]:
    if key not in annotations:
        return {}
    if problem := size_problem(annotations[key]):
        problems.append(f"annotation {key}: {problem}")
        return {}
    try:
        document = msgspec.json.decode(annotations[key])
    except (msgspec.DecodeError, ValueError, RecursionError):
        document = None
    if isinstance(document, dict):
        return document
    problems.append(f"annotation {key}: {quote(annotations[key])} is not a JSON object and is ignored; write it like "
                    """'{"name": "value"}'""")  # fmt: skip
    return {}

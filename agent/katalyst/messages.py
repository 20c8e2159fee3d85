"""Values that several Katalyst protocols share: feature gates, numbers by NUMA node, core/v1 pods. Pure.
`UnusableMessage` rejects a message of a peer as a whole; its text names the field.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from api.pod import NET_BANDWIDTH, RECLAIMED_CPU, RECLAIMED_MEMORY, Container, Pod
from api.proto import advisor_svc_pb2 as svc
from api.proto import core_v1_pb2 as core

SUPPORTS_GET_ADVICE = {"supports_get_advice": "true"}
"""Said beside every call of a plugin that asks for advice: its AddContainer and RemovePod need not be remembered."""
QUOTA_GATE = "feature_gate_quota_ctrl_knob"
"""Reclaimed pods are limited by a quota too."""
CGROUP_CONFIG, CPU_NUMA_HEADROOM = "cgroup_config", "cpu_numa_headroom"
MAX_ENTRIES = 10_000
"""Of one answer: a kubelet has a thousand pods at the most."""


class UnusableMessage(Exception):
    """A peer's message cannot be used as a whole; the text names the field."""


def supported_gates(wanted: Mapping[str, Any], kind: str, known: frozenset[str]) -> dict[str, Any]:
    """Those of the wanted gates that are known here. Raises Unusable where one that must be is not, or is of another kind."""
    for name, gate in sorted(wanted.items()):
        if gate.type != kind:
            raise UnusableMessage(
                f"wanted_feature_gates[{name:.80}].type is {gate.type!r:.80}, this advisor is of {kind}"
            )
        if name not in known and gate.must_mutually_supported:
            raise UnusableMessage(f"wanted_feature_gates[{name:.80}] must be supported and is not known; switch it off")
    return {name: gate for name, gate in wanted.items() if name in known}


def parse_numbers_by_numa(text: str, field: str) -> dict[int, float]:
    """Go's JSON of a map from NUMA node to number: `{"0":1.5}`. Raises Unusable that names the field."""
    try:
        found = msgspec.json.decode(text, type=dict[int, float])
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise UnusableMessage(f"{field}: {text!r:.80} is no map of NUMA nodes to numbers ({error})") from None
    for node, value in found.items():
        if node < 0 or not math.isfinite(value) or value < 0:
            raise UnusableMessage(f"{field}: {value!r:.40} of NUMA node {node} is out of range")
    return found


def format_numbers_by_numa(values: Mapping[int, float]) -> str:
    """The same the other way; Go sorts by the text of the key, and nobody cares."""
    return msgspec.json.encode({str(node): value for node, value in sorted(values.items())}).decode()


def parse_int64(text: str, field: str) -> int:
    """A whole number as Go's ParseInt takes it. Raises Unusable that names the field."""
    digits = text[1:] if text[:1] in ("-", "+") else text
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 19:
        raise UnusableMessage(f"{field}: {text!r:.80} is no whole number")
    value = int(text)
    if not -(1 << 63) <= value < 1 << 63:
        raise UnusableMessage(f"{field}: {text!r:.80} is out of range")
    return value


def pods_by_uid(pods: Iterable[Pod]) -> dict[str, Pod]:
    return {pod.uid: pod for pod in pods}


def extra_entry(cgroup: str, values: Mapping[str, str]) -> Any:
    """What is to hold for a cgroup above pods; with no cgroup, for the node."""
    return svc.CalculationInfo(cgroup_path=cgroup, calculation_result=svc.CalculationResult(values=dict(values)))


CPU, MEMORY = "cpu", "memory"


def encode_pod(pod: Pod) -> Any:
    """The message; a pod that is listed is taken for a running one."""
    made = core.Pod()
    made.metadata.name, made.metadata.namespace, made.metadata.uid = pod.name, pod.namespace, pod.uid
    made.metadata.labels.update(pod.labels)
    made.metadata.annotations.update(pod.annotations)
    made.spec.priority = pod.priority
    made.status.phase = "Running"
    for container in pod.containers:
        wire = made.spec.containers.add(name=container.name)
        for name, text in _encode_requests(container).items():
            wire.resources.requests[name].string = text
        for name, text in _encode_limits(container).items():
            wire.resources.limits[name].string = text
    return made


def _encode_requests(container: Container) -> dict[str, str]:
    amounts = {
        CPU: _milli_cores_text(container.cpu_request_cores),
        MEMORY: _integer_text(container.memory_request_bytes),
        RECLAIMED_CPU: _integer_text(
            None if container.reclaimed_cpu_cores is None else container.reclaimed_cpu_cores * 1000
        ),
        RECLAIMED_MEMORY: _integer_text(container.reclaimed_memory_bytes),
        NET_BANDWIDTH: _integer_text(container.net_bandwidth_mbit),
    }
    return {name: text for name, text in amounts.items() if text is not None}


def _encode_limits(container: Container) -> dict[str, str]:
    amounts = {CPU: _milli_cores_text(container.cpu_limit_cores), MEMORY: _integer_text(container.memory_limit_bytes)}
    return {name: text for name, text in amounts.items() if text is not None}


def _milli_cores_text(cores: float | None) -> str | None:
    if cores is None:
        return None
    milli = round(cores * 1000)
    return str(milli // 1000) if milli % 1000 == 0 else f"{milli}m"


def _integer_text(amount: float | None) -> str | None:
    return None if amount is None else str(round(amount))

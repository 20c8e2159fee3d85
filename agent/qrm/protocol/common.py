"""What the protocols of CPU and memory have in common: words, feature gates, and numbers in texts that others write. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from api.pods import Pod
from api.proto import advisor_svc_pb2 as svc

SUPPORTS_GET_ADVICE = {"supports_get_advice": "true"}
"""Said beside every call of a plugin that asks for advice: its AddContainer and RemovePod need not be remembered."""
QUOTA_GATE = "feature_gate_quota_ctrl_knob"
"""Reclaimed pods are limited by a quota too."""
CGROUP_CONFIG, CPU_NUMA_HEADROOM = "cgroup_config", "cpu_numa_headroom"
MOST_ENTRIES = 10_000
"""Of one answer: a kubelet has a thousand pods at the most."""


class Unusable(Exception):
    """A peer's message cannot be used as a whole; the text names the field."""


def gates(wanted: Mapping[str, Any], kind: str, known: frozenset[str]) -> dict[str, Any]:
    """Those of the wanted gates that are known here. Raises Unusable where one that must be is not, or is of another kind."""
    for name, gate in sorted(wanted.items()):
        if gate.type != kind:
            raise Unusable(f"wanted_feature_gates[{name:.80}].type is {gate.type!r:.80}, this advisor is of {kind}")
        if name not in known and gate.must_mutually_supported:
            raise Unusable(f"wanted_feature_gates[{name:.80}] must be supported and is not known; switch it off")
    return {name: gate for name, gate in wanted.items() if name in known}


def number_by_node(text: str, field: str) -> dict[int, float]:
    """Go's JSON of a map from NUMA node to number: `{"0":1.5}`. Raises Unusable that names the field."""
    try:
        found = msgspec.json.decode(text, type=dict[int, float])
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise Unusable(f"{field}: {text!r:.80} is no map of NUMA nodes to numbers ({error})") from None
    for node, value in found.items():
        if node < 0 or not math.isfinite(value) or value < 0:
            raise Unusable(f"{field}: {value!r:.40} of NUMA node {node} is out of range")
    return found


def by_node_text(values: Mapping[int, float]) -> str:
    """The same the other way; Go sorts by the text of the key, and nobody cares."""
    return msgspec.json.encode({str(node): value for node, value in sorted(values.items())}).decode()


def whole(text: str, field: str) -> int:
    """A whole number as Go's ParseInt takes it. Raises Unusable that names the field."""
    digits = text[1:] if text[:1] in ("-", "+") else text
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 19:
        raise Unusable(f"{field}: {text!r:.80} is no whole number")
    value = int(text)
    if not -(1 << 63) <= value < 1 << 63:
        raise Unusable(f"{field}: {text!r:.80} is out of range")
    return value


def by_uid(pods: Iterable[Pod]) -> dict[str, Pod]:
    return {pod.uid: pod for pod in pods}


def extra(cgroup: str, values: Mapping[str, str]) -> Any:
    """What is to hold for a cgroup above pods; with no cgroup, for the node."""
    return svc.CalculationInfo(cgroup_path=cgroup, calculation_result=svc.CalculationResult(values=dict(values)))

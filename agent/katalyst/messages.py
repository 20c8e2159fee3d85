"""Values that several Katalyst protocols share: feature gates and numbers by NUMA node. Pure.
`UnusableMessage` rejects the whole message of a peer; its text names the field.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from api.pod import Pod
from api.proto import advisor_svc_pb2 as svc
from api.text import quote

SUPPORTS_GET_ADVICE = {"supports_get_advice": "true"}
"""Metadata (gRPC) of plugins that poll GetAdvice; the server ignores their AddContainer and RemovePod calls."""
QUOTA_GATE = "feature_gate_quota_ctrl_knob"
"""Feature gate: reclaimed pods are also limited by a CPU quota."""
CPU, MEMORY = "cpu", "memory"
CGROUP_CONFIG, CPU_NUMA_HEADROOM = "cgroup_config", "cpu_numa_headroom"
MAX_ENTRIES = 10_000
"""Maximum number of entries in a message; a kubelet runs at most a thousand pods."""


class UnusableMessage(Exception):
    """A peer's message is rejected; the text names the field."""


def supported_gates(requested: Mapping[str, Any], kind: str, supported: frozenset[str]) -> dict[str, Any]:
    """Return the requested feature gates that are supported. Raises UnusableMessage for a gate of another kind, and for an
    unsupported gate that must be mutually supported."""
    for name, gate in sorted(requested.items()):
        if gate.type != kind:
            raise UnusableMessage(
                f"wanted_feature_gates[{name:.80}].type is {quote(gate.type)}, this advisor has type {kind}"
            )
        if name not in supported and gate.must_mutually_supported:
            raise UnusableMessage(f"wanted_feature_gates[{name:.80}] is not supported; switch it off in the plugin")
    return {name: gate for name, gate in requested.items() if name in supported}


def parse_numbers_by_numa(text: str, field: str) -> dict[int, float]:
    """Decode Go's JSON of a map from NUMA node to number, such as `{"0":1.5}`. Raises UnusableMessage."""
    try:
        numbers = msgspec.json.decode(text, type=dict[int, float])
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise UnusableMessage(f"{field}: {quote(text)} is not a map of NUMA nodes to numbers ({error})") from None
    for node, value in numbers.items():
        if node < 0 or not math.isfinite(value) or value < 0:
            raise UnusableMessage(f"{field}: {quote(value, 40)} of NUMA node {node} is out of range")
    return numbers


def format_numbers_by_numa(values: Mapping[int, float]) -> str:
    """Encode a map from NUMA node to number as JSON, in the order of the nodes."""
    return msgspec.json.encode({str(node): value for node, value in sorted(values.items())}).decode()


def parse_int64(text: str, field: str) -> int:
    """Parse an integer like Go's ParseInt. Raises UnusableMessage."""
    digits = text[1:] if text[:1] in ("-", "+") else text
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 19:
        raise UnusableMessage(f"{field}: {quote(text)} is not an integer")
    value = int(text)
    if not -(1 << 63) <= value < 1 << 63:
        raise UnusableMessage(f"{field}: {quote(text)} is out of range")
    return value


def pods_by_uid(pods: Iterable[Pod]) -> dict[str, Pod]:
    return {pod.uid: pod for pod in pods}


def extra_entry(cgroup: str, values: Mapping[str, str]) -> Any:
    """Return advice for a cgroup above pods, or for the node if `cgroup` is empty."""
    return svc.CalculationInfo(cgroup_path=cgroup, calculation_result=svc.CalculationResult(values=dict(values)))

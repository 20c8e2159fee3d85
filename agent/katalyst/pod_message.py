"""Encodes pods as core/v1 Pod, as Katalyst's eviction manager sends them to plugins: the pod as the kubelet lists it.
Fields that api/proto/core_v1.proto does not name are left out. A pod of a static file has the fields of api.pod. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from agent.katalyst.messages import CPU, MEMORY
from api.pod import NET_BANDWIDTH, RECLAIMED_CPU, RECLAIMED_MEMORY, Container, Pod
from api.proto import core_v1_pb2 as core
from api.units import NS_PER_S
from kube.objects import parse_timestamp

ManifestReader = Callable[[str], bytes]
"""Return the JSON of the pod with a uid as the kubelet lists it; empty if it is not listed."""


def no_manifest(_uid: str) -> bytes:
    """Return no manifest: the ManifestReader of nodes without a kubelet."""
    return b""


class PodEncoder:
    """Encodes pods, and reuses a pod's message while the kubelet lists the same text."""

    def __init__(self, manifest: ManifestReader = no_manifest) -> None:
        self._manifest = manifest
        self._encoded: dict[str, tuple[bytes, Any]] = {}

    def encode(self, pods: Iterable[Pod]) -> list[Any]:
        """Return the messages of these pods in their order."""
        encoded: dict[str, tuple[bytes, Any]] = {}
        for pod in pods:
            manifest = self._manifest(pod.uid)
            before = self._encoded.get(pod.uid)
            if before is None or not manifest or before[0] is not manifest:
                before = manifest, encode_pod(pod, manifest)
            encoded[pod.uid] = before
        self._encoded = encoded
        return [message for _, message in encoded.values()]


def encode_pod(pod: Pod, manifest: bytes = b"") -> Any:
    """Encode a pod from its manifest; without a valid one from its own fields, as a pod in phase Running."""
    if manifest:
        try:
            message = core.Pod()
            _fill(message, msgspec.json.decode(manifest))
        except (msgspec.MsgspecError, ValueError, TypeError, AttributeError):
            pass  # The kubelet's text has a field of another type than core/v1 has.
        else:
            message.metadata.uid = pod.uid
            return message
    return _encode_fields(pod)


def _fill(message: Any, document: Mapping[str, Any]) -> None:
    """Set the fields of a message to those of a JSON object. Raises ValueError, TypeError or AttributeError for a value of
    another type."""
    for field in message.DESCRIPTOR.fields:
        value = document.get(field.name)
        if value is None:
            continue
        if field.message_type is None:
            getattr(message, field.name).extend(value) if field.is_repeated else setattr(message, field.name, value)
        elif field.message_type.GetOptions().map_entry:
            quantities = field.message_type.fields_by_name["value"].message_type is not None
            entries = getattr(message, field.name)
            for key, text in value.items():
                if quantities:
                    entries[key].string = str(text)
                else:
                    entries[key] = text
        elif field.is_repeated:
            for each in value:
                _fill(getattr(message, field.name).add(), each)
        elif field.message_type.name == "Time":
            at_s = parse_timestamp(value)
            getattr(message, field.name).seconds, getattr(message, field.name).nanos = (
                int(at_s),
                round(at_s % 1 * NS_PER_S),
            )
        else:
            getattr(message, field.name).SetInParent()
            _fill(getattr(message, field.name), value)


def _encode_fields(pod: Pod) -> Any:
    """Encode what api.pod has of a pod that no kubelet lists."""
    message = core.Pod()
    message.metadata.name, message.metadata.namespace, message.metadata.uid = pod.name, pod.namespace, pod.uid
    message.metadata.labels.update(pod.labels)
    message.metadata.annotations.update(pod.annotations)
    message.spec.priority = pod.priority
    message.status.phase = "Running"
    for container in pod.containers:
        wire = message.spec.containers.add(name=container.name)
        for name, text in _encode_requests(container).items():
            wire.resources.requests[name].string = text
        for name, text in _encode_limits(container).items():
            wire.resources.limits[name].string = text
    return message


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

"""Our advice on memory as the answer to somebody else's memory plugin. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from agent.qrm.placing.state import CpuState
from agent.qrm.protocol import memory_words as words
from agent.qrm.protocol.common import by_node_text, extra, gates
from agent.qrm.protocol.cpu_state import metadata
from api.advice import Headroom, Wish
from api.knobs import Knob
from api.memory_advice import MemoryAdvice
from api.pods import Pod
from api.proto import advisor_svc_pb2 as svc

DYING_RULE = "memory_dying_reclaim"
"""Verdict of a wish to reclaim what removed members left, which has a key of its own."""
MOUNT = "/sys/fs/cgroup"
"""Katalyst's QRM takes that one key's cgroup for a path of the file system, and every other for one below the controllers'."""


class Place(msgspec.Struct, frozen=True):
    """A container by the names that the protocol has for it."""

    uid: str
    container: str


def answer(request: Any, memory: MemoryAdvice, pods: Iterable[Pod], headroom: Headroom | None) -> Any:
    """GetAdviceResponse to a GetAdviceRequest, of the containers that it names. Raises Unusable as `gates` does."""
    supported = gates(request.wanted_feature_gates, "Memory", frozenset())
    places = {
        container.cgroup: Place(pod.uid, container.name)
        for pod in pods
        for container in pod.containers
        if pod.uid in request.entries and container.name in request.entries[pod.uid].entries
    }
    result = svc.GetAdviceResponse(supported_feature_gates=supported)
    others: dict[str, dict[str, str]] = {}
    for wish in memory.wishes:
        place = places.get(wish.cgroup)
        if place is not None:
            if values := _of_container(wish):
                made = result.pod_entries[place.uid].container_entries[place.container]
                made.calculation_result.values.update(values)
        elif values := _of_group(wish):
            path = f"{MOUNT}{wish.cgroup}" if words.DYING in values else wish.cgroup
            others.setdefault(path, {}).update(values)
    for its in result.pod_entries.values():
        for info in its.container_entries.values():
            _with_swap(info.calculation_result.values)
    for path, its in sorted(others.items()):
        _with_swap(its)
        result.extra_entries.append(extra(path, its))
    if headroom is not None and headroom.memory_by_numa:
        # That plugin takes whole bytes alone.
        sizes = {node: int(size) for node, size in headroom.memory_by_numa.items()}
        result.extra_entries.append(extra("", {words.HEADROOM: by_node_text(sizes)}))
    return result


def request_of(pods: Iterable[Pod], state: CpuState) -> Any:
    """What our QRM asks somebody else's memory advisor with: every placed container, and the bytes that it asks for."""
    request = svc.GetAdviceRequest()
    for pod in pods:
        known = state.pod(pod.uid)
        for container in pod.containers:
            if container.name in known:
                asked = container.reclaimed_memory_bytes or container.memory_request_bytes or 0
                made = metadata(pod, known[container.name], asked)
                made.requestMilliQuantity, made.useMilliQuantity = 0, False
                request.entries[pod.uid].entries[container.name].CopyFrom(made)
    return request


def _of_container(wish: Wish) -> dict[str, str]:
    if wish.knob is Knob.DROP_CACHE:
        return {words.DROP_CACHE: words.TRUE}
    if wish.knob is Knob.MEMS:
        return {words.MEMS: wish.value}
    return _of_both(wish)


def _of_group(wish: Wish) -> dict[str, str]:
    """What that plugin does to a cgroup that is no container's: neither caches nor NUMA nodes are among it."""
    if wish.verdict.rule == DYING_RULE:
        return {words.DYING: words.TRUE}
    if wish.knob is Knob.MEMORY_HIGH:
        return {words.HIGH: words.size_to_wire(wish.value)}
    return _of_both(wish)


def _of_both(wish: Wish) -> dict[str, str]:
    if wish.knob is Knob.MEMORY_MAX:
        return {words.LIMIT: words.size_to_wire(wish.value)}
    if wish.knob is Knob.MEMORY_RECLAIM:
        return {words.OFFLOADING: wish.value}
    if wish.knob is Knob.SWAP_MAX:
        return {words.SWAP_MAX: words.FALSE if wish.value == "0" else words.TRUE}
    return {}


def _with_swap(values: Any) -> None:
    """A wish for swap is heard beside an amount to offload alone, be it nothing."""
    if words.SWAP_MAX in values and words.OFFLOADING not in values:
        values[words.OFFLOADING] = "0"

"""Encodes memory advice for a stock memory plugin, and decodes the advice of a stock memory advisor. Pure.
Keys and their meanings are those of Katalyst's memory QRM plugin. An answer is decoded as a whole or rejected as
a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from agent.katalyst.admission import container_memory_bytes
from agent.katalyst.cpu_plugin_state import encode_metadata
from agent.katalyst.messages import (
    MAX_ENTRIES,
    UnusableMessage,
    extra_entry,
    format_numbers_by_numa,
    parse_int64,
    parse_numbers_by_numa,
    pods_by_uid,
    supported_gates,
)
from agent.qrm.cpuset.state import CpusetState
from api.advice import Headroom, KnobRequest, MemoryAdvice, MemoryCondition, MemoryPressure
from api.cpu import format_cpu_list, parse_cpu_list
from api.knobs import Knob, Reason
from api.pod import Pod
from api.proto import advisor_svc_pb2 as svc
from api.snapshot import Snapshot
from api.text import quote

LIMIT_KEY, HIGH_KEY, DROP_CACHE_KEY, MEMS_KEY = "memory_limit_in_bytes", "memory_high", "drop_cache", "cpuset_mems"
RECLAIMED_SIZE_KEY, BALANCE_KEY, SWAP_MAX_KEY, OFFLOADING_KEY = (
    "reclaimed_memory_size", "balance_numa_memory", "swap_max", "memory_offloading"
)  # fmt: skip
DYING_KEY, HEADROOM_KEY = "dying_memcg_reclaim", "memory_numa_headroom"
TRUE, FALSE = "true", "false"
UNLIMITED = "-1"
FULL = "max"
_TRUE_WORDS, _FALSE_WORDS = (
    frozenset(("1", "t", "T", "true", "TRUE", "True")),
    frozenset(("0", "f", "F", "false", "FALSE", "False")),
)


class MigratedContainer(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"uid": "podUID", "container": "containerName", "to": "destNumaList"},
):
    """Container whose memory is to be migrated."""

    uid: str
    container: str
    to: tuple[int, ...] = ()


class NumaBalance(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"to": "destNumaList", "source": "sourceNuma", "moved": "migrateContainers", "rss": "totalRSS"},
):
    """Value of `balance_numa_memory`; Katalyst tries the nodes in turn until the part `threshold` of `rss` is moved."""

    to: tuple[int, ...] = ()
    source: int
    moved: tuple[MigratedContainer, ...] = ()
    rss: float = 0.0
    threshold: float = 0.0


def parse_bool(text: str, field: str) -> bool:
    """Parse a boolean like Go's ParseBool. Raises UnusableMessage."""
    if text in _TRUE_WORDS:
        return True
    if text in _FALSE_WORDS:
        return False
    raise UnusableMessage(f"{field}: {quote(text)} is neither true nor false")


def encode_size(value: str) -> str:
    return UNLIMITED if value == FULL else value


def decode_size(text: str, field: str) -> str:
    """Return a limit in bytes; negative numbers mean no limit. Raises UnusableMessage."""
    value = parse_int64(text, field)
    return FULL if value < 0 else str(value)


def decode_nodes(text: str, field: str) -> str:
    """Return a list of NUMA nodes in canonical form. Raises UnusableMessage."""
    try:
        nodes = parse_cpu_list(text)
    except ValueError as error:
        raise UnusableMessage(f"{field}: {str(error)[:200]}") from None
    if not nodes:
        raise UnusableMessage(f"{field}: names no NUMA node")
    return format_cpu_list(nodes)


def decode_balance(text: str, field: str) -> NumaBalance:
    """Decode a migration request. Raises UnusableMessage."""
    try:
        balance = msgspec.json.decode(text, type=NumaBalance)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise UnusableMessage(f"{field}: {quote(text)} ({error})") from None
    for node in (balance.source, *balance.to, *(node for moved in balance.moved for node in moved.to)):
        if not 0 <= node < 1024:
            raise UnusableMessage(f"{field}: {node} is not a NUMA node")
    return balance


def decode_knobs(values: Mapping[str, str], field: str) -> dict[Knob, str]:
    """Return the knobs of one cgroup from keys that set one knob each. Raises UnusableMessage.

    As in Katalyst's memory plugin, `memory_offloading` reclaims memory, and `swap_max` is ignored without it.
    """
    knobs: dict[Knob, str] = {}
    if LIMIT_KEY in values:
        knobs[Knob.MEMORY_MAX] = decode_size(values[LIMIT_KEY], f"{field} {LIMIT_KEY}")
    if HIGH_KEY in values:
        knobs[Knob.MEMORY_HIGH] = decode_size(values[HIGH_KEY], f"{field} {HIGH_KEY}")
    if MEMS_KEY in values:
        knobs[Knob.MEMS] = decode_nodes(values[MEMS_KEY], f"{field} {MEMS_KEY}")
    if OFFLOADING_KEY in values:
        size = parse_int64(values[OFFLOADING_KEY], f"{field} {OFFLOADING_KEY}")
        if SWAP_MAX_KEY in values:
            knobs[Knob.SWAP_MAX] = FULL if parse_bool(values[SWAP_MAX_KEY], f"{field} {SWAP_MAX_KEY}") else "0"
        if size > 0:
            knobs[Knob.MEMORY_RECLAIM] = str(size)
    return knobs


DYING_RULE = "memory_dying_reclaim"
"""Rule of requests to reclaim memory left behind by removed cgroups, which have a key of their own."""
CGROUP_MOUNT = "/sys/fs/cgroup"
"""Katalyst's memory plugin expects file-system paths with `dying_memcg_reclaim`, and paths below the mount with other keys."""


class ContainerRef(msgspec.Struct, frozen=True):
    """Pod uid and container name, by which the protocol identifies containers."""

    uid: str
    container: str


def encode_memory_advice(request: Any, memory: MemoryAdvice, pods: Iterable[Pod], headroom: Headroom | None) -> Any:
    """Return the GetAdviceResponse for the containers of a GetAdviceRequest. Raises UnusableMessage."""
    supported = supported_gates(request.wanted_feature_gates, "Memory", frozenset())
    containers = {
        container.cgroup: ContainerRef(pod.uid, container.name)
        for pod in pods
        for container in pod.containers
        if pod.uid in request.entries and container.name in request.entries[pod.uid].entries
    }
    result = svc.GetAdviceResponse(supported_feature_gates=supported)
    others: dict[str, dict[str, str]] = {}
    for knob_request in memory.knob_requests:
        ref = containers.get(knob_request.cgroup)
        if ref is not None:
            if values := _container_values(knob_request):
                entry = result.pod_entries[ref.uid].container_entries[ref.container]
                entry.calculation_result.values.update(values)
        elif values := _group_values(knob_request):
            path = f"{CGROUP_MOUNT}{knob_request.cgroup}" if DYING_KEY in values else knob_request.cgroup
            others.setdefault(path, {}).update(values)
    for pod_entry in result.pod_entries.values():
        for info in pod_entry.container_entries.values():
            _add_offloading_for_swap(info.calculation_result.values)
    for path, values in sorted(others.items()):
        _add_offloading_for_swap(values)
        result.extra_entries.append(extra_entry(path, values))
    if headroom is not None and headroom.memory_by_numa:
        # The plugin parses integers only.
        sizes = {node: int(size) for node, size in headroom.memory_by_numa.items()}
        result.extra_entries.append(extra_entry("", {HEADROOM_KEY: format_numbers_by_numa(sizes)}))
    return result


def encode_memory_request(pods: Iterable[Pod], state: CpusetState) -> Any:
    """Return the request to a foreign memory advisor: every container with an allocation, and its memory request in bytes."""
    request = svc.GetAdviceRequest()
    for pod in pods:
        entries = state.pod(pod.uid)
        for container in pod.containers:
            if container.name in entries:
                metadata = encode_metadata(pod, entries[container.name], container_memory_bytes(container))
                metadata.requestMilliQuantity, metadata.useMilliQuantity = 0, False
                request.entries[pod.uid].entries[container.name].CopyFrom(metadata)
    return request


def _container_values(request: KnobRequest) -> dict[str, str]:
    if request.knob is Knob.DROP_CACHE:
        return {DROP_CACHE_KEY: TRUE}
    if request.knob is Knob.MEMS:
        return {MEMS_KEY: request.value}
    return _shared_values(request)


def _group_values(request: KnobRequest) -> dict[str, str]:
    """Return values for a cgroup above containers, where the plugin handles neither caches nor NUMA nodes."""
    if request.reason.rule == DYING_RULE:
        return {DYING_KEY: TRUE}
    if request.knob is Knob.MEMORY_HIGH:
        return {HIGH_KEY: encode_size(request.value)}
    return _shared_values(request)


def _shared_values(request: KnobRequest) -> dict[str, str]:
    if request.knob is Knob.MEMORY_MAX:
        return {LIMIT_KEY: encode_size(request.value)}
    if request.knob is Knob.MEMORY_RECLAIM:
        return {OFFLOADING_KEY: request.value}
    if request.knob is Knob.SWAP_MAX:
        return {SWAP_MAX_KEY: FALSE if request.value == "0" else TRUE}
    return {}


def _add_offloading_for_swap(values: Any) -> None:
    """Add an empty offloading amount, without which the plugin ignores the swap limit."""
    if SWAP_MAX_KEY in values and OFFLOADING_KEY not in values:
        values[OFFLOADING_KEY] = "0"


REMOTE_POLICY = "katalyst"
_ADVICE_REASON = Reason(rule="remote_memory_advice", text="The external memory advisor requests it.")
_DYING_REASON = Reason(
    rule=DYING_RULE, text="The external memory advisor requests to reclaim memory of removed cgroups."
)
_UNKNOWN_REASON = Reason(
    rule="remote_memory_condition", text="Unknown: the external memory advisor does not report it."
)


def decode_memory_advice(answer: Any, pods: Sequence[Pod], reclaimable: Mapping[str, int]) -> MemoryAdvice:
    """Decode a GetAdviceResponse or ListAndWatchResponse.

    `reclaimable` has bytes by cgroup: the page cache of containers, and memory of removed members elsewhere, because the
    protocol has no amounts. Unlisted containers are skipped. Raises UnusableMessage.
    """
    if len(answer.pod_entries) + len(answer.extra_entries) > MAX_ENTRIES:
        raise UnusableMessage(f"pod_entries and extra_entries have more than {MAX_ENTRIES} entries")
    cgroups = {(pod.uid, container.name): container.cgroup for pod in pods for container in pod.containers}
    requests: list[KnobRequest] = []
    for uid, pod_entry in sorted(answer.pod_entries.items()):
        for name, info in sorted(pod_entry.container_entries.items()):
            field = f"pod_entries[{uid[:80]}].container_entries[{name[:80]}]"
            values = info.calculation_result.values
            knobs = decode_knobs(values, field)
            cgroup = cgroups.get((uid, name), "")
            if DROP_CACHE_KEY in values and parse_bool(values[DROP_CACHE_KEY], f"{field} {DROP_CACHE_KEY}"):
                knobs |= _reclaim_value(Knob.DROP_CACHE, reclaimable.get(cgroup, 0))
            if cgroup:
                requests += _knob_requests(cgroup, knobs)
    provision: Mapping[int, float] = {}
    headroom: Mapping[int, float] = {}
    for index, info in enumerate(answer.extra_entries):
        field, values = f"extra_entries[{index}]", info.calculation_result.values
        requests += _decode_group(info.cgroup_path, values, field, reclaimable)
        if BALANCE_KEY in values:
            balance = decode_balance(values[BALANCE_KEY], f"{field} {BALANCE_KEY}")
            requests += _decode_migrations(balance, cgroups)
        if RECLAIMED_SIZE_KEY in values:
            provision = parse_numbers_by_numa(values[RECLAIMED_SIZE_KEY], f"{field} {RECLAIMED_SIZE_KEY}")
        if HEADROOM_KEY in values:
            headroom = parse_numbers_by_numa(values[HEADROOM_KEY], f"{field} {HEADROOM_KEY}")
    count = len(pods_by_uid(pods))
    text = f"The external memory advisor requests {len(requests)} changes for {count} pods and cgroups above pods."
    return MemoryAdvice(
        policy=REMOTE_POLICY,
        headroom_bytes=sum(headroom.values()) if headroom else None,
        headroom_by_numa=headroom,
        headroom_reason=_ADVICE_REASON if headroom else _UNKNOWN_REASON,
        provision_by_numa=provision,
        condition=MemoryCondition(state=MemoryPressure.UNKNOWN, reason=_UNKNOWN_REASON),
        knob_requests=tuple(requests),
        reasons=(Reason(rule="remote_memory_advice", text=text, inputs={"wishes": len(requests)}),),
    )


def _knob_requests(cgroup: str, knobs: Mapping[Knob, str], reason: Reason = _ADVICE_REASON) -> list[KnobRequest]:
    return [KnobRequest(cgroup=cgroup, knob=knob, value=value, reason=reason) for knob, value in knobs.items()]


def _decode_group(
    path: str, values: Mapping[str, str], field: str, reclaimable: Mapping[str, int]
) -> Iterable[KnobRequest]:
    knobs = decode_knobs(values, field)
    cgroup = path.removeprefix(CGROUP_MOUNT)
    if (knobs or DYING_KEY in values) and (not cgroup.startswith("/") or ".." in cgroup.split("/")):
        raise UnusableMessage(f"{field}.cgroup_path: {quote(path)} is not an absolute cgroup path")
    requests = _knob_requests(cgroup, knobs)
    if DYING_KEY in values and parse_bool(values[DYING_KEY], f"{field} {DYING_KEY}"):
        size = _reclaim_value(Knob.MEMORY_RECLAIM, reclaimable.get(cgroup, 0))
        requests += _knob_requests(cgroup, size, _DYING_REASON)
    return requests


def _reclaim_value(knob: Knob, size: int) -> dict[Knob, str]:
    return {knob: str(size)} if size > 0 else {}


def _decode_migrations(balance: NumaBalance, cgroups: Mapping[tuple[str, str], str]) -> list[KnobRequest]:
    """Return migrations to the first possible destination node; the advisor repeats the request if it did not help."""
    requests = []
    for moved in balance.moved:
        cgroup = cgroups.get((moved.uid, moved.container))
        nodes = [node for node in balance.to if node in moved.to and node != balance.source]
        if cgroup is not None and nodes:
            requests += _knob_requests(cgroup, {Knob.MIGRATE_PAGES: f"{balance.source} {nodes[0]}"})
    return requests


def reclaimable_bytes_by_cgroup(snapshot: Snapshot) -> Mapping[str, int]:
    """Return reclaimable bytes by cgroup: the page cache of containers, and of other cgroups the memory that is charged to none
    of their existing children. Cgroups with an unmeasured child are left out."""
    containers = {container.cgroup for pod in snapshot.pods for container in pod.containers}
    children: dict[str, int | None] = {}
    for path, sample in snapshot.cgroups.items():
        parent = path.rpartition("/")[0]
        size = children.get(parent, 0)
        children[parent] = None if size is None or sample.memory_bytes is None else size + sample.memory_bytes
    reclaimable: dict[str, int] = {}
    for path, sample in snapshot.cgroups.items():
        if path in containers:
            reclaimable[path] = sample.memory_stat.get("total_cache", sample.memory_stat.get("file", 0))
        elif sample.memory_bytes is not None and (charged := children.get(path)) is not None:
            reclaimable[path] = max(sample.memory_bytes - charged, 0)
    return reclaimable

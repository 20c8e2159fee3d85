"""Encodes memory advice for a stock memory plugin, and decodes the advice of a stock memory advisor. Pure.
Keys and their meanings are those of Katalyst's memory QRM plugin. An answer is decoded as a whole or rejected as
a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

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
    """A container whose memory is to be moved."""

    uid: str
    container: str
    to: tuple[int, ...] = ()


class NumaBalance(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"to": "destNumaList", "source": "sourceNuma", "moved": "migrateContainers", "rss": "totalRSS"},
):
    """Value of `balance_numa_memory`; Katalyst's QRM tries its nodes in turn until `threshold` of `rss` bytes is moved."""

    to: tuple[int, ...] = ()
    source: int
    moved: tuple[MigratedContainer, ...] = ()
    rss: float = 0.0
    threshold: float = 0.0


def parse_bool(text: str, field: str) -> bool:
    """As Go's ParseBool takes it. Raises Unusable that names the field."""
    if text in _TRUE_WORDS:
        return True
    if text in _FALSE_WORDS:
        return False
    raise UnusableMessage(f"{field}: {text!r:.80} is neither true nor false")


def encode_size(value: str) -> str:
    return UNLIMITED if value == FULL else value


def decode_size(text: str, field: str) -> str:
    """Bytes of a limit; everything below nothing is no limit. Raises Unusable that names the field."""
    value = parse_int64(text, field)
    return FULL if value < 0 else str(value)


def decode_nodes(text: str, field: str) -> str:
    """A list of NUMA nodes in its one spelling. Raises Unusable that names the field."""
    try:
        nodes = parse_cpu_list(text)
    except ValueError as error:
        raise UnusableMessage(f"{field}: {str(error)[:200]}") from None
    if not nodes:
        raise UnusableMessage(f"{field}: names no NUMA node")
    return format_cpu_list(nodes)


def decode_balance(text: str, field: str) -> NumaBalance:
    """Raises Unusable that names the field."""
    try:
        found = msgspec.json.decode(text, type=NumaBalance)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise UnusableMessage(f"{field}: {text!r:.80} ({error})") from None
    for node in (found.source, *found.to, *(node for moved in found.moved for node in moved.to)):
        if not 0 <= node < 1024:
            raise UnusableMessage(f"{field}: {node} is no NUMA node")
    return found


def decode_knobs(values: Mapping[str, str], field: str) -> dict[Knob, str]:
    """What is asked of one cgroup by keys that stand for one knob each. Raises Unusable that names the field.

    `memory_offloading` gives up memory, and `swap_max` counts where it stands beside it alone, as Katalyst's QRM has it.
    """
    found: dict[Knob, str] = {}
    if LIMIT_KEY in values:
        found[Knob.MEMORY_MAX] = decode_size(values[LIMIT_KEY], f"{field} {LIMIT_KEY}")
    if HIGH_KEY in values:
        found[Knob.MEMORY_HIGH] = decode_size(values[HIGH_KEY], f"{field} {HIGH_KEY}")
    if MEMS_KEY in values:
        found[Knob.MEMS] = decode_nodes(values[MEMS_KEY], f"{field} {MEMS_KEY}")
    if OFFLOADING_KEY in values:
        size = parse_int64(values[OFFLOADING_KEY], f"{field} {OFFLOADING_KEY}")
        if SWAP_MAX_KEY in values:
            found[Knob.SWAP_MAX] = FULL if parse_bool(values[SWAP_MAX_KEY], f"{field} {SWAP_MAX_KEY}") else "0"
        if size > 0:
            found[Knob.MEMORY_RECLAIM] = str(size)
    return found


DYING_RULE = "memory_dying_reclaim"
"""Verdict of a wish to reclaim what removed members left, which has a key of its own."""
CGROUP_MOUNT = "/sys/fs/cgroup"
"""Katalyst's QRM takes that one key's cgroup for a path of the file system, and every other for one below the controllers'."""


class ContainerRef(msgspec.Struct, frozen=True):
    """A container by the names that the protocol has for it."""

    uid: str
    container: str


def encode_memory_advice(request: Any, memory: MemoryAdvice, pods: Iterable[Pod], headroom: Headroom | None) -> Any:
    """GetAdviceResponse to a GetAdviceRequest, of the containers that it names. Raises Unusable as `gates` does."""
    supported = supported_gates(request.wanted_feature_gates, "Memory", frozenset())
    places = {
        container.cgroup: ContainerRef(pod.uid, container.name)
        for pod in pods
        for container in pod.containers
        if pod.uid in request.entries and container.name in request.entries[pod.uid].entries
    }
    result = svc.GetAdviceResponse(supported_feature_gates=supported)
    others: dict[str, dict[str, str]] = {}
    for wish in memory.knob_requests:
        place = places.get(wish.cgroup)
        if place is not None:
            if values := _container_values(wish):
                made = result.pod_entries[place.uid].container_entries[place.container]
                made.calculation_result.values.update(values)
        elif values := _group_values(wish):
            path = f"{CGROUP_MOUNT}{wish.cgroup}" if DYING_KEY in values else wish.cgroup
            others.setdefault(path, {}).update(values)
    for its in result.pod_entries.values():
        for info in its.container_entries.values():
            _add_offloading_for_swap(info.calculation_result.values)
    for path, its in sorted(others.items()):
        _add_offloading_for_swap(its)
        result.extra_entries.append(extra_entry(path, its))
    if headroom is not None and headroom.memory_by_numa:
        # That plugin takes whole bytes alone.
        sizes = {node: int(size) for node, size in headroom.memory_by_numa.items()}
        result.extra_entries.append(extra_entry("", {HEADROOM_KEY: format_numbers_by_numa(sizes)}))
    return result


def encode_memory_request(pods: Iterable[Pod], state: CpusetState) -> Any:
    """What our QRM asks somebody else's memory advisor with: every placed container, and the bytes that it asks for."""
    request = svc.GetAdviceRequest()
    for pod in pods:
        known = state.pod(pod.uid)
        for container in pod.containers:
            if container.name in known:
                asked = container.reclaimed_memory_bytes or container.memory_request_bytes or 0
                made = encode_metadata(pod, known[container.name], asked)
                made.requestMilliQuantity, made.useMilliQuantity = 0, False
                request.entries[pod.uid].entries[container.name].CopyFrom(made)
    return request


def _container_values(wish: KnobRequest) -> dict[str, str]:
    if wish.knob is Knob.DROP_CACHE:
        return {DROP_CACHE_KEY: TRUE}
    if wish.knob is Knob.MEMS:
        return {MEMS_KEY: wish.value}
    return _shared_values(wish)


def _group_values(wish: KnobRequest) -> dict[str, str]:
    """What that plugin does to a cgroup that is no container's: neither caches nor NUMA nodes are among it."""
    if wish.reason.rule == DYING_RULE:
        return {DYING_KEY: TRUE}
    if wish.knob is Knob.MEMORY_HIGH:
        return {HIGH_KEY: encode_size(wish.value)}
    return _shared_values(wish)


def _shared_values(wish: KnobRequest) -> dict[str, str]:
    if wish.knob is Knob.MEMORY_MAX:
        return {LIMIT_KEY: encode_size(wish.value)}
    if wish.knob is Knob.MEMORY_RECLAIM:
        return {OFFLOADING_KEY: wish.value}
    if wish.knob is Knob.SWAP_MAX:
        return {SWAP_MAX_KEY: FALSE if wish.value == "0" else TRUE}
    return {}


def _add_offloading_for_swap(values: Any) -> None:
    """A wish for swap is heard beside an amount to offload alone, be it nothing."""
    if SWAP_MAX_KEY in values and OFFLOADING_KEY not in values:
        values[OFFLOADING_KEY] = "0"


REMOTE_POLICY = "katalyst"
_ADVICE_REASON = Reason(rule="remote_memory_advice", text="The memory advisor at the socket asks for it.")
_DYING_REASON = Reason(
    rule=DYING_RULE, text="The memory advisor at the socket has what removed members left reclaimed."
)
_UNKNOWN_REASON = Reason(
    rule="remote_memory_condition", text="Not known: the memory advisor at the socket does not say it."
)


def decode_memory_advice(answer: Any, pods: Sequence[Pod], left_bytes: Mapping[str, int]) -> MemoryAdvice:
    """What an answer (GetAdviceResponse, ListAndWatchResponse) says. `left_bytes` is the page cache of each container, by its
    cgroup, and what removed members left in other cgroups: the protocol says that it is to be given up, not how much.

    Containers that are not known are left out, they are gone or not seen yet. Raises Unusable that names the field.
    """
    if len(answer.pod_entries) + len(answer.extra_entries) > MAX_ENTRIES:
        raise UnusableMessage(f"pod_entries and extra_entries are {MAX_ENTRIES} together at the most")
    known = pods_by_uid(pods)
    cgroups = {(pod.uid, container.name): container.cgroup for pod in pods for container in pod.containers}
    wishes: list[KnobRequest] = []
    for uid, its in sorted(answer.pod_entries.items()):
        for name, info in sorted(its.container_entries.items()):
            field = f"pod_entries[{uid[:80]}].container_entries[{name[:80]}]"
            values = info.calculation_result.values
            found = decode_knobs(values, field)
            cgroup = cgroups.get((uid, name), "")
            if DROP_CACHE_KEY in values and parse_bool(values[DROP_CACHE_KEY], f"{field} {DROP_CACHE_KEY}"):
                found |= _reclaim_value(Knob.DROP_CACHE, left_bytes.get(cgroup, 0))
            wishes += (
                KnobRequest(cgroup=cgroup, knob=knob, value=value, reason=_ADVICE_REASON)
                for knob, value in found.items()
                if cgroup
            )
    provision: Mapping[int, float] = {}
    headroom: Mapping[int, float] = {}
    for index, info in enumerate(answer.extra_entries):
        field, values = f"extra_entries[{index}]", info.calculation_result.values
        wishes += _decode_group(info.cgroup_path, values, field, left_bytes)
        if BALANCE_KEY in values:
            asked = decode_balance(values[BALANCE_KEY], f"{field} {BALANCE_KEY}")
            wishes += _decode_migrations(asked, cgroups)
        if RECLAIMED_SIZE_KEY in values:
            provision = parse_numbers_by_numa(values[RECLAIMED_SIZE_KEY], f"{field} {RECLAIMED_SIZE_KEY}")
        if HEADROOM_KEY in values:
            headroom = parse_numbers_by_numa(values[HEADROOM_KEY], f"{field} {HEADROOM_KEY}")
    text = f"The memory advisor at the socket asks for {len(wishes)} things of {len(known)} pods and of cgroups above."
    return MemoryAdvice(
        policy=REMOTE_POLICY,
        headroom_bytes=sum(headroom.values()) if headroom else None,
        headroom_by_numa=headroom,
        headroom_reason=_ADVICE_REASON if headroom else _UNKNOWN_REASON,
        provision_by_numa=provision,
        condition=MemoryCondition(state=MemoryPressure.UNKNOWN, reason=_UNKNOWN_REASON),
        knob_requests=tuple(wishes),
        reasons=(Reason(rule="remote_memory_advice", text=text, inputs={"wishes": len(wishes)}),),
    )


def _decode_group(
    path: str, values: Mapping[str, str], field: str, left_bytes: Mapping[str, int]
) -> Iterable[KnobRequest]:
    found = decode_knobs(values, field)
    cgroup = path.removeprefix(CGROUP_MOUNT)
    if (found or DYING_KEY in values) and (not cgroup.startswith("/") or ".." in cgroup.split("/")):
        raise UnusableMessage(f"{field}.cgroup_path: {path!r:.80} is not the path of a cgroup below the root")
    wishes = [
        KnobRequest(cgroup=cgroup, knob=knob, value=value, reason=_ADVICE_REASON) for knob, value in found.items()
    ]
    if DYING_KEY in values and parse_bool(values[DYING_KEY], f"{field} {DYING_KEY}"):
        left = _reclaim_value(Knob.MEMORY_RECLAIM, left_bytes.get(cgroup, 0))
        wishes += (
            KnobRequest(cgroup=cgroup, knob=knob, value=value, reason=_DYING_REASON) for knob, value in left.items()
        )
    return wishes


def _reclaim_value(knob: Knob, size: int) -> dict[Knob, str]:
    return {knob: str(size)} if size > 0 else {}


def _decode_migrations(asked: NumaBalance, cgroups: Mapping[tuple[str, str], str]) -> list[KnobRequest]:
    """The first of the nodes that a container may go to; that advisor asks again where it did not help."""
    wishes = []
    for moved in asked.moved:
        cgroup = cgroups.get((moved.uid, moved.container))
        goals = [node for node in asked.to if node in moved.to and node != asked.source]
        if cgroup is not None and goals:
            wishes.append(
                KnobRequest(
                    cgroup=cgroup, knob=Knob.MIGRATE_PAGES, value=f"{asked.source} {goals[0]}", reason=_ADVICE_REASON
                )
            )
    return wishes


def reclaimable_bytes_by_cgroup(snapshot: Snapshot) -> Mapping[str, int]:
    """Bytes that can be given up, by cgroup: the page cache of containers, and of others what no living member is charged with.

    What is not measured is left out, and so is whoever has a member that is not.
    """
    containers = {container.cgroup for pod in snapshot.pods for container in pod.containers}
    members: dict[str, int | None] = {}
    for path, sample in snapshot.cgroups.items():
        above, size = path.rpartition("/")[0], members.get(path.rpartition("/")[0], 0)
        members[above] = None if size is None or sample.memory_bytes is None else size + sample.memory_bytes
    found: dict[str, int] = {}
    for path, sample in snapshot.cgroups.items():
        if path in containers:
            found[path] = sample.memory_stat.get("total_cache", sample.memory_stat.get("file", 0))
        elif sample.memory_bytes is not None and (inside := members.get(path)) is not None:
            found[path] = max(sample.memory_bytes - inside, 0)
    return found

"""What the memory protocol's keys mean, in the values of our knobs, and the other way. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent.qrm.protocol.common import Unusable, whole
from api.cpus import format_cpu_list, parse_cpu_list
from api.knobs import Knob

LIMIT, HIGH, DROP_CACHE, MEMS = "memory_limit_in_bytes", "memory_high", "drop_cache", "cpuset_mems"
RECLAIMED_SIZE, BALANCE, SWAP_MAX, OFFLOADING = (
    "reclaimed_memory_size", "balance_numa_memory", "swap_max", "memory_offloading"
)  # fmt: skip
DYING, HEADROOM = "dying_memcg_reclaim", "memory_numa_headroom"
TRUE, FALSE = "true", "false"
UNLIMITED = "-1"
FULL = "max"
_TRUE, _FALSE = (
    frozenset(("1", "t", "T", "true", "TRUE", "True")),
    frozenset(("0", "f", "F", "false", "FALSE", "False")),
)


class Moved(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"uid": "podUID", "container": "containerName", "to": "destNumaList"},
):
    """A container whose memory is to be moved."""

    uid: str
    container: str
    to: tuple[int, ...] = ()


class Balance(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"to": "destNumaList", "source": "sourceNuma", "moved": "migrateContainers", "rss": "totalRSS"},
):
    """Value of `balance_numa_memory`; Katalyst's QRM tries its nodes in turn until `threshold` of `rss` bytes is moved."""

    to: tuple[int, ...] = ()
    source: int
    moved: tuple[Moved, ...] = ()
    rss: float = 0.0
    threshold: float = 0.0


def truth(text: str, field: str) -> bool:
    """As Go's ParseBool takes it. Raises Unusable that names the field."""
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise Unusable(f"{field}: {text!r:.80} is neither true nor false")


def size_to_wire(value: str) -> str:
    return UNLIMITED if value == FULL else value


def size_from_wire(text: str, field: str) -> str:
    """Bytes of a limit; everything below nothing is no limit. Raises Unusable that names the field."""
    value = whole(text, field)
    return FULL if value < 0 else str(value)


def nodes_from_wire(text: str, field: str) -> str:
    """A list of NUMA nodes in its one spelling. Raises Unusable that names the field."""
    try:
        nodes = parse_cpu_list(text)
    except ValueError as error:
        raise Unusable(f"{field}: {str(error)[:200]}") from None
    if not nodes:
        raise Unusable(f"{field}: names no NUMA node")
    return format_cpu_list(nodes)


def balance_from_wire(text: str, field: str) -> Balance:
    """Raises Unusable that names the field."""
    try:
        found = msgspec.json.decode(text, type=Balance)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise Unusable(f"{field}: {text!r:.80} ({error})") from None
    for node in (found.source, *found.to, *(node for moved in found.moved for node in moved.to)):
        if not 0 <= node < 1024:
            raise Unusable(f"{field}: {node} is no NUMA node")
    return found


def known_knobs(values: Mapping[str, str], field: str) -> dict[Knob, str]:
    """What is asked of one cgroup by keys that stand for one knob each. Raises Unusable that names the field.

    `memory_offloading` gives up memory, and `swap_max` counts where it stands beside it alone, as Katalyst's QRM has it.
    """
    found: dict[Knob, str] = {}
    if LIMIT in values:
        found[Knob.MEMORY_MAX] = size_from_wire(values[LIMIT], f"{field} {LIMIT}")
    if HIGH in values:
        found[Knob.MEMORY_HIGH] = size_from_wire(values[HIGH], f"{field} {HIGH}")
    if MEMS in values:
        found[Knob.MEMS] = nodes_from_wire(values[MEMS], f"{field} {MEMS}")
    if OFFLOADING in values:
        size = whole(values[OFFLOADING], f"{field} {OFFLOADING}")
        if SWAP_MAX in values:
            found[Knob.SWAP_MAX] = FULL if truth(values[SWAP_MAX], f"{field} {SWAP_MAX}") else "0"
        if size > 0:
            found[Knob.MEMORY_RECLAIM] = str(size)
    return found

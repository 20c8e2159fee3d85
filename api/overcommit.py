"""Annotations of overcommitted nodes, in Katalyst's names, and the arithmetic of their amounts. Pure.
The controller writes ratios and overcommitted amounts, the admission webhook for Node statuses writes the original amounts
and applies the overcommitted ones, and the agent bounds the ratios that it recommends by those of its Node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

import msgspec

from api.quantity import MAX_QUANTITY, convert_quantity

ANNOTATION_PREFIX = "katalyst.kubewharf.io/"
NODE_POOL_LABEL = f"{ANNOTATION_PREFIX}overcommit_node_pool"
"""Node label whose value selects the NodeOvercommitConfig."""
CONFIG_KEY = "dioptase.io/overcommit-config"
"""Node annotation: name of the NodeOvercommitConfig in force. The controller removes its annotations only from nodes that have
this one, so ratios that an administrator wrote by hand stay."""
CPU_MANAGER_KEY = f"{ANNOTATION_PREFIX}overcommit_cpu_manager"
"""Annotation of a CustomNodeResource: the kubelet's CPU manager policy, `static` or `none`."""
MEMORY_MANAGER_KEY = f"{ANNOTATION_PREFIX}overcommit_memory_manager"
"""Annotation of a CustomNodeResource: the kubelet's memory manager policy, `Static` or `None`."""
GUARANTEED_CPUS_KEY = f"{ANNOTATION_PREFIX}guaranteed_cpus"
"""Annotation of a CustomNodeResource: CPUs that the static CPU manager has pinned."""
STATIC_CPU_MANAGER, STATIC_MEMORY_MANAGER = "static", "Static"
_RATIO = re.compile(r"\d{1,6}(?:\.\d{1,9})?", re.ASCII)
_BINARY_SUFFIXES = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")


class OvercommitKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Annotations of a Node for one resource."""

    ratio: str
    """Ratio of the NodeOvercommitConfig; also the key of the agent's recommended ratio on the CustomNodeResource."""
    realtime_ratio: str
    """Ratio that the agent recommends."""
    original_allocatable: str
    original_capacity: str
    overcommit_allocatable: str
    overcommit_capacity: str


def _keys(resource: str) -> OvercommitKeys:
    return OvercommitKeys(
        ratio=f"{ANNOTATION_PREFIX}{resource}_overcommit_ratio",
        realtime_ratio=f"{ANNOTATION_PREFIX}realtime_{resource}_overcommit_ratio",
        original_allocatable=f"{ANNOTATION_PREFIX}original_allocatable_{resource}",
        original_capacity=f"{ANNOTATION_PREFIX}original_capacity_{resource}",
        overcommit_allocatable=f"{ANNOTATION_PREFIX}overcommit_allocatable_{resource}",
        overcommit_capacity=f"{ANNOTATION_PREFIX}overcommit_capacity_{resource}",
    )


OVERCOMMIT_KEYS: Mapping[str, OvercommitKeys] = {name: _keys(name) for name in ("cpu", "memory")}
"""Annotations by resource. Only these resources can be overcommitted."""
CPU_RATIO_KEY, MEMORY_RATIO_KEY = OVERCOMMIT_KEYS["cpu"].ratio, OVERCOMMIT_KEYS["memory"].ratio


def parse_ratio(text: str) -> Decimal | None:
    """Parse a ratio of at least 1 such as `1.5`. Returns None for any other text, also for a ratio below 1, which would remove
    capacity."""
    ratio = Decimal(text) if _RATIO.fullmatch(text) else Decimal(0)
    return ratio if ratio >= 1 else None


def effective_ratio(annotations: Mapping[str, str], keys: OvercommitKeys) -> Decimal:
    """Return the ratio of a Node: the smaller one of the configured and the recommended ratio, at least 1.

    Without a configured ratio, or with an invalid one of the two, it is 1.
    """
    ratio = parse_ratio(annotations.get(keys.ratio, "1")) or Decimal(1)
    realtime = annotations.get(keys.realtime_ratio)
    return ratio if realtime is None else min(ratio, parse_ratio(realtime) or Decimal(1))


def overcommit_cpu(original: str, ratio: Decimal, guaranteed_cpus: int = 0) -> str:
    """Multiply a CPU quantity, without the CPUs that are pinned, because two pods cannot share these. Truncated to milli-CPUs.

    Raises ValueError for an invalid quantity.
    """
    millis = int(convert_quantity(original) * 1000)
    pinned = min(max(guaranteed_cpus, 0) * 1000, millis)
    result = min(int((millis - pinned) * ratio) + pinned, MAX_QUANTITY)
    return f"{result}m" if result % 1000 else str(result // 1000)


def overcommit_memory(original: str, ratio: Decimal) -> str:
    """Multiply a memory quantity, truncated to bytes, in the notation of the original: `1Gi` or bytes.

    Raises ValueError for an invalid quantity.
    """
    result = min(int(convert_quantity(original) * ratio), MAX_QUANTITY)
    if not original.endswith("i"):
        return str(result)
    power = 0
    while result and result % 1024 == 0 and power < len(_BINARY_SUFFIXES) - 1:
        result, power = result // 1024, power + 1
    return f"{result}{_BINARY_SUFFIXES[power]}"

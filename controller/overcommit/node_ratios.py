"""Computes the overcommit annotations of a Node from its NodeOvercommitConfig and its agent's CustomNodeResource. Pure.
Katalyst computes them in pkg/controller/overcommit/node/node.go. Differences: from a Node that no configuration matches the
annotations are removed, while Katalyst sets the ratio 1; and if more CPUs are pinned than the Node has, the surplus does not
lower the amount.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal

from api.overcommit import (
    CONFIG_KEY,
    CPU_MANAGER_KEY,
    GUARANTEED_CPUS_KEY,
    NODE_POOL_LABEL,
    OVERCOMMIT_KEYS,
    STATIC_CPU_MANAGER,
    OvercommitKeys,
    effective_ratio,
    overcommit_cpu,
    overcommit_memory,
    parse_ratio,
)
from api.text import quote
from controller.kinds import Noc
from controller.object_events import ObjectWarning
from kube.objects import PartialObjectMetadata

NO_OVERCOMMIT = "1"
_MAX_CPU_DIGITS = 6


def _written_keys(keys: OvercommitKeys) -> tuple[str, ...]:
    return keys.ratio, keys.realtime_ratio, keys.overcommit_allocatable, keys.overcommit_capacity


OWN_KEYS = (CONFIG_KEY, *(key for keys in OVERCOMMIT_KEYS.values() for key in _written_keys(keys)))
"""Annotations of a Node that the controller writes. The webhook writes the original amounts, and retains them."""
INPUT_KEYS = frozenset(
    (
        *OWN_KEYS,
        *(key for keys in OVERCOMMIT_KEYS.values() for key in (keys.original_allocatable, keys.original_capacity)),
    )
)
"""Annotations of a Node that the result depends on."""
RECOMMENDED_KEYS = frozenset((CPU_MANAGER_KEY, GUARANTEED_CPUS_KEY, *(keys.ratio for keys in OVERCOMMIT_KEYS.values())))
"""Annotations of a CustomNodeResource that the result depends on."""


def resolve_configs(configs: Iterable[Noc]) -> dict[str, Noc]:
    """Return the configuration in force by pool. If a pool has several, the newest is in force, as in Katalyst.

    Creation times have a resolution of one second, so objects with equal times are ordered by name. Objects that are being
    deleted are not in force, even if a finalizer retains them.
    """
    existing = [config for config in configs if config.metadata.deletion_timestamp is None]
    by_age = sorted(existing, key=lambda config: (config.metadata.creation_timestamp or "", config.metadata.name))
    return {config.spec.node_overcommit_selector_val: config for config in by_age}


def config_of(node: PartialObjectMetadata, in_force: Mapping[str, Noc]) -> Noc | None:
    """Return the configuration of the Node's pool; None without one."""
    pool = node.metadata.labels.get(NODE_POOL_LABEL)
    return None if pool is None else in_force.get(pool)


def matched_nodes(nodes: Iterable[PartialObjectMetadata], in_force: Mapping[str, Noc]) -> dict[str, list[str]]:
    """Return the names of the matched Nodes, sorted, by the name of the configuration in force."""
    names: dict[str, list[str]] = {config.metadata.name: [] for config in in_force.values()}
    for node in nodes:
        if config := config_of(node, in_force):
            names[config.metadata.name].append(node.metadata.name)
    return {config: sorted(members) for config, members in names.items()}


def annotation_changes(
    node: PartialObjectMetadata, config: Noc | None, recommended: Mapping[str, str]
) -> dict[str, str | None]:
    """Return the changes of the Node's annotations, None for those to remove. `recommended` are the annotations of its
    CustomNodeResource."""
    current = node.metadata.annotations
    if config is None:
        # If the annotation with the configuration's name is missing, an administrator wrote the ratios.
        return {key: None for key in OWN_KEYS if key in current} if CONFIG_KEY in current else {}
    desired = node_annotations(config, current, recommended)
    changes: dict[str, str | None] = {key: text for key, text in desired.items() if current.get(key) != text}
    return changes | {key: None for key in OWN_KEYS if key in current and key not in desired}


def node_annotations(config: Noc, node: Mapping[str, str], recommended: Mapping[str, str]) -> dict[str, str]:
    """Return the controller's annotations of a Node. `node` are its current annotations.

    The overcommitted amounts are computed from the original amounts that the webhook stores. The amounts in the Node's status
    may be overcommitted already, and would be multiplied twice.
    """
    result = {CONFIG_KEY: config.metadata.name}
    for resource, keys in OVERCOMMIT_KEYS.items():
        text = config.spec.resource_overcommit_ratio.get(resource, NO_OVERCOMMIT)
        result[keys.ratio] = NO_OVERCOMMIT if parse_ratio(text) is None else text
        if keys.ratio in recommended:
            realtime = recommended[keys.ratio]
            result[keys.realtime_ratio] = NO_OVERCOMMIT if parse_ratio(realtime) is None else realtime
        ratio = effective_ratio(result, keys)
        guaranteed_cpus = _guaranteed_cpus(recommended) if resource == "cpu" else 0
        originals = (node.get(keys.original_allocatable), node.get(keys.original_capacity))
        amounts = [None if text is None else _overcommit(resource, text, ratio, guaranteed_cpus) for text in originals]
        if None not in amounts:
            result[keys.overcommit_allocatable], result[keys.overcommit_capacity] = map(str, amounts)
    return result


def config_warnings(config: Noc, in_force: Mapping[str, Noc]) -> list[ObjectWarning]:
    """Return the problems of a configuration: ratios without effect, and a newer configuration for the same pool."""
    warnings = []
    for resource, text in sorted(config.spec.resource_overcommit_ratio.items()):
        field = f"spec.resourceOvercommitRatio.{resource}"
        if resource not in OVERCOMMIT_KEYS:
            supported = " and ".join(OVERCOMMIT_KEYS)
            warnings.append(f"{quote(field, 120)} has no effect: only {supported} can be overcommitted; remove it")
        elif parse_ratio(text) is None:
            warnings.append(
                f"{field}: {quote(text, 60)} counts as 1, so that the nodes are not overcommitted; write a number of at least 1"
                " such as 1.5"
            )
    result = [ObjectWarning("InvalidRatio", "Ignore", text) for text in warnings]
    pool = config.spec.node_overcommit_selector_val
    newest = in_force.get(pool)
    if newest is not None and newest.metadata.name != config.metadata.name:
        text = (
            f"spec.nodeOvercommitSelectorVal: {quote(pool, 80)} is also the pool of the newer {newest.metadata.name}, which"
            " is in force; delete one of them"
        )
        result.append(ObjectWarning("Superseded", "Ignore", text))
    return result


def _overcommit(resource: str, original: str, ratio: Decimal, guaranteed_cpus: int) -> str | None:
    try:
        return (
            overcommit_cpu(original, ratio, guaranteed_cpus)
            if resource == "cpu"
            else overcommit_memory(original, ratio)
        )
    except ValueError:
        return None


def _guaranteed_cpus(recommended: Mapping[str, str]) -> int:
    """CPUs that the static CPU manager pins; 0 if the annotation is invalid, as in Katalyst."""
    text = recommended.get(GUARANTEED_CPUS_KEY, "")
    is_number = text.isascii() and text.isdecimal() and len(text) <= _MAX_CPU_DIGITS
    return int(text) if is_number and recommended.get(CPU_MANAGER_KEY) == STATIC_CPU_MANAGER else 0

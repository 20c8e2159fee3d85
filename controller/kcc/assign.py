"""Which object a node gets its configuration from. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from controller.kcc.targets import Class, Target


def match(node: str, labels: Mapping[str, str], targets: Iterable[Target]) -> Target | None:
    """Node names before selectors, among selectors the highest priority, then the object for all.

    Of objects that may stand together (`targets.conflicts`) no two have the same claim to a node.
    """
    return max((target for target in targets if _claims(target, node, labels)), key=_rank, default=None)


def _rank(target: Target) -> tuple[int, int]:
    return target.kind.value, target.priority if target.kind is Class.LABELS else 0


def _claims(target: Target, node: str, labels: Mapping[str, str]) -> bool:
    if target.kind is Class.NODES:
        return node in target.node_names
    return target.kind is Class.GLOBAL or target.selector.matches(labels)

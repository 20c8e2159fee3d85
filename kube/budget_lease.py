"""Counts evictions in the Lease that holds the cluster's eviction budget; see api.eviction_budget."""

from __future__ import annotations

from api.eviction_budget import BUDGET_ANNOTATION, exhausted_reason, format_budget, parse_budget, with_eviction
from kube.client import KubeClient
from kube.errors import ApiError
from kube.objects import LEASE_METADATA

MAX_TRIES = 5
"""Attempts of a compare-and-swap that loses against other clients."""


async def count_eviction(client: KubeClient, lease_key: str, node: str, *, forced: bool = False) -> str:
    """Count an eviction of a node in a Lease, `NAMESPACE/NAME`; return why it is not allowed, empty if it is.

    A `forced` eviction is counted even if the budget is exhausted. Raises ApiError and ApiUnreachable; then it is unknown
    whether the eviction was counted.
    """
    for tries_left in range(MAX_TRIES - 1, -1, -1):
        lease = await client.get(LEASE_METADATA, lease_key)
        budget = parse_budget(lease.metadata.annotations)
        reason = exhausted_reason(budget, node)
        if budget is None or (reason and not forced):
            return reason
        text = format_budget(with_eviction(budget, node))
        metadata = {"resourceVersion": lease.metadata.resource_version, "annotations": {BUDGET_ANNOTATION: text}}
        try:
            await client.merge_patch(LEASE_METADATA, lease_key, {"metadata": metadata})
        except ApiError as error:
            if not error.conflict or tries_left == 0:
                raise
        else:
            return ""
    raise AssertionError("unreachable: the last try returns or raises")

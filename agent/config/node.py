"""What a cluster would say of this node, on a node without one."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """In the place of the Node object."""

    annotations: Mapping[str, str] = {}
    """A power alert (power-alert, power-budget, power-alert-time, power-internal-op) for `power`, and bounds of
    overcommitment (katalyst.kubewharf.io/cpu_overcommit_ratio and memory_overcommit_ratio) for `overcommit`."""

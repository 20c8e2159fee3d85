"""How much can be promised to reclaimed pods: what regions leave, what the pool supplies, Koordinator's sums."""

from __future__ import annotations

from agent.advisor.headroom.region import pool_cores, region_cores

__all__ = ["pool_cores", "region_cores"]

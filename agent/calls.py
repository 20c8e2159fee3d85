"""How calls over sockets ended since this process started. A module of its own: who counts nothing loads no gRPC."""

from __future__ import annotations

from collections import Counter

CALLS: Counter[tuple[str, str, str]] = Counter()
"""By side (`made` by us, or `served`), method (`cpuadvisor.CPUAdvisor.GetAdvice`) and gRPC's name of the code (`OK`). Methods
are those of our descriptors, so there are not many."""

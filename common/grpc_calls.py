"""Counts of gRPC calls by side, method and status code since the process started.
Separate from common.grpc_unix so that reading the counts does not import grpc.
"""

from __future__ import annotations

from collections import Counter

CALL_COUNTS: Counter[tuple[str, str, str]] = Counter()
"""By side (`made` by us, or `served`), method (`cpuadvisor.CPUAdvisor.GetAdvice`) and gRPC's name of the code (`OK`). Methods
are those of our descriptors, so there are not many."""

"""Counts of gRPC calls by side, method and status code since the process started.
Separate from common.grpc_unix so that reading the counts does not import grpc.
"""

from __future__ import annotations

from collections import Counter

CALL_COUNTS: Counter[tuple[str, str, str]] = Counter()
"""Number of calls by side (`made` by this process, or `served`), method (`cpuadvisor.CPUAdvisor.GetAdvice`) and status
code (`OK`). Bounded, because methods are those of our descriptors."""

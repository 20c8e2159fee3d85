"""A verdict in words: the sentence, the rule with its threshold, and every input with the source that it came from. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from agent.sense.cadence import PERIOD_NS, Cadence
from api.knobs import Verdict
from cli import words

_SLOW, _RARE = (f", up to {PERIOD_NS[cadence] // 1_000_000_000} s old" for cadence in (Cadence.SLOW, Cadence.RARE))
_BY_SOURCE = {
    "waits": ("wait_ms", "own_wait_ms", "waits", "cgroup"),
    "blame": ("blame_ratio", "other_culprit"),
    "cgroups": (
        "reclaimed_use_cores", "requirement_cores", "estimate_cores", "use_cores", "reclaim_use_cores", "other_pods_cores",
        "usage_bytes", "group_bytes", "members_bytes", "throttled", "cgroups", "avg10", "mean", "psi_some_avg60",
        "leaving_bytes",
    ),
    f"files of cgroups{_SLOW}": ("need_bytes", "largest_bytes"),
    f"limits{_RARE}": ("cap_bytes",),
    "node": ("cache_buffer_bytes", "busy_cores", "node_used", "watts"),
    # Of the whole node some of them are as new as the round; of a NUMA node they are not.
    f"files of the node{_SLOW}": (
        "free_bytes", "total_bytes", "low_bytes", "min_bytes", "scale_factor", "watermark_bytes", "reclaimable_bytes",
        "pages_per_s", "free",
    ),
    "pods": (
        "request_cores", "request_cpus", "request_bytes", "limit_bytes", "pods", "containers",
        "reclaimed_requests_bytes", "online_requests_kept_bytes", "requested",
    ),
    "threads": ("runnable",),
    "topology": ("cpu_list", "capacity_cores", "reclaim_cpus", "supply_cores"),
    "the settings": (
        "quantile", "reserved_for_allocate_cores", "reserved_for_reclaim_cores", "min_critical_bytes", "reserve_bytes",
        "min_cache_ratio", "percent", "factor", "budget_watts",
    ),
    "the rounds before": (
        "lent_before_cores", "before_cpus", "last_cores", "last_bytes", "asked_before_bytes", "before_us", "rounds", "for_s",
        "samples", "soft_part", "hard_part", "use", "system_ratio", "lowered_percent",
    ),
    "what is advertised": ("promised",),
}  # fmt: skip
INPUT_SOURCES = {name: source for source, names in _BY_SOURCE.items() for name in names}
"""Where an input of a verdict comes from: a source of the snapshot, and how old it was at the most if not every round reads it;
the settings, or memory of the policy. What is in no row is worked out from the others."""


def verdict_text(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """Label and text of each part."""
    yield "because", words.clean(verdict.text)
    limit = "" if verdict.threshold is None else f", threshold {number(verdict.threshold)}"
    yield "rule", f"{words.clean(verdict.rule)}{limit}"
    for i, (name, value) in enumerate(verdict.inputs.items()):
        source = INPUT_SOURCES.get(name, "")
        known = "not known" if value is None else words.clean(number(value) if not isinstance(value, str) else value)
        yield "" if i else "inputs", f"{words.clean(name)} {known}" + (f" (from {source})" if source else "")


def number(value: float) -> str:
    """Six figures at most, and whole numbers with all of theirs."""
    return f"{int(value):,}" if float(value).is_integer() and abs(value) >= 1e6 else f"{value:g}"

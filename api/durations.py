"""Durations as Go writes them. Pure."""

from __future__ import annotations

import re

_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_DURATION = re.compile(rf"[-+]?(?:{_PART.pattern})+", re.ASCII)
_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST_S = 292 * 365.25 * 86_400
"""Go counts nanoseconds in 63 bits."""


def duration_s(text: str) -> float:
    """Seconds of a Go duration such as `1h30m` or `500ms`. Raises ValueError that says how one is written."""
    if text in ("0", "+0", "-0"):
        return 0.0
    if not _DURATION.fullmatch(text):
        raise ValueError(f"{text!r:.60} is no duration such as 90s, 10m or 1h30m")
    try:
        total_s = sum(float(number) * _UNIT_S[unit] for number, unit in _PART.findall(text))
    except OverflowError:
        total_s = _LONGEST_S + 1
    if total_s > _LONGEST_S:
        raise ValueError(f"{text!r:.60} is longer than a duration can be; 292 years are the most")
    return -total_s if text.startswith("-") else total_s

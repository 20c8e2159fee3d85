"""Parses Kubernetes quantities (`500m`, `1Gi`) and Go durations (`1h30m`), and formats amounts as text. Pure.
Invalid text raises ValueError that quotes it.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from api.text import quote

MAX_QUANTITY = (1 << 63) - 1
"""Largest quantity of the API server, an int64."""
_QUANTITY = re.compile(r"(\d{1,28}(?:\.\d{1,9})?)([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d{1,2}|)", re.ASCII)
"""28 digits: MAX_QUANTITY in nano units, which the API server stores as such."""
_SCALE = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("0.001"), "": Decimal(1),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12), "P": Decimal(10**15),
    "E": Decimal(10**18),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40), "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}  # fmt: skip


def parse_quantity(text: str) -> Decimal:
    """Parse a Kubernetes quantity: `500m` is 0.5, `1Gi` is 1073741824, `1e3` is 1000. Never negative.

    Raises ValueError that quotes the text.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{quote(text)} is not a quantity; write a number such as 2, 0.5, 500m or 1Gi")
    scale = _SCALE.get(match[2])
    return Decimal(match[1]) * (Decimal(f"1{match[2]}") if scale is None else scale)


def convert_quantity(value: Any) -> Decimal:
    """Convert a quantity from JSON or YAML: text or a plain number.

    Raises ValueError that quotes the value if it is invalid or exceeds MAX_QUANTITY, which protobuf peers cannot represent.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{quote(value)} is not a quantity; write a number such as 2, 0.5, 500m or 1Gi")
    text = f"{value:.9f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    quantity = parse_quantity(text)
    if quantity > MAX_QUANTITY:
        raise ValueError(f"{text} is more than any machine has; write what is needed")
    return quantity


_DURATION_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_DURATION = re.compile(rf"[-+]?(?:{_DURATION_PART.pattern})+", re.ASCII)
_DURATION_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_MAX_DURATION_S = 292 * 365.25 * 86_400
"""Go counts nanoseconds in 63 bits."""


def parse_duration_s(text: str) -> float:
    """Parse a Go duration such as `1h30m` or `500ms` into seconds. Raises ValueError that shows the notation."""
    if text in ("0", "+0", "-0"):
        return 0.0
    if not _DURATION.fullmatch(text):
        raise ValueError(f"{quote(text, 60)} is no duration such as 90s, 10m or 1h30m")
    try:
        total_s = sum(float(number) * _DURATION_UNIT_S[unit] for number, unit in _DURATION_PART.findall(text))
    except OverflowError:
        total_s = _MAX_DURATION_S + 1
    if total_s > _MAX_DURATION_S:
        raise ValueError(f"{quote(text, 60)} is longer than a duration can be; 292 years are the most")
    return -total_s if text.startswith("-") else total_s


def format_cores(cores: float) -> str:
    """Return cores as text: `2.50 cores`."""
    return f"{cores:.2f} cores"


def format_bytes(value: float) -> str:
    """Return bytes as text in the largest unit of which there is one, but at least MiB: `1.50 GiB`, `81.9 MiB`."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB")):
        if value >= unit:
            return f"{value / unit:.2f} {name}"
    return f"{value / (1 << 20):.1f} MiB"


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun: `1 pod`, `2 pods`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

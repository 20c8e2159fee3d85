"""Times as the API server writes them: RFC 3339 in UTC, with microseconds in leases."""

from __future__ import annotations

from datetime import UTC, datetime


def moment(text: str) -> float:
    """Seconds since the epoch. Raises ValueError for what is no RFC 3339 time with a zone."""
    try:
        parsed = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r:.60} is no time such as 2026-01-31T09:30:00Z") from None
    if parsed.tzinfo is None:
        raise ValueError(f"{text!r:.60} has no time zone; end it with Z")
    return parsed.timestamp()


def stamp(at_s: float, *, micro: bool = False) -> str:
    """Seconds since the epoch as RFC 3339; `micro` as leases have it."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ" if micro else "%Y-%m-%dT%H:%M:%SZ")

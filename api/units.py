"""Factors between units of time and of memory, and the range of counters."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
NS_PER_US = 1_000
US_PER_S = 1_000_000
KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""A counter or a size that another program sends: an integer of JSON may have 400 digits, which no division survives."""

"""Factors between units of time and of memory."""

from __future__ import annotations

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
NS_PER_US = 1_000
US_PER_S = 1_000_000
KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

"""What `dioptase doctor` finds: one line per thing that a node can or cannot do."""

from __future__ import annotations

import msgspec


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One finding; `remedy` says what to do where `ok` is false, or something optional is lacking, and is empty otherwise."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    checked: bool = True
    """False where there was nothing to ask: then nobody knows, and `remedy` says what to do to find out."""


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What a running agent says of its node, for whoever asks from afar."""

    version: str
    """The agent's own."""
    checks: tuple[Check, ...]

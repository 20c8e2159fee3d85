"""What `dioptase doctor` finds: one line per thing that a node can or cannot do."""

from __future__ import annotations

import msgspec


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One finding; `remedy` says what to do where `ok` is false, and is empty otherwise."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""

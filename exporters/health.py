"""What `/healthz` and `/readyz` say, for the server and for whoever asks it."""

from __future__ import annotations

import msgspec


class Failed(msgspec.Struct, frozen=True):
    """A source that gave nothing in the latest round."""

    source: str
    error: str
    remedy: str


class Health(msgspec.Struct, frozen=True):
    """Body of `/healthz` and `/readyz` while all is well."""

    age_s: float
    failed: tuple[Failed, ...]
    banner: tuple[str, ...]

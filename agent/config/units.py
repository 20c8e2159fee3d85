"""Units of settings, each with the bounds that any value of it has to keep."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Seconds = Annotated[float, Meta(gt=0, le=3600)]
Cores = Annotated[float, Meta(ge=0, le=8192)]
Ratio = Annotated[float, Meta(gt=0, le=1)]

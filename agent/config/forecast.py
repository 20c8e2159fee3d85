"""Settings of the peak predictor and of the headroom policy `forecast`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class ForecastConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """How sure a forecast has to be, and how much history it takes to be believed."""

    method: Literal["calibrated", "koordinator", "n-sigma", "rc-like", "max"] = "calibrated"
    """`calibrated` steers its margin by its misses and keeps score. The others are there to be compared with, in a replay or
    a simulation: Koordinator's 95th percentile and a tenth, mean and five deviations, 99th percentile and maximum of a day."""
    miss_ratio: Annotated[float, Meta(ge=0.005, le=0.2)] = 0.055
    """Share of forecasts that the next hour's peak may exceed; a point less of it lends about a point of the node less."""
    min_history_s: Annotated[float, Meta(ge=3600, le=259_200)] = 86_400.0
    """With less history than this, no more is promised than Katalyst's formula allows (Koordinator waits a day too)."""
    stale_s: Annotated[float, Meta(ge=300, le=3600)] = 900.0
    """Without a sample for so long, the forecast is the highest peak remembered and Katalyst's formula holds."""

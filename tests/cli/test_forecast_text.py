"""Forecasts in words."""

from __future__ import annotations

import msgspec
import pytest

from api.forecast import Forecast
from api.knobs import Reason
from cli.formats import ABSENT, forecast_text
from tests.builders.full_node import FORECASTS

CPU, MEMORY = FORECASTS
UNKNOWN = msgspec.structs.replace(
    CPU,
    forecast=msgspec.structs.replace(
        CPU.forecast,
        peak=None,
        reason=Reason(rule="no_history", text="Less than 10 minutes of use are known, too little for a forecast."),
    ),
)


MISSED = "the peak exceeded {} of the last day's forecasts, 5.5 % are allowed"
ALARM = "memory: at most 2.93 GiB within the hour, 1.95 GiB now, not trusted yet; above every forecast within the last hour; "


@pytest.mark.parametrize(
    ("outlook", "text"),
    [
        (CPU, f"cpu: at most 2.25 cores within the hour, 1.50 cores now; {MISSED.format('6.3 %')}"),
        (MEMORY, f"{ALARM}{MISSED.format('25 %')}"),
        (
            msgspec.structs.replace(CPU, score=None, used=None),
            f"cpu: at most 2.25 cores within the hour, {ABSENT} cores now",
        ),
        (UNKNOWN, "cpu: Less than 10 minutes of use are known, too little for a forecast."),
    ],
)
def test_a_forecast_in_words(outlook: Forecast, text: str) -> None:
    assert forecast_text(outlook) == text
